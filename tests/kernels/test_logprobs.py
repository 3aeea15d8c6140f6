"""Log-probabilities on the GPU: against float64, and against the runtime's reference bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ingot.errors import DeviceError
from ingot.kernels.kernel_checks import KernelArgumentError
from ingot.kernels.sampling.row_logprobs import greedy_logprobs, logprobs
from ingot.runtime.sampling.token_logprobs import leave_logprobs_reference
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, normal

INF, NAN = float("inf"), float("nan")
UNTOUCHED = -77.0
# Fewer tiles than likeliest tokens, or more; lists that hold all of them, or too few.
SMALL: list[dict[str, int]] = [
    {"TILE": 16, "PROGRAMS": 4, "SUM_PROGRAMS": 4, "SUM_TILE": 64, "SHORT": 32, "LIST": 64},
    {"TILE": 128, "SUM_TILE": 16, "PROGRAMS": 64, "SHORT": 16},
    {"TILE": 16, "SUM_TILE": 32, "SUM_PROGRAMS": 1, "SHORT": 2, "LIST": 4},
]
KERNELS = [pytest.param(*p.values, id=p.id, marks=p.marks) for p in IMPLEMENTATIONS if p.id != "reference"]


def left(
    impl: Implementation, logits: torch.Tensor, token_ids: torch.Tensor, top: int, tiles: Any = None
) -> torch.Tensor:
    """What the kernels leave, on the CPU; a row more than they may touch."""
    out = torch.full((len(logits) + 1, 1 + 2 * top), UNTOUCHED, dtype=torch.float64, device=impl.device)
    impl(logprobs)(logits.to(impl.device), token_ids.to(impl.device), out, tiles)
    assert (out[-1] == UNTOUCHED).all()
    return out[:-1].cpu()


def reference(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
    out = torch.full((len(logits), 1 + 2 * top), UNTOUCHED, dtype=torch.float64)
    leave_logprobs_reference(logits.cpu(), token_ids, out)
    return out


def check(impl: Implementation, logits: torch.Tensor, top: int, tiles: Any = None) -> None:
    token_ids = torch.arange(len(logits)) * 31 % logits.shape[1]
    found, expected = left(impl, logits, token_ids, top, tiles), reference(logits, token_ids, top)
    present = expected[:, 1 + top :] >= 0
    assert torch.equal(found[:, 1 + top :], expected[:, 1 + top :])
    torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=0, atol=0, equal_nan=True)
    values = (found[:, 1 : 1 + top][present], expected[:, 1 : 1 + top][present])
    torch.testing.assert_close(*values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab", "top"), [(0, 5, 1), (1, 1, 20), (3, 97, 20), (5, 300, 4), (2, 16, 16)]
)
@pytest.mark.parametrize("tiles", SMALL)
def test_the_kernels_equal_the_reference(
    impl: Implementation, dtype: torch.dtype, rows: int, vocab: int, top: int, tiles: dict[str, int]
) -> None:
    check(impl, (normal(rows, vocab + 3, dtype=dtype) * 4)[:, :vocab], top, tiles)


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("listed", [16, 64, 1024])
def test_likely_tokens_may_fill_one_tile_or_the_row(impl: Implementation, listed: int) -> None:
    """Then the list holds more than is wanted, or less than there is."""
    logits = normal(4, 500, dtype=torch.bfloat16) * 3
    logits[0] = logits[0].sort(descending=True).values
    logits[1] = logits[1].sort().values
    logits[2] = logits[2].round()
    logits[3] = 1.5
    check(impl, logits, 9, {"TILE": 32, "SHORT": 16, "LIST": listed})


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf, under the interpreter
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("top", [1, 5])
def test_the_best_token_comes_with_its_log_probability(impl: Implementation, top: int) -> None:
    logits = normal(6, 300, dtype=torch.float16) * 4
    logits[1, [70, 9, 40]] = 60.0
    logits[2, ::2] = -0.0
    logits[3] = -INF
    logits[4, [90, 33]] = INF
    logits[5, [80, 60]] = NAN
    best = torch.tensor([int(logits[0].float().argmax()), 9, int(logits[2].float().argmax()), 0, 33, 60])
    out = torch.full((7, 1 + 2 * top), UNTOUCHED, dtype=torch.float64, device=impl.device)
    token_ids, values = impl(greedy_logprobs)(logits.to(impl.device), out, {"TILE": 32})
    assert token_ids.tolist() == best.tolist()
    wanted = logits[torch.arange(6), best].float()
    torch.testing.assert_close(values.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
    expected = torch.cat([reference(logits, best, top), torch.full((1, 1 + 2 * top), UNTOUCHED).double()])
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", KERNELS)
def test_values_are_those_of_float64(impl: Implementation) -> None:
    logits, token_ids = normal(4, 200, dtype=torch.float16) * 6, torch.tensor([0, 199, 7, 50])
    exact = logits.double().log_softmax(-1)
    found = left(impl, logits, token_ids, 5, {"TILE": 64})
    torch.testing.assert_close(found[:, 0], exact[torch.arange(4), token_ids], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[:, 1:6], exact.topk(5).values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(exact.gather(1, found[:, 6:].long()), exact.topk(5).values, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf, under the interpreter
@pytest.mark.parametrize("impl", KERNELS)
def test_ties_and_what_is_no_finite_number(impl: Implementation) -> None:
    """The lowest id comes first among equals, and both zeros are equal."""
    logits = torch.zeros(7, 100)
    logits[1, [70, 9, 40]] = 4.0
    logits[2, ::2] = -0.0
    logits[3] = -INF
    logits[4, [90, 33]] = INF
    logits[5, [80, 60]] = NAN
    logits[6, 2:] = -INF
    check(impl, logits, 6, {"TILE": 32})
    found = left(impl, logits, torch.zeros(7, dtype=torch.int64), 3, {"TILE": 32})
    ids = found[:, 4:].long().tolist()
    assert ids[:3] == [[0, 1, 2], [9, 40, 70], [0, 1, 2]]
    assert ids[4:6] == [[33, 90, 0], [60, 80, 0]]
    assert found[5].isnan()[:4].all()


@pytest.mark.parametrize("impl", KERNELS)
def test_weights_are_rounded_to_the_nearest(impl: Implementation) -> None:
    """Of 0.6 units each: a likeliest token that is nearly certain shows what is left."""
    logits = torch.full((1, 401), math.log(0.6 * 2.0**-40))
    logits[0, 7] = 0.0
    check(impl, logits, 2, {"TILE": 64})
    (found,) = left(impl, logits, torch.tensor([7]), 1, {"TILE": 64}).tolist()
    assert found[0] == pytest.approx(-400 * 2.0**-40, rel=1e-3)


def test_wrong_arguments_are_named() -> None:
    good: dict[str, Any] = {
        "logits": torch.zeros(1, 4),
        "token_ids": torch.zeros(1, dtype=torch.int64),
        "out": torch.zeros(1, 41, dtype=torch.float64),
    }
    with pytest.raises(DeviceError, match="runtime"):
        logprobs(**good)
    with pytest.raises(DeviceError, match="runtime"):
        greedy_logprobs(good["logits"], good["out"])
    for name, bad in (
        ("logits", torch.zeros(1, 4, dtype=torch.int64)),
        ("token_ids", torch.zeros(2, dtype=torch.int64)),
        ("out", torch.zeros(1, 40, dtype=torch.float64)),
        ("out", torch.zeros(0, 41, dtype=torch.float64)),
        ("out", torch.zeros(1, 41)),
    ):
        with pytest.raises(KernelArgumentError, match=name):
            logprobs(**{**good, name: bad})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "vocab"), [(torch.bfloat16, 151_936), (torch.float16, 50_257), (torch.float32, 32_000)]
)
def test_real_vocabularies(dtype: torch.dtype, vocab: int) -> None:
    """As the twin has it on the GPU, where both take one ``exp`` and one ``log``; each row by itself."""
    logits = normal(64, vocab, dtype=dtype, device="cuda") * 3
    token_ids = torch.arange(64, device="cuda") * 997 % vocab
    out, expected = (torch.zeros(64, 41, dtype=torch.float64, device="cuda") for _ in range(2))
    logprobs(logits, token_ids, out)
    leave_logprobs_reference(logits, token_ids, expected)
    assert torch.equal(out, expected)
    best, values = greedy_logprobs(logits, out)
    leave_logprobs_reference(logits, logits.argmax(-1), expected)
    assert torch.equal(out, expected)
    assert torch.equal(best, logits.argmax(-1))
    assert torch.equal(values, logits.amax(-1).float())
    logprobs(logits, token_ids, out)
    alone = torch.zeros(1, 41, dtype=torch.float64, device="cuda")
    logprobs(logits[9:10], token_ids[9:10], alone)
    assert torch.equal(alone[0], out[9])
