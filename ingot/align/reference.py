"""The original that an engine is compared with.

Owns the choice among Hugging Face's class, our own unfused path, another engine and a trace, and the runs of
each that give the expected stages and the noise. One model is on the device at a time, and none when a run
returns. Knows no verdict.

    reference = open_reference("checkpoint", "auto", "engine", build_config, device)
    runs = reference.record(folder, cases, steps=4, noise=noisy(torch.float16, torch.float16))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ingot.align.engine_side import record_engine
from ingot.align.hearing import Hearing
from ingot.align.precision import PLAIN, Precision, mel_order, permute_channels, round_weights
from ingot.align.stages import StageFile, hf_patterns
from ingot.align.stop_sources import stop_ids_of_files, stop_ids_of_trace
from ingot.align.trace import run_steps, trace
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.compare.huggingface import check_class, load_class
from ingot.compare.memory import free_memory
from ingot.config.build import BuildConfig
from ingot.config.runtime import RuntimeConfig
from ingot.device import dtype_name
from ingot.engine.golden_encoder import Speech
from ingot.engine.int8_inputs import Int8Input, rounding
from ingot.engine.manifest import Manifest, is_engine
from ingot.errors import CheckpointError, ConfigError
from ingot.llm import LLM

ORIGINALS = ("auto", "hf", "ingot")
_OTHER_ORDER = ", different summation order"
_BY_MODULE = RuntimeConfig(cuda_graphs=False, fused_decode=False)


@dataclass(frozen=True)
class ReferenceRun:
    """One case: the expected stages, and the same stages with noise.

    ``choices`` are the reference's greedy ids after the prompt and each step; ``forced`` those that were fed.
    """

    expected: StageFile
    noise: tuple[StageFile, StageFile]
    choices: list[int]
    forced: list[int]


class Reference(ABC):
    """Gives the expected stages of prompts.

    Attributes:
        name: what reports call it.
        path: its folder; of a trace, the file.
        noise_name: what its noise is measured between.
        inputs: those of its products that are rounded to 8 bits, as the engine's are. With noise the closest
            calls go the other way.
        speech: the input of a model that hears.
    """

    inputs: tuple[Int8Input, ...] = ()
    speech: Speech | None = None

    def __init__(self, name: str, path: Path, device: torch.device) -> None:
        self.name, self.path, self.device = name, path, device
        self.noise_name = ""

    @property
    def checkpoint(self) -> Path | None:
        """Its folder, with whose tensors and configs an engine can be compared; None where it is none."""
        return self.path

    @abstractmethod
    def record(
        self, folder: Path, cases: Sequence[Sequence[int]], steps: int, noise: Precision
    ) -> list[ReferenceRun]:
        """Run every case in fp32 and again with noise; files go into ``folder``."""

    def stop_ids(self, expected: StageFile) -> tuple[tuple[int, ...] | None, str]:
        """What ends its answers, as the file of an expected run notes it, and where that is from; None where
        nothing tells.
        """
        return stop_ids_of_trace(expected.metadata, expected.path), "generate of Hugging Face's class"


class OwnPath(Reference):
    """Our modules, one by one in fp32, from the checkpoint; for a class that Hugging Face lacks.

    It shares weight map and modules with the engine, so it finds what a build, a dtype or a kernel changes,
    and not what our reading of the architecture gets wrong: a trace does.
    """

    def __init__(self, checkpoint: Path, device: torch.device, layers: tuple[int, ...] | None) -> None:
        super().__init__("Ingot's own path, fp32", checkpoint, device)
        self.layers = None if layers is None else "{}:{}".format(*layers)

    def record(
        self, folder: Path, cases: Sequence[Sequence[int]], steps: int, noise: Precision
    ) -> list[ReferenceRun]:
        """As ``Reference.record``; where fp64 is asked for, the noise is another order of sums."""
        finer = noise.compute == torch.float64
        low = Precision(noise.weights, torch.float32) if finer else noise
        permuted = finer and not any(one.placed for one in self.inputs)  # their closest calls are the noise
        self.noise_name = f"{low.name} against fp32" + (_OTHER_ORDER if permuted else "")
        load = partial(self._load, length=max(map(len, cases)) + steps)
        return _two_runs(
            load, folder, cases, steps, low, permuted=permuted, inputs=self.inputs, speech=self.speech
        )

    def stop_ids(self, expected: StageFile) -> tuple[tuple[int, ...] | None, str]:
        return stop_ids_of_files(self.path), "the checkpoint's configs"

    def _load(self, precision: Precision, length: int) -> LLM:
        llm = LLM(
            self.path,
            str(self.device),
            compute_dtype=dtype_name(precision.compute),
            runtime=_BY_MODULE.replace(cache_tokens=room_for(length)),
            max_batch_size=1,
            max_seq_len=length,
            layers=self.layers,
        )
        round_weights(llm.engine.model, precision.weights)
        return llm


class OtherEngine(OwnPath):
    """Another engine, one module after another in fp32, with the weights that it stores."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        super().__init__(folder, device, None)
        self.name = f"the engine {folder.name}, fp32"
        self.manifest = Manifest.read(folder)

    @property
    def checkpoint(self) -> None:
        """None: what it was built from is not known."""
        return

    def stop_ids(self, expected: StageFile) -> tuple[tuple[int, ...] | None, str]:
        return self.manifest.stop_ids, "the other engine"

    def _load(self, precision: Precision, length: int) -> LLM:
        room = room_for(self.manifest.build.max_seq_len)
        runtime = _BY_MODULE.replace(cache_tokens=room, kv_dtype="model")
        dtype = dtype_name(precision.compute)
        llm = LLM(self.path, str(self.device), compute_dtype=dtype, runtime=runtime)
        round_weights(llm.engine.model, precision.weights)
        return llm


class HuggingFace(Reference):
    """Hugging Face's class, eager attention in fp32."""

    def __init__(self, checkpoint: Path, device: torch.device, layers: tuple[int, ...] | None) -> None:
        super().__init__("Hugging Face's class, fp32", checkpoint, device)
        self.num_layers = None if layers is None else layers[1]

    def record(
        self, folder: Path, cases: Sequence[Sequence[int]], steps: int, noise: Precision
    ) -> list[ReferenceRun]:
        self.noise_name = f"{noise.name} against fp32"
        model = load_class(
            self.path,
            torch.float32,  # it holds every value of a checkpoint
            self.device,
            "--device cuda, or a trace as --reference",
            num_layers=self.num_layers,
            widest=max(torch.float32, noise.compute, key=lambda dtype: dtype.itemsize),
            attention="eager",
            flag="--original ingot",
        )
        self.name = f"Hugging Face's {type(model).__name__}, fp32"
        if self.speech is not None:
            model = Hearing(model, self.speech)
        choices = self._traced(model, folder, "expected", cases, steps, [None] * len(cases))
        _lower(model, noise)
        self._traced(model, folder, "noise", cases, steps, choices)
        del model
        free_memory()
        return _reference_runs(folder, choices)

    def _traced(
        self,
        model: Any,
        folder: Path,
        tag: str,
        cases: Sequence[Sequence[int]],
        steps: int,
        forced: Sequence[list[int] | None],
    ) -> list[list[int]]:
        """The greedy choices of each case; ``forced`` ones are fed."""
        if isinstance(model, Hearing):
            model.as_noise(noise=tag == "noise")
        names = hf_patterns(name for name, _ in model.named_modules())
        found = []
        for i, ids in enumerate(cases):
            whole = trace(model, _path(folder, tag, i), names)
            with whole, rounding(model, self.inputs, flips=tag == "noise"):
                found.append(run_steps(model, ids, steps, forced[i]))
        return found


def _lower(model: Any, precision: Precision) -> None:
    """Round a model in fp32 where it stands, and compute so."""
    # Eager attention has an fp32 softmax inside; the other kind has no softcap.
    if precision.compute == torch.float64 and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    round_weights(model, precision.weights)
    # not the buffers: rotary frequencies stay fp32, as when it is loaded
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.compute)


class Trace(Reference):
    """A file written by ``ingot.align.trace``; the noise is the engine's own, in the coarser dtype."""

    def __init__(self, path: Path, engine: str, max_seq_len: int, device: torch.device) -> None:
        self.file, self.engine, self.max_seq_len = StageFile(path), engine, max_seq_len
        model = self.file.metadata.get("model", "a model")
        super().__init__(f"trace of {model}, {dtype_name(self.file.dtype)}", path, device)

    def record(
        self, folder: Path, cases: Sequence[Sequence[int]], steps: int, noise: Precision
    ) -> list[ReferenceRun]:
        """As ``Reference.record``; the case and the steps are the trace's."""
        compute = torch.float32 if noise.compute == torch.float64 else noise.compute
        coarse = max((compute, self.file.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        permuted = coarse == torch.float32
        self.noise_name = f"the engine's {dtype_name(coarse)} against its fp32"
        self.noise_name += _OTHER_ORDER if permuted else ""
        forced = [self.file.ids(step)[-1] for step in range(1, self.file.steps + 1)]
        low = Precision(None, coarse)
        (run,) = _two_runs(self._load, folder, cases, steps, low, [forced], permuted=permuted)
        rows = (self.file.get(step, "logits") for step in range(self.file.steps + 1))
        choices = [int(row[-1].argmax()) for row in rows if row is not None]
        return [ReferenceRun(self.file, run.noise, choices, forced)]

    @property
    def checkpoint(self) -> None:
        """None: it is one file of activations."""
        return

    def stop_ids(self, expected: StageFile) -> tuple[tuple[int, ...] | None, str]:
        return super().stop_ids(expected)[0], "the trace"

    def _load(self, precision: Precision) -> LLM:
        runtime = _BY_MODULE.replace(cache_tokens=room_for(self.max_seq_len), kv_dtype="model")
        dtype = dtype_name(precision.compute)
        return LLM(self.engine, str(self.device), compute_dtype=dtype, runtime=runtime)


def open_reference(
    given: str, original: str, engine: str, build: BuildConfig, device: torch.device
) -> Reference:
    """What ``--reference`` means: a trace (a file), another engine, or a checkpoint run by a class.

    Raises:
        CheckpointError: it is the engine itself, it cannot be found, or no class is there for it.
        ConfigError: ``original`` is none of ``ORIGINALS``.
    """
    if original not in ORIGINALS:
        raise ConfigError("unknown original", seen=original, allowed=", ".join(ORIGINALS), flag="--original")
    path = Path(given)
    if path.is_file():
        return Trace(path, engine, build.max_seq_len, device)
    if is_engine(path):
        return _other_engine(path, original, engine, device)
    folder, layers = resolve_checkpoint(given), build.layers
    if original == "ingot":
        return OwnPath(folder, device, layers)
    missing = check_class(folder)
    starts_late = layers is not None and layers[0] > 0
    if missing is None and not starts_late:
        return HuggingFace(folder, device, layers)
    if original == "hf":
        raise CheckpointError(
            "Hugging Face's class cannot be the reference",
            seen=missing or "an engine without the first layers",
            allowed="a model that transformers supports, with layers from 0",
            flag="--original ingot",
        )
    return OwnPath(folder, device, layers)


def _other_engine(path: Path, original: str, engine: str, device: torch.device) -> OtherEngine:
    if path.resolve() == Path(engine).resolve():
        raise CheckpointError(
            "the reference is the engine itself",
            seen=path,
            allowed="the checkpoint it was built from, another engine, or a trace",
            flag="--reference",
        )
    if original == "hf":
        raise CheckpointError(
            "Hugging Face's class does not run an engine", seen=path, flag="--original ingot, or a checkpoint"
        )
    return OtherEngine(path, device)


def room_for(tokens: int) -> int:
    """Tokens of a KV cache that holds one request of this length, so that the rest stays free for modules."""
    size = RuntimeConfig().block_size
    return -(-tokens // size) * size


def _path(folder: Path, tag: str, case: int) -> Path:
    return folder / f"{tag}-{case}.safetensors"


def _reference_runs(
    folder: Path, choices: Sequence[list[int]], order: torch.Tensor | None = None
) -> list[ReferenceRun]:
    found = []
    for i, chosen in enumerate(choices):
        expected, noise = StageFile(_path(folder, "expected", i)), StageFile(_path(folder, "noise", i), order)
        found.append(ReferenceRun(expected, (expected, noise), chosen, chosen[:-1]))
    return found


def _two_runs(
    load: Callable[[Precision], LLM],
    folder: Path,
    cases: Sequence[Sequence[int]],
    steps: int,
    noise: Precision,
    forced: Sequence[list[int]] | None = None,
    *,
    permuted: bool,
    inputs: tuple[Int8Input, ...] = (),
    speech: Speech | None = None,
) -> list[ReferenceRun]:
    """Our own modules in fp32, then with noise; the same ones, where only the order of sums is another."""

    def run(
        llm: LLM, tag: str, fed: Sequence[list[int] | None], speech: Speech | None = speech
    ) -> list[list[int]]:
        with rounding(llm.engine.model, inputs, flips=tag == "noise"):
            paths = [_path(folder, tag, i) for i in range(len(cases))]
            return [
                record_engine(llm, paths[i], ids, steps, fed[i], speech=speech) for i, ids in enumerate(cases)
            ]

    order = None
    with _loaded(load, PLAIN) as llm:
        choices = run(llm, "expected", forced or [None] * len(cases))
        if permuted:
            round_weights(llm.engine.model, noise.weights)
            order = permute_channels(llm.engine.model)
            run(llm, "noise", forced or choices, _permuted(speech))
    if not permuted:
        with _loaded(load, noise) as llm:
            run(llm, "noise", forced or choices)
    return _reference_runs(folder, choices, order)


def _permuted(speech: Speech | None) -> Speech | None:
    """Features as a model reads them whose channels were permuted."""
    if speech is None:
        return None
    return replace(speech, features=speech.features[mel_order(len(speech.features))])


@contextmanager
def _loaded(load: Callable[[Precision], LLM], precision: Precision) -> Iterator[LLM]:
    llm = load(precision)
    try:
        yield llm
    finally:
        del llm
        free_memory()
