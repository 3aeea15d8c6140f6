"""Definitions of ``ingot bench serving`` on given times: streams, figures, arrivals."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import pytest

from ingot.measure.bench.serving.http_answer import HttpAnswer, Stream, StreamError
from ingot.measure.bench.serving.serving_figures import serving_entry
from ingot.measure.bench.serving.serving_load import arrivals


def events(*values: object) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(value).encode() for value in values)


def text(piece: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": piece, "finish_reason": reason}]}


def delta(reason: str | None = None, **values: str) -> dict[str, Any]:
    return {"choices": [{"delta": values, "finish_reason": reason}]}


def test_times_follow_their_definitions() -> None:
    stream = Stream(sent=10.0)
    stream.feed(b": ping\n\n" + events(text("a"))[:9], 10.25)
    stream.feed(events(text("a"))[9:], 10.5)  # the rest of a chunk: now it is there
    stream.feed(events(text("b"), text("")), 11.5)  # half a character: a token without text
    stream.feed(events(text("c", None)), 13.5)
    stream.feed(events(text("", "length")), 14.5)  # the bare end is no token
    stream.feed(events({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}), 15.5)
    stream.feed(b"data: [DONE]\r\n\r\n", 16.5)
    answer = stream.answer(late_s=0.125)
    assert (answer.ttft_s, answer.e2e_s, answer.late_s) == (0.5, 4.5, 0.125)
    assert answer.gaps_s == (1.0, 0.0, 2.0)
    assert (answer.tokens, answer.counted, answer.prompt_tokens) == (5, False, 7)
    assert answer.tpot_s == (4.5 - 0.5) / (5 - 1)


def test_a_chat_begins_with_its_first_token() -> None:
    stream = Stream(sent=0.0)
    stream.feed(events(delta(role="assistant", content="")), 1.0)
    stream.feed(events(delta(reasoning_content="hm")), 2.0)
    stream.feed(events(delta(content="yes")), 3.0)
    stream.feed(events(delta("stop")), 4.0)
    answer = stream.answer(0.0)
    assert (answer.ttft_s, answer.gaps_s, answer.e2e_s) == (2.0, (1.0,), 4.0)
    assert (answer.tokens, answer.counted) == (2, True)


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    stream = Stream(sent=0.0)
    stream.feed(events(text("a", "length")), 1.0)
    assert stream.answer(0.0).tpot_s is None


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (events(text("a")), "broken stream"),
        (b"", "broken stream"),
        (events(text("", "stop")), "no tokens"),
        (events({"error": {"message": "full"}}), "error in the stream"),
        (events(["a"]), "error in the stream"),
        (b"data: {]\n\n", "not JSON"),
        (events({"choices": "abc"}), "not a chunk"),
        (events({"choices": [], "usage": 3}), "not a chunk"),
    ],
)
def test_streams_that_fail(sent: bytes, kind: str) -> None:
    stream = Stream(sent=0.0)
    with pytest.raises(StreamError) as caught:  # noqa: PT012
        stream.feed(sent, 1.0)
        stream.answer(0.0)
    assert caught.value.kind == kind


def test_figures_of_a_load_follow_their_definitions() -> None:
    answers = [
        HttpAnswer(0.0, 0.0, ttft_s=0.5, e2e_s=2.0, gaps_s=(0.5, 1.0), tokens=4, prompt_tokens=8),  # TPOT 0.5
        HttpAnswer(1.0, 0.5, ttft_s=1.0, e2e_s=1.0, tokens=1, prompt_tokens=9),
        HttpAnswer(2.0, 0.0, error="HTTP 429", message="slow down"),
    ]
    asked = [4, 2, 4]

    def good(**limits: float) -> float:
        return float(serving_entry(answers, asked, 4.0, limits)["good_per_s"])

    entry = serving_entry(answers, asked, 4.0, {})
    assert (entry["requests"], entry["completed"], entry["errors"]) == (3, 2, {"HTTP 429": 1})
    rates = ("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "in_flight", "good_per_s")
    assert [entry[name] for name in rates] == [2 / 4, 5 / 4, 17 / 4, 3 / 4, None]
    means = [entry[f"{name}_ms"]["mean"] for name in ("ttft", "tpot", "itl", "e2e")]
    assert means == [750, 500, 750, 1500]
    assert (entry["short"], entry["tokens_per_chunk"], entry["late_ms"]["most"]) == (1, 5 / 4, 500)
    assert (good(ttft=1000), good(ttft=999), good(tpot=499, e2e=2000), good(tpot=500, e2e=1999)) == (
        0.5,
        0.25,
        0.25,
        0.25,
    )


def test_arrivals_are_a_poisson_process_that_ends_on_time() -> None:
    times = arrivals(4000, 8.0, seed=3)
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    assert times[-1] == pytest.approx(500)
    assert fmean(gaps) == pytest.approx(1 / 8)
    assert stdev(gaps) == pytest.approx(1 / 8, rel=0.1)  # an exponential distribution's is its mean
    assert times == arrivals(4000, 8.0, seed=3) != arrivals(4000, 8.0, seed=4)
    assert arrivals(3, float("inf"), seed=0) == [0.0] * 3


def test_errors_travel_as_json() -> None:
    answer = HttpAnswer(10.0, 0.5, error="HTTP 429", message="slow down")
    assert answer.to_json(8.0) == {"sent_s": 2.0, "late_s": 0.5, "error": "HTTP 429", "told": "slow down"}
