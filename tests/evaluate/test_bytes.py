"""Bits per byte: the bytes are those of the tokens that count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluate.test_eval import record, write

TEXTS = ("A text of bytes, é and 漢字 among them, long enough for windows.", "b", "Another.")


@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 16), (64, 1)])
def test_with_a_token_a_byte_both_are_as_many(
    chatter: Path, window: int, stride: int, tmp_path: Path
) -> None:
    data = write(tmp_path / "texts.jsonl", *({"text": text} for text in TEXTS))
    counts = record("perplexity", chatter, "--data", data, "--window", window, "--stride", stride)["counts"]
    assert counts["tokens"] == sum(len(text.encode()) for text in TEXTS if len(text) > 1)
    assert 0 < counts["counted_bytes"] == counts["counted_tokens"] < counts["tokens"]
