"""A conversation in a file, as editors save it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.cli.options.prompt_sources import one_prompt

MESSAGES = [{"role": "user", "content": "Hé"}]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_with_and_without_a_byte_order_mark(encoding: str, wrapped: bool, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    text = json.dumps({"messages": MESSAGES} if wrapped else MESSAGES, ensure_ascii=False)
    file.write_text(text, encoding=encoding)
    assert one_prompt(str(file), None, None) == MESSAGES


def test_ids_are_integers() -> None:
    assert one_prompt(None, None, " 3 15\n7") == [3, 15, 7]
