"""Every kernel of a model, timed beside the machine's ceiling and PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from ingot.building.random_weights import config_manifest
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.config.decoder_config import DecoderConfig
from ingot.config.json_config import JsonConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.device import on_device, parse_dtype
from ingot.engine.engine_facts import describe
from ingot.engine.engine_loader import lowered
from ingot.engine.manifest import is_engine
from ingot.engine.plan_file import usable_plan
from ingot.errors import ConfigError
from ingot.layers.products.product_choice import folds
from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.bench.kernel_bench.kernel_case import Effort, Inputs, beyond_l2, graph_us
from ingot.measure.bench.kernel_bench.kernel_cases import KernelSetting, all_cases
from ingot.measure.bench.kernel_bench.kernel_layer import LayerStack
from ingot.measure.bench.latency import METHOD, check_length
from ingot.measure.side.freed_memory import free_memory, gpu_memory
from ingot.measure.side.open_side import Say, silent
from ingot.measure.side.side_spec import SideSpec
from ingot.measure.side.timed_run import spread


@dataclass(frozen=True)
class Kernels(JsonConfig):
    """Decode steps of ``rows`` requests with ``context`` tokens, and prefill attention of a prompt."""

    verb: ClassVar[str] = "kernels"
    method: ClassVar[str] = METHOD
    rows: tuple[int, ...] = (1, 8, 32, 64)
    context: int = 640
    prompt_tokens: int = 512

    def __post_init__(self) -> None:
        if min(*self.rows, self.context, self.prompt_tokens) < 1:
            raise ConfigError(
                "rows and tokens must be at least 1",
                seen=f"rows {self.rows}, {self.prompt_tokens} prompt tokens, {self.context} in all",
                field=("batch", "prompt_tokens", "new_tokens"),
            )


@dataclass(frozen=True)
class Shape:
    """The measured model; ``folded``: its products have norm and activation inside."""

    config: DecoderConfig
    plan: KernelPlan
    dtype: torch.dtype
    max_seq_len: int
    folded: bool


def read_shape(spec: SideSpec) -> Shape:
    """The shape of an engine, a checkpoint or a config; reads no weights."""
    plan = KernelPlan()
    if spec.random_weights is not None:
        manifest = config_manifest(
            Path(spec.random_weights), spec.dtype, spec.max_batch_size, spec.max_seq_len
        )
    else:
        assert spec.path is not None
        folder = resolve_checkpoint(spec.path)
        found = describe(folder)
        manifest, plan = found.manifest, found.plan
        if is_engine(folder):
            manifest = lowered(manifest, max_seq_len=spec.max_seq_len)
    dtype = manifest.build.dtype if spec.dtype == "auto" else spec.dtype
    model, longest = manifest.model, manifest.build.max_seq_len
    return Shape(model, plan, parse_dtype(dtype), longest, folds(model))


def measure_kernels(
    shape: Shape, wanted: Kernels, device: torch.device, ceiling: Ceiling, say: Say = silent
) -> list[dict[str, Any]]:
    """One entry per case on a GPU: microseconds of Ingot's kernel and of PyTorch's operators, GB/s and
    TFLOP/s of the least work, and its share of the ceiling. Only ``cached`` cases read from the L2 cache.

    Raises:
        ConfigError: the requests are longer than the engine's limit.
        OutOfMemoryError: the inputs do not fit.
    """
    check_length(wanted.context, shape.max_seq_len, "the engine's limit", "`prompt_tokens`, `new_tokens`")
    small = gpu_memory("the kernels' inputs do not fit", "smaller `batch` or `prompt_tokens`")
    with small, on_device(device), torch.inference_mode():
        setting = KernelSetting(
            shape.config,
            usable_plan(shape.plan, device, shape.dtype)[0],
            Inputs(device, shape.dtype, beyond_l2(device)),
            tuple(wanted.rows),
            wanted.context,
            wanted.prompt_tokens,
            shape.max_seq_len,
            shape.folded,
        )
        entries = []
        for case in all_cases(setting):
            effort = case.effort
            say(f"{effort.op}, {effort.shape}, {effort.rows} rows")
            ours, theirs = graph_us(case.ours, case.calls), graph_us(case.torch, case.calls)
            entries.append(kernel_entry(effort, ours, theirs, ceiling))
            del case
            free_memory()
        return [*entries, *_layers(setting, ceiling, say)]


def kernel_entry(effort: Effort, ours: list[float], theirs: list[float], ceiling: Ceiling) -> dict[str, Any]:
    us, torch_us = spread(ours), spread(theirs)
    assert us is not None
    assert torch_us is not None
    gb_s, tflop_s = effort.num_bytes / us["p50"] / 1e3, effort.flops / us["p50"] / 1e6
    share = tflop_s / ceiling.matmul_tflop_s if effort.compute_bound else gb_s / ceiling.read_gb_s
    return {
        "op": effort.op,
        "shape": effort.shape,
        "rows": effort.rows,
        "cached": effort.cached,
        "us": us,
        "gb_s": round(gb_s, 1),
        "tflop_s": round(tflop_s, 3),
        "bound": "matmul" if effort.compute_bound else "read",
        "share_of_ceiling": None if effort.cached else round(share, 4),  # no memory limits what is cached
        "torch_us": torch_us,
        "torch_ratio": round(torch_us["p50"] / us["p50"], 3),
        "note": effort.note,
        "raw_us": [round(t, 3) for t in ours],
        "raw_torch_us": [round(t, 3) for t in theirs],
    }


def _layers(setting: KernelSetting, ceiling: Ceiling, say: Say) -> Iterator[dict[str, Any]]:
    stack, config = LayerStack(setting), setting.config
    token = 2 * config.kv_size * setting.inputs.dtype.itemsize
    for rows in setting.rows:
        say(f"decoder layer, {rows} rows")
        num_bytes = stack.bytes + rows * setting.context * token
        flops = 2.0 * rows * stack.num_weights + 4.0 * rows * setting.context * config.q_size
        shape = f"{config.hidden_size}, {setting.context} tokens"
        ours, theirs = stack.ours(rows), stack.torch(rows)
        effort = Effort("decoder layer", shape, rows, num_bytes, flops)
        yield kernel_entry(effort, ours, theirs, ceiling)
        torch.cuda.empty_cache()
