"""Shared memory of a server and its engine: a slot returns what was written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.config.sampling_params import SamplingParams
from ingot.llm.outputs import Answer, Output
from ingot.llm.prompt_inputs import Input, Prompt
from ingot.serve import speech_service
from ingot.serve.engine_calls.speech_windows import WindowReader, Windows
from ingot.speech.recording_features import Transcript
from ingot.speech.window_decoding import DecodeRequest
from ingot.speech.word_times import ScoreRequest
from tests.serve.client import ROOT

SHAPE = (3, 40)
READ = """
import sys, json
from ingot.serve.engine_calls.speech_windows import WindowReader
print(json.dumps(WindowReader(int(sys.argv[1]), (3, 40)).get(int(sys.argv[2])).tolist()))
"""


def test_slots_do_not_overlap_and_are_reused() -> None:
    windows = Windows(SHAPE)
    reader = WindowReader.of(windows.handle)
    assert reader is not None
    first, second = torch.randn(SHAPE), torch.randn(40, 3, dtype=torch.float64).T
    with windows.slot() as a, windows.slot() as b:
        assert a != b
        windows.put(a, first)
        windows.put(b, second)
        assert torch.equal(reader.get(a), first)
        assert torch.equal(reader.get(b), second.float())
        kept = reader.get(a)
        windows.put(a, second)
        assert torch.equal(kept, first)
    with windows.slot() as c, windows.slot() as d:
        assert {c, d} == {a, b}


@pytest.mark.slow
def test_another_process_reads_it() -> None:
    windows = Windows(SHAPE)
    values = torch.arange(120.0).reshape(SHAPE)
    with windows.slot(), windows.slot() as slot:
        windows.put(slot, values)
        words = [sys.executable, "-c", READ, str(windows.descriptor), str(slot)]
        found = subprocess.run(
            words, capture_output=True, check=True, pass_fds=[windows.descriptor], cwd=ROOT
        )
    assert torch.equal(torch.tensor(json.loads(found.stdout)), values)


def test_nothing_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        Windows(SHAPE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_model_of_text_has_none() -> None:
    assert WindowReader.of(None) is None


def test_a_window_counts_once_however_often_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """At another temperature, and for the times of its words: it is written and encoded once."""

    def asking(*_: Any) -> Any:
        for name in (b"first", b"second"):
            prompt = Prompt([Input(torch.zeros(SHAPE), name), [1, 2, 3]])
            for _ in range(2):
                yield DecodeRequest(prompt, SamplingParams())
            yield ScoreRequest(prompt, [(0, 0)], 9)
        return Transcript(duration=1.0)

    monkeypatch.setattr(speech_service, "transcribe_recording", asking)
    written: list[int] = []
    windows: Any = SimpleNamespace(shape=SHAPE, put=lambda slot, features: written.append(slot))
    unused: Any = None
    work = speech_service._Work(unused, unused, windows, 7, unused, [])
    job, output = work.next(None), Output([], [Answer("", [4, 5], "stop", 6)])
    while job is not None:
        job = work.next((torch.zeros(2), torch.zeros(3, 1, 1)) if job.attend is not None else output)
    whole = work.result(1500)
    assert written == [7, 7]
    assert (whole.audio_tokens, whole.prompt_tokens, whole.new_tokens) == (2 * 1500, 4 * 3, 4 * 2)
