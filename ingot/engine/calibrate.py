"""Calibration's walk over a model, a layer at a time.

Owns the passes of samples through the layers of a checkpoint (or of a model in memory): what each linear
layer multiplies, and what the layers after see. Holds one layer's weights on the device; the hidden states of
all samples lie there too where they fit, else in host memory. Knows no way of quantizing.

    walk = Walk(dense_model(assembly), load, samples, device, statistic, propagate=True)
    for index in range(num_layers):
        layer = walk.observe(index)
        for name, seen in layer.inputs.items():                 # "layers.0.self_attn.qkv_proj", …
            found = gptq(layer.weight(f"{name}.weight"), seen.mean(), 4, 128).quantized
            layer.replace(f"{name}.weight", dequantize(found))  # what layers after this one will see
        walk.advance(layer)

The arithmetic is that of proofs (reference.py): fp32, without kernels, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from ingot.config.plan import KernelPlan
from ingot.config.quant import QuantConfig
from ingot.engine.assemble import Assembly, empty_model
from ingot.engine.reference import EXACT, ReferenceRun, Span
from ingot.errors import BuildError, ConfigError
from ingot.layers.decoder import Decoder
from ingot.layers.linear import Linear

BATCH_TOKENS = 4096  # computed at once, at least one sample
_SHARE = 0.25  # of a GPU's free memory that hidden states may take

Load = Callable[[str], torch.Tensor]  # a dense tensor by the model's name for it
Progress = Callable[[str, int, int], None]
Fake = Callable[[torch.Tensor], torch.Tensor]


class Statistic(Protocol):
    """What gathers an input."""

    def add(self, x: torch.Tensor) -> None:
        """Tokens [T, K], fp32, on the device."""
        ...


class Unseen:
    """Nothing of an input."""

    def add(self, x: torch.Tensor) -> None:
        """Forget the tokens."""
        return


S = TypeVar("S", bound=Statistic)


@dataclass
class CalibratedLayer(Generic[S]):
    """A layer whose inputs were seen.

    Attributes:
        index: of the layer, from 0.
        inputs: what was gathered of each linear layer's input, by its name in the model.
    """

    index: int
    inputs: dict[str, S]
    _held: Held
    _fakes: dict[str, Fake] = field(default_factory=dict)

    def weight(self, name: str) -> torch.Tensor:
        """A parameter of the layer by its name in the model, on the device: the latest that ``replace`` gave,
        else the model's own, in the dtype of the engine.
        """
        return self._held[name]

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Take another value for a parameter: for ``weight``, and for the layers after when errors propagate.

        Raises:
            ConfigError: it has another shape.
        """
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
    config, build = assembly.model_config, assembly.build
    return empty_model(assembly.architecture, config, build, QuantConfig(), KernelPlan())


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors of one linear layer's values, told with its name."""
    try:
        yield
    except BuildError as error:
        raise BuildError(f"{name}: {error.what}", seen=error.seen, fix=error.fix) from None


class Walk(Generic[S]):
    """Samples on their way through a decoder: ``observe`` and ``advance`` of one layer after another.

    Args:
        model: dense modules, which may be empty (on ``meta``).
        load: gives their tensors: ``partial(assembly.load, checkpoint=source)``, ``WeightsReader(path).read``
            or ``model.get_parameter``.
        samples: token ids.
        statistic: (name, in_features) → what gathers the input of one linear layer.
        propagate: ``advance`` computes a layer's output again, with what the layer was given, so that the
            layers after make up for its errors: twice the arithmetic.
        batch_tokens: most tokens at once; a longer sample goes alone.
        progress: called as ("calibration", tokens · layers done, in all).

    Raises:
        ConfigError: there are no samples, or one is empty, too long, or has ids that the model lacks.
    """

    def __init__(
        self,
        model: Decoder,
        load: Load,
        samples: Sequence[Sequence[int]],
        device: torch.device,
        statistic: Callable[[str, int], S],
        *,
        propagate: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        progress: Progress | None = None,
    ) -> None:
        _check(model, samples)
        self._model = model
        self._device = device
        self._statistic = statistic
        self._propagate = propagate
        self._last = len(model.layers) - 1
        self._batches = _batches(model, samples, batch_tokens)
        self._told = _Told(progress, self._batches, 2 * self._last + 1 if propagate else self._last + 1)
        self._held = Held(load, device)
        self._states: _States | None = None
        self._before: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, x: x

    def observe(self, index: int) -> CalibratedLayer[S]:
        """The next layer, when all samples have gone through it.

        Raises:
            BuildError: the layer's output is not finite.
        """
        if self._states is None:
            run = ReferenceRun(self._model, self._held, EXACT, single=True, feed=self._feed)
            self._states = _States(run, self._batches, self._device)
        self._held.clear()
        layer = CalibratedLayer(index, _gather(self._model, index, self._statistic), self._held)
        self._before = _recording(layer)
        self._states.through(index, self._told, keep=not self._propagate)
        return layer

    def advance(self, layer: CalibratedLayer[S]) -> None:
        """Give the next layer what the observed one makes of its inputs by now."""
        if self._propagate and layer.index < self._last:
            assert self._states is not None
            self._before = _faking(layer)
            self._states.through(layer.index, self._told, keep=True)

    def _feed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """What stands before every product, which changes from pass to pass."""
        return self._before(name, x)


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


class _States:
    """The hidden states of all samples, a batch at a time on the device."""

    def __init__(self, run: ReferenceRun, batches: list[list[Span]], device: torch.device) -> None:
        self._run = run
        self._batches = batches
        self._device = device
        width = run.config.hidden_size * torch.float32.itemsize
        num_bytes = sum(_num_tokens(batch) for batch in batches) * width
        fits = device.type == "cuda" and num_bytes < _SHARE * torch.cuda.mem_get_info(device)[0]
        self._place = device if fits else torch.device("cpu")
        self._hidden = [run.embed(batch).to(self._place) for batch in batches]

    def through(self, index: int, tell: _Told, *, keep: bool) -> None:
        """Compute a layer; ``keep``: its outputs become what the next one gets."""
        for number, batch in enumerate(self._batches):
            hidden = self._hidden[number].to(self._device)
            hidden = self._run.layer(index, hidden, batch, _unseen)
            if not bool(torch.isfinite(hidden).all()):
                raise BuildError(
                    "activations are not finite during calibration",
                    seen=f"layers.{index}",
                    fix="check the checkpoint, or use --dtype bf16",
                )
            if keep:
                self._hidden[number] = hidden.to(self._place)
            tell.add(batch)


class _Told:
    """Progress in tokens, once for each layer and pass."""

    def __init__(self, progress: Progress | None, batches: list[list[Span]], passes: int) -> None:
        self._progress = progress
        self._total = passes * sum(_num_tokens(batch) for batch in batches)
        self._done = 0

    def add(self, batch: list[Span]) -> None:
        self._done += _num_tokens(batch)
        if self._progress is not None:
            self._progress("calibration", self._done, self._total)


def _gather(model: Decoder, index: int, statistic: Callable[[str, int], S]) -> dict[str, S]:
    """An empty statistic for each linear layer of one layer."""
    found = {}
    for path, module in model.layers[index].named_modules():
        if isinstance(module, Linear):
            assert module.scheme.dense, f"layers.{index}.{path} is quantized"
            name = f"layers.{index}.{path}"
            found[name] = statistic(name, module.in_features)
    return found


def _recording(layer: CalibratedLayer[S]) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def before(name: str, x: torch.Tensor) -> torch.Tensor:
        layer.inputs[name].add(x)
        return x

    return before


def _faking(layer: CalibratedLayer[S]) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def before(name: str, x: torch.Tensor) -> torch.Tensor:
        return layer._fakes[name](x) if name in layer._fakes else x

    return before


def _unseen(name: str, output: torch.Tensor) -> None:
    return


def _num_tokens(batch: list[Span]) -> int:
    return sum(len(span.ids) for span in batch)


def _batches(model: Decoder, samples: Sequence[Sequence[int]], most: int) -> list[list[Span]]:
    batches: list[list[Span]] = []
    room = 0
    for number, ids in enumerate(samples):
        if not batches or len(ids) > room:
            batches.append([])
            room = most
        batches[-1].append(Span(number, tuple(ids), 0, model.rope_offset(len(ids))))
        room -= len(ids)
    return batches


def _check(model: Decoder, samples: Sequence[Sequence[int]]) -> None:
    if not samples:
        raise ConfigError("there is nothing to calibrate with", seen="no samples", flag="--calib")
    longest = model.config.max_positions if model.rotary is None else model.rotary.max_positions
    vocab = model.config.vocab_size
    for number, ids in enumerate(samples, start=1):
        if not 0 < len(ids) <= longest:
            allowed = f"1 to {longest} tokens"
            raise ConfigError(
                f"sample {number} has an invalid length", seen=len(ids), allowed=allowed, flag="--calib"
            )
        if not 0 <= min(ids) <= max(ids) < vocab:
            odd = next(i for i in ids if not 0 <= i < vocab)
            raise ConfigError(
                f"sample {number} has a token id outside the vocabulary",
                seen=odd,
                allowed=f"0 to {vocab - 1}",
                flag="--calib",
            )
