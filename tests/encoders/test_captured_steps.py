"""The static buffers that CUDA graphs are captured over give the logits of eager steps; which steps replay
one; hooks. No graph is captured here.
"""

from __future__ import annotations

import pytest
import torch

from ingot import LLM
from ingot.errors import RequestError
from ingot.layers.step_layout import StepLayout
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from ingot.text.prompt import Input, Prompt
from tests.e2e.tiny import write_tiny
from tests.encoders import test_pictures, test_speech
from tests.encoders.conftest import Side
from tests.padded_step import padded_logits


@pytest.mark.parametrize("kind", ["speech", "pictures"])
def test_static_buffers_give_the_logits_of_eager_steps(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    side: Side = request.getfixturevalue(kind)
    llm = side.open(token_budget=24)
    runner, kinds = llm.executor.runner, []
    run, encoding = runner.run, runner.encoding
    assert encoding is not None

    def both(step: ScheduledBatch) -> torch.Tensor:
        logits = run(step)
        if encoding.place(step.layout):
            kinds.append(max(item.count for item in step.requests) > 1)
            torch.testing.assert_close(padded_logits(llm, step), logits, rtol=1e-5, atol=1e-5)
        return logits

    monkeypatch.setattr(runner, "run", torch.inference_mode()(both))
    spoken = [test_speech.prompt(one) for one in test_speech.MIXED if one[0] is not None]
    shown = [test_pictures.prompt(one) for one in test_pictures.MIXED]
    llm.generate(spoken if kind == "speech" else shown, test_speech.GREEDY)
    assert set(kinds) == {True, False}


def test_which_steps_a_graph_computes(speech: Side, pictures: Side) -> None:
    """Whether it has one at all, and whether it splices: then it is not one of decodes."""

    def graphs(side: Side, prompts: list[Prompt]) -> list[tuple[bool, bool]]:
        llm = side.open(token_budget=64)
        run, encoding, found = llm.executor.runner.run, llm.executor.runner.encoding, []
        assert encoding is not None

        def seen(step: ScheduledBatch) -> torch.Tensor:
            found.append((encoding.place(step.layout), encoding.splices))
            return run(step)

        llm.executor.runner.run = seen  # type: ignore[method-assign]
        llm.generate(prompts, max_new_tokens=3, ignore_eos=True)
        return found

    transcribed, silent = test_speech.prompt(test_speech.MIXED[0]), test_speech.prompt(test_speech.MIXED[1])
    plain, splices = (True, False), (True, True)
    assert graphs(speech, [transcribed]) == [plain] * 3
    assert graphs(speech, [transcribed, silent]) == [(False, False)] * 3
    assert graphs(pictures, [test_pictures.prompt(test_pictures.MIXED[0])]) == [splices, plain, plain]
    ends_with_one = [test_pictures.prompt([100])]
    assert graphs(pictures, ends_with_one) == [splices, plain, plain]
    assert graphs(pictures, [test_pictures.prompt(test_pictures.MIXED[1])]) == [plain] * 3


def test_placed_rows_do_not_outlive_their_step(pictures: Side) -> None:
    """A step that is too large for a graph leaves the rows of the one before; the next captured one none."""
    llm = pictures.open(token_budget=64)
    run, encoding, placed = llm.executor.runner.run, llm.executor.runner.encoding, []
    assert encoding is not None
    room = len(encoding._placed)
    large, plain = (StepLayout.of([0], [rows], [range(rows)], 1) for rows in (room + 1, 4))

    def seen(step: ScheduledBatch) -> torch.Tensor:
        logits = run(step)
        if encoding.splices:
            placed.append(int((encoding._placed >= 0).sum()))
            encoding.place(large)
            encoding.place(plain)
            placed.append(int((encoding._placed >= 0).sum()))
        return logits

    llm.executor.runner.run = seen  # type: ignore[method-assign]
    llm.generate([test_pictures.prompt(test_pictures.MIXED[0])], max_new_tokens=2, ignore_eos=True)
    assert placed == [25, 0]


def test_a_tap_sees_the_encoder_and_cross_attention(speech: Side) -> None:
    llm, spoken = speech.open(), test_speech.MIXED[2]
    with llm.tap("encoder.layers.*", "encoder.layers.*.mlp", "layers.*.encoder_attn", "layers.*") as seen:
        llm.logits(test_speech.prompt(spoken))
    shapes = {name: tuple(tensor.shape) for name, tensor in seen.items()}
    assert shapes["encoder.layers.1"] == shapes["encoder.layers.0.mlp"] == (17, 32)
    assert shapes["layers.1.encoder_attn"] == shapes["layers.1"] == (1, 32)


def test_an_engine_of_text_takes_no_inputs(tmp_path_factory: pytest.TempPathFactory) -> None:
    llm = LLM(write_tiny(tmp_path_factory.mktemp("text") / "tiny"), "cpu")
    prompt = Prompt(["a", Input(torch.zeros(3))])
    for call in (llm.generate, llm.logits, llm.explain, llm.prompt_ids):
        with pytest.raises(RequestError, match="only text and token ids"):
            call(prompt)  # type: ignore[operator]
