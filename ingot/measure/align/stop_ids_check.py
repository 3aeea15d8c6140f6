"""The ids that end an answer, on both sides."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.engine.engine_text import TextParts, read_text_parts
from ingot.measure.align.first_divergence import Finding
from ingot.measure.align.stage_verdict import GreedyRow

STAGE = "stop ids"
CULPRIT = "stop_ids"
_SHOWN = 8


@dataclass(frozen=True)
class StopCheck:
    """The ids that end an answer.

    Attributes:
        expected: the original's; None if unknown, and not compared.
        got: the engine's, as it runs.
        designed: those of ``got`` after which the original's ``generate`` goes on and Ingot stops by design:
            a turn's end of the chat format, ``eos_token_id`` of config.json, the tokenizer's end.
        against: the origin of the original's.
        texts: of the ids, with a tokenizer.
    """

    expected: tuple[int, ...] | None
    got: tuple[int, ...]
    designed: tuple[int, ...]
    against: str
    texts: dict[int, str] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """The original ends there, and the engine does not."""
        return tuple(i for i in self.expected or () if i not in self.got)

    @property
    def extra(self) -> tuple[int, ...]:
        """The engine ends there, without reason in the original."""
        if self.expected is None:
            return ()
        return tuple(i for i in self.got if i not in self.expected and i not in self.designed)

    @property
    def is_bad(self) -> bool:
        return bool(self.missing or self.extra)

    def named(self, ids: Sequence[int]) -> str:
        """``2 </s>, 5 <|im_end|>``."""
        return ", ".join(self._name(i) for i in ids) or "none"

    def _name(self, token: int) -> str:
        text = self.texts.get(token, "")
        plain = text.startswith("<") and text.isprintable()
        return f"{token} {text if plain else repr(text)}" if text else str(token)


def compare_stops(
    text: TextParts,
    checkpoint: Path | None,
    expected: Sequence[int] | None,
    got: Collection[int],
    against: str,
) -> StopCheck:
    """The original's stop ids (None if unknown) and the engine's; a trace has no ``checkpoint``."""
    theirs = None if expected is None else tuple(sorted({*expected}))
    ours = tuple(sorted({*got}))
    more = [i for i in ours if i not in theirs] if theirs is not None else []
    allowed: set[int] = set()
    if more:
        chosen = text.chat_template is not None or checkpoint is None
        if checkpoint is not None:
            with open_checkpoint(checkpoint) as source:
                original = read_text_parts(source)
            allowed.update(original.stop_ids)
            chosen = chosen or original.chat is None
        if chosen and text.chat is not None and text.tokenizer is not None:  # a format that the user chose
            allowed.update(text.chat.stop_ids(text.tokenizer))
    show = text.tokenizer.token_text if text.tokenizer is not None else lambda token: ""
    texts = {i: show(i) for i in {*ours, *(theirs or ())}}
    return StopCheck(theirs, ours, tuple(i for i in more if i in allowed), against, texts)


def explain_stops(check: StopCheck, greedy: Sequence[GreedyRow]) -> list[Finding]:
    """The effect of other stop ids, and the first prompt that shows it; empty if the sets agree."""
    if not check.is_bad:
        return []
    parts = []
    if check.missing:
        text = f"the engine does not stop at {check.named(check.missing[:_SHOWN])}, where the original's "
        shown = _met(check.missing, [(row, row.expected) for row in greedy], "the original's answer ends")
        parts.append(f"{text}answers end: they go on after it, up to the limit of new tokens{shown}")
    if check.extra:
        text = f"the engine stops at {check.named(check.extra[:_SHOWN])}, where the original goes on: "
        shown = _met(check.extra, [(row, row.got) for row in greedy], "the engine's answer ends")
        parts.append(f"{text}answers are cut off there{shown}")
    sets = f"original {{{check.named(check.expected or ())}}}, engine {{{check.named(check.got)}}}"
    union = {*check.got, *(check.expected or ())}
    share = len({*check.missing, *check.extra}) / len(union)
    return [Finding(CULPRIT, share, 0.0, f"{'; '.join(parts)} ({sets})")]


def _met(ids: Sequence[int], choices: Sequence[tuple[GreedyRow, int]], what: str) -> str:
    """The first greedy id that is one of these."""
    row = next((row for row, token in choices if token in ids), None)
    return "" if row is None else f" (so here: {what} at step {row.step} of prompt {row.case + 1})"
