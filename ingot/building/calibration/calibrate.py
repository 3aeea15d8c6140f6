"""Calibration's walk over a model, a layer at a time, an encoder's first.

    walk = Walk(dense_model(assembly), load, samples, device, statistic, propagate=True)
    for name in walk.layers:                                    # "layers.0", "layers.1", …
        layer = walk.observe(name)
        for name, seen in layer.inputs.items():                 # "layers.0.self_attn.qkv_proj", …
            found = gptq(layer.weight(f"{name}.weight"), seen.mean(), 4, 128).quantized
            layer.replace(f"{name}.weight", dequantize(found))  # what layers after this one will see
        walk.advance(layer)

One layer's weights are on the device; the arithmetic is that of proofs: fp32, without kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from ingot.building.calibration.walk_halves import (
    DecoderHalf,
    EncoderHalf,
    Half,
    num_tokens,
)
from ingot.config.half_dtypes import in_encoder
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.assembly import Assembly
from ingot.engine.reference_encoder import stage_names
from ingot.engine.reference_run import EXACT, ReferenceRun, SequenceSpan
from ingot.errors import BuildError, ConfigError
from ingot.layers.decoder import Decoder
from ingot.layers.linear import Linear
from ingot.quant.methods.activation_statistics import InputStatistics

BATCH_TOKENS = 4096  # computed at once, at least one sample

Load = Callable[[str], torch.Tensor]  # a dense tensor by the model's name for it
Fake = Callable[[torch.Tensor], torch.Tensor]
Progress = Callable[[str, int, int], None]


class Statistic(Protocol):
    """What gathers an input."""

    def add(self, x: torch.Tensor) -> None:
        """Tokens [T, K], fp32, on the device."""
        ...


S = TypeVar("S", bound=Statistic)


@dataclass
class CalibratedLayer(Generic[S]):
    """A layer whose inputs were observed; ``inputs``: what was gathered, by the linear layer's name."""

    name: str
    inputs: dict[str, S]
    _held: Held
    _fakes: dict[str, Fake] = field(default_factory=dict)

    def weight(self, name: str) -> torch.Tensor:
        """A parameter by its name, on the device: the latest of ``replace``, else the model's own."""
        return self._held[name]

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Take another value for a parameter: for ``weight``, and for later layers when errors propagate."""
        shape = self._held[name].shape
        if tensor.shape != shape:
            raise ConfigError(f"{name} has a different shape", seen=list(tensor.shape), allowed=list(shape))
        self._held.put(name, tensor)

    def fake_input(self, name: str, fake: Fake) -> None:
        """Put ``fake`` between a linear layer and its input [T, K], when errors propagate."""
        if name not in self.inputs:
            raise ConfigError("no such linear layer", seen=name, allowed=sorted(self.inputs))
        self._fakes[name] = fake


def dense_model(assembly: Assembly) -> Decoder:
    """The empty modules of an assembly as they are without quantization."""
    return assembly.architecture.empty_model(assembly.model_config, assembly.build, QuantConfig())


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Add the linear layer's name to errors about its values."""
    try:
        yield
    except BuildError as error:
        raise BuildError(f"{name}: {error.what}", seen=error.seen, fix=error.fix) from None


class Walk(Generic[S]):
    """Samples on their way through a model: ``observe`` and ``advance`` of one layer after another.

    Args:
        model: dense modules, which may be empty (on ``meta``); ``load`` gives their tensors by name.
        samples: token ids; where an encoder's outputs are spliced, with placeholders for them.
        features: of a model with an encoder, the one input that each sample reads; None: it reads none.
        embeddings: rows [tokens, hidden_size] of each sample, in the place of its tokens'.
        statistic: (name, in_features) → what gathers the input of one linear layer; None: nothing does.
        propagate: ``advance`` computes a layer's output again, with what the layer was given, so that the
            layers after make up for its errors: twice the arithmetic.
        batch_tokens: most tokens at once; a longer sample goes alone.
        progress: called as ("calibration", tokens and encoded positions · layers done, in all).

    ``layers`` are the names of all layers, in order. Raises ConfigError where there are no samples, one is
    empty, too long, or has ids that the model lacks, or features are missing.
    """

    def __init__(
        self,
        model: Decoder,
        load: Load,
        samples: Sequence[Sequence[int]],
        device: torch.device,
        statistic: Callable[[str, int], S | None],
        *,
        features: Sequence[torch.Tensor | None] = (),
        embeddings: Sequence[torch.Tensor] = (),
        propagate: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        progress: Progress | None = None,
    ) -> None:
        _check(model, samples, features)
        self._model = model
        self._device = device
        self._statistic = statistic
        self._propagate = propagate
        self._features = [one for one in features if one is not None]
        self._batches = _batches(model, samples, batch_tokens, _numbers(features))
        decoder = [f"layers.{index}" for index in range(len(model.layers))]
        self.layers = [*stage_names(model.config), *decoder]
        self._progress, self._done, self._total = progress, 0, self._work()
        self._held = Held(load, device)
        feed = lambda name, x: self._before(name, x)  # noqa: E731
        self._run = ReferenceRun(model, self._held, EXACT, single=True, feed=feed)
        self._run.given = dict(enumerate(embeddings))
        self._encoder: EncoderHalf | None = None
        self._decoder: DecoderHalf | None = None
        self._before: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, x: x

    def observe(self, name: str) -> CalibratedLayer[S]:
        """The next layer, once all samples went through it; BuildError where its output is not finite."""
        half = self._half(name)
        self._held.clear()
        inputs: dict[str, S] = {}
        for path, module in self._model.get_submodule(name).named_modules():
            if isinstance(module, Linear):
                own = f"{name}.{path}".removesuffix(".")  # a bridge is a linear layer itself
                assert module.scheme.dense, f"{own} is quantized"
                statistic = self._statistic(own, module.in_features)
                if statistic is not None:
                    inputs[own] = statistic

        def record(name: str, x: torch.Tensor) -> torch.Tensor:
            seen = inputs.get(name)
            if seen is not None:
                seen.add(x)
            if isinstance(seen, InputStatistics):
                seen.add_rows(x, half.rows)
            return x

        self._before = record
        half.run_layer(name, self._count, keep=not self._propagate)
        return CalibratedLayer(name, inputs, self._held)

    def advance(self, layer: CalibratedLayer[S]) -> None:
        """Give the next layer what the observed one makes of its inputs by now."""
        if self._propagate and layer.name != self.layers[-1]:
            fakes = layer._fakes
            self._before = lambda name, x: fakes[name](x) if name in fakes else x
            self._half(layer.name).run_layer(layer.name, self._count, keep=True)

    def _half(self, name: str) -> Half:
        """The half that a layer is of, begun when its first layer is asked for."""
        if in_encoder(name):
            if self._encoder is None:
                self._encoder = EncoderHalf(self._run, self._features, self._device)
            return self._encoder
        if self._decoder is None:
            self._before = lambda name, x: x  # a bridge between the halves records nothing more
            if self._encoder is not None:
                self._encoder.finish()
            self._decoder = DecoderHalf(self._run, self._batches, self._device, self._encoder)
        return self._decoder

    def _count(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress("calibration", self._done, self._total)

    def _work(self) -> int:
        """Tokens and positions (about) · layers and passes."""
        encoder = self._model.config.encoder
        encoded = 0 if encoder is None else len(self._features) * encoder.max_positions
        tokens, passes = sum(map(num_tokens, self._batches)), 1 + self._propagate
        rows = [encoded if in_encoder(name) else tokens for name in self.layers]
        return passes * sum(rows) - self._propagate * tokens  # nothing is behind the last layer


class Held:
    """Tensors that were asked for, on the device, until the next layer; embeddings stay in host memory."""

    def __init__(self, load: Load, device: torch.device) -> None:
        self.device = device
        self._load = load
        self._own: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._own:
            tensor = self._load(name)
            self._own[name] = tensor.to("cpu" if name.startswith("embed_") else self.device)
        return self._own[name]

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._own[name] = tensor.to(self.device)

    def clear(self) -> None:
        self._own.clear()

    def release(self) -> None:
        self.clear()


def _numbers(features: Sequence[torch.Tensor | None]) -> list[int | None]:
    """Of each sample the number of its input among those that there are."""
    numbers = iter(range(len(features)))
    return [None if one is None else next(numbers) for one in features]


def _batches(
    model: Decoder, samples: Sequence[Sequence[int]], most: int, inputs: Sequence[int | None]
) -> list[list[SequenceSpan]]:
    batches: list[list[SequenceSpan]] = []
    room = 0
    for number, ids in enumerate(samples):
        if not batches or len(ids) > room:
            batches.append([])
            room = most
        given = inputs[number] if inputs else None
        batches[-1].append(SequenceSpan(number, tuple(ids), 0, model.rope_offset(len(ids)), given))
        room -= len(ids)
    return batches


def _check(model: Decoder, samples: Sequence[Sequence[int]], features: Sequence[torch.Tensor | None]) -> None:
    if not samples:
        raise ConfigError("there is nothing to calibrate with", seen="no samples", field="calib")
    if len(features) != (0 if model.encoder is None else len(samples)):
        seen = f"{len(samples)} samples, features of {len(features)}"
        raise ConfigError("only a model with an encoder reads features", seen=seen)
    longest = model.config.max_positions if model.rotary is None else model.rotary.max_positions
    vocab = model.config.vocab_size
    for number, ids in enumerate(samples, start=1):
        if not 0 < len(ids) <= longest:
            allowed = f"1 to {longest} tokens"
            raise ConfigError(
                f"sample {number} has an invalid length", seen=len(ids), allowed=allowed, field="calib"
            )
        if not 0 <= min(ids) <= max(ids) < vocab:
            odd = next(i for i in ids if not 0 <= i < vocab)
            raise ConfigError(
                f"sample {number} has a token id outside the vocabulary",
                seen=odd,
                allowed=f"0 to {vocab - 1}",
                field="calib",
            )
