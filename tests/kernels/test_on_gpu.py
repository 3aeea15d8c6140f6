"""What only a GPU can show: the shapes of 7B models, capture and replay, the same bits twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.attention.paged_attention import default_tiles
from ingot.kernels.norm.layer_norm import layer_norm
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.norm.sum_norm import sum_norm
from ingot.kernels.product.few_rows.small_gate_up import small_gate_up
from ingot.kernels.product.few_rows.small_linear import small_linear, small_linear_parts
from ingot.kernels.weight.stored_weight import dequantized
from tests.kernels.flat_calls import (
    paged_attention,
    prefill_attention,
    rope_kv_write,
    rope_kv_write_reference,
    small_qkv,
)
from tests.kernels.numerics import assert_near, normal
from tests.kernels.paged_case import attention64, paged_case
from tests.kernels.test_stored_weight import random_weight

pytestmark = pytest.mark.gpu

HALF_DTYPES = [torch.float16, torch.bfloat16]
HEADS = [(32, 32), (32, 8), (28, 4)]
SCALE = 128**-0.5


def constant(rows: int, cols: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A weight that is there before any kernel starts: overlapping kernels read it before they wait."""
    weight = normal(rows, cols, dtype=dtype, device="cuda", seed=seed) / 64
    torch.cuda.synchronize()
    return weight


def lengths_of(batch: int, longest: int) -> list[int]:
    """Ragged lengths with the longest first and, from 4 requests on, one padding row."""
    lengths = [max(longest - 61 * index % longest, 1) for index in range(batch)]
    if batch >= 4:
        lengths[2] = 0
    return lengths


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_7b_rows(dtype: torch.dtype, tokens: int) -> None:
    x, residual = (normal(tokens, 4096, dtype=dtype, device="cuda", seed=seed) for seed in (0, 1))
    weight, bias = (normal(4096, dtype=dtype, device="cuda", seed=seed) for seed in (2, 3))
    s = x + residual
    wide = s.double()
    y, new_residual = rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(new_residual, s)
    assert_near(y, wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double())
    y, new_residual = layer_norm(x, weight, bias, 1e-5, residual)
    assert torch.equal(new_residual, s)
    assert_near(y, torch.nn.functional.layer_norm(wide, (4096,), weight.double(), bias.double(), 1e-5))
    gate_up = normal(tokens, 22016, dtype=dtype, device="cuda")
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_near(silu_mul(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("norm", [False, True])
def test_7b_rope(dtype: torch.dtype, heads: int, kv_heads: int, norm: bool) -> None:
    tokens = 1500
    qkv = normal(tokens, (heads + 2 * kv_heads) * 128, dtype=dtype, device="cuda")
    angles = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(64) / 64)
    table = torch.cat((angles.cos(), angles.sin()), dim=1).cuda()
    positions = torch.arange(2000, 2000 + tokens, device="cuda")
    slots = torch.randperm(64 * 64, generator=torch.Generator().manual_seed(0))[:tokens].cuda()
    slots[7] = -1
    weight = normal(128, dtype=dtype, device="cuda", seed=2) if norm else None
    results = []
    for op in (rope_kv_write, rope_kv_write_reference):
        caches = [torch.zeros(64, kv_heads, 64, 128, dtype=dtype, device="cuda") for _ in range(2)]
        arguments = (qkv, table, positions, positions, slots, *caches, heads, kv_heads, 128)
        results.append([op(*arguments, weight, weight, 1e-6, 2048), *caches])
    for actual, expected in zip(*results, strict=True):
        # A last bit of 1 / sqrt may round the normed value the other way; rotation then subtracts such
        # values.
        assert_near(actual, expected.double(), loosen=8 if norm else 1)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("batch", "longest"), [(1, 4096), (1, 1), (7, 1000), (64, 2048)])
@pytest.mark.parametrize("window", [0, 512])
def test_7b_decode(
    dtype: torch.dtype, heads: int, kv_heads: int, batch: int, longest: int, window: int
) -> None:
    lengths = lengths_of(batch, longest)
    case = paged_case(lengths, kv_heads=kv_heads, head_dim=128, block_size=64, dtype=dtype, device="cuda")
    q = normal(batch, heads, 128, dtype=dtype, device="cuda")
    caches = (case.key_cache, case.value_cache)
    out = paged_attention(q, *caches, case.block_tables, case.seq_lens, SCALE, longest, window)
    tiles = default_tiles(kv_heads, heads // kv_heads, 128, 2, q.device, batch)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        if length == 0:
            assert (out[row] == 0).all()
            continue
        last = torch.tensor([length - 1], device="cuda")
        assert_near(out[one], attention64(q[one], case.keys[row], case.values[row], last, SCALE, window))
        if row < 3:
            tables, lens = case.block_tables[one], case.seq_lens[one]
            alone = paged_attention(q[one], *caches, tables, lens, SCALE, 8192, window, tiles)
            assert torch.equal(alone, out[one]), "with a batch's tiles, alone is bitwise as in the batch"


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [([2048], [2048]), ([4096, 300, 0, 777], [512, 300, 3, 1]), ([37] * 5, [37, 20, 16, 2, 1])],
)
@pytest.mark.parametrize("window", [0, 512])
def test_7b_prefill(
    dtype: torch.dtype, heads: int, kv_heads: int, lengths: list[int], queries: list[int], window: int
) -> None:
    case = paged_case(lengths, kv_heads=kv_heads, head_dim=128, block_size=64, dtype=dtype, device="cuda")
    q = normal(sum(queries), heads, 128, dtype=dtype, device="cuda")
    bounds = torch.tensor([0, *queries]).cumsum(0).int().cuda()
    caches = (case.key_cache, case.value_cache)
    out = prefill_attention(q, *caches, case.block_tables, bounds, case.seq_lens, max(queries), SCALE, window)
    begin = 0
    for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        span = slice(begin, begin + count)
        begin += count
        if length == 0:
            assert (out[span] == 0).all()
            continue
        positions = torch.arange(length - count, length, device="cuda")
        assert_near(
            out[span], attention64(q[span], case.keys[row], case.values[row], positions, SCALE, window)
        )


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 63])
@pytest.mark.parametrize("overlap", [1, 2])
def test_7b_small_products(dtype: torch.dtype, rows: int, overlap: int) -> None:
    tiles = {"OVERLAP": overlap}
    x, residual = (normal(rows, 4096, dtype=dtype, device="cuda", seed=seed) for seed in (0, 1))
    g = normal(4096, dtype=dtype, device="cuda", seed=2)
    hidden = rms_norm(x, g, 1e-6)[0].double()
    w = constant(22016, 4096, dtype=dtype, seed=3)
    gate, up = (hidden @ w.double().T).chunk(2, dim=1)
    # The rows that rms_norm makes may differ by a last bit of 1 / sqrt, which the sum averages out.
    assert_near(small_gate_up(x, w, g, 1e-6, tiles), torch.nn.functional.silu(gate) * up, loosen=4)
    w = w[:4096]
    y = small_linear(x, w, residual=residual, tiles=tiles)
    assert_near(y, x.double() @ w.double().T + residual.double())
    long = normal(rows, 11008, dtype=dtype, device="cuda", seed=4)
    w = constant(4096, 11008, dtype=dtype, seed=5)
    assert_near(small_linear(long, w, tiles=tiles), long.double() @ w.double().T, loosen=2)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("rows", [1, 7, 16, 33, 64])
def test_7b_small_qkv(dtype: torch.dtype, heads: int, kv_heads: int, rows: int) -> None:
    x = normal(rows, 4096, dtype=dtype, device="cuda")
    outputs = (heads + 2 * kv_heads) * 128
    w, bias = (
        constant(outputs, 4096, dtype=dtype, seed=1),
        normal(outputs, dtype=dtype).cuda(),
    )
    g = normal(4096, dtype=dtype, device="cuda", seed=2)
    angles = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(64) / 64)
    table = torch.cat((angles.cos(), angles.sin()), dim=1).cuda()
    positions = torch.arange(2000, 2000 + rows, device="cuda")
    slots = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:rows].cuda()
    slots[0] = -1 if rows > 1 else slots[0]
    caches = [torch.zeros(16, kv_heads, 64, 128, dtype=dtype, device="cuda") for _ in range(4)]
    place = (table, positions, positions, slots)
    q = small_qkv(x, w, bias, g, 1e-6, *place, *caches[:2], heads, kv_heads, 128, 1024)
    qkv = (rms_norm(x, g, 1e-6)[0].double() @ w.double().T + bias.double()).to(dtype)
    expected = rope_kv_write(qkv, *place, *caches[2:], heads, kv_heads, 128, logn_length=1024)
    for actual, wanted in zip((q, *caches[:2]), (expected, *caches[2:]), strict=True):
        assert_near(actual, wanted.double(), loosen=8)


NARROW = [(768, 768), (2304, 768), (768, 3072), (1280, 1280), (5120, 1280), (1280, 5120)]  # of Whisper


@pytest.mark.parametrize(("outputs", "inputs"), NARROW)
@pytest.mark.parametrize("rows", [10, 16, 31, 64])
def test_narrow_products(outputs: int, inputs: int, rows: int) -> None:
    x = normal(rows, inputs, dtype=torch.float16, device="cuda")
    w = constant(outputs, inputs, dtype=torch.float16, seed=1)
    bias, residual = (normal(*size, dtype=torch.float16).cuda() for size in ((outputs,), (rows, outputs)))
    wanted = x.double() @ w.double().T
    poison = torch.full((8 * rows * outputs,), torch.nan, device="cuda")  # what the allocator gives next
    del poison
    assert_near(small_linear(x, w, bias, residual), wanted + bias.double() + residual.double(), loosen=2)
    parts = small_linear_parts(x, w)
    assert_near(parts.sum(0).half(), wanted, loosen=2)
    assert torch.equal(small_linear_parts(x[: rows - 1], w), parts[:, : rows - 1])


@pytest.mark.parametrize(("outputs", "inputs"), NARROW)
@pytest.mark.parametrize("rows", [1, 5])
def test_narrow_products_of_8_bits(outputs: int, inputs: int, rows: int) -> None:
    x = normal(rows, inputs, dtype=torch.float16, device="cuda")
    weight = random_weight((8, 0, False), outputs, inputs, torch.float16, "cuda")
    wanted = x.double() @ dequantized(weight, torch.float64).T
    torch.cuda.synchronize()
    assert_near(small_linear(x, weight), wanted, loosen=4)
    assert_near(small_linear_parts(x, weight).sum(0).half(), wanted, loosen=4)


def test_rows_of_small_products_do_not_depend_on_their_company() -> None:
    x = normal(64, 4096, dtype=torch.float16, device="cuda")
    g = normal(4096, dtype=torch.float16, device="cuda", seed=2)
    w = constant(8192, 4096, dtype=torch.float16, seed=3)
    for low, high in ((2, 8), (9, 16), (17, 32), (33, 64)):
        assert torch.equal(small_gate_up(x[:low], w, g, 1e-6), small_gate_up(x[:high], w, g, 1e-6)[:low])
        assert torch.equal(small_linear(x[:low], w), small_linear(x[:high], w)[:low])


FEW_REQUESTS = {"MIN_SPLIT": 64, "MERGE": 1, "num_warps": 4, "num_stages": 2}


@pytest.mark.parametrize(
    ("heads", "tiles"),
    [
        (8, {"OVERLAP": 2}),
        (8, {"OVERLAP": 4}),
        (32, {"OVERLAP": 2}),
        (32, {"OVERLAP": 4, "EARLY": 0}),
        (32, {"OVERLAP": 4, "EARLY": 1}),
        (32, {"OVERLAP": 4, "EARLY": 1, **FEW_REQUESTS}),
    ],
)
def test_attention_overlapping_the_query_product(heads: int, tiles: dict[str, int]) -> None:
    """The keys it reads and its queries are written by the kernel just before."""
    x = normal(8, 4096, dtype=torch.float16, device="cuda")
    w = constant((heads + 16) * 128, 4096, dtype=torch.float16, seed=3)
    lengths = [640, 1, 200, 65, 64, 300, 128, 7]
    case = paged_case(lengths, kv_heads=8, head_dim=128, block_size=64, dtype=torch.float16, device="cuda")
    caches = (case.key_cache, case.value_cache)
    positions = case.seq_lens.long() - 1
    slots = case.block_tables.gather(1, positions[:, None] // 64)[:, 0] * 64 + positions % 64
    place = (None, positions, positions, slots.long(), *caches, heads, 8, 128)

    def step(overlap: int) -> torch.Tensor:
        q = small_qkv(x, w, None, None, 0.0, *place, tiles={"OVERLAP": min(overlap, 2)})
        chosen = {**tiles, "OVERLAP": overlap}
        return paged_attention(q, *caches, case.block_tables, case.seq_lens, SCALE, 4096, tiles=chosen)

    expected = step(1)
    step(tiles["OVERLAP"])  # a capture may not load kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(tiles["OVERLAP"])
    for _ in range(10):
        captured.zero_()
        for cache in caches:  # the newest keys: what is there before the product has written them shows
            cache[slots // 64, :, slots % 64] = float("nan")
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("rows", [2, 8, 16, 32, 64])
def test_overlapping_split_sums(rows: int) -> None:
    """Products and norms in turn, each reading what the one before wrote, replayed: the same bits as one by
    one, and near the sum in one part.
    """
    x = normal(rows, 4096, dtype=torch.float16, device="cuda")
    g = normal(4096, dtype=torch.float16, device="cuda", seed=2)
    w = constant(4096, 4096, dtype=torch.float16, seed=3)
    parts = small_linear_parts(x, w)
    near = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(parts.double().sum(0), x.double() @ w.double().T, **near)

    def chain(overlap: int) -> torch.Tensor:
        tiles = {"OVERLAP": overlap}
        normed, hidden = x, x
        for _ in range(20):
            normed, hidden = sum_norm(small_linear_parts(normed, w, tiles), hidden, g, 1e-6, tiles=tiles)
        return normed

    expected = chain(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(2)
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("start", [2, 4])
def test_overlapping_kernels_wait_for_each_other(start: int) -> None:
    """A long chain, each product reading what the one before wrote, replayed: the same bits as one by one."""
    x = normal(1, 4096, dtype=torch.float16, device="cuda")
    g = normal(4096, dtype=torch.float16, device="cuda", seed=2)
    w = constant(4096, 4096, dtype=torch.float16, seed=3)

    def chain(overlap: int) -> torch.Tensor:
        y = x
        for _ in range(40):
            y = small_linear(y, w, norm_weight=g, norm_eps=1e-6, tiles={"OVERLAP": overlap})
        return y

    expected = chain(1)
    assert torch.equal(chain(start), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(start)
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


def step_of(name: str) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """An op as a call without arguments, and the tensors a replay may change."""
    x = normal(8, 4096, dtype=torch.float16, device="cuda")
    row = normal(4096, dtype=torch.float16, device="cuda", seed=1)
    if name == "rms_norm":
        return lambda: rms_norm(x, row, 1e-6, x)[0], [x]
    if name == "layer_norm":
        return lambda: layer_norm(x, row, row, 1e-5, x)[0], [x]
    if name == "silu_mul":
        return lambda: silu_mul(x), [x]
    if name == "small_linear":
        w = constant(4096, 4096, dtype=torch.float16, seed=3)
        return lambda: small_linear(x, w, row, x, row, 1e-6), [x]
    if name == "small_gate_up":
        w = constant(2048, 4096, dtype=torch.float16, seed=3)
        return lambda: small_gate_up(x, w, None, 0.0), [x]
    lengths = [500, 0, 7, 1200]
    case = paged_case(lengths, kv_heads=8, head_dim=128, block_size=64, dtype=torch.float16, device="cuda")
    caches = (case.key_cache, case.value_cache)
    q = normal(4, 32, 128, dtype=torch.float16, device="cuda")
    if name == "paged_attention":
        return lambda: paged_attention(q, *caches, case.block_tables, case.seq_lens, SCALE, 2048), [
            q,
            case.seq_lens,
        ]
    if name == "prefill_attention":
        bounds = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32, device="cuda")
        call = lambda: prefill_attention(  # noqa: E731
            q, *caches, case.block_tables, bounds, case.seq_lens, 16, SCALE
        )
        return call, [q, case.seq_lens]
    qkv = normal(4, 48 * 128, dtype=torch.float16, device="cuda")
    table = normal(64, 128, dtype=torch.float32, device="cuda", seed=1)
    positions = torch.arange(4, device="cuda")
    slots = torch.tensor([0, 1, 2, -1], device="cuda")
    if name == "small_qkv":
        w = constant(48 * 128, 4096, dtype=torch.float16, seed=3)
        place = (table, positions, positions, slots, *caches, 32, 8, 128)
        return lambda: small_qkv(x[:4], w, None, None, 0.0, *place), [x]
    call = lambda: rope_kv_write(  # noqa: E731
        qkv, table, positions, positions, slots, *caches, 32, 8, 128
    )
    return call, [qkv, positions]


OPS = [
    *("rms_norm", "layer_norm", "silu_mul", "rope_kv_write", "paged_attention", "prefill_attention"),
    *("small_linear", "small_gate_up", "small_qkv"),
]


@pytest.mark.parametrize("name", OPS)
def test_graph_replay_follows_its_inputs(name: str) -> None:
    call, inputs = step_of(name)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    before = call().clone()
    graph.replay()
    assert torch.equal(captured, before)
    for tensor in inputs:
        changed: Any = tensor.flip(0) if not tensor.is_floating_point() else tensor * 0.5
        if tensor.dtype == torch.int32:
            changed = torch.minimum(tensor, tensor // 2)  # shorter lengths, within the blocks they own
        tensor.copy_(changed)
    graph.replay()
    after = call()
    assert torch.equal(captured, after)
    assert not torch.equal(after, before), "the inputs changed, so must the result"


@pytest.mark.parametrize("name", OPS)
def test_same_bits_twice(name: str) -> None:
    call, _ = step_of(name)
    first = call()
    assert all(torch.equal(call(), first) for _ in range(5))
