"""Walks in 8 bits where kernels run them: on a GPU and, of tiny models, under the interpreter.

Rounding to 8 bits turns one last bit of 16 into a tenth of a nat, so walk and modules are compared in fp32;
in 16 bits each kernel is compared with its twin on the operands of a real step, and the walk with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import DTYPES
from ingot.kernels.attention import prefill_reference
from ingot.kernels.cache import rope_kv_write
from ingot.kernels.norm import rms_norm
from ingot.kernels.product.int8 import int8_linear
from ingot.kernels.rows.int8_rows import Int8Rows
from ingot.layers import attention, norm
from ingot.layers.decoder_forward import Operations
from ingot.layers.products import layer_products as products
from ingot.layers.products import row_forms as forms
from ingot.quant.schemes import int4_in_int8
from tests.kernels.interpreter import fill_bfloat16_gaps
from tests.parity.kernel_witness import Witness, interpreted
from tests.parity.test_rounded_steps import PROMPTS, SIZES, engine
from tests.parity.walk_ways import (
    by_every_way,
    expect_equal,
    expect_graphs_agree,
    expect_near,
    expect_one_result,
    found_of,
)
from tests.tiny_models import random_ids, save_model, tiny_config

pytestmark = pytest.mark.usefixtures("weights_as_stored")

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)
MANY = 70  # requests: more rows than small products take
WATCHED = (forms, norm, products, attention, int4_in_int8)
INT8_OPS = {
    *("int8_linear", "silu_mul_int8", "int8_linear_parts", "sum_norm"),
    *("rms_norm", "rope_kv_write", "paged_attention", "prefill_attention", "small_linear"),
}
BLOCK_OPS = {
    *("int8_linear", "silu_mul_in_blocks", "int8_linear_parts"),
    *("sum_norm", "rms_norm", "rope_kv_write", "paged_attention", "prefill_attention", "small_linear"),
}


@dataclass(frozen=True)
class Case:
    """A model and how it is rounded; without a ``kind`` the trained one of 260,000 weights."""

    quant: str
    kind: str = "llama"
    group: int = 0
    kv_dtype: str = "auto"
    ops: set[str] = field(default_factory=lambda: INT8_OPS | {"small_int8_qkv"})
    changes: dict[str, Any] = field(default_factory=dict)


CASES = {
    "w8a8 trained": Case("w8a8", kind=""),
    "w4a8 trained": Case("w4a8", kind="", ops=INT8_OPS | {"small_int8_qkv"}),
    "w8a8 biases": Case("w8a8", changes={"num_key_value_heads": 4, "attention_bias": True}),
    "w8a8 window": Case("w8a8", "mistral", changes={"sliding_window": 16}),
    "w8a8 head norms": Case("w8a8", "qwen3", ops=INT8_OPS),
    "w8a8 int8 cache": Case("w8a8", kv_dtype="int8", ops=INT8_OPS),
    "rptq-w8a8 32": Case("rptq-w8a8", group=32, ops=BLOCK_OPS),
    "rptq-w8a8 128": Case("rptq-w8a8", group=128, ops=BLOCK_OPS),
    "rptq-w4a8 128": Case("rptq-w4a8", group=128, ops=BLOCK_OPS),
    "rptq-w4a4 32": Case("rptq-w4a4", group=32, ops=BLOCK_OPS),
    "rptq-w4a4 128 int8 cache": Case("rptq-w4a4", group=128, kv_dtype="int8", ops=BLOCK_OPS),
}


def prompts_of(case: Case) -> list[list[list[int]]]:
    """Steps of few rows and of more than small products take, also such that all decode."""
    few = PROMPTS if case.kind else [[1], [1, 400], [1, 300, 301]]
    return [few, [*few, random_ids(90, seed=4)], many_prompts()]


def many_prompts() -> list[list[int]]:
    """Of 1 to 3 tokens, of MANY requests."""
    return [[index + 1] * (index % 3 + 1) for index in range(MANY)]


class Models:
    """Makes models; engines of RPTQ are built once."""

    def __init__(self, folder: Path, data: Callable[[], Path]) -> None:
        self.folder, self.data = folder, data

    def __call__(
        self, case: Case, dtype: str, *, graphs: bool = False, sizes: bool = True, device: str = "cuda"
    ) -> LLM:
        """One that walks in every dtype; with ``sizes`` such that the kernels read whole tiles."""
        blocks = case.quant.startswith("rptq")
        folder = self._checkpoint(case, SIZES if sizes else {})
        if blocks:
            built = folder.with_name(f"engine {case.quant} {case.group} {dtype}")
            if not built.exists():
                new = engine(folder, case.quant, case.group, dtype, device, max_batch_size=MANY)
                new.rename(built)
            folder = built
        runtime = RuntimeConfig(
            cuda_graphs=graphs,
            cache_tokens=64 * (MANY + 10),
            prefix_reuse=False,
            kv_dtype=case.kv_dtype,
        )
        rounded: dict[str, Any] = {} if blocks else {"quant": case.quant, "max_batch_size": MANY}
        llm = LLM(folder, device=device, compute_dtype=dtype, runtime=runtime, **rounded)
        forward = llm.executor.runner.forward
        forward.fused = True
        return llm

    def _checkpoint(self, case: Case, sizes: dict[str, int]) -> Path:
        if not case.kind:
            return self.data() / "golden" / "llama_aidreams260K" / "hf"
        folder = self.folder / f"{case.kind} {sorted((sizes | case.changes).items())}" / "checkpoint"
        if not folder.exists():
            save_model(tiny_config(case.kind, **sizes | case.changes), folder, seed=3)
        return folder


@pytest.fixture
def poisoned_allocations() -> Iterator[None]:
    """What a kernel forgets to write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Models:
    return Models(tmp_path_factory.mktemp("models"), lambda: request.getfixturevalue("data"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_walk_and_modules(self, name: str, dtype: str, models: Models) -> None:
        """The same bits each time and without early starts; in fp32, ties apart, what the modules give."""
        llm = models(CASES[name], dtype)
        with by_every_way(llm, lead=dtype == "fp32") as steps:
            for prompts in prompts_of(CASES[name]):
                llm.generate(prompts, PARAMS)
        expect_one_result(steps)
        if dtype == "fp32":
            expect_near(steps)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.usefixtures("poisoned_allocations")
    def test_kernels(self, name: str, dtype: str, models: Models) -> None:
        """Each kernel is its twin on the operands of a real step."""
        llm = models(CASES[name], dtype)
        with Witness(DTYPES[dtype], *WATCHED) as witness:
            for prompts in prompts_of(CASES[name]):
                llm.generate(prompts, PARAMS)
        assert witness.faults() == []
        head = set() if DTYPES[dtype].itemsize == 2 else {"small_linear"}  # of one row alone in fp32
        older = torch.cuda.get_device_capability() != (9, 0)  # Hopper multiplies int4 as it is stored
        widened = {"expand_int8"} if older and name == "w4a8 trained" else set()
        assert set(witness.calls) == CASES[name].ops - head | widened

    @pytest.mark.parametrize("dtype", ["fp32", "fp16"])
    def test_graphs(self, name: str, dtype: str, models: Models) -> None:
        """Captured steps: the same bits each time and without early starts; what the walk gives without."""
        case = CASES[name]
        for prompts in prompts_of(case):
            found = expect_graphs_agree(lambda: models(case, dtype, graphs=True), prompts, PARAMS)
            if dtype == "fp32":
                expect_equal(found, found_of(models(case, dtype), prompts, PARAMS))


interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run here")
SHORT = SamplingParams(max_new_tokens=2, ignore_eos=True, logprobs=0)
BRIEF = [[5, 6, 7], list(range(9)), [90]]


@pytest.mark.stays("w8a8 head norms-bf16", "rptq-w4a4 32-bf16")
@interpreter
@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("w8a8 biases", "fp16"),
        ("w8a8 head norms", "bf16"),
        ("rptq-w8a8 32", "fp16"),
        ("rptq-w4a4 32", "bf16"),
    ],
)
def test_interpreted_kernels(name: str, dtype: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_bfloat16_gaps(monkeypatch)
    llm = models(CASES[name], dtype, sizes=False, device="cpu")
    with Witness(DTYPES[dtype], *WATCHED) as witness, interpreted(lambda: not witness.by_reference):
        llm.generate(BRIEF, SHORT)
    assert witness.faults() == []
    assert set(witness.calls) == CASES[name].ops


@pytest.mark.stays("rptq-w8a8 32")
@interpreter
@pytest.mark.parametrize("name", ["w8a8 biases", "rptq-w8a8 32"])
def test_interpreted_walks_and_modules(name: str, models: Models) -> None:
    llm = models(CASES[name], "fp32", sizes=False, device="cpu")
    runs = {"kernels": True}

    def choose(walk: bool) -> None:
        runs["kernels"] = walk

    with interpreted(lambda: runs["kernels"]), by_every_way(llm, 1, choose, lead=True) as steps:
        llm.generate(BRIEF, SHORT)
    expect_one_result(steps)
    expect_near(steps)


@interpreter
@pytest.mark.parametrize("wrong", ["", "numbers", "scales", "logits"])
def test_a_wrong_walk_is_seen(wrong: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way by twins: a number two steps off, a scale or the logits by a thousandth."""
    silu, logits = forms.silu_mul_int8, Operations.logits

    def inner(*args: Any, **options: Any) -> Int8Rows:
        rows = silu(*args, **options)
        values, scales = rows.values.clone(), rows.scales
        values[-1, 3] += torch.where(values[-1, 3] > 0, -2, 2) if wrong == "numbers" else 0
        return Int8Rows(values, scales * 1.001 if wrong == "scales" else scales)

    def ended(self: Operations, *args: Any) -> torch.Tensor:
        return logits(self, *args) * (1.001 if wrong == "logits" and self.step.fused else 1)

    monkeypatch.setattr(forms, "silu_mul_int8", inner)
    monkeypatch.setattr(Operations, "logits", ended)
    llm = models(CASES["w8a8 int8 cache"], "fp32", sizes=False, device="cpu")

    def judge() -> None:
        with by_every_way(llm, 1, lead=True) as steps:
            llm.generate(BRIEF, SHORT)
        expect_near(steps)

    if not wrong:
        judge()
        return
    with pytest.raises(AssertionError):
        judge()


@pytest.mark.stays("rptq-w8a8 32")
@interpreter
@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("name", ["w8a8 biases", "rptq-w8a8 32"])
def test_interpreted_kernels_of_many_decodes(name: str, models: Models) -> None:
    """One step of more rows than small products take, whose output and down products are split."""
    llm = models(CASES[name], "fp16", sizes=False, device="cpu")
    with Witness(torch.float16, *WATCHED) as witness, interpreted(lambda: not witness.by_reference):
        llm.generate([[index] for index in range(MANY)], SamplingParams(max_new_tokens=1, ignore_eos=True))
    assert witness.faults() == []
    assert witness.calls["int8_linear_parts"] == 2 * witness.calls["paged_attention"] > 0
    assert {"small_int8_qkv", "small_linear"}.isdisjoint(witness.calls)


@interpreter
@pytest.mark.parametrize(
    ("module", "reference"),
    [
        (rms_norm, "rms_norm_reference"),
        (int8_linear, "int8_linear_reference"),
        (rope_kv_write, "rope_kv_write_reference"),
    ],
)
def test_a_wrong_result_is_seen(
    module: ModuleType, reference: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The witness itself: one call of many gives, or writes, something else."""
    original, calls = getattr(module, reference), []

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append(result)
        if len(calls) == 5:  # calls of the op and of its twin take turns
            keys = args[1].cache.keys if module is rope_kv_write else None
            changed = result[0].values if module is rms_norm else result if keys is None else keys
            changed[0] += 3
        return result

    monkeypatch.setattr(module, reference, wrong)
    llm = models(CASES["w8a8 head norms"], "fp16", sizes=False, device="cpu")
    with Witness(torch.float16, *WATCHED) as witness:
        llm.generate(BRIEF, SHORT)
    assert len(calls) >= 6
    assert witness.faults()
    assert all(fault.startswith(reference.removesuffix("_reference")) for fault in witness.faults())


@interpreter
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("wrong", ["a value", "all values", "a number"])
def test_a_wrong_attention_is_seen(
    wrong: str, dtype: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output by a few last places, all by one, or a number that is its neighbour."""
    round_ = prefill_reference.put_heads
    last_place = 2.0**-7 if dtype == "bf16" else 2.0**-10

    def rounded(attended: torch.Tensor, out: torch.Tensor, scales: Any) -> None:
        attended = attended.clone()
        if wrong == "a value":
            attended[-1, :, 3] *= 1 + 4 * last_place
        elif wrong == "all values":
            attended *= 1 + last_place
        round_(attended, out, scales)
        if wrong == "a number":
            out[-1, 0, 2] += 1

    monkeypatch.setattr(prefill_reference, "put_heads", rounded)
    llm = models(CASES["w8a8 biases"], dtype, sizes=False, device="cpu")
    with Witness(DTYPES[dtype], *WATCHED) as witness:
        llm.generate(BRIEF, SHORT)
    assert witness.faults()
    assert all("_attention: " in fault for fault in witness.faults())
