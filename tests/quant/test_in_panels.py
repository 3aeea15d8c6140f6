"""Products on a CPU by kernels of ours, beside dense products in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.kernels.cpu import llvm_module, panel_products
from ingot.kernels.cpu.llvm_module import HostCpu, host_cpu
from ingot.kernels.cpu.panel_products import panel_product, tiles
from ingot.kernels.cpu.product_text import TILES_OF_AVX512
from ingot.layers.linear import held_bytes, linears
from ingot.quant.plain_rows import split_rows
from ingot.quant.schemes import in_panels
from ingot.quant.schemes.in_panels import InPanels, Int8InPanels, split_columns
from ingot.quant.schemes.int4_in_int8 import Int4InInt8
from ingot.quant.schemes.int8_both import Int8Both
from ingot.quant.schemes.linear_scheme import LinearScheme
from ingot.quant.schemes.scheme_registry import Dense
from ingot.quant.schemes.weight_only import WeightOnly
from tests.e2e.tiny import write_tiny
from tests.tiny_models import random_ids

pytestmark = pytest.mark.usefixtures("cpu_kernels")
N, K = 100, 320
FLOATS: dict[str, LinearScheme] = {
    "dense": Dense(),
    "w8a16": WeightOnly(8, 0, True),
    "w8a16 zeros": WeightOnly(8, 64, False),
    "w8a16 ordered": WeightOnly(8, 80, True, True),
    "w4a16 symmetric": WeightOnly(4, 160, True),
    "w4a16": WeightOnly(4, 32, False),
    "w4a16 rows": WeightOnly(4, 0, False),
}
INTEGERS: dict[str, LinearScheme] = {
    "w8a8": Int8Both(),
    "w8a8 by head": Int8Both(input_group=32),
    "w8a8 static": Int8Both(static=True),
    "w4a8": Int4InInt8(64, 0),
    "w4a8 by head": Int4InInt8(64, 16),
}


def random_weight(dtype: torch.dtype) -> torch.Tensor:
    """Rows of sizes that differ by a factor of a thousand."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(N, K, generator=generator) * torch.logspace(-3, 0, N)[:, None]).to(dtype)


def stored_by(scheme: LinearScheme, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    scale = torch.tensor([0.02]) if scheme.static else None
    stored = scheme.pack(random_weight(dtype), torch.randn(N, generator=generator), scale)
    if scheme.ordered:
        stored["order"] = torch.randperm(K, generator=generator, dtype=torch.int32)
    return stored


def packed(scheme: LinearScheme) -> tuple[InPanels | Int8InPanels, dict[str, torch.Tensor]]:
    found = in_panels.in_panels(scheme, stored_by(scheme, torch.bfloat16), K)
    if found is None:
        pytest.skip("this processor has no products of int8 that we use")
    return found


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What is not written is not a number, or the largest one."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def same(found: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> bool:
    equal = all(torch.equal(found[leaf].to(tensor.dtype), tensor) for leaf, tensor in stored.items())
    return set(found) == set(stored) and equal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FLOATS)
def test_products_are_those_of_what_was_stored(name: str, dtype: torch.dtype) -> None:
    scheme = FLOATS[name]
    stored = stored_by(scheme, dtype)
    meant = scheme.dequantize(stored, K, torch.float64)
    found = in_panels.in_panels(scheme, stored, K)
    assert found is not None
    form, kept = found
    x = torch.randn(21, K, generator=torch.Generator().manual_seed(2))
    bound = 2e-6 * (x.double().abs() @ meant.abs().T) + 1e-7  # of fp32 sums; rounded rows would be 1e-3 off
    for rows in (0, 1, 2, 4, 7, 21):
        y = form.apply(x[:rows], kept)
        assert ((y - (x[:rows].double() @ meant.T + stored["bias"])).abs() <= bound[:rows]).all()
    assert same(form.original(kept), stored)
    assert torch.equal(form.dequantize(kept, K, torch.float64), meant)


@pytest.mark.parametrize("name", INTEGERS)
def test_int8_products_have_the_bits_of_exact_sums(name: str) -> None:
    scheme = INTEGERS[name]
    stored = stored_by(scheme, torch.float32)
    found = in_panels.in_panels(scheme, stored, K)
    if found is None:
        pytest.skip("this processor has no products of int8 that we use")
    form, kept = found
    assert isinstance(form, Int8InPanels)
    x = torch.randn(21, K, generator=torch.Generator().manual_seed(2)) * 0.8
    assert form.apply(x[:0], kept).shape == (0, N)
    for rows in (1, 2, 4, 7, 21):
        assert torch.equal(form.apply(x[:rows], kept), scheme.apply(x[:rows], stored))
    assert same(form.original(kept), stored)


@pytest.mark.parametrize("name", ["w8a8", "w8a8 by head", "w4a8"])
def test_values_in_the_middle_between_two_fall_as_everywhere(name: str) -> None:
    """The last bit of 1 / m · 127 decides, in a thirtieth of such values."""
    form, kept = packed(INTEGERS[name])
    generator = torch.Generator().manual_seed(2)
    largest = torch.rand(200, 1, generator=generator) + 0.5
    x = (torch.randint(-126, 126, (200, K), generator=generator) + 0.5) * largest / 127
    x[:, ::16] = largest
    stored = form.original(kept)
    assert torch.equal(form.apply(x, kept), form.origin.apply(x, stored))


def test_the_largest_int8_values_are_summed_exactly() -> None:
    scheme = Int8Both(static=True)
    weight = torch.full((16, 64), -128, dtype=torch.int8)
    stored = {"weight": weight, "scales": torch.ones(16), "input_scale": torch.ones(1)}
    found = in_panels.in_panels(scheme, stored, 64)
    if found is None:
        pytest.skip("this processor has no products of int8 that we use")
    x = torch.tensor([[127.0], [-128.0], [1.0]]).repeat(1, 64)
    y = found[0].apply(x, stored)
    assert torch.equal(y, (x.double() @ weight.double().T).float())


@pytest.mark.parametrize("name", ["dense", "w4a16", "w4a16 symmetric"])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_threads(name: str) -> None:
    found = in_panels.in_panels(FLOATS[name], stored_by(FLOATS[name], torch.bfloat16), K)
    assert found is not None
    form, kept = found
    x = torch.randn(40, K, generator=torch.Generator().manual_seed(2))
    all_rows = form.apply(x, kept)
    threads = torch.get_num_threads()
    try:
        for rows in (1, 2, 7, 16, 33):
            torch.set_num_threads(1 + rows % 2)
            assert torch.equal(form.apply(x[3 : 3 + rows], kept), all_rows[3 : 3 + rows])
    finally:
        torch.set_num_threads(threads)


def test_a_processor_without_avx512_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By other tiles and without a table in a register."""
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(2))
    wide, narrow = (HostCpu(fma=True, avx512=avx512, vnni=False) for avx512 in (True, False))
    for name in ("dense", "w4a16", "w8a16 zeros"):
        products = []
        for cpu in (wide, narrow) if wide.avx512 == host_cpu().avx512 else (narrow,):
            with monkeypatch.context() as patched:
                for module in (in_panels, panel_products):
                    patched.setattr(module, "host_cpu", lambda cpu=cpu: cpu)
                patched.setattr(panel_products, "_kernel", panel_products._kernel.__wrapped__)
                form, kept = packed(FLOATS[name])
                assert not form.panels.packing.rounds
                assert (tiles(form.panels.packing) == TILES_OF_AVX512) == cpu.avx512
                products.append(form.apply(x, kept))
        assert all(torch.equal(products[0], other) for other in products)


@pytest.mark.parametrize("name", ["w8a16", "w8a16 zeros", "w4a16 symmetric", "w4a16"])
def test_split_rows_lose_about_what_sums_in_fp32_lose(name: str) -> None:
    """Also beside outliers, in tiny and in empty groups."""
    form, kept = packed(FLOATS[name])
    panels = form.panels
    if not panels.packing.split:
        pytest.skip("this processor multiplies in fp32")
    x = torch.randn(6, K, generator=torch.Generator().manual_seed(2))
    x[0, 5], x[1], x[2, : K // 2], x[3], x[4] = 3e4, x[1] * 1e-20, 0.0, 0.0, x[4] * 1e20
    meant = form.dequantize(kept, K, torch.float64)
    largest = x.double().abs().unflatten(1, (-1, panels.row_group)).amax(-1)
    bound = 2**-22 * largest @ meant.abs().unflatten(1, (-1, panels.row_group)).sum(-1).T
    y = form.apply(x, kept) - kept["bias"]
    sums = 2e-6 * (x.double().abs() @ meant.abs().T) + 2e-7 * kept["bias"].abs()
    assert ((y - x.double() @ meant.T).abs() <= bound + sums + 1e-28).all()
    assert torch.equal(form.apply(x[3:4], kept)[0], kept["bias"])


@pytest.mark.parametrize("name", ["w8a16", "w8a16 zeros", "w8a16 ordered", "w4a16 symmetric", "w4a16"])
def test_split_rows_are_those_of_the_plain_rule(name: str) -> None:
    """What is left are a few sums in fp32."""
    form, kept = packed(FLOATS[name])
    if not form.panels.packing.split:
        pytest.skip("this processor multiplies in fp32")
    x = torch.randn(6, K, generator=torch.Generator().manual_seed(2))
    meant, order = form.dequantize(kept, K, torch.float64), kept.get("order")
    columns = split_columns(FLOATS[name], K)
    assert columns == form.panels.row_group
    exact = x.double() @ meant.T
    split = split_rows(x.double(), columns, order) @ meant.T
    y = form.apply(x, kept).double() - kept["bias"].double()
    assert float((y - split).norm()) < 0.8 * float((y - exact).norm())


def test_a_long_row_of_the_largest_values_is_split_into_sums_that_int32_holds() -> None:
    scheme = WeightOnly(8, 0, True)
    weight = torch.ones(16, 16384)
    weight[:, ::2] = -1.0
    stored = scheme.pack(weight, None, None)
    found = in_panels.in_panels(scheme, stored, 16384)
    assert found is not None
    x = 1.9999 * weight[:1]
    meant = scheme.dequantize(stored, 16384, torch.float64)
    assert torch.allclose(found[0].apply(x, stored).double(), x.double() @ meant.T, rtol=1e-5)


@pytest.mark.parametrize("name", ["dense", "w8a16", "w4a16", "w8a8", "w8a8 by head", "w4a8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_seen_and_stays_alone(name: str, value: float) -> None:
    scheme = (FLOATS | INTEGERS)[name]
    form, kept = packed(scheme)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(2))
    expected = form.apply(x, kept)
    x[2, 7] = value
    y = form.apply(x, kept)
    assert not y[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], expected[others])


def test_a_residual_is_added() -> None:
    found = in_panels.in_panels(Dense(), {"weight": random_weight(torch.bfloat16)[:96]}, K)
    assert found is not None
    panels = found[0].panels
    x, residual = torch.randn(5, K), torch.randn(5, 96)
    for rows in (1, 4, 5):
        own = residual[:rows].clone()
        expected = panel_product(x[:rows], panels) + own
        assert torch.equal(panel_product(x[:rows], panels, own), expected)


@pytest.mark.parametrize(
    ("scheme", "columns"),
    [
        (Dense(), 36),
        (WeightOnly(4, 128, True), 320),
        (WeightOnly(4, 20, True), 320),
        (Int4InInt8(64, 0), 200),
    ],
)
def test_shapes_that_panels_cannot_hold_are_left_to_others(scheme: LinearScheme, columns: int) -> None:
    assert in_panels.packing_of(scheme, torch.bfloat16, columns) is None


def test_sums_that_int32_does_not_hold_are_left_to_others() -> None:
    cpu = host_cpu()
    assert cpu is not None
    if not cpu.vnni:
        pytest.skip("this processor has no products of int8 that we use")
    assert in_panels.packing_of(Int8Both(), torch.int8, 1 << 16) is not None
    assert in_panels.packing_of(Int8Both(), torch.int8, (1 << 16) + 64) is None


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-36, 1e-33, 1e-30, 1e36])
def test_rows_of_small_and_large_values(size: float) -> None:
    """Rows in int8 parts have scales that are normal numbers."""
    scheme = FLOATS["w4a16"]
    stored = scheme.pack(random_weight(torch.float32), None)
    meant = scheme.dequantize(stored, K, torch.float64)
    found = in_panels.in_panels(scheme, stored, K)
    assert found is not None
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(2)) * size
    rounded = 2e-6 * x.double().abs().amax() + 2.0**-121
    y = found[0].apply(x, found[1])
    assert ((y.double() - x.double() @ meant.T).abs() <= rounded * meant.abs().sum(1)).all()


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS])
def test_the_bytes_are_those_that_are_counted(name: str) -> None:
    """Of rows that fill no block of 16, in several groups."""
    scheme = (FLOATS | INTEGERS)[name]
    stored = stored_by(scheme, torch.bfloat16 if scheme.dense else torch.float32)
    found = in_panels.in_panels(scheme, stored, K)
    if found is None:
        pytest.skip("this processor has no products of int8 that we use")
    packing = in_panels.packing_of(scheme, torch.bfloat16, K)
    assert packing is not None
    small = sum(one.nbytes for leaf, one in stored.items() if leaf not in ("weight", "words", "pairs"))
    kept = sum(one.nbytes for one in found[1].values())
    counted = in_panels.in_panels_bytes(scheme, packing, N, K) + small
    assert found[0].packed_bytes + kept == counted


def test_without_llvmlite_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_panels, "host_cpu", lambda: None)
    assert in_panels.packing_of(Dense(), torch.bfloat16, 64) is None


def test_an_old_llvmlite_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llvmlite.__version__", "0.45.1")
    assert llvm_module._binding.__wrapped__() is None


def test_openmp_needs_no_barrier_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have one: a runtime of OpenMP without it runs them."""

    class Library:
        def __init__(self, path: str) -> None:
            whole = CDLL(path)
            for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
                setattr(self, name, getattr(whole, name))

    usual = llvm_module._openmp.__wrapped__()
    monkeypatch.setattr(llvm_module.ctypes, "CDLL", Library)
    assert llvm_module._openmp.__wrapped__() == usual


@pytest.mark.parametrize("scheme", ["none", "w4a16", "w8a8"])
def test_a_prompt_in_several_steps(scheme: str, tmp_path: Path) -> None:
    """Steps that want no logits give the head no rows."""
    source = write_tiny(tmp_path / "tiny")
    folder = build(
        source, tmp_path / "engine", quant=QuantConfig(scheme, head="none"), dtype="bf16", proof=False
    )
    prompts = [random_ids(n, seed=n) for n in (45, 17, 33)]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    few, whole = (
        LLM(folder, "cpu", runtime=RuntimeConfig(token_budget=budget)).generate(prompts, params)
        for budget in (16, 2048)
    )
    assert [answer.token_ids for answer in few] == [answer.token_ids for answer in whole]


def test_this_processor_is_described() -> None:
    cpu = host_cpu()
    assert cpu is not None
    assert cpu.avx512 or not cpu.vnni


@pytest.mark.parametrize("scheme", ["none", "w8a16", "w8a8", "w4a8"])
def test_a_loaded_model_answers_as_one_that_is_not_packed(scheme: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny")
    quant = QuantConfig(scheme, head="none" if scheme == "none" else "w8a16")
    folder = build(source, tmp_path / "engine", quant=quant, dtype="bf16", proof=False)
    llm = LLM(folder, "cpu")
    model, setting = llm.engine.model, llm.executor.setting
    assert setting is not None
    forms = [type(linear.scheme) for linear in linears(model).values()]
    assert InPanels in forms
    plain = LLM(folder, "cpu", runtime=RuntimeConfig(fused_decode=False))
    assert torch.allclose(llm.logits([3, 5, 8, 13]), plain.logits([3, 5, 8, 13]), atol=2e-5)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert held_bytes(model) <= sum(setting.weight_bytes().values()) <= held_bytes(model) + buffers + 4096
