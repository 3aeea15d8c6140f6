"""Text comes whole or in pieces, with the trained LLaMA and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot import LLM
from tests.e2e.mixed import GREEDY, TEXTS, Make
from tests.e2e.watch import check_idle


class TestText:
    """With the trained LLaMA and its tokenizer."""

    @pytest.fixture
    def llm(self, golden: Path, make: Make) -> LLM:
        return make(golden / "llama_aidreams260K" / "hf")

    @pytest.mark.parametrize("stop", [(), ("refine",), ("zzz", ", a")])
    def test_stream_joined_is_generate(self, llm: LLM, stop: tuple[str, ...]) -> None:
        params = GREEDY.replace(max_new_tokens=50, stop=stop, logprobs=2)
        for prompt in TEXTS:
            output = llm.generate(prompt, params)[0]
            pieces = list(llm.stream(prompt, params))
            assert "".join(piece.text for piece in pieces) == output.text
            assert [t for piece in pieces for t in piece.token_ids] == output.token_ids
            assert [p for piece in pieces for p in piece.logprobs] == output.logprobs
            assert [p.finish_reason for p in pieces if p.finish_reason] == [output.finish_reason]
            assert pieces[-1].finish_reason is not None
            assert len(pieces) > 5
            assert not any(s in (output.text or "") for s in stop)
            check_idle(llm)

    def test_a_stop_string_ends_the_answer_where_it_begins(self, llm: LLM) -> None:
        whole = llm.generate("I dream of", GREEDY.replace(max_new_tokens=50))[0]
        answer = llm.generate("I dream of", GREEDY.replace(max_new_tokens=50, stop=("refine",)))[0].answers[0]
        assert whole.text is not None
        assert answer.text == whole.text[: whole.text.index("refine")]
        assert (answer.finish_reason, answer.stopped_by) == ("stop", "refine")

    def test_text_held_back_for_a_stop_string_comes_at_the_end(self, llm: LLM) -> None:
        whole = llm.generate("I dream of", GREEDY)[0].text
        assert whole is not None
        params = GREEDY.replace(stop=(whole[-4:] + "never",))
        assert llm.generate("I dream of", params)[0].text == whole
        assert "".join(piece.text for piece in llm.stream("I dream of", params)) == whole

    def test_streams_and_calls_side_by_side(self, llm: LLM) -> None:
        params = GREEDY.replace(max_new_tokens=30)
        expected = [llm.generate(p, params)[0].text for p in TEXTS]
        streams = [llm.stream(p, params) for p in TEXTS[:2]]
        texts = [next(s).text for s in streams]
        assert [o.text for o in llm.generate(list(TEXTS[2:]), params)] == expected[2:]
        before = llm.logits([5, 6, 7])
        assert before.shape[0] == 3
        for pieces in zip(*streams, strict=True):
            texts = [text + piece.text for text, piece in zip(texts, pieces, strict=True)]
        assert texts == expected[:2]
        check_idle(llm)

    def test_a_closed_or_unread_stream_leaves_nothing(self, llm: LLM) -> None:
        stream = llm.stream("I dream of", GREEDY)
        stream.close()  # type: ignore[attr-defined]
        check_idle(llm)
        stream = llm.stream("I dream of", GREEDY.replace(n=3, temperature=1.0))
        next(stream)
        assert llm.executor.has_work
        stream.close()  # type: ignore[attr-defined]
        check_idle(llm)
