"""Plain ``ingot`` on a CPU, without llvmlite: engines are built, proven and answer as with its kernels.

Packed weights of PyTorch are tested alone in tests/quant/test_cpu_forms.py; tests with the fixture
``without_llvmlite`` count and judge what a model holds then. All others run with ``ingot[cpu]``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot import LLM, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.kernels.cpu.llvm_module import host_cpu
from ingot.layers.linear import linears
from ingot.proof.verify_engine import verify
from ingot.quant.schemes.expanded_int8 import ExpandedInt8
from ingot.quant.schemes.half_packed import HalfPacked
from ingot.quant.schemes.in_panels import InPanels, Int8InPanels
from ingot.quant.schemes.int8_both import Int8Both
from tests.tiny_models import random_ids, save_model, tiny_config

FORMS = {"none": HalfPacked, "w8a16": HalfPacked, "w4a16": HalfPacked, "w8a8": Int8Both, "w4a8": ExpandedInt8}
PROMPTS = [random_ids(n, seed=n) for n in (40, 3, 17)]
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Built with llvmlite, where it is there."""
    root = tmp_path_factory.mktemp("engines")
    save_model(tiny_config("llama", hidden_size=64, intermediate_size=128), root / "tiny", seed=3)
    options = {"dtype": "bf16", "device": "cpu", "proof": False}
    return {
        name: build(root / "tiny", root / name, quant=QuantConfig(name, head="none"), **options)
        for name in FORMS
    }


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("scheme", FORMS)
def test_answers_are_those_of_the_kernels(
    scheme: str, engines: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """Of prompts in several steps, beside others and alone."""
    runtime = RuntimeConfig(token_budget=16)
    llm = LLM(engines[scheme], "cpu", runtime=runtime)
    assert any(isinstance(one.scheme, (InPanels, Int8InPanels)) for one in linears(llm.engine.model).values())
    expected = [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]
    request.getfixturevalue("without_llvmlite")
    assert host_cpu() is None
    plain = LLM(engines[scheme], "cpu", runtime=runtime)
    forms = {type(one.scheme) for one in linears(plain.engine.model).values()}
    assert FORMS[scheme] in forms <= {HalfPacked, FORMS[scheme]}
    assert [answer.token_ids for answer in plain.generate(PROMPTS, PARAMS)] == expected
    assert plain.generate(PROMPTS[:1], PARAMS)[0].token_ids == expected[0]


@pytest.mark.usefixtures("without_llvmlite")
@pytest.mark.parametrize("scheme", FORMS)
def test_an_engine_is_built_and_proven(scheme: str, engines: dict[str, Path], tmp_path: Path) -> None:
    """As it is with the kernels, byte for byte."""
    quant = QuantConfig(scheme, head="none")
    options = {"dtype": "bf16", "device": "cpu"}
    folder = build(engines[scheme].parent / "tiny", tmp_path / "engine", quant=quant, **options)
    assert verify(folder, "cpu", note=False).verdict == "proven"
    for path in engines[scheme].glob("*.safetensors"):
        assert (folder / path.name).read_bytes() == path.read_bytes()
