"""The next token of each row of logits, on the GPU: the best, or a draw under top-k, top-p and min-p.

Owns the launches: how many there are and of which shape depends on the batch, the vocabulary and the variant
alone, never on a value, so that one CUDA graph serves every mix of parameters. Variants: ``greedy`` (two
launches), ``draw`` without a selection (three), ``draw`` with one (six). What is drawn, and the twin that
draws the same on a CPU, is the runtime's sampler; knows no request.

    token_ids, values = greedy(logits)
    token_ids, values = draw(logits, temperature, top_k, top_p, min_p, seed, step, select=True)

A draw equals the twin's bit for bit where both take the same float64 ``exp``: the formula, its order and
every sum of integers are the same, so equal ``exp`` gives equal weights, equal cuts and an equal token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from ingot.errors import DeviceError
from ingot.kernels.checks import (
    expect,
    expect_float,
    expect_range,
    merge_tiles,
    next_power_of_two,
    runs_on_gpu,
)
from ingot.kernels.overlap import launch_options, overlaps
from ingot.kernels.sampling_cut import bin_scores_kernel, find_cut_kernel, gather_scores_kernel
from ingot.kernels.sampling_pick import pick_token_kernel, tile_weights_kernel
from ingot.kernels.sampling_rows import best_token_kernel, tile_tops_kernel

MAX_VOCAB = 2**22 - 1  # times 2**40 is an int64


def greedy_tiles(device: torch.device) -> dict[str, int]:
    """Tile choices measured on an H200: TILE logits a reduction, PROGRAMS over all rows."""
    return {"TILE": 2048, "PROGRAMS": 16384, "num_warps": 4, "OVERLAP": 2 if overlaps(device) else 1}


def draw_tiles(rows: int, select: bool, device: torch.device) -> dict[str, int]:
    """Tile choices measured on an H200; BINS of the histogram, LIST scores that a row's cut is sought among.

    No choice changes a result.
    """
    overlap = 2 if overlaps(device) else 1
    tiles = {"TILE": 1024, "PROGRAMS": 4096, "BINS": 2048, "LIST": 1024, "num_warps": 4, "CUT_WARPS": 4}
    if not select:
        return {**tiles, "OVERLAP": overlap}
    if rows > 8:
        return {**tiles, "TILE": 2048, "PROGRAMS": 1024, "OVERLAP": overlap}
    return {**tiles, "PROGRAMS": 512, "num_warps": 8, "OVERLAP": overlap if rows > 1 else 1}


def _shape(vocab: int, tile: int) -> dict[str, int]:
    tiles = triton.cdiv(vocab, tile)
    return {"VOCAB": vocab, "TILES": tiles, "TILE": tile}


def _grid(rows: int, tiles: int, programs: int) -> tuple[int, int]:
    return min(tiles, max(programs // rows, 1)), rows


def _outputs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, device = logits.shape[0], logits.device
    return (
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def greedy_triton(
    logits: torch.Tensor, tiles: Mapping[str, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels; arguments as in :func:`greedy`, unchecked."""
    choice = merge_tiles(greedy_tiles(logits.device), tiles)
    token_ids, values = _outputs(logits)
    rows, vocab = logits.shape
    if not rows:
        return token_ids, values
    shape = _shape(vocab, choice["TILE"])
    options = launch_options(choice, logits.device)
    keys, ids = torch.empty((2, rows, shape["TILES"]), dtype=torch.int32, device=logits.device)
    tile_tops_kernel[_grid(rows, shape["TILES"], choice["PROGRAMS"])](
        logits, keys, ids, None, None, None, None, None, logits.stride(0),
        **shape, BINS=1, OVERLAP=choice["OVERLAP"], **options,
    )  # fmt: skip
    best_token_kernel[(rows,)](
        logits, keys, ids, token_ids, values, logits.stride(0), TILES=shape["TILES"],
        BLOCK_TILES=next_power_of_two(shape["TILES"]), OVERLAP=choice["OVERLAP"], **options,
    )  # fmt: skip
    return token_ids, values


def draw_triton(
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
    """Launch the kernels; arguments as in :func:`draw`, unchecked."""
    (rows, vocab), device = logits.shape, logits.device
    choice = merge_tiles(draw_tiles(rows, select, device), tiles)
    token_ids, values = _outputs(logits)
    if not rows:
        return token_ids, values
    shape = _shape(vocab, choice["TILE"])
    options = {"OVERLAP": choice["OVERLAP"], **launch_options(choice, device)}
    grid = _grid(rows, shape["TILES"], choice["PROGRAMS"])
    keys, ids = torch.empty((2, rows, shape["TILES"]), dtype=torch.int32, device=device)
    high, low = torch.empty((2, rows, shape["TILES"]), dtype=torch.float32, device=device)
    filters = _new_bins(rows, choice["BINS"] if select else 0, device)
    tile_tops_kernel[grid](
        logits, keys, ids, high, low, **filters, row_stride=logits.stride(0), **shape, BINS=choice["BINS"],
        **options,
    )  # fmt: skip
    shape["BLOCK_TILES"] = next_power_of_two(shape["TILES"])
    row = {"logits_ptr": logits, "temperature_ptr": temperature, "high_ptr": high, "low_ptr": low,
           "row_stride": logits.stride(0), **shape, **options}  # fmt: skip
    cut = _cut(rows, grid, choice, row, {"top_k_ptr": top_k, "top_p_ptr": top_p, **filters}) if select else {}
    sums = {
        "min_p_ptr": min_p,
        "cut_ptr": cut.get("cut_ptr"),
        "weight_ptr": torch.empty((rows, shape["TILES"]), dtype=torch.int64, device=device),
        "equals_ptr": torch.empty((rows, shape["TILES"]), dtype=torch.int32, device=device)
        if select
        else None,
    }
    tile_weights_kernel[grid](**row, **sums)
    pick_token_kernel[(rows,)](
        **row, **sums, kept_ptr=cut.get("kept_ptr"), seed_ptr=seed, step_ptr=step, key_ptr=keys, id_ptr=ids,
        token_ptr=token_ids, value_ptr=values,
    )  # fmt: skip
    return token_ids, values


def _new_bins(rows: int, bins: int, device: torch.device) -> dict[str, Any]:
    """Memory for each row's histogram, and for the number of scores listed; none for no bins."""
    if not bins:
        return {"bin_weights_ptr": None, "bin_counts_ptr": None, "listed_ptr": None}
    return {
        "bin_weights_ptr": torch.empty((rows, bins), dtype=torch.int64, device=device),
        "bin_counts_ptr": torch.empty((rows, bins), dtype=torch.int32, device=device),
        "listed_ptr": torch.empty(rows, dtype=torch.int32, device=device),
    }


def _cut(
    rows: int, grid: tuple[int, int], choice: dict[str, int], row: dict[str, Any], filters: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Launch what finds the cut of each row; where it lies, and how many of its equals stay."""
    device, sizes = row["logits_ptr"].device, {"BINS": choice["BINS"], "LIST": choice["LIST"]}
    listed_ptr = filters.pop("listed_ptr")
    bin_scores_kernel[grid](**row, **filters, BINS=choice["BINS"])
    listed = {
        "list_ptr": torch.empty((rows, choice["LIST"]), dtype=torch.float32, device=device),
        "listed_ptr": listed_ptr,
    }
    gather_scores_kernel[grid](**row, **filters, **listed, **sizes)
    cut = {
        "cut_ptr": torch.empty(rows, dtype=torch.float32, device=device),
        "kept_ptr": torch.empty(rows, dtype=torch.int64, device=device),
    }
    find_cut_kernel[(rows,)](**{**row, "num_warps": choice["CUT_WARPS"]}, **filters, **listed, **cut, **sizes)
    return cut


def greedy(logits: torch.Tensor, tiles: Mapping[str, int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row, the lowest id among equals; a NaN is above all, as for ``torch.max``.

    Args:
        logits: [B, V] fp16, bf16 or fp32; any B, V up to 2**22 - 1; rows may lie apart.
        tiles: choices over ``greedy_tiles``.

    Returns:
        token_ids [B] int64; values [B] float32, their logits: NaN where the row holds one.

    Raises:
        KernelArgumentError: a shape, dtype or stride that the kernels cannot take.
    """
    _expect_logits(logits)
    if runs_on_gpu(logits):
        return greedy_triton(logits, tiles)
    return greedy_reference(logits)


def greedy_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch twin; arguments as in :func:`greedy`."""
    token_ids = torch.argmax(logits.float(), dim=-1)
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
    """A token of each row: the best where the temperature is 0, else drawn from what the filters leave.

    A row's result is bitwise the same in any batch. The twin is the runtime's ``sample_reference``.

    Args:
        logits: [B, V] fp16, bf16 or fp32 on a GPU; any B, V up to 2**22 - 1; rows may lie apart.
        temperature, top_p, min_p: [B] float64; top_p from 1 on keeps all.
        top_k: [B] int64; 0 keeps all.
        seed, step: [B] int64.
        select: False where no row of the batch has a top-k or a top-p, which are then not read.
        tiles: choices over ``draw_tiles``.

    Returns:
        token_ids [B] int64; values [B] float32, their logits as given.

    Raises:
        KernelArgumentError: a shape, dtype, device or stride that the kernels cannot take.
        DeviceError: not on a GPU.
    """
    _expect_logits(logits)
    rows = (logits.shape[0],)
    for name, tensor in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        expect(name, tensor, rows, like=logits, dtype=torch.float64)
    for name, tensor in (("top_k", top_k), ("seed", seed), ("step", step)):
        expect(name, tensor, rows, like=logits, dtype=torch.int64)
    if not runs_on_gpu(logits):
        raise DeviceError(
            "draws without a GPU are the runtime's sampler's", seen=logits.device, allowed="cuda"
        )
    return draw_triton(logits, temperature, top_k, top_p, min_p, seed, step, select, tiles)


def _expect_logits(logits: torch.Tensor) -> None:
    expect_float("logits", logits)
    expect("logits", logits, (None, None), like=logits)
    expect_range("the vocabulary size", logits.shape[1], 1, MAX_VOCAB)
