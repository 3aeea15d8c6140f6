"""KL of a checkpoint's next-token distribution with some linear layers in fewer bits, against its own.

The arithmetic is that of proofs (engine/reference_run.py): fp32 over the weights in the engine's dtype,
without kernels, on any device. All weights are on the device. A layer in fewer bits is packed and
dequantized; where its scheme rounds the input, the input is rounded as well. A model's places are an
encoder's stages, then the decoder's layers. Of recordings each decoder layer computes its own keys and
values, which are not kept; a picture's rows are spliced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from ingot.building.calibration.calibrate import BATCH_TOKENS, Load
from ingot.engine.reference_encoder import keep_for, own_stages
from ingot.engine.reference_run import EXACT, ReferenceRun, SequenceSpan
from ingot.errors import CheckpointError
from ingot.layers.decoder import Decoder
from ingot.measure.evaluate.doctor.precision_options import LayerOptions, StoredForm
from ingot.measure.evaluate.doctor.scheme_patterns import layer_of
from ingot.measure.evaluate.eval_record import Progress, no_progress
from ingot.measure.evaluate.token_divergence import kl_rows
from ingot.reference.plain_stage import Passage

_ROWS = 256  # of logits at a time


@dataclass(frozen=True)
class Text:
    """Token ids, and the positions after which the next token's distribution counts; ``features``, on the
    CPU, of their recording [mels, frames] or picture [3, side, side].
    """

    ids: tuple[int, ...]
    counted: range
    features: torch.Tensor | None = None


@dataclass(frozen=True)
class _Batch:
    """Texts one after another, their counted rows [n] int64, and their features."""

    spans: list[SequenceSpan]
    rows: torch.Tensor
    features: list[torch.Tensor]


@dataclass(frozen=True)
class _State:
    """A batch at a place: its encoder passes so far, and its hidden states, None within the encoder."""

    encoded: list[Passage]
    hidden: torch.Tensor | None = None


class PrecisionProbe:
    """Runs of one checkpoint on one set of texts: dense modules, which may be empty (on ``meta``), whose
    tensors ``load`` gives by name; ``dtype`` is that of the engine's weights.
    """

    def __init__(
        self, model: Decoder, load: Load, texts: Sequence[Text], device: torch.device, dtype: torch.dtype
    ) -> None:
        if model.rotary is not None:
            model.rotary.to(device)
        self._dtype = dtype
        self._weights = _Weights(load, device)
        self._feeds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._run = ReferenceRun(model, self._weights, EXACT, single=True, feed=self._feed)
        encodes = any(text.features is not None for text in texts)
        self._stages = own_stages(self._run, _unseen) if encodes else []
        self._names = [one.name for one in self._stages] + [f"layers.{i}" for i in range(len(model.layers))]
        self._places = len(self._stages) + len(model.layers)
        self._batches = _batches(model, texts, device)
        self.num_tokens = sum(len(batch.rows) for batch in self._batches)
        self._exact = [
            self._normed(hidden, batch) for hidden, batch in zip(self._final({}), self._batches, strict=True)
        ]
        if not all(bool(torch.isfinite(one).all()) for one in self._exact):
            raise CheckpointError("the checkpoint's own outputs are not finite", fix="use another checkpoint")

    def alone(
        self, layers: Sequence[LayerOptions], narrow: Sequence[str], progress: Progress = no_progress
    ) -> dict[str, dict[str, float]]:
        """KL(whole || changed) in nats, mean over the counted tokens, with one layer at a time in each of the
        schemes ``narrow``; progress counts passes through the model's places.
        """
        found: dict[str, dict[str, float]] = {}
        total = sum(self._places - self._place(layer.name) for layer in layers) * len(narrow)
        done = 0
        states = self._first()
        for place in range(self._places):
            for layer in (one for one in layers if self._place(one.name) == place):
                errors = found.setdefault(layer.name, {})
                for scheme in narrow:
                    progress(f"{layer.name} in {scheme}", done, total)
                    with self._changed({layer.name: layer.schemes[scheme]}):
                        parts = [self._after(place, state, n) for n, state in enumerate(states)]
                    errors[scheme] = self._mean(parts, layer.name)
                    done += self._places - place
            states = self._all_behind(place, states)
        progress("measured", total, total)
        return found

    def together(self, schemes: Mapping[str, StoredForm]) -> float:
        """The same with all these layers at once, in one pass."""
        parts = [self._divergence(hidden, number) for number, hidden in enumerate(self._final(schemes))]
        return self._mean(parts, "the mix")

    def _place(self, name: str) -> int:
        return self._names.index(name if name in self._names else layer_of(name))

    def _first(self) -> list[_State]:
        """Each batch before the first place."""
        return [_State([Passage.of(one) for one in batch.features]) for batch in self._batches]

    def _final(self, schemes: Mapping[str, StoredForm]) -> list[torch.Tensor]:
        """Hidden states of each batch after the last layer."""
        states = self._first()
        for place in range(self._places):
            with self._changed({name: one for name, one in schemes.items() if self._place(name) == place}):
                states = self._all_behind(place, states)
        return [_hidden(state) for state in states]

    def _all_behind(self, place: int, states: Sequence[_State]) -> list[_State]:
        return [self._behind(place, *one) for one in zip(states, self._batches, strict=True)]

    def _behind(self, place: int, state: _State, batch: _Batch) -> _State:
        if place < len(self._stages):
            return replace(state, encoded=[one.after(self._stages[place]) for one in state.encoded])
        index = place - len(self._stages)
        for number, one in enumerate(state.encoded):
            keep_for(self._run, number, index, _unseen, one.hidden)
        hidden = self._run.embed(batch.spans) if state.hidden is None else state.hidden
        hidden = self._run.layer(index, hidden, batch.spans, _unseen)
        self._run.encoded.clear()
        self._run.rows.clear()
        return replace(state, hidden=hidden)

    def _after(self, place: int, state: _State, number: int) -> float:
        """The sum of a batch's divergences, computed from a place on."""
        for onwards in range(place, self._places):
            state = self._behind(onwards, state, self._batches[number])
        return self._divergence(_hidden(state), number)

    def _divergence(self, hidden: torch.Tensor, number: int) -> float:
        """The sum over a batch's counted tokens, float64."""
        normed, total = self._normed(hidden, self._batches[number]), 0.0
        for theirs, ours in zip(self._exact[number].split(_ROWS), normed.split(_ROWS), strict=True):
            log_p, log_q = (self._run.logits(rows).double().log_softmax(-1) for rows in (theirs, ours))
            total += float(kl_rows(log_p, log_q).sum())
        return total

    def _normed(self, hidden: torch.Tensor, batch: _Batch) -> torch.Tensor:
        """The head's input, [n, hidden_size] of the counted rows."""
        return self._run.final_norm(hidden[batch.rows], _unseen)

    def _mean(self, sums: Sequence[float], what: str) -> float:
        mean = math.fsum(sums) / self.num_tokens
        if not math.isfinite(mean):
            raise CheckpointError("the quantized outputs are not finite", seen=what, field="quant")
        return max(mean, 0.0)  # equal distributions may differ by the last bit of a sum

    def _feed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._feeds[name](x) if name in self._feeds else x

    @contextmanager
    def _changed(self, schemes: Mapping[str, StoredForm]) -> Iterator[None]:
        """These layers in other schemes, quantized and dequantized."""
        try:
            for name, form in schemes.items():
                weight = self._weights[f"{name}.weight"]
                tensors = form.of(weight, self._dtype)
                read = form.scheme.dequantize(tensors, weight.shape[1], torch.float32)
                self._weights.changed[f"{name}.weight"] = read
                if form.scheme.rounds:
                    self._feeds[name] = partial(form.scheme.rounded, tensors=tensors)
            yield
        finally:
            self._weights.changed.clear()
            self._feeds.clear()


def _hidden(state: _State) -> torch.Tensor:
    assert state.hidden is not None
    return state.hidden


class _Weights:
    """Tensors on the device (of a CPU in fp32), read on first use. Those in ``changed`` replace them."""

    def __init__(self, load: Load, device: torch.device) -> None:
        self.device = device
        self.changed: dict[str, torch.Tensor] = {}
        self._load = load
        self._own: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.changed:
            return self.changed[name]
        if name not in self._own:
            tensor = self._load(name)
            self._own[name] = tensor.float() if self.device.type == "cpu" else tensor.to(self.device)
        return self._own[name]

    def release(self) -> None:
        """All stays for the next run."""


def _batches(model: Decoder, texts: Sequence[Text], device: torch.device) -> list[_Batch]:
    """At most ``BATCH_TOKENS`` tokens each, or one text."""
    groups: list[list[Text]] = []
    room = 0
    for text in texts:
        if not groups or len(text.ids) > room:
            groups.append([])
            room = BATCH_TOKENS
        groups[-1].append(text)
        room -= len(text.ids)
    return [_batch(model, group, device) for group in groups]


def _batch(model: Decoder, texts: Sequence[Text], device: torch.device) -> _Batch:
    spans, rows, before = [], [], 0
    features: list[torch.Tensor] = []
    for number, text in enumerate(texts):
        place = None if text.features is None else len(features)
        features += [] if text.features is None else [text.features.to(device, EXACT.dtype)]
        spans.append(SequenceSpan(number, text.ids, 0, model.rope_offset(len(text.ids)), place))
        rows += [before + place for place in text.counted]
        before += len(text.ids)
    return _Batch(spans, torch.tensor(rows, device=device), features)


def _unseen(name: str, output: torch.Tensor) -> None:
    return
