"""What only a GPU can show of kernels in 8 bits: the shapes of a 7B, kernels that start early, replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.product_candidates import small_int8_candidates
from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.activation.silu_mul_int8 import silu_mul_int8
from ingot.kernels.attention.int8_heads import int8_heads
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.int8.int8_linear import int8_linear, int8_linear_parts
from ingot.kernels.rows.block_rows import quantize_in_blocks
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums, Int8Weight, int8_sums, quantize_rows
from ingot.kernels.rows.row_endings import InInt8
from ingot.kernels.tiles.int8_tiles import DECODE_ROWS, small_int8_tiles
from ingot.kernels.weight.expand_int8 import expand_int8
from tests.kernels.flat_calls import paged_attention, prefill_attention
from tests.kernels.int4_case import int4_weight
from tests.kernels.int8_case import int8_rows, int8_weight
from tests.kernels.numerics import assert_near, normal
from tests.kernels.paged_case import paged_case
from tests.kernels.test_block_rows import block_steps

pytestmark = pytest.mark.gpu

HALF_DTYPES = [torch.float16, torch.bfloat16]


def constant(outputs: int, width: int, seed: int = 1) -> Int8Weight:
    """A weight that is there before any kernel starts: overlapping kernels read it before they wait."""
    weight = int8_weight(outputs, width, "cuda", seed)
    torch.cuda.synchronize()
    return weight


def assert_numbers(found: Int8Rows, expected: Int8Rows) -> None:
    """The same numbers and scales to the bit: both kernels round the same values of 16 bits."""
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("rows", [1, 64, 128, 2048])
@pytest.mark.parametrize("static", [False, True])
def test_7b_ends(dtype: torch.dtype, rows: int, static: bool) -> None:
    x, residual = (normal(rows, 4096, dtype=dtype, device="cuda", seed=seed) for seed in (0, 1))
    weight = normal(4096, dtype=dtype, device="cuda", seed=2)
    scale = torch.tensor([3.0 / 127], device="cuda") if static else None
    found, s = rms_norm(x, weight, 1e-6, residual, ending=InInt8(scale))
    y, expected_s = rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(s, expected_s)
    assert_numbers(found, quantize_rows(y, static=scale))
    gate_up = normal(rows, 22016, dtype=dtype, device="cuda")
    assert_numbers(silu_mul_int8(gate_up, scale), quantize_rows(silu_mul(gate_up), static=scale))
    if rows <= DECODE_ROWS:
        parts = int8_linear_parts(int8_rows(rows, 11008, "cuda"), constant(4096, 11008))
        y, total = sum_norm(parts, residual, weight, 1e-6)
        found, stream = sum_norm(parts, residual, weight, 1e-6, ending=InInt8(scale))
        assert torch.equal(stream, total)
        assert_numbers(found, quantize_rows(y, static=scale))


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("outputs", "width"), [(4096, 11008), (12288, 4096), (22016, 4096), (4093, 4000)])
def test_sums_of_parts_by_every_candidate(rows: int, outputs: int, width: int) -> None:
    x, weight = int8_rows(rows, width, "cuda"), constant(outputs, width)
    expected = int8_sums(x.values, weight.values).long()
    for split in (False, True):
        for tiles in small_int8_candidates(small_int8_tiles(rows, outputs, width, x.values.device, 0, split)):
            parts = int8_linear_parts(x, weight, tiles)
            assert isinstance(parts, Int8Sums)
            assert torch.equal(parts.parts.sum(0), expected), tiles


@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 65, 128, 200, 256, 300, 2048])
def test_groups_of_a_head(rows: int) -> None:
    x, weight = int8_rows(rows, 4096, "cuda", 128), constant(4096, 4096)
    wide = (x.values.double().unflatten(1, (-1, 128)) * x.scales.double()[..., None]).flatten(1)
    expected = wide @ (weight.values.double() * weight.scales.double()[:, None]).T
    if rows <= DECODE_ROWS:
        parts = int8_linear_parts(x, weight)
        assert isinstance(parts, torch.Tensor)
        torch.testing.assert_close(parts.double().sum(0), expected, rtol=1e-4, atol=1e-4)
    assert_near(int8_linear(x, weight, torch.float16), expected)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (28, 4)])
@pytest.mark.parametrize("batch", [1, 2, 7, 64])
def test_7b_attention(dtype: torch.dtype, heads: int, kv_heads: int, batch: int) -> None:
    lengths = [max(1000 - 61 * index % 1000, 1) for index in range(batch)]
    case = paged_case(lengths, kv_heads=kv_heads, head_dim=128, block_size=64, dtype=dtype, device="cuda")
    q = normal(batch, heads, 128, dtype=dtype, device="cuda")
    place = (q, case.key_cache, case.value_cache, case.block_tables)
    bounds = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    calls: list[Callable[..., torch.Tensor]] = [
        lambda **out: paged_attention(*place, case.seq_lens, 0.1, 1000, **out),
        lambda **out: prefill_attention(*place, bounds, case.seq_lens, 1, 0.1, **out),
    ]
    for call in calls:
        out = torch.full(q.shape, 99, dtype=torch.int8, device="cuda")
        scales = torch.full(q.shape[:2], float("nan"), device="cuda")
        call(out=out, out_scales=scales)
        attended = call().flatten(1)
        assert_numbers(int8_heads(out, scales), quantize_rows(attended, 128))
        for block in (64, 128, 256):
            steps, out = block_steps(heads * 128, block, 8, False, "cuda"), out.fill_(99)
            call(out=out, out_scales=steps)
            assert_numbers(int8_heads(out, steps), quantize_in_blocks(attended, steps))


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 64, 65, 128, 200, 256])
def test_overlapping_chain(rows: int) -> None:
    """Each kernel reads what the one before wrote, replayed: the same bits as one by one."""
    g = normal(4096, dtype=torch.float16, device="cuda", seed=2)
    stream = normal(rows, 4096, dtype=torch.float16, device="cuda")
    up, down, square = constant(2 * 1024, 4096), constant(4096, 1024, 2), constant(4096, 4096, 3)
    by_head = torch.rand(rows, 32, device="cuda") / 100

    def chain(overlap: int) -> torch.Tensor:
        tiles = {"OVERLAP": overlap}
        x, hidden = rms_norm(stream, g, 1e-6, tiles=tiles, ending=InInt8())
        for _ in range(20):
            gate_up = int8_linear(x, up, torch.float16, tiles=tiles)
            parts = int8_linear_parts(silu_mul_int8(gate_up, tiles=tiles), down, tiles)
            x, hidden = sum_norm(parts, hidden, g, 1e-6, tiles=tiles, ending=InInt8())
            parts = int8_linear_parts(Int8Rows(x.values, by_head, 128), square, tiles)
            x, hidden = sum_norm(parts, hidden, g, 1e-6, tiles=tiles, ending=InInt8())
        return hidden

    expected = chain(1)
    assert torch.equal(chain(2), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(2)
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("rows", [300, 2048])
def test_many_rows_in_a_graph(rows: int) -> None:
    """Descriptors are made when the graph is; the data may change."""
    x, weight = int8_rows(rows, 4096, "cuda"), constant(4096, 4096)
    call: Callable[[], Any] = lambda: int8_linear(x, weight, torch.float16)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    before = captured.clone()
    assert torch.equal(before, call())
    x.values.copy_(x.values.flip(0))
    x.scales.copy_(x.scales.flip(0))
    graph.replay()
    assert torch.equal(captured, before.flip(0))


@pytest.mark.parametrize("rows", [4, 70, 256])
def test_a_weight_that_is_written_just_before(rows: int) -> None:
    """A product starts while the pass that writes its weight may still run, and waits for its end."""
    x = int8_rows(rows, 4096, "cuda")
    cases = [int4_weight(4096, 4096, 128, "cuda", seed) for seed in range(4)]
    torch.cuda.synchronize()
    whole = [Int8Weight(exact.to(torch.int8), weight.scales) for weight, exact in cases]
    torch.cuda.synchronize()
    expected = [int8_linear(x, weight, torch.float32) for weight in whole]

    def products() -> list[torch.Tensor]:
        return [int8_linear(x, expand_int8(weight), torch.float32) for weight, _ in cases]

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products()
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
