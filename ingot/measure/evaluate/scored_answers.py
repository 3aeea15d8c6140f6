"""Answers of both sides to the same prompts, scored.

Owns summarize and answers: prompts by one tokenizer, greedy answers of a side after the other, scores by
item, means, and how many answers are the same. Knows no terminal.

    evaluation = summarize(SideSpec(path="engine"), other, data, limits_for("summarize"))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ingot.engine.engine_text import TextParts
from ingot.errors import ConfigError
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.data_item import ONLY_CAPTION, DataItem
from ingot.measure.evaluate.eval_prompts import EvalCase, Prompter, common_text, need_tokenizer
from ingot.measure.evaluate.eval_record import (
    Evaluation,
    Progress,
    Record,
    SideRun,
    make_record,
    mean,
    no_progress,
)
from ingot.measure.evaluate.exact_match import contains, exact
from ingot.measure.evaluate.loss_limits import Limit, MetricDelta, judge, standard_error
from ingot.measure.evaluate.rouge import Rouge
from ingot.measure.side.open_side import open_side
from ingot.measure.side.side_spec import SideSpec, longest
from ingot.proof.golden_replay import first_difference

Scores = dict[str, float]
Scorer = Callable[[str, Sequence[str]], Scores]


@dataclass(frozen=True)
class AnswerSettings:
    """How items are asked.

    Attributes:
        max_new_tokens: of each answer.
        chat: articles and prompts as a user's message; None: articles where the engine has a chat format.
        template: text around ``{article}``.
        language: of ROUGE: ``auto``, ``en`` or ``zh``.
        stemmer: of ROUGE.
    """

    max_new_tokens: int = 128
    chat: bool | None = None
    template: str | None = None
    language: str = "auto"
    stemmer: bool = False


@dataclass
class _Answered:
    """A side's answers in the order of the cases."""

    run: SideRun
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)


def question_check(item: DataItem) -> str | None:
    """Why an item does not serve here; None where it does."""
    if item.image is not None:
        return ONLY_CAPTION
    return None if item.asks else "no question with an answer"


def summarize(
    spec: SideSpec,
    other: SideSpec | None,
    data: DataFile,
    limits: Sequence[Limit],
    asking: AnswerSettings | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """ROUGE-1, 2, L and Lsum of summaries: F1, precision and recall, 0 to 100, means over the items.

    Raises:
        IngotError: a side cannot be opened, no item fits it, or rouge-score is not installed.
    """
    asking = asking or AnswerSettings()
    rouge = Rouge(asking.language, stemmer=asking.stemmer)

    def score(answer: str, references: Sequence[str]) -> Scores:
        found = rouge.score(answer, references)
        scores = {kind: one.f1 for kind, one in found.items()}
        for kind, one in found.items():
            scores |= {f"{kind}_precision": one.precision, f"{kind}_recall": one.recall}
        return scores

    return _evaluate("summarize", spec, other, data, limits, asking, score, progress)


def answers(
    spec: SideSpec,
    other: SideSpec | None,
    data: DataFile,
    limits: Sequence[Limit],
    asking: AnswerSettings | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """The share of answers, 0 to 100, that are a reference, and that contain one; normalised (matches.py).

    Raises:
        IngotError: a side cannot be opened, or no item fits it.
    """

    def score(answer: str, references: Sequence[str]) -> Scores:
        scores = {"exact": exact(answer, references), "contains": contains(answer, references)}
        return {name: 100.0 * found for name, found in scores.items()}

    return _evaluate("answers", spec, other, data, limits, asking or AnswerSettings(), score, progress)


def _evaluate(
    verb: str,
    spec: SideSpec,
    other: SideSpec | None,
    data: DataFile,
    limits: Sequence[Limit],
    asking: AnswerSettings,
    score: Scorer,
    progress: Progress,
) -> Evaluation:
    specs = [spec] if other is None else [spec, other]
    text = common_text(specs, data.items)
    cases, too_long = _cases(data, text, min(map(longest, specs)), asking)
    found = [_answered(one, cases, text, asking, score, progress) for one in specs]
    deltas = [] if other is None else _deltas(limits, *found)
    cut = [case.cut_tokens for case in cases if case.cut_tokens]
    counts = {"cases": len(cases), "too_long": too_long, "cut": len(cut), "cut_tokens": sum(cut)}
    same = None if other is None else _agreement(*found)
    runs = [one.run for one in found]
    record = make_record(verb, data, asdict(asking), runs, deltas, counts=counts, agreement=same)
    return Evaluation(record, [_row(i, case, found) for i, case in enumerate(cases)])


def _cases(data: DataFile, text: TextParts, room: int, asking: AnswerSettings) -> tuple[list[EvalCase], int]:
    """The prompts, and how many items are too long for one."""
    prompter = Prompter(text, room - asking.max_new_tokens, chat=asking.chat, template=asking.template)
    made = [prompter.case(item) for item in data.items]
    cases = [case for case in made if case is not None]
    if not cases:
        raise ConfigError(
            "no item fits the model's context",
            seen=f"{len(made)} items",
            allowed=f"{room - asking.max_new_tokens} prompt tokens",
            field="max_new_tokens",
            fix="`max_new_tokens` with less, or `max_seq_len` with more if the model allows it",
        )
    return cases, len(made) - len(cases)


def _answered(
    spec: SideSpec,
    cases: list[EvalCase],
    text: TextParts,
    asking: AnswerSettings,
    score: Scorer,
    progress: Progress,
) -> _Answered:
    progress(f"{spec.title}: loading", 0, len(cases))
    stops = sorted({stop for case in cases for stop in case.stops})
    tokens: list[list[int]] = [[] for _ in cases]
    reasons = [""] * len(cases)
    with open_side(spec) as side:
        side.warm_up()
        start = time.perf_counter()
        prompts = [case.prompt_ids for case in cases]
        done = side.generate(prompts, asking.max_new_tokens, text.stop_ids, stops)
        for count, one in enumerate(done, start=1):
            tokens[one.position], reasons[one.position] = one.token_ids, one.finish_reason
            progress(spec.title, count, len(cases))
        seconds = time.perf_counter() - start
        facts = side.facts()
    read, written = sum(map(len, prompts)), sum(map(len, tokens))
    found = _Answered(SideRun(spec, facts, seconds, read, written), token_ids=tokens, reasons=reasons)
    tokenizer = need_tokenizer(text)
    for case, ids in zip(cases, tokens, strict=True):
        answer = _until(tokenizer.decode(ids), case.stops).strip()
        found.texts.append(answer)
        found.scores.append(score(answer, case.item.references))
    found.run.metrics = {name: mean([s[name] for s in found.scores]) for name in found.scores[0]}
    return found


def _until(text: str, stops: Sequence[str]) -> str:
    return text[: min([len(text), *(text.index(stop) for stop in stops if stop in text)])]


def _deltas(limits: Sequence[Limit], ours: _Answered, theirs: _Answered) -> list[MetricDelta]:
    pairs = list(zip(ours.scores, theirs.scores, strict=True))
    return [
        replace(delta, stderr=standard_error([a[delta.metric] - b[delta.metric] for a, b in pairs]))
        for delta in judge(limits, ours.run.metrics, theirs.run.metrics)
    ]


def _agreement(ours: _Answered, theirs: _Answered) -> Record:
    pairs = list(zip(ours.token_ids, theirs.token_ids, strict=True))
    parted = [first_difference(a, b) for a, b in pairs if a != b]
    return {
        "answers": len(pairs),
        "same_tokens": len(pairs) - len(parted),
        "same_text": sum(a == b for a, b in zip(ours.texts, theirs.texts, strict=True)),
        "first_difference_mean": mean(parted) if parted else None,
    }


def _row(place: int, case: EvalCase, found: Sequence[_Answered]) -> Record:
    row: dict[str, Any] = {
        "number": case.item.number,
        "id": case.item.id,
        "prompt": case.asked,
        "prompt_tokens": len(case.prompt_ids),
        "cut_tokens": case.cut_tokens,
        "references": list(case.item.references),
    }
    for side in found:
        row[side.run.spec.title] = {
            "answer": side.texts[place],
            "tokens": len(side.token_ids[place]),
            "finish_reason": side.reasons[place],
            "scores": side.scores[place],
        }
    return row
