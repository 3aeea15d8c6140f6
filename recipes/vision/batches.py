"""Batches of training: new scenes and conversations about them without end, made in worker processes.

loader = batches(Plan(tokenizer=Path("models/pocket-vision/llama")), seed=1, workers=14)
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from recipes.vision.draw import SceneArrays
from recipes.vision.scenes import CELLS, COLOURS, KINDS, SIZES, Scene, training_scene
from recipes.vision.talk import conversation
from recipes.vision.vocabulary import Example, Vocabulary

LABELS = (len(KINDS) + 1, len(COLOURS) + 1, len(SIZES) + 1)  # class 0: nothing is there
_COLOURS = tuple(COLOURS)
_MULTIPLE = 16  # lengths are rounded up to it


@dataclass(frozen=True)
class Plan:
    """What a batch has. ``pool`` > 0: only so many different scenes, to see a model overfit."""

    tokenizer: Path
    pictures: int = 256
    talks: int = 4
    two_rounds: float = 0.4
    system: float = 0.85
    pool: int = 0


@dataclass
class Batch:
    """Scenes, their cells (``labels`` [pictures, 9, 3]: kind, colour, size), and talk about them."""

    scenes: SceneArrays
    labels: Tensor
    parts: list[Part]


@dataclass
class Part:
    """Rows with the same ids before the picture, whose embeddings stand between ``before`` and ``after``.

    ``after`` [rows, length], zeros behind the end. ``owners`` [rows]: each row's picture. ``positions`` and
    ``targets`` [n]: flat positions in the whole rows whose next token is learned, and that token.
    """

    before: Tensor
    after: Tensor
    owners: Tensor
    positions: Tensor
    targets: Tensor


def cell_labels(scene: Scene) -> list[tuple[int, int, int]]:
    """Classes of kind, colour and size for each of the nine cells; 0 where nothing is."""
    labels = [(0, 0, 0)] * CELLS
    for thing in scene.things:
        labels[thing.cell] = (
            1 + KINDS.index(thing.kind),
            1 + _COLOURS.index(thing.colour),
            1 + SIZES.index(thing.size),
        )
    return labels


def make_part(examples: list[tuple[int, Example]], queries: int) -> Part:
    """Rows of (picture, example); positions count the ids before and the picture's ``queries``."""
    first = examples[0][1]
    longest = max(len(example.after) + len(example.answer) for _, example in examples) - 1
    longest = -(-longest // _MULTIPLE) * _MULTIPLE
    after = np.zeros((len(examples), longest), np.int64)
    total = len(first.before) + queries + longest
    positions: list[int] = []
    targets: list[int] = []
    for row, (_, example) in enumerate(examples):
        tokens = [*example.after, *example.answer[:-1]]
        after[row, : len(tokens)] = tokens
        start = row * total + len(first.before) + queries + len(example.after) - 1
        positions += range(start, start + len(example.answer))
        targets += example.answer
    return Part(
        torch.tensor(first.before),
        torch.from_numpy(after),
        torch.tensor([owner for owner, _ in examples]),
        torch.tensor(positions),
        torch.tensor(targets),
    )


def make_batch(plan: Plan, vocabulary: Vocabulary, rng: random.Random, queries: int) -> Batch:
    """One batch; rows with the system text and rows without it are two parts."""
    if plan.pool:
        fixed = [random.Random(f"pool {rng.randrange(plan.pool)}") for _ in range(plan.pictures)]
        scenes = [training_scene(one) for one in fixed]
    else:
        scenes = [training_scene(rng) for _ in range(plan.pictures)]
    groups: dict[bool, list[tuple[int, Example]]] = {True: [], False: []}
    for owner, scene in enumerate(scenes):
        for _ in range(plan.talks):
            system = rng.random() < plan.system
            rounds = conversation(scene, rng, 2 if rng.random() < plan.two_rounds else 1)
            groups[system].append((owner, vocabulary.example(rounds, system)))
    parts = [make_part(examples, queries) for examples in groups.values() if examples]
    return Batch(SceneArrays.of(scenes), torch.tensor([cell_labels(scene) for scene in scenes]), parts)


class Batches(IterableDataset[Batch]):
    """Endless batches; each worker has its own seed."""

    def __init__(self, plan: Plan, seed: int, queries: int) -> None:
        self.plan, self.seed, self.queries = plan, seed, queries

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        rng = random.Random(f"{self.seed} {info.id if info else 0}")
        vocabulary = Vocabulary(self.plan.tokenizer)
        while True:
            yield make_batch(self.plan, vocabulary, rng, self.queries)


def batches(plan: Plan, seed: int, queries: int, workers: int) -> Iterator[Batch]:
    """Batches from ``workers`` processes, or from this one where there are none."""
    loader = DataLoader(
        Batches(plan, seed, queries),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    return iter(loader)
