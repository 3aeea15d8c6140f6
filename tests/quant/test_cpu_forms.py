"""What a CPU multiplies by in the place of stored weights, beside dense products in fp64."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

from ingot import LLM, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.kernels.product.int8.cpu_product import cpu_int8_product, exact_sums
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Weight
from ingot.kernels.tiles.int8_tiles import INT8_FRAGMENT_ROWS
from ingot.kernels.tiles.product_tiles import MAX_ROWS
from ingot.layers.linear import held_bytes, linears
from ingot.memory.ledger import Capacity, ledger
from ingot.quant.schemes.expanded_int8 import ExpandedInt8
from ingot.quant.schemes.half_packed import HalfPacked, half_packed
from ingot.quant.schemes.int4_in_int8 import Int4InInt8
from ingot.quant.schemes.scheme_registry import Dense
from ingot.quant.schemes.weight_only import WeightOnly
from tests.e2e.tiny import write_tiny
from tests.tiny_models import make_model, tiny_config

FORMS = {  # by the scheme: how its weight is split in bf16
    "dense": (Dense(), "whole"),
    "w8a16": (WeightOnly(8, 0, True), "whole"),
    "w8a16 zeros": (WeightOnly(8, 0, False), "whole"),
    "w8a16 ordered": (WeightOnly(8, 128, True, True), "groups"),
    "w4a16 symmetric": (WeightOnly(4, 128, True), "whole"),
    "w4a16": (WeightOnly(4, 64, False), "groups"),
    "w4a16 small groups": (WeightOnly(4, 32, False), "terms"),
}


def random_weight(dtype: torch.dtype, n: int = 100, k: int = 320) -> torch.Tensor:
    """Rows of sizes that differ by a factor of a thousand."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(n, k, generator=generator) * torch.logspace(-3, 0, n)[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_products_are_those_of_what_was_stored(name: str, dtype: torch.dtype) -> None:
    scheme, split = FORMS[name]
    generator = torch.Generator().manual_seed(1)
    stored = scheme.pack(random_weight(dtype), torch.randn(100, generator=generator))
    if "ordered" in name:
        stored["order"] = torch.randperm(320, generator=generator, dtype=torch.int32)
    meant = scheme.dequantize(stored, 320, torch.float64)
    found = half_packed(scheme, stored, 320)
    assert found is not None
    form, kept = found
    if dtype == torch.bfloat16:
        assert form.split == split
    x = torch.randn(70, 320, generator=generator)
    y = form.apply(x, kept)
    bound = 2e-6 * (x.double().abs() @ meant.abs().T)  # of fp32 sums; rounded weights would be 1e-4 off
    assert ((y - (x.double() @ meant.T + stored["bias"])).abs() <= bound + 1e-7).all()
    original = form.original(kept)
    assert set(original) == set(stored)
    assert all(torch.equal(original[leaf], stored[leaf]) for leaf in stored)
    assert torch.equal(form.dequantize(kept, 320, torch.float64), meant)


@pytest.mark.parametrize("name", ["dense", "w4a16", "w4a16 small groups"])
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    scheme, _ = FORMS[name]
    found = half_packed(scheme, scheme.pack(random_weight(torch.bfloat16)), 320)
    assert found is not None
    form, kept = found
    x = torch.randn(70, 320, generator=torch.Generator().manual_seed(2))
    all_rows = form.apply(x, kept)
    for rows in (1, 2, 7, 16, 33):
        assert torch.equal(form.apply(x[3 : 3 + rows], kept), all_rows[3 : 3 + rows])


def test_rows_of_zeros_large_and_small_values() -> None:
    weight = torch.zeros(5, 64, dtype=torch.bfloat16)
    weight[1], weight[2], weight[3, :2] = 3e38, 1e-37, torch.tensor([1.0, 2.0**-30])
    found = half_packed(Dense(), {"weight": weight}, 64)
    assert found is not None
    form, kept = found
    assert torch.equal(form.original(kept)["weight"], weight)
    expected = weight.double().sum(1) / 128
    assert torch.equal(form.apply(torch.full((1, 64), 2.0**-7), kept)[0], expected.float())


def test_values_that_fp16_cannot_hold_are_refused() -> None:
    weight = random_weight(torch.bfloat16)
    weight[7, ::9] = 3e-20
    assert half_packed(Dense(), {"weight": weight}, 320) is None


def test_w4a8_is_expanded_once() -> None:
    scheme = Int4InInt8(64, 0)
    stored = scheme.pack(random_weight(torch.float32, k=200), torch.randn(100))
    form, kept = ExpandedInt8.of(scheme, stored, 200)
    x = torch.randn(5, 200)
    assert torch.equal(form.apply(x, kept), scheme.apply(x, stored))
    original = form.original(kept)
    assert set(original) == set(stored)
    assert all(torch.equal(original[leaf], stored[leaf]) for leaf in stored)


@pytest.mark.parametrize("group", [0, 16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_int8_sums_are_exact(rows: int, group: int) -> None:
    assert exact_sums()
    generator = torch.Generator().manual_seed(rows)
    x, weight = (
        torch.randint(-128, 128, (n, 112), dtype=torch.int8, generator=generator) for n in (rows, 33)
    )
    x[0], weight[0] = 127, -128
    steps = 2.0 ** torch.randint(-3, 3, (rows, 112 // group if group else 1), generator=generator)
    scales = 2.0 ** torch.randint(-3, 3, (33,), generator=generator)  # powers of two: every sum is exact
    wide = x.double() * steps.repeat_interleave(group or 112, dim=1)
    exact = (wide @ weight.double().T) * scales + 0.5
    given = Int8Rows(x, steps if group else steps[:, 0], group)
    bias = torch.full((33,), 0.5)
    assert torch.equal(
        cpu_int8_product(given, Int8Weight(weight, scales), torch.float32, bias), exact.float()
    )


@pytest.mark.usefixtures("without_llvmlite")
def test_a_loaded_model_is_packed_once(tmp_path: Path) -> None:
    folder = build(write_tiny(tmp_path / "tiny"), tmp_path / "engine", dtype="bf16", proof=False)
    llm = LLM(folder, "cpu")
    packed = linears(llm.engine.model)
    assert all(isinstance(linear.scheme, HalfPacked) for linear in packed.values())
    assert all("weight" not in linear._parameters for linear in packed.values())
    assert llm.engine.model.embed_tokens.weight.dtype == torch.bfloat16
    plain = LLM(folder, "cpu", runtime=RuntimeConfig(fused_decode=False))
    assert all(type(linear.scheme) is Dense for linear in linears(plain.engine.model).values())
    ids = [3, 5, 8, 13]
    assert torch.allclose(llm.logits(ids), plain.logits(ids), atol=1e-5)


@pytest.mark.usefixtures("without_llvmlite")
def test_a_layer_that_is_refused_is_logged_and_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(write_tiny(tmp_path / "tiny"), tmp_path / "engine", dtype="bf16", proof=False)
    expected = LLM(folder, "cpu").logits([3, 5, 8])
    monkeypatch.setattr("ingot.quant.schemes.half_packed._RARE", -1.0)
    with caplog.at_level(logging.WARNING):
        llm = LLM(folder, "cpu")
    assert "values that fp16 cannot hold" in caplog.text
    assert all(type(linear.scheme) is Dense for linear in linears(llm.engine.model).values())
    assert torch.allclose(llm.logits([3, 5, 8]), expected, atol=1e-5)


@pytest.mark.usefixtures("without_llvmlite")
def test_a_model_that_fits_only_as_it_is_stored_stays_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed values of groups of 32 take 4 bytes."""
    tiny = tmp_path / "tiny"
    make_model(tiny_config("llama", num_hidden_layers=12)).save_pretrained(tiny)
    quant = QuantConfig("w4a16", group=32)
    folder = build(tiny, tmp_path / "engine", quant=quant, dtype="bf16", proof=False)
    packed = LLM(folder, "cpu")
    setting = packed.executor.setting
    assert setting is not None
    most, least = ledger(setting).least, ledger(setting.unpacked).least
    assert most > least
    total = math.ceil((most + least) / 2 / setting.runtime.memory_fraction)
    monkeypatch.setattr("ingot.runtime.setup.capacity_of", lambda device, own: Capacity("small", total))
    with caplog.at_level(logging.WARNING):
        llm = LLM(folder, "cpu")
    assert "no room to pack the weights" in caplog.text
    stored, forms = linears(llm.engine.model), linears(packed.engine.model)
    assert not any(isinstance(linear.scheme, HalfPacked) for linear in stored.values())
    assert all(isinstance(linear.scheme, HalfPacked) for linear in forms.values())
    assert torch.allclose(llm.logits([3, 5, 8]), packed.logits([3, 5, 8]), atol=1e-5)


@pytest.mark.parametrize(("group", "expected"), [(128, INT8_FRAGMENT_ROWS), (64, MAX_ROWS)])
def test_w4a8_places_heads_where_no_groups_of_warps_multiply(
    group: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper; they read groups of 128."""
    monkeypatch.setattr("ingot.quant.schemes.int4_in_int8.has_warpgroups", lambda device: True)
    assert Int4InInt8(group).placing_rows(torch.device("cpu")) == expected


def test_what_is_packed_is_counted(tmp_path: Path) -> None:
    """PyTorch's packed matrices are no parameters."""
    folder = build(write_tiny(tmp_path / "tiny"), tmp_path / "engine", dtype="bf16", proof=False)
    llm = LLM(folder, "cpu")
    setting, model = llm.executor.setting, llm.engine.model
    assert setting is not None
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    packed = held_bytes(model) - parameters
    assert packed >= 2 * sum(one.in_features * one.out_features for one in linears(model).values())
    assert parameters + packed <= sum(setting.weight_bytes().values())


def test_a_processor_whose_int8_sums_saturate_multiplies_by_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight = torch.full((3, 64), 127, dtype=torch.int8), torch.full((16, 64), -128, dtype=torch.int8)
    whole = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: whole(a, b).clamp(-(2**15), 2**15 - 1))
    exact_sums.cache_clear()
    try:
        y = cpu_int8_product(Int8Rows(x, torch.ones(3)), Int8Weight(weight, torch.ones(16)), torch.float32)
    finally:
        exact_sums.cache_clear()
    assert torch.equal(y, torch.full((3, 16), -127.0 * 128 * 64))
