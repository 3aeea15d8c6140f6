"""The kinds of events that news tell of, and what a language adds to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of event. Sentences are format strings over the slots of ``_draw_slots``.

    ``facts`` holds, for each fact, sentences that say it; an item uses one of each. ``questions`` pairs ways
    to ask with the slot that answers. ``numbers`` gives the range of ``n``, ``lists`` further slots.
    """

    name: str
    lists: dict[str, tuple[str, ...]]
    numbers: tuple[int, int]
    lead: tuple[str, ...]
    facts: tuple[tuple[str, ...], ...]
    highlight: str
    questions: tuple[tuple[tuple[str, ...], str], ...]
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wording:
    """Everything a language adds to the event kinds."""

    kinds: tuple[Kind, ...]
    openers: tuple[str, ...]
    extras: tuple[tuple[str, tuple[str, ...], str], ...]
    lists: dict[str, tuple[str, ...]]
    questions: tuple[tuple[tuple[str, ...], str], ...]
    joiner: str
