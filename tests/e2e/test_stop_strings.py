"""A stop string ends the request itself, not the text alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ingot import LLM, SamplingParams
from tests.e2e.tiny import write_tiny
from tests.e2e.watch import check_idle, watch


def test_an_answer_that_met_its_stop_string_is_computed_no_further(tmp_path: Path) -> None:
    """Though another one beside it goes on."""
    llm = LLM(write_tiny(tmp_path / "tiny"), "cpu")
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    whole = llm.generate("hello", params)[0].text
    assert whole is not None
    stop = whole[3:6]
    with watch(llm) as seen:
        first, other = llm.generate(["hello", "another"], [params.replace(stop=(stop,)), params])
    assert (first.text, first.stopped_by) == (whole[: whole.index(stop)], stop)
    assert len(other.token_ids) == 60
    steps = Counter(share.request_id for step in seen.steps for share in step)
    few, many = sorted(steps.values())
    assert few <= len(first.token_ids) + 1 < many
    check_idle(llm)
