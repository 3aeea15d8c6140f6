"""The next token of each row of logits, on the GPU: the best, or a draw under top-k, top-p and min-p.

The number and shape of launches depend on batch, vocabulary and variant alone, never on a value, so one CUDA
graph serves every mix of parameters: ``greedy`` has two launches, ``draw`` without a selection three, with
one six. The runtime's sampler defines what is drawn, and has the reference for a CPU. A draw equals it bit
for bit if both have the same float64 ``exp``: the formula, its order and every sum of integers are the same.

    token_ids, values = greedy(logits)
    token_ids, values = draw(logits, temperature, top_k, top_p, min_p, seed, step, select=True)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton

from ingot.errors import DeviceError
from ingot.kernels.kernel_checks import (
    expect,
    expect_range,
    expect_rows,
    merge_tiles,
    next_power_of_two,
    runs_on_gpu,
)
from ingot.kernels.launch_overlap import launch_options, overlaps
from ingot.kernels.sampling.filter_cut import find_cut_kernel
from ingot.kernels.sampling.score_bins import bin_scores_kernel, list_scores_kernel
from ingot.kernels.sampling.score_rows import tile_tops_kernel
from ingot.kernels.sampling.token_pick import pick_token_kernel, tile_weights_kernel

MAX_VOCAB = 2**22 - 1  # times 2**40 is an int64


def greedy_tiles(device: torch.device) -> dict[str, int]:
    """Tile choices measured on an H200: TILE logits per reduction, PROGRAMS over all rows."""
    return {"TILE": 2048, "PROGRAMS": 16384, "num_warps": 4, "OVERLAP": 2 if overlaps(device) else 1}


def draw_tiles(vocab: int, select: bool, device: torch.device) -> dict[str, int]:
    """Tile choices for an H200, measured without a selection; none changes a result.

    TILE logits per reduction (with up to 256 tiles per row top-k skips most of it), PROGRAMS and CUT_PROGRAMS
    over all rows, BINS of the histogram, LIST scores among which a row's cut is sought.
    """
    tile = min(max(next_power_of_two(triton.cdiv(vocab, 256)), 256), 2048) if select else 1024
    return {
        "TILE": tile, "PROGRAMS": 4096, "CUT_PROGRAMS": 1024, "BINS": 2048, "LIST": 1024,
        "TOPS_WARPS": 4, "BIN_WARPS": 8, "CUT_WARPS": 4, "num_warps": 4,
        "OVERLAP": 2 if overlaps(device) else 1,
    }  # fmt: skip


def _grid(rows: int, tiles: int, programs: int) -> tuple[int, int]:
    return min(tiles, max(programs // rows, 1)), rows


def _outputs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, device = logits.shape[0], logits.device
    return (
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def _scratch(
    rows: int, tiles: int, choice: dict[str, int], select: bool, device: torch.device
) -> dict[str, torch.Tensor | None]:
    """What kernels leave for later ones, per row; None for what only a selection needs."""
    floats, counts = torch.float32, torch.int32
    always = {"best_ptr": (tiles, torch.int64), "high_ptr": (tiles, floats), "low_ptr": (tiles, floats),
              "weight_ptr": (tiles, torch.int64)}  # fmt: skip
    selection = {
        "bin_weights_ptr": (choice["BINS"], torch.int64), "bin_counts_ptr": (choice["BINS"], counts),
        "span_ptr": (2, torch.float64), "list_ptr": (choice["LIST"], floats), "listed_ptr": (1, counts),
        "cut_ptr": (1, floats), "kept_ptr": (1, torch.int64), "equals_ptr": (tiles, counts),
    }  # fmt: skip
    made: dict[str, torch.Tensor | None] = dict.fromkeys(selection)
    for name, (width, dtype) in (always | selection if select else always).items():
        made[name] = torch.empty((rows, width), dtype=dtype, device=device)
    return made


def greedy(logits: torch.Tensor, tiles: Mapping[str, int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row, the lowest id among equals; a NaN is above all, as for ``torch.max``.

    Args:
        logits: [B, V] fp16, bf16 or fp32; any B, V up to 2**22 - 1; rows may lie apart.
        tiles: choices over ``greedy_tiles``.

    Returns:
        token_ids [B] int64; values [B] float32, their logits: NaN if the row holds one.
    """
    _expect_logits(logits)
    if not runs_on_gpu(logits):
        return greedy_reference(logits)
    choice = merge_tiles(greedy_tiles(logits.device), tiles)
    token_ids, values = _outputs(logits)
    rows, vocab = logits.shape
    if not rows:
        return token_ids, values
    count = triton.cdiv(vocab, choice["TILE"])
    shape = {"VOCAB": vocab, "TILES": count, "TILE": choice["TILE"], "OVERLAP": choice["OVERLAP"],
             **launch_options(choice, logits.device)}  # fmt: skip
    best = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    tile_tops_kernel[_grid(rows, count, choice["PROGRAMS"])](
        logits, best, None, None, None, None, None, logits.stride(0), BINS=1, **shape
    )
    pick_token_kernel[(rows,)](
        None, None, None, None, None, best, None, None, None, None, None, token_ids, values, None,
        BLOCK_TILES=next_power_of_two(count), **shape,
    )  # fmt: skip
    return token_ids, values


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The best of each row, [B, V] float32 → [B] int64: the first of equals or of what is not a number."""
    if logits.device.type == "cpu":  # a tenth of argmax's time
        return torch.from_numpy(np.argmax(logits.numpy(), axis=-1))
    return torch.argmax(logits, dim=-1)


def greedy_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch reference of :func:`greedy`."""
    token_ids = best_tokens(logits.float())
    return token_ids, logits.gather(1, token_ids[:, None]).squeeze(1).float()


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    step: torch.Tensor,
    select: bool = True,
    tiles: Mapping[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token per row: the best if the temperature is 0, otherwise drawn from what the filters leave.

    A row's result has the same bits in any batch. The reference is the runtime's ``sample_reference``.

    Args:
        logits: [B, V] fp16, bf16 or fp32 on a GPU; any B, V up to 2**22 - 1; rows may lie apart.
        temperature, top_p, min_p: [B] float64; top_p from 1 on keeps all.
        top_k: [B] int64; 0 keeps all.
        seed, step: [B] int64.
        select: False if no row of the batch has a top-k or a top-p, which are then not read.
        tiles: choices over ``draw_tiles``.

    Returns:
        token_ids [B] int64; values [B] float32, their logits as given.

    Raises:
        DeviceError: not on a GPU.
    """
    _expect_logits(logits)
    _expect_per_row(logits, torch.float64, temperature=temperature, top_p=top_p, min_p=min_p)
    _expect_per_row(logits, torch.int64, top_k=top_k, seed=seed, step=step)
    if not runs_on_gpu(logits):
        what = "this kernel samples on a GPU only; elsewhere the runtime's sampler does"
        raise DeviceError(what, seen=logits.device, allowed="cuda")
    (count, vocab), device = logits.shape, logits.device
    choice = merge_tiles(draw_tiles(vocab, select, device), tiles)
    token_ids, values = _outputs(logits)
    if not count:
        return token_ids, values
    num_tiles = triton.cdiv(vocab, choice["TILE"])
    given = {
        "logits_ptr": logits, "temperature_ptr": temperature, "top_k_ptr": top_k, "top_p_ptr": top_p,
        "min_p_ptr": min_p, "seed_ptr": seed, "step_ptr": step, "token_ptr": token_ids, "value_ptr": values,
        "row_stride": logits.stride(0), "VOCAB": vocab, "TILES": num_tiles, "TILE": choice["TILE"],
        "BLOCK_TILES": next_power_of_two(num_tiles), "BINS": choice["BINS"], "LIST": choice["LIST"],
        "SHORT": max(choice["LIST"] // 8, 1), "OVERLAP": choice["OVERLAP"],
        **_scratch(count, num_tiles, choice, select, device),
    }  # fmt: skip
    options = launch_options(choice, device)

    def launch(kernel: Any, grid: tuple[int, ...], warps: str = "num_warps") -> None:
        own = {name: given[name] for name in kernel.arg_names}
        kernel[grid](**own, **{**options, "num_warps": choice[warps]})

    grid = _grid(count, num_tiles, choice["PROGRAMS"])
    launch(tile_tops_kernel, grid, "TOPS_WARPS")
    if select:
        cut_grid = _grid(count, num_tiles, choice["CUT_PROGRAMS"])
        launch(bin_scores_kernel, cut_grid, "BIN_WARPS")
        launch(list_scores_kernel, cut_grid, "BIN_WARPS")
        launch(find_cut_kernel, (count,), "CUT_WARPS")
    launch(tile_weights_kernel, grid)
    launch(pick_token_kernel, (count,))
    return token_ids, values


def _expect_logits(logits: torch.Tensor) -> None:
    expect_rows("logits", logits)
    expect_range("the vocabulary size", logits.shape[1], 1, MAX_VOCAB)


def _expect_per_row(logits: torch.Tensor, dtype: torch.dtype, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        expect(name, tensor, (logits.shape[0],), like=logits, dtype=dtype)
