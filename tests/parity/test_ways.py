"""Which product a layer takes, by its scheme, the step's rows and the model's shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from ingot import LLM
from ingot.building.random_weights import config_manifest
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine.assembly import model_of
from ingot.kernels.product import prompt_gate_up
from ingot.kernels.product.prompt_epilogue import is_hopper
from ingot.kernels.product.prompt_gate_up import takes_gate_up
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.kernels.tiles import tile_tables
from ingot.layers.decoder import DecoderLayer
from ingot.layers.decoder_forward import Operations, fuses, product_chooser
from ingot.layers.forward_batch import LayerCache
from ingot.layers.products import layer_products, product_choice
from ingot.layers.products.chosen_kernels import describe_kernels
from ingot.layers.products.layer_products import BlockProduct, LayerProducts, Product, SmallProduct
from ingot.layers.products.product_choice import (
    ALL,
    DENSE_ROWS,
    NARROW_ROWS,
    NONE,
    Step,
    small_products,
)
from ingot.layers.products.row_forms import BlockForm, DenseForm, Int8Form, RawForm
from tests.parity.test_fused_steps import packed_takes_fp32
from tests.parity.test_rounded_steps import engine
from tests.tiny_models import save_model, tiny_config

pytestmark = pytest.mark.usefixtures("weights_as_stored")

DECODES = {rows: Step(decodes=True, rows=rows) for rows in (1, 2, 8, 9, 32, 33, 64, 65, 256)}
OTHERS = Step(decodes=False)


def test_the_tables_of_rows() -> None:
    found = [small_products(rows, DENSE_ROWS) for rows in (1, 32, 33, 64, 65)]
    assert found == [ALL, ALL, ALL - {"qkv"}, ALL - {"qkv"}, NONE]
    head = frozenset({"head"})
    found = [small_products(rows, NARROW_ROWS) for rows in (1, 8, 9, 64, 65)]
    assert found == [ALL, ALL, head, head, NONE]


def kinds(llm: LLM, step: Step) -> list[str]:
    """The products of a step's first layer and the head: qkv, o, up, down, head."""
    forward = llm.executor.runner.forward
    operations = forward.operations(step)
    layer = operations.layers[0]
    chosen = [layer.qkv, layer.output, layer.up, layer.down, operations.layers[-1].after]
    return [type(product).__name__.removesuffix("Product") or "module" for product in chosen]


@pytest.mark.parametrize(
    ("kind", "changes", "quant", "rows", "expected"),
    [
        ("llama", {}, "none", 1, "Small Small Small Small Small"),
        ("llama", {}, "none", 33, "module Small Small Small Small"),
        ("llama", {}, "none", 65, "module Added Gated Added module"),
        ("llama", {}, "none", None, "module Added Gated Added module"),
        ("llama", {"attention_bias": True}, "none", 65, "module module Gated Added module"),
        ("llama", {"mlp_bias": True}, "none", 65, "module Added module module module"),
        ("qwen3", {}, "none", 8, "Small Small Small Small Small"),
        ("qwen3", {}, "w4a16", 8, "Small Small Small Small Small"),
        ("qwen3", {}, "w4a16", 9, "Packed Packed Packed Packed Small"),
        ("llama", {}, "w8a16", 256, "Packed Packed Packed Packed module"),
        ("llama", {}, "w8a16", None, "module module module module module"),
        ("llama", {}, "w8a8", 8, "Int8 Int8 Int8 Int8 Small"),
        ("qwen3", {}, "w8a8", None, "Int8 Int8 Int8 Int8 module"),
        ("gpt2", {}, "none", 8, "Small Small Small Small Small"),
        ("gpt2", {}, "none", 9, "Small Small Small Small Small"),
        ("opt", {}, "none", 64, "Small Small Small Small Small"),
        ("gpt2", {}, "none", 65, "module module module module module"),
        ("gpt2", {}, "w8a16", 8, "Small Small Small Small Small"),
        ("gpt2", {}, "w8a16", 9, "Packed Packed Packed Packed Small"),
        ("gpt2", {}, "w8a8", 8, "Int8 Int8 Int8 Int8 Small"),
        ("opt", {}, "none", 8, "Small Small Small Small Small"),
        ("opt", {}, "w4a16", 9, "Packed Packed Packed Packed Small"),
        ("opt", {}, "w8a8", None, "Int8 Int8 Int8 Int8 module"),
    ],
)
def test_products(
    kind: str,
    changes: dict[str, object],
    quant: str,
    rows: int | None,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed_takes_fp32(monkeypatch)
    save_model(tiny_config(kind, **changes), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", quant=quant)
    assert kinds(llm, OTHERS if rows is None else Step(True, rows)) == expected.split()


def test_wide_plain_mlps_leave_more_than_8_rows_to_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_tables, "NARROW", 16)
    save_model(tiny_config("gpt2"), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu")
    assert kinds(llm, DECODES[8]) == ["Small"] * 5
    assert kinds(llm, DECODES[9]) == kinds(llm, DECODES[64]) == [*["module"] * 4, "Small"]


@pytest.mark.parametrize(
    ("kind", "outputs", "rows", "qkv"),
    [
        ("llama", 1, 33, "Small"),
        ("llama", 1, 64, "Small"),
        ("llama", 1, 65, "module"),
        ("llama", 2, 64, "module"),
        ("qwen3", 1, 64, "Small"),  # norms of its heads are another kernel's
    ],
)
def test_a_qkv_product_of_some_widths_is_small_for_many_rows(
    kind: str, outputs: int, rows: int, qkv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny_config(kind), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu")
    width = llm.executor.runner.forward.model.layers[0].self_attn.qkv_proj.out_features
    monkeypatch.setattr(product_choice, "SMALL_QKV", range(width * outputs, width * outputs + 1))
    assert kinds(llm, Step(True, rows))[0] == qkv


@pytest.mark.parametrize(("vocabulary", "head"), [(91, "Odd"), (96, "module")])
def test_an_odd_head_of_prompts_leaves_the_library_its_many_rows(
    vocabulary: int, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits. Up to 64 logits are by the small kernel, with the same result."""
    save_model(tiny_config("gpt2", vocab_size=vocabulary), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu")
    forward = llm.executor.runner.forward
    assert kinds(llm, OTHERS)[-1] == "module"
    forward._operations.clear()
    forward.chooser.dtype = torch.float16
    assert kinds(llm, OTHERS) == [*["module"] * 4, head]
    product = forward.operations(OTHERS).layers[-1].after
    small = mock.Mock(side_effect=layer_products.small_linear)
    monkeypatch.setattr(layer_products, "small_linear", small)
    rows = torch.randn(65, product.linear.in_features, generator=torch.Generator().manual_seed(0))
    for count, calls in ((0, 0), (1, 1), (64, 2), (65, 2)):
        found = product.full_output(rows[:count])
        assert small.call_count == (calls if head == "Odd" else 0)
        torch.testing.assert_close(found, product.linear(rows[:count]))


def test_fp32_is_not_packed(tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path, seed=3)
    llm = LLM(tmp_path, device="cpu", quant="w4a16")
    assert kinds(llm, DECODES[64]) == ["Small"] * 5
    assert kinds(llm, DECODES[65]) == ["module"] * 5


def products_of(layer: LayerProducts) -> list[Product]:
    """Those of a layer."""
    return [layer.qkv, layer.output, layer.up, layer.down]


def test_a_product_says_how_it_takes_its_input(tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path / "c", seed=3)
    for quant, form in {"none": DenseForm, "w8a16": DenseForm, "w8a8": Int8Form}.items():
        forward = LLM(tmp_path / "c", device="cpu", quant=quant).executor.runner.forward
        for layer in forward.operations(DECODES[8]).layers:
            assert {type(product.form) for product in products_of(layer)} == {form}
    forward = LLM(engine(tmp_path / "c", "rptq-w8a8"), device="cpu").executor.runner.forward
    layer = forward.operations(OTHERS).layers[0]
    assert {type(product) for product in products_of(layer)} == {BlockProduct}
    assert {type(product.form) for product in products_of(layer)} == {BlockForm}


def test_one_token_of_dense_weights_is_normalised_by_the_products(tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path, seed=3)
    layer = LLM(tmp_path, device="cpu").executor.runner.forward.operations(DECODES[1]).layers[0]
    assert {type(p.form) for p in (layer.qkv, layer.up, layer.after)} == {RawForm}
    assert {type(p.form) for p in (layer.output, layer.down)} == {DenseForm}


def test_results_end_in_the_next_products_form(tmp_path: Path) -> None:
    """Output and down products in 8 bits beside dense ones."""
    save_model(tiny_config("llama"), tmp_path, seed=3)
    mixed = QuantConfig("none", layers={"*.down_proj": "w8a8", "*.o_proj": "w8a8"})
    forward = LLM(tmp_path, device="cpu", quant=mixed).executor.runner.forward
    layer = forward.operations(DECODES[8]).layers[0]
    names = [type(product).__name__ for product in products_of(layer)]
    assert names == ["SmallProduct", "Int8Product", "SmallProduct", "Int8Product"]
    hidden = torch.randn(8, forward.model.config.hidden_size)
    inner = layer.up.inner(hidden, forward.model.layers[0].mlp, layer.down.form)
    assert isinstance(inner, Int8Rows)
    normed, summed = layer.down.join(inner, hidden.clone(), layer.next_norm, layer.after.form)
    assert isinstance(normed, torch.Tensor)
    assert normed.dtype == summed.dtype == torch.float32


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_in_fp32_a_gpu_takes_small_products_of_one_row_alone(kind: str, tmp_path: Path) -> None:
    """Which has no partial sums. Weights in fewer bits stay with the modules."""
    save_model(tiny_config(kind), tmp_path, seed=3)
    decoder = LLM(tmp_path, device="cpu").engine.model
    ways = product_chooser(decoder, [LayerCache.zeros(1, 2, 16, 8, torch.float32, torch.device("meta"))])
    assert fuses(decoder)
    assert not fuses(LLM(tmp_path, device="cpu", quant="w8a16").engine.model)
    layer = decoder.layers[0]
    assert isinstance(layer, DecoderLayer)
    one, two = (ways.product("o", layer.self_attn.o_proj, DECODES[rows]) for rows in (1, 2))
    assert isinstance(one, SmallProduct)
    assert not one.sums
    assert not isinstance(two, SmallProduct)
    found = describe_kernels(decoder.config, lambda step: Operations(decoder, ways, step).layers)
    assert found["decode, 1 request"] == "small kernels"
    assert "small" not in found["decode, 2 requests and more"]


def test_operations_are_chosen_once(tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path, seed=3)
    forward = LLM(tmp_path, device="cpu").executor.runner.forward
    assert forward.operations(DECODES[2]) is forward.operations(Step(decodes=True, rows=2))


def test_steps_are_reported_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config("qwen3"), tmp_path, seed=3)
    forward = LLM(tmp_path, device="cpu").executor.runner.forward
    assert forward.kernels() == {"every step": "module by module"}
    forward = LLM(tmp_path, device="cpu", quant="w4a16").executor.runner.forward
    packed_takes_fp32(monkeypatch)
    forward.fused = True
    packed, widened = (
        "qkv, output, up, down: packed kernels",
        "qkv, output, up, down: weights widened per step",
    )
    assert forward.kernels() == {
        "decode, 1 to 8 requests": "small kernels",
        "decode, 9 to 64 requests": f"{packed}; head: small kernels",
        "decode, 65 to 256 requests": f"{packed}; head: matrix library",
        "decode, 257 requests and more": f"{widened}; head: matrix library",
        "with prompts": f"{widened}; head: matrix library",
    }


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is described on the meta device is of an H200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = mock.Mock(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    is_hopper.cache_clear()
    yield
    is_hopper.cache_clear()


def described(path: Path, mlp: str = "silu_gated", quant: str | None = None) -> dict[str, str]:
    """The plan of the 8B's shape, of two layers, without weights."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128}
    shape |= {"num_key_value_heads": 8, "vocab_size": 1024, "architectures": ["LlamaForCausalLM"]}
    tiny_config("llama", **shape).save_pretrained(path)
    decoder = model_of(config_manifest(path, "bf16", 64, 128, quant))
    cache = LayerCache.zeros(1, 8, 16, 128, torch.bfloat16, torch.device("meta"))
    chooser = product_chooser(decoder, [cache])
    config = decoder.config.replace(mlp=mlp)
    return describe_kernels(config, lambda step: Operations(decoder, chooser, step).layers)


@pytest.mark.usefixtures("h200")
def test_the_plan_on_hopper_names_the_kernel_that_gate_and_up_take(tmp_path: Path) -> None:
    """At the rows at which the product itself takes it."""
    fused = "up: gate and up with SiLU in one kernel"
    found = described(tmp_path)
    weight = torch.empty(28672, 4096, dtype=torch.bfloat16, device="meta")
    taken = [rows for rows in range(65, 257) if takes_gate_up(weight.new_empty(rows, 4096), weight)]
    assert taken == [*range(96, 129), *range(240, 257)]
    words = {step: fused in how for step, how in found.items() if step.startswith("decode")}
    assert [step for step, is_fused in words.items() if is_fused] == [
        "decode, 96 to 128 requests",
        "decode, 240 to 256 requests",
    ]
    prompts = "matrix library (from 1024 rows on, in full tiles, gate and up with SiLU in one kernel)"
    for step in ("decode, 257 requests and more", "with prompts"):
        assert f"up: {prompts}" in found[step]
    assert found["decode, 65 to 95 requests"] == found["decode, 129 to 239 requests"] == "matrix library"


def test_the_plan_elsewhere_names_the_matrix_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_gate_up, "is_hopper", lambda device: False)
    assert not any("SiLU" in how for how in described(tmp_path).values())


@pytest.mark.usefixtures("h200")
def test_the_plan_of_another_activation_names_the_matrix_library(tmp_path: Path) -> None:
    assert not any("SiLU" in how for how in described(tmp_path, "gelu_tanh_gated").values())


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("quant", ["w8a16", "w4a16"])
def test_the_plan_on_hopper_names_the_kernels_that_stream(quant: str, tmp_path: Path) -> None:
    found = described(tmp_path, quant=quant)
    assert found["decode, 1 request"] == "qkv, output, up, down: streaming kernels; head: small kernels"
    assert found["decode, 2 to 8 requests"] == "small kernels"
