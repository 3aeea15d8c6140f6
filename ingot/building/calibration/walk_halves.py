"""The hidden states of all samples on their way through one half of a model, a layer at a time.

They are on the device where they fit, else in host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch

from ingot.engine.reference_encoder import keep_for, own_stages
from ingot.engine.reference_run import ReferenceRun, SequenceSpan
from ingot.errors import BuildError
from ingot.quant.methods.activation_statistics import RecordRows
from ingot.reference.plain_stage import Passage

Advance = Callable[[int], None]  # by so many tokens or encoded positions that went through a layer
_SHARE = 0.25  # of a GPU's free memory that hidden states may take
_MOST_STATES = 16  # values of an encoder's hidden states for each of an input


class Half(ABC):
    """Hidden states of each part, what goes through a layer at once.

    ``rows``: whose rows a product's input has while a layer runs; None: they are one record of tokens.
    """

    rows: RecordRows | None = None

    def __init__(
        self, run: ReferenceRun, parts: Iterable[Passage], num_values: int, device: torch.device
    ) -> None:
        self.run = run
        self._device = device
        num_bytes = num_values * torch.float32.itemsize
        fits = device.type == "cuda" and num_bytes < _SHARE * torch.cuda.mem_get_info(device)[0]
        self._place = device if fits else torch.device("cpu")
        self._parts = [part.to(self._place) for part in parts]

    @abstractmethod
    def layer(self, name: str, part: int, before: Passage) -> Passage:
        """What a layer makes of a part."""

    def run_layer(self, name: str, advance: Advance, *, keep: bool) -> None:
        """Compute a layer, whose outputs must be finite; ``keep``: they become what the next one gets."""
        for part, before in enumerate(self._parts):
            behind = self.layer(name, part, before.to(self._device))
            if not bool(torch.isfinite(behind.hidden).all()):
                raise BuildError(
                    "activations are not finite during calibration",
                    seen=name,
                    fix="check the checkpoint, or use `dtype=bf16`",
                )
            if keep:
                self._parts[part] = behind.to(self._place)
            advance(len(behind.hidden))


class EncoderHalf(Half):
    """Inputs of an encoder; a part is one of them, by its features."""

    def __init__(self, run: ReferenceRun, features: Sequence[torch.Tensor], device: torch.device) -> None:
        self._stages = own_stages(run, unseen)
        self._next = 0  # the first stage that not all parts are through
        parts = [Passage.of(run.features(one)) for one in features]
        super().__init__(run, parts, _MOST_STATES * sum(part.hidden.numel() for part in parts), device)

    def layer(self, name: str, part: int, before: Passage) -> Passage:
        return before.after(next(stage for stage in self._stages if stage.name == name))

    def run_layer(self, name: str, advance: Advance, *, keep: bool) -> None:
        """As of ``Half``; stages before the layer, which have no linear layers, first."""
        place = next(i for i, stage in enumerate(self._stages) if stage.name == name)
        self._go_on(place)
        super().run_layer(name, advance, keep=keep)
        self._next = place + keep

    def finish(self) -> None:
        """Behind the last layer: what the decoder reads."""
        self._go_on(len(self._stages))

    def keep_for(self, layer: int, number: int) -> None:
        """Give the run what a decoder layer reads of an input."""
        keep_for(self.run, number, layer, unseen, self._parts[number].hidden.to(self._device))

    @property
    def count(self) -> int:
        return len(self._parts)

    def _go_on(self, end: int) -> None:
        for stage in self._stages[self._next : end]:
            self._parts = [part.to(self._device).after(stage).to(self._place) for part in self._parts]
        self._next = max(self._next, end)


class DecoderHalf(Half):
    """Tokens; a part is a batch of samples. ``encoder``: the inputs that ``SequenceSpan.input`` names."""

    def __init__(
        self,
        run: ReferenceRun,
        batches: Sequence[Sequence[SequenceSpan]],
        device: torch.device,
        encoder: EncoderHalf | None = None,
    ) -> None:
        self._batches = batches
        self._encoder = encoder
        if encoder is not None and run.config.splices:
            for number in range(encoder.count):
                encoder.keep_for(0, number)
        values = sum(map(num_tokens, batches)) * run.config.hidden_size
        super().__init__(run, (Passage.of(run.embed(batch)) for batch in batches), values, device)
        run.rows.clear()

    def layer(self, name: str, part: int, before: Passage) -> Passage:
        batch, index = self._batches[part], int(name.rpartition(".")[2])
        for span in batch:
            if self._encoder is not None and self.run.config.crosses and span.input is not None:
                self._encoder.keep_for(index, span.input)
        self.rows = RecordRows(tuple(len(span.ids) for span in batch), self._spliced(batch))
        hidden = self.run.layer(index, before.hidden, batch, unseen)
        self.rows = None
        self.run.encoded.clear()
        return Passage.of(hidden)

    def _spliced(self, batch: Sequence[SequenceSpan]) -> torch.Tensor | None:
        """Which positions of a batch stand for an input or are given as rows; None where none can be."""
        encoder = self.run.config.encoder if self.run.config.splices else None
        if encoder is None and not self.run.given:
            return None
        place = None if encoder is None else encoder.placeholder_id
        marks = []
        for span in batch:
            given = span.sequence in self.run.given
            marks += [given or (span.input is not None and i == place) for i in span.ids]
        return torch.tensor(marks)


def num_tokens(batch: Sequence[SequenceSpan]) -> int:
    """Tokens of all samples of a batch."""
    return sum(len(span.ids) for span in batch)


def unseen(name: str, output: torch.Tensor) -> None:
    """Observe nothing of a module's output."""
    return
