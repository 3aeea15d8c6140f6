"""How `verify` judges a proof of something else, and the engine's state afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ingot import LLM
from ingot.engine.proof_file import GoldenCase, Metric, Proof, read_note, read_proof, read_when
from ingot.layers import mlp
from ingot.proof.verify_engine import verify
from tests.e2e.folders import contents
from tests.e2e.terminal import ingot
from tests.e2e.test_verify import kinds_and_names, off, rewrite


def claimed(engine: Path) -> tuple[Proof, GoldenCase]:
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


class TestStanding:
    def test_an_unproven_engine_says_so(
        self, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = tmp_path / "engine"
        assert ingot("build", checkpoint, "-o", engine, "--device", "cpu", "--no-proof").exit_code == 0
        assert {path.name for path in engine.iterdir()} == {
            "manifest.json",
            "plan.json",
            "weights.safetensors",
        }
        LLM(engine, "cpu")
        (record,) = caplog.records
        assert "unproven" in record.getMessage()
        assert verify(engine, "cpu").verdict == "unproven"
        assert ingot("verify", engine, "--device", "cpu").exit_code == 3
        assert "unproven" in ingot("inspect", engine).stdout

    def test_a_failed_verify_is_remembered_until_it_passes(
        self, engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        LLM(engine, "cpu")
        assert not caplog.records
        with monkeypatch.context() as patch:
            patch.setattr(mlp, "silu_mul", off(mlp.silu_mul, 0.01))
            assert verify(engine, "cpu").noted
        LLM(engine, "cpu")
        assert "failed its last" in caplog.text
        assert "layers.0.mlp" in caplog.text
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr("ingot.engine.proof_file.platform.node", lambda: "elsewhere")
            LLM(engine, "cpu")
        assert not caplog.records, "another machine's failure is not this one's"
        assert verify(engine, "cpu").verdict == "proven"
        LLM(engine, "cpu")
        assert not caplog.records
        note = read_note(engine)
        assert note is not None
        assert note.passed

    def test_a_folder_that_cannot_be_written(self, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        engine.chmod(0o555)
        if os.access(engine, os.W_OK):  # root may write anywhere

            def refused(*_: object, **__: object) -> None:
                raise PermissionError("no")

            monkeypatch.setattr(Path, "write_text", refused)
        before = contents(engine)
        found = verify(engine, "cpu")
        engine.chmod(0o755)
        assert (found.verdict, found.noted) == ("proven", False)
        assert contents(engine) == before

    def test_a_broken_note_is_none(self, engine: Path) -> None:
        for text in ("{", "[]", '{"verified": {"passed": false}}', "null"):
            (engine / "verify.json").write_text(text)
            assert (read_note(engine), read_when(engine)) == (None, None)
            assert LLM(engine, "cpu").logits([1]).shape == (1, 97)

    def test_verify_keeps_when_the_proof_was_made(self, engine: Path) -> None:
        made = read_when(engine)
        assert made is not None
        found = verify(engine, "cpu")
        assert (found.verdict, read_when(engine)) == ("proven", made)
        assert (found.proven_by or {})["time"] == made.time
        assert made.time in ingot("inspect", engine).stdout
        (engine / "verify.json").unlink()
        assert ingot("verify", engine, "--device", "cpu").exit_code == 0
        assert read_when(engine) is None
        assert "proven by" in ingot("inspect", engine).stdout

    def test_metrics_are_shown_and_judged(self, engine: Path) -> None:
        proof = read_proof(engine)
        assert proof is not None
        metric = Metric("perplexity", 7.5, 8.0, "lower", "wiki.jsonl", "00" * 32, "meta/llama", 7.4)
        rewrite(engine, proof, metrics=(metric,))
        shown = ingot("verify", engine, "--device", "cpu")
        assert shown.exit_code == 0
        assert "perplexity 7.5 (limit <= 8) on wiki.jsonl" in shown.stdout
        rewrite(engine, proof, metrics=(metric.replace(limit=7.0),))
        assert kinds_and_names(verify(engine, "cpu")) == [("metric", "perplexity")]
