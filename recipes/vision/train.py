"""Train the pocket picture model on scenes that are drawn as it goes: one GPU, minutes.

All parts are trained at once and from scratch. The schedule follows the clock, so a run ends on time at any
speed. Two helpers speed it up and are not exported: heads that tell from each patch of the ViT, and from each
of the first nine queries, what is in its cell of the picture. Their weight falls to nothing over the run.

    python -m recipes.vision.train --seconds 330 --out run
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recipes.vision.batches import LABELS, Batch, Plan, batches
from recipes.vision.draw import draw, normalize
from recipes.vision.evaluate import Item, held_out_items, score, summary
from recipes.vision.model import MiniGPT4, Shape
from recipes.vision.scenes import CELLS
from recipes.vision.vocabulary import Vocabulary


@dataclass(frozen=True)
class TrainOptions:
    """Everything that fixes a run. ``steps`` > 0 ends it by steps and not by the clock."""

    seconds: float = 330.0
    steps: int = 0
    pictures: int = 256
    talks: int = 4
    pool: int = 0
    peak_rate: float = 1.5e-3
    warmup: float = 0.04
    decay: float = 0.05
    helper_weight: float = 0.3
    seed: int = 1
    workers: int = 14
    checks: int = 8
    check_items: int = 200
    report_every: int = 100


class Helpers(nn.Module):
    """Heads that read each cell's kind, colour and size off patches and queries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patches = nn.Linear(shape.vit_width, sum(LABELS))
        self.queries = nn.Linear(shape.qformer_hidden, sum(LABELS))
        side = shape.image // shape.patch
        middles = [(2 * at + 1) * 3 // (2 * side) for at in range(side)]
        cells = torch.tensor([[3 * down + across for across in middles] for down in middles]).flatten()
        self.register_buffer("cells", cells, persistent=False)

    def forward(self, vision: Tensor, queries: Tensor, labels: Tensor) -> Tensor:
        """Losses [2] of patches and queries, in nats."""
        cells: Tensor = self.cells  # type: ignore[assignment]
        patches = _cell_loss(self.patches(vision[:, 1:]), labels[:, cells])
        return torch.stack((patches, _cell_loss(self.queries(queries[:, :CELLS]), labels)))


def _cell_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over pictures and cells, summed over kind, colour and size; one with a thing counts five times."""
    weight = torch.where(labels[..., 0] > 0, 5.0, 1.0).flatten()
    losses = [
        F.cross_entropy(part.float().flatten(0, 1), labels[..., index].flatten(), reduction="none")
        for index, part in enumerate(logits.split(LABELS, -1))
    ]
    return ((losses[0] + losses[1] + losses[2]) * weight).sum() / weight.sum()


def losses(model: MiniGPT4, helpers: Helpers, batch: Batch, device: torch.device) -> Tensor:
    """Losses [3] in nats: answers per token, patches, queries."""
    with torch.autocast(device.type, enabled=False):
        pixels = normalize(draw(batch.scenes, device))
    vision = model.vision(pixels)
    queries = model.ask_queries(vision)
    embeds = model.llama_proj(queries)
    answers, count = torch.zeros((), device=device), 0
    for part in batch.parts:
        rows = len(part.after)
        before = model.embed(part.before.to(device)).expand(rows, -1, -1)
        own = embeds[part.owners.to(device)].to(before.dtype)
        hidden = model.hidden(torch.cat((before, own, model.embed(part.after.to(device))), 1))
        logits = model.head(hidden.flatten(0, 1)[part.positions.to(device)])
        answers = answers + F.cross_entropy(logits, part.targets.to(device), reduction="sum")
        count += len(part.targets)
    return torch.cat(((answers / count)[None], helpers(vision, queries, batch.labels.to(device))))


def rate_at(progress: float, options: TrainOptions) -> float:
    """Learning rate at a share of the run: linear warm-up, then a cosine down to 1 % of the peak."""
    if progress < options.warmup:
        return options.peak_rate * max(progress / options.warmup, 0.01)
    passed = min(1.0, (progress - options.warmup) / (1 - options.warmup))
    return options.peak_rate * (0.01 + 0.495 * (1 + math.cos(math.pi * passed)))


def _optimizer(modules: list[nn.Module], options: TrainOptions) -> torch.optim.Optimizer:
    every = [parameter for module in modules for parameter in module.parameters()]
    groups = [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": options.decay},
        {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.peak_rate, betas=(0.9, 0.98), fused=True)


class Trainer:
    """A model under training with its log and its checks on held-out scenes."""

    def __init__(self, model: MiniGPT4, options: TrainOptions, vocabulary: Vocabulary, out: Path) -> None:
        self.device = next(model.parameters()).device
        self.model, self.options, self.vocabulary, self.out = model, options, vocabulary, out
        self.helpers = Helpers(model.shape).to(self.device)
        self.optimizer = _optimizer([model, self.helpers], options)
        self.items = held_out_items(range(options.check_items))
        self.log: list[dict[str, Any]] = []
        self.step, self.begun = 0, time.perf_counter()

    @property
    def progress(self) -> float:
        """Share of the run that is over."""
        if self.options.steps:
            return self.step / self.options.steps
        return (time.perf_counter() - self.begun) / self.options.seconds

    def update(self, batch: Batch) -> Tensor:
        """One step; returns the losses [3]."""
        progress = self.progress
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(progress, self.options)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            parts = losses(self.model, self.helpers, batch, self.device)
        helper = self.options.helper_weight * max(0.0, 1 - progress)
        (parts[0] + helper * (parts[1] + parts[2])).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return parts.detach()

    def run(self, stream: Iterator[Batch]) -> None:
        """Train to the end; check and save ``checks`` times on the way."""
        sums, since = torch.zeros(3, device=self.device), 0
        checked = 0
        while self.progress < 1:
            sums += self.update(next(stream))
            since += 1
            if self.step % self.options.report_every == 0:
                self._report(sums / since)
                sums, since = torch.zeros_like(sums), 0
            if checked < self.options.checks - 1 and self.progress > (checked + 1) / self.options.checks:
                checked += 1
                self.check(self.items)
        if since:
            self._report(sums / since)
        self.check(self.items)

    def _report(self, parts: Tensor) -> None:
        names = ("answers", "patches", "queries")
        values = {name: round(value, 4) for name, value in zip(names, parts.tolist(), strict=True)}
        entry = {"step": self.step, **values, "seconds": round(time.perf_counter() - self.begun, 1)}
        self.log.append(entry)
        print(json.dumps(entry), flush=True)

    def check(self, items: list[Item]) -> float:
        """Print exact answers by task and a few samples, and save; returns the share of exact answers."""
        self.model.eval()
        results = score(self.model, self.vocabulary, items)
        self.model.train()
        found = summary(results)
        self.log.append({"step": self.step, "exact": found})
        print(json.dumps(self.log[-1]), flush=True)
        wrong = [result for result in results if not result.exact]
        for result in [*results[:3], *wrong[:4]]:
            item = result.item
            print(f"   scene {item.scene}: {item.rounds[-1].question} -> {result.text!r}", end="")
            print("" if result.exact else f", not {item.rounds[-1].answer!r}", flush=True)
        self.save()
        return found["all"]

    def save(self) -> None:
        """Write weights (fp32) and the log."""
        self.out.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}
        save_file(weights, self.out / "weights.safetensors")
        report = {
            "options": asdict(self.options),
            "shape": asdict(self.model.shape),
            "steps": self.step,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "log": self.log,
        }
        (self.out / "train.json").write_text(json.dumps(report, indent=1) + "\n")


def _parse() -> tuple[argparse.Namespace, TrainOptions]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/pocket-vision/llama"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="go on from this run's weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in asdict(TrainOptions()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    return args, TrainOptions(**{name: getattr(args, name) for name in asdict(TrainOptions())})


def main() -> None:
    """Train, with checks on held-out scenes on the way."""
    args, options = _parse()
    vocabulary = Vocabulary(args.tokenizer)
    shape = replace(Shape(), vocab=vocabulary.size)
    plan = Plan(args.tokenizer, options.pictures, options.talks, pool=options.pool)
    # The workers start before CUDA does.
    stream = batches(plan, options.seed, shape.queries, options.workers)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = MiniGPT4(shape)
    if args.init:
        model.load_state_dict(load_file(args.init / "weights.safetensors"))
    print(f"{sum(p.numel() for p in model.parameters())} parameters on {args.device}", flush=True)
    trainer = Trainer(model.to(args.device), options, vocabulary, args.out)
    trainer.run(stream)


if __name__ == "__main__":
    main()
