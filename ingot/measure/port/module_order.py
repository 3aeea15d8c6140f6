"""The modules of Hugging Face's class in the order in which they run, with the shapes of their outputs.

The class runs on the meta device, with two layers: no weights and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.config.json_config import JsonConfig
from ingot.errors import IngotError
from ingot.measure.port.tensor_patterns import pattern_of
from ingot.measure.side.huggingface import check_class, load_class

_TOKENS, _LAYERS = 8, 2
_MOST = 4096  # layers, heads or experts; a config with more is damaged, and would take long to build
_COUNTED = ("layer", "expert", "head", "block", "stage")


@dataclass(frozen=True)
class ModuleRow(JsonConfig):
    """One module: its name with ``{i}`` for the layer, its class, its output's shape for 8 tokens."""

    name: str
    kind: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class ModuleOrder(JsonConfig):
    """Modules in running order, those of one layer once; or ``absent``, why there are none."""

    rows: tuple[ModuleRow, ...] = ()
    absent: str | None = None


def module_order(folder: Path, hf: Mapping[str, Any]) -> ModuleOrder:
    """Run the class of a checkpoint's config.json; what keeps it from running is in ``absent``."""
    odd = [
        k for k, v in hf.items() if isinstance(v, int) and v > _MOST and any(c in str(k) for c in _COUNTED)
    ]
    odd = [key for key in odd if not str(key).endswith(("_dim", "_size"))]
    if odd:
        return ModuleOrder(absent=f"config.json has {odd[0]} {hf[odd[0]]}, more than {_MOST}")
    try:
        why = check_class(folder)
        return ModuleOrder(absent=why) if why else ModuleOrder(_run(folder))
    except IngotError as error:
        return ModuleOrder(absent=f"{error.what}{'' if error.seen is None else f': {error.seen}'}")
    except Exception as error:  # code of others, on a config of others: any of it may fail
        first = next(iter(str(error).splitlines()), "")
        return ModuleOrder(absent=f"Hugging Face's class does not run: {type(error).__name__}: {first}")


def _run(folder: Path) -> tuple[ModuleRow, ...]:
    meta = torch.device("meta")
    model = load_class(folder, torch.float32, meta, "", is_random=True, num_layers=_LAYERS, attention="eager")
    rows: dict[str, ModuleRow] = {}
    begun: dict[str, None] = {}

    def begin(name: str, module: torch.nn.Module) -> None:
        if not list(module.children()):
            begun.setdefault(pattern_of(name))

    def end(name: str, module: torch.nn.Module, output: object) -> None:
        pattern = pattern_of(name)
        if pattern in begun and pattern not in rows:
            first = output[0] if isinstance(output, tuple) and output else output
            shape = tuple(first.shape) if isinstance(first, torch.Tensor) else None
            rows[pattern] = ModuleRow(pattern, type(module).__name__, shape)

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, _, name=name: begin(name, m))
        module.register_forward_hook(lambda m, _, out, name=name: end(name, m, out))
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=meta)
    with torch.inference_mode():  # with a mask: without one the class looks for packed sequences by value
        model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return tuple(rows[name] for name in begun if name in rows)
