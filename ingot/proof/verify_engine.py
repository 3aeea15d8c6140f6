"""Whether an engine still is what was built, on this machine: hashes, steps, golden cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from ingot.building.golden.golden_cases import device_name
from ingot.building.golden.golden_encoder import inputs_of
from ingot.building.source.source_check import SourceCheck, compare_with_source
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.config.json_config import JsonConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import dtype_name, resolve_device
from ingot.engine.engine_loader import load_engine
from ingot.engine.integrity import find_damage
from ingot.engine.manifest import Manifest
from ingot.engine.proof_file import Claims, Metric, Note, Proof, read_proof, read_when, this_host, write_note
from ingot.engine.source_figures import SourceFigures
from ingot.errors import ConfigError, EngineError, NoSuchPathError
from ingot.llm.llm import LLM
from ingot.proof.golden_replay import FACTOR, Failure, GoldenReplay, replay
from ingot.proof.step_check import StepCheck, check_steps

_CACHE_TOKENS = 2048

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Verification(JsonConfig):
    """What ``verify`` found.

    Attributes:
        verdict: ``unproven``: the files are whole, and nothing could be replayed.
        device, dtype: where and in which arithmetic the cases ran; None when nothing ran.
        factor: the limit is the noise floor times this.
        failures: what is wrong, the first cause first; ``first_bad_module`` is the one in the order of
            execution.
        notes: what was not compared, and why.
        worst: the largest deviation by what was compared, in noise floors.
        steps: the largest deviation by place of a layer, in parts of its limit (step_judge.py).
        num_steps, num_tokens: steps that were recorded as they ran, and their tokens.
        limits: what passes: of rows of logits and modules' outputs in parts of their size, of
            log-probabilities in nats.
        equal_rows, num_rows: rows of logits that round to the very digits of the proof, of how many; not
            judged.
        proven_by: where and in which dtype the proof was made, and when, if verify.json tells.
        noted: whether verify.json could be written.
        source: how far the stored tensors are from ``source``'s; None: they were not compared.
    """

    engine: str
    verdict: Literal["proven", "failed", "unproven"]
    device: str | None
    dtype: str | None
    factor: float
    failures: tuple[Failure, ...]
    first_bad_module: str | None
    notes: tuple[str, ...]
    worst: dict[str, float]
    steps: dict[str, float]
    num_steps: int
    num_tokens: int
    limits: dict[str, float]
    num_cases: int
    equal_rows: int
    num_rows: int
    num_tensors: int
    proven_by: dict[str, Any] | None
    metrics: tuple[Metric, ...]
    seconds: float
    noted: bool = False
    source: SourceFigures | None = None


def verify(
    engine: str | Path,
    device: str = "auto",
    *,
    source: str | Path | None = None,
    runtime: RuntimeConfig | None = None,
    note: bool = True,
    progress: Progress | None = None,
) -> Verification:
    """Compare an engine with its manifest and its proof on this machine.

    Args:
        source: the checkpoint that the engine was built from, a folder, a ``.pt`` file or a Hugging Face id:
            every stored tensor is compared with it.
        runtime: how the cases run; its cache is as large as they need, whatever it says.
        note: leave ``verify.json`` in the engine folder, where that can be written.
        progress: called with what is done next.

    Raises:
        EngineError: the folder is no engine, or its manifest cannot be read.
        CheckpointError: ``source`` cannot be read, is of another model, or lacks a tensor.
        ConfigError: ``runtime`` asks for another KV cache than the engine was built for.
        DeviceError: the device is not there, or too small.
    """
    folder, start = Path(engine), time.perf_counter()
    report = progress or _silent
    place = resolve_device(device)
    manifest = Manifest.read(folder)
    runs = _proven_cache(runtime or RuntimeConfig(), manifest)
    proof, failures = _proof(folder)
    report("hashes")
    failures += _damage(folder, manifest)
    checked = None if source is None or failures else _compared(folder, source, place, report)
    failures += [] if checked is None else [Failure("source", d.name, d.text) for d in checked.differences]
    ran = _Ran() if failures or proof is None else _run(folder, manifest, proof.claims, place, runs, report)
    failures += ran.failures
    failures += _metrics(proof) if proof is not None else ()
    found = _verification(folder, place, manifest, proof, ran, failures)
    found = found.replace(source=None if checked is None else checked.figures)
    found = found.replace(seconds=time.perf_counter() - start)
    return found.replace(noted=note and _leave_note(folder, found, proof, device_name(place)))


def _compared(folder: Path, source: str | Path, device: torch.device, report: Progress) -> SourceCheck:
    report("comparing with the checkpoint")
    return compare_with_source(folder, resolve_checkpoint(source), device)


@dataclass(frozen=True)
class _Ran:
    """What ran here; ``dtype`` None: nothing."""

    failures: tuple[Failure, ...] = ()
    played: GoldenReplay = field(default_factory=GoldenReplay)
    steps: StepCheck = field(default_factory=StepCheck)
    dtype: str | None = None


def _run(
    folder: Path,
    manifest: Manifest,
    claims: Claims,
    device: torch.device,
    runs: RuntimeConfig,
    report: Progress,
) -> _Ran:
    """Load the engine, judge its steps and replay its cases."""
    tokens = _room(claims, manifest.build.max_seq_len, manifest.model.placeholders)
    runs = runs.replace(
        cache_tokens=max(tokens, _CACHE_TOKENS), encoder_positions=_audio_positions(claims, manifest, runs)
    )
    try:
        loaded = load_engine(folder, device, max_seq_len=tokens, runtime=runs)
    except NoSuchPathError:
        raise
    except EngineError as error:
        return _Ran((Failure("engine", folder.name, str(error)),))
    llm = LLM.of_engine(loaded, runs)
    steps = _steps(llm, folder, claims, report)
    played = replay(llm, claims, report)
    failures = [Failure("step", place, message) for place, message in steps.failures]
    return _Ran((*failures, *played.failures), played, steps, dtype_name(loaded.dtype))


def _verification(
    folder: Path,
    device: torch.device,
    manifest: Manifest,
    proof: Proof | None,
    ran: _Ran,
    failures: list[Failure],
) -> Verification:
    played, steps = ran.played, ran.steps
    verdict: Literal["proven", "failed", "unproven"] = "proven" if steps.num_steps else "unproven"
    return Verification(
        engine=str(folder),
        verdict="failed" if failures else verdict,
        device=None if ran.dtype is None else device_name(device),
        dtype=ran.dtype,
        factor=FACTOR,
        failures=tuple(failures),
        first_bad_module=played.first_bad_module,
        notes=tuple(played.notes),
        worst=played.worst,
        steps=steps.worst,
        num_steps=steps.num_steps,
        num_tokens=steps.num_tokens,
        limits=played.limits,
        num_cases=len(proof.claims.cases) if proof is not None and ran.dtype is not None else 0,
        equal_rows=played.equal_rows,
        num_rows=played.num_rows,
        num_tensors=len(manifest.tensors),
        proven_by=None if proof is None else _made(folder, proof),
        metrics=() if proof is None else proof.claims.metrics,
        seconds=0.0,
    )


def _proven_cache(runtime: RuntimeConfig, manifest: Manifest) -> RuntimeConfig:
    """The runtime with the KV cache that the engine was built for, which the golden cases are of."""
    own = manifest.build.kv_dtype
    if runtime.kv_dtype not in ("auto", own):
        raise ConfigError(
            "the engine's golden cases use another KV cache dtype",
            seen=f"kv_dtype {runtime.kv_dtype}",
            allowed=f"auto, {own}",
            fix="leave out kv_dtype, or build with `kv_dtype`",
        )
    return runtime.of_engine(own)


def _silent(what: str) -> None:
    return


def _room(claims: Claims, max_seq_len: int, placeholders: int) -> int:
    """Tokens of a request that the cases need, so that an engine is verified where its longest request does
    not fit.
    """
    longest = max((len(case.prompt_ids) + len(case.new_ids) for case in claims.cases), default=1)
    return min(max(longest + placeholders, _CACHE_TOKENS), max_seq_len)


def _steps(llm: LLM, folder: Path, claims: Claims, report: Progress) -> StepCheck:
    if not claims.cases:
        return StepCheck()
    report("steps")
    count = max(len(case.new_ids) for case in claims.cases)
    model = llm.engine.manifest.model
    features = [one.features.float() for one in inputs_of(model, claims.inputs)]
    given = [(case.prompt_ids, None if case.input is None else features[case.input]) for case in claims.cases]
    return check_steps(llm, folder, given, count)


def _audio_positions(claims: Claims, manifest: Manifest, runtime: RuntimeConfig) -> int | None:
    """Encoded positions for which all inputs fit into the encoder cache at once."""
    if not claims.inputs or manifest.model.encoder is None:
        return runtime.encoder_positions
    one = -(-manifest.model.encoder.max_positions // runtime.block_size) * runtime.block_size
    return one * len(claims.inputs)


def _proof(folder: Path) -> tuple[Proof | None, list[Failure]]:
    try:
        return read_proof(folder), []
    except EngineError as error:
        return None, [Failure("file", "proof.json", f"{error.what}; {error.seen}")]


def _made(folder: Path, proof: Proof) -> dict[str, Any]:
    when = read_when(folder)
    return proof.made.to_json() | ({} if when is None else when.to_json())


def _damage(folder: Path, manifest: Manifest) -> list[Failure]:
    return [
        Failure(
            "file" if d.tensor is None else "tensor", d.tensor or d.file, _where(d.file, d.tensor) + d.what
        )
        for d in find_damage(folder, manifest)
    ]


def _where(file: str, tensor: str | None) -> str:
    return f"{file} " if tensor is None else f"{file}: tensor {tensor} "


def _metrics(proof: Proof) -> Iterator[Failure]:
    for metric in proof.claims.metrics:
        if metric.met is False:
            yield Failure(
                "metric", metric.name, f"{metric.name} {metric.value:g} misses its limit {metric.limit:g}"
            )


def _leave_note(folder: Path, found: Verification, proof: Proof | None, device: str) -> bool:
    if proof is None:
        return False
    now = datetime.now(UTC).isoformat(timespec="seconds")
    messages = tuple(failure.message for failure in found.failures)
    return write_note(
        folder, Note(found.verdict == "proven", now, this_host(), device, proof.sha256, messages)
    )
