"""From a checkpoint and texts to the mix of schemes that keeps a budget.

found = doctor(Wanted("checkpoint", QuantConfig(scheme), 0.01), read_data(Path("text.txt"), limit=64))
found.quant                                    # a QuantConfig for build(…, quant=…); None: no mix holds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ingot.building.calibration.calibration_data import SAMPLES, SampleFile
from ingot.building.calibration.quantize import warn_of_few
from ingot.building.calibration.rptq_alone import calibrated_alone
from ingot.building.calibration.sample_readers import read_samples
from ingot.building.golden.golden_cases import steady_threads
from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE, BuildConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.scheme_table import SCHEMES, saves_time_only
from ingot.device import parse_dtype, resolve_device
from ingot.engine.assembly import Assembly, build_config
from ingot.engine.engine_text import read_text_parts
from ingot.engine.manifest import is_engine
from ingot.errors import ConfigError, OutOfMemoryError
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.doctor.doctor_samples import samples_of
from ingot.measure.evaluate.doctor.precision_choice import Mix, Option, choose, settle
from ingot.measure.evaluate.doctor.precision_options import (
    DENSE,
    LayerOptions,
    StoredForm,
    ladder_of,
    options_of,
)
from ingot.measure.evaluate.doctor.precision_probe import PrecisionProbe, Text
from ingot.measure.evaluate.doctor.scheme_patterns import mixed
from ingot.measure.evaluate.eval_record import Progress, machine, no_progress
from ingot.measure.evaluate.perplexity import WindowSettings
from ingot.memory.host_memory import dense_bytes, expect_room

BYTES, TIME = "bytes", "time"
_ROWS_KEPT = 4  # of hidden_size per token or position: two layers' outputs, the expected one, a copy
MAX_TOKENS = 2048  # of each text, unless more are asked for


@dataclass(frozen=True)
class Wanted:
    """What is asked.

    Attributes:
        checkpoint: a folder or a Hugging Face id.
        quant: the scheme to begin with, one for all layers, with its group and symmetry, or RPTQ's options.
        budget: limit of the mean KL, in nats.
        least: ``bytes`` of weights, or ``time``; None: bytes, and time for a scheme that takes no fewer bytes
            than the next wider one.
        up_to: the widest scheme of the ladder that a layer may have.
        reading: how texts are read, as for a divergence.
        calib: samples that RPTQ's values and ranges are chosen by, as for a build.
        calib_samples: most samples to take of it; None: 128.
    """

    checkpoint: str
    quant: QuantConfig
    budget: float
    least: str | None = None
    up_to: str = DENSE
    device: str = "auto"
    reading: WindowSettings = field(default_factory=lambda: WindowSettings(max_tokens=MAX_TOKENS))
    calib: Path | None = None
    calib_samples: int | None = None


@dataclass(frozen=True)
class Layer:
    """A linear layer, its bytes in each scheme, and the KL in nats if it alone has a narrow one."""

    name: str
    num_weights: int
    num_bytes: dict[str, int]
    kl: dict[str, float]


@dataclass(frozen=True)
class LayerCosts:
    """A scheme for every layer, the bytes of all, and KL in nats, added up and measured."""

    schemes: dict[str, str]
    num_bytes: int
    predicted: float
    measured: float


@dataclass(frozen=True)
class Diagnosis:
    """The result of ``doctor``.

    Attributes:
        ladder: the schemes that a layer could have, from fewest bits.
        uniform: all layers in one scheme, by its name.
        tried: the mixes that were measured, in order.
        chosen: the cheapest mix that holds, which may leave all layers unquantized; None: none holds.
        facts: data, counts, machine and settings, as JSON types.
    """

    wanted: Wanted
    ladder: tuple[str, ...]
    layers: tuple[Layer, ...]
    uniform: dict[str, LayerCosts]
    tried: tuple[LayerCosts, ...]
    chosen: LayerCosts | None
    facts: dict[str, Any]

    @property
    def quant(self) -> QuantConfig | None:
        """For ``build``; None: no mix holds, or only that of unquantized layers."""
        if self.chosen is None or set(self.chosen.schemes.values()) == {DENSE}:
            return None
        return mixed(self.chosen.schemes, self.wanted.quant)


def check_wanted(wanted: Wanted) -> tuple[str, ...]:
    """The ladder of schemes, or ConfigError if the values cannot be combined."""
    quant = wanted.quant
    plain = QuantConfig(quant.scheme, quant.group, quant.symmetric)
    plain = plain.replace(rotation=quant.rotation)
    if quant.in_blocks:
        plain = plain.replace(method=quant.method, rptq=quant.rptq)
    if quant != plain:
        what = "doctor starts from one scheme with plain rounding, or RPTQ's own"
        raise ConfigError(what, seen=quant.summary, field="quant")
    ladder = ladder_of(quant.scheme, wanted.up_to)
    _check_samples(wanted)
    if not wanted.budget > 0:
        raise ConfigError(
            "a budget must be above 0", seen=wanted.budget, field="budget", fix="`budget=kl_mean=X`"
        )
    if wanted.least not in (None, BYTES, TIME):
        raise ConfigError("no such objective", seen=wanted.least, allowed=[BYTES, TIME], field="least")
    if wanted.least == BYTES and saves_time_only(quant.scheme):
        wider = SCHEMES[quant.scheme].wider
        raise ConfigError(
            f"{quant.scheme} takes no fewer bytes than {wider}",
            seen=BYTES,
            allowed=TIME,
            field="least",
            fix=f"`least=time`, or `quant={wider}`",
        )
    if is_engine(Path(wanted.checkpoint)):
        raise ConfigError(
            "an engine's schemes are fixed",
            seen=wanted.checkpoint,
            allowed="a checkpoint",
            fix="give the checkpoint that it was built from",
        )
    return ladder


def _check_samples(wanted: Wanted) -> None:
    """Raise ConfigError where RPTQ has no calibration samples, or another scheme has."""
    needs, given = wanted.quant.in_blocks, {"calib": wanted.calib, "calib_samples": wanted.calib_samples}
    if needs and wanted.calib is None:
        raise ConfigError(
            "this scheme needs calibration data, other than the texts it is measured on",
            seen=wanted.quant.scheme,
            field="calib",
            fix="`calib=FILE`",
        )
    odd = next((name for name, value in given.items() if value is not None and not needs), None)
    if odd is not None:
        raise ConfigError(
            "this scheme uses no calibration data",
            seen=f"{wanted.quant.scheme}, {odd}={given[odd]}",
            field="quant",
            fix=f"an RPTQ scheme; or leave out `{odd}`",
        )


def doctor(wanted: Wanted, data: DataFile, progress: Progress = no_progress) -> Diagnosis:
    """Measure every layer alone, choose, and measure the choice."""
    ladder, device = check_wanted(wanted), resolve_device(wanted.device)
    progress("reading the checkpoint", 0, 1)
    with open_checkpoint(resolve_checkpoint(wanted.checkpoint)) as source:
        if source.packed is not None and not source.packed.form.replaceable:
            raise ConfigError(
                "the checkpoint is already quantized",
                seen=wanted.checkpoint,
                fix="give the original checkpoint",
            )
        build = build_config(source, "auto", DEFAULT_MAX_BATCH_SIZE, None, None)
        # Layers in the engine's dtype, dequantized; where the scheme is rotated, after the rotation.
        widened = wanted.quant.rotation or source.packed is not None
        kept = wanted.quant.replace(layers={"*": DENSE}) if widened else QuantConfig()
        assembly = Assembly.of(source, build, kept)
        samples = samples_of(source, assembly.model_config, data, wanted.reading)
        layers = options_of(assembly, wanted.quant, ladder)
        dtype, load = parse_dtype(build.dtype), partial(assembly.load, checkpoint=source, device=device)
        num_bytes = sum(layer.num_weights for layer in layers) * dtype.itemsize
        if device.type == "cpu":
            _expect_room(assembly, samples.texts, sum(one.num_weights for one in layers if wanted.calib))
        facts = {
            "checkpoint": wanted.checkpoint,
            "dtype": build.dtype,
            "data": data.facts(),
            "counts": samples.counts,
            "reading": asdict(samples.reading),
            "machine": machine(device),
        }
        try:
            with torch.inference_mode(), steady_threads(num_bytes, device):
                layers = _calibrated(wanted, layers, source, build, device, progress)
                probe = PrecisionProbe(assembly.model, load, samples.texts, device, dtype)
                return _Session(wanted, ladder, layers, probe, progress).run(facts)
        except torch.OutOfMemoryError:
            raise OutOfMemoryError(
                "the checkpoint and its texts do not fit in the device's memory",
                seen=f"{device}",
                fix="`device=cpu`, or fewer tokens: `limit`, `max_tokens`",
            ) from None


def _calibrated(
    wanted: Wanted,
    layers: list[LayerOptions],
    source: Checkpoint,
    build: BuildConfig,
    device: torch.device,
    progress: Progress,
) -> list[LayerOptions]:
    """The layers with what they store in a scheme that calibrates; the others as they are."""
    if wanted.calib is None:
        return layers
    assembly = Assembly.of(source, build, wanted.quant)
    count = SAMPLES if wanted.calib_samples is None else wanted.calib_samples
    given = SampleFile(wanted.calib, count, assembly, source, read_text_parts(source), device)
    data = read_samples(given)
    warn_of_few(data, assembly)
    found = calibrated_alone(assembly, source, data, device, progress)
    forms = {name: StoredForm(one.scheme, one.tensors) for name, one in found.items()}
    scheme = wanted.quant.scheme
    return [
        replace(layer, schemes=layer.schemes | {scheme: forms[layer.name]}) if layer.name in forms else layer
        for layer in layers
    ]


def _expect_room(assembly: Assembly, texts: Sequence[Text], stored: int) -> None:
    """A CPU keeps all weights in fp32, a few rows per token and encoder position, and ``stored`` bytes of
    weights that calibration chose.
    """
    config, tokens = assembly.model_config, sum(len(text.ids) for text in texts)
    values = _ROWS_KEPT * tokens * config.hidden_size
    if config.encoder is not None:
        inputs = [text for text in texts if text.features is not None]
        values += _ROWS_KEPT * len(inputs) * config.encoder.max_positions * config.encoder.hidden_size
    expect_room(
        "the checkpoint and its texts do not fit this machine's memory",
        dense_bytes(config, torch.float32) + values * torch.float32.itemsize + stored,
        fix="fewer tokens: `limit`, `max_tokens`; or `device=cuda`",
    )


class _Session:
    """One checkpoint, its ladder, and the passes that were made."""

    def __init__(
        self,
        wanted: Wanted,
        ladder: tuple[str, ...],
        layers: Sequence[LayerOptions],
        probe: PrecisionProbe,
        progress: Progress,
    ) -> None:
        self._wanted = wanted
        self._ladder = ladder
        self._options = {layer.name: layer for layer in layers}
        self._probe = probe
        self._progress = progress
        self._known: dict[tuple[str, ...], float] = {}

    def run(self, facts: dict[str, Any]) -> Diagnosis:
        narrow = [scheme for scheme in self._ladder if scheme != DENSE]
        alone = self._probe.alone(list(self._options.values()), narrow, self._progress)
        layers = {
            name: Layer(name, layer.num_weights, layer.num_bytes, alone[name])
            for name, layer in self._options.items()
        }
        uniform = {s: self._measured(layers, dict.fromkeys(layers, s)) for s in self._ladder}
        first = self._ladder[0]

        def pick(most: float) -> Mix:
            if saves_time_only(first):
                return _least_wide(layers, self._ladder, most)
            return choose(
                {
                    name: [_by_bytes(layer, scheme) for scheme in self._ladder]
                    for name, layer in layers.items()
                },
                most,
            )

        def price(mix: Mix) -> tuple[float, ...]:
            wide = [layers[name].num_weights for name, option in mix.items() if option.scheme != first]
            stored = sum(layers[name].num_bytes[option.scheme] for name, option in mix.items())
            return (sum(wide), stored) if saves_time_only(first) else (stored,)

        settled = settle(pick, lambda mix: self._measure(_schemes(mix)), price, self._wanted.budget)
        tried = tuple(self._measured(layers, _schemes(mix)) for mix, _ in settled.tried)
        best = None if settled.best is None else self._measured(layers, _schemes(settled.best[0]))
        return Diagnosis(self._wanted, self._ladder, tuple(layers.values()), uniform, tried, best, facts)

    def _measured(self, layers: Mapping[str, Layer], schemes: dict[str, str]) -> LayerCosts:
        stored = sum(layers[name].num_bytes[scheme] for name, scheme in schemes.items())
        predicted = sum(_error(layers[name], scheme) for name, scheme in schemes.items())
        return LayerCosts(schemes, stored, predicted, self._measure(schemes))

    def _measure(self, schemes: Mapping[str, str]) -> float:
        key = tuple(schemes.values())
        if key not in self._known:
            self._progress("measuring a mix", 0, 1)
            changed = {
                name: self._options[name].schemes[own] for name, own in schemes.items() if own != DENSE
            }
            self._known[key] = self._probe.together(changed)
        return self._known[key]


def _least_wide(layers: Mapping[str, Layer], ladder: Sequence[str], most: float) -> Mix:
    """Few weights outside 8-bit products; of these, few bytes."""
    first, others = ladder[0], ladder[1:]
    options = {}
    for name, layer in layers.items():
        options[name] = [Option(first, 0, _error(layer, first))]
        if others:
            best = min(others, key=lambda scheme: (_error(layer, scheme), layer.num_bytes[scheme]))
            options[name].append(Option(best, layer.num_weights, _error(layer, best)))
    kept = {name for name, option in choose(options, most).items() if option.scheme == first}
    again = {
        name: [_by_bytes(layer, scheme) for scheme in ([first] if name in kept else others)]
        for name, layer in layers.items()
    }
    return choose(again, most)


def _by_bytes(layer: Layer, scheme: str) -> Option:
    return Option(scheme, layer.num_bytes[scheme], _error(layer, scheme))


def _error(layer: Layer, scheme: str) -> float:
    return 0.0 if scheme == DENSE else layer.kl[scheme]


def _schemes(mix: Mix) -> dict[str, str]:
    return {name: option.scheme for name, option in mix.items()}
