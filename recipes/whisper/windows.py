"""Windows of a recording as the model sees them in training: who speaks when, and the tokens that say so.

A plan of a window holds utterances and their places, the prompt, timestamps and what the loss counts, but no
audio; ``render`` adds it. Source of the layout: Radford et al. 2022, section 2.3.

    plan = Planner(utterances, vocabulary, seconds=30).plan(random.Random(1))
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recipes.whisper.actions import Language
from recipes.whisper.utterances import HOP, RATE, Utterance
from recipes.whisper.vocabulary import SpeechVocabulary

IGNORE = -100
_SILENT_SHARE, _TRANSLATE_SHARE, _TIMES_SHARE, _PREVIOUS_SHARE = 0.04, 0.06, 0.6, 0.35
_SHORT_SHARE, _ONE_VOICE_SHARE, _MIDWAY_SHARE, _CUT_SHARE = 0.4, 0.5, 0.1, 0.6
_MOST_PREVIOUS, _MOST_TOKENS = 222, 215
_NEAR = 5  # steps of 20 ms around a timestamp that attention may look at
_MARGIN = 2  # and around a word


@dataclass
class Plan:
    """A window.

    Attributes:
        inputs, targets: ids [L]; targets are ``IGNORE`` where the loss counts nothing.
        looks: (first, last) step of 20 ms that each target is spoken in; (-1, -1) if unknown.
        pieces: (offset in all samples, length, place in the window), in samples, multiples of ``HOP``.
        length: samples until the recording ends.
        start: step of 20 ms at which the window begins in the model's 30 s.
        said: reference texts in order, each with its start and end in seconds.
    """

    inputs: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    looks: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    length: int = 0
    start: int = 0
    language: Language = "en"
    said: list[tuple[str, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """Plans as tensors.

    Attributes:
        inputs, targets: int64 [B, L], L the longest; inputs are padded with 0, targets with ``IGNORE``.
        looks: int64 [B, L, 2].
        pieces: int64 [P, 4]: those of all plans, and the row of each.
        ends, starts: int64 [B].
    """

    inputs: Tensor
    targets: Tensor
    looks: Tensor
    pieces: Tensor
    ends: Tensor
    starts: Tensor

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Batch:
        """L is rounded up to a multiple of 32."""
        longest = -(-max(len(plan.inputs) for plan in plans) // 32) * 32
        inputs = torch.zeros(len(plans), longest, dtype=torch.long)
        targets = torch.full_like(inputs, IGNORE)
        looks = torch.full((len(plans), longest, 2), -1)
        for row, plan in enumerate(plans):
            inputs[row, : len(plan.inputs)] = torch.tensor(plan.inputs)
            targets[row, : len(plan.targets)] = torch.tensor(plan.targets)
            looks[row, : len(plan.looks)] = torch.tensor(plan.looks)
        pieces = [(*piece, row) for row, plan in enumerate(plans) for piece in plan.pieces]
        found = torch.tensor(pieces, dtype=torch.long).view(-1, 4)
        ends, starts = (torch.tensor([getattr(p, name) for p in plans]) for name in ("length", "start"))
        return cls(inputs, targets, looks, found, ends, starts)


@dataclass
class _Body:
    """Tokens behind the prompt, with the time that each is spoken in."""

    ids: list[int] = field(default_factory=list)
    looks: list[tuple[int, int]] = field(default_factory=list)

    def add(self, token: int, look: tuple[int, int] = (-1, -1)) -> None:
        self.ids.append(token)
        self.looks.append(look)


class Planner:
    """Draws windows of ``seconds`` (at most 30) from utterances.

    Shorter windows lie anywhere in the model's 30 s: every position and timestamp is learned from the start.
    """

    def __init__(self, utterances: Sequence[Utterance], vocabulary: SpeechVocabulary, seconds: int) -> None:
        self.vocabulary, self.length = vocabulary, seconds * RATE
        self._by_language: dict[Language, list[Utterance]] = defaultdict(list)
        self._by_voice: dict[str, list[Utterance]] = defaultdict(list)
        for one in utterances:
            self._by_language[one.language].append(one)
            self._by_voice[one.voice].append(one)

    def plan(self, rng: random.Random) -> Plan:
        """A window of training."""
        language = rng.choice(list(self._by_language))
        times = rng.random() < _TIMES_SHARE
        if rng.random() < _SILENT_SHARE:
            return self._silent(rng, language, times)
        translate = language == "de" and rng.random() < 2 * _TRANSLATE_SHARE
        plan = Plan(language=language, start=self._start(rng))
        body = _Body()
        self._fill(rng, plan, body, times, translate)
        if not plan.pieces:
            return self._silent(rng, language, times)
        task = self.vocabulary.tasks["translate" if translate else "transcribe"]
        self._frame(plan, self._before(rng, language, translate), task, times, body)
        return plan

    def whole(self, utterances: Sequence[Utterance], gap: int = 9600) -> Plan:
        """A window of a test: ``utterances`` in a row, ``gap`` samples before and between them."""
        plan, body = Plan(language=utterances[0].language), _Body()
        at = 0
        for one in utterances:
            at += gap // HOP * HOP
            self._say(plan, body, one, at, 0, True, False)
            at += one.samples
        plan.length = min(at + HOP * 10, self.length)
        self._frame(plan, [], self.vocabulary.tasks["transcribe"], True, body)
        return plan

    def _fill(self, rng: random.Random, plan: Plan, body: _Body, times: bool, translate: bool) -> None:
        short, pool = rng.random() < _SHORT_SHARE, self._by_language[plan.language]
        mine = self._by_voice[rng.choice(pool).voice]
        if rng.random() < _ONE_VOICE_SHARE and len(mine) > 20:
            pool = mine
        most = rng.randint(1, 3) if short else 99
        at = 0 if rng.random() < 0.25 else _steps(rng.uniform(0, 2.5 if rng.random() < 0.9 else 12))
        while len(plan.pieces) < most:
            one, first = rng.choice(pool), 0
            if not plan.pieces and rng.random() < _MIDWAY_SHARE and not translate:
                first = rng.randrange(len(one.words))
                first = first if one.words[first][1] >= 0 else 0
            skipped = one.words[first][1] // HOP * HOP if first else 0
            if at + one.samples - skipped > self.length or len(body.ids) > _MOST_TOKENS - 45:
                if times and at + RATE < self.length and plan.pieces and rng.random() < _CUT_SHARE:
                    self._begin(plan, body, one, at)
                    return
                break
            self._say(plan, body, one, at, first, times, translate)
            at += one.samples - skipped + _gap(rng)
        end = max((place + length for _, length, place in plan.pieces), default=0)
        more = _steps(rng.uniform(0, 1)) if rng.random() < 0.5 else self.length
        plan.length = min(end + more, self.length)

    def _say(
        self, plan: Plan, body: _Body, one: Utterance, at: int, first: int, times: bool, translate: bool
    ) -> None:
        """A sentence from its word ``first`` on, at sample ``at``."""
        skipped = one.words[first][1] // HOP * HOP if first else 0
        plan.pieces.append((one.offset + skipped, one.samples - skipped, at))
        shift = at - skipped
        start, end = (shift + one.words[first][1]) / RATE, (shift + one.bounds[1]) / RATE
        if times:
            self._time(plan, body, start)
        text = one.other if translate else " ".join(word for word, _, _ in one.words[first:])
        if translate:
            for word in text.split():
                for token in self.vocabulary.word(word):
                    body.add(token)
        else:
            for word, begins, ends in one.words[first:]:
                look = (-1, -1)
                if begins >= 0:
                    look = (
                        max((shift + begins) // HOP - _MARGIN, 0),
                        min((shift + ends) // HOP + _MARGIN, self.length // HOP - 1),
                    )
                for token in self.vocabulary.word(word):
                    body.add(token, look)
        if times:
            self._time(plan, body, end)
        plan.said.append((text, start, end))

    def _begin(self, plan: Plan, body: _Body, one: Utterance, at: int) -> None:
        """A sentence that the window cuts off: only its start is given."""
        plan.pieces.append((one.offset, (self.length - at) // HOP * HOP, at))
        plan.length = self.length
        self._time(plan, body, (at + one.bounds[0]) / RATE)

    def _start(self, rng: random.Random) -> int:
        return rng.randint(0, 30 * RATE // HOP - self.length // HOP)

    def _time(self, plan: Plan, body: _Body, seconds: float) -> None:
        step, last = round(seconds * 50), self.length // HOP - 1
        time = self.vocabulary.time(seconds + plan.start * HOP / RATE)
        body.add(time, (min(max(step - _NEAR, 0), last), min(step + _NEAR, last)))

    def _before(self, rng: random.Random, language: Language, translate: bool) -> list[int]:
        """Text of sentences before, with and without timestamps."""
        if rng.random() > _PREVIOUS_SHARE:
            return []
        wanted, times, found, at = (
            rng.randint(8, _MOST_PREVIOUS),
            rng.random() < 0.6,
            [self.vocabulary.previous],
            0.0,
        )
        while len(found) < wanted:
            one = rng.choice(self._by_language[language])
            text = one.other if translate else one.text
            inside = [token for word in text.split() for token in self.vocabulary.word(word)]
            until = min(at + len(inside) / 7, 30.0)
            found += [self.vocabulary.time(at), *inside, self.vocabulary.time(until)] if times else inside
            at = (until + 0.6) % 29
        return [found[0], *found[1:][-wanted:]]

    def _frame(self, plan: Plan, before: list[int], task: int, times: bool, body: _Body) -> None:
        """Inputs and targets of the whole; of the prompt, only the language is a target."""
        names = self.vocabulary
        language = names.languages[plan.language]
        prompt = [*before, names.start, language, task, *([] if times else [names.no_timestamps])]
        plan.inputs = [*prompt, *body.ids]
        first = len(prompt) - 1
        plan.targets = [IGNORE] * first + [*body.ids, names.end]
        plan.targets[len(before)] = language
        plan.looks = [(-1, -1)] * first + [*body.looks, (-1, -1)]
        assert len(plan.inputs) == len(plan.targets) == len(plan.looks)

    def _silent(self, rng: random.Random, language: Language, times: bool) -> Plan:
        """Nobody speaks: the first token is <|nospeech|>, and a transcript that is asked for is empty."""
        length, body = rng.choice((self.length, _steps(rng.uniform(1, 8)))), _Body()
        plan = Plan(language=language, length=length, start=self._start(rng))
        if times:
            body.add(self.vocabulary.time(plan.start * HOP / RATE))
        before = self._before(rng, language, False)
        self._frame(plan, before, self.vocabulary.tasks["transcribe"], times, body)
        plan.targets[len(before)] = self.vocabulary.no_speech
        return plan


def _steps(seconds: float) -> int:
    """Samples, a multiple of ``HOP``."""
    return int(seconds * RATE) // HOP * HOP


def _gap(rng: random.Random) -> int:
    return _steps(rng.uniform(0.1, 1.2) if rng.random() < 0.9 else rng.uniform(1, 5))
