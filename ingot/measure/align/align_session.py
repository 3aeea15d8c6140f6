"""One comparison of an engine with its original, from prompts to a report.

align("engine", "checkpoint", ["Hello"], steps=4).aligned
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ingot.building.dequantized import write_dequantized
from ingot.building.int8_inputs import SplitInput, read_int8_inputs, read_split_inputs
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.checkpoint_writer import write_checkpoint
from ingot.checkpoint.gguf.gguf_file import gguf_at
from ingot.checkpoint.gguf.gguf_parts import GgufId
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.checkpoint.minigpt4_files import is_minigpt4
from ingot.checkpoint.openai_whisper import is_openai
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import dtype_name, resolve_device
from ingot.engine.manifest import is_engine
from ingot.errors import RequestError
from ingot.llm import LLM
from ingot.measure.align.align_target import (
    AlignCase,
    AlignTarget,
    PromptGiven,
    TextCheck,
    check_same_model,
    find_target,
    given_for,
    make_cases,
)
from ingot.measure.align.checkpoint_tensors import TensorCheck, compare_tensors
from ingot.measure.align.diagnosis import explain_first
from ingot.measure.align.encoder_inputs import Given
from ingot.measure.align.engine_stages import record_engine
from ingot.measure.align.first_divergence import Divergence, Finding
from ingot.measure.align.isolated_judge import AloneJudge, least_of
from ingot.measure.align.original import (
    Checking,
    HuggingFace,
    OriginalRun,
    OtherEngine,
    Reference,
    Trace,
    open_reference,
)
from ingot.measure.align.stage_verdict import (
    SERVED,
    FirstBad,
    GreedyRow,
    StageRow,
    compare_case,
    compare_greedy,
    compare_served,
    evidence,
    first_bad,
    look_at,
)
from ingot.measure.align.stages.stage_names import StageFile
from ingot.measure.align.stages.staged_run import Stored
from ingot.measure.align.stop_ids_check import STAGE, StopCheck, compare_stops, explain_stops
from ingot.quant.schemes.in_panels import splits_here

DEFAULT_STEPS = 4
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """The result of a comparison.

    Attributes:
        engine, reference, noise: what was compared, and the two runs between which the floor is measured.
        dtype: of the engine's arithmetic.
        rows: every stage, in order.
        stops: the ids that end answers.
        first: the first bad stage; None if all are within their limits.
        findings: what explains it, best first.
        quant: a quantized engine's scheme, and the weights of the reference; else None.
        tensors: the engine's compared with the checkpoint's; None if the reference is a trace.
    """

    engine: str
    reference: str
    noise: str
    dtype: str
    device: str
    steps: int
    cases: list[AlignCase]
    rows: list[StageRow]
    greedy: list[GreedyRow]
    stops: StopCheck
    first: FirstBad | None
    findings: list[Finding] = field(default_factory=list)
    quant: str | None = None
    tensors: TensorCheck | None = None

    @property
    def bad_texts(self) -> list[TextCheck]:
        return [check for case in self.cases for check in case.checks if check.is_bad]

    @property
    def bad_greedy(self) -> list[GreedyRow]:
        return [row for row in self.greedy if row.is_bad]

    @property
    def aligned(self) -> bool:
        return not (self.first or self.bad_texts or self.stops.is_bad or self.bad_greedy or self.bad_tensors)

    @property
    def bad_tensors(self) -> list[str]:
        return [] if self.tensors is None else [one.name for one in self.tensors.differences]

    @property
    def first_stage(self) -> str | None:
        if self.bad_texts:
            return self.bad_texts[0].stage
        if self.stops.is_bad:
            return STAGE
        if self.first is not None:
            return self.first.row.stage
        if self.bad_greedy:
            return "greedy ids"
        return f"tensor {self.bad_tensors[0]}" if self.bad_tensors else None


def align(
    engine: str | Path,
    reference: str | Path,
    prompts: Sequence[PromptGiven] = (),
    *,
    steps: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    original: str = "auto",
    progress: Progress = lambda text: None,
) -> Report:
    """Compare an engine with its original, stage by stage.

    Args:
        engine: an engine folder; a checkpoint or a Hugging Face id is assembled in memory.
        reference: a checkpoint folder, a Hugging Face id, a GGUF file, OpenAI's ``.pt`` file, another
            engine, or a trace.
        prompts, steps: text, token ids or messages, and the number of cached decode steps after each (4); a
            trace has its own of both.
        dtype: of the engine's arithmetic, as ``compute_dtype`` of ``LLM``.
        original: ``hf``, ``ingot`` (our own fp32 path), or ``auto``: Hugging Face's class if there is one.

    Raises:
        RequestError: a prompt cannot be used, or prompt and steps do not fit.
        CheckpointError, EngineError: engine or reference cannot be read.
        DeviceError: the device is not there, or transformers is not installed.
    """
    if steps is not None and steps < 0:
        raise RequestError("steps must be at least 0", seen=steps, field="steps")
    place = resolve_device(device)
    target = find_target(str(engine), place, dtype)
    with tempfile.TemporaryDirectory(prefix="ingot-align-") as name:
        folder = Path(name)
        if (single := _single_file(reference)) is not None:  # as the folder that Hugging Face's class reads
            progress("unpacking the reference")
            with open_checkpoint(single) as checkpoint:
                reference = write_checkpoint(checkpoint, folder / "unpacked")
        source = open_reference(str(reference), original, target.path, target.build, place)
        check_same_model(target, source)
        source.given = given_for(target, source)
        cases, steps = make_cases(target, source, prompts, DEFAULT_STEPS if steps is None else steps)
        quant, tensors = _quant_text(target, source), None
        if source.checkpoint is not None:
            progress("comparing tensors")
            tensors = compare_tensors(target, source.checkpoint)
        source = _of_same_weights(target, source, original, folder, progress)
        found = _run(target, source, cases, steps, place, folder, progress)
    described = (str(engine), source.name, source.noise_name, dtype_name(target.compute), str(place), steps)
    return Report(*described, cases, *found, quant, tensors)


def _of_same_weights(
    target: AlignTarget, source: Reference, original: str, folder: Path, progress: Progress
) -> Reference:
    """The reference with a quantized engine's weights, dequantized; otherwise as it is."""
    if target.quant.dense:
        return source
    source.inputs = splits = _split_inputs(target, source)
    if source.checkpoint is None:
        return source
    if isinstance(source, Checking) and is_minigpt4(source.checkpoint):
        # Its several files are not written again: the checking decoder dequantizes by its own code.
        source.weights = Path(target.path)
        return source
    progress("dequantizing the engine's weights")
    own = write_dequantized(Path(target.path), source.checkpoint, folder / "dequantized")
    # The files hold the values that the engine stores.
    build = replace(target.build, dtype="fp32", encoder_dtype=None)
    found = open_reference(str(own), original, target.path, build, source.device)
    found.given = source.given
    found.inputs = (*read_int8_inputs(Path(target.path), source.checkpoint), *splits)
    return found


def _split_inputs(target: AlignTarget, source: Reference) -> tuple[SplitInput, ...]:
    """The inputs that the engine's products split: in fp32 on a CPU."""
    if source.device.type != "cpu" or target.compute != torch.float32 or not splits_here():
        return ()
    named = source.checkpoint if isinstance(source, HuggingFace) else None
    return read_split_inputs(Path(target.path), named)


def _run(
    target: AlignTarget,
    source: Reference,
    cases: list[AlignCase],
    steps: int,
    place: torch.device,
    folder: Path,
    progress: Progress,
) -> tuple[list[StageRow], list[GreedyRow], StopCheck, FirstBad | None, list[Finding]]:
    """Both sides, one after the other, and their differences."""
    progress("running the reference")
    runs = source.record(folder, [case.ids for case in cases], steps, target.compute)
    progress("running the engine")
    block = RuntimeConfig().block_size
    cache_tokens = -(-target.build.max_seq_len // block) * block  # the rest of memory stays free for modules
    runtime = RuntimeConfig(cache_tokens=cache_tokens, prefix_reuse=False, kv_dtype="model")
    llm = LLM(target.path, str(place), compute_dtype=dtype_name(target.compute), runtime=runtime)
    stored = Stored.of(Path(target.path), target.build, place)
    base = source.file.dtype if isinstance(source, Trace) else torch.float32
    judging = partial(AloneJudge, llm.engine, stored, base=base)
    found = _compare(llm, judging, folder, cases, runs, steps, source.given, progress)
    rows, greedy, first, causes = found
    expected, against = source.stop_ids(runs[0].expected)
    stops = compare_stops(target.text, source.checkpoint, expected, llm.executor.stop_ids, against)
    findings = [*_explain(llm, _other_ids(cases)), *explain_stops(stops, greedy), *causes]
    if not findings and first is None:
        findings = _explain(llm, _other_choices(greedy))
    return rows, greedy, stops, first, findings


def _single_file(reference: str | Path) -> Path | None:
    """The file of a reference that is OpenAI's or GGUF; None: it is a folder or an engine."""
    path = Path(reference)
    if is_openai(path) or is_engine(path):
        return path if is_openai(path) else None
    if not path.exists() and GgufId.of(str(reference)) is not None:
        path = resolve_checkpoint(str(reference))
    return gguf_at(path)


def _quant_text(target: AlignTarget, source: Reference) -> str | None:
    """A quantized engine's scheme, and the weights of its reference."""
    if isinstance(source, OtherEngine):
        same = source.manifest.quant == target.quant
        differ = f"; the reference is {source.manifest.quant.summary}: differences are expected"
        return None if same and target.quant.dense else target.quant.summary + ("" if same else differ)
    if target.quant.dense:
        return None
    if source.checkpoint is None:
        return f"{target.quant.summary}; the trace has the original's weights: differences are expected"
    rounded = ", and rounds activations as it does" if target.quant.activations != "none" else ""
    return f"{target.quant.summary}; the reference computes with these weights, dequantized{rounded}"


def _compare(
    llm: LLM,
    judging: Callable[[StageFile], AloneJudge],
    folder: Path,
    cases: list[AlignCase],
    runs: list[OriginalRun],
    steps: int,
    given: Given | None,
    progress: Progress,
) -> tuple[list[StageRow], list[GreedyRow], FirstBad | None, list[Finding]]:
    rows: list[StageRow] = []
    greedy: list[GreedyRow] = []
    eps = least_of(llm.engine.dtype)
    first: FirstBad | None = None
    findings: list[Finding] = []
    for i, (case, run) in enumerate(zip(cases, runs, strict=True)):
        paths = [folder / f"{kind}-{i}.safetensors" for kind in ("engine", "served")]
        record_engine(llm, paths[0], case.ids, steps, run.forced, given=given)
        choices = record_engine(llm, paths[1], case.ids, steps, run.forced, as_served=True, given=given)
        progress(f"comparing {i + 1}/{len(cases)}")
        got, served = StageFile(paths[0]), StageFile(paths[1])
        judge = judging(run.expected)
        own = [*compare_case(i, run, got, judge, eps), *compare_served(i, run, served, eps)]
        rows += own
        greedy += compare_greedy(i, run, choices, eps)
        bad = first_bad(own) if first is None else None
        if bad is not None:
            side = served if bad[0].stage == SERVED else got
            first = look_at(*bad, run, side, judge)
            if side is got:
                progress("testing causes")
                findings = _explain(llm, evidence(*bad, own, run, got, judge.isolated))
    return rows, greedy, first, findings


def _other_ids(cases: Sequence[AlignCase]) -> list[Divergence]:
    checks = [c for case in cases for c in case.checks if c.is_bad and c.stage == "token ids"]
    return [_ids_divergence("ids", check.expected, check.got) for check in checks[:1]]


def _other_choices(greedy: Sequence[GreedyRow]) -> list[Divergence]:
    case = next((row.case for row in greedy if row.is_bad), None)
    own = [row for row in greedy if row.case == case]
    return [_ids_divergence("greedy", [r.expected for r in own], [r.got for r in own])] if own else []


def _ids_divergence(stage: str, expected: Sequence[Any], got: Sequence[Any]) -> Divergence:
    theirs, ours = torch.tensor(expected), torch.tensor(got)
    return Divergence(stage, None, 0, torch.arange(len(theirs)), theirs, theirs, ours, 0.0)


def _explain(llm: LLM, divergences: Sequence[Divergence]) -> list[Finding]:
    """Causes; empty if none explains the difference."""
    found = explain_first(divergences, llm.engine.model, llm.engine.manifest.model)
    return [] if found is None else list(found[1])
