"""What share of the conversations is what, and how segments become one conversation.

conversation(random.Random(7)).messages()
"""

from __future__ import annotations

import random
from collections.abc import Callable

from recipes.world import arithmetic, dialogue, facts, little_story, names, reading, story
from recipes.world.conversation import DEFAULT_SYSTEM, Conversation, Language, Turn

_SYSTEMS = {
    "en": (
        "You are a friendly assistant.", "Answer briefly.", "You are a small chat model.",
        "You help people with short texts.", "Be kind and exact.",
        "You are an assistant that answers questions.",
    ),
    "zh": ("你是一个有用的助手。", "你是一个友好的助手。", "请简短地回答。", "你帮助人们阅读短文。"),
}  # fmt: skip
_NAMED = {"en": "You are {name}, a helpful assistant.", "zh": "你是{name}，一个有用的助手。"}
SHARES = {
    "talk": 16, "summary": 20, "question": 14, "reading": 12, "little": 8, "sum": 24, "fact": 9, "facts": 3,
    "story": 2, "repeat": 4, "unknown": 6, "compare": 2, "chain": 2,
}  # fmt: skip


def _system(rng: random.Random, language: Language) -> tuple[str | None, str | None]:
    """A system message (or none) and the name it gives the assistant (or none)."""
    kind = rng.random()
    if kind < 0.68:
        return DEFAULT_SYSTEM, None
    if kind < 0.82:
        return None, None
    if kind < 0.92:
        return rng.choice(_SYSTEMS[language]), None
    name = names.first_name(rng, language)
    return _NAMED[language].format(name=name), name


def segment(rng: random.Random, kind: str, language: Language, name: str | None) -> list[Turn]:
    """The turns of one part of a conversation, all of the training split."""
    makers: dict[str, Callable[[], list[Turn]]] = {
        "talk": lambda: [dialogue.small_talk(rng, language, name) for _ in range(rng.randint(1, 3))],
        "summary": lambda: [reading.summary(rng, language, "train")],
        "question": lambda: [reading.question(rng, language, "train")],
        "reading": lambda: reading.reading_session(rng, language, "train"),
        "little": lambda: little_story.little_story(rng, language),
        "sum": lambda: arithmetic.sum_session(rng, language, "train"),
        "fact": lambda: [facts.fact_turn(rng, language) for _ in range(rng.randint(1, 2))],
        "facts": lambda: facts.fact_session(rng, language),
        "story": lambda: [story.story_turn(rng, language)],
        "repeat": lambda: [dialogue.repeat(rng, language)],
        "unknown": lambda: [dialogue.unknown(rng, language)],
        "compare": lambda: [arithmetic.compare_turn(rng, language)],
        "chain": lambda: [arithmetic.chain_turn(rng, language)],
    }
    return makers[kind]()


def _other(language: Language) -> Language:
    return "en" if language == "zh" else "zh"


def conversation(rng: random.Random) -> Conversation:
    """Draw one training conversation of one to about fifteen turns."""
    language: Language = rng.choice(("en", "zh"))
    system, name = _system(rng, language)
    kinds = rng.choices(list(SHARES), list(SHARES.values()), k=rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 8)))
    turns: list[Turn] = []
    for kind in kinds:
        spoken = _other(language) if turns and rng.random() < 0.1 else language
        turns += segment(rng, kind, spoken, name)
    ending = rng.random()
    if ending < 0.12:
        turns = dialogue.memory_session(rng, language, turns if rng.random() < 0.8 else [])
    elif ending < 0.15:
        turns.insert(rng.randrange(len(turns) + 1), dialogue.ask_unknown_name(rng, language))
    return Conversation("+".join(kinds), language, system, tuple(turns))
