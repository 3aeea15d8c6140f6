"""Faults as a kernel, a driver or a broken load may cause them, in engines whose hashes are right.

Owns a list of faults by name, and the schemes that they are tried under. Knows no verdict.

    with faulty("silu"): verify(engine)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ingot import LLM, build
from ingot.config.quant import QuantConfig
from ingot.layers import attention, forms, mlp, products
from ingot.layers.decoder import Decoder
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


def build_scheme(name: str, folder: Path, device: str, **options: Any) -> Path:
    """The pocket model's engine in one of ``SCHEMES``."""
    calibrated = name.startswith("rptq") or name.endswith("static")
    samples = {"calib": SAMPLES, "calib_samples": 16} if calibrated else {}
    return build(POCKET, folder, device=device, tune=False, **SCHEMES[name], **samples, **options)


def _scaled(linear: str, factor: float) -> Callable[[Decoder], None]:
    """A weight times a factor, by its scales where it has some."""

    def change(model: Decoder) -> None:
        module = model.get_submodule(linear)
        name = next(n for n in ("row_scales", "scales", "weight") if n in module._parameters)
        module._parameters[name].data *= factor

    return change


def _whole(linear: str, of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Decoder], None]:
    """Every tensor of a layer's weight that tells of rows of outputs, changed alike."""

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


WEIGHTS: dict[str, Callable[[Decoder], None]] = {
    "down scales x 1.05": _scaled("layers.0.mlp.down_proj", 1.05),
    "head rolled by a row": _whole("lm_head", lambda t: t.roll(1, 0)),
    "head zeroed": _whole("lm_head", torch.zeros_like),
    "head negated": _whole("lm_head", torch.neg),
    "output product zeroed": _whole("layers.0.self_attn.o_proj", torch.zeros_like),
    "rotary off by one": _rotary_off_by_one,
}


def _louder_up(function: Callable[..., Any]) -> Callable[..., Any]:
    """silu(gate) * up, times 1.01."""

    def wrong(gate_up: torch.Tensor, *rest: Any, **named: Any) -> Any:
        gate, up = gate_up.chunk(2, dim=-1)
        return function(torch.cat([gate, up * 1.01], dim=-1), *rest, **named)

    return wrong


def _louder_result(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, **named: function(*values, **named) * 1.01


def _louder_query(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda query, *rest, **named: function(query * 1.1, *rest, **named)


KERNELS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "SiLU x 1.01": [
        (mlp, "silu_mul", _louder_up),
        (forms, "silu_mul_int8", _louder_up),
        (forms, "silu_mul_in_blocks", _louder_up),
        (forms, "silu_mul_operand", _louder_up),
        (products, "small_gate_up", _louder_result),
    ],
    "decode query x 1.1": [
        (attention, "paged_attention", _louder_query),
    ],
}
FAULTS = (*KERNELS, *WEIGHTS)


@contextmanager
def faulty(fault: str | None) -> Iterator[None]:
    """Every engine that is loaded within has the fault; None: it is sound."""
    right = LLM.of_engine.__func__  # type: ignore[attr-defined]

    def bent(cls: type[LLM], engine: Any, *rest: Any, **named: Any) -> LLM:
        if fault in WEIGHTS:
            WEIGHTS[fault](engine.model)
        return right(cls, engine, *rest, **named)

    with ExitStack() as patches:
        for place, name, wrong in KERNELS.get(fault or "", []):
            patches.enter_context(patch.object(place, name, wrong(getattr(place, name))))
        patches.enter_context(patch.object(LLM, "of_engine", classmethod(bent)))
        yield
