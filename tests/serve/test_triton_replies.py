"""Replies to Triton over a slow channel."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ingot.adapters.triton.triton_replies import Part, Replies
from ingot.serve.api_errors import ApiError
from tests.serve.client import wait_for


class Slow:
    """A channel whose ``send`` waits until it is let go."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.errors: list[ApiError] = []
        self.go = threading.Event()
        self.entered = threading.Event()
        self.cancelled = self.broken = False

    def send(self, part: Part) -> None:
        self.entered.set()
        assert self.go.wait(60)
        if self.broken:
            raise RuntimeError("Triton has failed")
        self.parts.append(part)

    def fail(self, error: ApiError) -> None:
        self.errors.append(error)

    def is_cancelled(self) -> bool:
        return self.cancelled


@pytest.fixture
def replies() -> Iterator[Replies]:
    found = Replies()
    yield found
    found.close()  # a second time in some


def test_tokens_that_arrive_during_a_send_form_one_response(replies: Replies) -> None:
    channel = Slow()
    reply = replies.open(channel)
    reply.add("a", 1)
    assert channel.entered.wait(60)
    reply.add("b", 1)
    reply.add("", 1)
    reply.add("c", 2, "stop")
    channel.go.set()
    wait_for("the last response", lambda: reply.closed)
    wait_for("both", lambda: len(channel.parts) == 2)
    assert channel.parts == [Part("a", 1), Part("bc", 4, finish_reason="stop")]


def test_text_that_waits_goes_out_before_an_error(replies: Replies) -> None:
    channel = Slow()
    reply = replies.open(channel)
    reply.add("a", 1)
    assert channel.entered.wait(60)
    reply.add("b", 1)
    reply.fail(ApiError(500, "the engine has ended"))
    channel.go.set()
    wait_for("the error", lambda: channel.errors)
    assert [part.text for part in channel.parts] == ["a", "b"]
    assert str(channel.errors[0]) == "the engine has ended"


def test_an_error_after_the_end_is_nothing(replies: Replies) -> None:
    channel = Slow()
    reply = replies.open(channel)
    reply.add("a", 1, "stop")
    reply.fail(ApiError(500, "the engine has ended"))
    channel.go.set()
    wait_for("the last response", lambda: channel.parts)
    replies.close()
    assert channel.errors == []


def test_a_token_without_text_makes_no_response(replies: Replies) -> None:
    channel = Slow()
    channel.go.set()
    reply = replies.open(channel)
    reply.add("", 1)
    reply.add("é", 1)
    reply.add("", 0, "length")
    wait_for("the end", lambda: bool(channel.parts) and channel.parts[-1].finish_reason == "length")
    assert channel.parts[0].text == "é"
    assert sum(part.num_tokens for part in channel.parts) == 2


@pytest.mark.parametrize("way", ["cancelled", "broken"])
def test_a_cancelled_or_unsendable_request_is_reported_once(replies: Replies, way: str) -> None:
    channel = Slow()
    channel.go.set()
    setattr(channel, way, True)
    reply = replies.open(channel)
    reported: list[str] = []
    reply.on_cancel(lambda: reported.append(way))
    reply.stepped()
    reply.add("a", 1)
    wait_for("it to be told", lambda: reported)
    reply.add("b", 1)
    reply.fail(ApiError(499, "the request was cancelled"))
    wait_for("the end", lambda: channel.errors or reply.closed)
    assert reported == [way]
