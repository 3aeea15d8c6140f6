"""The value of no_speech, wherever a chunk or a cache block ends beside its place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import SamplingParams
from ingot.config.transcript_rules import TranscriptRules
from ingot.llm import LLM
from ingot.llm.prompt_inputs import Input, Prompt
from tests.encoders.speech import FRAMES, MELS, VOCAB, write_speech

BLOCK, FRAMED, NO_SPEECH = 4, 2, 41
PLACES = (0, 1, 2, 3, 4, 5, 7, 8, 9)  # of the token that starts the transcript: around edges of blocks
RULES = TranscriptRules(
    end=2, no_speech=NO_SPEECH, first_timestamp=VOCAB - 8, framed=FRAMED, timestamps=False
)
ASKED = SamplingParams(max_new_tokens=3, transcript=RULES, logprobs=0, ignore_eos=True)


class Case:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_speech(folder)
        generator = torch.Generator().manual_seed(5)
        self.features = torch.randn(MELS, FRAMES, generator=generator)
        self.ids = torch.randint(3, VOCAB, (max(PLACES) + FRAMED + 1,), generator=generator).tolist()

    def prompt(self, place: int) -> Prompt:
        return Prompt([Input(self.features), self.ids[: place + FRAMED + 1]])

    def expected(self, places: Sequence[int]) -> list[float]:
        """By Hugging Face's class, which computes the whole prompt at once."""
        with torch.inference_mode():
            logits = self.model(self.features[None], decoder_input_ids=torch.tensor([self.ids])).logits[0]
        return [float(logits[place].log_softmax(0)[NO_SPEECH]) for place in places]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("probed"))


@pytest.mark.stays("1-False", "3-True", "8-True", "64-False")
@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 4, 5, 8, 10, 64])
def test_the_probe_is_read_where_it_stands(case: Case, budget: int, run_ahead: bool) -> None:
    """One after another (the later ones find the first blocks in the prefix cache), then all at once."""
    config = RuntimeConfig(block_size=BLOCK, token_budget=budget, run_ahead=run_ahead)
    llm = LLM(case.folder, "cpu", runtime=config, max_batch_size=len(PLACES))
    llm.executor.run_ahead = run_ahead  # on a CPU it is off by default
    wanted = case.expected(PLACES)
    prompts = [case.prompt(place) for place in PLACES]
    for outputs in ([llm.generate(one, ASKED)[0] for one in prompts], llm.generate(prompts, ASKED)):
        for output, value in zip(outputs, wanted, strict=True):
            first, *rest = output.logprobs or ()
            assert [token for token, _ in first.top] == [NO_SPEECH]
            assert math.isclose(first.top[0][1], value, abs_tol=1e-4)
            assert [one.top for one in rest] == [(), ()]
