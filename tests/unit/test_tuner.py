"""The tuner takes the fastest right candidate, and the default when nothing is clearly faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ingot.config.build import BuildConfig
from ingot.config.model import DecoderConfig, RopeConfig
from ingot.config.plan import KernelPlan, Machine
from ingot.config.quant import QuantConfig
from ingot.engine.assemble import empty_model
from ingot.engine.tuner import tune_model
from ingot.engine.tuner.cases import Case, Tiles, Written
from ingot.engine.tuner.inputs import Inputs
from ingot.engine.tuner.search import Choice, Outcome, Search, agrees, decide, relative, timed
from ingot.engine.tuner.steps import Steps, refine
from ingot.engine.tuner.timing import Measure
from ingot.engine.tuner.workload import Task, workload
from ingot.errors import ConfigError, DeviceError
from ingot.kernels.activation import gated_mlp
from ingot.kernels.attention import paged_attention, prefill_attention
from ingot.kernels.cache import rope_kv_write
from ingot.kernels.norm import layer_norm, rms_norm
from ingot.kernels.product import small_gate_up, small_linear, small_qkv
from ingot.kernels.weight.stored_weight import StoredWeight
from ingot.layers import products
from ingot.layers.decoder import Decoder
from ingot.models.registry import architecture_named

CPU = torch.device("cpu")
TASK = Task("silu_mul", (("i", 64),), (8,))
LLAMA = DecoderConfig("llama", 97, 32, 48, 2, 4, 2, 8, 128, rope=RopeConfig(8))
GPT2 = DecoderConfig("gpt2", 97, 32, 48, 2, 4, 4, 8, 128, norm="layer_norm", mlp="gelu_tanh", qkv_bias=True)
QWEN3 = DecoderConfig("qwen3", 97, 32, 48, 2, 4, 2, 8, 128, rope=RopeConfig(8), qk_norm=True)


class FakeOp:
    """An op of one tile, ``BLOCK_I``: right, except for the sizes that are wrong or that raise."""

    def __init__(self, *sizes: int, wrong: tuple[int, ...] = (), raising: dict[int, Exception] | None = None):
        self.candidates: list[Tiles] = [{"BLOCK_I": size} for size in sizes]
        self.wrong, self.raising = wrong, raising or {}
        self.last = 0
        self.cache = torch.zeros(4)

    def launch(self, copy: int, tiles: Tiles) -> Written:
        self.last = tiles["BLOCK_I"]
        if self.last in self.raising:
            raise self.raising[self.last]
        result = torch.arange(1.0, 9.0)
        if self.last in self.wrong:
            result[3] += 0.01
        self.cache[: 2 if self.last == 99 else 3] = 1.0  # 99 forgets one of the three that it must write
        return result, self.cache

    def case(self, task: Task, rows: int) -> Case:
        return Case(self.candidates, 3, self.launch, (self.cache,))


class FakeTimer:
    """Times calls by looking at which tiles they use."""

    def __init__(self, op: FakeOp, us: Callable[[int], float]) -> None:
        self.op, self.us = op, us
        self.calls: list[int] = []

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Measure:
        for call in calls:
            call()
        size = self.op.last

        def measure() -> float:
            self.calls.append(size)
            return self.us(size)

        return measure


def search(op: FakeOp, times: dict[int, float]) -> Outcome:
    return Search(FakeTimer(op, times.__getitem__), CPU).run([TASK], op.case)


def empty(config: DecoderConfig, build: BuildConfig) -> Decoder:
    return empty_model(architecture_named(config.architecture), config, build, QuantConfig(), KernelPlan())


@pytest.mark.parametrize(
    ("times", "tiles"),
    [
        ({1: 10.0, 2: 9.0, 4: 8.0}, {"BLOCK_I": 4}),
        ({1: 10.0, 2: 9.9, 4: 11.0}, None),  # 1 %: noise
        ({1: 10.0, 2: 10.0, 4: 9.84}, {"BLOCK_I": 4}),
        ({1: 10.0, 2: 20.0, 4: 30.0}, None),
    ],
)
def test_the_fastest_wins_if_it_is_clearly_faster(times: dict[int, float], tiles: Tiles | None) -> None:
    (choice,) = search(FakeOp(1, 2, 4, 2), times).choices
    assert (choice.tiles, choice.default_us) == (tiles, 10.0)
    assert choice.best_us == (10.0 if tiles is None else times[tiles["BLOCK_I"]])


def test_wrong_and_failing_candidates_never_win() -> None:
    op = FakeOp(1, 2, 4, 8, 99, wrong=(2,), raising={4: RuntimeError("out of\nregisters"), 8: ValueError()})
    outcome = search(op, {1: 10.0, 2: 1.0, 4: 1.0, 8: 1.0, 99: 1.0})
    assert outcome.choices[0].tiles is None
    reasons = {d.tiles["BLOCK_I"]: d.reason for d in outcome.dropped}
    assert reasons[2] == reasons[99] == "its result differs from the default's"
    assert (reasons[4], reasons[8]) == ("RuntimeError: out of", "ValueError: ")


def test_a_default_must_run() -> None:
    with pytest.raises(DeviceError, match=r"default tiles do not run on this GPU.*silu_mul m8_i64"):
        search(FakeOp(1, 2, raising={1: RuntimeError("no")}), {})


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyError])
def test_other_errors_are_not_swallowed(error: type[Exception]) -> None:
    with pytest.raises(error):
        search(FakeOp(1, 2, raising={2: error("x")}), {})


def test_candidates_take_turns() -> None:
    op = FakeOp(1, 2)
    timer = FakeTimer(op, lambda size: 1.0)
    Search(timer, CPU).run([TASK], op.case)
    assert timer.calls[:6] == [1, 2, 1, 2, 1, 2]


def test_times_are_medians_and_a_choice_for_many_rows_weighs_them_alike() -> None:
    drawn = iter([5.0, 1.0, 2.0])
    assert timed([[lambda: next(drawn)]], 3) == [[2.0]]
    assert relative([50.0, 2.0], [100.0, 1.0]) == pytest.approx(1.0)
    assert [decide([1.0, 0.99], 0.015), decide([1.0, 0.98, 0.97], 0.015)] == [0, 2]


class FakeSteps:
    """Steps whose time is a sum over their ops."""

    def __init__(self, us: Callable[[Choice], float]) -> None:
        self.config, self.head, self.us = LLAMA, LLAMA.vocab_size, us

    def clock(self, choices: Sequence[Choice], rows: int) -> Measure:
        total = 100.0 + sum(self.us(choice) for choice in choices)
        return lambda: total


def finalist(op: str, rows: tuple[int, ...], *sizes: int, **dims: int) -> Choice:
    """A choice for which the first of ``sizes`` won alone."""
    others = tuple(({"BLOCK_N": size}, 1.0) for size in sizes)
    return Choice(Task(op, tuple(dims.items()), rows), others[0][0], 2.0, 1.0, others)


def test_in_a_step_another_candidate_may_win() -> None:
    alone = finalist("silu_mul", (64,), 2, i=48)
    head = finalist("small_linear", (1,), 2, n=97, k=32)
    product = finalist("small_linear", (8,), 2, 4, n=32, k=48)
    attention = finalist("paged_attention", (1, 8), 2, 4, q=4, kv=2, d=8)
    cost = {None: 10.0, 2: 11.0, 4: 9.0}  # of the ops alone and head too: they are not decided here

    def us(choice: Choice) -> float:
        return cost[choice.tiles and choice.tiles["BLOCK_N"]]

    steps: Any = FakeSteps(us)
    found, times = refine([alone, head, product, attention], steps, [1, 8])
    assert [c.tiles and c.tiles["BLOCK_N"] for c in found] == [2, 2, 4, 4]
    assert found[2].best_us == 1.0
    assert [(t.rows, t.layers) for t in times] == [(1, 2), (8, 2)]
    slower: Any = FakeSteps(lambda choice: 0.0 if choice.tiles is None else 0.1)
    found, times = refine([product, attention], slower, [1, 8])
    assert [(c.tiles, c.best_us) for c in found] == [(None, 2.0), (None, 2.0)]
    assert times == []


def test_a_step_runs_the_models_layers_with_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any]] = []
    original = products.small_linear

    def noted(x: torch.Tensor, weight: StoredWeight, *rest: Any) -> torch.Tensor:
        seen.append((f"{x.shape[0]} {tuple(weight.values.shape)}", rest[-1]))
        return original(x, weight, *rest)

    monkeypatch.setattr(products, "small_linear", noted)
    build = BuildConfig("fp16", max_batch_size=8, max_seq_len=64)
    inputs = Inputs(CPU, torch.float16, footprint=1 << 12)
    machine = Machine("GPU", "9.0", 2, "2", "3")
    steps = Steps(LLAMA, build, machine, inputs, NoTimer())
    with torch.inference_mode():
        steps.clock([finalist("small_linear", (1,), 4, n=32, k=48)], 1)
        steps.clock([], 3)
    assert seen[:2] == [("1 (32, 32)", None), ("1 (32, 48)", {"BLOCK_N": 4})]
    assert seen[-1] == ("3 (97, 32)", None)  # of several rows only the head: sum_norm ends the others


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_agree_within_the_dtypes_rounding(dtype: torch.dtype) -> None:
    wanted = torch.randn(256, generator=torch.Generator().manual_seed(0)).to(dtype)
    step = torch.finfo(dtype).eps
    assert agrees([wanted * (1 + step)], [wanted])
    for odd in (4000 * step, float("nan"), float("inf")):
        other = wanted.clone()
        other[7] += odd
        assert not agrees([other], [wanted])
    assert agrees([torch.tensor([float("nan")])], [torch.tensor([float("nan")])])


def test_inputs_fill_the_footprint() -> None:
    inputs = Inputs(CPU, torch.float16, footprint=1 << 16)
    weights = inputs.rotating(3, 1000)
    assert len(weights) == -(-(1 << 16) // (3072 * 2))
    assert all(w.shape == (3, 1000) and w.data_ptr() % 16 == 0 for w in weights)
    assert not torch.equal(weights[0], weights[1])
    assert len(inputs.rotating(1 << 16)) == 1
    assert len(inputs.rotating(1)) == 64


def test_the_workload_of_a_7b() -> None:
    config = DecoderConfig("llama", 151936, 4096, 11008, 32, 32, 32, 128, 8192, rope=RopeConfig(128))
    build = BuildConfig("fp16", max_batch_size=64)
    found = {(t.op, t.key) for t in workload(empty(config, build), torch.float16, build)}
    products = {key.partition("_")[2] for op, key in found if op.startswith("small")}
    assert products == {"n12288_k4096", "n4096_k4096", "n22016_k4096", "n4096_k11008", "n151936_k4096"}
    assert {("small_linear", "m1_n4096_k11008"), ("small_linear", "m8_n151936_k4096")} <= found
    assert ("small_linear", "m8_n4096_k11008") not in found, "sum_norm ends it"
    assert {key.partition("_")[0] for op, key in found if op == "paged_attention"} == {
        *("m1", "m8", "m16", "m32", "m64")
    }
    assert {key for op, key in found if op == "prefill_attention"} == {
        "m512_q32_kv32_d128",
        "m2048_q32_kv32_d128",
    }
    assert {key for op, key in found if op == "rms_norm"} == {"m512_h4096", "m2048_h4096"}, "else in sums"
    placed = {key.partition("_")[0] for op, key in found if op == "rope_kv_write"}
    assert placed == {"m64", "m512", "m2048"}, "beside the matrix library's product"
    assert not any(op == "small_qkv" and key.startswith("m64") for op, key in found)
    wide = {t.op for t in workload(empty(config, build), torch.float32, build)}
    assert not any(op.startswith("small") for op in wide)


@pytest.mark.parametrize("config", [LLAMA, GPT2, QWEN3], ids=lambda c: c.architecture)
def test_every_op_of_a_model_is_called(config: DecoderConfig) -> None:
    build = BuildConfig("fp16", max_batch_size=9, max_seq_len=64)
    model, op = empty(config, build), FakeOp(1)
    inputs = Inputs(CPU, torch.float16, footprint=1 << 12)
    seen: list[tuple[str, int, int]] = []
    tuning = tune_model(
        model,
        build,
        CPU,
        timer=FakeTimer(op, lambda size: 2.0),
        inputs=inputs,
        progress=lambda *step: seen.append(step),
    )
    assert (tuning.plan.tiles, tuning.dropped) == ({}, ())
    assert {op: set(keys) for op, keys in tuning.plan.measured.items()} == {
        op: {t.key for t in workload(model, torch.float16, build) if t.op == op}
        for op in tuning.plan.measured
    }
    assert any("compiling" in what for what, _, _ in seen)
    assert all(0 <= done < total for _, done, total in seen)
    assert KernelPlan.from_json(tuning.plan.to_json()) == tuning.plan


def test_only_some_ops() -> None:
    build = BuildConfig("fp16", max_batch_size=1, max_seq_len=64)
    model = empty(LLAMA, build)
    inputs = Inputs(CPU, torch.float16, footprint=1 << 12)
    some = tune_model(
        model, build, CPU, ops=["rms_norm"], timer=FakeTimer(FakeOp(1), lambda s: 1.0), inputs=inputs
    )
    assert list(some.plan.measured) == ["rms_norm"]
    with pytest.raises(ConfigError, match=r"no such ops.*rms"):
        tune_model(model, build, CPU, ops=["rms"], inputs=inputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_the_kernels_themselves_agree_with_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[Any] = [gated_mlp, layer_norm, paged_attention, prefill_attention, rms_norm]
    for module in (*modules, rope_kv_write, small_gate_up, small_linear, small_qkv):
        monkeypatch.setattr(module, "runs_on_gpu", lambda x: True)
    build = BuildConfig("fp16", max_batch_size=1, max_seq_len=16)
    inputs = Inputs(CPU, torch.float16, footprint=1)
    tuning = tune_model(empty(LLAMA, build), build, CPU, timer=NoTimer(), inputs=inputs)
    assert tuning.dropped == ()
    assert len(tuning.choices) == len(workload(empty(LLAMA, build), torch.float16, build))


class NoTimer:
    """Runs nothing and takes no time."""

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Measure:
        return lambda: 1.0
