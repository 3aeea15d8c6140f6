"""The original that an engine is compared with.

Owns the choice among Hugging Face's class, the checking decoder, another engine and a trace, and the runs of
each that give the expected stages and the noise. One model is on the device at a time, and none when a run
returns. Knows no verdict.

    reference = open_reference("checkpoint", "auto", "engine", build_config, device)
    runs = reference.record(folder, cases, steps=4, compute=torch.float16)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ingot.building.int8_inputs import Int8Input, rounding
from ingot.checkpoint.checkpoint_files import CONFIG, read_json
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.checkpoint.minigpt4_files import is_minigpt4
from ingot.config.build_config import BuildConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import dtype_name, parse_dtype
from ingot.engine.manifest import Manifest, is_engine
from ingot.errors import CheckpointError, ConfigError
from ingot.measure.align.checking_original import record_checked
from ingot.measure.align.encoder_inputs import Given
from ingot.measure.align.stages.stage_names import StageFile, hf_patterns
from ingot.measure.align.stages.staged_run import RoundedWeights, Stored
from ingot.measure.align.stop_sources import stop_ids_of_files, stop_ids_of_trace
from ingot.measure.align.trace import run_steps, trace
from ingot.measure.align.whisper_by_ids import WhisperByIds
from ingot.measure.side.freed_memory import free_memory
from ingot.measure.side.huggingface import check_class, load_class
from ingot.measure.side.side_spec import decoder_config

ORIGINALS = ("auto", "hf", "ingot")


@dataclass(frozen=True)
class OriginalRun:
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
        given: the input of a model with an encoder.
    """

    inputs: tuple[Int8Input, ...] = ()
    given: Given | None = None

    def __init__(self, name: str, path: Path, device: torch.device) -> None:
        self.name, self.path, self.device = name, path, device
        self.noise_name = ""

    @property
    def checkpoint(self) -> Path | None:
        """Its folder, with whose tensors and configs an engine can be compared; None where it is none."""
        return self.path

    @property
    def files(self) -> Path:
        """The folder of its tokenizer and configs; of a checkpoint of several files that of its LLM."""
        if not is_minigpt4(self.path):
            return self.path
        with open_checkpoint(self.path) as source:
            return source.folder

    @abstractmethod
    def record(
        self, folder: Path, cases: Sequence[Sequence[int]], steps: int, compute: torch.dtype
    ) -> list[OriginalRun]:
        """Run every case in fp32 and again with the noise of ``compute``; files go into ``folder``."""

    def stop_ids(self, expected: StageFile) -> tuple[tuple[int, ...] | None, str]:
        """What ends its answers, as the file of an expected run notes it, and where that is from; None where
        nothing says.
        """
        return stop_ids_of_trace(expected.metadata, expected.path), "generate of Hugging Face's class"


class Checking(Reference):
    """Ingot's checking decoder over a checkpoint's weights, for a class that Hugging Face lacks.

    It shares the weight map and the config's reading with the engine and none of its modules and kernels. So
    it finds what a build, a dtype, a module or a kernel changes, and not what our reading of the architecture
    gets wrong: a trace does.
    """

    def __init__(self, checkpoint: Path, device: torch.device, build: BuildConfig) -> None:
        super().__init__("Ingot's checking decoder, fp32", checkpoint, device)
        self.build = build
        self.weights = checkpoint  # whose are computed with

    def record(
        self, folder: Path, cases: Sequence[Sequence[int]], steps: int, compute: torch.dtype
    ) -> list[OriginalRun]:
        self.noise_name = _noise_name(compute)
        choices = record_checked(
            self._stored(),
            partial(_path, folder),
            cases,
            steps,
            compute,
            inputs=self.inputs,
            given=self.given,
        )
        return _reference_runs(folder, choices)

    def _stored(self) -> Stored:
        return Stored.of(self.weights, self.build, self.device)

    def stop_ids(self, expected: StageFile) -> tuple[tuple[int, ...] | None, str]:
        return stop_ids_of_files(self.files), "the checkpoint's configs"


class OtherEngine(Checking):
    """The checking decoder over the weights that another engine stores, rounded to ``dtype`` if that is the
    coarser one: the dtype that the compared engine stores.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.manifest = Manifest.read(folder)
        super().__init__(folder, device, self.manifest.build)
        self.name = f"the engine {folder.name}, fp32"

    @property
    def checkpoint(self) -> None:
        """None: what it was built from is not known."""
        return

    def _stored(self) -> Stored:
        found = super()._stored()
        return found._replace(weights=RoundedWeights(found, self.dtype))

    def stop_ids(self, expected: StageFile) -> tuple[tuple[int, ...] | None, str]:
        return self.manifest.stop_ids, "the other engine"


class HuggingFace(Reference):
    """Hugging Face's class, eager attention in fp32, with weights rounded to the build's dtype."""

    def __init__(self, checkpoint: Path, device: torch.device, build: BuildConfig) -> None:
        super().__init__("Hugging Face's class, fp32", checkpoint, device)
        self.num_layers = None if build.layers is None else build.layers[1]
        self.weights = parse_dtype(build.dtype)

    def record(
        self, folder: Path, cases: Sequence[Sequence[int]], steps: int, compute: torch.dtype
    ) -> list[OriginalRun]:
        self.noise_name = _noise_name(compute)
        noise = torch.float64 if compute == torch.float32 else compute
        model = load_class(
            self.path,
            torch.float32,  # it holds every value of a checkpoint
            self.device,
            "`device=cuda`, or a trace as `reference`",
            num_layers=self.num_layers,
            widest=max(torch.float32, noise, key=lambda dtype: dtype.itemsize),
            attention="eager",
            instead="ingot",
        )
        self.name = f"Hugging Face's {type(model).__name__}, fp32"
        round_weights(model, self.weights, wide_norms=self._wide_norms())
        if self.given is not None:
            model = WhisperByIds(model, self.given)
        choices = self._traced(model, folder, "expected", cases, steps, [None] * len(cases))
        _lower(model, noise)
        self._traced(model, folder, "noise", cases, steps, choices)
        del model
        free_memory()
        return _reference_runs(folder, choices)

    def _wide_norms(self) -> bool:
        return decoder_config(read_json(self.path / CONFIG)).wide_norms

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
        if isinstance(model, WhisperByIds):
            model.as_noise(noise=tag == "noise")
        names = hf_patterns(name for name, _ in model.named_modules())
        found = []
        for i, ids in enumerate(cases):
            whole = trace(model, _path(folder, tag, i), names)
            with whole, rounding(model, self.inputs, flips=tag == "noise"):
                found.append(run_steps(model, ids, steps, forced[i]))
        return found


@torch.no_grad()
def round_weights(model: torch.nn.Module, dtype: torch.dtype, *, wide_norms: bool) -> None:
    """Round every floating-point parameter to the values that an engine in ``dtype`` stores, in place; with
    ``wide_norms`` those of norms stay, and buffers (rotary tables) always do.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not (wide_norms and "norm" in name):
            parameter.copy_(parameter.to(dtype))


def _lower(model: Any, compute: torch.dtype) -> None:
    """Compute in another dtype, where a model stands."""
    # Eager attention has an fp32 softmax inside; the other kind has no softcap.
    if compute == torch.float64 and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    # not the buffers: rotary frequencies stay fp32, as when it is loaded
    for parameter in model.parameters():
        parameter.data = parameter.data.to(compute)


class Trace(Reference):
    """A file written by ``ingot.measure.align.trace``; the noise is what the coarser dtype of both sides does
    in the checking decoder with the engine's weights.
    """

    def __init__(self, path: Path, engine: str, build: BuildConfig, device: torch.device) -> None:
        self.file, self.engine, self.build = StageFile(path), engine, build
        model = self.file.metadata.get("model", "a model")
        super().__init__(f"trace of {model}, {dtype_name(self.file.dtype)}", path, device)

    def record(
        self, folder: Path, cases: Sequence[Sequence[int]], steps: int, compute: torch.dtype
    ) -> list[OriginalRun]:
        """As ``Reference.record``; the case and the steps are the trace's."""
        coarse = max((compute, self.file.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        self.noise_name = f"{_noise_name(coarse)}, with the engine's weights"
        forced = [self.file.ids(step)[-1] for step in range(1, self.file.steps + 1)]
        stored = Stored.of(Path(self.engine), self.build, self.device)
        record_checked(stored, partial(_path, folder), cases, steps, coarse, forced=[forced])
        (run,) = _reference_runs(folder, [[*forced, 0]])
        rows = (self.file.get(step, "logits") for step in range(self.file.steps + 1))
        choices = [int(row[-1].argmax()) for row in rows if row is not None]
        return [OriginalRun(self.file, run.noise, choices, forced)]

    @property
    def checkpoint(self) -> None:
        """None: it is one file of activations."""
        return

    def stop_ids(self, expected: StageFile) -> tuple[tuple[int, ...] | None, str]:
        return super().stop_ids(expected)[0], "the trace"


def open_reference(
    given: str, original: str, engine: str, build: BuildConfig, device: torch.device
) -> Reference:
    """What ``reference`` means: a trace (a file), another engine, or a checkpoint run by a class.

    Raises:
        CheckpointError: it is the engine itself, it cannot be found, or no class is there for it.
        ConfigError: ``original`` is none of ``ORIGINALS``.
    """
    if original not in ORIGINALS:
        raise ConfigError("unknown original", seen=original, allowed=", ".join(ORIGINALS), field="original")
    path = Path(given)
    if path.is_file() and not is_minigpt4(path):
        return Trace(path, engine, build, device)
    if is_engine(path):
        return _other_engine(path, original, engine, device, parse_dtype(build.dtype))
    folder, layers = resolve_checkpoint(given), build.layers
    if original == "ingot":
        return Checking(folder, device, build)
    missing = "transformers has no class for MiniGPT-4" if is_minigpt4(folder) else check_class(folder)
    starts_late = layers is not None and layers[0] > 0
    if missing is None and not starts_late:
        return HuggingFace(folder, device, build)
    if original == "hf":
        raise CheckpointError(
            "Hugging Face's class cannot be the reference",
            seen=missing or "an engine without the first layers",
            allowed="a model that transformers supports, with layers from 0",
            field="original",
            fix="`original=ingot`",
        )
    return Checking(folder, device, build)


def _other_engine(
    path: Path, original: str, engine: str, device: torch.device, dtype: torch.dtype
) -> OtherEngine:
    if path.resolve() == Path(engine).resolve():
        raise CheckpointError(
            "the reference is the engine itself",
            seen=path,
            allowed="the checkpoint it was built from, another engine, or a trace",
            field="reference",
        )
    if original == "hf":
        raise CheckpointError(
            "Hugging Face's class does not run an engine",
            seen=path,
            field="original",
            fix="`original=ingot`, or a checkpoint",
        )
    return OtherEngine(path, device, dtype)


def room_for(tokens: int) -> int:
    """Tokens of a KV cache that holds one request of this length, so that the rest stays free for modules."""
    size = RuntimeConfig().block_size
    return -(-tokens // size) * size


def _path(folder: Path, tag: str, case: int) -> Path:
    return folder / f"{tag}-{case}.safetensors"


def _reference_runs(folder: Path, choices: Sequence[list[int]]) -> list[OriginalRun]:
    found = []
    for i, chosen in enumerate(choices):
        expected, noise = StageFile(_path(folder, "expected", i)), StageFile(_path(folder, "noise", i))
        found.append(OriginalRun(expected, (expected, noise), chosen, chosen[:-1]))
    return found


def _noise_name(compute: torch.dtype) -> str:
    return f"{'fp64' if compute == torch.float32 else dtype_name(compute)} against fp32"
