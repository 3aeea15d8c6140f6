"""The hidden states of all samples on their way through one half of a model, a layer at a time.

Owns where they lie (on the device where they fit, else in host memory) and what a layer of either half makes
of them: of windows of speech, or of tokens that may read what such windows became. Knows no statistic.

    heard = EncoderHalf(run, features, device)
    heard.through(0, told, keep=True)
    said = DecoderHalf(run, batches, device, heard)      # each layer reads keys and values of the outputs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch

from ingot.engine.reference import ReferenceRun, Span
from ingot.engine.reference_encoder import encoder_stages
from ingot.errors import BuildError
from ingot.quant.calibration import Rows

Progress = Callable[[str, int, int], None]
_SHARE = 0.25  # of a GPU's free memory that hidden states may take


class Told:
    """Progress in tokens and encoded positions, once for each layer and pass."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, count: int) -> None:
        """So many more went through a layer."""
        self._done += count
        if self._progress is not None:
            self._progress("calibration", self._done, self._total)


class Half(ABC):
    """Hidden states [T, hidden_size] of each part: what goes through a layer at once.

    ``rows``: whose rows a product's input has while a layer runs; None: they are one record of tokens.
    """

    name: str  # of a layer in the model, before its number
    rows: Rows | None = None

    def __init__(
        self, run: ReferenceRun, hidden: Iterable[torch.Tensor], rows: int, device: torch.device
    ) -> None:
        self.run = run
        self._device = device
        num_bytes = rows * run.config.hidden_size * torch.float32.itemsize
        fits = device.type == "cuda" and num_bytes < _SHARE * torch.cuda.mem_get_info(device)[0]
        self._place = device if fits else torch.device("cpu")
        self._hidden = [part.to(self._place) for part in hidden]

    @abstractmethod
    def layer(self, index: int, part: int, hidden: torch.Tensor) -> torch.Tensor:
        """What a layer makes of a part's hidden states."""

    def through(self, index: int, told: Told, *, keep: bool) -> None:
        """Compute a layer; ``keep``: its outputs become what the next one gets.

        Raises:
            BuildError: they are not finite.
        """
        for part, before in enumerate(self._hidden):
            hidden = self.layer(index, part, before.to(self._device))
            if not bool(torch.isfinite(hidden).all()):
                raise BuildError(
                    "activations are not finite during calibration",
                    seen=f"{self.name}.{index}",
                    fix="check the checkpoint, or use --dtype bf16",
                )
            if keep:
                self._hidden[part] = hidden.to(self._place)
            told.add(len(hidden))


class EncoderHalf(Half):
    """Windows of speech; a part is one of them, of features [mels, frames]."""

    name = "encoder.layers"

    def __init__(self, run: ReferenceRun, features: Sequence[torch.Tensor], device: torch.device) -> None:
        assert run.config.encoder is not None
        self._stages = [encoder_stages(run, number, unseen) for number in range(len(features))]
        self._num_layers = len(self._stages[0]) - 2 - run.config.num_layers  # without front, norm and keys
        hidden = (own[0](run.features(one)) for own, one in zip(self._stages, features, strict=True))
        super().__init__(run, hidden, len(features) * run.config.encoder.max_positions, device)

    def layer(self, index: int, part: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._stages[part][1 + index](hidden)

    def norm(self) -> None:
        """Behind the last layer: what cross-attention reads."""
        for part, hidden in enumerate(self._hidden):
            normed = self._stages[part][1 + self._num_layers](hidden.to(self._device))
            self._hidden[part] = normed.to(self._place)

    def keys_values(self, layer: int, number: int) -> None:
        """Give the run a decoder layer's keys and values of a window."""
        self._stages[number][2 + self._num_layers + layer](self._hidden[number].to(self._device))


class DecoderHalf(Half):
    """Tokens; a part is a batch of samples. ``heard``: the windows that their ``Span.input`` names."""

    name = "layers"

    def __init__(
        self,
        run: ReferenceRun,
        batches: Sequence[Sequence[Span]],
        device: torch.device,
        heard: EncoderHalf | None = None,
    ) -> None:
        self._batches = batches
        self._heard = heard
        super().__init__(run, map(run.embed, batches), sum(map(num_tokens, batches)), device)

    def layer(self, index: int, part: int, hidden: torch.Tensor) -> torch.Tensor:
        batch = self._batches[part]
        for span in batch:
            if self._heard is not None and span.input is not None:
                self._heard.keys_values(index, span.input)
        self.rows = Rows(tuple(len(span.ids) for span in batch))
        hidden = self.run.layer(index, hidden, batch, unseen)
        self.rows = None
        self.run.encoded.clear()
        return hidden


def num_tokens(batch: Sequence[Span]) -> int:
    """Of all of a batch's samples."""
    return sum(len(span.ids) for span in batch)


def unseen(name: str, output: torch.Tensor) -> None:
    """See nothing of a module's output."""
    return
