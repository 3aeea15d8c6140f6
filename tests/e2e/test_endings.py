"""Requests that end in unusual ways do end, and nothing waits forever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.errors import RequestError

POCKET = Path(__file__).resolve().parents[2] / "models" / "pocket-chat"
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(POCKET, device="cpu", max_seq_len=256, max_batch_size=8)


def idle(llm: LLM) -> bool:
    blocks = llm.executor.blocks
    return not llm.executor.has_work and blocks.num_free == blocks.num_blocks


def test_a_beam_search_without_a_hypothesis_ends(llm: LLM) -> None:
    every = list(range(llm.engine.model.config.vocab_size))
    params = SamplingParams(max_new_tokens=4, min_new_tokens=3, num_beams=2, stop_token_ids=every)
    output = llm.generate("Once", params)[0]
    assert output.finish_reason == "abort"
    assert idle(llm)


def test_a_beam_search_with_fewer_hypotheses_than_asked_for_ends(llm: LLM) -> None:
    most = [t for t in range(llm.engine.model.config.vocab_size) if t != 300]
    params = SamplingParams(max_new_tokens=1, num_beams=4, n=4, stop_token_ids=most, ignore_eos=True)
    output = llm.generate("Once", params)[0]
    assert 1 <= len(output.answers) <= 4
    assert idle(llm)


def test_a_stop_string_ends_only_its_own_answer(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=5, n=4, ignore_eos=True)
    whole = llm.generate("Once upon a time", params)[0].answers
    stop = whole[0].text[8:11]
    assert any(stop not in a.text for a in whole)
    stopped = llm.generate("Once upon a time", params.replace(stop=(stop,)))[0].answers
    for before, after in zip(whole, stopped, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert after.finish_reason == ("stop" if stop in before.text else "length")
    assert idle(llm)


def test_a_failed_step_reaches_all_streams(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream("Once", SamplingParams(max_new_tokens=50, ignore_eos=True))
    next(stream)
    run = llm.executor.runner.run

    def broken(step: Any) -> torch.Tensor:
        raise RuntimeError("a planted failure")

    monkeypatch.setattr(llm.executor.runner, "run", broken)
    with pytest.raises(RuntimeError, match="planted"):
        llm.generate("Two")
    monkeypatch.setattr(llm.executor.runner, "run", run)
    with pytest.raises(RuntimeError, match="planted"):
        list(stream)
    assert idle(llm)
    assert llm.chat([{"role": "user", "content": "What is 12 + 30?"}]).text == "12 + 30 = 42."


def test_an_interrupt_while_requests_are_queued_leaves_none(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = llm.executor.add
    calls = []

    def interrupted(*values: Any, **named: Any) -> None:
        calls.append(values)
        if len(calls) == 2:
            raise KeyboardInterrupt
        add(*values, **named)

    monkeypatch.setattr(llm.executor, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"])
    assert idle(llm)


def test_a_tap_gets_every_token_of_a_cached_prompt(llm: LLM) -> None:
    ids = [5] * 200
    shapes = []
    for _ in range(2):
        with llm.tap("layers.0") as seen:
            llm.generate([ids], SamplingParams(max_new_tokens=1))
        shapes.append(seen["layers.0"].shape[0])
    assert shapes == [200, 200]


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_the_last_update_counts_cached_tokens(llm: LLM, reason: str) -> None:
    every = tuple(range(llm.engine.model.config.vocab_size)) if reason == "stop" else ()
    params = SamplingParams(max_new_tokens=1, stop_token_ids=every)
    found = []
    for _ in range(2):
        llm.executor.add("r", [len(reason)] * 200, params)
        while llm.executor.has_work:
            found += llm.executor.step()
    assert [(one.finish_reason, one.num_reused) for one in found] == [(reason, 0), (reason, 192)]


@pytest.mark.parametrize("patterns", [(), ("rotary",), ("layers",)])
def test_a_tap_on_what_is_never_called_is_refused(llm: LLM, patterns: tuple[str, ...]) -> None:
    with pytest.raises(RequestError), llm.tap(*patterns):
        pass


def test_a_request_for_all_logits_runs_in_small_chunks(llm: LLM) -> None:
    wide = LLM(POCKET, device="cpu", max_seq_len=600, max_batch_size=2)
    ids = list(range(3, 603))
    assert torch.allclose(wide.logits(ids)[:200], llm.logits(ids[:200]), atol=1e-3)


def test_numpy_values_are_numbers() -> None:
    params = SamplingParams(max_new_tokens=np.int64(3), temperature=np.float32(0.5), top_k=np.int32(2))
    assert (params.max_new_tokens, params.temperature, params.top_k) == (3, 0.5, 2)
    assert type(params.max_new_tokens) is int


def test_a_conversation_is_a_prompt_too(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    outputs = llm.generate([messages, "Once"], SamplingParams(max_new_tokens=12))
    assert outputs[0].text == llm.chat(messages, SamplingParams(max_new_tokens=12)).text
    with pytest.raises(RequestError, match="list of messages"):
        llm.chat("Hello")


@pytest.mark.slow
def test_any_file_may_be_a_chat_template(tmp_path: Path) -> None:
    template = tmp_path / "mine.txt"
    template.write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    engine = build(POCKET, tmp_path / "engine", chat_template=str(template))
    template.unlink()
    moved = LLM(engine, device="cpu")
    assert moved.chat_ids([{"role": "user", "content": "a"}])[0] == 2801
    assert str(tmp_path) not in (engine / "manifest.json").read_text()
