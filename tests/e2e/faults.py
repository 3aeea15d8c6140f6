"""Faults as a kernel, a driver or a broken load may cause them, in engines whose hashes are right.

with faulty("silu"): verify(engine)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ingot import LLM, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_loader import Engine
from ingot.kernels.cache.qkv_placement import Placement
from ingot.layers import attention, mlp
from ingot.layers.decoder import Decoder
from ingot.layers.products import layer_products as products
from ingot.layers.products import row_forms as forms
from ingot.layers.rotary import RotaryTable
from tests.e2e.folders import ROOT

POCKET = ROOT / "models" / "pocket-chat"
SAMPLES = ROOT / "recipes" / "heldout.jsonl"
SCHEMES: dict[str, dict[str, Any]] = {
    "dense": {},
    "w8a16": {"quant": "w8a16"},
    "w4a16": {"quant": "w4a16"},
    "w8a8": {"quant": "w8a8"},
    "w8a8 static": {"quant": QuantConfig("w8a8", activations="static")},
    "w8a8, int8 cache": {"quant": "w8a8", "kv_dtype": "int8"},
    "w4a8": {"quant": "w4a8"},
    "rptq-w8a8": {"quant": "rptq-w8a8"},
    "rptq-w4a8": {"quant": "rptq-w4a8"},
    "rptq-w4a4": {"quant": "rptq-w4a4"},
}


def build_scheme(
    name: str, folder: Path, device: str, source: Path = POCKET, calib: Path = SAMPLES, **options: Any
) -> Path:
    """An engine in one of ``SCHEMES``, of the pocket model unless another is given."""
    calibrated = name.startswith("rptq") or name.endswith("static")
    samples = {"calib": calib, "calib_samples": 16} if calibrated else {}
    return build(source, folder, device=device, tune=False, **SCHEMES[name], **samples, **options)


def _scaled(linear: str, factor: float) -> Callable[[Decoder], None]:
    """A weight times a factor, by its scales where it has some."""

    def change(model: Decoder) -> None:
        module = model.get_submodule(linear)
        name = next(n for n in ("row_scales", "scales", "weight") if n in module._parameters)
        module._parameters[name].data *= factor

    return change


def _whole(linear: str, of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Decoder], None]:
    """Every tensor of a layer's weight that has rows of outputs, changed alike."""

    def change(model: Decoder) -> None:
        module = model.get_submodule(linear)
        for name in ("weight", "words", "scales", "row_scales", "shift"):
            tensor = module._parameters.get(name)
            if tensor is not None:
                module._parameters[name] = torch.nn.Parameter(of(tensor.data), requires_grad=False)

    return change


def _rotary_off_by_one(model: Decoder) -> None:
    assert model.rotary is not None
    model.rotary.table = model.rotary.table.roll(-1, 0)


def _other_base(model: Decoder) -> None:
    """Every position turned as a rotary base 1 % larger does."""
    assert model.rotary is not None
    own = model.rotary
    other = RotaryTable(replace(own.config, theta=own.config.theta * 1.01), own.max_positions)
    own.table = other.table.to(own.table)


def _louder_norm(model: Decoder) -> None:
    model.get_submodule("layers.0.post_attention_layernorm")._parameters["weight"].data *= 1.01


WEIGHTS: dict[str, Callable[[Decoder], None]] = {
    "down scales x 1.05": _scaled("layers.0.mlp.down_proj", 1.05),
    "head rolled by a row": _whole("lm_head", lambda t: t.roll(1, 0)),
    "head zeroed": _whole("lm_head", torch.zeros_like),
    "head negated": _whole("lm_head", torch.neg),
    "output product zeroed": _whole("layers.0.self_attn.o_proj", torch.zeros_like),
    "rotary off by one": _rotary_off_by_one,
}
SMALL_WEIGHTS: dict[str, Callable[[Decoder], None]] = {
    "norm x 1.01": _louder_norm,
    "rotary base x 1.01": _other_base,
}


Wrong = Callable[[Callable[..., Any]], Callable[..., Any]]


def _louder_up(factor: float) -> Wrong:
    """silu(gate) * up, times a factor."""

    def bent(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(gate_up: torch.Tensor, *rest: Any, **named: Any) -> Any:
            gate, up = gate_up.chunk(2, dim=-1)
            return function(torch.cat([gate, up * factor], dim=-1), *rest, **named)

        return wrong

    return bent


def _louder_result(factor: float) -> Wrong:
    return lambda function: lambda *values, **named: function(*values, **named) * factor


def _louder_query(factor: float) -> Wrong:
    return lambda function: lambda query, *rest, **named: function(query * factor, *rest, **named)


def _louder_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """The keys of the first head times 1.05, as the cache has them."""

    def wrong(qkv: Any, place: Placement, *rest: Any) -> Any:
        query = function(qkv, place, *rest)
        slots, keys, scales = place.tokens.slot_mapping, place.cache.keys, place.cache.scales
        real = slots >= 0
        block, offset = slots.clamp(min=0) // keys.shape[2], slots.clamp(min=0) % keys.shape[2]
        stored = keys if scales is None else scales.keys
        factor = torch.where(real, 1.05, 1.0).to(stored.dtype)
        own = stored[block, 0, offset]
        stored[block, 0, offset] = own * (factor[:, None] if own.dim() == 2 else factor)
        return query

    return wrong


def _activations(factor: float) -> list[tuple[Any, str, Wrong]]:
    return [
        (mlp, "silu_mul", _louder_up(factor)),
        (mlp, "plain_activation", _louder_result(factor)),
        (forms, "silu_mul_int8", _louder_up(factor)),
        (forms, "silu_mul_in_blocks", _louder_up(factor)),
        (forms, "silu_mul_operand", _louder_up(factor)),
        (products, "small_gate_up", _louder_result(factor)),
    ]


KERNELS: dict[str, list[tuple[Any, str, Wrong]]] = {
    "SiLU x 1.01": _activations(1.01),
    "decode query x 1.1": [(attention, "paged_attention", _louder_query(1.1))],
}
SMALL_KERNELS: dict[str, list[tuple[Any, str, Wrong]]] = {
    "SiLU x 1.005": _activations(1.005),
    "attention scale x 1.02": [
        (attention, name, _louder_query(1.02))
        for name in ("paged_attention", "prefill_attention", "invariant_attention")
    ],
    "keys of a head x 1.05": [(attention, "rope_kv_write", _louder_keys)],
}
FAULTS = (*KERNELS, *WEIGHTS)
SMALL = (*SMALL_KERNELS, *SMALL_WEIGHTS)  # what ``align`` finds beside an original


@contextmanager
def faulty(fault: str | None) -> Iterator[None]:
    """Every engine that is loaded within has the fault; None: it is sound."""
    right = LLM._setup

    def bent(self: LLM, engine: Engine, runtime: RuntimeConfig) -> None:
        change = (WEIGHTS | SMALL_WEIGHTS).get(fault or "")
        if change is not None:
            change(engine.model)
        right(self, engine, runtime)

    with ExitStack() as patches:
        for place, name, wrong in (KERNELS | SMALL_KERNELS).get(fault or "", []):
            patches.enter_context(patch.object(place, name, wrong(getattr(place, name))))
        patches.enter_context(patch.object(LLM, "_setup", bent))
        yield
