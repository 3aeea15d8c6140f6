"""A model that says what it is given, window by window, so that recordings are tested without weights.

found, asked = scripted([[FIRST, 5, 6, FIRST + 100]], seconds=3.0, language="en")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ingot.llm.outputs import Answer, Output
from ingot.models.speech_tokens import SpeechTokens
from ingot.runtime.sampling.token_logprobs import TokenLogprobs
from ingot.speech.recording_features import Transcript, transcribe_recording
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.window_decoding import DecodeRequest, Vocabulary
from ingot.speech.word_times import ScoreRequest

TOKENS = SpeechTokens.of_vocabulary(51865)
FIRST = TOKENS.first_timestamp
RATE = 16000


def at(seconds: float) -> int:
    """The timestamp of a time in its window."""
    return FIRST + round(seconds / 0.02)


def plain_vocabulary(**changes: Any) -> Vocabulary:
    """Without a tokenizer, if none is given: text is ids."""
    plain = {"tokenizer": None, "longest": 448, "begin_suppressed": (TOKENS.end,)}
    return Vocabulary(TOKENS, **plain | changes)


def scripted(
    windows: Sequence[Sequence[int]],
    seconds: float,
    vocabulary: Vocabulary | None = None,
    spacing: int = 25,
    **options: Any,
) -> tuple[Transcript, list[DecodeRequest | ScoreRequest]]:
    """The transcript of a recording in whose windows these tokens are said, one after another, and what was
    asked. Each token of text attends to the ``spacing`` positions behind those of the token before it.
    """
    left, asked = [list(one) for one in windows], []
    wanted = TranscribeOptions(**{"language": "en", "temperatures": (0.0,)} | options)
    samples = torch.zeros(round(seconds * RATE))
    asking = transcribe_recording(vocabulary or plain_vocabulary(), samples, 80, wanted, heads=[(0, 0)])
    try:
        request = next(asking)
        while True:
            asked.append(request)
            ids = list(request.prompt.parts[1])  # type: ignore[arg-type]
            if isinstance(request, ScoreRequest):
                request = asking.send(_scores(ids, spacing))
            else:
                request = asking.send(_output(ids, left.pop(0)))
    except StopIteration as ended:
        assert not left, "every window was asked for"
        return ended.value, asked


def _output(ids: list[int], said: list[int]) -> Output:
    reported = [TokenLogprobs(token, -0.1, ((TOKENS.no_speech, -9.0),)) for token in said]
    return Output(ids, [Answer("", said, "stop", TOKENS.end, reported, -0.1)])


def _scores(ids: list[int], spacing: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.zeros(len(ids), 1, 1500)
    for row in range(3, len(ids)):  # behind the start, language and task
        scores[row, :, spacing * (row - 3) : spacing * (row - 2)] = 9.0
    return torch.full((len(ids) - 1,), -0.5), scores
