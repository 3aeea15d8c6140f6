"""The encoding of an input as requests do it, judged place by place.

Owns the record of one encoding and its comparison with the reference, which at each place computes from what
the run itself had at the place before (step_check.py does so with steps). Knows no proof.

    check_encoder(llm, weights, features, arithmetic, judge)
"""

from __future__ import annotations

from collections import Counter

import torch

from ingot.config.sampling import SamplingParams
from ingot.engine.reference import Arithmetic, KeysValues, ReferenceRun, WeightSource
from ingot.engine.reference_encoder import encode
from ingot.layers.decoder import Decoder
from ingot.llm.encoder_record import encoder_observed
from ingot.llm.llm import LLM
from ingot.llm.step_judge import ENCODED, Judge
from ingot.llm.step_witness import rounded_by
from ingot.processors.prompt import Input, Prompt

_PLACES = {  # place of a layer → whose record it is, and the module's name for people
    "attn_in": ("self_attn.qkv_proj/in", "input_layernorm"),
    "query": ("self_attn.qkv_proj", "self_attn.qkv_proj (queries)"),
    "keys": ("self_attn.qkv_proj", "self_attn.qkv_proj (keys)"),
    "values": ("self_attn.qkv_proj", "self_attn.qkv_proj (values)"),
    "attended": ("self_attn.o_proj/in", "self_attn (attention)"),
    "mlp_in": ("mlp.up_proj/in", "post_attention_layernorm"),
    "inner": ("mlp.down_proj/in", "mlp (activation)"),
}
_PARTS = ("query", "keys", "values")
_ONCE = {"conv1": "encoder.conv1", "conv2": "encoder.conv2", "norm": "encoder.norm"}


def check_encoder(
    llm: LLM,
    model: Decoder,
    weights: WeightSource,
    features: torch.Tensor,
    arithmetic: Arithmetic,
    judge: Judge,
) -> int:
    """Encode features [mels, frames] in a request, and judge what every module had.

    Args:
        model: the empty modules, whose ``weights`` are read.

    Returns:
        The number of encoded positions.
    """
    had: dict[str, torch.Tensor] = {}
    with encoder_observed(llm, lambda name, rows: had.update({name: rows.to("cpu", copy=True)})):
        params = SamplingParams(max_new_tokens=1, ignore_eos=True)
        llm.generate(Prompt([Input(features), [0]]), params)
    witness = _Witness(had, llm, judge)
    run = ReferenceRun(model, weights, arithmetic, witness=witness)
    encode(run, 0, features, lambda name, output: None)
    return len(had["encoder.norm"])


class _Witness:
    """What the encoding had, as ``ReferenceRun`` asks for it."""

    def __init__(self, had: dict[str, torch.Tensor], llm: LLM, judge: Judge) -> None:
        self._had, self._judge, self._model = had, judge, llm.engine.model
        self._device = llm.engine.device
        self._labels = torch.full((len(had["encoder.norm"]),), ENCODED, device=self._device)
        self._met: Counter[str] = Counter()
        self._taken: tuple[str, str, torch.Tensor] | None = None

    def value(self, place: str, computed: torch.Tensor, change: torch.Tensor | None = None) -> torch.Tensor:
        """As of ``Witness``."""
        number = self._met[place]
        self._met[place] += 1
        key, name = _record_of(place, number)
        had = self._had[key].to(self._device)
        if place in _PARTS:
            had = had.chunk(len(_PARTS), dim=-1)[_PARTS.index(place)]
        if key.endswith("/in"):
            self._taken = place, name, had
        if had.numel() != computed.numel():
            self._judge.fail(place, name, f"has {len(had)} positions, not {len(computed)}")
            return computed
        wide = had.to(computed.dtype).view_as(computed)
        labels = self._labels if len(had) == len(self._labels) else self._labels.new_full([len(had)], ENCODED)
        self._judge.value(place, name, wide, computed, change, labels)
        return wide

    def rounded(self, product: str, exact: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        """As of ``Witness``."""
        assert self._taken is not None
        place, name, taken = self._taken
        had, step = rounded_by(self._model, product, taken, exact)
        self._judge.rounded(f"{place}, rounded", name, had, step, exact, near, self._labels)
        return had

    def cached(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> list[KeysValues]:
        """Of decoder steps alone."""
        raise NotImplementedError

    def encoded(self, layer: int) -> list[KeysValues]:
        """Of decoder steps alone."""
        raise NotImplementedError


def _record_of(place: str, number: int) -> tuple[str, str]:
    """The record of the ``number``th time that a place is met, and the name of what made it."""
    if place in _ONCE:
        return _ONCE[place], _ONCE[place]
    if place in ("kv", "encoded"):
        name = f"layers.{number}.encoder_attn.kv_proj"
        return (name, name) if place == "kv" else (f"{name}/in", "encoder.norm")
    if place in _PLACES:
        key, name = _PLACES[place]
        return f"encoder.layers.{number}.{key}", f"encoder.layers.{number}.{name}"
    assert place == "stream"
    if not number:
        return ("encoder.embed_positions",) * 2
    layer, part = divmod(number - 1, 2)
    own = f"encoder.layers.{layer}"
    if part:
        return own, f"{own}.mlp.down_proj"
    return f"{own}.post_attention_layernorm/sum", f"{own}.self_attn.o_proj"
