"""KL divergence of a model from a reference on the same tokens, and where they differ most."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from ingot.device import resolve_device
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.eval_record import Evaluation, Progress, Record, SideRun, make_record, no_progress
from ingot.measure.evaluate.loss_limits import Limit, judge
from ingot.measure.evaluate.perplexity import (
    Document,
    WindowSettings,
    counts_of,
    each_window,
    metrics_of,
    prepare,
)
from ingot.measure.side.open_side import Side, open_side
from ingot.measure.side.side_spec import SideSpec, longest, read_text
from ingot.text.tokenizer.tokenizer import Tokenizer

DEFAULT_WINDOW = 1024
WORST = 10

_ROWS = 64  # of float64 at a time
_CONTEXT = 16  # tokens shown before a position


@dataclass(frozen=True)
class Compared:
    """Of each position, [n] on the CPU: the divergence, both losses and the regret in nats (float64), both
    likeliest tokens (int64). The regret is how much likelier the reference finds its own likeliest token than
    the engine's: near 0 where the two merely break a tie differently.
    """

    kl: torch.Tensor
    regret: torch.Tensor
    our_top: torch.Tensor
    their_top: torch.Tensor
    our_loss: torch.Tensor
    their_loss: torch.Tensor

    @staticmethod
    def joined(parts: Sequence[Compared]) -> Compared:
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return Compared(*map(torch.cat, columns))


def kl_rows(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of each row of log-probabilities [n, V], in nats: [n]."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=1)


def compare_logits(
    ours: torch.Tensor, theirs: torch.Tensor, targets: torch.Tensor, device: torch.device | None = None
) -> Compared:
    """KL(theirs || ours) = sum p (log p - log q) by row, p and q the softmax of logits [n, V] in float64,
    over the columns that both have; ``targets``, [n] int64, are the tokens that follow.
    """
    width = min(ours.shape[1], theirs.shape[1])
    parts = []
    cuts = zip(ours.split(_ROWS), theirs.split(_ROWS), targets.split(_ROWS), strict=True)
    for our_rows, their_rows, wanted in cuts:
        log_q = our_rows[:, :width].to(device, torch.float64).log_softmax(dim=1)
        log_p = their_rows[:, :width].to(device, torch.float64).log_softmax(dim=1)
        kl = kl_rows(log_p, log_q)
        column = wanted.to(log_q.device)[:, None]
        losses = [-log.gather(1, column)[:, 0] for log in (log_q, log_p)]
        our_top, their_top = log_q.argmax(dim=1), log_p.argmax(dim=1)
        regret = log_p.amax(dim=1) - log_p.gather(1, our_top[:, None])[:, 0]
        found = (kl, regret, our_top, their_top, *losses)
        parts.append(Compared(*(one.cpu() for one in found)))
    return Compared.joined(parts)


def divergence(
    spec: SideSpec,
    other: SideSpec,
    data: DataFile,
    limits: Sequence[Limit],
    reading: WindowSettings | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """KL(reference || engine) in nats and the share of positions with the same likeliest token; ``other`` is
    the reference. Both models are loaded at once.
    """
    # Two sides are open at once, so each gets a KV cache of one request.
    specs = [one.replace(cache_tokens=longest(one) + one.runtime().block_size) for one in (spec, other)]
    reading, documents, short = prepare(specs, data, reading or WindowSettings(), DEFAULT_WINDOW, apart=True)
    found, runs = _compared(specs, documents, progress)
    whole = Compared.joined(found)
    runs[0].metrics = metrics_of(whole.our_loss.sum().item(), documents)
    runs[1].metrics = metrics_of(whole.their_loss.sum().item(), documents)
    measured = divergence_metrics(whole)
    record = make_record(
        "divergence",
        data,
        asdict(reading),
        runs,
        judge(limits, measured, None),
        counts=counts_of(documents, short),
        divergence=measured,
        worst=_worst(found, documents, read_text(spec.source).tokenizer),
    )
    return Evaluation(record, [_row(d, one) for d, one in zip(documents, found, strict=True)])


def divergence_metrics(found: Compared) -> dict[str, float]:
    """Mean, median, 99th percentile and maximum of KL in nats; agreement of likeliest tokens in percent; mean
    regret in nats where they differ (0 where they never do).
    """
    values = found.kl.numpy()
    same = found.our_top == found.their_top
    agree = 100.0 * same.double().mean().item()
    return {
        "kl_mean": float(values.mean()),
        "kl_median": float(np.median(values)),
        "kl_p99": float(np.quantile(values, 0.99)),
        "kl_max": float(values.max()),
        "top1_agreement": agree,
        "top1_disagreement": 100.0 - agree,
        "top1_regret": 0.0 if same.all() else found.regret[~same].mean().item(),
    }


def _compared(
    specs: Sequence[SideSpec], documents: Sequence[Document], progress: Progress
) -> tuple[list[Compared], list[SideRun]]:
    progress("loading both", 0, sum(len(document.windows) for document in documents))
    device, seconds, tokens = resolve_device(specs[0].device), [0.0, 0.0], 0
    parts: list[list[Compared]] = [[] for _ in documents]
    with open_side(specs[0]) as ours, open_side(specs[1]) as theirs:
        for place, window, ids in each_window(documents, "comparing", progress):
            logits = [_timed(side, ids, seconds, i) for i, side in enumerate((ours, theirs))]
            our_rows, their_rows = (one[:-1][window.counted] for one in logits)
            targets = torch.tensor(ids[1:])[window.counted]
            parts[place].append(compare_logits(our_rows, their_rows, targets, device))
            tokens += len(ids)
        facts = [ours.facts(), theirs.facts()]
    runs = [SideRun(s, f, t, tokens) for s, f, t in zip(specs, facts, seconds, strict=True)]
    return [Compared.joined(own) for own in parts], runs


def _timed(side: Side, ids: list[int], seconds: list[float], place: int) -> torch.Tensor:
    start = time.perf_counter()
    logits = side.logits(ids)
    seconds[place] += time.perf_counter() - start
    return logits


def _worst(
    found: Sequence[Compared], documents: Sequence[Document], tokenizer: Tokenizer | None
) -> list[Record]:
    """The positions of the largest divergence above 0 in all documents, largest first."""
    candidates = [
        (value, number, row)
        for number, one in enumerate(found)
        for value, row in zip(*(part.tolist() for part in one.kl.topk(min(WORST, len(one.kl)))), strict=True)
        if value > 0
    ]
    candidates.sort(reverse=True)
    return [_position(documents[n], found[n], row, tokenizer) for _, n, row in candidates[:WORST]]


def _position(document: Document, found: Compared, row: int, tokenizer: Tokenizer | None) -> Record:
    """A counted token in its text, and what both models expect there."""
    place = [place for window in document.windows for place in range(window.first, window.end)][row]

    def text_of(ids: list[int]) -> str | None:
        if tokenizer is None:
            return None
        return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")

    tops = {"engine": int(found.our_top[row]), "reference": int(found.their_top[row])}
    return {
        "number": document.item.number,
        "position": place,
        "kl": found.kl[row].item(),
        "before": text_of(document.ids[max(0, place - _CONTEXT) : place]),
        "next": {"token_id": document.ids[place], "text": text_of([document.ids[place]])},
        "expected": {who: {"token_id": token, "text": text_of([token])} for who, token in tops.items()},
        "loss": {"engine": found.our_loss[row].item(), "reference": found.their_loss[row].item()},
    }


def _row(document: Document, found: Compared) -> Record:
    return {
        "number": document.item.number,
        "id": document.item.id,
        "tokens": len(document.ids),
        "counted_tokens": document.counted,
        **divergence_metrics(found),
    }
