"""Windows whose steps run ahead of the host, beside other requests: the same tokens and values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ingot.audio.log_mel import log_mel
from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.llm.outputs import Output
from ingot.speech.speech_options import TranscribeOptions
from ingot.text.prompt import Input, Prompt
from tests.speech.test_huggingface import Both, noise, opened

NEW, PREVIOUS = 12, tuple(range(300, 380))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return opened(tmp_path_factory.mktemp("steps"), "multilingual")


@pytest.fixture(scope="module")
def windows(both: Both) -> list[torch.Tensor]:
    return [log_mel(noise(30.0, seed), both.mels) for seed in (1, 2)]


def asked(both: Both, window: torch.Tensor, previous: tuple[int, ...] = (), **values: Any) -> Any:
    """A window's prompt and values, as ``decode_window`` asks."""
    names = both.tokens
    timestamps = values.pop("timestamps", True)
    frame = names.prompt("de", "transcribe", timestamps=timestamps)
    rules = both.ours.vocabulary.rules(TranscribeOptions(timestamps=timestamps), framed=len(frame) - 1)
    given: dict[str, Any] = {"max_new_tokens": NEW, "logprobs": 0, "stop_token_ids": (names.end,), "seed": 3}
    before = [names.previous, *previous] if previous else []
    return Prompt([Input(window), [*before, *frame]]), SamplingParams(transcript=rules, **given | values)


def answers(both: Both, wanted: list[Any], run_ahead: bool) -> list[Output]:
    executor = both.ours.llm.executor
    executor.run_ahead = run_ahead
    try:
        return both.ours.llm.generate([one for one, _ in wanted], [values for _, values in wanted])
    finally:
        executor.run_ahead = False


def reported(output: Output) -> list[Any]:
    return [(one.token_ids, one.logprobs, one.stop_logprob) for one in output.answers]


def test_steps_that_run_ahead_give_the_same(
    both: Both, windows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = windows
    text = (Prompt([Input(first), [1, 2, 3]]), SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    wanted = [
        asked(both, first),
        asked(both, second, timestamps=False),
        text,
        asked(both, second, PREVIOUS, temperature=0.8, n=2, logprobs=3),
        asked(both, first, repetition_penalty=1.5, min_new_tokens=4),
        asked(both, second, logprobs=None),
        (text[0], text[1].replace(presence_penalty=1.0)),
    ]
    launched, runner = [], both.ours.llm.executor.runner
    launch = runner.launch

    def seen(*given: Any) -> Any:
        launched.append(given)
        return launch(*given)

    monkeypatch.setattr(runner, "launch", seen)
    ahead = [reported(one) for one in answers(both, wanted, True)]
    assert len(launched) >= NEW, "transcripts wait for the host"
    assert ahead == [reported(one) for one in answers(both, wanted, False)]
    for (prompt, values), together in zip(wanted, ahead, strict=True):
        alone = reported(answers(both, [(prompt, values)], True)[0])
        assert [ids for ids, *_ in alone] == [ids for ids, *_ in together]
    assert runner.feed.transcripts.num_held == 0


@pytest.mark.parametrize("run_ahead", [False, True])
def test_no_speech_is_reported_behind_the_start(
    both: Both, windows: list[torch.Tensor], run_ahead: bool
) -> None:
    """Also where the prompt's blocks are known from the request before."""
    prompt, values = asked(both, windows[0], PREVIOUS)
    ids = prompt.parts[1]
    start = ids.index(both.tokens.start)
    logits = both.theirs(windows[0][None], decoder_input_ids=torch.tensor([ids])).logits[0, start].detach()
    wanted = float(logits.log_softmax(0)[both.tokens.no_speech])
    for _ in range(2):
        found = answers(both, [(prompt, values)], run_ahead)[0].answers[0].logprobs
        assert found is not None
        (probe,) = found[0].top
        assert probe[0] == both.tokens.no_speech
        assert math.isclose(probe[1], wanted, abs_tol=1e-4)
        assert [one.top for one in found[1:]] == [()] * (len(found) - 1)


@pytest.mark.parametrize("shorter", [0, 1])
def test_a_frame_as_long_as_the_prompt_is_refused(
    both: Both, windows: list[torch.Tensor], shorter: int
) -> None:
    _, values = asked(both, windows[0])
    assert values.transcript is not None
    start, framed = both.tokens.start, values.transcript.framed
    with pytest.raises(RequestError, match="lacks the token that starts it"):
        both.ours.llm.generate(Prompt([Input(windows[0]), [start] * (framed - shorter)]), values)
    both.ours.llm.generate(
        Prompt([Input(windows[0]), [both.tokens.start] * (values.transcript.framed + 1)]), values
    )
