"""Pixels of scenes, in whole numbers alone: every machine and device draws the same bits.

draw([held_out_scene(17)])  # uint8 [1, 3, 112, 112]

python -m recipes.vision.draw --out /tmp/scenes --count 12   # PNG files of held-out scenes
"""

from __future__ import annotations

import argparse
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.vision.scenes import DIGITS, KINDS, SHAPES, SIZE, THINGS, Scene, held_out_scene

MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's
STD = (0.26862954, 0.26130258, 0.27577711)
_ONE = 1024  # radius of a shape in its own coordinates, and the scale of sines
_FAR = 4 * _ONE
_SUB = 2  # samples of a pixel in either direction
_SINES = [round(_ONE * math.sin(2 * math.pi * turn / 64)) for turn in range(64)]
_FONT = (
    *("01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110"),
    *("01110 10001 00001 00110 01000 10000 11111", "11110 00001 00001 01110 00001 00001 11110"),
    *("00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110"),
    *("01110 10000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000"),
    *("01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00001 01110"),
)  # five dots across and seven down for each digit


@dataclass
class SceneArrays:
    """Scenes as int32 arrays: quick to send to a worker or a device.

    ``things``: [things, 11]: scene, slot, kind, x, y, two radii, turn, red, green, blue.
    ``scenes``: [scenes, 7]: red, green, blue, two slopes, noise, noise seed.
    """

    things: np.ndarray
    scenes: np.ndarray

    @classmethod
    def of(cls, scenes: Sequence[Scene]) -> SceneArrays:
        """Arrays of these scenes; things are sorted by kind."""
        things = [
            (row, slot, KINDS.index(t.kind), t.x, t.y, t.radius_x, t.radius_y, t.turn, *t.shade)
            for row, scene in enumerate(scenes)
            for slot, t in enumerate(scene.things)
        ]
        grounds = [(*scene.base, *scene.slope, scene.noise, scene.noise_seed) for scene in scenes]
        things.sort(key=lambda thing: thing[2])
        return cls(np.array(things, np.int32), np.array(grounds, np.int32))


def draw(scenes: Sequence[Scene] | SceneArrays, device: torch.device | str = "cpu") -> Tensor:
    """Pictures uint8 [scenes, 3, 112, 112], red, green and blue."""
    arrays = scenes if isinstance(scenes, SceneArrays) else SceneArrays.of(scenes)
    table = torch.from_numpy(arrays.things).to(device)
    grounds = torch.from_numpy(arrays.scenes).to(device)
    cover = torch.zeros(len(grounds), THINGS, SIZE, SIZE, dtype=torch.int32, device=device)
    shades = torch.zeros(len(grounds), THINGS, 3, dtype=torch.int32, device=device)
    scene, slot = table[:, 0].long(), table[:, 1].long()
    cover[scene, slot] = _coverage(table, arrays.things[:, 2])
    shades[scene, slot] = table[:, 8:11]
    picture = _background(grounds)
    full = _SUB * _SUB
    for index in range(THINGS):
        part, shade = cover[:, index, None], shades[:, index, :, None, None]
        picture = torch.div(picture * (full - part) + shade * part + full // 2, full, rounding_mode="floor")
    return (picture + _noise(grounds)).clamp(0, 255).to(torch.uint8)


def normalize(pictures: Tensor) -> Tensor:
    """float32 pictures as the model takes them, from uint8 ones: CLIP's mean and deviation."""
    mean = torch.tensor(MEAN, device=pictures.device)[:, None, None]
    return (pictures.float() / 255 - mean) / torch.tensor(STD, device=pictures.device)[:, None, None]


def _background(grounds: Tensor) -> Tensor:
    """int32 [scenes, 3, 112, 112]: one colour under a slope of light."""
    at = torch.arange(SIZE, dtype=torch.int32, device=grounds.device) - SIZE // 2
    across, down = grounds[:, 3, None, None], grounds[:, 4, None, None]
    light = torch.div(across * at[None, None] + down * at[None, :, None], SIZE, rounding_mode="floor")
    return grounds[:, :3, None, None] + light[:, None]


def _noise(grounds: Tensor) -> Tensor:
    """int32 [scenes, 3, 112, 112]: levels within the scene's noise, hashed from its seed and the pixel."""
    index = torch.arange(3 * SIZE * SIZE, dtype=torch.int64, device=grounds.device)
    mixed = (index * 0x9E3779B1 + grounds[:, 6:7].long() * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 12)) & 0xFF
    most = grounds[:, 5:6].long()
    return (((mixed * (2 * most + 1)) >> 8) - most).int().view(-1, 3, SIZE, SIZE)


def _coverage(table: Tensor, kinds: np.ndarray) -> Tensor:
    """int32 [things, 112, 112]: samples of a pixel that a thing covers, 0 to 4."""
    x, y, radius_x, radius_y = (table[:, column, None, None] for column in (3, 4, 5, 6))
    sines = torch.tensor(_SINES, dtype=torch.int32, device=table.device)
    sine, cosine = (sines[(table[:, 7].long() + quarter) % 64][:, None, None] for quarter in (0, 16))
    samples = torch.arange(SIZE * _SUB, dtype=torch.int32, device=table.device) * (8 // _SUB) + 4 // _SUB
    across, down = samples[None, None] - x, samples[None, :, None] - y
    u = _divide(across * cosine + down * sine, radius_x)
    v = _divide(down * cosine - across * sine, radius_y)
    inside = torch.empty(u.shape, dtype=torch.bool, device=table.device)
    start = 0
    for kind, name in enumerate(KINDS):
        end = start + int((kinds == kind).sum())
        if end > start:
            part = slice(start, end)
            inside[part] = (
                _SHAPES[name](u[part], v[part]) if name in SHAPES else _digit(name, u[part], v[part])
            )
        start = end
    return inside.view(-1, SIZE, _SUB, SIZE, _SUB).sum((2, 4), dtype=torch.int32)


def _divide(value: Tensor, radius: Tensor) -> Tensor:
    return torch.div(value, radius, rounding_mode="floor").clamp(-_FAR, _FAR)


def _below(u: Tensor, v: Tensor, turn: int, distance: int) -> Tensor:
    """Whether points are on the inner side of a line whose normal has this angle in 360ths."""
    angle = math.radians(turn)
    return u * round(_ONE * math.cos(angle)) + v * round(_ONE * math.sin(angle)) <= distance * _ONE


def _triangle(u: Tensor, v: Tensor) -> Tensor:
    return _below(u, v, 90, 512) & _below(u, v, 210, 512) & _below(u, v, 330, 512)


def _star(u: Tensor, v: Tensor) -> Tensor:
    """Inside at least four of a pentagram's five lines."""
    lines = [_below(u, v, 90 + 72 * side, 340).int() for side in range(5)]
    return lines[0] + lines[1] + lines[2] + lines[3] + lines[4] >= 4


def _cross(u: Tensor, v: Tensor) -> Tensor:
    across, down = u.abs(), v.abs()
    return (torch.minimum(across, down) <= 300) & (torch.maximum(across, down) <= 940)


def _ring(u: Tensor, v: Tensor) -> Tensor:
    squared = u * u + v * v
    return (squared >= 560 * 560) & (squared <= 980 * 980)


def _digit(digit: str, u: Tensor, v: Tensor) -> Tensor:
    rows = _FONT[DIGITS.index(digit)].split()
    dots = torch.tensor([[dot == "1" for dot in row] for row in rows], device=u.device)
    column, row = (torch.div(at, 286, rounding_mode="floor") for at in (u + 715, v + 1001))
    within = (column >= 0) & (column < 5) & (row >= 0) & (row < 7)
    return within & dots[row.clamp(0, 6).long(), column.clamp(0, 4).long()]


_SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": lambda u, v: u * u + v * v <= 920 * 920,
    "square": lambda u, v: torch.maximum(u.abs(), v.abs()) <= 760,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "ring": _ring,
}


def png(picture: Tensor) -> bytes:
    """A PNG file of a picture uint8 [3, height, width]."""
    height, width = picture.shape[1:]
    rows = picture.permute(1, 2, 0).cpu().numpy()
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def main() -> None:
    """Write PNG files of held-out scenes, named by their number."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=12)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    numbers = range(args.first, args.first + args.count)
    for number, picture in zip(numbers, draw([held_out_scene(number) for number in numbers]), strict=True):
        (args.out / f"scene-{number:03d}.png").write_bytes(png(picture))


if __name__ == "__main__":
    main()
