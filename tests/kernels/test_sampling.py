"""The sampling kernels against their PyTorch twin: the same tokens, not merely the same distribution."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from ingot.errors import DeviceError
from ingot.kernels.kernel_checks import KernelArgumentError
from ingot.kernels.sampling.score_rows import uniform_of, weights_of
from ingot.kernels.sampling.token_draw import draw, greedy
from ingot.runtime.sampling.sampler import (
    RowSampling,
    SamplingTensors,
    sample,
    sample_reference,
    token_weights,
    uniform,
)
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, normal

INF, NAN = float("inf"), float("nan")
KERNELS = [pytest.param(*p.values, id=p.id, marks=p.marks) for p in IMPLEMENTATIONS if p.id != "reference"]
# Few bins, so that a bin holds many scores; lists that hold none of them, some, all.
SMALL: list[dict[str, int]] = [
    {"TILE": 32, "BINS": 4, "LIST": 2, "PROGRAMS": 2},
    {"TILE": 64, "BINS": 16, "LIST": 16, "PROGRAMS": 1024},
    {"TILE": 256, "BINS": 256, "LIST": 256, "PROGRAMS": 1},
]
CHI_SQUARE_999_OF_15 = 37.70


def mixed_rows(count: int, seed: int) -> list[RowSampling]:
    """Rows with any mix of filters, and some greedy ones."""
    pick = random.Random(seed)
    return [
        RowSampling(
            temperature=pick.choice((0.0, 0.6, 1.0, 1.7, 20.0)),
            top_k=pick.choice((0, 0, 1, 2, 12, 50, 100_000)),
            top_p=pick.choice((1.0, 1.0, 0.99, 0.9, 0.3, 1e-6)),
            min_p=pick.choice((0.0, 0.0, 0.08, 1.0)),
            seed=pick.randrange(-(2**63), 2**63),
            step=index,
        )
        for index in range(count)
    ]


def expected(logits: torch.Tensor, rows: list[RowSampling]) -> tuple[list[int], torch.Tensor]:
    """What the twin draws on the CPU, and these tokens' logits."""
    output = sample_reference(logits.cpu().float(), SamplingTensors.from_rows(rows, "cpu"))
    return output.token_ids.tolist(), output.values


def check_draws(
    impl: Implementation,
    logits: torch.Tensor,
    rows: list[RowSampling],
    tiles: Mapping[str, int] | None = None,
    select: bool = True,
) -> None:
    t = SamplingTensors.from_rows(rows, impl.device)
    arguments = (t.temperature, t.top_k, t.top_p, t.min_p, t.seed, t.step, select, tiles)
    token_ids, values = impl(draw)(logits.to(impl.device), *arguments)
    tokens, wanted = expected(logits, rows)
    assert token_ids.dtype == torch.int64
    assert token_ids.tolist() == tokens
    torch.testing.assert_close(values.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.grid
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(0, 5), (1, 1), (5, 97), (2, 500)])
@pytest.mark.parametrize("tile", [32, 1024])
def test_greedy(impl: Implementation, dtype: torch.dtype, rows: int, vocab: int, tile: int) -> None:
    logits = normal(rows, vocab + 3, dtype=dtype, device=impl.device)[:, :vocab]
    token_ids, values = impl(greedy)(logits, {"TILE": tile, "PROGRAMS": 4})
    assert torch.equal(token_ids, logits.float().argmax(-1))
    assert torch.equal(values, logits.float().amax(-1))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_first_of_equals_and_shows_nan(impl: Implementation, dtype: torch.dtype) -> None:
    logits = torch.zeros(7, 100, dtype=dtype)
    logits[1, [70, 9, 40]] = 4.0
    logits[2] = -INF
    logits[3, [90, 33]] = INF
    logits[4, [80, 60]] = NAN
    logits[5] = NAN
    logits[6, :50] = -0.0
    token_ids, values = impl(greedy)(logits.to(impl.device), {"TILE": 32})
    assert token_ids.tolist() == [0, 9, 0, 33, 60, 0, 0]
    assert values.isnan().tolist() == [False] * 4 + [True] * 2 + [False]
    assert values[:4].tolist() == [0.0, 4.0, -INF, INF]


@pytest.mark.stays("dtype0-1-97-interpreted", "dtype2-3-250-interpreted", "dtype5-5-130-interpreted")
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "batch", "vocab"),
    [
        (torch.float32, 1, 97),
        (torch.float16, 2, 1),
        (torch.bfloat16, 3, 250),
        (torch.float16, 4, 7),
        (torch.float32, 5, 96),
        (torch.float16, 5, 130),
    ],
)
def test_draws_equal_the_references(impl: Implementation, dtype: torch.dtype, batch: int, vocab: int) -> None:
    # A GPU compiles for each: there the larger vocabularies have their own tests.
    for seed, tiles in enumerate(SMALL if impl.interpreted else SMALL[:1]):
        logits = normal(batch, vocab, dtype=dtype, seed=seed) * 2.5
        check_draws(impl, logits, mixed_rows(batch, 10 * batch + seed), tiles)


@pytest.mark.stays("tiles2-interpreted")
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("tiles", SMALL)
def test_ties_stay_at_the_kth_and_go_by_id_at_top_p(impl: Implementation, tiles: dict[str, int]) -> None:
    logits = torch.randint(3, (6, 120), generator=torch.Generator().manual_seed(3)).float() - 1.0
    logits[4:] = 0.0
    logits[3:, ::2] *= -1.0  # zeros of both signs are equal
    rows = [
        RowSampling(1.0, top_k, top_p, seed=top_k, step=step)
        for step, (top_k, top_p) in enumerate([(5, 1.0), (0, 0.3), (50, 0.77), (0, 0.9), (0, 0.26), (9, 0.5)])
    ]
    for shift in range(3):
        check_draws(impl, logits, [r._replace(seed=r.seed + shift) for r in rows], tiles)


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("top_k", [7, 8, 9, 130])
def test_top_k_listed_or_weighed_by_bin(impl: Implementation, top_k: int) -> None:
    # A list of 16 holds all that a top-k of up to 8 leaves; likely tokens may lie in one tile.
    logits = normal(4, 130, dtype=torch.float32, seed=top_k) * 2.5
    logits[1] = logits[1].sort(descending=True).values
    logits[2] = logits[2].round()
    logits[3, 5:] = -INF
    for p in (1.0, 0.97, 0.6):
        rows = [RowSampling(0.9, top_k, p, seed=index) for index in range(4)]
        check_draws(impl, logits, rows, SMALL[1])


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("tiles", SMALL[1:])
@pytest.mark.parametrize(
    "row",
    [RowSampling(1.0, top_k=3, top_p=0.9, min_p=0.05, seed=1), RowSampling(1.0, top_p=0.5), RowSampling(1.0)],
)
def test_extreme_logits(impl: Implementation, tiles: dict[str, int], row: RowSampling) -> None:
    cases = torch.tensor(
        [
            [-INF, -INF, 5.0, -INF],  # one left
            [-INF, -INF, -INF, -INF],  # none left
            [3e38, -3e38, 1.0, 2.0],
            [-3e38, -3e38, -3e38, -2e38],
            [1.0, INF, 2.0, 3.0],
            [NAN, NAN, NAN, 0.0],
            [NAN, NAN, NAN, NAN],
        ]
    )
    check_draws(impl, cases, [row] * len(cases), tiles)


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-3, 1e6])
def test_extreme_temperatures(impl: Implementation, temperature: float) -> None:
    logits = normal(3, 97, dtype=torch.float32) * 30
    for row in (RowSampling(temperature, seed=5), RowSampling(temperature, top_k=40, top_p=0.8, seed=5)):
        check_draws(impl, logits, [row] * 3, SMALL[1])


@pytest.mark.parametrize("impl", KERNELS)
def test_without_a_selection_filters_are_not_read(impl: Implementation) -> None:
    rows = [RowSampling(0.8, min_p=0.1 * (i % 2), seed=i) for i in range(4)] + [RowSampling()]
    logits = normal(5, 300, dtype=torch.float16) * 2
    t = SamplingTensors.from_rows(rows, impl.device)
    top_k, top_p = torch.full_like(t.top_k, 1), torch.full_like(t.top_p, 1e-9)
    arguments = (t.temperature, top_k, top_p, t.min_p, t.seed, t.step, False, {"TILE": 64, "PROGRAMS": 8})
    token_ids, _ = impl(draw)(logits.to(impl.device), *arguments)
    assert token_ids.tolist() == expected(logits, rows)[0]


@pytest.mark.parametrize("impl", KERNELS)
def test_rows_may_lie_apart_and_be_the_same(impl: Implementation) -> None:
    logits = (normal(4, 131, dtype=torch.float32) * 2).to(impl.device)
    rows = mixed_rows(4, 3)
    check_draws(impl, logits[:, 3:100], rows, SMALL[1])
    check_draws(impl, logits[:1].expand(4, -1), rows, SMALL[1])


def test_wrong_arguments_are_named() -> None:
    t = SamplingTensors.from_rows([RowSampling()], "cpu")
    good: dict[str, Any] = {
        "logits": torch.zeros(1, 4),
        **{n: getattr(t, n) for n in ("temperature", "top_k", "top_p", "min_p", "seed", "step")},
    }
    with pytest.raises(DeviceError, match="runtime"):
        draw(**good)
    for name, bad in (
        ("logits", torch.zeros(1, 4, dtype=torch.int64)),
        ("temperature", torch.zeros(1)),
        ("seed", torch.zeros(2, dtype=torch.int64)),
        ("top_k", torch.zeros(1, dtype=torch.int32)),
    ):
        with pytest.raises(KernelArgumentError, match=name):
            draw(**{**good, name: bad})
    with pytest.raises(KernelArgumentError, match="vocabulary"):
        greedy(torch.zeros(1, 0))


@triton.jit
def weights_kernel(
    scores_ptr: tl.tensor, weights_ptr: tl.tensor, temperature_ptr: tl.tensor, BLOCK: tl.constexpr
) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top = tl.zeros([], dtype=tl.float64)
    weights = weights_of(tl.load(scores_ptr + places), top, tl.load(temperature_ptr))
    tl.store(weights_ptr + places, weights)


@triton.jit
def uniform_kernel(seed_ptr: tl.tensor, step_ptr: tl.tensor, out_ptr: tl.tensor, BLOCK: tl.constexpr) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + places, uniform_of(tl.load(seed_ptr + places), tl.load(step_ptr + places)))


@pytest.mark.parametrize("impl", KERNELS)
def test_random_numbers_are_the_references(impl: Implementation) -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (1024,), generator=torch.Generator().manual_seed(1))
    steps = torch.arange(1024) - 100
    out = torch.empty(1024, dtype=torch.float64, device=impl.device)
    uniform_kernel[(2,)](seeds.to(impl.device), steps.to(impl.device), out, BLOCK=512)
    assert torch.equal(out.cpu(), uniform(seeds, steps))


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.3])
def test_weights_equal_torchs_on_the_gpu(temperature: float) -> None:
    scores = (
        -torch.rand(1, 1 << 22, device="cuda", dtype=torch.float32)[:, : (1 << 22) - 1] * 28 * temperature
    )
    scores = torch.cat((torch.zeros(1, 1, device="cuda"), scores), dim=1)
    weights = torch.empty(1 << 22, dtype=torch.int64, device="cuda")
    t = SamplingTensors.from_rows([RowSampling(temperature)], "cuda")
    weights_kernel[(4096,)](scores, weights, t.temperature, BLOCK=1024)
    assert torch.equal(weights, token_weights(scores, t)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "vocab", "batch"),
    [
        *itertools.product((torch.float16,), (151_936, 32_000, 50_257), (1, 8, 64)),
        (torch.bfloat16, 151_936, 8),
        (torch.float32, 50_257, 8),
    ],
)
def test_real_vocabularies(dtype: torch.dtype, vocab: int, batch: int) -> None:
    logits = normal(batch, vocab, dtype=dtype, device="cuda", seed=batch) * 2.5
    rows = mixed_rows(batch, batch + vocab)
    if batch == 1:
        rows = [RowSampling(0.8, 50, 0.9, 0.01, seed=vocab)]
    t = SamplingTensors.from_rows(rows, "cuda")
    output, reference = sample(logits, t), sample_reference(logits, t)
    assert torch.equal(output.token_ids, reference.token_ids)
    assert torch.equal(output.values, reference.values)
    if batch < 64:  # the CPU is slow
        assert output.token_ids.tolist() == expected(logits, rows)[0]
    some = slice(batch // 2, batch // 2 + 3)
    alone = sample(logits[some], SamplingTensors.from_rows(rows[some], "cuda"))
    assert torch.equal(alone.token_ids, output.token_ids[some]), "the same in any batch"
    token_ids, values = greedy(logits)
    assert torch.equal(token_ids, logits.float().argmax(-1))
    assert torch.equal(values, logits.float().amax(-1))


@pytest.mark.gpu
def test_flat_rows_and_ties_of_a_real_vocabulary() -> None:
    logits = torch.zeros(7, 151_936, device="cuda")
    logits[1:4] = normal(3, 151_936, dtype=torch.float32, device="cuda") * 1e-4
    logits[2, 77] = 8.0  # bins are wide, and one holds all the others
    logits[3, 78] = -20.0
    logits[4] = torch.randint(3, (151_936,), device="cuda").float()
    logits[5] = normal(1, 151_936, dtype=torch.float32, device="cuda")[0].bfloat16().float()
    logits[6] = (normal(1, 151_936, dtype=torch.float32, device="cuda")[0] * 2.5).sort(descending=True).values
    filters = ((0, 0.9), (70_000, 0.5), (50_000, 1.0), (50, 0.9), (512, 0.99), (513, 0.99))
    for row in (RowSampling(0.9, top_k, top_p) for top_k, top_p in filters):
        rows = [row._replace(seed=seed) for seed in range(7)]
        check_draws(Implementation("cuda"), logits, rows)


@pytest.mark.gpu
def test_one_graph_serves_every_mix() -> None:
    batch, vocab = 8, 151_936
    t = SamplingTensors.from_rows([RowSampling(0.9, 50, 0.9, 0.1)] * batch, "cuda")
    logits = normal(batch, vocab, dtype=torch.float16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sample(logits, t)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sample(logits, t)
    for seed in range(6):
        rows = mixed_rows(batch, seed)
        fresh = SamplingTensors.from_rows(rows, "cuda")
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "step"):
            getattr(t, name).copy_(getattr(fresh, name))
        logits.copy_(normal(batch, vocab, dtype=torch.float16, device="cuda", seed=seed) * 3)
        graph.replay()
        assert output.token_ids.tolist() == expected(logits, rows)[0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "row", [RowSampling(1.0), RowSampling(1.3, top_k=9, top_p=0.95), RowSampling(0.8, top_p=0.9, min_p=0.02)]
)
def test_draws_follow_the_distribution(row: RowSampling) -> None:
    draws, likely = 40_000, 16
    logits = torch.full((1, 151_936), -INF, device="cuda", dtype=torch.float16)
    ids = torch.arange(likely, device="cuda") * 9001 + 500
    logits[0, ids] = normal(likely, dtype=torch.float16, device="cuda")
    rows = [row._replace(seed=11, step=step) for step in range(draws)]
    tokens = torch.cat(
        [
            sample(logits.expand(2000, -1), SamplingTensors.from_rows(rows[i : i + 2000], "cuda")).token_ids
            for i in range(0, draws, 2000)
        ]
    )
    counts = (tokens[:, None] == ids).sum(0).double()
    assert counts.sum() == draws
    weights = token_weights(logits, SamplingTensors.from_rows([row], "cuda"))[0, ids].double()
    wanted = weights / weights.sum() * draws
    assert counts[wanted == 0].sum() == 0
    kept = wanted > 0
    statistic = ((counts - wanted)[kept].square() / wanted[kept]).sum().item()
    assert statistic < CHI_SQUARE_999_OF_15, list(itertools.chain(counts.tolist(), wanted.tolist()))
