"""Captions of both sides to the same pictures, scored.

Owns the evaluation caption: the question about each picture, greedy answers of a side after the other, ROUGE
against references, or of one side against the other. Knows no terminal.

    evaluation = caption(SideSpec(path="engine"), other, data, limits_for("caption"), CaptionSettings())
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot.config.modality import PICTURE
from ingot.config.sampling_params import SamplingParams
from ingot.errors import ConfigError, RequestError
from ingot.image.image_reader import PictureReader
from ingot.llm import Output
from ingot.measure.evaluate.data_file import DataFile
from ingot.measure.evaluate.data_item import DataItem
from ingot.measure.evaluate.eval_record import (
    Evaluation,
    Progress,
    Record,
    SideRun,
    make_record,
    mean,
    no_progress,
)
from ingot.measure.evaluate.loss_limits import Limit, MetricDelta, judge, standard_error
from ingot.measure.evaluate.rouge import KINDS, Rouge
from ingot.measure.side.ingot_side import IngotSide
from ingot.measure.side.open_side import check_side
from ingot.measure.side.side_spec import HUGGINGFACE, SideSpec, model_of

QUESTION = "Describe this image."
DISTANCE = "rougeL_distance"
_QUEUED = 4  # pictures that wait for each that is answered
_LOOK = 16  # pixels of a side, to see whether a file can be read

Scores = dict[str, float]


@dataclass(frozen=True)
class CaptionSettings:
    """How pictures are asked about.

    Attributes:
        prompt: the text behind each picture.
        max_new_tokens: of each answer.
        language, stemmer: of ROUGE.
    """

    prompt: str = QUESTION
    max_new_tokens: int = 300
    language: str = "auto"
    stemmer: bool = False


@dataclass
class _Described:
    """A side's captions in the order of the items."""

    run: SideRun
    outputs: list[Output] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)


def picture_check(folder: Path) -> Callable[[DataItem], str | None]:
    """Why an item does not serve; its picture is named from ``folder`` on."""
    reader = PictureReader()

    def why(item: DataItem) -> str | None:
        if item.image is None:
            return "no picture"
        path = folder / item.image
        if not path.is_file():
            return f"there is no such picture: {path}"
        try:
            reader.read(path, _LOOK)
        except RequestError as error:
            return f"{path} cannot be read: {error.what}"
        return None

    return why


def caption(
    spec: SideSpec,
    other: SideSpec | None,
    data: DataFile,
    limits: Sequence[Limit],
    asked: CaptionSettings | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """ROUGE of captions, 0 to 100, means over the pictures: against the data's own, or without these against
    the other side's.

    Raises:
        IngotError: a side cannot be opened or takes no pictures, there is nothing to compare with, or
            rouge-score is not installed.
    """
    asked = asked or CaptionSettings()
    rouge = Rouge(asked.language, stemmer=asked.stemmer)
    specs = [spec] if other is None else [spec, other]
    for one in specs:
        _check(one)
    referred = _has_references(data, alone=other is None)
    sides = [_described(one, data, asked, progress) for one in specs]
    right = [item.references for item in data.items] if referred else [(text,) for text in sides[1].texts]
    for side in sides if referred else sides[:1]:
        side.scores = [_scores(rouge, text, one) for text, one in zip(side.texts, right, strict=True)]
        side.run.metrics = {name: mean([one[name] for one in side.scores]) for name in side.scores[0]}
    rows = [_row(place, item, sides) for place, item in enumerate(data.items)]
    more: Record = {"counts": {"pictures": len(rows)}, "agreement": None, "differing": []}
    if other is not None:
        more |= {"agreement": _agreement(sides), "differing": [row for row in rows if not row["same_text"]]}
    deltas = [] if other is None else _deltas(limits, sides, referred=referred)
    runs = [side.run for side in sides]
    return Evaluation(make_record("caption", data, asdict(asked), runs, deltas, **more), rows)


def _check(spec: SideSpec) -> None:
    if spec.kind == HUGGINGFACE:
        raise ConfigError(
            "Hugging Face has no class of MiniGPT-4 to compare with",
            seen="hf",
            field="against",
            fix="`against=ENGINE`: another precision, another checkpoint; or captions in `data`",
        )
    check_side(spec)
    modality = model_of(spec.source).modality
    if modality is not PICTURE:
        what = "captions need a model of pictures"
        raise ConfigError(
            what, seen=f"{spec.path}: {modality.model}", field="engine", fix="an engine of MiniGPT-4"
        )


def _has_references(data: DataFile, *, alone: bool) -> bool:
    """Whether the data has captions to score against: all items or none."""
    without = [item.number for item in data.items if not item.references]
    if without and len(without) < len(data.items):
        raise ConfigError(
            "some pictures have a caption and others have none",
            seen=f"{len(without)} of {len(data.items)} without, the first is item {without[0]}",
            field="data",
            fix="`data` with a caption for each, or for none",
        )
    if without and alone:
        what = "there is nothing to compare the captions with"
        raise ConfigError(what, seen=f"no captions in {data.path}", field="against", fix="`against=ENGINE`")
    return not without


def _described(spec: SideSpec, data: DataFile, asked: CaptionSettings, progress: Progress) -> _Described:
    total = len(data.items)
    progress(f"{spec.title}: loading", 0, total)
    params = SamplingParams(max_new_tokens=asked.max_new_tokens)
    talks = [_conversation(data.folder / (item.image or ""), asked.prompt) for item in data.items]
    outputs: list[Output] = []
    with IngotSide(spec) as side:
        side.warm_up()
        together = _QUEUED * side.llm.executor.max_batch_size
        start = time.perf_counter()
        for first in range(0, total, together):
            outputs += side.llm.chat(talks[first : first + together], params)
            progress(spec.title, len(outputs), total)
        seconds, facts = time.perf_counter() - start, side.facts()
    read = sum(len(one.prompt_token_ids) for one in outputs)
    written = sum(len(one.token_ids) for one in outputs)
    run = SideRun(spec, facts, seconds, read, written, pictures=total)
    return _Described(run, outputs, [(one.text or "").strip() for one in outputs])


def _conversation(picture: Path, prompt: str) -> list[dict[str, Any]]:
    content = [{"type": "image", "image": str(picture)}, {"type": "text", "text": prompt}]
    return [{"role": "user", "content": content}]


def _scores(rouge: Rouge, text: str, references: Sequence[str]) -> Scores:
    found = rouge.score(text, references)
    return {kind: found[kind].f1 for kind in KINDS} | {
        f"{kind}_{part}": getattr(found[kind], part) for kind in KINDS for part in ("precision", "recall")
    }


def _deltas(limits: Sequence[Limit], sides: Sequence[_Described], *, referred: bool) -> list[MetricDelta]:
    chosen = [limit for limit in limits if (limit.metric != DISTANCE) is referred]
    ours = sides[0]
    if not referred:
        return judge(chosen, {DISTANCE: 100 - (ours.run.metrics["rougeL"] or 0.0)}, None)
    pairs = list(zip(ours.scores, sides[1].scores, strict=True))
    return [
        replace(delta, stderr=standard_error([a[delta.metric] - b[delta.metric] for a, b in pairs]))
        for delta in judge(chosen, ours.run.metrics, sides[1].run.metrics)
    ]


def _agreement(sides: Sequence[_Described]) -> Record:
    same = sum(a == b for a, b in zip(sides[0].texts, sides[1].texts, strict=True))
    pairs = zip(sides[0].outputs, sides[1].outputs, strict=True)
    return {
        "answers": len(sides[0].texts),
        "same_tokens": sum(a.token_ids == b.token_ids for a, b in pairs),
        "same_text": same,
        "different_text": len(sides[0].texts) - same,
    }


def _row(place: int, item: DataItem, sides: Sequence[_Described]) -> Record:
    row: dict[str, Any] = {
        "number": item.number,
        "id": item.id,
        "image": item.image,
        "references": list(item.references),
        "same_text": len({side.texts[place] for side in sides}) == 1,
    }
    for side in sides:
        output = side.outputs[place]
        row[side.run.spec.title] = {
            "text": side.texts[place],
            "tokens": len(output.token_ids),
            "finish_reason": output.finish_reason,
            "scores": side.scores[place] if side.scores else None,
        }
    return row
