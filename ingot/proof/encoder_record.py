"""Hooks that record an encoder's outputs as rows of positions.

| module | what ``see`` gets |
|---|---|
| a convolution, a product, a layer | its output |
| NAME/in | a product's input |
| NORM, NORM/sum | the normed states, and the states before the norm |
| encoder.embed_positions, encoder.vit.embed_positions | hidden states with positions |
| layers.N.encoder_attn.kv_proj | keys and values side by side |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ingot.layers.linear import Linear
from ingot.layers.norm import LayerNorm
from ingot.layers.observer import Observer
from ingot.llm.llm import LLM
from ingot.models.model_registry import plain_encoder

See = Callable[[str, torch.Tensor], None]
KEYS_VALUES = ".encoder_attn.kv_proj"


@contextmanager
def encoder_observed(llm: LLM, see: See) -> Iterator[None]:
    """Report every module of the encoder, each called by itself; inputs are encoded again."""
    encoders, model = llm.executor.scheduler.encoders, llm.engine.model
    assert encoders is not None
    encoders.clear()
    handles = [
        _hooked(name, module, see)
        for name, module in model.named_modules()
        if name.startswith("encoder.") or name.endswith(KEYS_VALUES)
    ]
    plain = plain_encoder(model.config)
    assert plain is not None
    first, before = plain.first
    inputs = model.get_submodule(first)
    handles.append(inputs.register_forward_pre_hook(lambda _, given: see(before, _rows(given[0]))))
    with by_module(llm, handles):
        yield


@contextmanager
def encoder_walked(llm: LLM, see: Observer) -> Iterator[None]:
    """Report an encoding by the kernels that requests have, without CUDA graphs: layers by the names of
    step_record.py, and the modules around them. Inputs are encoded again.
    """
    encoders, encoding = llm.executor.scheduler.encoders, llm.executor.runner.encoding
    assert encoders is not None
    assert encoding is not None
    encoders.clear()
    model = llm.engine.model
    plain = plain_encoder(model.config)
    around = () if plain is None else plain.around
    handles = [
        _hooked(name, module, see)
        for name, module in model.named_modules()
        if name in around or name.endswith(KEYS_VALUES)
    ]
    encoding.observer = see
    try:
        yield
    finally:
        encoding.observer = None
        for handle in handles:
            handle.remove()


@contextmanager
def by_module(llm: LLM, handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Every module is called in the block, so hooks see its output; the handles are removed after it."""
    try:
        with llm.tap("norm"):  # a tap keeps fused kernels and CUDA graphs away
            yield
    finally:
        for handle in handles:
            handle.remove()


def _hooked(name: str, module: nn.Module, see: See) -> RemovableHandle:
    def hook(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, nn.Conv1d):
            output = output.transpose(-1, -2)
        if isinstance(module, LayerNorm):
            see(f"{name}/sum", _rows(output[1]))
            output = output[0]
        if isinstance(module, Linear) and isinstance(given[0], torch.Tensor):
            see(f"{name}/in", _rows(given[0]))
        if isinstance(output, torch.Tensor):
            see(name, _rows(output))

    return module.register_forward_hook(hook)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., P, size] → [P of all, size]."""
    return x.reshape(-1, x.shape[-1])
