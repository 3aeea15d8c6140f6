"""A stop string ends the request itself, not the text alone."""

from __future__ import annotations

from pathlib import Path

from ingot import LLM, SamplingParams
from tests.e2e.tiny import write_tiny


def test_an_answer_that_met_its_stop_string_is_computed_no_further(tmp_path: Path) -> None:
    llm = LLM(write_tiny(tmp_path / "tiny"), "cpu")
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    whole = llm.generate("hello", params)[0].text
    assert whole is not None
    stop = whole[3:6]
    (answer,) = llm.generate("hello", params.replace(stop=(stop,)))
    assert (answer.text, answer.stopped_by) == (whole[: whole.index(stop)], stop)
    assert not llm.executor.active_ids()
    assert not llm.executor.scheduler.has_work
