"""Which dollar signs of an answer are formulas."""

from __future__ import annotations

import time

import pytest

from ingot.adapters.web.page_math import LEFT, RIGHT, marked, unmarked
from ingot.adapters.web.page_messages import Values, body


@pytest.mark.parametrize(
    "text",
    [
        "[x^2]", "is [x^2], and [y]", "([a_1])", "[\\frac{1}{2}]", "[x]\n[y]", "[5]", "[a \\$ b]", "**[x]**",
    ],
)  # fmt: skip
def test_formulas(text: str) -> None:
    plain = text.replace("[", "$").replace("]", "$")
    assert marked(plain) == text.replace("[", LEFT).replace("]", RIGHT)
    assert unmarked(marked(plain)) == plain


@pytest.mark.parametrize(
    "text",
    [
        "costs $5 and $6.", "$5-$6", "$ x $", "$x $", "a$x$", "\\$x$", "$x\\$", "$x\ny$", "$", "$$", "$$x$$",
        "`$x$`", "```\n$x$\n```", "```\n$x$", "~~~\n$x$\n~~~", "$$a $x$ b$$", "US$5 or AU$7", "$6; `$z$`",
    ],
)  # fmt: skip
def test_no_formulas(text: str) -> None:
    assert marked(text) == text


def test_a_long_answer_takes_no_time() -> None:
    start = time.process_time()
    for text in ("$" * 50_000, "$a " * 50_000, "`" * 50_000, "$\\" * 50_000, "$a" + "\\a" * 50_000):
        marked(text)
    assert time.process_time() - start < 2


def test_the_server_is_sent_what_it_said() -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": marked("It is $x^2$.")}]
    found = body("m", "", history, "And?", Values())
    assert found["messages"][1]["content"] == "It is $x^2$."
