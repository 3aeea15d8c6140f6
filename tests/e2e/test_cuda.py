"""GPU only: graphs, fp16, agreement with the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_loader import engine_in_memory
from tests.e2e.mixed import GREEDY, PROMPTS, TEXTS, Make, ids_of, mixed_params


def golden_100(golden: Path) -> tuple[list[int], Path]:
    """A first token and the hundred that follow it, and the checkpoint that they are of."""
    folder = golden / "llama_aidreams260K"
    found = json.loads((folder / "golden100.json").read_text())
    return [found["bos"], *found["ids"]], folder / "hf"


@pytest.mark.gpu
class TestCuda:
    """What only a GPU has: graphs, fp16, another device to agree with."""

    @pytest.mark.parametrize("kind", ["gpt2", "llama", "opt", "qwen3", "window"])
    def test_logits_are_the_cpus(self, make: Make, kind: str) -> None:
        for prompt in PROMPTS[4:]:
            ours, cpu = make(kind, "cuda").logits(prompt), make(kind).logits(prompt)
            assert float((ours - cpu).abs().max() / cpu.abs().max()) < 1e-4

    @pytest.mark.parametrize("kind", ["gpt2", "llama", "opt", "qwen3", "window"])
    def test_graphs_are_eager(self, make: Make, kind: str) -> None:
        graphs, eager = make(kind, "cuda"), make(kind, "cuda", cuda_graphs=False)
        params = mixed_params(len(PROMPTS))
        assert ids_of(graphs.generate(PROMPTS, params)) == ids_of(eager.generate(PROMPTS, params))
        assert graphs.executor.runner.graphs is not None
        assert len(graphs.executor.runner.graphs._captured) > 2
        assert eager.executor.runner.graphs is None

    @pytest.mark.parametrize("kind", ["llama", "window"])
    @pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
    def test_an_embedding_on_the_host_gives_the_same_answers(
        self, make: Make, kind: str, graphs: bool
    ) -> None:
        near, far = (
            make(kind, "cuda", dtype="fp16", cuda_graphs=graphs, **way) for way in ({}, {"embedding": "host"})
        )
        weight = far.engine.model.embed_tokens.weight
        assert weight.is_pinned()
        assert near.engine.model.embed_tokens.weight.is_cuda
        params = mixed_params(len(PROMPTS))
        assert ids_of(far.generate(PROMPTS, params)) == ids_of(near.generate(PROMPTS, params))
        assert np.array_equal(far.logits(PROMPTS[-1]).cpu(), near.logits(PROMPTS[-1]).cpu())

    def test_an_embedding_moves_to_the_host_when_an_engine_is_loaded_already(
        self, make: Make, folders: dict[str, Path]
    ) -> None:
        expected = make("llama", "cuda").logits(PROMPTS[4])
        limits = {"max_batch_size": 8, "max_seq_len": 128}
        engine = engine_in_memory(folders["llama"], torch.device("cuda", 0), "fp32", **limits)
        assert engine.model.embed_tokens.weight.is_cuda
        runtime = RuntimeConfig(embedding="host", cache_tokens=2048, block_size=16)
        with LLM.of_engine(engine, runtime) as far:
            assert engine.model.embed_tokens.weight.is_pinned()
            assert np.array_equal(far.logits(PROMPTS[4]).cpu(), expected.cpu())

    def test_ids_are_the_cpus(self, make: Make) -> None:
        params = mixed_params(len(PROMPTS))
        assert ids_of(make("llama", "cuda").generate(PROMPTS, params)) == ids_of(
            make("llama").generate(PROMPTS, params)
        )

    @pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
    def test_trained_model_graphs_are_eager_and_batched_is_single(
        self, golden: Path, make: Make, dtype: str
    ) -> None:
        folder = golden / "llama_aidreams260K" / "hf"
        graphs = make(folder, "cuda", dtype=dtype)
        eager = make(folder, "cuda", dtype=dtype, cuda_graphs=False)
        params = GREEDY.replace(max_new_tokens=60)
        texts = [o.text for o in graphs.generate(list(TEXTS), params)]
        assert texts == [o.text for o in eager.generate(list(TEXTS), params)]

    def test_golden_100(self, golden: Path, make: Make) -> None:
        expected, folder = golden_100(golden)
        params = SamplingParams(max_new_tokens=100, ignore_eos=True)
        assert make(folder, "cuda").generate([expected[0]], params)[0].token_ids == expected[1:]

    def test_golden_100_in_fp16(self, golden: Path, make: Make) -> None:
        """One of the hundred choices is closer (0.004) than fp16's rounding of the logits (0.013, also on a
        CPU): there either token is right. The others must be the golden ones, and so must every token
        generated before it.
        """
        expected, folder = golden_100(golden)
        best, second = make(folder, "cpu").logits(expected[:-1]).topk(2, dim=-1).values.unbind(-1)
        close = (best - second < 0.013).nonzero().flatten().tolist()
        assert len(close) == 1
        llm = make(folder, "cuda", dtype="fp16")
        chosen = llm.logits(expected[:-1]).argmax(-1)
        assert {i for i, (a, b) in enumerate(zip(chosen, expected[1:], strict=True)) if a != b} <= set(close)
        params = SamplingParams(max_new_tokens=close[0], ignore_eos=True)
        assert llm.generate([expected[0]], params)[0].token_ids == expected[1 : 1 + close[0]]

    @pytest.mark.parametrize("name", ["qwen_v1_1_safetensors", "qwen_v1_1_bin"])
    def test_qwen_golden(self, golden: Path, name: str) -> None:
        llm = LLM(golden / name / "hf", "cuda", compute_dtype="fp32", max_batch_size=8, max_seq_len=256)
        with np.load(golden / name / "long.npz") as long:
            logits = llm.logits(long["long0_ids"].tolist())
            assert float((logits - torch.from_numpy(long["long0_on_logits"])).abs().max()) < 1e-3
        with np.load(golden / name / "greedy.npz") as greedy:
            for prompt in ("short", "cross", "beyond"):
                output = llm.generate(greedy[f"{prompt}_prompt_ids"].tolist(), GREEDY)[0]
                assert output.token_ids == greedy[f"{prompt}_new_ids"].tolist()
