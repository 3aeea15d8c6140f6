"""The cost of text held back during a stream does not grow with its length.

CPU time of a text four times as long: four times as much where work is linear, sixteen where it is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from ingot.text.parsing.thinking import ThinkingSplitter
from ingot.text.parsing.tool_calls import ToolCallParser

SIZE = 8_000
Feed = Callable[[int], object]


def thoughts(start: str, piece: str) -> Feed:
    def feed(count: int) -> None:
        splitter = ThinkingSplitter()
        for text in (start, *[piece] * count, "</think>"):
            splitter.feed(text)
        splitter.flush()

    return feed


def calls(start: str, piece: str) -> Feed:
    def feed(count: int) -> None:
        parser = ToolCallParser()
        for text in (start, *[piece] * count):
            parser.feed(text)
        parser.flush()

    return feed


def at_once(text: str) -> Feed:
    def feed(count: int) -> None:
        parser = ToolCallParser()
        parser.feed(text * count)
        parser.flush()

    return feed


CASES = {
    "before thoughts": thoughts("", "\n"),
    "in thoughts": thoughts("<think>Hm", "\n"),
    "first in thoughts": thoughts("<think>", "\n"),
    "before a call": calls("Hi", "\n"),
    "in a call": calls("<tool_call>", "\n"),
    "after a call": calls('<tool_call>{"name": "f"}', "\n"),
    "a long name": calls('<tool_call>{"name": "', "f"),
    "arguments before the name": calls('<tool_call>{"arguments": "', "a"),
    "torn arguments": calls('<tool_call>{"arguments": <', "a"),
    "many calls": at_once('<tool_call>{"name": "f"}'),
    "what is no call": at_once("<tool_call>"),
    "end tags": at_once('<tool_call>{"name": "f"}</tool_call>'),
}


@pytest.mark.slow
@pytest.mark.stays("before thoughts", "in a call", "arguments before the name", "end tags")
@pytest.mark.parametrize("feed", CASES.values(), ids=CASES)
def test_the_work_grows_with_the_text_alone(feed: Feed) -> None:
    """Eight times the text takes eight times the time, or 64 times: 24 is as far from both. The least of some
    runs, since other processes take their share of the caches; the long ones end where one is quick enough.
    """
    few = min(seconds(feed, SIZE) for _ in range(4))
    assert any(seconds(feed, 8 * SIZE) < 24 * few for _ in range(4))


def seconds(feed: Feed, count: int) -> float:
    start = time.process_time()
    feed(count)
    return time.process_time() - start
