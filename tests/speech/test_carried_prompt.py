"""What each window reads of the initial prompt and of the text before it, as OpenAI's code has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.audio.log_mel import RATE
from ingot.llm.outputs import Answer, Output
from ingot.models.speech_tokens import SpeechTokens
from ingot.runtime.selection import TokenLogprobs
from ingot.speech.recording_features import transcribe_recording
from ingot.speech.segments import Segment
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.window_decoding import DecodeRequest, Vocabulary
from ingot.text.prompt import Input
from tests.speech.scripted import FIRST, at, scripted

LONGEST, WINDOWS = 40, 4
MOST = LONGEST // 2 - 1
TOKENS = SpeechTokens.of_model(51865, None)


def prompts(**options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """What each window reads between ``<|startofprev|>`` and its start, and what it then says."""
    vocabulary = Vocabulary.of(TOKENS, None, LONGEST)
    given = TranscribeOptions(language="en", temperatures=(0.0,), **options)
    transcribed: list[Segment] = []
    samples = torch.zeros(WINDOWS * 30 * RATE)
    asking = transcribe_recording(vocabulary, samples, 80, given, transcribed.append)
    read: list[list[int]] = []
    output = None
    while True:
        try:
            asked = next(asking) if output is None else asking.send(output)
        except StopIteration:
            return read, [segment.tokens for segment in transcribed]
        assert isinstance(asked, DecodeRequest)
        sound, ids = asked.prompt.parts
        assert isinstance(sound, Input)
        ids = list(ids)  # type: ignore[arg-type]
        start = ids.index(TOKENS.start)
        assert ids[:start][:1] in ([], [TOKENS.previous])
        read.append(ids[1:start])
        first, number = TOKENS.first_timestamp, 100 * len(read)
        said = [first, *range(number, number + 7), first + 1500]
        reported = [TokenLogprobs(one, -0.1, ((one, -9.0),)) for one in said]
        output = Output(ids, [Answer(token_ids=said, text="", finish_reason="stop", logprobs=reported)])


def originals(initial: list[int], said: list[list[int]], carry: bool, condition: bool) -> list[list[int]]:
    """``whisper/transcribe.py`` and ``_get_initial_tokens`` of ``decoding.py``, without temperatures."""
    tokens, reset, found = list(initial), 0, []
    left = MOST - len(initial)
    for one in said:
        prompt = initial + tokens[max(len(initial), reset) :][-left:] if carry else tokens[reset:]
        found.append(prompt[-MOST:])
        tokens += one
        if not condition:
            reset = len(tokens)
    return found


@pytest.mark.grid(1)
@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("length", [0, 3, MOST - 1])
def test_each_window_reads_what_the_originals_does(length: int, carry: bool, condition: bool) -> None:
    initial = list(range(5000, 5000 + length))
    options = {"carry_initial_prompt": carry, "condition_on_previous_text": condition}
    read, said = prompts(initial_prompt=" ".join(map(str, initial)), **options)
    assert len(said) == WINDOWS
    assert read == originals(initial, said, carry, condition)


@pytest.mark.parametrize("length", [MOST, MOST + 5])
def test_a_prompt_that_leaves_no_room_is_read_alone(length: int) -> None:
    initial = list(range(5000, 5000 + length))
    read, _ = prompts(initial_prompt=" ".join(map(str, initial)), carry_initial_prompt=True)
    assert read == [initial[-MOST:]] * WINDOWS


def test_hotwords_stand_before_it() -> None:
    read, said = prompts(initial_prompt="5000 5001", carry_initial_prompt=True, hotwords="6000")
    assert read[1] == [6000, 5000, 5001, *said[0]]
    assert read[3] == [6000, 5000, 5001, *[token for one in said[:3] for token in one][-(MOST - 3) :]]


@pytest.mark.parametrize(
    ("temperature", "condition", "reads"),
    [(0.0, True, True), (0.5, True, True), (0.6, True, False), (1.0, True, False), (0.0, False, False)],
)
def test_a_text_of_a_high_temperature_is_not_read(temperature: float, condition: bool, reads: bool) -> None:
    """As in the original, above 0.5; the prompt of the window behind it has nothing before its start."""
    first, second = [FIRST, 5, 6, at(30.0)], [FIRST, 7, at(2.0)]
    options = {"temperatures": temperature, "condition_on_previous_text": condition}
    _, asked = scripted([first, second], seconds=32.0, **options)
    ids = list(asked[1].prompt.parts[1])  # type: ignore[arg-type]
    assert ids[: ids.index(TOKENS.start)] == ([TOKENS.previous, *first] if reads else [])
