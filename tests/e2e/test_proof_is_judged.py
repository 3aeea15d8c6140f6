"""What `verify` makes of a proof that tells of other tokens, likelihoods or rows than the engine computes."""

from __future__ import annotations

from pathlib import Path

from ingot import LLM
from ingot.engine.proof import Case, Proof, read_proof
from ingot.llm.verify import verify
from tests.e2e.test_verify import kinds_and_names, rewrite


def claimed(engine: Path) -> tuple[Proof, Case]:
    proof = read_proof(engine)
    assert proof is not None
    return proof, proof.claims.cases[0]


def test_another_token_by_a_wide_margin(engine: Path) -> None:
    """The proof is sure of a token that the engine does not choose."""
    proof, case = claimed(engine)
    step = case.steps[2]
    ids = (step.top_ids[1], step.top_ids[0], *step.top_ids[2:])
    sure = step.replace(top_ids=ids, top_logits=(step.top_logits[0] + 50, *step.top_logits[1:]))
    changed = case.replace(
        new_ids=(*case.new_ids[:2], ids[0], *case.new_ids[3:]),
        steps=(*case.steps[:2], sure, *case.steps[3:]),
    )
    rewrite(engine, proof, cases=(changed, *proof.claims.cases[1:]))
    found = verify(engine, "cpu")
    assert ("ids", case.name) in kinds_and_names(found)
    assert not any("a tie within the noise" in note for note in found.notes)


def test_a_likely_token_that_the_engine_finds_unlikely(engine: Path) -> None:
    """It is not even among the engine's own likeliest."""
    proof, case = claimed(engine)
    unlikely = int(LLM(engine, "cpu").logits(list(case.prompt_ids))[-1].argmin())
    step = case.steps[0]
    first = step.replace(top_ids=(*step.top_ids[:-1], unlikely))
    rewrite(engine, proof, cases=(case.replace(steps=(first, *case.steps[1:])), *proof.claims.cases[1:]))
    found = verify(engine, "cpu")
    assert kinds_and_names(found) == [("logits", case.name)]
    assert f"the log-probability of {unlikely} " in found.failures[0].message


def test_rows_are_counted_as_equal_by_their_digests(engine: Path) -> None:
    """A row that rounds to other digits is near, and not equal."""
    proof, case = claimed(engine)
    assert verify(engine, "cpu").equal_rows == verify(engine, "cpu").num_rows
    other = case.rows[1].replace(digest="00" * 32)
    rows = (case.rows[0], other, *case.rows[2:])
    rewrite(engine, proof, cases=(case.replace(rows=rows), *proof.claims.cases[1:]))
    found = verify(engine, "cpu")
    assert found.verdict == "proven"
    assert found.equal_rows == found.num_rows - 1
