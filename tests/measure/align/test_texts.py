"""What of a prompt is compared, and whose ids both sides run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.engine.reference_run import Arithmetic
from ingot.errors import RequestError
from ingot.measure.align.align_target import AlignCase, TextCheck, make_case
from ingot.measure.align.diagnosis.id_differences import explain_ids
from ingot.measure.align.first_divergence import Divergence
from ingot.measure.align.original import noise_of

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "  How\n are  you"}]
Messages = Sequence[Mapping[str, Any]]


class Side:
    """A tokenizer and a chat format in one; ``shift`` sets its ids and texts apart from another's."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def encode(self, text: str) -> list[int]:
        return [self.shift + len(text)]

    def prompt_text(self, messages: Messages, tokenizer: Any) -> str:
        return f"{self.shift}: {messages[-1]['content']}"

    def prompt_ids(self, messages: Messages, tokenizer: Any) -> list[int]:
        return [self.shift, len(messages)]


class Original(Side):
    """The same as an original's tokenizer has it."""

    def ids(self, text: str) -> list[int]:
        return self.encode(text)

    def chat(self, messages: Messages) -> tuple[str, list[int]]:
        return self.prompt_text(messages, self), self.prompt_ids(messages, self)


def engine(tokenizer: Side | None, chat: Side | None) -> Any:
    return SimpleNamespace(tokenizer=tokenizer, chat=chat)


@pytest.mark.parametrize("shift", [100, 200])
def test_both_sides_run_on_the_original_s_ids(shift: int) -> None:
    """Of a text and of a chat, whether the engine's are the same or not."""
    ours, original = engine(Side(100), Side(100)), (Original(shift), "theirs")
    case = make_case(ours, "Hello", original)
    assert case == AlignCase("Hello", [shift + 5], (TextCheck("token ids", [shift + 5], [105], "theirs"),))
    case = make_case(ours, MESSAGES, original)
    rendered = TextCheck("rendered prompt", f"{shift}:   How\n are  you", "100:   How\n are  you", "theirs")
    assert case.title == "How are you"
    assert case.ids == [shift, 2]
    assert case.checks == (rendered, TextCheck("token ids", [shift, 2], [100, 2], "theirs"))
    assert [check.is_bad for check in case.checks] == [shift != 100] * 2
    assert [check.first for check in case.checks] == ([0, 0] if shift != 100 else [None, None])


def test_without_an_original_nothing_is_compared() -> None:
    ours = engine(Side(100), Side(100))
    assert make_case(ours, "Hello", None) == AlignCase("Hello", [105])
    assert make_case(ours, MESSAGES, None) == AlignCase("How are you", [100, 2])
    assert make_case(ours, [5, 7], (Original(9), "theirs")) == AlignCase("5 7", [5, 7])
    silent: Any = SimpleNamespace(chat=lambda messages: None)
    assert make_case(ours, MESSAGES, (silent, "theirs")) == AlignCase("How are you", [100, 2])


def test_a_prompt_that_the_engine_cannot_read_is_refused() -> None:
    for text, prompt in ((engine(None, None), "Hello"), (engine(Side(1), None), MESSAGES)):
        with pytest.raises(RequestError):
            make_case(text, prompt, (Original(9), "theirs"))


@pytest.mark.parametrize("length", [60, 61])
def test_a_long_title_is_cut(length: int) -> None:
    title = make_case(engine(Side(1), None), "x" * length, None).title
    assert title == ("x" * 60 if length == 60 else "x" * 59 + "…")


@pytest.mark.parametrize(
    ("stage", "expected", "got", "says"),
    [
        (
            "greedy",
            [5, 6, 2],
            [5, 6, 2, 9, 8, 4],
            ["after 3 tokens", "token 2 (the last", "token 9 (the next"],
        ),
        ("greedy", [], [7, 8], ["after 0 tokens", "the first token (the last", "token 7 (the next"]),
        ("greedy", [5, 6, 2, 9], [5, 6], ["after 2 tokens", "token 2 ends a text"]),
        ("ids", [3, 4, 5, 7, 8], [7, 8], ["lacks 3 tokens at its beginning", "[3, 4, 5]"]),
        ("ids", [7, 8], [3, 4, 7, 8], ["has 2 tokens at its beginning", "does not have: [3, 4]"]),
        ("ids", [7, 8], [7, 8, 3, 4, 5], ["has 3 tokens at its end", "does not have: [3, 4, 5]"]),
        ("ids", [7, 8, 3, 4], [7, 8], ["lacks 2 tokens at its end", "original has: [3, 4]"]),
        ("ids", [7, 8], [7, 8, 3], ["ends with a token 3"]),
        ("ids", [7, 8, 3], [7, 8], ["lacks the token 3 with which the original ends"]),
        ("ids", [1, 7], [2, 7], ["begins with token 2, the original's with 1"]),
        ("ids", [1, 7], [7], ["lacks the token 1 (bos)"]),
    ],
)
def test_tokens_and_counts_of_ids_that_differ(
    stage: str, expected: list[int], got: list[int], says: list[str]
) -> None:
    rows = torch.arange(len(expected))
    theirs, ours = (torch.tensor(ids, dtype=torch.int64) for ids in (expected, got))
    (found,) = explain_ids(Divergence(stage, None, 0, rows, rows, theirs, ours, 0.0))
    assert [one for one in says if one not in found.text] == [], found.text
    longest = max(len(expected), len(got))
    same = sum(a == b for a, b in zip(expected, got, strict=False))
    assert (found.before, found.after) == (pytest.approx(1 - same / longest), 0.0)


@pytest.mark.parametrize("flips", [True, False])
def test_noise_is_of_the_dtype_and_turns_the_closest_calls(flips: bool) -> None:
    """Where activations are rounded, in fp32 as in 16 bits."""
    assert noise_of(torch.float32, flips=flips) == Arithmetic(torch.float64, None, flips)
    for dtype in (torch.float16, torch.bfloat16):
        assert noise_of(dtype, flips=flips) == Arithmetic(torch.float32, dtype, flips)
