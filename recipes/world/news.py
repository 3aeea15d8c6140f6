"""News items: an event told in a few sentences, its one-sentence highlight, and questions with short answers.

The words are in ``news_en`` and ``news_zh``. A highlight names who, what, where, when and how many in a form
of its own: no sentence of the item is it.

    item(random.Random(3), "en", "train").highlight
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.world import names, news_en, news_zh
from recipes.world.conversation import Language, Split
from recipes.world.news_kind import Kind, Wording
from recipes.world.split import belongs


@dataclass(frozen=True)
class Item:
    """A news item: its text, the sentence that sums it up, and (question, answer) pairs."""

    kind: str
    key: str
    text: str
    highlight: str
    questions: tuple[tuple[str, str], ...]


def _wording(language: Language) -> Wording:

    return news_zh.WORDING if language == "zh" else news_en.WORDING


def _draw_slots(
    rng: random.Random, kind: Kind, wording: Wording, language: Language, split: Split
) -> dict[str, str]:
    while True:
        slots = {"who": names.person(rng, language), "place": names.town(rng, language)}
        if belongs("news", f"{kind.name}|{slots['who']}|{slots['place']}", split):
            break
    slots |= {f"who{i}": names.person(rng, language) for i in (2, 3, 4, 5)}
    slots |= {f"place{i}": names.town(rng, language) for i in (2, 3, 4)}
    slots["day"] = names.day(rng, language)
    slots["n"] = str(rng.randint(*kind.numbers))
    slots |= {"m": str(rng.randint(2, 99)), "k": str(rng.randint(6, 11)), "j": str(rng.randint(3, 40))}
    for name, choices in {**wording.lists, **kind.lists}.items():
        slots[name] = rng.choice(choices)
    return slots


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def item(rng: random.Random, language: Language, split: Split) -> Item:
    """Draw one item of 60 to 160 tokens; its (kind, person, town) belongs to ``split``."""
    wording = _wording(language)
    kind = rng.choice(wording.kinds)
    slots = _draw_slots(rng, kind, wording, language, split)
    extras = rng.sample(wording.extras, rng.choice((1, 2, 2, 3, 4)))
    body = [rng.choice(variants) for variants in kind.facts] + [sentence for sentence, _, _ in extras]
    if kind.extras and rng.random() < 0.5:
        body.append(rng.choice(kind.extras))
    rng.shuffle(body)
    first = [rng.choice(wording.openers)] if rng.random() < 0.3 else []
    sentences = [_capital(sentence.format_map(slots)) for sentence in [*first, rng.choice(kind.lead), *body]]
    asked: Sequence[tuple[tuple[str, ...], str]] = [
        *kind.questions,
        *wording.questions,
        *((ways, slot) for _, ways, slot in extras if slot),
    ]
    return Item(
        kind=kind.name,
        key=f"{kind.name}|{slots['who']}|{slots['place']}",
        text=wording.joiner.join(sentences),
        highlight=_capital(kind.highlight.format_map(slots)),
        questions=tuple((rng.choice(ways).format_map(slots), slots[slot]) for ways, slot in asked),
    )
