"""Summaries and answers of several sides to the same prompts, scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ingot.engine.engine_text import TextParts
from ingot.errors import ConfigError
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.data_item import ONLY_CAPTION, DataItem
from ingot.measure.evaluate.eval_prompts import EvalCase, Prompter, common_text, need_tokenizer
from ingot.measure.evaluate.eval_record import (
    Evaluation,
    Progress,
    Record,
    ScoredSide,
    Scores,
    SideRun,
    agreement,
    make_record,
    mean,
    mean_deltas,
    no_progress,
)
from ingot.measure.evaluate.exact_match import contains, exact
from ingot.measure.evaluate.loss_limits import Limit
from ingot.measure.evaluate.rouge import Rouge
from ingot.measure.side.open_side import Side, open_side
from ingot.measure.side.side_spec import SideSpec, longest
from ingot.proof.golden_replay import first_difference

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
        system: a system message before each; articles and prompts are then user messages.
    """

    max_new_tokens: int = 128
    chat: bool | None = None
    template: str | None = None
    language: str = "auto"
    stemmer: bool = False
    system: str | None = None


def question_check(item: DataItem) -> str | None:
    """Why an item cannot be asked; None if it can."""
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
    *,
    also: Sequence[SideSpec] = (),
) -> Evaluation:
    """ROUGE-1, 2, L and Lsum of summaries: F1, precision and recall, 0 to 100, means over the items. Sides of
    ``also`` are scored beside both; only ``other`` is a reference.
    """
    asking = asking or AnswerSettings()
    rouge = Rouge(asking.language, stemmer=asking.stemmer)
    return _evaluate("summarize", spec, other, data, limits, asking, rouge.figures, progress, also)


def answers(
    spec: SideSpec,
    other: SideSpec | None,
    data: DataFile,
    limits: Sequence[Limit],
    asking: AnswerSettings | None = None,
    progress: Progress = no_progress,
    *,
    also: Sequence[SideSpec] = (),
) -> Evaluation:
    """The share of answers, 0 to 100, that are a reference, and that contain one (exact_match.py)."""

    def score(answer: str, references: Sequence[str]) -> Scores:
        scores = {"exact": exact(answer, references), "contains": contains(answer, references)}
        return {name: 100.0 * found for name, found in scores.items()}

    return _evaluate("answers", spec, other, data, limits, asking or AnswerSettings(), score, progress, also)


class Summaries:
    """What ``summarize`` does, for a side that is open and answers several times.

    Args:
        spec: of the side; its weights are not read.

    Raises:
        ConfigError: the side has no text, or no item fits it.
        DeviceError: rouge-score is not installed.
    """

    def __init__(self, spec: SideSpec, data: DataFile, asking: AnswerSettings) -> None:
        self._spec, self._data, self._asking = spec, data, asking
        self._rouge = Rouge(asking.language, stemmer=asking.stemmer)
        self._text = common_text([spec], data.items)
        self._cases, self._too_long = _cases(data, self._text, longest(spec), asking)

    def facts(self) -> Record:
        """The data, the settings, and how many items are asked."""
        counts = _counts(self._cases, self._too_long)
        return self._data.facts() | {"settings": asdict(self._asking), "counts": counts}

    def of(self, side: Side, progress: Progress = no_progress) -> ScoredSide:
        """The side's answers, scored."""
        found = _generated(side, self._spec, self._cases, self._text, self._asking, progress)
        found.score(self._rouge.figures, [case.item.references for case in self._cases])
        return found

    def compared(self, own: ScoredSide, other: ScoredSide) -> Record:
        """Metrics ``with`` and ``without``, and how many answers are the same."""
        same = agreement([own.texts, other.texts], [own.token_ids, other.token_ids])
        return {"with": own.run.metrics, "without": other.run.metrics, **same}


def _evaluate(
    verb: str,
    spec: SideSpec,
    other: SideSpec | None,
    data: DataFile,
    limits: Sequence[Limit],
    asking: AnswerSettings,
    score: Scorer,
    progress: Progress,
    also: Sequence[SideSpec],
) -> Evaluation:
    specs = [spec, *([] if other is None else [other]), *also]
    text = common_text(specs, data.items)
    cases, too_long = _cases(data, text, min(map(longest, specs)), asking)
    sides = [_answered(one, cases, text, asking, progress) for one in specs]
    for side in sides:
        side.score(score, [case.item.references for case in cases])
    deltas, same = [], None
    if other is not None:
        both = sides[:2]
        deltas = mean_deltas(limits, *both)
        pairs = zip(*(side.token_ids for side in both), strict=True)
        parted = [first_difference(a, b) for a, b in pairs if a != b]
        same = agreement([side.texts for side in both], [side.token_ids for side in both])
        same |= {"first_difference_mean": mean(parted) if parted else None}
    runs, counts = [side.run for side in sides], _counts(cases, too_long)
    record = make_record(verb, data, asdict(asking), runs, deltas, counts=counts, agreement=same)
    rows = [
        {
            "number": case.item.number,
            "id": case.item.id,
            "prompt": case.asked,
            "prompt_tokens": len(case.prompt_ids),
            "cut_tokens": case.cut_tokens,
            "references": list(case.item.references),
            **{side.run.spec.title: side.row(place, "answer") for side in sides},
        }
        for place, case in enumerate(cases)
    ]
    return Evaluation(record, rows)


def _counts(cases: list[EvalCase], too_long: int) -> dict[str, int]:
    cut = [case.cut_tokens for case in cases if case.cut_tokens]
    return {"cases": len(cases), "too_long": too_long, "cut": len(cut), "cut_tokens": sum(cut)}


def _cases(data: DataFile, text: TextParts, room: int, asking: AnswerSettings) -> tuple[list[EvalCase], int]:
    """The prompts, and how many items are too long for one."""
    prompter = Prompter(
        text,
        room - asking.max_new_tokens,
        chat=asking.chat,
        template=asking.template,
        system=asking.system,
    )
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
    progress: Progress,
) -> ScoredSide:
    progress(f"{spec.title}: loading", 0, len(cases))
    with open_side(spec) as side:
        side.warm_up()
        return _generated(side, spec, cases, text, asking, progress)


def _generated(
    side: Side,
    spec: SideSpec,
    cases: list[EvalCase],
    text: TextParts,
    asking: AnswerSettings,
    progress: Progress,
) -> ScoredSide:
    """The answers of a side that is open."""
    stops = sorted({stop for case in cases for stop in case.stops})
    tokens: list[list[int]] = [[] for _ in cases]
    reasons = [""] * len(cases)
    start = time.perf_counter()
    prompts = [case.prompt_ids for case in cases]
    done = side.generate(prompts, asking.max_new_tokens, text.stop_ids, stops)
    for count, one in enumerate(done, start=1):
        tokens[one.position], reasons[one.position] = one.token_ids, one.finish_reason
        progress(spec.title, count, len(cases))
    seconds = time.perf_counter() - start
    read, written = sum(map(len, prompts)), sum(map(len, tokens))
    tokenizer, texts = need_tokenizer(text), []
    for case, ids in zip(cases, tokens, strict=True):
        answer = tokenizer.decode(ids)
        ends = [answer.index(stop) for stop in case.stops if stop in answer]
        texts.append(answer[: min(ends, default=None)].strip())
    return ScoredSide(SideRun(spec, side.facts(), seconds, read, written), texts, tokens, reasons)
