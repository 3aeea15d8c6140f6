"""Scenes of one to four things on a plain background, and which combinations training never sees.

training_scene(random.Random("1 0"))  # no held-out combination in it
held_out_scene(17)                    # the same scene on every machine
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

SIZE = 112  # pixels of a side
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
DIGITS = tuple("0123456789")
KINDS = SHAPES + DIGITS
SIZES = ("big", "small")
CELLS = 9
THINGS = 4  # at most
HELD_OUT_SHARE = 16
DIGIT_SHARE = 0.3

COLOURS = {
    "red": (215, 40, 45),
    "orange": (250, 140, 20),
    "yellow": (245, 220, 50),
    "green": (45, 155, 65),
    "blue": (40, 85, 215),
    "purple": (130, 50, 170),
    "white": (242, 242, 242),
    "black": (22, 22, 22),
}
BACKGROUNDS = {
    "grey": (128, 128, 128),
    "pink": (240, 180, 200),
    "cyan": (140, 210, 225),
    "brown": (112, 78, 48),
}
PLACES = (
    *("at the top left", "at the top", "at the top right"),
    *("on the left", "in the middle", "on the right"),
    *("at the bottom left", "at the bottom", "at the bottom right"),
)

_UNIT = 8  # of a pixel: positions and radii are integers
_TURNS = 64  # a full circle
_RADII = {"big": (13 * _UNIT, 17 * _UNIT), "small": (7 * _UNIT, 9 * _UNIT)}


@dataclass(frozen=True)
class Thing:
    """One object. ``x``, ``y`` and the radii are in eighths of a pixel, ``turn`` in 64ths of a circle."""

    kind: str
    colour: str
    size: str
    cell: int
    x: int
    y: int
    radius_x: int
    radius_y: int
    turn: int
    shade: tuple[int, int, int]

    @property
    def name(self) -> str:
        """For example "big red circle"."""
        return f"{self.size} {self.colour} {self.kind}"

    @property
    def place(self) -> str:
        """For example "at the top left"."""
        return PLACES[self.cell]


@dataclass(frozen=True)
class Scene:
    """Things in reading order. ``slope``: the background's change of light; ``noise``: in levels, at most."""

    things: tuple[Thing, ...]
    background: str
    base: tuple[int, int, int]
    slope: tuple[int, int]
    noise: int
    noise_seed: int

    @property
    def is_held_out(self) -> bool:
        """True where one of the things is a combination that training never sees."""
        return any(is_held_out(thing.kind, thing.colour, thing.cell) for thing in self.things)


def is_held_out(kind: str, colour: str, cell: int) -> bool:
    """True for one combination of kind, colour and place in 16, the same on every machine."""
    return zlib.crc32(f"scene|{kind}|{colour}|{cell}".encode()) % HELD_OUT_SHARE == 0


def _pick(rng: random.Random, items: tuple[str, ...]) -> str:
    return items[rng.randrange(len(items))]


def _shaded(rng: random.Random, colour: tuple[int, int, int], spread: int) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, level + rng.randrange(-spread, spread + 1))) for level in colour)
    return red, green, blue


def _thing(rng: random.Random, cell: int) -> Thing:
    kind = _pick(rng, DIGITS if rng.random() < DIGIT_SHARE else SHAPES)
    colour, size = _pick(rng, tuple(COLOURS)), _pick(rng, SIZES)
    low, high = _RADII[size]
    radius = rng.randrange(low, high + 1)
    stretch = radius // 10
    # A big thing stays in the picture; a small one moves further from the middle of its cell.
    slack = (2 if size == "big" else 6) * _UNIT
    x, y = (((2 * at + 1) * SIZE * _UNIT) // 6 for at in (cell % 3, cell // 3))
    return Thing(
        kind=kind,
        colour=colour,
        size=size,
        cell=cell,
        x=x + rng.randrange(-slack, slack + 1),
        y=y + rng.randrange(-slack, slack + 1),
        radius_x=radius + rng.randrange(-stretch, stretch + 1),
        radius_y=radius + rng.randrange(-stretch, stretch + 1),
        turn=rng.randrange(-3, 4) % _TURNS if kind in DIGITS else rng.randrange(_TURNS),
        shade=_shaded(rng, COLOURS[colour], 14),
    )


def _scene(rng: random.Random, things: list[Thing]) -> Scene:
    background = _pick(rng, tuple(BACKGROUNDS))
    return Scene(
        things=tuple(sorted(things, key=lambda thing: thing.cell)),
        background=background,
        base=_shaded(rng, BACKGROUNDS[background], 12),
        slope=(rng.randrange(-20, 21), rng.randrange(-20, 21)),
        noise=rng.randrange(13),
        noise_seed=rng.randrange(1 << 20),
    )


def _cells(rng: random.Random) -> list[int]:
    cells = list(range(CELLS))
    return [cells.pop(rng.randrange(len(cells))) for _ in range(1 + rng.randrange(THINGS))]


def training_scene(rng: random.Random) -> Scene:
    """A scene without any held-out combination."""
    things = []
    for cell in _cells(rng):
        thing = _thing(rng, cell)
        while is_held_out(thing.kind, thing.colour, thing.cell):
            thing = _thing(rng, cell)
        things.append(thing)
    return _scene(rng, things)


def held_out_scene(seed: int) -> Scene:
    """The held-out scene of this number; its first drawn thing is a held-out combination."""
    rng = random.Random(f"held-out scene {seed}")
    first, *others = _cells(rng)
    thing = _thing(rng, first)
    while not is_held_out(thing.kind, thing.colour, thing.cell):
        thing = _thing(rng, first)
    return _scene(rng, [thing, *(_thing(rng, cell) for cell in others)])
