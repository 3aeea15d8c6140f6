"""Golden cases of an engine that was just written: prompts through the reference in fp32, greedy
continuations, and the noise floors.

They cost one pass over the weights for each new token and one for the floors, with the arithmetic of 1,200
tokens in all, and the memory of one matrix; a GPU with room for the weights reads them once. Where every pass
reads the file again, fewer new tokens (3 at least) keep the reading near 16 GB, and above 4 GB the floors are
of the short case alone. The values depend on the machine's PyTorch and number of threads. Below 256 MB of
weights a CPU uses one.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ingot.building.golden.golden_encoder import (
    GoldenInput,
    claimed,
    encoder_distances,
    finer,
    golden_inputs,
)
from ingot.building.golden.golden_prompts import GoldenPrompt, golden_prompts, spliced_ids
from ingot.config.build_config import BuildConfig
from ingot.config.half_dtypes import HalfDtypes
from ingot.device import cpu_name, parse_dtype
from ingot.engine.manifest import WEIGHTS_FILE
from ingot.engine.proof_file import (
    SPLIT,
    Claims,
    Floor,
    GoldenCase,
    LogitsRow,
    Position,
    Proof,
    ProofOrigin,
    manifest_hash,
)
from ingot.engine.reference_run import (
    EXACT,
    FINER,
    FLIPPED,
    Arithmetic,
    EngineTensors,
    ReferenceRun,
    SequenceSpan,
)
from ingot.engine.sketch import OVERFLOW, Checksum, Sketch, distance, rounded
from ingot.engine.split_inputs import split_feed
from ingot.layers.decoder import Decoder
from ingot.layers.linear import any_rounded
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.version import VERSION

NEW_TOKENS = 16
TOP = 5
FLOOR_CASES = ("short", "script", "over one block")
_FEWEST_NEW = 3
_MOST_READ = 16 << 30
_SMALL = 256 << 20
_LARGE = 4 << 30
_MOST_ROWS_OF = 100  # tokens of a prompt whose whole logits are kept at some positions
_FLIPS = "flips"
_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


@dataclass
class _OpenCase:
    """A case whose continuation is being computed."""

    number: int
    prompt: GoldenPrompt
    ids: tuple[int, ...]  # of the prompt, with placeholders
    rope_offset: int
    input: int | None = None
    new_ids: list[int] = field(default_factory=list)
    steps: list[Position] = field(default_factory=list)
    rows: list[LogitsRow] = field(default_factory=list)
    sketches: dict[str, dict[str, Sketch]] = field(default_factory=lambda: {"prompt": {}, "new": {}})

    def span(self, ids: Sequence[int], start: int) -> SequenceSpan:
        return SequenceSpan(self.number, tuple(ids), start, self.rope_offset, self.input)

    def case(self) -> GoldenCase:
        prompt, new = (
            {name: sketch.checksum() for name, sketch in self.sketches[part].items()}
            for part in ("prompt", "new")
        )
        own, ids, steps, rows = self.prompt, tuple(self.new_ids), tuple(self.steps), tuple(self.rows)
        return GoldenCase(own.name, own.text, own.ids, ids, steps, rows, prompt, new, self.input)


def make_proof(
    folder: Path,
    model: Decoder,
    build: BuildConfig,
    tokenizer: Tokenizer | None,
    device: torch.device,
    progress: Progress | None = None,
) -> Proof | None:
    """The proof of an engine folder whose weights and manifest are written; writes nothing.

    Args:
        model: the empty modules (on ``meta``).
        device: where the arithmetic runs; a GPU that lacks the memory leaves it to the CPU, with a warning.
        progress: called as (what, done, in all), for each part of the work: prompts and noise floors by
            layers, new tokens by passes.

    Returns:
        None, with a warning logged, where the model's logits are not finite: nothing can be proven of it.
    """
    progress = progress or _silent
    try:
        return _make(folder, model, build, tokenizer, device, progress)
    except torch.OutOfMemoryError:
        _log.warning("not enough GPU memory for the proof; making it on the CPU")
        return _make(folder, model, build, tokenizer, torch.device("cpu"), progress)


@torch.inference_mode()
def _make(
    folder: Path,
    model: Decoder,
    build: BuildConfig,
    tokenizer: Tokenizer | None,
    device: torch.device,
    progress: Progress,
) -> Proof | None:
    weights = EngineTensors(folder / WEIGHTS_FILE, model, device)
    with steady_threads(weights.num_bytes, weights.device) as threads:
        count = _new_tokens(weights, build.max_seq_len)
        given = golden_inputs(model.config)
        room = build.max_seq_len - count - model.config.placeholders if count else 0
        prompts = golden_prompts(tokenizer, model.config.vocab_size, max(room, 0))
        cases = _cases(model, prompts, len(given))
        try:
            run = ReferenceRun(model, weights, EXACT, kv_dtype=build.kv_dtype)
            inputs = tuple(claimed(run, i, one) for i, one in enumerate(given))
            _continue(run, cases, count, progress)
            floors = _floors(model, weights, cases, given, build, progress)
        except _NotFinite:
            _log.warning("the engine has no proof: its logits are not finite")
            return None
    for name, floor in floors.items():
        first = next((module for module, value in floor.modules.items() if value >= OVERFLOW), None)
        if first is not None:
            _log.warning("the model overflows in %s, first in %s; build it with `dtype=bf16`", name, first)
    claims = Claims(manifest_hash(folder), tuple(c.case() for c in cases), floors, inputs=inputs)
    where = device_name(device)
    return Proof.of(claims, ProofOrigin(where, threads, str(build.dtypes), VERSION, torch.__version__))


def _cases(model: Decoder, prompts: Sequence[GoldenPrompt], inputs: int) -> list[_OpenCase]:
    """Prompts with the inputs in turns; where inputs are spliced, one in three is text alone."""
    splices, found = model.config.splices, []
    for number, prompt in enumerate(prompts):
        turn = number % (inputs + splices) if inputs else 0
        given = turn if turn < inputs else None
        ids = prompt.ids
        if given is not None and splices:
            assert model.config.encoder is not None
            ids = spliced_ids(ids, model.config.placeholders, model.config.encoder.placeholder_id)
            given = given if ids != prompt.ids else None
        found.append(_OpenCase(number, prompt, ids, model.rope_offset(len(ids)), given))
    return found


class _NotFinite(Exception):
    """A logit is not finite."""


@contextmanager
def steady_threads(num_bytes: int, device: torch.device) -> Iterator[int]:
    """One thread for a small model on a CPU: as fast, and always the same values. Yields the threads."""
    before = torch.get_num_threads()
    if device.type == "cpu" and num_bytes < _SMALL:
        torch.set_num_threads(1)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def device_name(device: torch.device) -> str:
    """A GPU's name, or the CPU's as the system gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name() or "CPU"


def row_digest(logits: torch.Tensor) -> str:
    """sha256 of one row of logits [vocab_size], rounded to 1/64."""
    steps = (logits.double() * 64).round().to(torch.int64).cpu()
    return hashlib.sha256(steps.numpy().tobytes()).hexdigest()


def centred(logits: torch.Tensor) -> torch.Tensor:
    """One row of logits [vocab_size] less its mean, which no probability depends on, as [1, vocab_size]."""
    wide = logits.double()
    return (wide - wide.mean())[None]


def row_checksum(logits: torch.Tensor) -> Checksum:
    """Checksum of one row of logits [vocab_size]."""
    return Sketch("logits").add(centred(logits), 0).checksum()


def _silent(what: str, done: int, total: int) -> None:
    return


def _new_tokens(weights: EngineTensors, max_seq_len: int) -> int:
    passes = NEW_TOKENS
    if not weights.resident:
        passes = max(_FEWEST_NEW, min(NEW_TOKENS, _MOST_READ // max(weights.num_bytes, 1)))
    return min(passes, max_seq_len // 2)


def _continue(run: ReferenceRun, cases: list[_OpenCase], count: int, progress: Progress) -> None:
    """Prompts, then one token per pass for every case, greedily."""
    if not cases:
        return
    prompts, starts = [c.ids for c in cases], [len(c.ids) for c in cases]
    logits = _pass(run, cases, "prompt", prompts, [0] * len(cases), progress)
    for step in range(count):
        progress("golden cases, new tokens", step, count)
        for case, row in zip(cases, logits, strict=True):
            case.steps.append(_position(row))
            case.new_ids.append(case.steps[-1].top_ids[0])
        if step + 1 < count:
            last = [case.new_ids[-1:] for case in cases]
            logits = _pass(run, cases, "new", last, [n + step for n in starts])


def _pass(
    run: ReferenceRun,
    cases: list[_OpenCase],
    part: str,
    ids: Sequence[Sequence[int]],
    starts: Sequence[int],
    progress: Progress = _silent,
) -> torch.Tensor:
    """Compute tokens of every case; returns the logits after the last of each, [cases, vocab_size]."""
    spans = [case.span(new, start) for case, new, start in zip(cases, ids, starts, strict=True)]
    counts = [len(span.ids) for span in spans]

    def see(name: str, output: torch.Tensor) -> None:
        for case, rows in zip(cases, output.split(counts), strict=True):
            sketch = case.sketches[part].setdefault(name, Sketch(name))
            sketch.add(rows, first=0 if part == "prompt" else len(case.new_ids) - 1)

    hidden = run.embed(spans)
    for index in range(run.config.num_layers):
        progress("golden cases, prompts", index, run.config.num_layers)
        hidden = run.layer(index, hidden, spans, see)
        run.weights.release()
    hidden = run.final_norm(hidden, see)
    # Whole logits are kept at the first, a middle and the last token of a prompt that is not long.
    chosen: list[list[int]] = []
    for count in counts:
        short = part == "prompt" and count <= _MOST_ROWS_OF
        chosen.append(sorted({0, count // 2, count - 1}) if short else [])
    starts_in_pass = itertools.accumulate(counts, initial=0)
    wanted = [[*rows, n - 1] for rows, n in zip(chosen, counts, strict=True)]
    places = [first + row for first, rows in zip(starts_in_pass, wanted, strict=False) for row in rows]
    logits = run.logits(hidden[torch.tensor(places, device=hidden.device)])
    run.weights.release()
    last = []
    for case, rows, own in zip(cases, chosen, logits.split([len(w) for w in wanted]), strict=True):
        case.rows += [LogitsRow(p, row_checksum(r), row_digest(r)) for p, r in zip(rows, own, strict=False)]
        last.append(own[-1])
    return torch.stack(last)


def _position(row: torch.Tensor) -> Position:
    if not bool(torch.isfinite(row).all()):
        raise _NotFinite
    values, ids = row.topk(min(TOP, row.shape[0]))
    chosen = int(row.argmax())
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    order = sorted(pairs, key=lambda pair: (pair[0] != chosen, -pair[1]))
    ids_, values_ = zip(*order, strict=True)
    return Position(tuple(ids_), tuple(map(rounded, values_)), rounded(float(row.double().logsumexp(0))))


def _floors(
    model: Decoder,
    weights: EngineTensors,
    cases: list[_OpenCase],
    inputs: Sequence[GoldenInput],
    build: BuildConfig,
    progress: Progress,
) -> dict[str, Floor]:
    """Distances of fp32 from fp64 and of the engine's dtypes from fp32, over some of the cases in one pass.

    Where activations, or keys and values, are rounded to 8 bits, a last bit of fp32 can change a quantized
    value by one, and then all that follows is off by more than fp32's noise. Whether that happens is chance.
    So no floor is below what it costs that it happens once in every row (``flips`` of plain_rows.py). Where a
    CPU may round a product's input to 23 bits, fp32 so is beside fp64, too, whatever this machine does.
    """
    names = FLOOR_CASES[:1] if weights.num_bytes > _LARGE and not weights.resident else FLOOR_CASES
    chosen = [c for c in cases if c.prompt.name in names] or cases
    if not chosen:
        return {}
    own, kv_dtype = build.dtypes, build.kv_dtype
    ways: dict[str, _Way] = {"fp64": (FINER, FINER), "fp32": (EXACT, EXACT)}
    if str(own) != "fp32":
        ways[str(own)] = _rounding(own.decoder), _rounding(own.encoder)
    if kv_dtype != "model" or any_rounded(model):
        ways[_FLIPS] = FLIPPED, FLIPPED
    feeds = {SPLIT: feed} if (feed := split_feed(model, weights)) is not None else {}
    ways |= dict.fromkeys(feeds, (EXACT, EXACT))
    spans = [c.span((*c.ids, *c.new_ids[:-1]), 0) for c in chosen]
    runs = {
        name: ReferenceRun(
            model,
            weights,
            way,
            single=True,
            feed=feeds.get(name),
            kv_dtype=kv_dtype,
            encoder_arithmetic=encoder_way,
        )
        for name, (way, encoder_way) in ways.items()
    }
    found = _outputs(weights, runs, spans, chosen, encoder_distances(runs, inputs), progress)
    floors = {name: found.floor(name, better, own) for name, better in finer(ways)}
    # Libraries may sum one term after another, as they do for a single row: the error of such a sum of K
    # terms walks at random to about eps sqrt(K) / 4, where blocked sums stay below. All floors grow as the
    # first module's does, since errors pass through the layers in proportion. The sums that set the floors
    # are of a row's channels, or of the positions that cross-attention adds up.
    encoder = model.config.encoder if model.config.crosses else None
    terms = max(model.config.hidden_size, 0 if encoder is None else encoder.max_positions)
    walk, floor = torch.finfo(torch.float32).eps * math.sqrt(terms) / 4, floors["fp32"]
    scale = max(1.0, walk / next(iter(floor.modules.values())))
    modules = {name: rounded(value * scale) for name, value in floor.modules.items()}
    floors["fp32"] = Floor(modules, rounded(floor.logits * scale), rounded(floor.logprobs * scale))
    if feeds:
        floors[SPLIT] = _larger(floors[SPLIT], floors["fp32"])
    if own.other is not None:  # until the other half's outputs come in, a half in fp32 has fp32's noise
        floors[str(own)] = _larger(floors[str(own)], floors["fp32"])
    flips = floors.pop(_FLIPS, None)
    return floors if flips is None else {name: _larger(own, flips) for name, own in floors.items()}


_Way = tuple[Arithmetic, Arithmetic]  # of the decoder, of the encoder


def _rounding(dtype: str) -> Arithmetic:
    """fp32, with every module's output rounded to ``dtype``."""
    return EXACT if dtype == "fp32" else Arithmetic(torch.float32, parse_dtype(dtype))


def _larger(one: Floor, other: Floor) -> Floor:
    modules = {name: max(value, other.modules[name]) for name, value in one.modules.items()}
    return Floor(modules, max(one.logits, other.logits), max(one.logprobs, other.logprobs))


@dataclass
class _Distances:
    """What the runs of different arithmetic differ by."""

    modules: dict[str, dict[str, float]]
    logits: dict[str, torch.Tensor]
    ids: torch.Tensor

    def floor(self, name: str, better: str, own: HalfDtypes) -> Floor:
        """Of one arithmetic beside a finer one; ``own``: the engine's dtypes."""
        dtypes = own if name == str(own) else HalfDtypes.of("fp32")
        eps = torch.finfo(parse_dtype(dtypes.decoder)).eps
        eps_of = {n: torch.finfo(parse_dtype(dtypes.at(n))).eps for n in self.modules[name]}
        ours, theirs = self.logits[name].double(), self.logits[better].double()
        rows = max(distance(centred(a), centred(b)) for a, b in zip(ours, theirs, strict=True))
        gap = (ours.log_softmax(-1) - theirs.log_softmax(-1)).gather(1, self.ids).abs().max()
        largest = float(theirs.gather(1, self.ids).abs().max())
        logprobs = max(float(gap), eps * largest) if bool(torch.isfinite(gap)) else OVERFLOW
        modules = {n: rounded(max(d, eps_of[n])) for n, d in self.modules[name].items()}
        return Floor(modules, rounded(max(rows, eps)), rounded(logprobs))


def _outputs(
    weights: EngineTensors,
    runs: dict[str, ReferenceRun],
    spans: list[SequenceSpan],
    cases: list[_OpenCase],
    modules: dict[str, dict[str, float]],
    progress: Progress,
) -> _Distances:
    """All runs layer by layer, so that a matrix is read once; ``modules`` are those that ran before."""
    counts = [len(span.ids) for span in spans]
    rows: list[int] = []  # of the hidden states whose logits chose the new tokens
    for case, start in zip(cases, itertools.accumulate(counts, initial=0), strict=False):
        first = start + len(case.ids) - 1
        rows += range(first, first + len(case.new_ids))
    hidden = {name: run.embed(spans) for name, run in runs.items()}

    def compare(seen: dict[str, dict[str, torch.Tensor]]) -> None:
        for name, better in finer(runs):
            for module, output in seen[name].items():
                pairs = zip(output.split(counts), seen[better][module].split(counts), strict=True)
                modules[name][module] = max(distance(a, b) for a, b in pairs)

    layers = runs["fp32"].config.num_layers
    for index in range(layers):
        progress("noise floors", index, layers)
        seen: dict[str, dict[str, torch.Tensor]] = {name: {} for name in runs}
        for name, run in runs.items():
            hidden[name] = run.layer(index, hidden[name], spans, seen[name].__setitem__)
        weights.release()
        compare(seen)
    seen = {name: {} for name in runs}
    chosen = torch.tensor(rows)
    logits = {}
    for name, run in runs.items():
        hidden[name] = run.final_norm(hidden[name], seen[name].__setitem__)
        logits[name] = run.logits(hidden[name][chosen.to(hidden[name].device)]).cpu()
    compare(seen)
    ids = torch.tensor([step.top_ids for case in cases for step in case.steps])
    return _Distances(modules, logits, ids)
