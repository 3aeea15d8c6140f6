"""Decode steps of speech in one call on a CPU, beside the same steps module by module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, Input, Prompt, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.transcript_rules import TranscriptRules
from ingot.kernels.cpu.llvm_module import host_cpu
from ingot.layers.cpu_layers import CpuLayers
from ingot.layers.forward_batch import ForwardBatch
from tests.encoders.speech import FRAMES, MELS, VOCAB, write_speech
from tests.quant.test_cpu_layers import row_of

pytestmark = pytest.mark.usefixtures("cpu_kernels")
PARAMS = SamplingParams(max_new_tokens=10, ignore_eos=True, temperature=0.0, logprobs=5)
SIZES = {"d_model": 64, "decoder_ffn_dim": 128, "encoder_ffn_dim": 64}
WINDOWS = ((1, FRAMES), (2, 34), (3, 2), (4, FRAMES), (5, 64))  # seed and frames
Step = Callable[[CpuLayers, torch.Tensor, ForwardBatch], torch.Tensor]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder, made = tmp_path_factory.mktemp("spoken"), dict[str, Path]()
    write_speech(folder / "tiny", 3, **SIZES)

    def engine(scheme: str) -> Path:
        if scheme not in made:
            quant = QuantConfig(scheme, group=32) if scheme == "w4a16" else QuantConfig(scheme)
            made[scheme] = build(folder / "tiny", folder / scheme, quant=quant, dtype="bf16", proof=False)
        return made[scheme]

    return engine


def prompt(seed: int, frames: int) -> Prompt:
    """Prompts of other lengths, so that a step's rows are at other places."""
    speech = torch.randn(MELS, frames, generator=torch.Generator().manual_seed(seed))
    return Prompt([Input(speech), [3 + 7 * i % 90 for i in range(2 + 6 * seed)]])


def opened(engine: Path, **runtime: Any) -> LLM:
    return LLM(engine, "cpu", runtime=RuntimeConfig(block_size=16, **runtime), max_batch_size=5)


def logprobs(llm: LLM, prompts: list[Prompt]) -> list[tuple[list[int], torch.Tensor]]:
    found = []
    for one in llm.generate(prompts, PARAMS):
        answer = one.answers[0]
        assert answer.logprobs is not None
        found.append((list(answer.token_ids), torch.tensor([token.logprob for token in answer.logprobs])))
    return found


def watch(monkeypatch: pytest.MonkeyPatch, instead: Step) -> None:
    monkeypatch.setattr(CpuLayers, "normed", instead)


def watched_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each step that goes in one call, from here on."""
    rows: list[int] = []
    normed = CpuLayers.normed

    def counted(self: CpuLayers, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        rows.append(len(hidden))
        return normed(self, hidden, batch)

    watch(monkeypatch, counted)
    return rows


@pytest.mark.stays("none", "w4a16")
@pytest.mark.parametrize("scheme", ["none", "w8a16", "w4a16"])
def test_steps_are_those_of_the_modules(
    scheme: str, engines: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one window and of several of other lengths, which have the same bits."""
    rows = watched_rows(monkeypatch)
    llm, prompts = opened(engines(scheme)), [prompt(*window) for window in WINDOWS]
    together = logprobs(llm, prompts)
    assert rows == [5] * 9
    alone = [logprobs(llm, [one])[0] for one in prompts]
    assert rows[9:] == [1] * 9 * 5
    plain = opened(engines(scheme), fused_decode=False)
    for one, (ids, beside), (own_ids, own) in zip(prompts, together, alone, strict=True):
        expected_ids, expected = logprobs(plain, [one])[0]
        assert ids == own_ids == expected_ids
        assert torch.equal(beside, own)
        assert torch.allclose(own, expected, atol=2e-5)
    assert len(rows) == 9 * 6


def test_steps_of_8_bits_are_those_of_the_modules(
    engines: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for values in the middle between two of 8 bits, which few steps have."""
    cpu = host_cpu()
    if cpu is None or not cpu.vnni:
        pytest.skip("this processor has no products of int8 that we use")
    llm = opened(engines("w8a8"))
    normed, forward = CpuLayers.normed, llm.executor.runner.forward
    differences: list[float] = []

    def beside(self: CpuLayers, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        _, expected = forward.with_hidden(batch)  # into the same slots of the cache
        found = normed(self, hidden, batch)
        differences.extend((found - expected).abs().amax(1).tolist())
        return found

    watch(monkeypatch, beside)
    logprobs(llm, [prompt(*window) for window in WINDOWS])
    assert len(differences) == 5 * 9
    assert max(differences) < 0.5
    assert sorted(differences)[38] < 2e-5


def test_on_any_threads_a_step_has_the_same_bits(
    engines: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also rows apart, and on more threads than there are heads of a row."""
    normed, threads, steps = CpuLayers.normed, torch.get_num_threads(), []

    def on_each(self: CpuLayers, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        found = []
        for count in (1, 3, 5):
            torch.set_num_threads(count)
            found.append(normed(self, hidden, batch).clone())
        apart = [
            normed(self, hidden[row : row + 1], row_of(batch, row)).clone() for row in range(len(hidden))
        ]
        torch.set_num_threads(threads)
        steps.append(all(torch.equal(found[0], other) for other in (*found[1:], torch.cat(apart))))
        return found[0]

    watch(monkeypatch, on_each)
    try:
        logprobs(opened(engines("none")), [prompt(*window) for window in WINDOWS])
    finally:
        torch.set_num_threads(threads)
    assert len(steps) == 9
    assert all(steps)


def test_beside_a_request_without_speech_steps_go_module_by_module(
    engines: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = watched_rows(monkeypatch)
    llm, spoken = opened(engines("none")), prompt(1, FRAMES)
    written = Prompt([[5, 9, 11]])
    together = logprobs(llm, [spoken, written])
    assert rows == []
    alone = [logprobs(llm, [one])[0] for one in (spoken, written)]
    assert rows == [1] * 9  # those of speech
    assert [ids for ids, _ in together] == [ids for ids, _ in alone]
    assert all(
        torch.allclose(one, other, atol=2e-5) for (_, one), (_, other) in zip(together, alone, strict=True)
    )


def test_an_encoder_whose_cache_has_8_bits_is_read_module_by_module(engines: Callable[[str], Path]) -> None:
    llm = opened(engines("none"), kv_dtype="int8")
    assert llm.executor.runner.forward._cpu_layers is None


@pytest.mark.parametrize("fused", [False, True])
def test_a_probe_beside_a_row_that_wants_no_logits(fused: bool, engines: Callable[[str], Path]) -> None:
    """One request's only token wants a token and a probe, and the other's prompt goes on in the next step:
    both of the step's logits are the first row's. Also where a step is fused, as on a GPU.
    """
    rules = TranscriptRules(end=2, no_speech=41, first_timestamp=VOCAB - 8, framed=0, timestamps=False)
    asked = SamplingParams(max_new_tokens=2, transcript=rules, logprobs=0, ignore_eos=True)
    speech = Input(torch.randn(MELS, FRAMES, generator=torch.Generator().manual_seed(5)))
    prompts = [Prompt([speech, ids]) for ids in ([7], [9, 11, 13])]
    runtime = RuntimeConfig(block_size=16, token_budget=2)
    llm = LLM(engines("none"), "cpu", runtime=runtime, max_batch_size=2)
    forward = llm.executor.runner.forward
    if fused:
        forward.fused, forward._cpu_layers = True, None

    def probed(given: list[Prompt]) -> list[float]:
        return [one.logprobs[0].top[0][1] for one in llm.generate(given, asked) if one.logprobs]

    assert probed(prompts) == pytest.approx(probed(prompts[:1]) + probed(prompts[1:]), abs=1e-4)
