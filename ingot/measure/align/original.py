"""The originals that an engine is compared with: Hugging Face's class, the checking decoder, an engine, a
trace.

One model is on the device at a time, and none when a run returns.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.building.int8_inputs import RoundedInput, rounding
from ingot.checkpoint.checkpoint_files import CONFIG, read_json
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.checkpoint.minigpt4_files import is_minigpt4
from ingot.config.build_config import BuildConfig
from ingot.config.half_dtypes import HalfDtypes
from ingot.device import dtype_name, parse_dtype
from ingot.engine.manifest import Manifest, is_engine
from ingot.engine.reference_run import EXACT, Arithmetic, Feed
from ingot.errors import CheckpointError, ConfigError
from ingot.layers.linear import any_rounded
from ingot.measure.align.encoder_inputs import Given, WhisperByIds
from ingot.measure.align.stages.stage_names import OWN_NAMES, StageFile, hf_patterns
from ingot.measure.align.stages.staged_run import RoundedWeights, StagedRun, Stored, run_encoder, run_tokens
from ingot.measure.align.stop_sources import stop_ids_of_files, stop_ids_of_trace
from ingot.measure.align.trace import TraceWriter, run_steps, trace
from ingot.measure.side.freed_memory import free_memory
from ingot.measure.side.huggingface import check_class, load_class
from ingot.measure.side.side_spec import decoder_config

ORIGINALS = ("auto", "hf", "ingot")


@dataclass(frozen=True)
class OriginalRun:
    """One case: expected stages, stages with noise, the reference's greedy ids, and the ids that were fed."""

    expected: StageFile
    noise: tuple[StageFile, StageFile]
    choices: list[int]
    forced: list[int]


class Reference(ABC):
    """An original, which gives the expected stages of prompts.

    Attributes:
        name: in reports.
        path: its folder; of a trace, the file.
        noise_name: the two dtypes between which its noise is measured.
        inputs: inputs of products that are rounded as the engine's are: to 8 bits, with noise the closest
            calls the other way; with noise alone those that a CPU splits.
        given: the input of a model with an encoder.
    """

    inputs: tuple[RoundedInput, ...] = ()
    given: Given | None = None

    def __init__(self, name: str, path: Path, device: torch.device) -> None:
        self.name, self.path, self.device = name, path, device
        self.noise_name = ""

    @property
    def checkpoint(self) -> Path | None:
        """Its folder, if it is a checkpoint."""
        return self.path

    @property
    def files(self) -> Path:
        """The folder of its tokenizer and configs; of MiniGPT-4 that of its LLM."""
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
        """The ids that end its answers, None if unknown, and their origin."""
        return stop_ids_of_trace(expected.metadata, expected.path), "generate of Hugging Face's class"


class Checking(Reference):
    """Ingot's checking decoder over a checkpoint's weights, for a class that Hugging Face lacks.

    It shares the weight map and config reader with the engine, but no modules and kernels. So it shows faults
    of a build, a dtype, a module or a kernel. A fault in our reading of the architecture needs a trace.
    """

    def __init__(self, checkpoint: Path, device: torch.device, build: BuildConfig) -> None:
        super().__init__("Ingot's checking decoder, fp32", checkpoint, device)
        self.build = build
        self.weights = checkpoint  # or an engine

    def record(
        self, folder: Path, cases: Sequence[Sequence[int]], steps: int, compute: torch.dtype
    ) -> list[OriginalRun]:
        self.noise_name = _noise_name(compute)
        choices = record_checked(
            self._stored(),
            folder,
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
    """The checking decoder over another engine's weights, rounded to ``dtypes`` where those are coarser."""

    def __init__(self, folder: Path, device: torch.device, dtypes: HalfDtypes) -> None:
        self.dtypes = dtypes
        self.manifest = Manifest.read(folder)
        super().__init__(folder, device, self.manifest.build)
        self.name = f"the engine {folder.name}, fp32"

    @property
    def checkpoint(self) -> None:
        """None: its checkpoint is not known."""

    def _stored(self) -> Stored:
        found = super()._stored()
        return found._replace(weights=RoundedWeights(found, self.dtypes))

    def stop_ids(self, expected: StageFile) -> tuple[tuple[int, ...] | None, str]:
        return self.manifest.stop_ids, "the other engine"


class HuggingFace(Reference):
    """Hugging Face's class, eager attention in fp32, with weights rounded to the build's dtype."""

    def __init__(self, checkpoint: Path, device: torch.device, build: BuildConfig) -> None:
        super().__init__("Hugging Face's class, fp32", checkpoint, device)
        self.num_layers = None if build.layers is None else build.layers[1]
        self.weights = build.dtypes

    def record(
        self, folder: Path, cases: Sequence[Sequence[int]], steps: int, compute: torch.dtype
    ) -> list[OriginalRun]:
        self.noise_name = _noise_name(compute)
        noise = torch.float64 if compute == torch.float32 else compute
        model = load_class(
            self.path,
            torch.float32,  # exact for every dtype of checkpoints
            self.device,
            "`device=cuda`, or a trace as `reference`",
            num_layers=self.num_layers,
            widest=max(torch.float32, noise, key=lambda dtype: dtype.itemsize),
            attention="eager",
            instead="ingot",
        )
        self.name = f"Hugging Face's {type(model).__name__}, fp32"
        wide_norms = decoder_config(read_json(self.path / CONFIG)).wide_norms
        round_weights(model, self.weights, wide_norms=wide_norms)
        if self.given is not None:
            model = WhisperByIds(model, self.given)
        choices = self._traced(model, folder, "expected", cases, steps, [None] * len(cases))
        # Eager attention has an fp32 softmax inside; SDPA has no softcap.
        if noise == torch.float64 and model._supports_sdpa:
            model.set_attn_implementation("sdpa")
        for parameter in model.parameters():  # not buffers: rotary frequencies stay fp32, as after loading
            parameter.data = parameter.data.to(noise)
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
        """The greedy choices of each case; ``forced`` ids are fed."""
        if isinstance(model, WhisperByIds):
            model.as_noise(noise=tag == "noise")
        names = hf_patterns(name for name, _ in model.named_modules())
        found = []
        for i, ids in enumerate(cases):
            recording = trace(model, _path(folder, tag, i), names)
            with recording, rounding(model, self.inputs, flips=tag == "noise"):
                found.append(run_steps(model, ids, steps, forced[i]))
        return found


@torch.no_grad()
def round_weights(model: torch.nn.Module, dtypes: HalfDtypes, *, wide_norms: bool) -> None:
    """Round every floating-point parameter to its half's dtype, in place; with ``wide_norms`` except those of
    norms. Buffers (rotary tables) stay as they are.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not (wide_norms and "norm" in name):
            own = dtypes.at(name.removeprefix("model."))  # model.encoder.layers.0…
            parameter.copy_(parameter.to(parse_dtype(own)))


class Trace(Reference):
    """A file written by ``ingot.measure.align.trace``; the noise is that of the coarser dtype of both sides
    in the checking decoder with the engine's weights.
    """

    def __init__(self, path: Path, engine: str, build: BuildConfig, device: torch.device) -> None:
        self.file, self.engine, self.build = StageFile(path), engine, build
        model = self.file.metadata.get("model", "a model")
        super().__init__(f"trace of {model}, {dtype_name(self.file.dtype)}", path, device)

    def record(
        self, folder: Path, cases: Sequence[Sequence[int]], steps: int, compute: torch.dtype
    ) -> list[OriginalRun]:
        coarse = max((compute, self.file.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        self.noise_name = f"{_noise_name(coarse)}, with the engine's weights"
        forced = [self.file.ids(step)[-1] for step in range(1, self.file.steps + 1)]
        stored = Stored.of(Path(self.engine), self.build, self.device)
        record_checked(stored, folder, cases, steps, coarse, inputs=self.inputs, forced=[forced])
        (run,) = _reference_runs(folder, [[*forced, 0]])
        rows = (self.file.get(step, "logits") for step in range(self.file.steps + 1))
        choices = [int(row[-1].argmax()) for row in rows if row is not None]
        return [OriginalRun(self.file, run.noise, choices, forced)]

    @property
    def checkpoint(self) -> None:
        """None: a trace has no weights."""

    def stop_ids(self, expected: StageFile) -> tuple[tuple[int, ...] | None, str]:
        return super().stop_ids(expected)[0], "the trace"


def open_reference(
    given: str, original: str, engine: str, build: BuildConfig, device: torch.device
) -> Reference:
    """A trace (a file), another engine, or a checkpoint run by a class or the checking decoder."""
    if original not in ORIGINALS:
        raise ConfigError("unknown original", seen=original, allowed=", ".join(ORIGINALS), field="original")
    path = Path(given)
    if path.is_file() and not is_minigpt4(path):
        return Trace(path, engine, build, device)
    if is_engine(path):
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
        return OtherEngine(path, device, build.dtypes)
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


def noise_of(dtype: torch.dtype, *, flips: bool) -> Arithmetic:
    """The arithmetic whose distance from fp32 is noise; ``flips`` if activations are rounded."""
    if dtype == torch.float32:
        return Arithmetic(torch.float64, flips=flips)
    return Arithmetic(torch.float32, dtype, flips=flips)


def record_checked(
    stored: Stored,
    folder: Path,
    cases: Sequence[Sequence[int]],
    steps: int,
    dtype: torch.dtype,
    *,
    inputs: Sequence[RoundedInput] = (),
    given: Given | None = None,
    forced: Sequence[list[int]] | None = None,
) -> list[list[int]]:
    """Write every case twice, as ``expected`` in fp32 and as ``noise`` in ``dtype`` (fp64 for fp32); the
    greedy choices after each prompt and each step. ``forced`` tokens are fed after each prompt; None: the
    greedy choices of the first run. ``inputs`` are rounded, beside those that ``stored`` rounds.
    """
    flips = bool(inputs) or any_rounded(stored.model)
    choices: list[list[int]] = []
    for i, ids in enumerate(cases):
        fed = None if forced is None else forced[i]
        exact = _Recorder(stored, _path(folder, "expected", i), EXACT, inputs, given)
        choices.append(exact.run(ids, steps, fed))
        noise = noise_of(dtype, flips=flips)
        noisy = _Recorder(stored, _path(folder, "noise", i), noise, inputs, given)
        noisy.run(ids, steps, choices[-1] if fed is None else fed)
    return choices


class _Recorder(StagedRun):
    def __init__(
        self,
        stored: Stored,
        path: Path,
        arithmetic: Arithmetic,
        inputs: Sequence[RoundedInput],
        given: Given | None,
    ) -> None:
        feed = _feed(inputs, flips=arithmetic.flips)
        super().__init__(stored.model, stored.weights, arithmetic, feed=feed)
        self._stored, self._given = stored, given
        self._writer = TraceWriter(path)
        self._stages: dict[str, None] = {}  # in order
        self._step = 0

    def reached(self, stage: str, computed: torch.Tensor) -> torch.Tensor:
        self._writer.add(f"{self._step}/{stage}", computed)
        self._stages.setdefault(stage)
        return computed

    @torch.inference_mode()
    def run(self, ids: Sequence[int], steps: int, forced: Sequence[int] | None) -> list[int]:
        """The prompt and cached steps; the greedy choices after each."""
        try:
            choices = self._run(ids, steps, forced)
        except BaseException:
            self._writer.abandon()
            raise
        self._writer.metadata |= {"dtype": "float32", "names": OWN_NAMES}
        self._writer.metadata |= {"model": self.config.architecture, "stages": json.dumps([*self._stages])}
        self._writer.close()
        return choices

    def _run(self, ids: Sequence[int], steps: int, forced: Sequence[int] | None) -> list[int]:
        given = self._given
        if given is not None:  # in the noisy run the features are as a sound preparation may round them
            shown = given.features if self.arithmetic == EXACT else given.source.nearly
            self._writer.add(f"0/{given.stage}", given.source.rows(shown))
            self._stages.setdefault(given.stage)
            run_encoder(self, given.features)
        choices: list[int] = []
        new, start = list(ids), 0
        for self._step in range(steps + 1):
            self._writer.add(f"{self._step}/input_ids", torch.tensor(new, dtype=torch.int64))
            logits = run_tokens(self, self._stored.span(new, start, len(ids), encodes=given is not None))
            choices.append(int(logits[-1].argmax()))
            start += len(new)
            new = [choices[-1] if forced is None else [*forced, 0][self._step]]
        return choices


def _feed(inputs: Sequence[RoundedInput], *, flips: bool) -> Feed | None:
    by_name = {one.name: one for one in inputs}

    def feed(name: str, x: torch.Tensor) -> torch.Tensor:
        one = by_name.get(name)
        return x if one is None else one.rounded(x, flips=flips)

    return feed if by_name else None
