"""Perplexity and bits per byte of running text, over sliding windows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from ingot.errors import ConfigError
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.data_item import ONLY_CAPTION, DataItem
from ingot.measure.evaluate.eval_prompts import common_text, document_ids
from ingot.measure.evaluate.eval_record import Evaluation, Progress, Record, SideRun, make_record, no_progress
from ingot.measure.evaluate.loss_limits import Limit, judge
from ingot.measure.side.open_side import open_side
from ingot.measure.side.side_spec import SideSpec, longest, usual_window
from ingot.text.tokenizer.tokenizer import Tokenizer

DEFAULT_WINDOW = 2048


@dataclass(frozen=True)
class WindowSettings:
    """How texts are read.

    Attributes:
        window: tokens per window; None: the smaller model's limit (``usual_window``), at most 2048.
        stride: tokens from one window to the next; None: half a window.
        max_tokens: of each text; None: all.
    """

    window: int | None = None
    stride: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class TextWindow:
    """Tokens ``begin`` to ``end`` are computed, ``first`` to ``end`` counted."""

    begin: int
    first: int
    end: int

    @property
    def counted(self) -> slice:
        """The counted ones of the window's log-likelihoods, which begin with its second token."""
        return slice(self.first - self.begin - 1, self.end - self.begin - 1)


@dataclass(frozen=True)
class Document:
    """A text as ids, its windows, and the bytes of its counted tokens (None without a tokenizer)."""

    item: DataItem
    ids: list[int]
    windows: tuple[TextWindow, ...]
    num_bytes: int | None

    @property
    def counted(self) -> int:
        return sum(window.end - window.first for window in self.windows)


def perplexity(
    spec: SideSpec,
    other: SideSpec | None,
    data: DataFile,
    limits: Sequence[Limit],
    reading: WindowSettings | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """exp of the mean negative log-likelihood per counted token over all documents; its mean in nats; and
    bits per byte of text.
    """
    specs = [spec] if other is None else [spec, other]
    reading, documents, short = prepare(specs, data, reading or WindowSettings(), DEFAULT_WINDOW)
    losses, runs = zip(*(_read(one, documents, progress) for one in specs), strict=True)
    deltas = [] if other is None else judge(limits, runs[0].metrics, runs[1].metrics)
    record = make_record(
        "perplexity", data, asdict(reading), runs, deltas, counts=counts_of(documents, short)
    )
    return Evaluation(record, [_row(i, d, specs, losses) for i, d in enumerate(documents)])


def prepare(
    specs: Sequence[SideSpec], data: DataFile, reading: WindowSettings, most: int, *, apart: bool = False
) -> tuple[WindowSettings, list[Document], int]:
    """The reading with its defaults filled in, the documents, and how many were too short to count. The
    default window is at most ``most``, the default stride half a window, or if ``apart`` a whole one.
    """
    for item in data.items:
        if item.image is not None:
            raise ConfigError(
                f"item {item.number} cannot be used", seen=ONLY_CAPTION, field="data", fix="`data` with texts"
            )
    text = common_text(specs, data.items)
    room = min(map(longest, specs))
    window = min(*map(usual_window, specs), most) if reading.window is None else reading.window
    if window > room:
        raise ConfigError("the window is larger than the context", seen=window, allowed=room, field="window")
    stride = reading.stride or (window if apart else max(1, window // 2))
    reading = replace(reading, window=window, stride=stride)
    kept = []
    for item in data.items:
        ids = document_ids(item, text)[: reading.max_tokens]
        cuts = tuple(windows(len(ids), window, stride))
        num_bytes = None if text.tokenizer is None else _counted_bytes(item, ids, cuts, text.tokenizer)
        if cuts:
            kept.append(Document(item, ids, cuts, num_bytes))
    if not kept:
        raise ConfigError("no text has two tokens", seen=f"{len(data.items)} texts", field="data")
    return reading, kept, len(data.items) - len(kept)


def counts_of(documents: Sequence[Document], short: int) -> Record:
    return {
        "documents": len(documents),
        "too_short": short,
        "tokens": sum(len(document.ids) for document in documents),
        "counted_tokens": sum(document.counted for document in documents),
        "windows": sum(len(document.windows) for document in documents),
        "counted_bytes": _total_bytes(documents),
    }


def _counted_bytes(item: DataItem, ids: list[int], cuts: Sequence[TextWindow], tokenizer: Tokenizer) -> int:
    """Bytes of the counted tokens, without special tokens and the space that SentencePiece prepends."""
    sizes = [0 if tokenizer.is_special(token) else len(tokenizer.token_bytes(token)) for token in ids]
    whole = item.text or item.article
    first = next((place for place, size in enumerate(sizes) if size), None)
    if whole is not None and first is not None and not whole.startswith(" "):
        sizes[first] -= tokenizer.token_bytes(ids[first]).startswith(b" ")
    return sum(sum(sizes[cut.first : cut.end]) for cut in cuts)


def each_window(
    documents: Sequence[Document], what: str, progress: Progress
) -> Iterator[tuple[int, TextWindow, list[int]]]:
    """Each window's document number, the window and its ids; reports progress after each."""
    total, done = sum(len(document.windows) for document in documents), 0
    for place, document in enumerate(documents):
        for window in document.windows:
            yield place, window, document.ids[window.begin : window.end]
            done += 1
            progress(what, done, total)


def _read(spec: SideSpec, documents: Sequence[Document], progress: Progress) -> tuple[list[float], SideRun]:
    """Each document's negative log-likelihood in nats, and the run."""
    progress(f"{spec.title}: loading", 0, sum(len(document.windows) for document in documents))
    losses, seconds, tokens = [0.0] * len(documents), 0.0, 0
    with open_side(spec) as side:
        side.log_likelihood(documents[0].ids[:2])  # warm-up
        for place, window, ids in each_window(documents, spec.title, progress):
            start = time.perf_counter()
            found = side.log_likelihood(ids)
            seconds += time.perf_counter() - start
            tokens += len(ids)
            losses[place] -= found[window.counted].double().sum().item()
        run = SideRun(spec, side.facts(), seconds, tokens)
    run.metrics = metrics_of(sum(losses), documents)
    return losses, run


def metrics_of(loss: float, documents: Sequence[Document]) -> dict[str, float | None]:
    """Perplexity, nats per token and bits per byte of a total loss in nats."""
    nats = loss / sum(document.counted for document in documents)
    num_bytes = _total_bytes(documents)
    try:
        found = math.exp(nats)
    except OverflowError:
        found = math.inf
    return {
        "perplexity": found,
        "nats_per_token": nats,
        "bits_per_byte": loss / math.log(2) / num_bytes if num_bytes else None,
    }


def _total_bytes(documents: Sequence[Document]) -> int | None:
    known = [document.num_bytes for document in documents if document.num_bytes is not None]
    return sum(known) if len(known) == len(documents) else None


def _row(place: int, document: Document, specs: Sequence[SideSpec], losses: Sequence[list[float]]) -> Record:
    row: Record = {
        "number": document.item.number,
        "id": document.item.id,
        "tokens": len(document.ids),
        "counted_tokens": document.counted,
        "windows": len(document.windows),
    }
    for spec, loss in zip(specs, losses, strict=True):
        row[spec.title] = metrics_of(loss[place], [document])
    return row


def windows(num_tokens: int, size: int, stride: int) -> Iterator[TextWindow]:
    """Windows of ``size`` tokens, each ``stride`` further. Tokens of an earlier window do not count again.

    With a stride below the size every token but the text's first counts once. With both equal the first token
    of each window has no context and does not count.
    """
    if size < 2:
        raise ConfigError("a window needs at least two tokens", seen=size, field="window")
    if not 1 <= stride <= size:
        raise ConfigError("the stride is out of range", seen=stride, allowed=f"1 to {size}", field="stride")
    done = 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + size, num_tokens)
        first = max(done, begin + 1)
        if first < end:
            yield TextWindow(begin, first, end)
        done = end
        if end == num_tokens:
            return
