"""What an executor accepts, at each of its limits and one beyond."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from ingot.config.sampling_params import SamplingParams
from ingot.config.transcript_rules import TranscriptRules
from ingot.errors import RequestError
from ingot.runtime import setup
from ingot.runtime.admission import Admission
from ingot.runtime.rehearsal import checked_kinds, checked_sizes
from ingot.runtime.scheduling.inputs import Content, RequestInput
from ingot.runtime.scheduling.kv_cache import BlockManager
from tests.unit.fake_matcher import FakeMatcher

VOCAB, BATCH, LONGEST, BLOCK = 23, 4, 12, 4


def admission(blocks: int = 99) -> Admission:
    """The offset of the rotary table is the prompt's length times a hundred."""
    return Admission(VOCAB, BATCH, LONGEST, BlockManager(blocks, BLOCK), lambda length: 100 * length)


def given(digest: bytes, tokens: int = 0) -> RequestInput:
    content: Future[Content] = Future()
    content.set_result(Content(torch.zeros(1), digest))
    return RequestInput(content, positions=3, place=1, tokens=tokens)


def test_a_prompt_may_be_as_long_as_leaves_one_new_token() -> None:
    taken = admission()
    assert taken.check([1] * (LONGEST - 1), SamplingParams()) == [1] * (LONGEST - 1)
    assert taken.checked_ids([1] * LONGEST, room=0) == [1] * LONGEST
    for length, room, most in (
        (LONGEST, 1, LONGEST - 1),
        (LONGEST + 1, 0, LONGEST),
        (LONGEST - 2, 3, LONGEST - 3),
    ):
        with pytest.raises(RequestError, match=f"too long.*{length} tokens.*<= {most} tokens"):
            taken.checked_ids([1] * length, room=room)
    with pytest.raises(RequestError, match="the prompt is empty"):
        taken.checked_ids([], room=0)


@pytest.mark.parametrize("odd", [VOCAB, -1, True, 1.0, None])
def test_ids_are_of_the_vocabulary(odd: Any) -> None:
    taken = admission()
    assert taken.check([0, VOCAB - 1], SamplingParams(logit_bias={0: 1.0, VOCAB - 1: 1.0})) == [0, VOCAB - 1]
    with pytest.raises(RequestError, match=rf"\[{odd}\].*0 to {VOCAB - 1}"):
        taken.check([1, odd, 2], SamplingParams())
    with pytest.raises(RequestError, match=rf"logit_bias.*\[{VOCAB}\]"):
        taken.check([1], SamplingParams(logit_bias={1: 1.0, VOCAB: 1.0}))


@pytest.mark.parametrize(
    ("asked", "total"), [(None, LONGEST), (1, 6), (7, LONGEST), (8, LONGEST), (99, LONGEST)]
)
def test_an_answer_ends_at_what_was_asked_or_at_the_engine_s_limit(asked: int | None, total: int) -> None:
    params = SamplingParams(max_new_tokens=asked)
    inputs, matcher = [given(b"a")], FakeMatcher(VOCAB, 1)
    one = admission().request("r#2", [1] * 5, params, 2, inputs, matcher, "salt")  # type: ignore[arg-type]
    assert (one.request_id, one.prompt_ids, one.max_total_tokens) == ("r#2", [1] * 5, total)
    assert (one.rope_offset, one.sample_index, one.inputs, one.probe) == (500, 2, tuple(inputs), None)
    assert one.matcher is not None
    assert one.matcher is not matcher, "each answer has its own state"


def test_keys_differ_where_the_cache_s_content_does() -> None:
    """By the rotary offset and by inputs without placeholders; and by salt, so that nothing is shared."""

    def key(length: int = 5, *inputs: RequestInput, salt: str = "") -> bytes:
        return admission().request("r", [1] * length, SamplingParams(), 0, inputs, salt=salt).cache_key

    keys = [
        key(), key(6), key(5, given(b"a")), key(5, given(b"b")), key(5, given(b"a"), given(b"b")),
        key(salt="x"), key(salt="y"), key(5, given(b"a"), salt="x"), key(6, salt="x"),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key(5, given(b"a")) == key(5, given(b"a"))
    assert key(salt="x") == key(salt="x")
    assert key(5, given(b"a", tokens=3)) == key(), "the blocks with its placeholders have its digest"


def beams(width: int, new: int | None = 3, **values: Any) -> SamplingParams:
    return SamplingParams(num_beams=width, max_new_tokens=new, **values)


@pytest.mark.parametrize(
    ("length", "new", "worst"), [(5, 3, 2), (5, 4, 3), (5, None, 3), (5, 99, 3), (1, 1, 1)]
)
def test_beams_need_room_for_all_of_them_twice(length: int, new: int | None, worst: int) -> None:
    """While they are replaced; no longer than the engine's longest."""
    for width in (2, BATCH):
        admission(2 * width * worst).check([1] * length, beams(width, new))
        with pytest.raises(RequestError, match=f"do not fit.*{2 * width * worst} blocks"):
            admission(2 * width * worst - 1).check([1] * length, beams(width, new))
    admission(1).check([1] * length, beams(1, new))


def test_at_most_as_many_beams_as_the_batch() -> None:
    admission().check([1], beams(BATCH, logprobs=0))
    with pytest.raises(RequestError, match=f"{BATCH + 1}.*<= {BATCH}"):
        admission().check([1], beams(BATCH + 1))
    with pytest.raises(RequestError, match="log-probabilities of its own tokens alone"):
        admission().check([1], beams(2, logprobs=1))
    admission().check([1], beams(1, logprobs=1))


@pytest.mark.parametrize(
    "field", ["end", "no_speech", "first_timestamp", "suppressed", "begin_suppressed", "detect"]
)
def test_a_transcript_s_ids_are_of_the_vocabulary_and_its_frame_within_the_prompt(field: str) -> None:
    def rules(largest: int, framed: int = 0) -> SamplingParams:
        value: Any = largest if field in ("end", "no_speech", "first_timestamp") else (1, largest)
        ids = {"end": 2, "no_speech": 3, "first_timestamp": 4, field: value}
        return SamplingParams(transcript=TranscriptRules(**ids, framed=framed), logprobs=0)

    taken = admission()
    assert taken.check([1, 2, 3], rules(VOCAB - 1, framed=2)) == [1, 2, 3]
    with pytest.raises(RequestError, match=f"{VOCAB}.*below {VOCAB}"):
        taken.check([1, 2, 3], rules(VOCAB))
    with pytest.raises(RequestError, match=r"lacks the token that starts it.*3 tokens, 3 of them"):
        taken.check([1, 2, 3], rules(VOCAB - 1, framed=3))


@pytest.mark.parametrize("framed", [0, 2, 4])
def test_the_probe_follows_the_token_that_starts_the_transcript(framed: int) -> None:
    rules = TranscriptRules(2, 3, 4, framed=framed)
    params = SamplingParams(transcript=rules, logprobs=0)
    probe = admission().request("r", [1] * 5, params, 0).probe
    assert probe is not None
    assert (probe.place, probe.token) == (4 - framed, 3)
    silent = admission().request("r", [1] * 5, params.replace(logprobs=None), 0)
    assert silent.probe is None


def test_what_may_be_warmed_up() -> None:
    assert checked_sizes(None, 3) == [1, 2, 3]
    assert checked_sizes([3, 1], 3) == [3, 1]
    for odd in ([0], [4], [1, 4]):
        with pytest.raises(RequestError, match="1 to 3"):
            checked_sizes(odd, 3)
    assert checked_kinds(None, ("a", "b")) == ["a", "b"]
    assert checked_kinds(["b"], ("a", "b")) == ["b"]
    with pytest.raises(RequestError, match="a, b"):
        checked_kinds(["b", "c"], ("a", "b"))


def test_a_gpu_s_room_is_what_is_free_less_all_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the card stays free; loaded weights no longer count."""
    free, total, activations, bill = 7_000, 10_000, 600, {"reserve": 250, "encoders": 130}
    asked: list[Any] = []

    class Bill:
        def of(self, name: str) -> int:
            return bill[name]

    def ledger(setting: Any, **given: Any) -> Bill:
        asked.append(given)
        return Bill()

    monkeypatch.setattr(setup, "ledger", ledger)
    monkeypatch.setattr(setup, "measured_activations", lambda *_: activations)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
    config = type("Config", (), {"memory_fraction": 0.9})
    setting: Any = type("Setting", (), {"dtype": "fp16", "runtime": config, "max_batch_size": 3})
    nothing: Any = None
    found = setup._gpu_room(nothing, torch.device("cpu"), setting)
    assert found == (7_000 - 1_000 - 600 - 250 - 130, 600)
    assert asked == [{"weights": {}}]
