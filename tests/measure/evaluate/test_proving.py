"""``ingot build --prove``: metrics in an engine's proof, and engines that are not good enough."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from ingot import LLM, build
from ingot.engine.proof_file import Metric, read_proof
from ingot.errors import BuildError, ConfigError
from ingot.measure.evaluate import proof_metrics as measuring
from ingot.measure.evaluate.planned_metrics import plan_proving
from ingot.measure.evaluate.proof_metrics import keep, measure
from ingot.proof.verify_engine import verify
from tests.e2e.folders import contents
from tests.e2e.terminal import ingot
from tests.measure.evaluate.conftest import write, write_ids
from tests.tiny_models import random_ids, save_model, tiny_config


def prove(checkpoint: Path, target: Path, *words: object) -> Any:
    return ingot("build", checkpoint, "-o", target, "--device", "cpu", "--prove", *words)


def proved(checkpoint: Path, target: Path, *words: object) -> dict[str, Metric]:
    """The metrics of a build that proves its engine."""
    result = prove(checkpoint, target, *words)
    assert result.exit_code == 0, result.stderr
    return metrics_of(target)


def metrics_of(engine: Path) -> dict[str, Metric]:
    proof = read_proof(engine)
    assert proof is not None
    return {metric.name: metric for metric in proof.claims.metrics}


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts of token ids."""
    path = tmp_path_factory.mktemp("data") / "ids.jsonl"
    return write_ids(path, random_ids(60, seed=5), random_ids(20, seed=6))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Hello"}], "answer": "no such thing"},
        {"prompt": "Ab", "answers": ["x", "y"]},
    ]
    return write(tmp_path_factory.mktemp("data") / "questions.jsonl", *records)


@pytest.fixture(scope="module")
def articles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    article = {"article": "A fire broke out in a bakery. " * 5, "highlights": "Fire.\nBakery."}
    return write(tmp_path_factory.mktemp("data") / "articles.jsonl", article)


class TestWhatIsMeasured:
    def test_text_beside_huggingface(self, llama: Path, ids: Path, tmp_path: Path) -> None:
        result = prove(llama, tmp_path / "engine", ids, "--against", "hf")
        assert result.exit_code == 0, result.stderr
        found = metrics_of(tmp_path / "engine")
        assert list(found) == ["perplexity", "perplexity_delta", "kl_mean", "top1_disagreement"]
        assert [metric.met for metric in found.values()] == [None, True, True, True]
        assert [metric.limit for metric in found.values()] == [None, 1.0, 0.01, 5.0]
        first = found["perplexity"]
        assert (first.data, first.items, first.against, first.dtype) == ("ids.jsonl", 2, "hf", "fp32")
        assert first.against_value == pytest.approx(first.value, rel=1e-5)
        evaluated = ingot("eval", "perplexity", tmp_path / "engine", "--data", ids, "--json")
        reported = json.loads(evaluated.stdout)
        assert first.value == pytest.approx(reported["sides"][0]["metrics"]["perplexity"], rel=1e-8)
        assert first.data_sha256 == reported["data"]["sha256"]
        for name in found:
            assert name in result.stdout

    def test_the_proof_is_the_same_again(self, llama: Path, ids: Path, tmp_path: Path) -> None:
        for name in "ab":
            assert prove(llama, tmp_path / name, ids, "--against", "hf").exit_code == 0
        assert contents(tmp_path / "a") == contents(tmp_path / "b")

    def test_text_alone_is_recorded_and_judged_by_nobody(
        self, llama: Path, ids: Path, tmp_path: Path
    ) -> None:
        engine = tmp_path / "engine"
        (metric,) = proved(llama, engine, ids, "--prove-samples", 1).values()
        assert (metric.name, metric.limit, metric.met, metric.items) == ("perplexity", None, None, 1)
        shown = ingot("verify", engine, "--device", "cpu")
        assert shown.exit_code == 0
        assert "recorded  perplexity" in shown.stdout
        assert "limit <=" not in shown.stdout
        assert "recorded      perplexity" in ingot("inspect", engine).stdout

    def test_questions(self, chatter: Path, questions: Path, tmp_path: Path) -> None:
        found = proved(chatter, tmp_path / "engine", questions, "--against", "hf")
        assert list(found) == ["exact", "contains", "exact_delta", "contains_delta"]
        assert found["exact"].better == "higher"
        assert found["exact_delta"].met

    def test_articles(self, chatter: Path, articles: Path, tmp_path: Path) -> None:
        pytest.importorskip("rouge_score")
        assert list(proved(chatter, tmp_path / "engine", articles)) == [
            "rouge1",
            "rouge2",
            "rougeL",
            "rougeLsum",
        ]

    def test_another_evaluation_than_the_shapes_own(
        self, chatter: Path, questions: Path, tmp_path: Path
    ) -> None:
        words = ("--against", chatter, "--prove-with", "divergence", "--against-dtype", "bf16")
        result = prove(chatter, tmp_path / "engine", questions, *words)
        assert result.exit_code == 0, result.stderr
        assert f"in fp32 against {chatter.name} in bf16" in result.stdout
        found = metrics_of(tmp_path / "engine")
        assert list(found) == ["kl_mean", "top1_disagreement"]
        assert found["kl_mean"].against == chatter.name

    def test_the_engine_that_is_replaced(self, llama: Path, ids: Path, tmp_path: Path) -> None:
        engine = build(llama, tmp_path / "engine", device="cpu")
        found = proved(llama, engine, ids, "--against", engine, "--force", "--dtype", "bf16")["kl_mean"]
        assert found.value > 0, "bf16 weights"
        assert str(found.against).startswith("engine (")


def test_a_bar_on_a_terminal(llama: Path, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    for module in ("terminal.step_list", "build"):
        console = Console(file=shown, force_terminal=True, width=80)
        monkeypatch.setattr(f"ingot.cli.{module}.stderr", lambda console=console: console)
    result = prove(llama, tmp_path / "engine", ids)
    assert result.exit_code == 0
    assert "2/2" in shown.getvalue()
    assert "2/2" not in result.stdout


class TestThresholds:
    def test_another_model_is_refused_and_the_older_engine_stays(
        self, llama: Path, other_llama: Path, ids: Path, tmp_path: Path
    ) -> None:
        engine = build(llama, tmp_path / "engine", device="cpu")
        before = contents(engine)
        for target, words in ((engine, ["--force"]), (tmp_path / "new" / "deep", [])):
            result = prove(llama, target, ids, "--against", other_llama, *words)
            assert (result.exit_code, "MISSED" in result.stdout) == (1, True)
            assert "misses a threshold" in result.stderr
            assert "kl_mean" in result.stderr
            assert contents(engine) == before
            assert [p.name for p in tmp_path.iterdir()] == ["engine"]

    def test_what_is_good_enough_is_ones_own_to_say(
        self, llama: Path, other_llama: Path, ids: Path, tmp_path: Path
    ) -> None:
        worst = ("perplexity_delta=1e6", "kl_mean=1e3", "top1_disagreement=100", "perplexity=1e9")
        words = [word for one in worst for word in ("--threshold", one)]
        found = proved(llama, tmp_path / "engine", ids, "--against", other_llama, *words)
        assert [metric.met for metric in found.values()] == [True] * 4
        assert verify(tmp_path / "engine", "cpu", note=False).verdict == "proven"

    @pytest.mark.parametrize(
        ("verb", "worst", "reported"),
        [("perplexity", "perplexity=1.5", "is above 1.5"), ("answers", "exact=50", "exact 0 is below 50")],
    )
    def test_a_value_below_its_own(
        self, chatter: Path, questions: Path, tmp_path: Path, verb: str, worst: str, reported: str
    ) -> None:
        result = prove(chatter, tmp_path / "e", questions, "--prove-with", verb, "--threshold", worst)
        assert result.exit_code == 1
        assert reported in result.stderr
        assert not (tmp_path / "e").exists()

    @pytest.mark.parametrize(
        ("words", "reported"),
        [
            ((), "another --dtype"),
            (("w4a16",), "--method gptq with --calib or a smaller --group-size or --quant w8a16"),
            (("w4a16", "--group-size", 0), "--method gptq with --calib or --group-size 128 or --quant w8a16"),
            (("w4a16", "--group-size", 32), "--method gptq with --calib or --quant w8a16"),
            (("w4a8", "--group-size", 64), "--method gptq with --calib or --quant w8a16"),
            (("w4a16", "--method", "gptq", "--calib", "IDS"), "a smaller --group-size or --quant w8a16"),
            (("w8a8",), "--method smoothquant with --calib or --quant w8a16"),
            (("w8a16", "--quant-head"), "--method gptq with --calib or no --quant or no --quant-head"),
        ],
    )
    def test_what_helps_is_reported(
        self, llama: Path, ids: Path, tmp_path: Path, words: tuple[object, ...], reported: str
    ) -> None:
        quant = ["--quant", *(ids if word == "IDS" else word for word in words)] if words else []
        limit = ("--prove-with", "perplexity", "--threshold", "perplexity=0")
        result = prove(llama, tmp_path / "e", ids, *limit, *quant)
        assert result.exit_code == 1, result.output
        assert f"fix: {reported}; relax --threshold NAME=X" in " ".join(result.stderr.split())

    def test_no_number_is_refused(self, llama: Path, tmp_path: Path) -> None:
        engine = build(llama, tmp_path / "engine", device="cpu")
        before = contents(engine)
        with pytest.raises(BuildError, match="a metric is not finite"):
            keep(engine, [Metric("perplexity", math.inf, None, "lower", "a", "00")])
        assert contents(engine) == before


class TestNothingIsLeft:
    def test_an_interrupt_while_measuring(
        self, llama: Path, ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = build(llama, tmp_path / "engine", device="cpu")
        before = contents(engine)

        def interrupted(*_: Any, **__: Any) -> None:
            assert len(list(tmp_path.iterdir())) == 3, (
                "the new engine and its lock are there, beside the old one"
            )
            raise KeyboardInterrupt

        monkeypatch.setattr(measuring, "perplexity", interrupted)
        assert prove(llama, engine, ids, "--force").exit_code == 130
        assert contents(engine) == before
        assert [p.name for p in tmp_path.iterdir()] == ["engine"]

    def test_what_can_only_fail_on_the_engine(self, chatter: Path, tmp_path: Path) -> None:
        long = write(tmp_path / "long.jsonl", {"prompt": "long " * 100, "answer": "a"})
        result = prove(chatter, tmp_path / "engine", long)
        assert result.exit_code == 2
        assert "no item fits" in result.stderr
        assert "--prove" in result.stderr
        assert [p.name for p in tmp_path.iterdir()] == ["long.jsonl"]

    def test_a_model_that_gives_no_numbers(self, ids: Path, tmp_path: Path) -> None:
        save_model(tiny_config("llama"), tmp_path / "checkpoint")
        path = tmp_path / "checkpoint" / "model.safetensors"
        weights = load_file(path)
        weights["model.norm.weight"][0] = 3e38
        save_file(weights, path, metadata={"format": "pt"})
        result = prove(tmp_path / "checkpoint", tmp_path / "engine", ids)
        assert result.exit_code == 1
        assert "no golden cases" in result.stderr
        assert not (tmp_path / "engine").exists()

    def test_the_hook_sees_a_whole_engine(self, llama: Path, ids: Path, tmp_path: Path) -> None:
        seen = []

        def finish(folder: Path) -> None:
            seen.append(LLM(folder, "cpu").logits([1]).shape)
            keep(folder, measure(folder, plan_proving(ids, llama), "cpu"))

        engine = build(llama, tmp_path / "engine", device="cpu", finish=finish)
        assert seen == [(1, 97)]
        assert list(metrics_of(engine)) == ["perplexity"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--prove", "none.jsonl"), "cannot be read"),
        (("--prove", "IDS", "--no-proof"), "--no-proof"),
        (("--against", "hf"), "needs --prove"),
        (("--threshold", "kl_mean=1"), "needs --prove"),
        (("--prove-samples", "3"), "needs --prove"),
        (("--prove", "IDS", "--against", "no/such/model"), "no/such/model"),
        (("--prove", "IDS", "--against", "hf:"), "hf:"),
        (("--prove", "IDS", "--against", "CHATTER", "--against-dtype", "fp8"), "fp8"),
        (("--prove", "IDS", "--against-dtype", "fp32"), "needs --against"),
        (("--prove", "IDS", "--threshold", "kl_mean=1"), "perplexity=X"),
        (("--prove", "IDS", "--threshold", "perplexity"), "must be 0 or more"),
        (("--prove", "IDS", "--threshold", "perplexity=nan"), "must be 0 or more"),
        (("--prove", "IDS", "--prove-with", "divergence"), "--against"),
        (("--prove", "IDS", "--prove-with", "bleu"), "bleu"),
        (("--prove", "IDS", "--prove-with", "answers"), "no question"),
        (("--prove", "QUESTIONS"), "tokenizer"),
        (("--prove", "MIXED"), "mixes several kinds of items"),
        (("--prove", "BAD"), "line 2"),
        (("--prove", "TEXT", "--prove-samples", "2"), "--prove-samples"),
    ],
)
def test_misuse_exits_with_2_before_anything_is_built(
    words: tuple[str, ...], says: str, llama: Path, chatter: Path, ids: Path, questions: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("Some text.")
    paths = {
        "IDS": ids,
        "CHATTER": chatter,
        "QUESTIONS": questions,
        "MIXED": write(tmp_path / "mixed.jsonl", {"text": "a"}, {"prompt": "a", "answer": "b"}),
        "BAD": write(tmp_path / "bad.jsonl", {"token_ids": [1, 2]}, {"token_ids": []}),
        "TEXT": tmp_path / "text.txt",
    }
    before = sorted(tmp_path.iterdir())
    given = (paths.get(word, word) for word in words)
    result = ingot("build", llama, "-o", tmp_path / "engine", "--device", "cpu", *given)
    assert result.exit_code == 2, result.stderr
    assert says in " ".join(result.stderr.split())
    assert sorted(tmp_path.iterdir()) == before


def test_messages_need_a_chat_template(data: Path, questions: Path) -> None:
    checkpoint = data / "golden" / "llama_aidreams260K" / "hf"
    with pytest.raises(ConfigError, match="chat template"):
        plan_proving(questions, checkpoint)
    assert plan_proving(questions, checkpoint, chat_template="chatml").verbs == ("answers",)


def test_diff_tells_metrics_and_does_not_count_them(llama: Path, ids: Path, tmp_path: Path) -> None:
    assert prove(llama, tmp_path / "a", ids).exit_code == 0
    build(llama, tmp_path / "b", device="cpu")
    result = ingot("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0
    assert result.stdout.startswith("equal")
    assert "perplexity on ids.jsonl" in result.stdout
    reported = json.loads(ingot("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert reported["equal"]
    assert reported["metrics"][0]["right"] == "(absent)"
