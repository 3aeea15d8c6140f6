"""Train the pocket speech model on synthesised speech: one GPU, minutes.

An interrupted run can be continued. The schedule follows the clock, so a run ends on time at any speed. It
begins with short windows, where attention soon finds what is said where.

    train(Run(folder, model, options), utterances, sound, vocabulary, until=time.perf_counter() + 500)
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from recipes.whisper.model import PocketWhisper
from recipes.whisper.render import Acoustics, Rendered, Sound
from recipes.whisper.utterances import RATE, Utterance, read_shards
from recipes.whisper.vocabulary import SpeechVocabulary
from recipes.whisper.windows import IGNORE, Batch, Planner

TELL_EVERY = 100  # steps


@dataclass(frozen=True)
class TrainOptions:
    """Everything that fixes a run. ``rows``: windows of 30 s in a step; short ones are twice as many."""

    minutes: float = 8.0
    rows: int = 96
    short_seconds: int = 10
    short_share: float = 0.4
    peak_rate: float = 1.5e-3
    warmup: float = 0.03
    decay: float = 0.05
    phone_weight: float = 0.3
    look_weight: float = 0.2
    seed: int = 1
    workers: int = 12
    save_seconds: float = 60.0


class Windows(IterableDataset[Batch]):
    """Endless batches of plans; each worker has its own seed."""

    def __init__(self, planner: Planner, rows: int, seed: str) -> None:
        self.planner, self.rows, self.seed = planner, rows, seed

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        rng = random.Random(f"{self.seed} {info.id if info else 0}")
        while True:
            yield Batch.of([self.planner.plan(rng) for _ in range(self.rows)])


class Losses:
    """The parts of the loss: text, phonemes, places looked at."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options

    def __call__(self, model: PocketWhisper, batch: Batch, rendered: Rendered) -> tuple[Tensor, Tensor]:
        """The sum that is trained, and its parts [3] in nats."""
        device = rendered.features.device
        targets, looks = batch.targets.to(device), batch.looks.to(device)
        found = model(rendered.features, batch.inputs.to(device), batch.starts.to(device))
        text = F.cross_entropy(found.logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        phones = F.cross_entropy(found.phones.float().flatten(0, 1), rendered.labels.long().flatten())
        # The first layer finds the token it was given, the last one that which comes: reading in order.
        given = F.pad(looks[:, :-1], (0, 0, 1, 0), value=-1)
        looked = _looked(found.behind, given) + _looked(found.ahead, looks)
        total = text + self.options.phone_weight * phones + self.options.look_weight * looked
        return total, torch.stack((text.detach(), phones.detach(), looked.detach()))


def _looked(attention: Tensor, looks: Tensor) -> Tensor:
    """Cross-entropy of looking where each token is spoken, mean over tokens whose place is known."""
    known = looks[..., 0] >= 0
    sums = F.pad(attention.cumsum(-1), (1, 0))
    places = looks.clamp(min=0)
    inside = sums.gather(2, places[..., 1:] + 1) - sums.gather(2, places[..., :1])
    return -((inside[..., 0].clamp(min=1e-5).log() * known).sum() / known.sum().clamp(min=1))


def rate_at(progress: float, options: TrainOptions) -> float:
    """Learning rate at a share of the run: linear warm-up, then a cosine down to 1 % of the peak."""
    if progress < options.warmup:
        return options.peak_rate * max(progress / options.warmup, 0.01)
    through = min(1.0, (progress - options.warmup) / (1 - options.warmup))
    return options.peak_rate * (0.01 + 0.495 * (1 + math.cos(math.pi * through)))


def make_optimizer(model: PocketWhisper, options: TrainOptions) -> torch.optim.AdamW:
    """Matrices decay; the rest does not."""
    parts = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [p for p in parts if p.dim() > 1]
    others = [p for p in parts if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": options.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.peak_rate, betas=(0.9, 0.98), fused=True)


class Run:
    """A model under training, saved to and continued from a folder of files below 16 MiB each."""

    def __init__(self, folder: Path, model: PocketWhisper, options: TrainOptions) -> None:
        self.folder, self.model, self.options = folder, model, options
        self.optimizer = make_optimizer(model, options)
        self.seconds, self.saved, self.step = 0.0, 0.0, 0
        self.log: list[dict[str, Any]] = []

    def save(self) -> None:
        """Write weights, both moments and the state; each file replaces the last at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = self.optimizer.state_dict()["state"]
        files = {"weights": self.model.state_dict()}
        for name in ("exp_avg", "exp_avg_sq"):
            files[name] = {str(index): values[name] for index, values in state.items()}
        for name, tensors in files.items():
            plain = {key: value.detach().float().cpu().contiguous() for key, value in tensors.items()}
            save_file(plain, self.folder / f".{name}")
            (self.folder / f".{name}").replace(self.folder / f"{name}.safetensors")
        progress = {"seconds": self.seconds, "step": self.step, "log": self.log}
        (self.folder / "state.json").write_text(json.dumps(progress))
        self.saved = self.seconds

    def resume(self) -> bool:
        """Continue where ``save`` was; False where nothing was saved."""
        if not (self.folder / "state.json").exists():
            return False
        progress = json.loads((self.folder / "state.json").read_text())
        self.seconds, self.step, self.log = progress["seconds"], progress["step"], progress["log"]
        self.saved = self.seconds
        self.model.load_state_dict(load_file(self.folder / "weights.safetensors"))
        moments = {name: load_file(self.folder / f"{name}.safetensors") for name in ("exp_avg", "exp_avg_sq")}
        known = self.optimizer.state_dict()
        known["state"] = {
            int(index): {
                "step": torch.tensor(float(self.step)),
                "exp_avg": first,
                "exp_avg_sq": moments["exp_avg_sq"][index],
            }
            for index, first in moments["exp_avg"].items()
        }
        self.optimizer.load_state_dict(known)
        return True

    @property
    def progress(self) -> float:
        """Share of the run's time that is over."""
        return self.seconds / (60 * self.options.minutes)

    def update(self, batch: Batch, rendered: Rendered, losses: Losses) -> Tensor:
        """One step; returns the parts of the loss."""
        rate = rate_at(self.progress, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        device = rendered.features.device.type
        with torch.autocast(device, torch.bfloat16):
            total, parts = losses(self.model, batch, rendered)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return parts


def train(
    run: Run, utterances: Sequence[Utterance], sound: Sound, vocabulary: SpeechVocabulary, until: float
) -> None:
    """Go on until the run's time is over, or ``until`` on the clock of ``time.perf_counter``."""
    options = run.options
    while run.progress < 1 and time.perf_counter() < until:
        short = run.progress < options.short_share
        seconds, rows = (options.short_seconds, 2 * options.rows) if short else (30, options.rows)
        planner = Planner(utterances, vocabulary, seconds)
        windows = Windows(planner, rows, f"{options.seed} {run.step}")
        context = "fork" if options.workers else None
        loader = DataLoader(
            windows, batch_size=None, num_workers=options.workers, multiprocessing_context=context
        )
        end = options.short_share if short else 1.0
        _stage(run, iter(loader), sound, seconds * RATE, end, until)
        run.save()


def _stage(run: Run, batches: Iterator[Batch], sound: Sound, length: int, end: float, until: float) -> None:
    """Steps on windows of ``length`` samples until a share ``end`` of the run."""
    losses, how = Losses(run.options), Acoustics()
    generator = torch.Generator().manual_seed(run.options.seed * 1_000_003 + run.step)
    parts, first = torch.zeros(3, device=sound.device), (run.step, run.seconds)
    started = time.perf_counter() - run.seconds
    while run.progress < end and time.perf_counter() < until:
        batch = next(batches)
        parts += run.update(batch, sound.render(batch, length, generator, how), losses)
        run.seconds = time.perf_counter() - started
        if run.step % TELL_EVERY == 0:
            steps = run.step - first[0]
            _tell(run, (parts / steps).tolist(), length, steps / (run.seconds - first[1]))
            parts, first = torch.zeros_like(parts), (run.step, run.seconds)
        if run.seconds - run.saved > run.options.save_seconds:
            run.save()


def _tell(run: Run, parts: Sequence[float], length: int, speed: float) -> None:
    names = ("text", "phones", "looks")
    entry = {"step": run.step, **{name: round(value, 4) for name, value in zip(names, parts, strict=True)}}
    entry |= {"seconds": round(run.seconds, 1), "window": length // RATE, "steps_per_second": round(speed, 2)}
    run.log.append(entry)
    print(json.dumps(entry), flush=True)


def opened(speech: Path, device: torch.device) -> tuple[list[Utterance], Sound]:
    """Training utterances and their sound on the device."""
    utterances, samples, labels = read_shards(speech, "train-")
    return utterances, Sound(samples, labels, device)
