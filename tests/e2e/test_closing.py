"""An LLM that is closed, and the progress of a call."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import pytest

import ingot
from ingot import LLM, SamplingParams
from ingot.errors import EngineError
from ingot.llm.outputs import Answer, Output, Piece

SHORT = SamplingParams(max_new_tokens=3, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=110, ignore_eos=True)


def test_a_block_closes_its_llm(tiny_engine: Path) -> None:
    with LLM(tiny_engine, device="cpu") as llm:
        assert len(llm.generate("hello", SHORT)[0].token_ids) == 3
        calls, model = llm._calls, weakref.ref(llm.engine.model)
    thread = calls.loop._thread
    assert not thread.is_alive()
    for use in (lambda: llm.generate("hello"), lambda: llm.engine, lambda: llm.stream("hello")):
        with pytest.raises(EngineError, match="this LLM is closed"):
            use()
    assert repr(llm) == "LLM(closed)"
    assert not hasattr(llm, "nothing")
    llm.close()
    del calls, thread, use
    gc.collect()
    assert model() is None  # its memory is free, while the LLM is not


def test_waiting_callers_get_an_error(tiny_engine: Path) -> None:
    llm = LLM(tiny_engine, device="cpu")
    errors: list[BaseException] = []
    stream = llm.stream("begun", LONG)
    next(stream)

    def wait() -> None:
        try:
            while True:  # until it is closed
                llm.generate("hello", LONG)
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    requests = llm._calls.loop._requests
    while len(requests._open) < 2:  # the stream's and the thread's
        time.sleep(0.001)
    llm.close()
    thread.join(30)
    assert not thread.is_alive()
    assert len(errors) == 1
    with pytest.raises(EngineError, match="closed"):
        list(stream)


def test_the_loop_takes_nothing_once_it_is_closed(tiny_engine: Path) -> None:
    llm = LLM(tiny_engine, device="cpu")
    loop = llm._calls.loop
    llm.close()
    with pytest.raises(EngineError, match="this LLM is closed"):
        loop.between_steps(lambda: None)


def test_an_error_in_the_block_closes_it_and_propagates(tiny_engine: Path) -> None:
    with pytest.raises(KeyError), LLM(tiny_engine, device="cpu") as llm:
        raise KeyError
    assert repr(llm) == "LLM(closed)"


@pytest.fixture(scope="module")
def llm(tiny_engine: Path) -> LLM:
    return LLM(tiny_engine, device="cpu")


@pytest.mark.parametrize("values", [{}, {"n": 2, "temperature": 1.0, "seed": 1}, {"num_beams": 2}], ids=str)
def test_progress_counts_the_prompts_that_are_answered(llm: LLM, values: dict[str, float]) -> None:
    params = [SHORT.replace(max_new_tokens=most, **values) for most in (5, 1, 3)]
    reported: list[tuple[int, int]] = []
    outputs = llm.generate(["a", "b", "c"], params, progress=lambda *counts: reported.append(counts))
    assert reported == [(1, 3), (2, 3), (3, 3)]
    assert outputs == llm.generate(["a", "b", "c"], params)


def test_a_prompt_counts_when_all_its_answers_have_ended(llm: LLM) -> None:
    """At different steps: every third id is an end."""
    params = SamplingParams(
        max_new_tokens=40, n=4, temperature=1.0, seed=1, stop_token_ids=tuple(range(0, 97, 3))
    )
    running: list[bool] = []
    (output,) = llm.generate(
        ["a"], params, progress=lambda *_: running.append(bool(llm.executor.active_ids()))
    )
    assert len({len(answer.token_ids) for answer in output.answers}) > 1
    assert running == [False]


def test_progress_that_fails_ends_its_call_alone(llm: LLM) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyError(done)

    with pytest.raises(KeyError, match="1"):
        llm.generate(["a", "b"], [SHORT, LONG], progress=stop)
    assert len(llm.generate("c", SHORT)[0].token_ids) == 3
    assert not llm.executor.active_ids()


def test_what_calls_return_can_be_imported() -> None:
    assert (ingot.Output, ingot.Piece, ingot.Answer) == (Output, Piece, Answer)
    assert set(ingot.__all__) >= {"Output", "Piece", "Answer"}
    assert all(getattr(ingot, name) is not None for name in ingot.__all__)
