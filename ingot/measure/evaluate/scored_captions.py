"""Captions of one or two sides for the same pictures, scored by ROUGE."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
    ScoredSide,
    SideRun,
    differences,
    make_record,
    mean_deltas,
    no_progress,
)
from ingot.measure.evaluate.loss_limits import Limit, MetricDelta, judge
from ingot.measure.evaluate.rouge import Rouge
from ingot.measure.side.ingot_side import IngotSide
from ingot.measure.side.open_side import check_side
from ingot.measure.side.side_spec import HUGGINGFACE, SideSpec, model_of

QUESTION = "Describe this image."
DISTANCE = "rougeL_distance"
_QUEUED = 4  # pictures that wait for each that is answered
_LOOK = 16  # pixels of a side, to see whether a file can be read


@dataclass(frozen=True)
class CaptionSettings:
    """How pictures are asked about: ``prompt`` follows each; ``language`` and ``stemmer`` are of ROUGE."""

    prompt: str = QUESTION
    max_new_tokens: int = 300
    language: str = "auto"
    stemmer: bool = False


def picture_check(folder: Path) -> Callable[[DataItem], str | None]:
    """Why an item cannot be used; its picture's path is relative to ``folder``."""
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
    """ROUGE of captions, 0 to 100, means over the pictures: against the data's captions, or without these
    against the other side's.
    """
    asked = asked or CaptionSettings()
    rouge = Rouge(asked.language, stemmer=asked.stemmer)
    specs = [spec] if other is None else [spec, other]
    for one in specs:
        _check(one)
    without = [item.number for item in data.items if not item.references]
    if without and len(without) < len(data.items):
        raise ConfigError(
            "some pictures have a caption and others have none",
            seen=f"{len(without)} of {len(data.items)} without, the first is item {without[0]}",
            field="data",
            fix="`data` with a caption for each, or for none",
        )
    if without and other is None:
        what = "there is nothing to compare the captions with"
        raise ConfigError(what, seen=f"no captions in {data.path}", field="against", fix="`against=ENGINE`")
    sides = [_described(one, data, asked, progress) for one in specs]
    right = [(text,) for text in sides[1].texts] if without else [item.references for item in data.items]
    for side in sides[:1] if without else sides:
        side.score(rouge.figures, right)
    rows = [
        {
            "number": item.number,
            "id": item.id,
            "image": item.image,
            "references": list(item.references),
            "same_text": len({side.texts[place] for side in sides}) == 1,
            **{side.run.spec.title: side.row(place, "text") for side in sides},
        }
        for place, item in enumerate(data.items)
    ]
    more: Record = {"counts": {"pictures": len(rows)}, "agreement": None, "differing": []}
    deltas: list[MetricDelta] = []
    if other is not None:
        more |= differences(rows, [side.texts for side in sides], [side.token_ids for side in sides])
        chosen = [limit for limit in limits if (limit.metric == DISTANCE) is bool(without)]
        distance = {DISTANCE: 100 - (sides[0].run.metrics["rougeL"] or 0.0)}
        deltas = judge(chosen, distance, None) if without else mean_deltas(chosen, *sides)
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


def _described(spec: SideSpec, data: DataFile, asked: CaptionSettings, progress: Progress) -> ScoredSide:
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
    texts = [(one.text or "").strip() for one in outputs]
    reasons = [one.finish_reason for one in outputs]
    return ScoredSide(run, texts, [one.token_ids for one in outputs], reasons)


def _conversation(picture: Path, prompt: str) -> list[dict[str, Any]]:
    content = [{"type": "image", "image": str(picture)}, {"type": "text", "text": prompt}]
    return [{"role": "user", "content": content}]
