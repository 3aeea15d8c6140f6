"""Filters against Hugging Face's warpers, draws against their distribution, and what may not change a
draw."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ingot.config.sampling_params import SamplingParams
from ingot.runtime.sampling.sampler import (
    RowSampling,
    SamplingTensors,
    sample,
    splitmix64,
    token_weights,
    uniform,
)
from ingot.runtime.scheduling.request import Request
from ingot.runtime.selection import row_sampling

INF = float("inf")
VOCAB = 97
FILTERS = [
    RowSampling(temperature, top_k, top_p, min_p, seed=3)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.6, 1.0, 1.7), (0, 1, 12, 500), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.08, 1.0)
    )
]
CHI_SQUARE_999 = {7: 24.32, 15: 37.70}  # 0.999 quantiles by degrees of freedom


def random_logits(count: int, vocab: int = VOCAB, seed: int = 0, scale: float = 2.5) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def probabilities(logits: torch.Tensor, rows: list[RowSampling]) -> torch.Tensor:
    weights = token_weights(logits, SamplingTensors.from_rows(rows, "cpu")).double()
    return weights / weights.sum(-1, keepdim=True)


def warped(logits: torch.Tensor, row: RowSampling) -> torch.Tensor:
    scores = TemperatureLogitsWarper(row.temperature)(None, logits[None])
    if row.top_k:
        scores = TopKLogitsWarper(row.top_k)(None, scores)
    if row.top_p < 1:
        scores = TopPLogitsWarper(row.top_p)(None, scores)
    if row.min_p:
        scores = MinPLogitsWarper(row.min_p)(None, scores)
    return scores.softmax(-1)[0].double()


def tokens(logits: torch.Tensor, rows: list[RowSampling], device: str = "cpu") -> list[int]:
    tensors = SamplingTensors.from_rows(rows, device)
    return sample(logits.to(device), tensors).token_ids.tolist()


def test_filters_equal_hugging_face_row_by_row_and_all_at_once() -> None:
    logits = random_logits(len(FILTERS))
    together = probabilities(logits, FILTERS)
    for row, scores, mixed in zip(FILTERS, logits, together, strict=True):
        expected = warped(scores, row)
        alone = probabilities(scores[None], [row])[0]
        assert torch.equal(alone, mixed), row
        assert torch.equal(alone > 0, expected > 0), row
        torch.testing.assert_close(
            alone, expected, rtol=2e-5, atol=1e-9, msg=lambda m, row=row: f"{row}: {m}"
        )


def test_top_k_keeps_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    row = RowSampling(1.0, top_k=2)
    support = probabilities(logits, [row])[0] > 0
    assert support.tolist() == [False, True, True, True, True, False]
    assert torch.equal(support, warped(logits[0], row) > 0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.99, 4), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_lowest_ids_first(top_p: float, kept: int) -> None:
    support = probabilities(torch.zeros(1, 4), [RowSampling(1.0, top_p=top_p)])[0] > 0
    assert support.tolist() == [i < kept for i in range(4)]


def test_min_p_is_relative_to_the_likeliest_and_inclusive() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625]]).log()
    for min_p, kept in ((0.124, 4), (0.126, 3), (0.24, 3), (0.26, 2), (0.51, 1)):
        support = probabilities(logits, [RowSampling(1.0, min_p=min_p)])[0] > 0
        assert support.tolist() == [i < kept for i in range(4)], min_p
    ties = torch.tensor([[2.0, 1.0, 2.0]])
    assert probabilities(ties, [RowSampling(1.0, min_p=1.0)])[0].tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    "row",
    [RowSampling(1.0), RowSampling(0.7, top_k=8), RowSampling(1.3, top_p=0.8), RowSampling(2.0, min_p=0.1)],
)
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_draws_follow_the_distribution(row: RowSampling, seed: int) -> None:
    draws = 4000
    logits = random_logits(1, vocab=16, seed=5, scale=1.0)
    rows = [row._replace(seed=seed, step=step) for step in range(draws)]
    counts = torch.bincount(torch.tensor(tokens(logits.expand(draws, -1), rows)), minlength=16).double()
    expected = warped(logits[0], row) * draws
    support = expected > 0
    assert counts[~support].sum() == 0
    statistic = ((counts - expected)[support].square() / expected[support]).sum().item()
    degrees = int(support.sum()) - 1
    limit = CHI_SQUARE_999.get(degrees, degrees + 3.5 * (2 * degrees) ** 0.5 + 4)
    assert statistic < limit


def test_a_draw_depends_on_seed_and_step_alone() -> None:
    row = RowSampling(1.1, top_k=40, top_p=0.95, min_p=0.01, seed=77)
    scores = random_logits(1, seed=8)
    neighbours = random_logits(30, seed=9)
    for step in range(40):
        mine = row._replace(step=step)
        alone = tokens(scores, [mine])[0]
        for position, others in ((0, 1), (3, 7), (29, 30)):
            rows = [FILTERS[(7 * i + step) % len(FILTERS)] for i in range(others)]
            rows.insert(position, mine)
            batch = torch.cat([neighbours[:position], scores, neighbours[position:others]])
            assert tokens(batch, rows)[position] == alone


def test_large_batches_are_cut_into_chunks_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(len(FILTERS), seed=4)
    whole = tokens(logits, FILTERS)
    monkeypatch.setattr("ingot.runtime.sampling.sampler.LOGITS_AT_ONCE", 7 * VOCAB)
    assert tokens(logits, FILTERS) == whole


@pytest.mark.parametrize(("u", "drawn"), [(0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_intervals_are_closed_below(u: float, drawn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ingot.runtime.sampling.sampler.uniform", lambda seed, step: torch.tensor([u], dtype=torch.float64)
    )
    assert tokens(torch.tensor([[-INF, 0.0, -INF, 0.0, -INF]]), [RowSampling(1.0)]) == [drawn]


def test_seeds_that_differ_by_the_increment_share_no_stream() -> None:
    gamma = 0x9E3779B97F4A7C15 - 2**64
    first, second = uniform(torch.tensor([5, 5 + gamma]), torch.tensor([1, 0])).tolist()
    assert first != second


def test_seeds_and_steps_differ() -> None:
    logits = torch.zeros(64, 1000)
    by_step = tokens(logits, [RowSampling(1.0, seed=5, step=s) for s in range(64)])
    by_seed = tokens(logits, [RowSampling(1.0, seed=s, step=5) for s in range(64)])
    assert len(set(by_step)) > 50
    assert len(set(by_seed)) > 50
    assert by_step != by_seed


def test_answers_of_neighbouring_seeds_share_no_stream() -> None:
    """Answer 1 of seed 0 draws not as answer 0 of seed 1 does, nor any other pair."""
    streams = {
        row_sampling(
            Request("r", [1], SamplingParams(temperature=1.0), 9, seed=seed, sample_index=index)
        ).seed
        for seed in range(32)
        for index in range(32)
    }
    assert len(streams) == 32 * 32


def test_splitmix64_gives_the_published_numbers() -> None:
    gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + i * gamma) % 2**64 for i in range(3)]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in states])
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [v % 2**64 for v in splitmix64(signed).tolist()] == published


@pytest.mark.parametrize("along", ["step", "seed"])
def test_uniforms_are_uniform_and_uncorrelated(along: str) -> None:
    count = 160_000
    running = torch.arange(count) - count // 2
    fixed = torch.full((count,), 11)
    u = uniform(fixed, running) if along == "step" else uniform(running, fixed)
    assert u.dtype == torch.float64
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, bins=16, min=0, max=1)
    expected = count / 16
    assert ((counts - expected).square() / expected).sum() < CHI_SQUARE_999[15]
    pairs = torch.bincount((u[:-1] * 4).long() * 4 + (u[1:] * 4).long(), minlength=16).double()
    expected = (count - 1) / 16
    assert ((pairs - expected).square() / expected).sum() < CHI_SQUARE_999[15]
    assert len(u.unique()) == count


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 1e-300])
def test_temperature_towards_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(50, seed=2, scale=30.0)
    rows = [RowSampling(temperature, seed=i) for i in range(50)]
    assert tokens(logits, rows) == logits.argmax(-1).tolist()


def test_greedy_takes_the_lowest_of_equals_in_any_batch() -> None:
    logits = torch.zeros(3, 50_000)
    logits[1, [700, 9, 40_000]] = 4.0
    logits[2] = -INF
    greedy = [RowSampling()] * 3
    assert tokens(logits, greedy) == [0, 9, 0]
    rows = [*greedy, RowSampling(1.0, top_k=3, top_p=0.5, min_p=0.1)]
    assert tokens(torch.cat([logits, logits[:1]]), rows)[:3] == [0, 9, 0]


def test_extreme_logits() -> None:
    row = RowSampling(1.0, top_k=3, top_p=0.9, min_p=0.05, seed=1)
    cases = torch.tensor(
        [
            [-INF, -INF, 5.0, -INF],  # one left
            [-INF, -INF, -INF, -INF],  # none left
            [3e38, -3e38, 1.0, 2.0],
            [-3e38, -3e38, -3e38, -2e38],
            [1.0, INF, 2.0, 3.0],
            [float("nan"), float("nan"), float("nan"), 0.0],
        ]
    )
    for plain in (row, RowSampling(1.0, seed=1)):
        assert tokens(cases, [plain] * 6) == [2, 0, 0, 3, 1, 3]


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.zeros(2000, 8)
    logits[:, ::2] = -INF
    drawn = set(tokens(logits, [RowSampling(1.5, seed=2, step=s) for s in range(2000)]))
    assert drawn == {1, 3, 5, 7}


def test_logits_are_left_unchanged() -> None:
    logits = random_logits(len(FILTERS))
    before = logits.clone()
    tokens(logits, FILTERS)
    assert torch.equal(logits, before)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [VOCAB, 5000, 151_936])
def test_cuda_draws_what_the_cpu_draws(vocab: int) -> None:
    rows = [row._replace(step=i) for i, row in enumerate(FILTERS)]
    logits = random_logits(len(rows), vocab, seed=6)
    assert tokens(logits, rows, "cuda") == tokens(logits, rows)


@pytest.mark.gpu
def test_cuda_uniforms_and_greedy_ties_equal_the_cpu() -> None:
    seeds = torch.randint(-(2**62), 2**62, (10_000,), generator=torch.Generator().manual_seed(1))
    steps = torch.arange(10_000)
    assert torch.equal(uniform(seeds.cuda(), steps.cuda()).cpu(), uniform(seeds, steps))
    logits = torch.randint(3, (64, 151_936), generator=torch.Generator().manual_seed(2)).float()
    first = [int((row == 2).nonzero()[0]) for row in logits]
    assert tokens(logits, [RowSampling()] * 64, "cuda") == first
    assert tokens(logits, [RowSampling()] * 64) == first


@pytest.mark.gpu
def test_a_cuda_graph_holds_the_sampler() -> None:
    rows = [row._replace(step=i) for i, row in enumerate(FILTERS)]
    tensors = SamplingTensors.from_rows(rows, "cuda")
    logits = random_logits(len(rows), 32_000, seed=7).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sample(logits, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sample(logits, tensors)
    fresh = random_logits(len(rows), 32_000, seed=8)
    logits.copy_(fresh)
    graph.replay()
    assert output.token_ids.tolist() == tokens(fresh, rows)


@pytest.mark.gpu
def test_sampling_never_waits_for_the_device() -> None:
    rows = [row._replace(step=i) for i, row in enumerate(FILTERS)]
    logits = random_logits(len(rows), 5000).cuda()
    first = sample(logits, SamplingTensors.from_rows(rows, "cuda")).token_ids
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):  # so a wait would be seen
            logits[0, 0].item()
        again = sample(logits, SamplingTensors.from_rows(rows, "cuda")).token_ids
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, first)
