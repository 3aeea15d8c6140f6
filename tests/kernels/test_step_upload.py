"""A step's numbers on their way to the device."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.rows.step_upload import upload_step
from tests.kernels.numerics import IMPLEMENTATIONS, Implementation


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("words", [1, 1023, 1024, 2500])
def test_every_word_and_nothing_else(impl: Implementation, words: int) -> None:
    pinned = impl.device == "cuda"
    host = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, pin_memory=pinned)
    room = torch.full((words + 5,), -77, dtype=torch.int32, device=impl.device)
    impl(upload_step)(host, room[:words])
    assert torch.equal(room[:words].cpu(), host)
    assert room[words:].tolist() == [-77] * 5


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_turn_comes_with_the_step(impl: Implementation) -> None:
    host = torch.arange(3000, dtype=torch.int32, pin_memory=impl.device == "cuda")
    out = torch.zeros(3000, dtype=torch.int32, device=impl.device)
    sides = torch.full((3,), 9, dtype=torch.int32, device=impl.device)
    for turn in (1, 0, 1):
        impl(upload_step)(host, out, sides[1:2], turn)
        assert sides.tolist() == [9, turn, 9]
    assert torch.equal(out.cpu(), host)


def test_refused() -> None:
    words = torch.zeros(8, dtype=torch.int32)
    for host in (words[:7], words.long()):
        with pytest.raises(IngotError, match="host has the wrong form"):
            upload_step(host, words)
    with pytest.raises(IngotError, match="out has the wrong dtype"):
        upload_step(words, words.long())
    with pytest.raises(IngotError, match="host is not contiguous"):
        upload_step(torch.zeros(16, dtype=torch.int32)[::2], words)
    with pytest.raises(IngotError, match="side has the wrong shape"):
        upload_step(words, words, words[:2], 1)
