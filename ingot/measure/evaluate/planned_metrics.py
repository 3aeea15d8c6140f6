"""What `prove` measures, with every check that needs no engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.config.modality import EVAL_WER, expect_text
from ingot.engine.engine_text import TextParts, read_text_parts
from ingot.engine.manifest import is_engine
from ingot.engine.proof_file import manifest_hash
from ingot.errors import ConfigError
from ingot.measure.evaluate.data_file import DataFile, read_data
from ingot.measure.evaluate.eval_prompts import check_same_tokens, need_tokenizer
from ingot.measure.evaluate.loss_limits import limits_for
from ingot.measure.evaluate.rouge import KINDS, check_rouge
from ingot.measure.evaluate.scored_answers import question_check
from ingot.measure.side.open_side import check_side
from ingot.measure.side.side_spec import HUGGINGFACE, SideSpec, against_parts, model_of, other_spec

DELTA = "_delta"
_BATCH = 8  # Hugging Face's padded batch, as `ingot eval` has it
VALUES: dict[str, tuple[str, ...]] = {  # metrics that a verb gives for each side
    "perplexity": ("perplexity",),
    "divergence": (),
    "summarize": KINDS,
    "answers": ("exact", "contains"),
}
VERBS = tuple(VALUES)


@dataclass(frozen=True)
class Proving:
    """Data with its hash when it was read, verbs of ``ingot eval``, the model to compare with and its name in
    the proof, and the worst values allowed.
    """

    data: DataFile
    sha256: str
    verbs: tuple[str, ...]
    reference: SideSpec | None = None
    against: str | None = None
    thresholds: dict[str, float] = field(default_factory=dict)


def plan_proving(
    data: Path,
    checkpoint: str | Path,
    *,
    against: str | None = None,
    against_dtype: str = "auto",
    samples: int | None = None,
    verbs: Sequence[str] = (),
    thresholds: Sequence[str] = (),
    chat_template: str | None = None,
    tokenizer: Path | None = None,
    revision: str | None = None,
) -> Proving:
    """Read the data and check all that would otherwise fail only after the build.

    Args:
        against: ``hf`` (Hugging Face's class on the checkpoint), ``hf:CHECKPOINT``, or another engine or
            checkpoint.
        samples: the first N items; None: all.
        verbs: those of ``ingot eval``; none: those that fit the data's shape.
        thresholds: ``NAME=X``, the worst value allowed of a metric.
    """
    folder = resolve_checkpoint(checkpoint, revision=revision)
    items = _read(data, samples, verbs)
    chosen = tuple(dict.fromkeys(verbs)) or _verbs_for(items, compared=against is not None)
    unknown = [verb for verb in chosen if verb not in VERBS]
    if unknown:
        raise ConfigError("no such evaluation", seen=unknown, allowed=VERBS, field="prove_with")
    if "divergence" in chosen and against is None:
        raise ConfigError("a divergence needs a reference", field="against")
    if "summarize" in chosen:
        check_rouge()
    own = SideSpec(str(folder))
    model = model_of(own.source)
    expect_text(model.modality, "`prove`", EVAL_WER)
    reference = None if against is None else other_spec(own, against, against_dtype, _BATCH)
    if reference is not None:
        check_side(reference)
    with open_checkpoint(folder) as source:
        text = read_text_parts(source, chat_template, tokenizer, model.vocab_size)
    _check_text(text, reference, items)
    worst = _thresholds(thresholds, names_of(chosen, compared=against is not None))
    name = None if against is None else _name(against)
    return Proving(items, items.facts()["sha256"], chosen, reference, name, worst)


def names_of(verbs: Sequence[str], *, compared: bool) -> dict[str, Literal["lower", "higher"]]:
    """The metrics of verbs and which way each is better; ``compared``: with differences."""
    found: dict[str, Literal["lower", "higher"]] = {}
    for verb in verbs:
        found |= {name: "lower" if name == "perplexity" else "higher" for name in VALUES[verb]}
        if compared:
            found |= {delta_name(verb, limit.metric): "lower" for limit in limits_for(verb)}
    return found


def _read(path: Path, samples: int | None, verbs: Sequence[str]) -> DataFile:
    """The data; errors name the field ``prove``."""
    if samples is not None and path.suffix == ".txt":
        raise ConfigError(
            "`prove_samples` needs records, but a .txt file is one text",
            seen=path,
            field="prove_samples",
            fix="leave out `prove_samples`, or use a shorter text",
        )
    needs = question_check if {"summarize", "answers"} & set(verbs) else lambda item: None
    try:
        return read_data(path, limit=samples, needs=needs)
    except ConfigError as error:
        raise ConfigError(
            error.what,
            seen=error.seen,
            allowed=error.allowed,
            field="prove",
            fix="`prove`, with a file that can be used",
        ) from None


def _verbs_for(data: DataFile, *, compared: bool) -> tuple[str, ...]:
    shapes = {
        "texts" if not item.asks else "articles" if item.article is not None else "questions"
        for item in data.items
    }
    if len(shapes) > 1:
        raise ConfigError(
            "the data mixes several kinds of items",
            seen=f"{data.path}: {', '.join(sorted(shapes))}",
            field="prove_with",
            fix=f"`prove_with={'|'.join(VERBS)}`, or a file for each shape",
        )
    of_texts = ("perplexity", "divergence") if compared else ("perplexity",)
    return {"articles": ("summarize",), "questions": ("answers",), "texts": of_texts}[shapes.pop()]


def _name(against: str) -> str:
    """A reference's name in a proof, without this machine's folders; an engine has its hash."""
    is_class, path = against_parts(against)
    if path is None:
        return against
    prefix, folder = f"{HUGGINGFACE}:" if is_class else "", Path(path)
    if not folder.is_dir():
        return against
    name = prefix + folder.resolve().name
    return f"{name} ({manifest_hash(folder)[:12]})" if is_engine(folder) else name


def _check_text(text: TextParts, reference: SideSpec | None, data: DataFile) -> None:
    if any(item.token_ids is None for item in data.items):
        try:
            need_tokenizer(text)
        except ConfigError as error:
            raise ConfigError(error.what, field="prove", fix="use `prove` with token_ids") from None
    if any(item.messages is not None for item in data.items) and text.chat is None:
        raise ConfigError(
            "the checkpoint has no chat template, but the data has messages",
            field="chat_template",
            fix="use `chat_template=chatml`, or `prove` with prompts",
        )
    if reference is not None:
        check_same_tokens(reference, text, data.items)


def _thresholds(given: Sequence[str], names: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in given:
        name, _, value = one.partition("=")
        if name not in names:
            raise ConfigError(
                "no such metric is measured", seen=one, allowed=[f"{n}=X" for n in names], field="threshold"
            )
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if not math.isfinite(found[name]) or found[name] < 0:
            raise ConfigError(
                "a threshold must be 0 or more", seen=one, allowed=f"{name}=X", field="threshold"
            )
    return found


def delta_name(verb: str, metric: str) -> str:
    """A difference's name in a proof; a divergence is one already."""
    return metric if verb == "divergence" else metric + DELTA
