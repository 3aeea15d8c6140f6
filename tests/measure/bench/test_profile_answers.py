"""``ingot profile --without … --data``: answers with our kernels and with PyTorch's operators, and ROUGE.

A CPU has no kernels: ``rms_norm`` takes one here that adds 0.5 to what PyTorch's operators compute.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rouge_score.rouge_scorer import RougeScorer

from ingot import LLM
from ingot.cli.measure.profile import ProfileFlags, read_answers
from ingot.errors import ConfigError, DeviceError
from ingot.kernels.norm import rms_norm as norm_room
from ingot.kernels.norm.rms_norm import rms_norm_reference
from ingot.measure.bench.profile import profile_session
from ingot.measure.bench.profile.profile_report import profile_tables
from ingot.measure.bench.profile.profile_session import Profile, profile_side
from ingot.measure.bench.profile.replaced import replaced
from ingot.measure.side.ingot_side import IngotSide
from ingot.measure.side.side_spec import SideSpec
from ingot.measure.side.text_table import plain
from ingot.runtime.executor import Executor, Update
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.measure.bench.conftest import MADE_UP
from tests.measure.evaluate.conftest import write

pytestmark = pytest.mark.usefixtures("weights_as_stored")

NEW, LONG = 6, 48
PROMPT = "The quick brown fox jumps over the lazy dog. " * 2  # of several blocks
QUESTIONS: tuple[dict[str, Any], ...] = ({"prompt": "Fire"}, {"prompt": "Zulu time"})
RECORDS = (
    *(question | {"answer": "the fox"} for question in QUESTIONS),
    {"article": "A fire broke out in a bakery.", "highlights": "Fire."},
)
Progress = Callable[[str, int, int], None]


@pytest.fixture(autouse=True)
def ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_session, "measure_ceiling", lambda device, dtype: MADE_UP)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny", seed=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "asked.jsonl", *RECORDS)


@pytest.fixture
def side(tiny: Path) -> Iterator[IngotSide]:
    with IngotSide(SideSpec(path=str(tiny), device="cpu", max_batch_size=2)) as opened:
        yield opened


def _install(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x: Any, weight: Any, eps: Any, residual: Any, bias: Any, ending: Any, tiles: Any) -> Any:
        normed, total = rms_norm_reference(x, weight, eps, residual, ending)
        return normed + 0.5, total

    monkeypatch.setattr(norm_room, "runs_on_gpu", lambda x: True)
    monkeypatch.setattr(norm_room, "launch_norm", kernel)


class Tokens:
    """Answers one prompt; keeps what a side was like when it was asked."""

    def __init__(self) -> None:
        self.reused: list[int] = []  # of every token
        self.ahead: list[bool] = []

    def facts(self) -> dict[str, Any]:
        return {"file": "made up"}

    def of(self, side: IngotSide, progress: Progress) -> list[int]:
        executor = side.llm.executor
        assert not executor.has_work
        self.ahead.append(executor.run_ahead)

        def step() -> list[Update]:
            updates = Executor.step(executor)
            self.reused.extend(update.num_reused for update in updates)
            return updates

        with replaced(executor, "step", step):
            (found,) = side.llm.generate(PROMPT, max_new_tokens=NEW, temperature=0.0, ignore_eos=True)
        progress("ingot", 1, 1)
        return found.token_ids

    def compared(self, own: list[int], other: list[int]) -> dict[str, Any]:
        return {"own": own, "other": other}


def test_answers_are_those_of_kernels_and_of_operators(
    side: IngotSide, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
    operators = LLM(tiny, "cpu").generate(PROMPT, **values)[0].token_ids
    _install(monkeypatch)
    kernels = LLM(tiny, "cpu").generate(PROMPT, **values)[0].token_ids
    assert kernels != operators
    answers, said = Tokens(), list[str]()
    ahead = side.llm.executor.run_ahead = True
    names = ("rope", "rms_norm", "attention")
    wanted = Profile(batch=2, prompt_tokens=5, without=names, repeats=1)
    result, _ = profile_side(side, wanted, None, said.append, answers)
    rope, norm, attention = (entry["answers"] for entry in result["without"])
    assert rope == attention == {"own": kernels, "other": kernels}
    assert norm == {"own": kernels, "other": operators}
    assert result["data"] == {"file": "made up"}
    assert answers.ahead == [ahead] * (1 + len(names))  # our kernels answer once
    assert answers.reused == [0] * NEW * (1 + len(names))
    assert "without rms_norm: answer 1 of 1" in said
    assert side.llm.generate(PROMPT, **values)[0].token_ids == kernels


def test_answers_of_fused_kernels_are_compared_by_fused_alone(
    side: IngotSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one token fuses the norm into a product, so that no answer of ``rms_norm`` may have it."""
    _install(monkeypatch)
    forward, seen = side.llm.executor.runner.forward, list[bool]()
    monkeypatch.setattr(Tokens, "of", lambda self, side, progress: seen.append(forward.fused))
    monkeypatch.setattr(Tokens, "compared", lambda self, own, other: {})
    forward.fused = True
    wanted = Profile(prompt_tokens=5, without=("rms_norm", "fused", "attention"), repeats=1)
    profile_side(side, wanted, answers=Tokens())
    assert seen == [False, False, True, False, False]  # own, rms_norm; own, fused; attention
    assert forward.fused


def test_operators_that_only_prompts_lack(side: IngotSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's thread fails, and the error is of the operation."""
    _install(monkeypatch)
    real = norm_room.rms_norm_reference

    def lacking(x: Any, *rest: Any) -> Any:
        if len(x) > 5:
            raise NotImplementedError("not implemented for prompts")
        return real(x, *rest)

    monkeypatch.setattr(norm_room, "rms_norm_reference", lacking)
    wanted = Profile(prompt_tokens=5, without=("rms_norm",), repeats=1)
    with pytest.raises(DeviceError, match="PyTorch has no operators for rms_norm"):
        profile_side(side, wanted, answers=Tokens())


def flags(tiny: Path, data: Path, **changes: Any) -> ProfileFlags:
    return ProfileFlags(
        engine=str(tiny), data=data, **{"without": ["rms_norm"], "max_new_tokens": NEW} | changes
    )


def _first_answers(tiny: Path, data: Path, file: Path) -> list[dict[str, Any]]:
    """Items of ``ingot eval summarize`` on a CPU: what PyTorch's operators answer to the first two."""
    words = ("--data", data, "--limit", 2, "--max-new-tokens", LONG, "--device", "cpu", "--items", file)
    assert ingot("eval", "summarize", tiny, *words).exit_code == 0
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rouge_is_that_of_eval(
    side: IngotSide, tiny: Path, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Operators answer as an engine on a CPU does; scores are rouge-score's own of the answers."""
    spec = SideSpec(path=str(tiny), device="cpu", max_batch_size=2)
    answers = [line["ingot"]["answer"] for line in _first_answers(tiny, data, tmp_path / "items.jsonl")]
    right = [f"{answer} and more" for answer in answers]
    records = [record | {"answer": text} for record, text in zip(QUESTIONS, right, strict=True)]
    data = write(tmp_path / "scored.jsonl", *records, {"prompt": "not asked", "answer": "x"})
    scorer = RougeScorer(["rouge1"])
    expected = [100 * scorer.score(a, b)["rouge1"].fmeasure for a, b in zip(right, answers, strict=True)]
    assert min(expected) > 1
    _install(monkeypatch)
    read = read_answers(flags(tiny, data, limit=2, max_new_tokens=LONG))
    assert read is not None
    wanted = Profile(batch=2, prompt_tokens=5, without=("rms_norm", "rope"), repeats=1)
    result, _ = profile_side(side, wanted, answers=read(spec))
    norm, rope = (entry["answers"] for entry in result["without"])
    assert norm["without"]["rouge1"] == pytest.approx(sum(expected) / 2)
    assert norm["with"] == rope["with"] == rope["without"]
    assert (norm["answers"], rope["answers"], rope["same_tokens"]) == (2, 2, 2)
    assert norm["same_tokens"] < 2
    assert result["data"]["limit"] == result["data"]["counts"]["cases"] == 2
    assert result["data"]["settings"]["max_new_tokens"] == LONG
    assert norm["with"]["rouge1"] != pytest.approx(norm["without"]["rouge1"])
    result["without"][0]["answers"] |= {"same_tokens": 1, "with": dict.fromkeys(norm["with"], 12.5)}
    record = {"machine": {"gpu": "x"}, "sides": [{"name": "a", "facts": {}, "results": [result]}]}
    table = profile_tables(record)[2]
    assert plain(table).startswith("ROUGE of 2 answers with and without each kernel, F1")
    scores = ("ROUGE-1", "1 without", "ROUGE-2", "2 without", "ROUGE-L", "L without")
    assert table.columns == ("without", *scores, "same answers")
    assert [row[0] for row in table.rows] == ["rms_norm", "rope"]
    assert (table.rows[0][1], table.rows[0][-1], table.rows[1][-1]) == ("12.50", "50.0 %", "100.0 %")


def test_all_items_or_the_first(tiny: Path, data: Path, tmp_path: Path) -> None:
    spec = SideSpec(path=str(tiny), device="cpu")
    bad = write(tmp_path / "bad.jsonl", {"text": "no question"}, *RECORDS)
    for found, count in (
        (flags(tiny, data), 3),
        (flags(tiny, data, limit=1), 1),
        (flags(tiny, bad, skip_bad=True), 3),
    ):
        read = read_answers(found)
        assert read is not None
        assert read(spec).facts()["counts"]["cases"] == count
    read = read_answers(flags(tiny, bad))
    assert read is not None
    with pytest.raises(ConfigError, match="no question") as caught:
        read(spec)
    assert caught.value.field == "skip_bad"
    assert read_answers(ProfileFlags(engine=str(tiny))) is None


@pytest.mark.parametrize(
    ("words", "flag", "what"),
    [
        (("--data", "asked.jsonl"), "--data", "needs --without"),
        (("--limit", 3), "--limit", "needs --data"),
        (("--max-new-tokens", 3, "--without", "rope"), "--max-new-tokens", "needs --data"),
        (("--skip-bad",), "--skip-bad", "needs --data"),
        (("--data", "nowhere.jsonl", "--without", "rope"), "--without", "no kernel to leave out"),
        (("--data", "nowhere.jsonl", "--without", "flash"), "--without", "unknown operation"),
    ],
)
def test_what_it_refuses(tiny: Path, words: tuple[object, ...], flag: str, what: str) -> None:
    result = ingot("profile", tiny, *words, "--device", "cpu")
    assert result.exit_code == 2
    text = " ".join(result.stderr.replace("│", " ").split())
    assert what in text
    assert flag in text


def test_random_weights_answer_nothing(tiny: Path, data: Path) -> None:
    words = ("--random-weights", tiny / "config.json", "--without", "rope", "--data", data)
    result = ingot("profile", *words, "--device", "cpu")
    assert result.exit_code == 2
    assert "random weights answer nothing" in result.stderr
