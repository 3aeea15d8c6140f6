"""Train the pocket chat model on generated conversations: one GPU, minutes.

The loss counts what the assistant produces in full and everything else with a small weight; every
conversation starts at position 0.

    python -m recipes.train_pocket --steps 4000 --out run/
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.make_corpus import Corpus, make_corpus
from recipes.pocket_model import PocketModel, PocketShape


@dataclass(frozen=True)
class TrainOptions:
    """Everything that fixes a run. ``seconds`` > 0 sets ``steps`` from the speed of the first 150 steps."""

    steps: int = 4000
    seconds: float = 0.0
    batch_tokens: int = 65536
    peak_rate: float = 2e-3
    warmup: int = 200
    decay: float = 0.1
    prompt_weight: float = 0.1
    seed: int = 1
    bucket: int = 32


class Batches:
    """Endless batches of about ``batch_tokens`` ids, each of conversations of about one length."""

    def __init__(self, corpus: Corpus, options: TrainOptions, device: torch.device) -> None:
        self.options = options
        self.ids = torch.from_numpy(corpus.ids).to(device)
        self.answers = torch.from_numpy(corpus.answers).to(device)
        self.starts = torch.from_numpy(corpus.starts).to(device)
        sizes = np.diff(corpus.starts)
        self.rounded = -(-sizes // options.bucket) * options.bucket
        self.rng = np.random.default_rng(options.seed)

    def _epoch(self) -> list[np.ndarray]:
        batches = []
        for length in np.unique(self.rounded):
            members = self.rng.permutation(np.flatnonzero(self.rounded == length))
            rows = max(1, self.options.batch_tokens // int(length))
            batches += [members[i : i + rows] for i in range(0, max(1, len(members) - rows + 1), rows)]
        return [batches[i] for i in self.rng.permutation(len(batches))]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Inputs, targets and loss weights, each [rows, tokens]."""
        while True:
            for members in self._epoch():
                yield self._gather(members)

    def _gather(self, members: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.from_numpy(members).to(self.starts.device)
        first, end = self.starts[rows][:, None], self.starts[rows + 1][:, None]
        length = int(self.rounded[members[0]])
        at = first + torch.arange(length + 1, device=rows.device)[None]  # [rows, length + 1]
        inside = at < end
        at = at.clamp(max=len(self.ids) - 1)
        ids = self.ids[at].long() * inside
        weights = torch.where(self.answers[at], 1.0, self.options.prompt_weight) * inside
        return ids[:, :-1], ids[:, 1:], weights[:, 1:]


def weighted_loss(model: PocketModel, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross entropy (nats) over tokens, each counted with its weight."""
    hidden = model(inputs)
    chosen = weights > 0
    losses = F.cross_entropy(model.lm_head(hidden[chosen]).float(), targets[chosen], reduction="none")
    return (losses * weights[chosen]).sum() / weights[chosen].sum()


def rate_at(step: int, total: int, options: TrainOptions) -> float:
    """Learning rate: linear warm-up, then a cosine down to 2 % of the peak."""
    if step < options.warmup:
        return options.peak_rate * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, total - options.warmup)
    return options.peak_rate * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, progress))))


def _optimizer(model: PocketModel, options: TrainOptions) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": options.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.peak_rate, betas=(0.9, 0.98), fused=True)


def train(
    model: PocketModel, corpus: Corpus, options: TrainOptions, device: torch.device
) -> list[dict[str, float]]:
    """Train ``model`` in place; returns the log: step, loss (mean since the last entry), seconds, rate."""
    optimizer = _optimizer(model, options)
    batches = iter(Batches(corpus, options, device))
    log: list[dict[str, float]] = []
    total, step, since = options.steps, 0, torch.zeros((), device=device)
    start = time.perf_counter()
    while step < total:
        rate = rate_at(step, total, options)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = weighted_loss(model, *next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        since += loss.detach()
        step += 1
        if options.seconds and step == 150:
            total = _steps_that_fit(step, time.perf_counter() - start, log[-1], options)
        if step % 100 == 0 or step == total:
            seconds = time.perf_counter() - start
            log.append(
                {"step": step, "loss": float(since) / (step % 100 or 100), "seconds": seconds, "rate": rate}
            )
            print(json.dumps(log[-1]), flush=True)
            since.zero_()
    return log


def _steps_that_fit(step: int, elapsed: float, last: dict[str, float], options: TrainOptions) -> int:
    """Steps that fit ``options.seconds``, judged by the speed since the last log entry."""
    speed = (step - last["step"]) / (elapsed - last["seconds"])
    return step + int(speed * (options.seconds - elapsed))


def _parse() -> tuple[argparse.Namespace, TrainOptions, PocketShape]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/pocket-chat/qwen.tiktoken"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="start from this exported folder's weights")
    parser.add_argument("--conversations", type=int, default=1_200_000)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for kind, prefix in ((TrainOptions(), ""), (PocketShape(), "model-")):
        for name, value in asdict(kind).items():
            parser.add_argument(f"--{prefix}{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    options = TrainOptions(**{name: getattr(args, name) for name in asdict(TrainOptions())})
    return (
        args,
        options,
        PocketShape(**{name: getattr(args, f"model_{name}") for name in asdict(PocketShape())}),
    )


def main() -> None:
    """Parse the command line, make the corpus, train, and write weights (fp32) and the log."""
    args, options, shape = _parse()
    begun = time.perf_counter()
    corpus = make_corpus(args.tokenizer, args.conversations, options.seed, shape.length, args.processes)
    made = time.perf_counter() - begun
    print(f"{len(corpus.starts) - 1} conversations, {len(corpus.ids)} tokens in {made:.0f} s", flush=True)
    torch.manual_seed(options.seed)
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = PocketModel(shape).to(device)
    if args.init:
        stored = load_file(args.init / "model.safetensors")
        model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    log = train(model, corpus, options, device)
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        args.out / "weights.safetensors",
    )
    report = {
        "options": asdict(options) | {"steps": log[-1]["step"], "seconds": 0.0},
        "shape": asdict(shape),
        "corpus": {"conversations": len(corpus.starts) - 1, "tokens": len(corpus.ids), "seconds": made},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "log": log,
    }
    (args.out / "train.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
