"""Runs PyTorch's operators in a kernel's place, for one named operation at a time.

with without_kernels("rms_norm", runner) as calls: runner.run(step)      # calls: how many were replaced

Every operation asks ``runs_on_gpu`` of its own module whether to launch its kernel; here that answer is
replaced in the modules of one operation. Nothing is added to a step outside the block.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ingot.errors import ConfigError, DeviceError, IngotError
from ingot.measure.bench.profile.replaced import replaced
from ingot.runtime.step.runner import Runner

FUSED = "fused"
_ASKS = "runs_on_gpu"
_MODULES: dict[str, tuple[str, ...]] = {
    "rms_norm": ("kernels.norm.rms_norm", "kernels.norm.sum_norm", "kernels.norm.post_norm"),
    "layer_norm": ("kernels.norm.layer_norm", "kernels.norm.sum_norm"),
    "rope": ("kernels.cache.rope_kv_write",),
    "attention": (
        "kernels.attention.paged_attention",
        "kernels.attention.prefill_attention",
        "kernels.attention.invariant_attention",
    ),
    "activation": (
        "kernels.activation.gated_mlp",
        "kernels.activation.silu_mul_int8",
        "kernels.activation.silu_mul_blocks",
    ),
    "softcap": ("kernels.activation.softcap",),
    "products": (
        "kernels.product.few_rows.small_linear",
        "kernels.product.few_rows.small_qkv",
        "kernels.product.few_rows.small_gate_up",
        "kernels.product.few_rows.stream_product",
        "kernels.product.packed.packed_matmul",
        "kernels.product.int8.int8_linear",
        "kernels.product.invariant_linear",
        "kernels.weight.dequantize",
        "kernels.weight.expand_int8",
        "quant.schemes.fp8_both",
        "quant.schemes.int8_products",
        "quant.schemes.weight_only",
    ),
    "sampling": ("runtime.sampling.sampler", "kernels.sampling.feed_tokens"),
}
OPERATIONS = (*_MODULES, FUSED)
_SHARED = "kernels.norm.sum_norm"  # of both norms: says nothing about which one a step has


def check_names(names: Collection[str]) -> None:
    """Raise a ConfigError for a name that is not one of ``OPERATIONS``."""
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise ConfigError(
            "unknown operation to leave out", seen=", ".join(unknown), allowed=OPERATIONS, field="without"
        )


@contextmanager
def counted_operations() -> Iterator[Counter[str]]:
    """Counts calls of each operation in the block, which run as ever; without those of ``_SHARED``."""
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        for name, modules in _MODULES.items():
            for module in _loaded([one for one in modules if one != _SHARED]):
                stack.enter_context(replaced(module, _ASKS, _counting(getattr(module, _ASKS), calls, name)))
        yield calls


@contextmanager
def without_kernels(name: str, runner: Runner) -> Iterator[Counter[str]]:
    """Inside, the operation runs as PyTorch's operators on any device; ``fused``: every product and norm is
    its module's own kernel. Steps must run without a graph. Counts the calls that were replaced.

    Raises:
        DeviceError: the device lacks an operator.
    """
    calls: Counter[str] = Counter()
    with ExitStack() as stack, _able(name):
        if name == FUSED:
            stack.enter_context(replaced(runner.forward, "fused", False))
        for module in _loaded(_MODULES.get(name, ())):
            stack.enter_context(replaced(module, _ASKS, _counting(lambda tensor: False, calls, name)))
        yield calls


@contextmanager
def _able(name: str) -> Iterator[None]:
    """Turn PyTorch's error of an operator that the device lacks into ours."""
    try:
        yield
    except (torch.OutOfMemoryError, IngotError):
        raise
    except (RuntimeError, TypeError) as error:
        what = f"PyTorch has no operators for {name} on this device"
        seen = str(error).strip().split("\n")[0]
        raise DeviceError(what, seen=seen, field="without", fix=f"leave `without={name}` out") from error


def check_called(names: Sequence[str], calls: Counter[str], *, fuses: bool) -> None:
    """Raise a ConfigError for an operation that the step does not call: nothing would be replaced."""
    called = [name for name in _MODULES if calls[name]] + ([FUSED] if fuses else [])
    idle = [name for name in names if name not in called]
    if idle:
        raise ConfigError(
            f"this step calls no kernel of {idle[0]}",
            seen=", ".join(idle),
            allowed=called,
            field="without",
        )


def _loaded(modules: Sequence[str]) -> Iterator[Any]:
    """Those that are imported: no step calls the others."""
    for name in modules:
        module = sys.modules.get(f"ingot.{name}")
        if module is not None:
            yield module


def _counting(answer: Callable[[Any], bool], calls: Counter[str], name: str) -> Callable[[Any], bool]:
    def asked(tensor: Any) -> bool:
        calls[name] += 1
        return answer(tensor)

    return asked
