"""Fused operations of a decoder that attends to an encoder's outputs compute what its modules compute."""

from __future__ import annotations

from typing import Any

import pytest

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.layers.products.layer_products import LayerProducts
from ingot.layers.products.product_choice import ALL, Step
from tests.encoders.conftest import Side
from tests.encoders.test_speech import MIXED, prompt
from tests.parity.test_fused_steps import packed_takes_fp32
from tests.parity.walk_ways import count_steps, expect_same

PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=4)
NEAR = {"w8a8": 0.02}  # nats; others 1e-4: sums in another order may round a value to the next number


def names(products: LayerProducts) -> list[str]:
    """Kinds of qkv, o, cross query, cross output, up and down."""
    chosen = [products.qkv, products.output, *(products.encoded or ()), products.up, products.down]
    return [type(one).__name__.removesuffix("Product") for one in chosen]


@pytest.mark.stays("none-Small-options0", "w4a16-Packed-options2", "w8a8-Int8-options4")
@pytest.mark.parametrize(
    ("quant", "kind", "options"),
    [
        ("none", "Small", {}),
        ("w8a16", "Small", {}),
        ("w4a16", "Packed", {}),
        ("w8a8", "Int8", {}),
        ("w8a8", "Int8", {"kv_dtype": "int8"}),
    ],
)
def test_fused_is_by_module(
    quant: str, kind: str, options: dict[str, Any], speech: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With speech and without, in prompts and in decodes."""
    runtime = RuntimeConfig(block_size=16, prefix_reuse=False, fused_decode=False, **options)
    llm = LLM(speech.folder, "cpu", max_batch_size=8, runtime=runtime, quant=quant)
    forward = llm.executor.runner.forward
    if kind == "Packed":
        packed_takes_fp32(monkeypatch)
        forward.chooser.narrow = ((1, ALL),)
    prompts = [prompt(spoken) for spoken in MIXED]
    plain = llm.generate(prompts, PARAMS)
    seen = count_steps(monkeypatch)
    forward.fused = True
    assert set(names(forward.operations(Step(decodes=True, rows=7)).layers[0])) == {kind}
    expect_same(plain, llm.generate(prompts, PARAMS), NEAR.get(quant, 1e-4))
    assert seen["decodes"].count(len(prompts)) >= 14
    assert seen["others"]
