"""A row's normaliser: exact, the same bits in any batch, and rows without finite values."""

from __future__ import annotations

import math

import pytest
import torch

from ingot.kernels.cpu import log_sums
from ingot.runtime.sampling.log_normaliser import log_normaliser

VOCAB = 151_936


def logits_of(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(rows, vocab, generator=generator) * 8).to(dtype)


@pytest.mark.parametrize("vocab", [1, 97, 5000, VOCAB])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_it_is_logsumexp(vocab: int, dtype: torch.dtype) -> None:
    logits = logits_of(3, vocab, dtype)
    before = logits.clone()
    found = log_normaliser(logits)
    assert (found.shape, found.dtype) == ((3, 1), torch.float64)
    torch.testing.assert_close(
        found, logits.double().logsumexp(1, keepdim=True), rtol=0, atol=vocab * 2.0**-41
    )
    assert torch.equal(logits, before)


def test_equal_logits_of_a_large_vocabulary() -> None:
    assert float(log_normaliser(torch.full((1, VOCAB), -7.0))) == pytest.approx(
        math.log(VOCAB) - 7, abs=1e-12
    )


def test_no_rows() -> None:
    assert log_normaliser(torch.zeros(0, 5)).shape == (0, 1)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([-math.inf, 2.0, -math.inf], 2.0),
        ([-math.inf] * 3, -math.inf),
        ([1.0, math.inf, -math.inf], math.inf),
        ([1.0, math.nan, math.inf], math.nan),
    ],
)
def test_rows_that_are_not_finite(row: list[float], expected: float) -> None:
    found = float(log_normaliser(torch.tensor([row, [0.0, 0.0, 0.0]]))[0])
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def check_company(device: str) -> None:
    logits = logits_of(70, 997).to(device)
    together = log_normaliser(logits)
    for rows in (1, 2, 5, 33):
        assert torch.equal(log_normaliser(logits[:rows]), together[:rows])
    wide = logits_of(40, VOCAB).to(device)  # more than are handled at once
    assert torch.equal(log_normaliser(wide[-1:]), log_normaliser(wide)[-1:])


def test_company_changes_no_bit() -> None:
    check_company("cpu")


def test_fewer_threads_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP gives them where OMP_THREAD_LIMIT or OMP_DYNAMIC say so."""
    logits, threads = logits_of(3, 997), torch.get_num_threads()
    if not log_sums.has_exp_sums(logits):
        pytest.skip("there is no kernel for this processor")
    expected, kernel = log_normaliser(logits), log_sums._kernel()
    monkeypatch.setattr(log_sums, "_kernel", lambda: lambda words, _: kernel(words, 2))
    torch.set_num_threads(3)
    try:
        assert torch.equal(log_normaliser(logits), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
def test_company_changes_no_bit_on_a_gpu() -> None:
    check_company("cuda")
