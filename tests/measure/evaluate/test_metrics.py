"""Scores, windows and limits against values computed by hand and by the libraries."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.errors import ConfigError, DeviceError
from ingot.measure.evaluate.eval_record import ScoredSide, agreement, mean_deltas
from ingot.measure.evaluate.exact_match import contains, exact, normalised
from ingot.measure.evaluate.loss_limits import Limit, judge, limits_for, standard_error
from ingot.measure.evaluate.perplexity import TextWindow, windows
from ingot.measure.evaluate.rouge import KINDS, Rouge, sentences
from ingot.measure.evaluate.token_divergence import compare_logits, divergence_metrics
from tests.support.shown_errors import raises_shown


def f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall)


def test_rouge_of_words_by_hand() -> None:
    found = Rouge().score("the cat sat", ["the cat lay down"])
    assert (found["rouge1"].precision, found["rouge1"].recall) == (pytest.approx(200 / 3), 50)
    assert found["rouge1"].f1 == pytest.approx(100 * f1(2 / 3, 1 / 2))
    assert (found["rouge2"].precision, found["rouge2"].recall) == (50, pytest.approx(100 / 3))
    assert found["rougeL"].f1 == pytest.approx(100 * f1(2 / 3, 1 / 2))


def test_rouge_of_chinese_counts_characters() -> None:
    found = Rouge().score("猫坐在2号垫子上。", ["猫躺在2号垫子"])
    # 猫 坐 在 2 号 垫 子 上 against 猫 躺 在 2 号 垫 子: six in common, in order; pairs 在2 2号 号垫 垫子
    assert found["rouge1"].precision == pytest.approx(100 * 6 / 8)
    assert found["rouge1"].recall == pytest.approx(100 * 6 / 7)
    assert found["rouge2"].f1 == pytest.approx(100 * f1(4 / 7, 4 / 6))
    assert Rouge("en").score("猫坐在垫子上", ["猫坐在垫子上"])["rouge1"].f1 == 0


def test_rouge_takes_the_best_reference_and_an_empty_answer() -> None:
    found = Rouge().score("a b c", ["x y z", "a b c"])
    assert all(found[kind].f1 == pytest.approx(100) for kind in KINDS)
    assert all(score.f1 == 0 for score in Rouge().score("", ["a b"]).values())


def test_rouge_takes_the_reference_of_highest_f1() -> None:
    """Not of highest recall, which one word has, nor of highest precision, which a long text has."""
    long = "a b c d e f " + " ".join("uvwxyz" * 5)
    found = Rouge().score("a b c d e f", ["a", "a b c d u v w", long])
    assert found["rouge1"].f1 == pytest.approx(100 * f1(4 / 6, 4 / 7))


@pytest.mark.parametrize(("stemmer", "column"), [(True, "stem"), (False, "nostem")])
def test_rouge_agrees_with_recorded_scores(golden: Path, stemmer: bool, column: str) -> None:
    rouge = Rouge("en", stemmer=stemmer)
    pairs = json.loads((golden / "text_metrics" / "rouge.json").read_text())["pairs"]
    assert pairs
    for pair in pairs:
        found = rouge.score(pair["prediction"], [pair["reference"]])
        own_lines = all("\n" in pair[name].strip() for name in ("prediction", "reference"))
        for kind in KINDS if own_lines else KINDS[:3]:  # Lsum: of texts whose sentences are lines already
            score = found[kind]
            reported = [score.precision / 100, score.recall / 100, score.f1 / 100]
            assert reported == pytest.approx(pair[column][kind], abs=1e-8)


def test_lsum_counts_sentences_apart() -> None:
    assert sentences("One is here. Two!  三。四？") == "One is here.\nTwo!\n三。\n四？"
    assert sentences(" own lines. here\nand here ") == "own lines. here\nand here"
    found = Rouge().score("b c. a b.", ["a b. b c."])
    assert found["rougeLsum"].f1 == pytest.approx(100)
    assert found["rougeL"].f1 == pytest.approx(50)


def test_rouge_names_its_package_and_its_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="auto"):
        Rouge("fr")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"\[eval\]"):
        Rouge()


@pytest.mark.parametrize(
    ("answer", "references", "is_exact", "is_contained"),
    [
        ("The  Cat.", ["cat"], True, True),
        ("It is 42.", ["42"], False, True),
        ("It is 420.", ["42"], False, False),
        ("-5", ["5"], False, False),
        ("3.5", ["35"], False, False),
        ("3.5", ["3"], False, False),
        ("It is -5, so", ["-5"], False, True),
        ("４２", ["42"], True, True),
        ("答案是四十二。", ["四十二"], False, True),
        ("Paris", ["Rome", "paris!"], True, True),
        ("", ["a cat"], False, False),
        ("category", ["cat"], False, False),
    ],
)
def test_matches(answer: str, references: list[str], is_exact: bool, is_contained: bool) -> None:
    assert exact(answer, references) is is_exact
    assert contains(answer, references) is is_contained


def test_normalised_text() -> None:
    assert normalised("  The “Answer”: a/b, 1,000 — at 3:15! ") == "answer b 1,000 at 3:15"


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5, 8, 9, 21])
@pytest.mark.parametrize(("size", "stride"), [(8, 1), (8, 3), (8, 7), (2, 1)])
def test_every_token_but_the_first_counts_once(num_tokens: int, size: int, stride: int) -> None:
    found = list(windows(num_tokens, size, stride))
    counted = [place for window in found for place in range(window.first, window.end)]
    assert counted == list(range(1, num_tokens))
    assert all(window.end - window.begin <= size for window in found)
    assert all(window.end - window.first <= stride for window in found[1:])


def test_windows_apart_do_not_count_their_first_tokens() -> None:
    assert list(windows(9, 4, 4)) == [TextWindow(0, 1, 4), TextWindow(4, 5, 8)]
    assert TextWindow(4, 6, 8).counted == slice(1, 3)


@pytest.mark.parametrize(
    ("size", "stride", "flag"), [(1, 1, "--window"), (8, 0, "--stride"), (8, 9, "--stride")]
)
def test_windows_that_cannot_be(size: int, stride: int, flag: str) -> None:
    with raises_shown(ConfigError, flag):
        list(windows(10, size, stride))


def test_limits_by_verb_and_by_metric() -> None:
    assert {limit.most for limit in limits_for("summarize")} == {1.0}
    changed = {limit.metric: limit.most for limit in limits_for("summarize", ["3", "rouge2=0.5"])}
    assert changed == {"rouge1": 3, "rouge2": 0.5, "rougeL": 3, "rougeLsum": 3}
    plain = {limit.metric: limit.most for limit in limits_for("divergence", ["0.5"])}
    assert plain == {"kl_mean": 0.5, "top1_disagreement": 5.0}


@pytest.mark.parametrize("given", ["x", "-1", "nan", "rouge1=", "bleu=1"])
def test_limits_that_cannot_be(given: str) -> None:
    with pytest.raises(ConfigError, match="max_delta"):
        limits_for("summarize", [given])


@pytest.mark.parametrize(
    ("ours", "theirs", "delta", "within"),
    [
        (10.05, 10.0, 0.5, True),
        (9.8, 10.0, -2.0, False),
        (10.0, 0.0, math.nan, False),
        (None, 10.0, math.nan, False),
    ],
)
def test_perplexity_is_judged_in_percent(ours: Any, theirs: float, delta: float, within: bool) -> None:
    (found,) = judge(limits_for("perplexity"), {"perplexity": ours}, {"perplexity": theirs})
    assert found.delta == pytest.approx(delta, nan_ok=True)
    assert found.within is within


def test_standard_error_by_hand() -> None:
    assert standard_error([1, 2, 3, 6]) == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3 / 4))
    assert standard_error([0, 0]) == 0
    assert standard_error([5]) is None


def test_divergence_of_logits_by_hand() -> None:
    p, q = [0.5, 0.5], [0.75, 0.25]
    found = compare_logits(torch.tensor([q]).log(), torch.tensor([p]).log(), torch.tensor([1]))
    assert found.kl.item() == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), abs=1e-7)
    assert (found.our_loss.item(), found.their_loss.item()) == pytest.approx(
        (math.log(4), math.log(2)), abs=1e-7
    )


def test_regret_is_what_the_reference_loses_by_the_other_choice() -> None:
    ours, theirs = torch.tensor([[0.1, 0.9], [0.9, 0.1]]), torch.tensor([[0.6, 0.4], [0.8, 0.2]])
    found = compare_logits(ours.log(), theirs.log(), torch.tensor([0, 0]))
    assert found.regret.tolist() == pytest.approx([math.log(0.6 / 0.4), 0], abs=1e-6)
    measured = divergence_metrics(found)
    assert measured["top1_agreement"] == 50
    assert measured["top1_regret"] == pytest.approx(math.log(1.5), abs=1e-6)


def test_divergence_takes_banned_tokens_and_padded_vocabularies() -> None:
    theirs = torch.tensor([[1.0, 2.0, -math.inf]])
    found = compare_logits(torch.tensor([[1.0, 2.0, -math.inf, 9.0]]), theirs, torch.tensor([0]))
    assert found.kl.item() == 0
    assert found.our_top.item() == found.their_top.item() == 1


def test_divergence_of_many_rows_is_that_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(150, 11, generator=generator) for _ in range(2))
    found = compare_logits(ours, theirs, torch.zeros(150, dtype=torch.int64))
    direct = torch.nn.functional.kl_div(
        ours.double().log_softmax(1), theirs.double().log_softmax(1), log_target=True, reduction="none"
    )
    assert torch.allclose(found.kl, direct.sum(1), atol=1e-14)
    assert (found.kl > 0).all()


def test_same_text_may_be_other_tokens() -> None:
    """And an answer that was cut elsewhere is neither."""
    found = agreement((["ab", "c", "d"], ["ab", "c", "e"]), ([[1], [2], [3]], [[4, 5], [2], [6]]))
    assert found == {"answers": 3, "same_tokens": 1, "same_text": 2}


def test_the_error_of_a_mean_is_that_of_paired_differences() -> None:
    """Scores that move together leave none, however far they are spread."""

    def side(*scores: float) -> ScoredSide:
        run: Any = SimpleNamespace(metrics={"rouge1": sum(scores) / len(scores)})
        return ScoredSide(run, ["", "", ""], [[], [], []], [None] * 3, [{"rouge1": one} for one in scores])

    (same,) = mean_deltas([Limit("rouge1", 1.0, "points")], side(11, 41, 91), side(10, 40, 90))
    assert (same.delta, same.stderr) == (1.0, 0.0)
    (other,) = mean_deltas([Limit("rouge1", 1.0, "points")], side(10, 42, 94), side(10, 40, 90))
    assert other.stderr == pytest.approx(torch.tensor([0.0, 2.0, 4.0]).std().item() / math.sqrt(3))
