"""The reference decoder over an engine's stored weights, one layer at a time.

It shares nothing with the kernels, their references or the runtime, so that a proof does not repeat their
mistakes. In a 16-bit arithmetic it computes in fp32 and rounds every module's output, as the kernels do.
Where a layer multiplies in 8 bits, its input is rounded to 8 bits in any arithmetic. A run with a witness
goes on at each place of a layer with the value that was recorded there, so that no difference grows from
place to place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from ingot.config.decoder_config import RopeConfig
from ingot.config.half_dtypes import in_encoder
from ingot.engine.weights_file import WeightsReader
from ingot.kernels.rows.block_rows import BlockSteps
from ingot.kernels.rows.int8_rows import Int8Weight
from ingot.kernels.weight.stored_weight import StoredWeight, row_pieces
from ingot.layers.decoder import Decoder
from ingot.layers.linear import Linear
from ingot.quant.plain_rows import rounded_heads
from ingot.quant.schemes.block_noise import block_noise
from ingot.quant.schemes.plain_unpacking import meaning
from ingot.reference.plain_layer import (
    Hooks,
    PlainAttention,
    PlainCross,
    Turns,
    capped,
    norm_spec,
    plain_layer,
)
from ingot.reference.plain_rotary import plain_turns

_BLOCK = 128  # rows and columns that share a scale of e4m3, if not whole rows do
_CHUNK = 1 << 22  # values of a weight that are widened at once
_FITS = 0.6  # share of a GPU's free memory that may hold the weights between passes

See = Callable[[str, torch.Tensor], None]
Feed = Callable[[str, torch.Tensor], torch.Tensor]  # a product's name and input → what it multiplies


@dataclass(frozen=True)
class Arithmetic:
    """``dtype`` of the operations; ``rounds_to``: the dtype that every module's output is rounded to;
    ``flips``: the closest call of each row that is rounded to 8 bits goes the other way (plain_rows.py).
    """

    dtype: torch.dtype
    rounds_to: torch.dtype | None = None
    flips: bool = False

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """A module's output as the next module gets it."""
        return x if self.rounds_to is None else x.to(self.rounds_to).to(self.dtype)

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        """What was computed in another arithmetic, or stored, as this one has it."""
        return self.round(x.to(self.dtype))


EXACT = Arithmetic(torch.float32)
FINER = Arithmetic(torch.float64)
FLIPPED = Arithmetic(torch.float32, flips=True)


@dataclass(frozen=True)
class SequenceSpan:
    """New tokens of one sequence, after ``start`` computed ones. ``rope_offset`` is its row of the rotary
    table; ``input``: the number of the input that cross-attention reads (``encoded``), or whose rows stand in
    the places of its placeholders (``rows``).
    """

    sequence: int
    ids: tuple[int, ...]
    start: int
    rope_offset: int
    input: int | None = None


class WeightSource(Protocol):
    """Tensors by name, on any device, and the device to compute on."""

    device: torch.device

    def __getitem__(self, name: str) -> torch.Tensor:
        """A stored tensor."""
        ...

    def release(self) -> None:
        """Free what reading took."""
        ...


class EngineTensors:
    """The stored tensors of an engine on a device, read when asked for.

    A GPU with room for all keeps them (``resident``); else each pass reads the file again.
    """

    def __init__(self, path: Path, model: Decoder, device: torch.device) -> None:
        self.device = device
        self._reader = WeightsReader(path)
        self._kept: dict[str, torch.Tensor] = {}
        self.num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.resident = device.type == "cuda" and self.num_bytes < _FITS * torch.cuda.mem_get_info(device)[0]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._kept:
            return self._kept[name]
        tensor = self._reader.read(name)
        if self.resident:
            tensor = self._kept[name] = tensor.to(self.device)
        return tensor

    def release(self) -> None:
        """Let go of the file's pages that were read so far."""
        self._reader.release()


KeysValues = tuple[torch.Tensor, torch.Tensor]  # [tokens, num_kv_heads, head_dim] each


class Witness(Protocol):
    """Recorded values at each place of a layer, by the names of step_record.py; a run goes on with them."""

    def value(self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None) -> torch.Tensor:
        """Recorded rows [T, ...]; ``change``: what the last product added to them."""
        ...

    def rounded(self, product: str, exact: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        """A product's input [T, K] as the run rounded it; ``near`` is ``exact`` rounded here."""
        ...

    def summed(self, product: str, output: torch.Tensor, noise: torch.Tensor) -> None:
        """Outputs [T, N] of a product by blocks, and how far rounding may move each (block_noise.py)."""
        ...

    def cached(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> list[KeysValues]:
        """For each span all keys and values that its attention reads.

        ``keys`` and ``values`` [T, num_kv_heads, head_dim] are the new tokens', computed here and not rounded
        to a cache of 8 bits.
        """
        ...

    def encoded(self, layer: int) -> list[KeysValues]:
        """For each span the encoded keys and values that its cross-attention reads."""
        ...

    def within(self, stage: str) -> None:
        """The places that follow are of this stage of an encoder."""
        ...


class ReferenceRun(Hooks):
    """One run through a model in one arithmetic, with keys and values of its own; a ``single`` pass keeps
    none.

    ``feed`` changes every product's input. ``kv_dtype``: keys and values are rounded as such a cache rounds
    them (``BuildConfig``). ``encoder_arithmetic``: of the encoder, where it has another; the decoder takes
    its outputs as ``arithmetic`` has them.

    Attributes:
        encoded: by layer and number of an input, what cross-attention reads of it.
        rows: by number of an input, the spliced rows [positions, hidden_size].
        given: by sequence, rows [tokens, hidden_size] in place of its tokens' embeddings.
    """

    def __init__(
        self,
        model: Decoder,
        weights: WeightSource,
        arithmetic: Arithmetic,
        *,
        single: bool = False,
        feed: Feed | None = None,
        kv_dtype: str = "model",
        witness: Witness | None = None,
        encoder_arithmetic: Arithmetic | None = None,
    ) -> None:
        self._witness = witness
        self._single = single
        self._feed = feed
        self._kv_dtype = kv_dtype
        self.model = model
        self.config = model.config
        self.weights = weights
        self.arithmetic = arithmetic
        self.encoder_arithmetic = encoder_arithmetic or arithmetic
        self._cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.encoded: dict[tuple[int, int], KeysValues] = {}
        self.rows: dict[int, torch.Tensor] = {}
        self.given: dict[int, torch.Tensor] = {}
        self._at: tuple[int, Sequence[SequenceSpan], See]  # the layer that is computed
        # By rotary settings, once for all layers of a pass.
        self._turned: tuple[Sequence[SequenceSpan], dict[RopeConfig, Turns]] | None = None

    def embed(self, spans: Sequence[SequenceSpan]) -> torch.Tensor:
        """Hidden states [T, hidden_size] of the spans' tokens, one after another."""
        hidden = self._rows("embed_tokens.weight", [i for s in spans for i in s.ids])
        if self.config.embedding_scale != 1:
            scale = torch.tensor(self.config.embedding_scale, dtype=hidden.dtype, device=hidden.device)
            hidden = self.arithmetic.round(hidden * self.arithmetic.round(scale))
        hidden = self._with_given(hidden, spans)
        if self.config.rope is None:
            places = self._rows("embed_positions.weight", [p for s in spans for p in _positions(s)])
            hidden = self.arithmetic.round(hidden + places)
        return self.recorded("stream", self._spliced(hidden, spans))

    def _spliced(self, hidden: torch.Tensor, spans: Sequence[SequenceSpan]) -> torch.Tensor:
        """Puts inputs' rows in their placeholders' places in the prompt; later placeholder ids are tokens."""
        encoder = self.config.encoder if self.config.splices else None
        if encoder is None or not self.rows:
            return hidden
        parts = list(hidden.split([len(span.ids) for span in spans]))
        for place, span in enumerate(spans):
            if span.input is not None and span.start == 0:
                rows = self.rows[span.input].to(hidden)
                taken = [at for at, i in enumerate(span.ids) if i == encoder.placeholder_id][: len(rows)]
                parts[place] = parts[place].clone()
                parts[place][taken] = rows  # as many, or this raises
        return torch.cat(parts)

    def _with_given(self, hidden: torch.Tensor, spans: Sequence[SequenceSpan]) -> torch.Tensor:
        if not self.given:
            return hidden
        parts = list(hidden.split([len(span.ids) for span in spans]))
        for place, span in enumerate(spans):
            if span.sequence in self.given:
                rows = self.given[span.sequence][span.start : span.start + len(span.ids)]
                parts[place] = self.arithmetic.round(rows.to(hidden))
        return torch.cat(parts)

    def layer(
        self, index: int, hidden: torch.Tensor, spans: Sequence[SequenceSpan], see: See
    ) -> torch.Tensor:
        """[T, hidden_size] → the same; ``see`` gets each module's output by name."""
        self._at = index, spans, see
        where = torch.tensor([p for span in spans for p in _positions(span)], device=hidden.device)
        turns = self.turns(where, spans, self.config.rope_of(index))
        layer = plain_layer(self.config, index, self.vector, where, turns)
        if all(span.input is None for span in spans):  # a request without an input skips cross-attention
            layer = replace(layer, cross=None)
        return layer.run(hidden, self)

    def final_norm(self, hidden: torch.Tensor, see: See) -> torch.Tensor:
        """[T, hidden_size] after the last norm."""
        hidden = self.norm(norm_spec(self.config, "norm", self.vector), hidden)
        see("norm", hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, hidden_size] after the final norm → [L, vocab_size]."""
        tied = {"weight": "embed_tokens.weight"} if self.model.tied else {}
        logits = self.product("lm_head", hidden, tied)
        if self.config.logit_softcap:
            logits = self.arithmetic.round(capped(logits, self.config.logit_softcap))
        return self.recorded("logits", logits)

    def recorded(
        self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The witness's value; without one what was computed."""
        return computed if self._witness is None else self._witness.value(place, computed, change)

    def within(self, name: str) -> None:
        if self._witness is not None:
            self._witness.within(name)

    def see(self, name: str, output: torch.Tensor) -> None:
        self._at[2](name, output)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        return self.arithmetic.round(x)

    def _rows(self, name: str, ids: list[int]) -> torch.Tensor:
        table = self.weights[name]
        rows = table[torch.tensor(ids, device=table.device)]
        return self.arithmetic.round(rows.to(self.weights.device, self.arithmetic.dtype))

    def features(self, features: torch.Tensor) -> torch.Tensor:
        """An input as the encoder takes it."""
        return self.encoder_arithmetic.taken(features.to(self.weights.device))

    def arithmetic_at(self, name: str) -> Arithmetic:
        """Of a module or tensor of this name."""
        return self.encoder_arithmetic if in_encoder(name) else self.arithmetic

    def vector(self, name: str) -> torch.Tensor:
        """A stored tensor of no product, in this arithmetic's dtype; a wide norm's is not rounded."""
        arithmetic = self.arithmetic_at(name)
        tensor = self.weights[name].to(self.weights.device, arithmetic.dtype)
        return tensor if self.config.wide_norms and "norm" in name else arithmetic.round(tensor)

    def product(self, name: str, x: torch.Tensor, others: Mapping[str, str] | None = None) -> torch.Tensor:
        """x · Wᵀ + b with the stored weight dequantized in pieces of W, so that little is widened at once.

        A narrow arithmetic rounds a dequantized weight, as the kernels do. ``others``: names of tensors that
        are not the module's own.
        """
        x, arithmetic = x if self._feed is None else self._feed(name, x), self.arithmetic_at(name)
        linear = self.model.get_submodule(name)
        assert isinstance(linear, Linear)
        leaves = [leaf for leaf in linear.stored_names if leaf != "bias"]
        tensors = {leaf: self.weights[(others or {}).get(leaf, f"{name}.{leaf}")] for leaf in leaves}
        scheme = linear.origin
        if scheme.rounds:
            near = scheme.rounded(_wide(x), tensors, flips=arithmetic.flips).to(x)
            near = near if self._witness is None else self._witness.rounded(name, x, near)
            x = scheme.gathered(near, tensors)
            pieces = _int8_pieces(scheme.plain_weight(tensors, linear.in_features), x)
        else:
            stored = scheme.stored(tensors, linear.in_features)
            pieces = (_widened(piece, x, arithmetic) for piece in row_pieces(stored, _CHUNK))
        by_blocks = self._witness is not None and scheme.form == "blocks"
        size = linear.out_features
        y, noise = self._products(x, pieces, size, scheme.block_tensors(tensors).steps if by_blocks else None)
        if linear.has_bias:
            bias = self.weights[f"{name}.bias"].to(self.weights.device, arithmetic.dtype)
            y += bias if scheme.form == "blocks" else arithmetic.round(bias)  # in the shift it is fp32
        y = arithmetic.round(y)
        if self._witness is not None and noise is not None:
            self._witness.summed(name, y, noise)
        return y

    def _products(
        self, x: torch.Tensor, pieces: Iterable[torch.Tensor], size: int, blocks: BlockSteps | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x · Wᵀ of pieces of W, ``size`` rows in all; for products by ``blocks`` also their noise."""
        if blocks is None:
            # One tensor for all: small ones between the pieces would keep the heap from using a piece's room
            # for the next one.
            y, done = x.new_empty(*x.shape[:-1], size), 0
            for piece in pieces:
                y[..., done : done + len(piece)] = x @ piece.T
                done += len(piece)
            return y, None
        steps, zeros = (part.to(x) for part in (blocks.steps, blocks.zeros))
        found = [(x @ piece.T, block_noise(x, piece, steps, zeros, blocks.block)) for piece in pieces]
        y, noise = (torch.cat(parts, dim=-1) for parts in zip(*found, strict=True))
        return y, noise

    def turns(
        self, where: torch.Tensor, spans: Sequence[SequenceSpan], rope: RopeConfig | None
    ) -> Turns | None:
        """Cosines and sines of the spans' tokens, which are at positions ``where`` [T], by a layer's rotary
        settings.
        """
        rotary = self.model.rotary
        if rope is None or rotary is None:
            return None
        if self._turned is None or self._turned[0] is not spans:
            self._turned = spans, {}
        known = self._turned[1]
        if rope not in known:
            sections = [s.rope_offset // rotary.max_positions for s in spans for _ in s.ids]
            found = plain_turns(rope, where, torch.tensor(sections))
            cos, sin = (part.to(where.device, self.arithmetic.dtype)[:, None] for part in found)
            known[rope] = cos, sin
        return known[rope]

    def attend(
        self, attention: PlainAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Each span's queries over all keys and values of its sequence."""
        index, spans, _ = self._at
        counts = [len(span.ids) for span in spans]
        if self._witness is None:
            new = zip(spans, key.split(counts), value.split(counts), strict=True)
            read = [self._joined(index, *of_span) for of_span in new]
        else:
            read = self._witness.cached(index, key, value)
        asked = zip(query.split(counts), read, attention.positions.split(counts), strict=True)
        return torch.cat([attention.attend(q, *pair, places) for q, pair, places in asked])

    def attend_encoded(self, attention: PlainCross, query: torch.Tensor) -> torch.Tensor:
        """Each span's queries over its input's encoded positions."""
        index, spans, _ = self._at
        if self._witness is None:
            read = [self.encoded[index, span.input] for span in spans if span.input is not None]
        else:
            read = self._witness.encoded(index)
        asked = zip(query.split([len(span.ids) for span in spans]), read, strict=True)
        return torch.cat([attention.attend(own, *pair) for own, pair in asked])

    def keep_encoded(self, layer: int, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep an input's keys and values for a layer's cross-attention, as the cache does."""
        self.encoded[layer, number] = self._cached(keys), self._cached(values)

    def _cached(self, part: torch.Tensor) -> torch.Tensor:
        return rounded_heads(part, self._kv_dtype, flips=self.arithmetic.flips)

    def _joined(self, index: int, span: SequenceSpan, k: torch.Tensor, v: torch.Tensor) -> KeysValues:
        """All keys and values of a sequence, the new ones after the old."""
        k, v = self._cached(k), self._cached(v)
        before = self._cache.get((index, span.sequence))
        if before is not None:
            k, v = torch.cat([before[0], k]), torch.cat([before[1], v])
        if not self._single:
            self._cache[index, span.sequence] = (k, v)
        return k, v


def _int8_pieces(weight: Int8Weight, like: torch.Tensor) -> Iterator[torch.Tensor]:
    """A dequantized 8-bit weight, some rows at a time; products with it are rounded in no arithmetic."""
    rows, wide = max(1, _CHUNK // weight.values.shape[1]), _wide(like)
    column = torch.arange(weight.values.shape[1], device=weight.values.device) // _BLOCK
    for start in range(0, len(weight.values), rows):
        row = torch.arange(start, min(start + rows, len(weight.values)), device=weight.values.device)
        if weight.scales.dim() == 2:  # one scale for each block of rows and columns
            scales = weight.scales.to(wide)[row // _BLOCK][:, column]
        else:
            scales = weight.scales.to(wide)[row, None]
        yield (weight.values[row].to(wide) * scales).to(like)


def _widened(piece: StoredWeight, like: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """A dequantized piece of a weight, as an arithmetic has it."""
    scales, zeros = (None if t is None else t.to(like.device) for t in (piece.scales, piece.zeros))
    moved = replace(piece, values=piece.values.to(like.device), scales=scales, zeros=zeros)
    return arithmetic.round(meaning(moved, like.dtype))


def _positions(span: SequenceSpan) -> list[int]:
    return list(range(span.start, span.start + len(span.ids)))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """At least fp32, in which quantized values are chosen."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
