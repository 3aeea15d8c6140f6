"""Recorded values of steps, place by place, as the reference run asks for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ingot.engine.reference_run import KeysValues, SequenceSpan
from ingot.kernels.cache.cache_scales import E4M3, dequantize_heads
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.layers.decoder import Decoder
from ingot.layers.forward_batch import LayerCache
from ingot.layers.linear import Linear
from ingot.layers.step_record import Recorded, StepRecord
from ingot.proof.product_noise import ProductNoise
from ingot.proof.step_judge import Judge
from ingot.quant.plain_rows import e4m3_gaps

MODULES = {  # place of a layer → the module that makes it, for people
    "attn_in": "input_layernorm",
    "query": "self_attn.qkv_proj (queries)",
    "keys": "self_attn.qkv_proj (keys)",
    "values": "self_attn.qkv_proj (values)",
    "attended": "self_attn (attention)",
    "cross_in": "encoder_attn_layernorm",
    "cross_query": "encoder_attn.q_proj",
    "cross_attended": "encoder_attn (attention)",
    "mlp_in": "post_attention_layernorm",
    "inner": "mlp (activation)",
}
_INPUTS = {
    "self_attn.qkv_proj": "attn_in",
    "self_attn.o_proj": "attended",
    "encoder_attn.q_proj": "cross_in",
    "encoder_attn.o_proj": "cross_attended",
    "mlp.down_proj": "inner",
}
TAKEN = {"mlp_in", *_INPUTS.values()}
_BRANCHES = ("self_attn.o_proj", "mlp.down_proj")
_CROSS_BRANCHES = ("self_attn.o_proj", "encoder_attn.o_proj", "mlp.down_proj")


class TokenRows:
    """The tokens of all records in order, without padding, and which of them each attention reads.

    Attributes:
        spans: of each record, a request's new tokens.
        reads: of each span, the rows of the tokens whose keys and values it reads.
        encoder_slots: of each span, the slots of the second cache that its cross-attention reads, or none.
        wrong_tokens: greedy tokens that are not the top ones of the logits before them.
    """

    def __init__(
        self,
        records: Sequence[StepRecord],
        dtype: torch.dtype,
        block_size: int,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self.records = records
        self._prompts = [list(prompt) for prompt in prompts]
        self.dtype = dtype
        self.valid = [record.inputs["slot_mapping"] >= 0 for record in records]
        self.wanted = [_wanted(record, mask) for record, mask in zip(records, self.valid, strict=True)]
        self.num_tokens = sum(int(mask.sum()) for mask in self.valid)
        self.spans: list[list[SequenceSpan]] = []
        self.reads: list[list[torch.Tensor]] = []
        self.encoder_slots: list[list[tuple[int, ...]]] = []
        self.wrong_tokens: list[tuple[str, str]] = []
        self._layers: dict[int, KeysValues] = {}
        self._follow(block_size)

    def keys_values(self, layer: int) -> KeysValues:
        """Cached keys and values of every token, as attention reads them: [tokens, kv_heads, head_dim]."""
        if layer not in self._layers:
            self._layers = {}  # one layer at a time
            cached = [self.cached(number, layer) for number in range(len(self.records))]
            keys, values = (torch.cat([self.meant(own, side) for own in cached]) for side in (0, 1))
            self._layers[layer] = keys, values
        return self._layers[layer]

    def cached(self, record: int, layer: int) -> list[torch.Tensor]:
        return [tensor[self.valid[record]] for tensor in self.records[record].cached[layer]]

    def meant(self, tensors: Sequence[torch.Tensor], side: int) -> torch.Tensor:
        """Dequantized keys (``side`` 0) or values of a layer's cached tensors."""
        if len(tensors) == 2:
            return tensors[side]
        return dequantize_heads(tensors[side], tensors[2 + side], self.dtype)

    def _follow(self, block_size: int) -> None:
        """Go through the steps as the cache changed."""
        row_of: dict[int, int] = {}  # cache slot → row of the newest token in it
        logits_of: dict[int, torch.Tensor] = {}  # cache slot → logits after the newest token in it
        id_of: dict[int, int] = {}  # cache slot → the newest token in it
        first = 0
        for record, mask, wanted in zip(self.records, self.valid, self.wanted, strict=True):
            tensors = {name: tensor.tolist() for name, tensor in record.inputs.items()}
            row_of |= {slot: first + i for i, slot in enumerate(tensors["slot_mapping"]) if slot >= 0}
            id_of |= dict(zip(tensors["slot_mapping"], tensors["input_ids"], strict=True))
            self.spans.append([])
            self.reads.append([])
            self.encoder_slots.append([])
            for request, length in enumerate(tensors["seq_lens"]):
                start, end = tensors["query_start"][request : request + 2]
                if not length or start == end:
                    continue
                table, positions = tensors["block_tables"][request], tensors["positions"]
                slots = _slots(table, length, block_size)
                offset = tensors["rope_rows"][start] - positions[start]
                ids = tuple(tensors["input_ids"][start:end])
                encoder_slots = _encoder_slots(tensors, request, block_size)
                number = 0 if encoder_slots else None
                self.spans[-1].append(SequenceSpan(request, ids, positions[start], offset, number))
                self.encoder_slots[-1].append(encoder_slots)
                self.reads[-1].append(torch.tensor([row_of[slot] for slot in slots]))
                if end - start == 1 and length > 1:
                    cached = [id_of[slot] for slot in slots]  # a prompt's last token may be the only new one
                    if not any(prompt[: len(cached)] == cached for prompt in self._prompts):
                        self._same_token(ids[0], logits_of.get(slots[-2]))
            assert record.logits is not None
            for row, token in wanted:
                logits_of[tensors["slot_mapping"][token]] = record.logits[row]
            first += int(mask.sum())

    def _same_token(self, token: int, logits: torch.Tensor | None) -> None:
        if logits is not None and not bool(logits[token] == logits.max()):
            text = f"token {token} was chosen, but the step's own logits say {int(logits.argmax())}"
            self.wrong_tokens.append(("sampler", text))


class StepWitness:
    """Some of the records, all with the same places in the same form, as a ``Witness``.

    Args:
        numbers: which records.
        model: the one that ran, whose schemes dequantize.
        dtype: of the reference's arithmetic.
        caches: of the run, whose second ones still hold what the records' steps read.
    """

    def __init__(
        self,
        rows: TokenRows,
        numbers: Sequence[int],
        model: Decoder,
        judge: Judge,
        dtype: torch.dtype,
        caches: Sequence[LayerCache],
    ) -> None:
        self._seconds = [cache.encoded for cache in caches]
        self._rows = rows
        self._numbers = numbers
        self._records = [rows.records[n] for n in numbers]
        self._valid = [rows.valid[n] for n in numbers]
        self._model = model
        self._judge = judge
        self._dtype = dtype
        self._device = model.norm.weight.device
        self._met: Counter[str] = Counter()
        self._noise = ProductNoise()
        self._taken: Recorded | None = None  # what the next product takes, as it was recorded
        self.spans = [span for n in numbers for span in rows.spans[n]]
        self._encoder_slots = [slots for n in numbers for slots in rows.encoder_slots[n]]
        self._branches = _CROSS_BRANCHES if any(self._encoder_slots) else _BRANCHES
        self._reads = [read.to(self._device) for n in numbers for read in rows.reads[n]]
        counts = [int(mask.sum()) for mask in self._valid]
        decodes = [all(len(span.ids) == 1 for span in rows.spans[n]) for n in numbers]
        labels = torch.tensor(decodes).long().repeat_interleave(torch.tensor(counts))
        self._labels = labels.to(self._device)
        slots = [
            record.inputs.get("spliced_slots", -torch.ones_like(mask.long()))
            for record, mask in zip(self._records, self._valid, strict=True)
        ]
        self._spliced = self._joined(slots) >= 0
        wanted, first = [], 0
        for number, mask, count in zip(numbers, self._valid, counts, strict=True):
            place = (mask.cumsum(0) - 1).tolist()
            wanted += [first + place[token] for _, token in rows.wanted[number]]
            first += count
        self.logits_rows = torch.tensor(wanted, device=self._device)

    def value(self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None) -> torch.Tensor:
        number = self._met[place]
        self._met[place] += 1
        recorded = self._logits() if place == "logits" else self._recorded(place, number)
        if place in TAKEN:
            self._taken = recorded
        if not isinstance(recorded, torch.Tensor):
            return computed
        wide = recorded.to(computed.dtype).view_as(computed)
        if place == "stream" and number == 0:  # what an encoder gave is judged by encoder_check.py
            computed = torch.where(self._spliced[:, None], wide, computed)
        labels = self._labels[self.logits_rows] if place == "logits" else self._labels
        noise = self._noise.take(place, computed if change is None else change)
        self._judge.value(place, self._name(place, number), wide, computed, change, labels, noise)
        return wide

    def rounded(self, product: str, exact: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        taken, self._taken = (
            self._taken,
            None,
        )  # rounded by the run's own scheme
        if taken is None:
            return near
        recorded, step = rounded_by(self._model, product, taken, exact)
        _, layer, part = product.split(".", 2)
        place = _INPUTS.get(part, "mlp_in")
        noise = self._noise.take(place, exact)
        self._judge.rounded(
            place, self._name(place, int(layer)), recorded, step, exact, near, self._labels, noise
        )
        return recorded

    def summed(self, product: str, output: torch.Tensor, noise: torch.Tensor) -> None:
        self._noise.keep(product, output, noise)

    def cached(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> list[KeysValues]:
        for side, computed in enumerate((keys, values)):
            own = [self._rows.cached(n, layer) for n in self._numbers]
            place = ("keys", "values")[side]
            noise = self._noise.take(place, computed)
            recorded = torch.cat([self._rows.meant(tensors, side) for tensors in own]).to(computed)
            if len(own[0]) == 2:
                self._judge.value(
                    place, self._name(place, layer), recorded, computed, None, self._labels, noise
                )
                continue
            values, scales = (torch.cat([tensors[at] for tensors in own]) for at in (side, 2 + side))
            step = _cache_steps(values, scales.to(computed)[..., None], computed)
            near = (computed / step).round() * step
            flat = (recorded.flatten(1), step.flatten(1), computed.flatten(1), near.flatten(1))
            self._judge.rounded(place, self._name(place, layer), *flat, self._labels, noise)
        everything = [part.to(keys) for part in self._rows.keys_values(layer)]
        return [(everything[0][read], everything[1][read]) for read in self._reads]

    def encoded(self, layer: int) -> list[KeysValues]:
        second = self._seconds[layer]  # encoder_check.py judges it
        assert second is not None
        kept: dict[tuple[int, ...], KeysValues] = {}
        for slots in self._encoder_slots:
            if slots and slots not in kept:
                at = torch.tensor(slots, device=self._device)
                blocks, offsets = at // second.block_size, at % second.block_size
                read = [part[blocks, :, offsets] for part in second.tensors]
                kept[slots] = self._meant(read, 0), self._meant(read, 1)
        return [kept[slots] for slots in self._encoder_slots if slots]

    def within(self, stage: str) -> None:
        """Of encoders alone."""

    def _meant(self, tensors: Sequence[torch.Tensor], side: int) -> torch.Tensor:
        return self._rows.meant(tensors, side).to(self._dtype)

    def _name(self, place: str, number: int) -> str:
        """The module that made a place's ``number``th value."""
        if place == "logits":
            return "lm_head"
        if place != "stream":
            return f"layers.{number}.{MODULES[place]}"
        layer, part = divmod(number - 1, len(self._branches))
        return f"layers.{layer}.{self._branches[part]}" if number else "embed_tokens"

    def _recorded(self, place: str, number: int) -> Recorded | None:
        """A place's rows of all records; None: nothing was recorded."""
        values = [record.values[place][number] for record in self._records if place in record.values]
        if not values:
            return None
        wide = [value for value in values if isinstance(value, torch.Tensor)]
        if wide:
            return self._joined(wide)
        rows = [value for value in values if isinstance(value, Int8Rows)]
        one = rows[0].scales.numel() == 1  # static: one scale for all
        scales = rows[0].scales.to(self._device) if one else self._joined([row.scales for row in rows])
        return Int8Rows(self._joined([row.values for row in rows]), scales, rows[0].group)

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The records' rows without their padding, on the device."""
        kept = zip(parts, self._valid, strict=True)
        return torch.cat([part[mask] for part, mask in kept]).to(self._device)

    def _logits(self) -> torch.Tensor:
        parts = []
        for number, record in zip(self._numbers, self._records, strict=True):
            assert record.logits is not None
            parts.append(record.logits[[row for row, _ in self._rows.wanted[number]]])
        return torch.cat(parts).to(self._device)


def _wanted(record: StepRecord, valid: torch.Tensor) -> list[tuple[int, int]]:
    """(row of logits, token) without padding; a graph's padding names tokens a second time."""
    assert record.logits is not None
    rows: dict[int, int] = {}
    for row, token in enumerate(record.inputs["logits_indices"].tolist()[: len(record.logits)]):
        if bool(valid[token]):
            rows.setdefault(token, row)
    return [(row, token) for token, row in rows.items()]


def rounded_by(
    model: Decoder, product: str, taken: Recorded, exact: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A product's dequantized input, and the steps between its values, by the run's own scheme."""
    linear = model.get_submodule(product)
    assert isinstance(linear, Linear)
    scheme, tensors = linear.scheme, linear._parameters
    rows = scheme.quantize_input(taken, tensors) if isinstance(taken, torch.Tensor) else taken
    return scheme.dequantize_input(rows, tensors, exact)


def _slots(table: Sequence[int], length: int, block_size: int) -> list[int]:
    return [table[p // block_size] * block_size + p % block_size for p in range(length)]


def _encoder_slots(tensors: Mapping[str, list[Any]], request: int, block_size: int) -> tuple[int, ...]:
    """Slots of the second cache that a request's cross-attention reads."""
    if "encoded_lens" not in tensors:
        return ()
    return tuple(_slots(tensors["encoded_tables"][request], tensors["encoded_lens"][request], block_size))


def _cache_steps(values: torch.Tensor, scales: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    """How far apart the numbers of a cache in 8 bits are, [T, num_kv_heads, head_dim].

    Of e4m3, whose gaps double at a power of two, the gap on the side of what was computed. Stored values say
    which power of two that is; dequantized to 16 bits they may lie just below it.
    """
    if values.dtype != E4M3:
        return scales.expand(computed.shape)
    return e4m3_gaps(torch.minimum(values.to(computed).abs(), computed.abs() / scales)) * scales
