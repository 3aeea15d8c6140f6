"""Engines in fewer bits on a GPU: every way of computing a step gives what a model in fp32 does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.proof.verify_engine import verify
from ingot.quant.schemes.scheme_registry import make_scheme
from tests.quant.clear_answers import ClearAnswers
from tests.quant.packed_checkpoints import Packing, reference_logits, write_packed
from tests.tiny_models import random_ids, save_model, tiny_config

pytestmark = pytest.mark.gpu

CONFIGS = {
    "w8a16": QuantConfig("w8a16"),
    "w4a16": QuantConfig("w4a16"),
    "mixed": QuantConfig("w4a16", 32, head="w8a16", layers={"layers.0.mlp.*": "w8a16", "*.o_proj": "none"}),
}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
TOLERANCE = {"fp16": 0.02, "bf16": 0.15}
MEAN = {"fp16": 0.006, "bf16": 0.06}


def checkpoint(kind: str, folder: Path) -> Path:
    own: dict[str, dict[str, Any]] = {"gpt2": {"n_embd": 256}, "opt": {"hidden_size": 256, "ffn_dim": 512}}
    save_model(tiny_config(kind, **own.get(kind, SIZES)), folder, seed=3)
    return folder


References = Callable[[str, str, str], ClearAnswers]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """What a model in fp32 answers, by scheme, kind of model and the dtype that its values have."""
    root = tmp_path_factory.mktemp("references")

    @functools.cache
    def reference(name: str, kind: str, dtype: str) -> ClearAnswers:
        folder = root / kind
        if not folder.exists():
            checkpoint(kind, folder)
        return ClearAnswers(folder, CONFIGS[name], dtype, TOLERANCE[dtype])

    return reference


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "opt"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch", [1, 5, 40, 70])
def test_fused_and_by_module_are_the_reference(
    name: str, kind: str, graphs: bool, dtype: str, batch: int, tmp_path: Path, references: References
) -> None:
    folder = checkpoint(kind, tmp_path)
    clear = references(name, kind, dtype)
    for fused in (True, False):
        runtime = RuntimeConfig(cuda_graphs=graphs, fused_decode=fused)
        options: dict[str, Any] = {"compute_dtype": dtype, "runtime": runtime, "max_batch_size": 80}
        llm = LLM(folder, "cuda", quant=CONFIGS[name], **options)
        assert llm.executor.runner.forward.fused == fused
        clear.check(llm, clear.answers(batch), MEAN[dtype], "fused" if fused else "by module")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_engine_is_proven_here(name: str, kind: str, tmp_path: Path) -> None:
    folder = checkpoint(kind, tmp_path / "checkpoint")
    engine = build(folder, tmp_path / "engine", quant=CONFIGS[name], dtype="fp16", device="cpu", tune=False)
    found = verify(engine, "cuda", note=False)
    assert found.verdict == "proven", found.failures


@pytest.mark.parametrize("rows", [1, 8, 64, 65, 300])
@pytest.mark.parametrize("name", ["w8a16", "w4a16"])
def test_products_of_any_number_of_rows(name: str, rows: int) -> None:
    scheme = make_scheme(CONFIGS[name])
    generator = torch.Generator().manual_seed(rows)
    weight, bias, x = (torch.randn(*size, generator=generator) for size in ((768, 512), (768,), (rows, 512)))
    tensors = {n: t.cuda() for n, t in scheme.pack(weight.half(), bias.half()).items()}
    half = x.half().cuda()
    expected = half.double() @ scheme.dequantize(tensors, 512, torch.float64).T + bias.half().cuda().double()
    for one in (scheme, scheme.batch_invariant()):
        error = (one.apply(half, tensors).double() - expected).abs().max()
        assert error < 2e-3 * expected.abs().max()


@pytest.mark.parametrize(
    "packing", [Packing("gptq", act_order=True), Packing("awq", symmetric=False)], ids=str
)
@pytest.mark.parametrize("batch", [1, 5, 70])
def test_packed_checkpoints(packing: Packing, batch: int, tmp_path: Path) -> None:
    """In fp32 arithmetic against the numbers' values; columns in an order of their own, and graphs."""
    written = write_packed(tmp_path / "checkpoint", packing)
    llm = LLM(written.folder, "cuda", compute_dtype="fp32", max_batch_size=80)
    prompts = [random_ids(1 + n % 7, seed=n) for n in range(batch)]
    answers = llm.generate(prompts, SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=0))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference_logits(written, [*prompt, *answer.token_ids]).log_softmax(-1)
        for place, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            wanted = float(expected[len(prompt) - 1 + place, token])
            assert found.logprob == pytest.approx(wanted, abs=1e-3)
