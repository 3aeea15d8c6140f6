"""Questions about a scene with their exact answers, in one or two rounds, and MiniGPT-4's prompt around them.

rounds = conversation(scene, random.Random(1), rounds=2)
before, after = prompt(rounds)  # the picture's embeddings stand between the two texts
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from recipes.vision.scenes import (
    BACKGROUNDS,
    CELLS,
    COLOURS,
    DIGITS,
    KINDS,
    PLACES,
    SHAPES,
    Scene,
    Thing,
    training_scene,
)

SYSTEM = (
    "Give the following image: <Img>ImageContent</Img>. "
    "You will be able to see the image once I provide it to you. Please answer my questions."
)
END = "###"
_Item = TypeVar("_Item")
DESCRIBE = (
    "Describe the picture.",
    "Describe this image.",
    "What is in the picture?",
    # The four of the original's training prompts.
    "Describe this image in detail.",
    "Take a look at this image and describe what you notice.",
    "Please provide a detailed description of the picture.",
    "Could you describe the contents of this image for me?",
)


@dataclass(frozen=True)
class Round:
    """One question and its only right answer. ``about``: the thing it is about, if it is one."""

    task: str
    question: str
    answer: str
    about: Thing | None = None


def prompt(rounds: Sequence[Round], system: bool = True) -> tuple[str, str]:
    """Texts before and after the picture; they end where the last round's answer begins.

    Without ``system`` they have the form of the original's training prompts.
    """
    space = "" if system else " "
    *answered, last = rounds
    history = "".join(f"{turn.question}{space}###Assistant: {turn.answer}###Human: " for turn in answered)
    before = f"{SYSTEM if system else ''}###Human: <Img>"
    return before, f"</Img> {history}{last.question}{space}###Assistant: "


def conversation(scene: Scene, rng: random.Random, rounds: int) -> list[Round]:
    """Rounds about a scene; every second round in two refers to the one before."""
    first = ask(scene, rng)
    if rounds == 1:
        return [first]
    if rng.random() < 0.5:
        follow = _follow(scene, first, rng)
        if follow is not None:
            return [first, follow]
    second = ask(scene, rng)
    while second.task == first.task and second.answer == first.answer:
        second = ask(scene, rng)
    return [first, second]


def ask(scene: Scene, rng: random.Random, task: str | None = None) -> Round:
    """One question, of ``task`` where the scene allows it."""
    while True:
        name = task if task is not None else TASKS[rng.randrange(len(TASKS))]
        found = _ASKERS[name](scene, rng)
        if found is not None:
            return found
        task = None


def describe(scene: Scene) -> str:
    """One sentence about all things, in reading order."""
    parts = [f"a {thing.name} {thing.place}" for thing in scene.things]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"There is {listed}."


def _pick(rng: random.Random, items: Sequence[_Item]) -> _Item:
    return items[rng.randrange(len(items))]


def _single(scene: Scene, kinds: Sequence[str], rng: random.Random) -> Thing | None:
    """A thing of one of these kinds that is the only one of its kind."""
    every = [thing.kind for thing in scene.things]
    single = [thing for thing in scene.things if thing.kind in kinds and every.count(thing.kind) == 1]
    return _pick(rng, single) if single else None


def _what(scene: Scene, rng: random.Random, cell: int | None = None) -> Round:
    by_cell = {thing.cell: thing for thing in scene.things}
    if cell is None:
        cell = _pick(rng, scene.things).cell if rng.random() < 0.8 else rng.randrange(CELLS)
    thing = by_cell.get(cell)
    return Round("what", f"What is {PLACES[cell]}?", f"a {thing.name}" if thing else "nothing", thing)


def _colour(scene: Scene, rng: random.Random) -> Round | None:
    thing = _single(scene, KINDS, rng)
    return Round("colour", f"What colour is the {thing.kind}?", thing.colour, thing) if thing else None


def _where(scene: Scene, rng: random.Random) -> Round | None:
    thing = _single(scene, KINDS, rng)
    return Round("where", f"Where is the {thing.kind}?", thing.place, thing) if thing else None


def _size(scene: Scene, rng: random.Random) -> Round | None:
    thing = _single(scene, KINDS, rng)
    return Round("size", f"Is the {thing.kind} big or small?", thing.size, thing) if thing else None


def _digit(scene: Scene, rng: random.Random) -> Round | None:
    digits = [thing for thing in scene.things if thing.kind in DIGITS]
    if len(digits) != 1:
        return None
    question = _pick(rng, ("Which digit is it?", "Which digit is in the picture?"))
    return Round("digit", question, digits[0].kind, digits[0])


def _count(scene: Scene, rng: random.Random) -> Round:
    draw = rng.random()
    if draw < 0.3:
        return Round("count", "How many objects are there?", str(len(scene.things)))
    near = _pick(rng, scene.things) if rng.random() < 0.7 else None
    if draw < 0.65:
        colour = near.colour if near else _pick(rng, tuple(COLOURS))
        number = sum(thing.colour == colour for thing in scene.things)
        return Round("count", f"How many {colour} objects are there?", str(number))
    shape = near.kind if near and near.kind in SHAPES else _pick(rng, SHAPES)
    return _count_shape(scene, shape, f"How many {_plural(shape)} are there?")


def _count_shape(scene: Scene, shape: str, question: str) -> Round:
    return Round("count", question, str(sum(thing.kind == shape for thing in scene.things)))


def _plural(shape: str) -> str:
    return f"{shape}es" if shape == "cross" else f"{shape}s"


def _exists(scene: Scene, rng: random.Random) -> Round:
    thing = _pick(rng, scene.things)
    colour, kind = thing.colour, thing.kind
    draw = rng.random()
    if draw < 0.3:
        colour = _pick(rng, tuple(COLOURS))
    elif draw < 0.6:
        kind = _pick(rng, KINDS)
    found = any(thing.colour == colour and thing.kind == kind for thing in scene.things)
    article = "an" if colour == "orange" else "a"
    return Round("exists", f"Is there {article} {colour} {kind}?", "yes" if found else "no")


def _background(scene: Scene, rng: random.Random) -> Round:
    return Round("background", "What colour is the background?", scene.background)


def _describe(scene: Scene, rng: random.Random) -> Round:
    return Round("describe", _pick(rng, DESCRIBE), describe(scene))


_ASKERS: dict[str, Callable[[Scene, random.Random], Round | None]] = {
    "what": _what,
    "colour": _colour,
    "where": _where,
    "size": _size,
    "digit": _digit,
    "count": _count,
    "exists": _exists,
    "background": _background,
    "describe": _describe,
}
TASKS = tuple(_ASKERS)


def _follow(scene: Scene, first: Round, rng: random.Random) -> Round | None:
    """A question that only makes sense after the first one."""
    thing = first.about
    if first.task == "what":
        cell = _pick(rng, scene.things).cell if rng.random() < 0.7 else rng.randrange(CELLS)
        return _as_follow(_what(scene, rng, cell), f"And {PLACES[cell]}?")
    if first.task == "count":
        shape = _pick(rng, SHAPES)
        return _as_follow(_count_shape(scene, shape, ""), f"And how many {_plural(shape)}?")
    if thing is None:
        return None
    asked = [("colour", "What colour is it?", thing.colour), ("where", "Where is it?", thing.place)]
    asked.append(("size", "Is it big or small?", thing.size))
    task, question, answer = _pick(rng, [item for item in asked if item[0] != first.task])
    return Round(task, question, answer, thing)


def _as_follow(found: Round, question: str) -> Round:
    return Round(found.task, question, found.answer, found.about)


def corpus() -> list[str]:
    """Every word of the talk in the texts that it comes in: what the vocabulary is learned from."""
    rng = random.Random("vocabulary")
    texts = []
    for index in range(4000):
        rounds = conversation(training_scene(rng), rng, 1 + index % 2)
        before, after = prompt(rounds, system=index % 5 > 0)
        texts += [before, after, f"{rounds[-1].answer}{END}"]
    names = [*COLOURS, *BACKGROUNDS, *KINDS]
    return texts + names
