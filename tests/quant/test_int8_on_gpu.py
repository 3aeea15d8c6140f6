"""Engines with int8 activations that a GPU calibrates, proves and aligns; RPTQ's kernels at 7B shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot import LLM, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.product.int8.int8_linear import int8_linear
from ingot.kernels.rows.block_rows import BlockSteps, quantize_in_blocks
from ingot.kernels.rows.int8_rows import Int8Weight, int8_product
from ingot.layers.linear import linears
from ingot.measure.align.align_session import align
from ingot.proof.verify_engine import verify
from tests.tiny_models import random_ids, save_model, tiny_config

pytestmark = pytest.mark.gpu
# of a size that the kernels read in whole tiles
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
CONFIGS = {
    "dynamic": QuantConfig("w8a8"),
    "fp8": QuantConfig("w8a8-fp8"),
    "static": QuantConfig("w8a8", activations="static"),
    "smoothed": QuantConfig("w8a8", method="smoothquant"),
    "searched": QuantConfig("w8a8", method="smoothquant", alpha="search", activations="static"),
    "4 bits": QuantConfig("w4a8"),
    "4 bits, not rotated": QuantConfig("w4a8", 64, rotation=False),
    "4 bits by GPTQ": QuantConfig("w4a8", method="gptq"),
    **{
        f"{scheme}, {group}": QuantConfig(scheme, group)
        for scheme in ("rptq-w8a8", "rptq-w4a8", "rptq-w4a4")
        for group in (32, 128)
    },
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_proven_and_aligned(name: str, dtype: str, samples: Path, tmp_path: Path) -> None:
    save_model(tiny_config("llama", **SIZES), tmp_path / "c", seed=3)
    quant = CONFIGS[name]
    options = {"dtype": dtype, "calib": samples if quant.calibrated else None, "device": "cuda"}
    folder = build(tmp_path / "c", tmp_path / "e", quant=quant, tune=False, **options)
    found = verify(folder, "cuda", note=False)
    assert found.verdict == "proven", found.failures
    report = align(folder, tmp_path / "c", [random_ids(40), random_ids(90, seed=2)], steps=3, device="cuda")
    assert report.aligned, report.first_stage


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("scheme", ["rptq-w8a8", "rptq-w4a8", "rptq-w4a4"])
def test_opt_in_blocks_is_proven_and_aligned(scheme: str, dtype: str, samples: Path, tmp_path: Path) -> None:
    """RPTQ's own model: blocks behind LayerNorm and ReLU, which no gate is in front of."""
    sizes = {"hidden_size": 256, "ffn_dim": 512, "num_attention_heads": 4}
    save_model(tiny_config("opt", **sizes), tmp_path / "c", seed=3)
    options = {"dtype": dtype, "calib": samples, "device": "cuda", "tune": False}
    folder = build(tmp_path / "c", tmp_path / "e", quant=QuantConfig(scheme, 64), **options)  # type: ignore[arg-type]
    found = verify(folder, "cuda", note=False, source=tmp_path / "c")
    assert found.verdict == "proven", found.failures
    assert align(folder, tmp_path / "c", [random_ids(40)], steps=3, device="cuda").aligned


@pytest.mark.parametrize(
    ("name", "dtype"), [("static", "bf16"), ("smoothed", "bf16"), ("rptq-w8a8, 32", "fp32")]
)
def test_it_finds_what_a_cpu_does(name: str, dtype: str, samples: Path, tmp_path: Path) -> None:
    """RPTQ's weights nearly, in queries and keys, which no order moves: their sums have other orders."""
    save_model(tiny_config("llama", **SIZES), tmp_path / "c", seed=3)
    models = []
    for device in ("cuda", "cpu"):
        options = {"calib": samples, "device": device, "proof": False, "tune": False, "dtype": dtype}
        folder = build(tmp_path / "c", tmp_path / device, quant=CONFIGS[name], **options)  # type: ignore[arg-type]
        models.append(linears(LLM(folder, "cpu").engine.model))
    if name.startswith("rptq"):
        first = (found["layers.0.self_attn.qkv_proj"] for found in models)
        own, other = (queries_and_keys(layer.dequantized(torch.float32)) for layer in first)
        assert float((own - other).norm() / other.norm()) < 1e-2
        return
    for layer, linear in models[0].items():
        own, other = (found[layer].dequantized(torch.float32) for found in models)
        assert float((own - other).norm() / other.norm()) < 1e-3, layer
        if "input_scale" in linear._parameters:
            assert float(linear.input_scale) == pytest.approx(float(models[1][layer].input_scale), rel=1e-4)


def queries_and_keys(weight: torch.Tensor) -> torch.Tensor:
    """Rows of queries and keys, which no order moves."""
    heads = weight.shape[0] // SIZES["head_dim"]
    return weight[: heads * SIZES["head_dim"] * 3 // 4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 64, 65, 300, 2048])
@pytest.mark.parametrize(("outputs", "width"), [(12288, 4096), (4096, 11008)])
@pytest.mark.parametrize("block", [64, 128])
def test_products_of_a_7b(dtype: torch.dtype, rows: int, outputs: int, width: int, block: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    steps = steps_of(width, block, generator)
    x = torch.randn(rows, width, generator=generator, device="cuda", dtype=dtype)
    numbers = torch.randint(-127, 128, (outputs, width), generator=generator, device="cuda", dtype=torch.int8)
    weight = Int8Weight(numbers, torch.rand(outputs, generator=generator, device="cuda") / 5000)
    shift = torch.randn(outputs, generator=generator, device="cuda")
    found = quantize_in_blocks(x, steps)
    y = int8_linear(found, weight, dtype, shift)
    expected = int8_product(found, weight, torch.float32, shift)
    torch.testing.assert_close(y.float(), expected.to(dtype).float(), rtol=8e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 64, 2048])
@pytest.mark.parametrize("hidden", [4096, 5120, 8192])
def test_norms_of_large_models(dtype: torch.dtype, rows: int, hidden: int) -> None:
    """Numbers are those of the norm's result in another order, but where a sum's last bit decides."""
    generator = torch.Generator("cuda").manual_seed(rows)
    steps = steps_of(hidden, 128, generator)
    x, residual = (
        torch.randn(rows, hidden, generator=generator, device="cuda", dtype=dtype) for _ in range(2)
    )
    weight = torch.rand(hidden, generator=generator, device="cuda", dtype=dtype)
    found, s = rms_norm(x, weight, 1e-6, residual, ending=steps)
    y, expected = rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(s, expected)
    off = (found.values.int() - quantize_in_blocks(y, steps).values.int()).abs()
    assert int(off.max()) <= 1
    assert float(off.float().mean()) < 1e-4


def steps_of(width: int, block: int, generator: torch.Generator) -> BlockSteps:
    blocks = width // block
    span = 4 + 6 * torch.rand(blocks, generator=generator, device="cuda")
    zeros = torch.randint(-60, 60, (blocks,), generator=generator, device="cuda").float()
    order = torch.randperm(width, generator=generator, device="cuda").int()
    return BlockSteps(span / 256, zeros, block, 8, order)
