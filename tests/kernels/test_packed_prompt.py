"""The product of a prompt's rows with weights of 8 and of 4 bits: what takes it, and against float64."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.errors import IngotError
from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.product.packed import packed_prompt as packed_prompt_module
from ingot.kernels.product.packed import prompt_tiles, prompt_words
from ingot.kernels.product.packed.packed_prompt import (
    add_packed_prompt,
    packed_prompt,
    packed_prompt_gate_up,
    prompt_loop_of,
    prompt_rows,
    takes_many_rows,
    takes_prompt,
    takes_wide,
    unpacks_prompts,
    word_descriptor,
)
from ingot.kernels.rows.operand_rows import OperandRows
from ingot.kernels.weight.stored_weight import StoredWeight, pack_words, part_columns
from ingot.layers.build_context import BuildContext
from ingot.layers.linear import Linear
from ingot.layers.mlp import GatedMLP
from ingot.layers.norm import Norm
from ingot.layers.products import layer_products
from ingot.layers.products.layer_products import PackedProduct, PromptProduct
from ingot.layers.products.product_choice import ProductChooser, Step
from ingot.layers.products.row_forms import DenseForm, OperandForm
from ingot.quant.schemes import weight_only
from ingot.quant.schemes.weight_only import InvariantWeightOnly, WeightOnly
from tests.kernels.numerics import assert_near, normal
from tests.kernels.test_packed_matmul import HALF_DTYPES, expected
from tests.kernels.test_stored_weight import random_weight

# bits, group, with zeros
FORMS = [
    (8, 0, False),
    (8, 0, True),
    (8, 128, False),
    (4, 0, True),
    (4, 128, True),
    (4, 32, True),
    (4, 32, False),
    (4, 64, True),
    (8, 64, True),
    (4, 256, False),
    (4, 1024, True),
]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device is one."""
    monkeypatch.setattr(packed_prompt_module, "is_hopper", lambda device: True)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_reference_is_the_product(form: tuple[int, int, bool], dtype: torch.dtype) -> None:
    x, weight = normal(7, 300, dtype=dtype), random_weight(form, 128, 300, dtype, "cpu")
    bias = normal(128, dtype=dtype, seed=3)
    assert_near(packed_prompt(x, weight, bias), expected(x, weight) + bias.double())
    assert packed_prompt(x[:0], weight).shape == (0, 128)
    gated, (gate, up) = packed_prompt_gate_up(x, weight), expected(x, weight).chunk(2, dim=-1)
    assert gated.dtype == dtype
    assert_near(gated, torch.nn.functional.silu(gate) * up)
    assert packed_prompt_gate_up(x[:0], weight).shape == (0, 64)
    for shift in (bias, None):
        hidden = normal(7, 128, dtype=dtype, seed=4)
        wanted = hidden.double() + expected(x, weight) + (0 if shift is None else shift.double())
        assert add_packed_prompt(x, weight, shift, hidden) is hidden
        assert_near(hidden, wanted)


def test_what_is_no_product() -> None:
    weight = random_weight((8, 0, False), 128, 64, torch.float16, "cpu")
    with pytest.raises(IngotError, match="x has the wrong dtype"):
        packed_prompt(torch.ones(70, 64), weight)
    with pytest.raises(IngotError, match="another width"):
        packed_prompt(torch.ones(70, 63).half(), weight)
    with pytest.raises(IngotError, match="the weight is dense"):
        packed_prompt(torch.ones(70, 64).half(), StoredWeight(torch.ones(128, 64).half(), 64))
    with pytest.raises(IngotError, match="bias has the wrong shape"):
        packed_prompt(torch.ones(70, 64).half(), weight, torch.ones(127).half())
    with pytest.raises(IngotError, match="hidden has the wrong shape"):
        add_packed_prompt(torch.ones(70, 64).half(), weight, None, torch.ones(70, 64).half())
    with pytest.raises(IngotError, match="hidden has the wrong dtype"):
        add_packed_prompt(torch.ones(70, 64).half(), weight, None, torch.ones(70, 128))


@pytest.mark.usefixtures("hopper")
def test_what_the_kernel_takes() -> None:
    """Whole tiles of outputs, any groups, rows that a descriptor reads."""
    x = normal(9, 512, dtype=torch.bfloat16)
    for form in FORMS:
        assert takes_prompt(x, random_weight(form, 256, 512, torch.bfloat16, "cpu"))
    weight = random_weight((4, 128, True), 256, 512, torch.bfloat16, "cpu")
    assert not takes_prompt(x.half(), weight)
    assert not takes_prompt(x, random_weight((4, 128, True), 192, 512, torch.bfloat16, "cpu"))
    wide = normal(9, 600, dtype=torch.bfloat16)
    assert takes_prompt(wide[:, 8:520], weight)
    assert not takes_prompt(wide[:, 4:516], weight)
    assert not takes_prompt(normal(9, 517, dtype=torch.bfloat16)[:, :512], weight)
    assert not unpacks_prompts(StoredWeight(torch.ones(128, 64), 64))
    odd = torch.zeros(weight.values.numel() + 1, dtype=torch.int16)[1:].view_as(weight.values)
    assert not takes_prompt(x, replace(weight, values=odd)), "no descriptor reads words that start there"
    many = normal(257, 512, dtype=torch.bfloat16)
    assert takes_many_rows(many, weight)
    assert not takes_many_rows(many[:256], weight)
    assert not takes_many_rows(many.half(), weight)


def test_other_devices_do_not_take_it() -> None:
    weight = random_weight((8, 0, False), 128, 64, torch.float16, "cpu")
    assert not takes_prompt(normal(9, 64, dtype=torch.float16), weight)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("rows", "wanted"), [(64, "small"), (256, "packed"), (257, "prompt"), (2048, "prompt")]
)
def test_rows_of_a_scheme(rows: int, wanted: str) -> None:
    """Few rows keep their kernels."""
    scheme, called = WeightOnly(8), []
    tensors = scheme.pack(normal(128, 64, dtype=torch.bfloat16))

    def product(name: str) -> mock.Mock:
        def multiply(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None) -> torch.Tensor:
            called.append((name, bias is not None))
            return x.new_zeros(len(x), weight.out_features)

        return mock.Mock(side_effect=multiply)

    names = {"small": "small_linear", "packed": "packed_matmul", "prompt": "packed_prompt"}
    patches = {function: product(name) for name, function in names.items()}
    with mock.patch.multiple(weight_only, runs_on_gpu=lambda x: True, **patches):
        y = scheme.apply(normal(1, rows, 64, dtype=torch.bfloat16), tensors)
    assert y.shape == (1, rows, 128)
    assert called == [(wanted, False)]
    assert scheme.unpacks_prompts(tensors, 64)
    assert not InvariantWeightOnly(8).unpacks_prompts(tensors, 64)


@pytest.mark.parametrize(
    ("form", "rows", "chunks", "unroll"),
    [
        ((8, 0, False), 256, 1, 1),
        ((8, 0, False), 256, 2, 2),
        ((8, 0, False), 256, 5, 1),
        ((8, 0, False), 128, 2, 1),
        ((8, 128, False), 256, 2, 1),
        ((4, 0, False), 256, 16, 1),
        ((4, 32, True), 256, 16, 1),
    ],
)
def test_an_iteration_and_what_shared_memory_holds(
    form: tuple[int, int, bool], rows: int, chunks: int, unroll: int
) -> None:
    """An iteration's chunks divide a row's; steps of x and two chunks of words leave room for the sums."""
    loop = prompt_loop_of((*form, False, False, False), rows, chunks)
    assert unroll == loop.UNROLL
    assert (32 if form[1] == 32 else 64) == loop.COLS
    assert loop.STAGES * rows * loop.COLS * 2 == 128 << 10
    gates = prompt_loop_of((*form, False, True, False), rows, chunks)
    assert gates == loop._replace(GATED=True)  # SiLU has its sums where others have their results
    assert (rows, *form[:2]) == (loop.BLOCK_T, loop.BITS, loop.GROUP)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 128), (4, 32)])
def test_words_come_in_the_order_of_the_operand(
    bits: int, group: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every 16 rows of an operand eight gates, then their ups; plain outputs as they are. Every part of a
    word pair has two neighbouring columns.
    """
    columns, parts = part_columns(group), 16 // bits
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 1 << bits, (128, 2 * columns * parts), dtype=torch.uint8, generator=generator)
    weight = StoredWeight(
        pack_words(numbers, bits, group, torch.zeros(128, dtype=torch.uint8)),
        2 * columns * parts, torch.ones(128).half(), None, bits, group,
    )  # fmt: skip
    pieces = word_descriptor(weight.values.view(torch.int32), 4, columns).base
    boxes = ((2, 4), (6, 8)) if gated else ((4, 8),)  # blocks of 16 outputs: the second group's
    chunk = torch.cat([pieces[a:b, columns // 4 :] for a, b in boxes])
    ours = SimpleNamespace(
        reshape=torch.reshape,
        permute=torch.permute,
        convert_layout=lambda words, layout: words,
        constexpr=int,
    )
    monkeypatch.setattr(prompt_words, "gl", ours)
    monkeypatch.setattr(prompt_words, "word_layout", lambda gated, columns: None)
    monkeypatch.setattr(prompt_words, "pair_layout", lambda outputs, columns: None)
    loop = prompt_loop_of((bits, group, False, False, gated, False), 256, 2)
    words = prompt_words.loaded_words.fn(SimpleNamespace(load=lambda layout: chunk), loop)
    outputs = torch.arange(64, 128)
    if gated:
        row = torch.arange(64)
        outputs = 32 + row // 16 * 8 + row % 8 + row // 8 % 2 * 64
    for part in range(parts):
        for which in range(2):
            found = words >> (16 * which + bits * part) & ((1 << bits) - 1)
            first = (parts + part) * columns + which
            assert torch.equal(found, numbers[outputs, first : first + columns : 2].to(torch.int32))


@pytest.mark.parametrize(("rows", "width"), [(700, 520), (128, 4096)])
def test_both_tiles_are_built_before_the_first_is_needed(
    rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server does not compile beside a later prompt of another length."""
    monkeypatch.setattr(packed_prompt_module, "_BUILT", set())
    monkeypatch.setattr(packed_prompt_module, "multiprocessors", lambda device: 132)
    kernel = mock.MagicMock()
    monkeypatch.setattr(packed_prompt_module, "packed_prompt_kernel", kernel)
    monkeypatch.setattr(packed_prompt_module, "runs_on_gpu", lambda x: True)
    x, weight = (
        normal(rows, width, dtype=torch.float16),
        random_weight((8, 0, False), 4096, width, torch.float16, "cpu"),
    )
    for _ in range(2):
        packed_prompt(x, weight)
    warmed = [call.kwargs["LOOP"] for call in kernel.warmup.call_args_list]
    run = [call.kwargs["LOOP"] for call in kernel.__getitem__.return_value.call_args_list]
    assert len(run) == 2
    assert {loop.BLOCK_T for loop in (*warmed, run[0])} == {128, 256}
    assert len(warmed) == 1


def packed_mlp(mlp: str, bias: bool, quant: str) -> GatedMLP:
    """Gated MLP of 128 hidden and inner values with random weights, bf16."""
    config = DecoderConfig(
        "llama", 97, 128, 128, 1, num_heads=4, num_kv_heads=2, head_dim=32, max_positions=256, mlp=mlp,
        mlp_bias=bias,
    )  # fmt: skip
    module = GatedMLP(config, BuildContext(QuantConfig(quant), KernelPlan(), torch.bfloat16))
    for linear in (module.gate_up_proj, module.down_proj):
        shift = normal(linear.out_features, dtype=torch.bfloat16) if bias else None
        weight = normal(linear.out_features, linear.in_features, dtype=torch.bfloat16) / 16
        for name, tensor in linear.scheme.pack(weight, shift).items():
            linear.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def prompt_product(name: str, linear: Linear) -> layer_products.Product:
    """What prompts' steps choose."""
    chooser = mock.Mock(dtype=torch.bfloat16, config=mock.Mock(gated=True), spec=ProductChooser)
    return ProductChooser.product(chooser, name, linear, Step(decodes=False))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("mlp", "bias", "quant", "rows", "gates"),
    [
        ("silu_gated", False, "w4a16", 257, 1),
        ("silu_gated", False, "w8a16", 300, 1),
        ("silu_gated", False, "w4a16", 256, 0),
        ("gelu_tanh_gated", False, "w4a16", 257, 0),
        ("silu_gated", True, "w4a16", 257, 0),
    ],
)
def test_prompts_compute_the_activation_in_the_product(
    mlp: str, bias: bool, quant: str, rows: int, gates: int
) -> None:
    """SiLU without a bias, of many rows; as the modules compute it."""
    module, x = packed_mlp(mlp, bias, quant), normal(rows, 128, dtype=torch.bfloat16)
    linear = module.gate_up_proj
    product = ProductChooser.product(
        mock.Mock(dtype=torch.bfloat16, config=mock.Mock(gated=True), spec=ProductChooser),
        "gate_up",
        linear,
        Step(decodes=False),
    )
    with mock.patch.object(layer_products, "packed_prompt_gate_up", wraps=packed_prompt_gate_up) as called:
        found = product.inner(x, module, DenseForm())
    assert called.call_count == gates
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, module.activate(linear(x)), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("hopper")
def test_some_rows_of_a_wide_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that packed_matmul takes the last, of 4 bits more than of 8."""
    monkeypatch.setattr(packed_prompt_module, "SPLIT_OUTPUTS", 255)
    for bits, group, first in ((4, 128, 65), (8, 0, 192)):
        weight = random_weight((bits, group, bits == 4), 256, 512, torch.bfloat16, "cpu")
        found = [rows for rows in range(300) if takes_wide(rows, torch.bfloat16, weight)]
        assert found == list(range(first, 257))
        found = [rows for rows in range(300) if takes_wide(rows, torch.bfloat16, weight, natural=True)]
        assert found == sorted({*range(65, 129), *range(first, 257)})
        assert not takes_wide(200, torch.float16, weight), "scales of another dtype"
        few = random_weight((bits, group, False), 128, 512, torch.bfloat16, "cpu")
        odd = random_weight((bits, 0, False), 256, 516, torch.bfloat16, "cpu")
        assert not takes_wide(200, torch.bfloat16, few)
        assert not takes_wide(200, torch.bfloat16, odd), "no descriptor reads such rows"
    assert not takes_wide(200, torch.bfloat16, StoredWeight(torch.ones(256, 512).bfloat16(), 512))
    monkeypatch.setattr(packed_prompt_module, "is_hopper", lambda device: False)
    assert not takes_wide(256, torch.bfloat16, weight)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "quant", "rows", "wide"),
    [
        ("gate_up", "w4a16", 65, True),
        ("gate_up", "w4a16", 136, True),
        ("gate_up", "w8a16", 184, False),
        ("gate_up", "w8a16", 200, True),
        ("qkv", "w8a16", 200, False),
    ],
)
def test_a_decode_step_of_many_rows(
    monkeypatch: pytest.MonkeyPatch, name: str, quant: str, rows: int, wide: bool
) -> None:
    """Gate and up by the prompts' kernel, of rows in natural order; with SiLU where down's are, too."""
    monkeypatch.setattr(packed_prompt_module, "SPLIT_OUTPUTS", 255)
    module, x = packed_mlp("silu_gated", False, quant), normal(rows, 128, dtype=torch.bfloat16)
    config = mock.Mock(qk_norm=False, head_dim=128, gated=True)
    cache = mock.Mock(scales=None, keys=torch.empty(0))
    chooser = mock.Mock(spec=ProductChooser, dtype=torch.bfloat16, config=config, cache=cache, dense=())
    chooser._table.return_value, chooser._unpacks.return_value = (), True
    product = ProductChooser._decoding(chooser, name, module.gate_up_proj, rows, None)
    assert isinstance(product, PackedProduct)
    assert product.wide == wide
    if not wide:
        return
    assert isinstance(product.form, DenseForm)
    wanted = module.activate(module.gate_up_proj(x))
    gates, plain = mock.Mock(wraps=packed_prompt_gate_up), mock.Mock(wraps=packed_prompt)
    with mock.patch.multiple(layer_products, packed_prompt_gate_up=gates, packed_prompt=plain):
        natural, ordered = product.inner(x, module, DenseForm()), product.inner(x, module, OperandForm())
        assert (gates.call_count, plain.call_count) == (1, 1)
    assert isinstance(natural, torch.Tensor)
    assert isinstance(ordered, OperandRows)
    torch.testing.assert_close(natural, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ordered.natural(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("rows", "gates"), [(64, 0), (65, 1), (128, 1), (160, 0), (200, 1)])
def test_a_short_prompt_of_a_wide_product(monkeypatch: pytest.MonkeyPatch, rows: int, gates: int) -> None:
    monkeypatch.setattr(packed_prompt_module, "SPLIT_OUTPUTS", 255)
    module, x = packed_mlp("silu_gated", False, "w8a16"), normal(rows, 128, dtype=torch.bfloat16)
    product = PromptProduct(module.gate_up_proj)
    with mock.patch.object(layer_products, "packed_prompt_gate_up", wraps=packed_prompt_gate_up) as called:
        found = product.inner(x, module, DenseForm())
    assert called.call_count == gates
    assert isinstance(found, torch.Tensor)
    wanted = module.activate(module.gate_up_proj(x))
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("rows", "bias", "adds"), [(257, False, 1), (300, True, 1), (256, True, 0)])
def test_prompts_are_added_to_the_hidden_states_in_the_product(rows: int, bias: bool, adds: int) -> None:
    module, x = packed_mlp("silu_gated", bias, "w4a16"), normal(rows, 128, dtype=torch.bfloat16)
    linear, hidden = module.down_proj, normal(rows, 128, dtype=torch.bfloat16, seed=5)
    wanted = hidden.float() + linear(x).float()
    product = ProductChooser.product(
        mock.Mock(dtype=torch.bfloat16, config=mock.Mock(gated=True), spec=ProductChooser),
        "down",
        linear,
        Step(decodes=False),
    )
    norm = mock.Mock(spec=Norm, side_effect=lambda s, residual, tiles: (
        None, s if residual is None else s + residual
    ))  # fmt: skip
    with mock.patch.object(layer_products, "add_packed_prompt", wraps=add_packed_prompt) as called:
        _, found = product.join(x, hidden, norm, DenseForm())
    assert called.call_count == adds
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [129, 2048, 2500, 8192])
def test_every_tile_is_done_once(rows: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of eight tiles of rows, of which the last may have fewer."""
    ours = SimpleNamespace(minimum=min, cdiv=lambda a, b: -(-a // b))
    monkeypatch.setattr(prompt_tiles, "gl", ours)
    monkeypatch.setattr(prompt_tiles, "tile_count", prompt_tiles.tile_count.fn)
    loop = prompt_loop_of((4, 128, True, False, gated, False), 256, 16)
    places = SimpleNamespace(tokens=rows, outputs=1280)
    width = 64 if gated else 128
    wanted = {(row, 10 * width - width * (1 + n)) for row in range(0, rows, 256) for n in range(10)}
    found = [prompt_tiles.tile_corner.fn(tile, places, loop) for tile in range(len(wanted))]
    assert prompt_tiles.tile_count(places, loop) == len(wanted)
    assert set(found) == wanted
    assert prompt_tiles.tile_corner.fn(len(wanted) + 7, places, loop) == found[-1]
    assert len({row for row, _ in found[:80]}) <= 8


def test_rows_of_a_tile() -> None:
    """Small tiles where large ones leave most of 132 programs without work, or end with few in work."""
    assert [prompt_rows(rows, 4096, 132) for rows in (257, 512, 768, 1024, 1536, 2048)] == [
        128, 128, 256, 256, 128, 256,
    ]  # fmt: skip
    assert [prompt_rows(rows, 28672, 132) for rows in (300, 512, 2048, 8192)] == [128, 256, 256, 256]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Hopper's"
)
@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_equal_to_float64(form: tuple[int, int, bool], dtype: torch.dtype) -> None:
    """One tile, many per program, ends of rows and columns; twice the same bits, and no row left out."""
    for rows, outputs, width in ((1, 128, 64), (257, 384, 520), (3000, 4096, 1024), (5000, 5120, 4096)):
        whole = normal(rows, width + 8, dtype=dtype, device="cuda")
        x, weight = whole[:, 8:], random_weight(form, outputs, width, dtype, "cuda")
        bias = normal(outputs, dtype=dtype, device="cuda", seed=3)
        assert takes_prompt(x, weight)
        y = packed_prompt(x, weight, bias)
        assert_near(y, expected(x, weight) + bias.double())
        y.fill_(float("nan"))
        del y
        assert_near(packed_prompt(x, weight), expected(x, weight))
        plain = packed_prompt(x, weight)
        assert torch.equal(plain, packed_prompt(x, weight))
        assert torch.equal(packed_prompt_gate_up(x, weight), silu_mul(plain))
        hidden = normal(rows, outputs, dtype=dtype, device="cuda", seed=4)
        wanted = expected(x, weight) + bias.double() + hidden.double()
        assert_near(add_packed_prompt(x, weight, bias, hidden), wanted)
        if rows > 300:  # the same bits in another place
            assert torch.equal(packed_prompt_gate_up(x[64:], weight), silu_mul(plain)[64:])
