"""From a checkpoint and texts to the mix of schemes that keeps a budget.

Owns the order of the work and what is found. Knows no arithmetic (probe.py), no search (choice.py) and no
terminal.

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

from ingot.building.calibration.calibrate import dense_model
from ingot.building.golden.golden_cases import steady_threads
from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.scheme_table import SCHEMES
from ingot.device import parse_dtype, resolve_device
from ingot.engine.assembly import Assembly, build_config
from ingot.engine.manifest import is_engine
from ingot.errors import ConfigError, OutOfMemoryError
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.doctor.doctor_samples import samples_of
from ingot.measure.evaluate.doctor.precision_choice import Mix, Option, Settled, choose, settle
from ingot.measure.evaluate.doctor.precision_options import (
    DENSE,
    LayerOptions,
    ladder_of,
    options_of,
    saves_time_only,
)
from ingot.measure.evaluate.doctor.precision_probe import PrecisionProbe, Text
from ingot.measure.evaluate.doctor.scheme_patterns import layer_index, layer_of, mixed, operator
from ingot.measure.evaluate.eval_record import Progress, machine, no_progress
from ingot.measure.evaluate.perplexity import WindowSettings
from ingot.memory.host_memory import dense_bytes, expect_room

BYTES, TIME = "bytes", "time"
_ROWS_KEPT = 4  # of hidden_size for each token or position: two layers' outputs, what is expected, a copy
MAX_TOKENS = 2048  # of each text, unless more are asked for


@dataclass(frozen=True)
class Wanted:
    """What is asked.

    Attributes:
        checkpoint: a folder or a Hugging Face id.
        quant: the scheme to begin with, one for all layers, with its group and symmetry.
        budget: the most that the mean KL may be, in nats.
        least: ``bytes`` of weights, or ``time``; None: bytes, and time for a scheme that takes no fewer bytes
            than the next wider one.
        up_to: the scheme of the ladder beyond which no layer goes.
        reading: how texts are read, as for a divergence.
    """

    checkpoint: str
    quant: QuantConfig
    budget: float
    least: str | None = None
    up_to: str = DENSE
    device: str = "auto"
    reading: WindowSettings = field(default_factory=lambda: WindowSettings(max_tokens=MAX_TOKENS))


@dataclass(frozen=True)
class Layer:
    """A linear layer: its bytes in each scheme of the ladder, KL in nats when it alone has a narrow one."""

    name: str
    num_weights: int
    num_bytes: dict[str, int]
    kl: dict[str, float]

    @property
    def operator(self) -> str:
        """``down_proj``."""
        return operator(self.name)

    @property
    def index(self) -> int | None:
        return layer_index(self.name)

    @property
    def place(self) -> str:
        """``layers.0``, or ``encoder.layers.0``."""
        return layer_of(self.name)


@dataclass(frozen=True)
class LayerCosts:
    """A scheme for every layer: bytes of all linear layers; KL in nats, added up from single ones and as
    it is.
    """

    schemes: dict[str, str]
    num_bytes: int
    predicted: float
    measured: float


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        ladder: the schemes that a layer could have, from fewest bits.
        uniform: all layers in one scheme, by its name.
        tried: the mixes that were measured, in order.
        chosen: the mix of least cost that holds; None: none does. It may leave all layers whole.
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
        """What ``build`` takes; None: no mix holds, or only that of whole layers."""
        if self.chosen is None or set(self.chosen.schemes.values()) == {DENSE}:
            return None
        return mixed(self.chosen.schemes, self.wanted.quant)


def check_wanted(wanted: Wanted) -> tuple[str, ...]:
    """Refuse what cannot be asked; the ladder of what can.

    Raises:
        ConfigError: the scheme, the last step or the objective does not fit the others.
    """
    quant = wanted.quant
    if quant != QuantConfig(quant.scheme, quant.group, quant.symmetric):
        raise ConfigError(
            "doctor starts from one scheme with plain rounding", seen=quant.summary, field="quant"
        )
    ladder = ladder_of(quant.scheme, wanted.up_to)
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


def doctor(wanted: Wanted, data: DataFile, progress: Progress = no_progress) -> Diagnosis:
    """Measure every layer alone, choose, and measure the choice.

    Raises:
        IngotError: the checkpoint cannot be read or is quantized, a text does not fit it, or memory is short.
    """
    ladder, device = check_wanted(wanted), resolve_device(wanted.device)
    progress("reading the checkpoint", 0, 1)
    with open_checkpoint(resolve_checkpoint(wanted.checkpoint)) as source:
        if source.packed is not None:
            raise ConfigError(
                "the checkpoint is already quantized",
                seen=wanted.checkpoint,
                fix="give the original checkpoint",
            )
        build = build_config(source, "auto", DEFAULT_MAX_BATCH_SIZE, None, None)
        assembly = Assembly.of(source, build, QuantConfig())
        samples = samples_of(source, assembly.model_config, data, wanted.reading)
        found = _diagnosed(wanted, ladder, assembly, source, samples.texts, device, progress)
    facts = {
        "checkpoint": wanted.checkpoint,
        "dtype": build.dtype,
        "data": data.facts(),
        "counts": samples.counts,
        "reading": asdict(samples.reading),
        "machine": machine(device),
    }
    return replace(found, facts=facts)


def _diagnosed(
    wanted: Wanted,
    ladder: tuple[str, ...],
    assembly: Assembly,
    source: Checkpoint,
    texts: Sequence[Text],
    device: torch.device,
    progress: Progress,
) -> Diagnosis:
    """Without the facts."""
    layers = options_of(assembly, wanted.quant, ladder)
    dtype, load = parse_dtype(assembly.build.dtype), partial(assembly.load, checkpoint=source)
    num_bytes = sum(layer.num_weights for layer in layers) * dtype.itemsize
    if device.type == "cpu":
        _expect_room(assembly, texts)
    try:
        with torch.inference_mode(), steady_threads(num_bytes, device):
            probe = PrecisionProbe(dense_model(assembly), load, texts, device, dtype)
            return _Session(wanted, ladder, layers, probe, progress).run()
    except torch.OutOfMemoryError:
        raise OutOfMemoryError(
            "the checkpoint and its texts do not fit in the device's memory",
            seen=f"{device}",
            fix="`device=cpu`, or fewer tokens: `limit`, `max_tokens`",
        ) from None


def _expect_room(assembly: Assembly, texts: Sequence[Text]) -> None:
    """A CPU keeps all weights in fp32, and of every token and every encoded position a few rows."""
    config, tokens = assembly.model_config, sum(len(text.ids) for text in texts)
    values = _ROWS_KEPT * tokens * config.hidden_size
    if config.encoder is not None:
        inputs = [text for text in texts if text.features is not None]
        values += _ROWS_KEPT * len(inputs) * config.encoder.max_positions * config.encoder.hidden_size
    expect_room(
        "the checkpoint and its texts do not fit this machine's memory",
        dense_bytes(config, torch.float32) + values * torch.float32.itemsize,
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

    def run(self) -> Diagnosis:
        """Without the facts."""
        narrow = [scheme for scheme in self._ladder if scheme != DENSE]
        alone = self._probe.alone(list(self._options.values()), narrow, self._progress)
        layers = {
            name: Layer(
                name, layer.num_weights, {s: r.num_bytes for s, r in layer.options.items()}, alone[name]
            )
            for name, layer in self._options.items()
        }
        uniform = {s: self._measured(layers, dict.fromkeys(layers, s)) for s in self._ladder}
        settled = self._settle(layers)
        tried = [self._measured(layers, _schemes(mix)) for mix, _ in settled.tried]
        best = None if settled.best is None else self._measured(layers, _schemes(settled.best[0]))
        values = tuple(layers.values())
        return Diagnosis(self._wanted, self._ladder, values, uniform, tuple(tried), best, {})

    def _settle(self, layers: Mapping[str, Layer]) -> Settled:
        def price(mix: Mix) -> tuple[float, ...]:
            first = self._ladder[0]
            wide = [layers[name].num_weights for name, option in mix.items() if option.scheme != first]
            stored = sum(layers[name].num_bytes[option.scheme] for name, option in mix.items())
            return (sum(wide), stored) if saves_time_only(first) else (stored,)

        def measure(mix: Mix) -> float:
            return self._measure(_schemes(mix))

        pick = _least_wide if saves_time_only(self._ladder[0]) else _least_bytes
        return settle(lambda most: pick(layers, self._ladder, most), measure, price, self._wanted.budget)

    def _measured(self, layers: Mapping[str, Layer], schemes: dict[str, str]) -> LayerCosts:
        stored = sum(layers[name].num_bytes[scheme] for name, scheme in schemes.items())
        predicted = sum(_error(layers[name], scheme) for name, scheme in schemes.items())
        return LayerCosts(schemes, stored, predicted, self._measure(schemes))

    def _measure(self, schemes: Mapping[str, str]) -> float:
        key = tuple(schemes.values())
        if key not in self._known:
            self._progress("measuring a mix", 0, 1)
            options = {
                name: self._options[name].options[scheme]
                for name, scheme in schemes.items()
                if scheme != DENSE
            }
            self._known[key] = self._probe.together(options)
        return self._known[key]


def _least_bytes(layers: Mapping[str, Layer], ladder: Sequence[str], most: float) -> Mix:
    """Few bytes; decode steps, which read them, take least time then."""
    options = {name: [_by_bytes(layer, scheme) for scheme in ladder] for name, layer in layers.items()}
    return choose(options, most)


def _least_wide(layers: Mapping[str, Layer], ladder: Sequence[str], most: float) -> Mix:
    """Few weights whose products leave 8 bits; of those that leave them, few bytes."""
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
