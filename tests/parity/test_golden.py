"""Outputs of the original implementations: Qwen v1 in both forms, and a trained LLaMA.

What each array is, golden/README.md says. Our convention for an end token: it stops the answer and is not in
``token_ids``; the original gives it, and after a stop word an end token more.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.config.decoder_config import RopeConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.layers.rotary import RotaryTable, frequencies
from tests.kernels.flat_calls import rope_kv_write
from tests.tiny_models import edit_config

TOLERANCE = 1e-4  # absolute, on logits of magnitude 10
V1_1 = ("qwen_v1_1_safetensors", "qwen_v1_1_bin")
QWEN = (*V1_1, "qwen_v1_0_bin")
GREEDY = ("short", "cross", "beyond")
FLAGS = {
    "on": (True, True),
    "off": (False, False),
    "ntkonly": (True, False),
    "lognonly": (False, True),
}
Arrays = Mapping[str, np.ndarray]


@functools.cache
def load(folder: Path, token_budget: int = 2048) -> LLM:
    runtime = RuntimeConfig(block_size=16, token_budget=token_budget)
    return LLM(folder, "cpu", max_batch_size=8, max_seq_len=256, runtime=runtime)


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def greedy_arrays(golden: Path, name: str) -> Arrays:
    """``X_prompt_ids``, ``X_new_ids`` ... of a model, under the same names for both forms."""
    if name in V1_1:
        return arrays(golden / name / "greedy.npz")
    found = arrays(golden / name / "arrays.npz")
    return {k.removeprefix("greedy_"): v for k, v in found.items() if k.startswith("greedy_")}


def close(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    assert tuple(ours.shape) == theirs.shape
    return float((ours - torch.from_numpy(theirs)).abs().max()) <= TOLERANCE


@pytest.fixture(scope="module")
def flagged(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model's folder with its long-context flags set: flagged(name, "ntkonly")."""
    root = tmp_path_factory.mktemp("flags")

    @functools.cache
    def make(name: str, flags: str) -> Path:
        folder = root / name / flags
        shutil.copytree(golden / name / "hf", folder)
        ntk, logn = FLAGS[flags]
        edit_config(folder, use_dynamic_ntk=ntk, use_logn_attn=logn)
        return folder

    return make


def states(llm: LLM, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, [layers + 2, L, H] hidden states: embedding, every layer, final norm)."""
    with llm.tap("layers.*", "embed_tokens", "norm") as seen:
        logits = llm.logits(ids)
    names = ["embed_tokens", *(f"layers.{i}" for i in range(len(seen) - 2)), "norm"]
    return logits, torch.stack([seen[name] for name in names])


@pytest.mark.parametrize("name", V1_1)
def test_short_prompts(golden: Path, name: str) -> None:
    short, llm = arrays(golden / name / "short.npz"), load(golden / name / "hf")
    prompts = [key.removesuffix("_ids") for key in short if key.endswith("_ids")]
    assert len(prompts) >= 2
    for prompt in prompts:
        assert close(llm.logits(short[f"{prompt}_ids"].tolist()), short[f"{prompt}_logits"]), prompt


@pytest.mark.parametrize("name", V1_1)
def test_hidden_states_of_every_layer(golden: Path, name: str) -> None:
    short, long, llm = (
        arrays(golden / name / "short.npz"),
        arrays(golden / name / "long.npz"),
        load(golden / name / "hf"),
    )
    assert close(states(llm, short["short0_ids"].tolist())[1], short["short0_hidden"])
    assert close(states(llm, long["long0_ids"].tolist())[1], long["long0_on_hidden"])


@pytest.mark.stays("qwen_v1_1_safetensors")
@pytest.mark.parametrize("name", QWEN)
def test_engine_gives_the_same(golden: Path, name: str, tmp_path: Path) -> None:
    """Built with bf16 weights, as stored, and run in fp32."""
    build(golden / name / "hf", tmp_path / "engine", max_seq_len=256, max_batch_size=8, device="cpu")
    llm = LLM(tmp_path / "engine", "cpu")
    assert llm.engine.manifest.build.dtype == "bf16"
    greedy = greedy_arrays(golden, name)
    for prompt in GREEDY:
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        ids = llm.generate(greedy[f"{prompt}_prompt_ids"].tolist(), params)[0].token_ids
        assert ids == greedy[f"{prompt}_new_ids"].tolist()


@pytest.mark.grid
@pytest.mark.parametrize("token_budget", [2048, 17])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", V1_1)
def test_long_prompts(golden: Path, flagged: Any, name: str, flags: str, token_budget: int) -> None:
    """Beyond seq_length, with each long-context flag, whole and in chunks."""
    long, llm = arrays(golden / name / "long.npz"), load(flagged(name, flags), token_budget)
    found = [key for key in long if f"_{flags}_logits" in key]
    assert found
    for key in found:
        logits = llm.logits(long[f"{key.partition('_')[0]}_ids"].tolist())
        expected = long[key]
        assert close(logits[-len(expected) :], expected), key


@pytest.mark.parametrize("name", V1_1)
def test_batch(golden: Path, name: str) -> None:
    """Rows of several lengths in one step; each gives what it gives alone."""
    batch, llm = arrays(golden / name / "batch.npz"), load(golden / name / "hf")
    lengths = batch["batch_lengths"].tolist()
    for row, length in enumerate(lengths):
        llm.executor.add_reading(f"batch{row}", batch["batch_input_ids"][row, :length].tolist())
    llm.executor.step()
    assert not llm.executor.has_work, "one step takes the whole batch"
    for row, length in enumerate(lengths):
        assert close(llm.executor.take_reading(f"batch{row}").kept, batch["batch_logits"][row, :length])


@pytest.mark.parametrize("prompt", GREEDY)
@pytest.mark.parametrize("name", QWEN)
def test_greedy_ids_and_step_logits(golden: Path, name: str, prompt: str) -> None:
    """The rotary base that the prompt chose holds while decoding; logits through their log-probabilities."""
    greedy, llm = greedy_arrays(golden, name), load(golden / name / "hf")
    expected = torch.from_numpy(greedy[f"{prompt}_step_logits"]).log_softmax(-1)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=20)
    output = llm.generate(greedy[f"{prompt}_prompt_ids"].tolist(), params)[0]
    assert output.token_ids == greedy[f"{prompt}_new_ids"].tolist()
    assert output.logprobs is not None
    for row, step in zip(expected, output.logprobs, strict=True):
        assert len(step.top) == 20
        for token, logprob in step.top:
            assert logprob == pytest.approx(float(row[token]), abs=TOLERANCE)


@pytest.mark.parametrize("prompt", GREEDY)
@pytest.mark.parametrize("name", V1_1)
def test_greedy_ids_without_flags(golden: Path, flagged: Any, name: str, prompt: str) -> None:
    greedy, llm = greedy_arrays(golden, name), load(flagged(name, "off"))
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    output = llm.generate(greedy[f"{prompt}_prompt_ids"].tolist(), params)[0]
    assert output.token_ids == greedy[f"{prompt}_off_new_ids"].tolist()


@pytest.mark.parametrize("name", V1_1)
def test_all_greedy_prompts_in_flight_together(golden: Path, name: str) -> None:
    """Each request keeps its own rotary base; the original's one model object cannot do this."""
    greedy, llm = greedy_arrays(golden, name), load(golden / name / "hf")
    prompts = [greedy[f"{p}_prompt_ids"].tolist() for p in GREEDY]
    outputs = llm.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert [o.token_ids for o in outputs] == [greedy[f"{p}_new_ids"].tolist() for p in GREEDY]


@pytest.mark.parametrize("name", V1_1)
def test_repetition_penalty(golden: Path, name: str) -> None:
    greedy, llm = greedy_arrays(golden, name), load(golden / name / "hf")
    expected = greedy["short_reppen1.1_new_ids"].tolist()
    assert expected != greedy["short_new_ids"].tolist()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, repetition_penalty=1.1)
    assert llm.generate(greedy["short_prompt_ids"].tolist(), params)[0].token_ids == expected


@pytest.mark.parametrize("name", V1_1)
def test_stop_words(golden: Path, name: str) -> None:
    """stop1 is one token, stop2 two: the original ends with (stop word, eos)."""
    greedy, llm = greedy_arrays(golden, name), load(golden / name / "hf")
    prompt = greedy["short_prompt_ids"].tolist()
    one, expected = greedy["stop1_stop_word"].tolist(), greedy["stop1_new_ids"].tolist()
    answer = llm.generate(prompt, SamplingParams(stop_token_ids=tuple(one)))[0].answers[0]
    assert answer.token_ids == expected[:-2]
    assert (answer.finish_reason, answer.stopped_by) == ("stop", one[0])
    two, expected = greedy["stop2_stop_word"].tolist(), greedy["stop2_new_ids"].tolist()
    assert expected[-3:-1] == two
    answer = llm.generate(prompt, SamplingParams(stop_token_ids=(two[-1],)))[0].answers[0]
    assert answer.token_ids == expected[:-2]
    assert answer.stopped_by == two[-1]


@pytest.mark.parametrize("name", QWEN)
def test_generation_config_is_the_default(golden: Path, name: str) -> None:
    written = json.loads((golden / name / "hf" / "generation_config.json").read_text())
    params = load(golden / name / "hf").default_params
    assert params.temperature == 1.0
    assert (params.top_k, params.top_p) == (written["top_k"], written["top_p"])
    assert params.max_new_tokens == written["max_new_tokens"]
    assert params.repetition_penalty == written.get("repetition_penalty", 1.0)
    assert written["eos_token_id"] in load(golden / name / "hf").executor.stop_ids


def test_alpha_tables(golden: Path) -> None:
    """The table's section for every prompt length has the base of the original's alpha."""
    for table in json.loads((golden / V1_1[0] / "alpha_tables.json").read_text()):
        seq_length = table["seq_length"]
        lengths = {int(n): alpha for n, alpha in table["ntk_alpha_by_prefill_length"].items()}
        config = RopeConfig(dim=4, scaling="qwen_ntk", original_max=seq_length)
        rope = RotaryTable(config, max(lengths))
        for length, alpha in lengths.items():
            row = rope.table[rope.offset(length) + 1]
            slow = 10000.0 ** (-1 / 2) * alpha ** (-(4 / 2) / 2)  # second channel pair, base · alpha^(4/2)
            assert torch.allclose(frequencies(config, alpha), torch.tensor([1.0, slow]), rtol=1e-6)
            assert torch.allclose(
                row, torch.tensor([math.cos(1), math.cos(slow), math.sin(1), math.sin(slow)])
            )


def test_logn_factors(golden: Path) -> None:
    """A query of ones without rotation comes out of the cache write as the factor of its position."""
    for table in json.loads((golden / V1_1[0] / "alpha_tables.json").read_text()):
        factors = {int(n): f for n, f in table["logn_by_1based_position"].items()}
        positions = torch.tensor([n - 1 for n in factors])
        count = len(positions)
        cache = torch.zeros(1, 1, 16, 8)
        query = rope_kv_write(
            torch.ones(count, 24),
            None,
            positions,
            positions,
            torch.full((count,), -1),
            cache,
            cache.clone(),
            1,
            1,
            8,
            logn_length=table["seq_length"],
        )
        assert query[:, 0, 0].tolist() == pytest.approx(list(factors.values()), rel=1e-6)


def test_qwen_v1_0_arrays(golden: Path, flagged: Any) -> None:
    name = "qwen_v1_0_bin"
    expected, llm = arrays(golden / name / "arrays.npz"), load(golden / name / "hf")
    for prompt, suffix in (("short", ""), ("long", "_on")):
        logits, hidden = states(llm, expected[f"{prompt}_ids"].tolist())
        assert close(logits, expected[f"{prompt}{suffix}_logits"])
        assert close(hidden, expected[f"{prompt}{suffix}_hidden"])
    off = load(flagged(name, "off")).logits(expected["long_ids"].tolist())
    assert close(off, expected["long_off_logits"])


class TestLlama:
    """The trained LLaMA, with its tokenizer."""

    @pytest.fixture
    def folder(self, golden: Path) -> Path:
        return golden / "llama_aidreams260K"

    @pytest.fixture
    def llm(self, folder: Path) -> LLM:
        return load_trained(folder / "hf")

    def test_golden_100(self, folder: Path, llm: LLM) -> None:
        golden100 = json.loads((folder / "golden100.json").read_text())
        params = SamplingParams(max_new_tokens=100, ignore_eos=True)
        output = llm.generate([golden100["bos"]], params)[0]
        assert len(golden100["ids"]) == 100
        assert output.token_ids == golden100["ids"]
        assert output.finish_reason == "length"

    def test_greedy_ids_and_text(self, folder: Path, llm: LLM) -> None:
        for case in json.loads((folder / "greedy.json").read_text()):
            params = SamplingParams(max_new_tokens=len(case["new_ids"]), ignore_eos=True)
            by_text, by_ids = (llm.generate(p, params)[0] for p in (case["prompt"], case["prompt_ids"]))
            assert by_text.prompt_token_ids == case["prompt_ids"]
            assert by_text.token_ids == by_ids.token_ids == case["new_ids"]
            assert case["prompt"] + (by_text.text or "") == case["full_text"]

    def test_logits(self, folder: Path, llm: LLM) -> None:
        expected = arrays(folder / "logits.npz")
        assert close(llm.logits(expected["text0_ids"].tolist()), expected["text0_logits"])

    def test_perplexity(self, folder: Path, llm: LLM) -> None:
        for case in json.loads((folder / "perplexity.json").read_text()):
            logprobs = llm.logits(case["ids"]).log_softmax(-1)[:-1]
            losses = -logprobs.gather(1, torch.tensor(case["ids"])[1:, None]).squeeze(1)
            assert losses.tolist() == pytest.approx(case["nll_per_token"], abs=TOLERANCE)
            assert math.exp(float(losses.mean())) == pytest.approx(case["perplexity"], rel=TOLERANCE)
            assert llm.logits(case["text"]).shape[0] == len(case["ids"])


@functools.cache
def load_trained(folder: Path) -> LLM:
    return LLM(folder, "cpu", max_batch_size=4)
