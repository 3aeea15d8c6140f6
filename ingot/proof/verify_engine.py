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
from ingot.building.golden.golden_prompts import with_input
from ingot.building.source.source_check import compare_with_source
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.config.json_config import JsonConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import resolve_device
from ingot.engine.engine_loader import load_engine
from ingot.engine.integrity import find_damage
from ingot.engine.manifest import Manifest
from ingot.engine.proof_file import Claims, Metric, Note, Proof, read_proof, read_when, this_host, write_note
from ingot.engine.source_figures import SourceFigures
from ingot.errors import ConfigError, EngineError, NoSuchPathError
from ingot.llm.llm import LLM
from ingot.proof.bits_check import BitsCheck, check_bits
from ingot.proof.golden_replay import FACTOR, Failure, GoldenReplay, replay
from ingot.proof.step_check import StepCheck, check_steps

_CACHE_TOKENS = 2048

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Verification(JsonConfig):
    """The result of ``verify``.

    Attributes:
        verdict: ``unproven``: the files are intact, and nothing could be replayed.
        device, dtype: where and in which arithmetic the cases ran; None: nothing ran.
        factor: the limit is the noise floor times this.
        failures: the first cause first; ``first_bad_module`` is the first in the order of execution.
        notes: what was not compared, and why.
        worst: the largest deviation by what was compared, in noise floors.
        steps: the largest deviation by place of a layer, in parts of its limit (step_judge.py).
        num_steps, num_tokens: of the recorded steps.
        equal_bits: tokens that were compared to the bit, alone and in a batch; None: without
            ``batch_invariant``.
        limits: what passes: relative for rows of logits and modules' outputs, in nats for log-probabilities.
        equal_rows, num_rows: rows of logits that round to the proof's digits, of how many; not judged.
        proven_by: where and in which dtype the proof was made, and when, if verify.json says so.
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
    equal_bits: int | None = None


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
        runtime: how the cases run; its cache is sized for them. With ``batch_invariant`` the cases must also
            have the same bits alone and together.
        note: leave ``verify.json`` in the engine folder, where that can be written.
        progress: called with what is done next.

    Raises:
        EngineError: the folder is no engine, or its manifest cannot be read.
        CheckpointError: ``source`` cannot be read, is of another model, or lacks a tensor.
        ConfigError: ``runtime`` asks for another KV cache than the engine was built for.
        DeviceError: the device is not there, or too small.
    """
    folder, start = Path(engine), time.perf_counter()
    report = progress or (lambda what: None)
    place, manifest, runtime = resolve_device(device), Manifest.read(folder), runtime or RuntimeConfig()
    kv_dtype = manifest.build.kv_dtype
    _expect_own_cache(runtime, kv_dtype)
    proof: Proof | None = None
    failures: list[Failure] = []
    checked, ran = None, _Ran()
    try:
        proof = read_proof(folder)
    except EngineError as error:
        failures = [Failure("file", "proof.json", f"{error.what}; {error.seen}")]
    report("hashes")
    failures += _damaged(folder, manifest)
    if source is not None and not failures:
        report("comparing with the checkpoint")
        checked = compare_with_source(folder, resolve_checkpoint(source), place)
        failures += [Failure("source", d.name, d.text) for d in checked.differences]
    if proof is not None and not failures:
        ran = _run(folder, manifest, proof.claims, place, runtime.of_engine(kv_dtype), report)
        failures += ran.failures
    failures += _missed(proof)
    found = _verification(folder, place, manifest, proof, ran, failures)
    figures = None if checked is None else checked.figures
    found = found.replace(source=figures, seconds=time.perf_counter() - start)
    if proof is None or not note:
        return found
    now = datetime.now(UTC).isoformat(timespec="seconds")
    messages = tuple(failure.message for failure in failures)
    written = Note(found.verdict == "proven", now, this_host(), device_name(place), proof.sha256, messages)
    return found.replace(noted=write_note(folder, written))


def _expect_own_cache(runtime: RuntimeConfig, kv_dtype: str) -> None:
    if runtime.kv_dtype not in ("auto", kv_dtype):
        raise ConfigError(
            "the engine's golden cases use another KV cache dtype",
            seen=f"kv_dtype {runtime.kv_dtype}",
            allowed=f"auto, {kv_dtype}",
            fix="leave out kv_dtype, or build with `kv_dtype`",
        )


def _damaged(folder: Path, manifest: Manifest) -> Iterator[Failure]:
    """Files and tensors that are not what the manifest says."""
    for d in find_damage(folder, manifest):
        if d.tensor is None:
            yield Failure("file", d.file, f"{d.file} {d.what}")
        else:
            yield Failure("tensor", d.tensor, f"{d.file}: tensor {d.tensor} {d.what}")


def _missed(proof: Proof | None) -> Iterator[Failure]:
    """The proof's metrics that miss their limits."""
    for metric in () if proof is None else proof.claims.metrics:
        if metric.met is False:
            text = f"{metric.name} {metric.value:g} misses its limit {metric.limit:g}"
            yield Failure("metric", metric.name, text)


@dataclass(frozen=True)
class _Ran:
    """The results of running cases; ``dtype`` None: nothing ran."""

    failures: tuple[Failure, ...] = ()
    played: GoldenReplay = field(default_factory=GoldenReplay)
    steps: StepCheck = field(default_factory=StepCheck)
    bits: BitsCheck | None = None
    dtype: str | None = None


def _run(
    folder: Path,
    manifest: Manifest,
    claims: Claims,
    device: torch.device,
    runs: RuntimeConfig,
    report: Progress,
) -> _Ran:
    cases, model = claims.cases, manifest.model
    longest = max((len(case.prompt_ids) + len(case.new_ids) for case in cases), default=1)
    # No longer than needed: an engine is verified where its longest request does not fit.
    tokens = min(max(longest + model.placeholders, _CACHE_TOKENS), manifest.build.max_seq_len)
    # Invariant bits are of prompts that are computed each time.
    runs = runs.replace(
        cache_tokens=max(tokens, _CACHE_TOKENS), prefix_reuse=runs.prefix_reuse and not runs.batch_invariant
    )
    if claims.inputs and model.encoder is not None:  # all inputs fit into the encoder cache at once
        blocks = -(-model.encoder.max_positions // runs.block_size) * len(claims.inputs)
        runs = runs.replace(encoder_positions=blocks * runs.block_size)
    try:
        loaded = load_engine(folder, device, max_seq_len=tokens, runtime=runs)
    except NoSuchPathError:
        raise
    except EngineError as error:
        return _Ran((Failure("engine", folder.name, str(error)),))
    llm, steps = LLM.of_engine(loaded, runs), StepCheck()
    if cases:
        report("steps")
        features = [one.features.float() for one in inputs_of(model, claims.inputs)]
        given = [(case.prompt_ids, None if case.input is None else features[case.input]) for case in cases]
        steps = check_steps(llm, folder, given, max(len(case.new_ids) for case in cases))
    bits = _bits(llm, claims, report) if cases and runs.batch_invariant else None
    played = replay(llm, claims, report)
    failures = [Failure("step", place, message) for place, message in steps.failures]
    failures += [] if bits is None else [Failure("bits", name, message) for name, message in bits.failures]
    return _Ran((*failures, *played.failures), played, steps, bits, str(loaded.dtypes))


def _bits(llm: LLM, claims: Claims, report: Progress) -> BitsCheck:
    report("bits, alone and together")
    model = llm.engine.manifest.model
    features = [one.features.float() for one in inputs_of(model, claims.inputs)]
    prompts = [
        with_input(
            case.prompt_ids, None if case.input is None else features[case.input], splices=model.splices
        )
        for case in claims.cases
    ]
    names = [case.name for case in claims.cases]
    most = max(len(case.new_ids) for case in claims.cases)
    try:
        return check_bits(llm, list(zip(names, prompts, strict=True)), most)
    except EngineError as error:  # logits that are not finite
        return BitsCheck([("logits", str(error))])


def _verification(
    folder: Path,
    device: torch.device,
    manifest: Manifest,
    proof: Proof | None,
    ran: _Ran,
    failures: list[Failure],
) -> Verification:
    played, steps, when = ran.played, ran.steps, read_when(folder)
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
        equal_bits=None if ran.bits is None else ran.bits.num_tokens,
        num_cases=len(proof.claims.cases) if proof is not None and ran.dtype is not None else 0,
        equal_rows=played.equal_rows,
        num_rows=played.num_rows,
        num_tensors=len(manifest.tensors),
        proven_by=None if proof is None else proof.made.to_json() | ({} if when is None else when.to_json()),
        metrics=() if proof is None else proof.claims.metrics,
        seconds=0.0,
    )
