"""Sentences in English and German that mean the same, and which of them are held out.

The sentences of the test are drawn first, and no training sentence has a run of four words that occurs in one
of them. Every such run has two open places or more, so few sentences are lost.

    sentence(random.Random(1)).en     # "The old gardener finally sold twelve lamps in Vienna."
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import NamedTuple

from recipes.whisper.actions import (
    FAMILY,
    GIVEN,
    MANNERS,
    TIMES,
    VERBS,
    Language,
    number_word,
)
from recipes.whisper.things import ADJECTIVES, CITIES, NOUNS, PEOPLE, SPOTS, Noun

TEST_SEED = 20_26
TEST_SENTENCES = 250
LANGUAGES: tuple[Language, ...] = ("en", "de")
_ARTICLES = {
    ("def", "nom"): {"m": "der", "f": "die", "n": "das"},
    ("def", "acc"): {"m": "den", "f": "die", "n": "das"},
    ("ein", "nom"): {"m": "ein", "f": "eine", "n": "ein"},
    ("ein", "acc"): {"m": "einen", "f": "eine", "n": "ein"},
}
_ENDINGS = {
    ("def", "nom"): {"m": "e", "f": "e", "n": "e"},
    ("def", "acc"): {"m": "en", "f": "e", "n": "e"},
    ("ein", "nom"): {"m": "er", "f": "e", "n": "es"},
    ("ein", "acc"): {"m": "en", "f": "e", "n": "es"},
}
_POSSESSIVES = (("my", "mein"), ("his", "sein"), ("her", "ihr"), ("our", "unser"))


class Pair(NamedTuple):
    """The same sentence in both languages."""

    en: str
    de: str


def sentence(rng: random.Random) -> Pair:
    """A sentence of 5 to 16 words; the templates are drawn evenly."""
    pair = rng.choice(_TEMPLATES)(rng)
    return Pair(*(text[0].upper() + text[1:] for text in pair))


def words(text: str) -> list[str]:
    """Words in lower case, without punctuation: what error rates and runs of words are counted in."""
    return re.findall(r"[^\W_]+", text.lower())


def runs(text: str) -> set[tuple[str, ...]]:
    """Runs of four words; all the words of a shorter sentence."""
    found = words(text)
    return {tuple(found[i : i + 4]) for i in range(max(1, len(found) - 3))}


def unseen_sentences(language: Language) -> list[str]:
    """The sentences that are never trained on: ``TEST_SENTENCES`` of each language."""
    rng = random.Random(f"{TEST_SEED} {language}")
    found: dict[str, None] = {}
    while len(found) < TEST_SENTENCES:
        found[getattr(sentence(rng), language)] = None
    return list(found)


def held_out_runs() -> frozenset[tuple[str, ...]]:
    """Runs of four words of all test sentences."""
    return frozenset(
        run for language in LANGUAGES for text in unseen_sentences(language) for run in runs(text)
    )


def training_sentences(seed: int) -> Iterator[Pair]:
    """Endless training sentences, other for each seed."""
    rng, held_out = random.Random(f"train {seed}"), held_out_runs()
    while True:
        pair = sentence(rng)
        if held_out.isdisjoint(runs(pair.en)) and held_out.isdisjoint(runs(pair.de)):
            yield pair


def vocabulary(count: int = 40_000) -> dict[Language, set[str]]:
    """Words of the first training sentences."""
    found: dict[Language, set[str]] = {"en": set(), "de": set()}
    for pair, _ in zip(training_sentences(0), range(count), strict=False):
        for language in LANGUAGES:
            found[language].update(words(getattr(pair, language)))
    return found


def _a(word: str) -> str:
    vowel = word[0] in "aeio" or word.startswith(("ugly", "umb", "unc"))
    return f"{'an' if vowel else 'a'} {word}"


def _noun(rng: random.Random, nouns: tuple[Noun, ...], case: str) -> Pair:
    """With an article or a possessive, and mostly an adjective."""
    noun, adjective = rng.choice(nouns), rng.choice(ADJECTIVES)
    plain = rng.random() < 0.3
    owner = rng.choice((None, None, *_POSSESSIVES))
    kind = "ein" if owner or rng.random() < 0.5 else "def"
    article = _ARTICLES[kind, case][noun.gender]
    if owner is not None:
        article = owner[1] + article[3:]
    ending = _ENDINGS[kind, case][noun.gender]
    de = f"{article} {noun.de[0]}" if plain else f"{article} {_declined(adjective.de, ending)} {noun.de[0]}"
    name = noun.en[0] if plain else f"{adjective.en} {noun.en[0]}"
    en = f"{owner[0]} {name}" if owner else (_a(name) if kind == "ein" else f"the {name}")
    return Pair(en, de)


def _declined(stem: str, ending: str) -> str:
    return stem + ending


def _many(rng: random.Random) -> Pair:
    noun, value = rng.choice(NOUNS), rng.choice((rng.randint(2, 12), rng.randint(2, 99), rng.randint(2, 999)))
    adjective = rng.choice(ADJECTIVES)
    if rng.random() < 0.5:
        return Pair(f"{number_word(value, 'en')} {noun.en[1]}", f"{number_word(value, 'de')} {noun.de[1]}")
    return Pair(
        f"{number_word(value, 'en')} {adjective.en} {noun.en[1]}",
        f"{number_word(value, 'de')} {_declined(adjective.de, 'e')} {noun.de[1]}",
    )


def _who(rng: random.Random) -> Pair:
    if (kind := rng.random()) < 0.35:
        return _noun(rng, PEOPLE, "nom")
    given, family = rng.choice(GIVEN), rng.choice(FAMILY)
    if kind < 0.6:
        return Pair(given, given)
    if kind < 0.85:
        return Pair(f"{given} {family}", f"{given} {family}")
    return rng.choice(
        (Pair(f"Mister {family}", f"Herr {family}"), Pair(f"Doctor {family}", f"Doktor {family}"))
    )


def _what(rng: random.Random) -> Pair:
    return _many(rng) if rng.random() < 0.35 else _noun(rng, NOUNS, "acc")


def _where(rng: random.Random) -> Pair:
    if rng.random() < 0.5:
        return Pair(*rng.choice(SPOTS))
    en, de = rng.choice(CITIES)
    return Pair(f"in {en}", f"in {de}")


def _now(rng: random.Random) -> Pair:
    who, verb, what, where = _who(rng), rng.choice(VERBS), _what(rng), _where(rng)
    time = rng.choice(TIMES)
    return Pair(
        f"{who.en} {verb.en[1]} {what.en} {where.en} {time[0]}.",
        f"{who.de} {verb.de[1]} {time[1]} {where.de} {what.de}.",
    )


def _past(rng: random.Random) -> Pair:
    who, verb, what, manner = _who(rng), rng.choice(VERBS), _what(rng), rng.choice(MANNERS)
    where = _where(rng)
    return Pair(
        f"{who.en} {manner[0]} {verb.en[2]} {what.en} {where.en}.",
        f"{who.de} hat {manner[1]} {where.de} {what.de} {verb.de[2]}.",
    )


def _will(rng: random.Random) -> Pair:
    who, verb, what, time = _who(rng), rng.choice(VERBS), _what(rng), rng.choice(TIMES)
    return Pair(
        f"{time[0]} {who.en} will {verb.en[0]} {what.en}.",
        f"{time[1]} wird {who.de} {what.de} {verb.de[0]}.",
    )


def _question(rng: random.Random) -> Pair:
    who, verb, what, where = _who(rng), rng.choice(VERBS), _what(rng), _where(rng)
    return Pair(
        f"does {who.en} {verb.en[0]} {what.en} {where.en}?",
        f"{verb.de[1]} {who.de} {what.de} {where.de}?",
    )


def _why(rng: random.Random) -> Pair:
    who, verb, what, manner = _who(rng), rng.choice(VERBS), _what(rng), rng.choice(MANNERS)
    en, de = rng.choice((("why", "warum"), ("when", "wann"), ("where", "wo"), ("how", "wie")))
    return Pair(
        f"{en} did {who.en} {manner[0]} {verb.en[0]} {what.en}?",
        f"{de} hat {who.de} {manner[1]} {what.de} {verb.de[2]}?",
    )


def _both(rng: random.Random) -> Pair:
    first, second = _who(rng), _who(rng)
    one, two, what, other = rng.choice(VERBS), rng.choice(VERBS), _what(rng), _what(rng)
    en, de = rng.choice((("and", "und"), ("but", "aber")))
    return Pair(
        f"{first.en} {one.en[1]} {what.en}, {en} {second.en} {two.en[1]} {other.en}.",
        f"{first.de} {one.de[1]} {what.de}, {de} {second.de} {two.de[1]} {other.de}.",
    )


def _list(rng: random.Random) -> Pair:
    who, verb, things = _who(rng), rng.choice(VERBS), [_what(rng) for _ in range(3)]
    first, second, third = things
    return Pair(
        f"{who.en} {verb.en[1]} {first.en}, {second.en} and {third.en}.",
        f"{who.de} {verb.de[1]} {first.de}, {second.de} und {third.de}.",
    )


def _is(rng: random.Random) -> Pair:
    noun, adjective, where = _noun(rng, NOUNS, "nom"), rng.choice(ADJECTIVES), _where(rng)
    (en, de), manner = rng.choice((("is", "ist"), ("was", "war"))), rng.choice(MANNERS)
    predicate = {"liebst": "am liebsten", "besonder": "besonders"}.get(adjective.de, adjective.de)
    return Pair(
        f"{noun.en} {where.en} {en} {manner[0]} {adjective.en}.",
        f"{noun.de} {where.de} {de} {manner[1]} {predicate}.",
    )


def _travel(rng: random.Random) -> Pair:
    who, (en_from, de_from), (en_to, de_to) = _who(rng), rng.choice(CITIES), rng.choice(CITIES)
    time, value = rng.choice(TIMES), rng.randint(2, 99)
    (en, de), unit = (
        rng.choice((("travels", "reist"), ("drives", "fährt"), ("flies", "fliegt"))),
        rng.choice(_UNITS),
    )
    return Pair(
        f"{time[0]} {who.en} {en} from {en_from} to {en_to} for {number_word(value, 'en')} {unit[0]}.",
        f"{time[1]} {de} {who.de} von {de_from} nach {de_to} für {number_word(value, 'de')} {unit[1]}.",
    )


_UNITS = (
    ("days", "Tage"),
    ("weeks", "Wochen"),
    ("months", "Monate"),
    ("years", "Jahre"),
    ("hours", "Stunden"),
)
_TEMPLATES = (_now, _past, _will, _question, _why, _both, _list, _is, _travel)
