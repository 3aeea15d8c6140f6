"""Masks of tokens against their definition, and the kernel against its twin, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.kernels.kernel_checks import KernelArgumentError
from ingot.kernels.sampling.masked_tokens import mask_tokens, mask_tokens_reference
from tests.kernels.numerics import IMPLEMENTATIONS, Implementation, normal

INF, NAN = float("inf"), float("nan")


def allowed_and_packed(count: int, vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens masks allow, [count, vocab] bool, and the masks; beyond the vocabulary any bit is set."""
    generator = torch.Generator().manual_seed(seed)
    words = -(-vocab // 32)
    bits = torch.rand(count, words * 32, generator=generator) < 0.4
    packed = torch.zeros(count, words, dtype=torch.int64)
    for bit in range(32):
        packed |= bits[:, bit::32].long() << bit
    return bits[:, :vocab], torch.where(packed < 2**31, packed, packed - 2**32).int()


def definition(rows: torch.Tensor, allowed: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Scores in float64, a token at a time."""
    out = rows.double()
    for row, place in enumerate(places):
        if place >= 0:
            for token, may in enumerate(allowed[place].tolist()):
                out[row, token] = out[row, token].item() if may else -INF
    return out


def run(
    impl: Implementation,
    rows: torch.Tensor,
    masks: torch.Tensor,
    places: list[int],
    tiles: dict[str, int] | None = None,
) -> torch.Tensor:
    out = rows.to(impl.device, copy=True)
    sent = torch.tensor(places, dtype=torch.int64, device=impl.device)
    impl(mask_tokens)(out, masks.to(impl.device), sent, tiles)
    return out.cpu()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("places", "vocab"),
    [([], 5), ([0], 1), ([2, -1, 0, 2], 97), ([-1, -1], 40), ([1], 32), ([3, -1, 1], 600)],
)
@pytest.mark.parametrize("tiles", [{"TILE": 32, "PROGRAMS": 4}, {"TILE": 1024, "PROGRAMS": 1}])
def test_rows_follow_the_definition(
    impl: Implementation, places: list[int], vocab: int, tiles: dict[str, int]
) -> None:
    rows = normal(len(places), vocab, dtype=torch.float32) * 4
    allowed, masks = allowed_and_packed(4, vocab, vocab)
    found = run(impl, rows, masks, places, tiles)
    assert torch.equal(found.double(), definition(rows, allowed, places))
    reference = rows.clone()
    mask_tokens_reference(reference, masks, torch.tensor(places, dtype=torch.int64))
    assert torch.equal(found, reference)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_is_allowed_keeps_its_bits(impl: Implementation) -> None:
    """NaN, infinities and zeros stay where they are allowed, and nothing of a row without a mask changes."""
    rows = torch.tensor([[NAN, INF, -INF, -0.0, NAN, INF]] * 2)
    found = run(impl, rows, torch.tensor([[0b001111]], dtype=torch.int32), [0, -1])
    expected = rows.clone()
    expected[0, 4:] = -INF
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_wrong_arguments_are_named() -> None:
    good: dict[str, Any] = {
        "rows": torch.zeros(2, 40),
        "masks": torch.zeros(3, 2, dtype=torch.int32),
        "places": torch.zeros(2, dtype=torch.int64),
    }
    mask_tokens(**good)
    for name, bad in (
        ("rows", torch.zeros(2, 40, dtype=torch.float16)),
        ("rows", torch.zeros(2, 80)[:, :40]),
        ("masks", torch.zeros(3, 3, dtype=torch.int32)),
        ("masks", torch.zeros(3, 2, dtype=torch.int64)),
        ("masks", torch.zeros(3, 4, dtype=torch.int32)[:, :2]),
        ("places", torch.zeros(3, dtype=torch.int64)),
        ("places", torch.zeros(2)),
    ):
        with pytest.raises(KernelArgumentError, match=name):
            mask_tokens(**{**good, name: bad})


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [151_936, 50_257])
def test_real_vocabularies(vocab: int) -> None:
    places = [-1 if row % 5 == 2 else (7 * row) % 16 for row in range(64)]
    rows, (_, masks) = normal(64, vocab, dtype=torch.float32), allowed_and_packed(16, vocab, 1)
    found = run(Implementation("cuda"), rows, masks, places)
    mask_tokens_reference(rows, masks, torch.tensor(places))
    assert torch.equal(found, rows)
