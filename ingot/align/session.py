"""One comparison of an engine with its original, from prompts to a report.

Owns the order of things: prompts, the reference (loaded, run, freed), the engine, the verdict, the causes.
Knows no terminal.

    report = align("engine", "checkpoint", ["Hello"], steps=4)
    report.aligned
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ingot.align.engine_side import record_engine
from ingot.align.isolated import Isolated
from ingot.align.precision import noisy
from ingot.align.reference import Reference, ReferenceRun, Trace, open_reference
from ingot.align.stages import StageFile
from ingot.align.texts import Case, PromptGiven, TextCheck, make_case, open_original_text
from ingot.align.verdict import (
    FirstBad,
    GreedyRow,
    Row,
    compare_case,
    compare_greedy,
    divergence_of,
    first_bad,
    look_at,
)
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.checkpoint.reader import open_checkpoint
from ingot.config.build import DEFAULT_MAX_BATCH_SIZE
from ingot.config.runtime import RuntimeConfig
from ingot.device import dtype_name, parse_dtype, resolve_device
from ingot.engine.builder import build_config
from ingot.engine.loader import compute_dtype
from ingot.engine.manifest import Manifest, is_engine
from ingot.engine.text import TextParts, read_engine_text, read_text_parts
from ingot.errors import CheckpointError, RequestError
from ingot.llm import LLM

DEFAULT_PROMPT = "The quick brown fox jumps over the lazy dog. In 1969, 2 + 2 was"
DEFAULT_STEPS = 4
CULPRITS = "ingot.align.culprits"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """What a comparison found.

    Attributes:
        engine, reference, noise: what was compared, and what the floor is measured between.
        dtype: of the engine's arithmetic.
        cases: the prompts with their checks of text and ids.
        rows: every stage, in order.
        greedy: the greedy ids.
        first: the first bad stage of tensors; None where all are within their limits.
        findings: what explains it, where the search is there: objects with culprit, before, after, text.
    """

    engine: str
    reference: str
    noise: str
    dtype: str
    device: str
    steps: int
    cases: list[Case]
    rows: list[Row]
    greedy: list[GreedyRow]
    first: FirstBad | None
    findings: list[Any] = field(default_factory=list)

    @property
    def bad_texts(self) -> list[TextCheck]:
        """Checks of rendered prompts and token ids that failed."""
        return [check for case in self.cases for check in case.checks if check.is_bad]

    @property
    def bad_greedy(self) -> list[GreedyRow]:
        """Greedy ids that differ by more than noise."""
        return [row for row in self.greedy if row.is_bad]

    @property
    def aligned(self) -> bool:
        """Whether nothing is beyond noise."""
        return self.first is None and not self.bad_texts and not self.bad_greedy

    @property
    def first_stage(self) -> str | None:
        """The name of the first stage that is bad, in the order of the stages."""
        if self.bad_texts:
            return self.bad_texts[0].stage
        if self.first is not None:
            return self.first.row.stage
        return "greedy ids" if self.bad_greedy else None


@dataclass(frozen=True)
class _Target:
    """What is known of an engine before its weights are read."""

    path: str
    text: TextParts
    weights: torch.dtype
    compute: torch.dtype
    layers: tuple[int, ...] | None


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
        reference: a checkpoint folder, a Hugging Face id, or a trace.
        prompts: text, token ids or messages; a trace has its own.
        steps: cached decode steps after each prompt (4); a trace has its own.
        dtype: of the engine's arithmetic, as ``compute_dtype`` of ``LLM``.
        original: ``hf``, ``ingot`` (our own fp32 path) or ``auto``: Hugging Face's class where there is one.
        progress: is told what is under way.

    Raises:
        RequestError: a prompt cannot be used, or prompt and steps do not fit.
        CheckpointError, EngineError: engine or reference cannot be read.
        DeviceError: the device is not there, or transformers is not installed.
    """
    if steps is not None and steps < 0:
        raise RequestError("steps must be at least 0", seen=steps, fix="--steps")
    place = resolve_device(device)
    target = _target(str(engine), place, dtype)
    source = open_reference(str(reference), original, target.path, place, target.layers)
    cases, steps = _cases(target, source, prompts, DEFAULT_STEPS if steps is None else steps)
    with tempfile.TemporaryDirectory(prefix="ingot-align-") as name:
        folder = Path(name)
        progress("running the reference")
        noise = noisy(target.weights, target.compute)
        runs = source.record(folder, [case.ids for case in cases], steps, noise)
        progress("running the engine")
        llm = LLM(
            target.path,
            str(place),
            compute_dtype=dtype_name(target.compute),
            runtime=RuntimeConfig(cuda_graphs=False),
        )
        _check_shapes(llm, runs[0].expected)
        found = _compare(llm, folder, cases, runs, steps, progress)
    described = (str(engine), source.name, source.noise_name, dtype_name(target.compute), str(place), steps)
    return Report(*described, cases, *found)


def _target(path: str, device: torch.device, dtype: str) -> _Target:
    folder = Path(path)
    if is_engine(folder):
        manifest = Manifest.read(folder)
        build, text = manifest.build, read_engine_text(folder, manifest)
        compute = compute_dtype(manifest, device, dtype)
    else:
        folder = resolve_checkpoint(path)
        with open_checkpoint(folder) as source:
            build = build_config(source, "auto", DEFAULT_MAX_BATCH_SIZE, None, None)
            text = read_text_parts(source)
        own = torch.float32 if device.type == "cpu" else parse_dtype(build.dtype)
        compute = own if dtype == "auto" else parse_dtype(dtype)
    return _Target(str(folder), text, parse_dtype(build.dtype), compute, build.layers)


def _cases(
    target: _Target, source: Reference, prompts: Sequence[PromptGiven], steps: int
) -> tuple[list[Case], int]:
    if isinstance(source, Trace):
        if target.layers is not None and target.layers[0] > 0:
            raise CheckpointError("a trace of the whole model, but the engine leaves out the first layers")
        return [_traced_case(target, source, prompts)], source.file.steps
    folder = getattr(source, "checkpoint", None)
    texts = None if folder is None else open_original_text(folder)
    if not prompts and target.text.tokenizer is None:
        raise RequestError("the engine has no tokenizer, so there is no default prompt", fix="--ids")
    return [make_case(target.text, prompt, texts) for prompt in prompts or [DEFAULT_PROMPT]], steps


def _traced_case(target: _Target, source: Trace, prompts: Sequence[PromptGiven]) -> Case:
    """The trace's ids; a prompt given beside it is checked against them."""
    ids = source.file.ids(0)
    text = source.file.metadata.get("prompt")
    if len(prompts) > 1:
        raise RequestError("a trace has one prompt", seen=len(prompts), allowed="at most 1", fix="--prompt")
    given = prompts[0] if prompts else text
    if given is None or (not prompts and target.text.tokenizer is None):
        return Case("the trace's prompt", ids)
    case = make_case(target.text, given, None)
    return Case(case.title, ids, (TextCheck("token ids", ids, case.ids, "the trace"),))


def _check_shapes(llm: LLM, expected: StageFile) -> None:
    """Refuse a reference of another model."""
    config = llm.engine.manifest.model
    if expected.num_layers != config.num_layers:
        raise CheckpointError(
            "the reference is another model, or its trace leaves out attentions",
            seen=f"{expected.num_layers} layers with an attention",
            allowed=f"the engine's {config.num_layers}",
            fix="--reference",
        )


def _compare(
    llm: LLM,
    folder: Path,
    cases: list[Case],
    runs: list[ReferenceRun],
    steps: int,
    progress: Progress,
) -> tuple[list[Row], list[GreedyRow], FirstBad | None, list[Any]]:
    rows: list[Row] = []
    greedy: list[GreedyRow] = []
    engine, eps = llm.engine, torch.finfo(llm.engine.dtype).eps
    first, findings = None, []
    for i, (case, run) in enumerate(zip(cases, runs, strict=True)):
        path = folder / f"engine-{i}.safetensors"
        choices = record_engine(llm, path, case.ids, steps, run.forced)
        progress(f"comparing {i + 1}/{len(cases)}")
        got = StageFile(path)
        isolated = Isolated(engine.model, engine.dtype, engine.device, run.expected)
        own = compare_case(i, run, got, isolated, eps)
        rows += own
        greedy += compare_greedy(i, run, got, choices, eps)
        bad = first_bad(own) if first is None else None
        if bad is not None:
            first = look_at(*bad, run, got, isolated)
            progress("testing causes")
            findings = _explain(llm, divergence_of(*bad, run, got, isolated))
    return rows, greedy, first, findings


def _explain(llm: LLM, divergence: Any) -> list[Any]:
    """What the search for causes says; nothing where this installation has none."""
    if divergence is None or importlib.util.find_spec(CULPRITS) is None:
        return []
    explain = importlib.import_module(CULPRITS).explain
    return list(explain(divergence, llm.engine.model, llm.engine.manifest.model))
