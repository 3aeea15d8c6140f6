"""The tuner takes the tiles of the fastest right step, and the default when nothing is clearly faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ingot.building.tuner import tile_search as search
from ingot.building.tuner import tune_model
from ingot.building.tuner.tile_search import Search, Tiles, agrees, measured_steps
from ingot.building.tuner.trial_plan import _IN_USE, PlanPlace, TrialPlan, using
from ingot.building.tuner.tuned_steps import StepKind, Steps
from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig, RopeConfig
from ingot.config.kernel_plan import OPS, KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.errors import ConfigError, DeviceError
from ingot.kernels.activation import gated_mlp
from ingot.kernels.attention import paged_attention, prefill_attention
from ingot.kernels.cache import rope_kv_write
from ingot.kernels.norm import layer_norm, rms_norm
from ingot.kernels.product.few_rows import small_gate_up, small_linear, small_qkv
from ingot.kernels.weight.stored_weight import StoredWeight
from ingot.layers.decoder import Decoder
from ingot.layers.products import layer_products as products
from ingot.models.model_registry import architecture_named

CPU = torch.device("cpu")
ONE = StepKind(decodes=True, rows=1)
LLAMA = DecoderConfig("llama", 97, 32, 48, 2, 4, 2, 8, 128, rope=RopeConfig(8))
GPT2 = DecoderConfig("gpt2", 97, 32, 48, 2, 4, 4, 8, 128, norm="layer_norm", mlp="gelu_tanh", qkv_bias=True)
QWEN3 = DecoderConfig("qwen3", 97, 32, 48, 2, 4, 2, 8, 128, rope=RopeConfig(8), qk_norm=True)
SMALL = BuildConfig("fp16", max_batch_size=9, max_seq_len=64)


class FakeSteps:
    """A step that asks for ops ``silu_mul`` and ``rms_norm``, and whose tile ``num_warps`` may be wrong."""

    def __init__(self, *, wrong: Sequence[int] = (), raising: dict[int, Exception] | None = None) -> None:
        self.plan, self.dtype = TrialPlan(), torch.float32
        self.tables = [self.plan.table("silu_mul", i=64), self.plan.table("rms_norm", h=32)]
        self.wrong, self.raising = wrong, raising or {}

    def warps(self) -> list[int]:
        found = [table.at(1) for table in self.tables]
        return [0 if tiles is None else tiles["num_warps"] for tiles in found]

    def step(self, kind: StepKind) -> Callable[[], object]:
        def run() -> None:
            for warps in self.warps():
                if warps in self.raising:
                    raise self.raising[warps]

        return run

    def computed(self, kind: StepKind) -> list[torch.Tensor]:
        result = torch.arange(1.0, 9.0)
        result[3] += 0.01 * any(warps in self.wrong for warps in self.warps())
        return [result]


class FakeTimer:
    """Times a step of ``FakeSteps`` by the tiles that it would take."""

    def __init__(self, steps: FakeSteps, us: Callable[[list[int]], float]) -> None:
        self.steps, self.us = steps, us
        self.calls: list[list[int]] = []

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        warps = self.steps.warps()

        def measure() -> float:
            self.calls.append(warps)
            return self.us(warps)

        return measure


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op has three candidates, the default with one warp."""
    tiles: list[Tiles] = [{"num_warps": warps} for warps in (1, 2, 4)]
    monkeypatch.setattr(search, "candidates", lambda *rest: list(tiles))


def searched(
    us: Callable[[list[int]], float], ops: Sequence[str] = ("silu_mul",), **faults: Any
) -> tuple[list[Tiles | None], Search]:
    steps: Any = FakeSteps(**faults)
    timer: Any = FakeTimer(steps, us)
    found = Search(steps, CPU, timer)
    found.prepare([ONE], ops)
    return [choice.tiles for choice in found.choices()], found


def empty(config: DecoderConfig, build: BuildConfig, quant: QuantConfig | None = None) -> Decoder:
    architecture = architecture_named(config.architecture)
    return architecture.empty_model(config, build, quant or QuantConfig())


@pytest.mark.usefixtures("three")
class TestSearch:
    @pytest.mark.parametrize(
        ("times", "tiles"),
        [
            ({1: 100.0, 2: 99.0, 4: 98.0}, {"num_warps": 4}),
            ({1: 100.0, 2: 98.0, 4: 99.0}, {"num_warps": 2}),
            ({1: 100.0, 2: 99.8, 4: 101.0}, None),  # 0.2 %: noise
            ({1: 100.0, 2: 200.0, 4: 300.0}, None),
        ],
    )
    def test_the_fastest_step_wins_if_it_is_clearly_faster(
        self, times: dict[int, float], tiles: Tiles | None
    ) -> None:
        steps: Any = FakeSteps()
        timer: Any = FakeTimer(steps, lambda warps: times[warps[0]])
        found = Search(steps, CPU, timer)
        found.prepare([ONE], OPS.keys() - {"rms_norm"})
        (choice,) = found.choices()
        assert (choice.place, choice.tiles) == (PlanPlace("silu_mul", "m1_i64"), tiles)
        best = 100.0 if tiles is None else times[tiles["num_warps"]]
        assert (choice.default_us, choice.best_us) == (100.0, best)

    def test_a_place_is_decided_with_what_was_found_before(self) -> None:
        """Alone 4 warps would be the norm's best; beside 2 warps of the activation they are not."""
        cost = {(0, 1): 100, (0, 2): 99, (0, 4): 98, (1, 0): 100, (2, 0): 90, (4, 0): 95}
        both = {(2, 1): 90, (2, 2): 89, (2, 4): 91}
        tiles, _ = searched(lambda warps: (cost | both)[tuple(warps)], ("silu_mul", "rms_norm"))  # type: ignore[index]
        assert tiles == [{"num_warps": 2}, {"num_warps": 2}]

    def test_wrong_and_failing_candidates_never_win(self) -> None:
        tiles, found = searched(
            lambda warps: 1.0 if warps[0] > 1 else 10.0,
            wrong=[2],
            raising={4: RuntimeError("out of\nregisters")},
        )
        assert tiles == [None]
        reasons = {d.tiles["num_warps"]: d.reason for d in found.dropped}
        assert reasons == {2: "its result differs from the default's", 4: "RuntimeError: out of"}

    def test_an_error_without_words_is_named(self) -> None:
        _, found = searched(lambda warps: 1.0, raising={4: ValueError()})
        assert [d.reason for d in found.dropped] == ["ValueError: "]

    def test_a_default_must_run(self) -> None:
        with pytest.raises(DeviceError, match=r"default tiles do not run on this GPU.*1 decode tokens.*: no"):
            searched(lambda warps: 1.0, raising={0: RuntimeError("no")})

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyError])
    def test_other_errors_are_not_swallowed(self, error: type[Exception]) -> None:
        with pytest.raises(error):
            searched(lambda warps: 1.0, raising={2: error("x")})

    def test_default_and_candidate_take_turns_and_medians_count(self) -> None:
        steps: Any = FakeSteps()
        drawn = iter([1000.0, 1000.0, *[100.0] * 10_000])  # the first two replays are odd
        timer: Any = FakeTimer(steps, lambda warps: next(drawn) * (0.9 if warps[0] == 4 else 1.0))
        found = Search(steps, CPU, timer)
        found.prepare([ONE], ("silu_mul",))
        (choice,) = found.choices()
        assert (choice.tiles, choice.default_us, choice.best_us) == ({"num_warps": 4}, 100.0, 90.0)
        turns = [warps[0] for warps in timer.calls if warps[0] in (1, 4)][-12:]
        assert turns == [1, 1, 1, 4, 4, 4] * 2


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


def test_tiles_in_use_reach_the_layers_and_lookups_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any]] = []
    original = products.small_linear

    def noted(x: torch.Tensor, weight: StoredWeight, *rest: Any) -> torch.Tensor:
        tiles = rest[4]
        seen.append((f"{x.shape[0]} {tuple(weight.values.shape)}", tiles))
        return original(x, weight, *rest)

    monkeypatch.setattr(products, "small_linear", noted)
    steps = Steps(empty(LLAMA, SMALL), SMALL, CPU)
    with torch.inference_mode(), using({PlanPlace("small_linear", "m1_n32_k48"): {"BLOCK_N": 4}}):
        steps.step(ONE)()
        steps.step(StepKind(decodes=True, rows=3))()
    assert seen[:2] == [("1 (32, 32)", None), ("1 (32, 48)", {"BLOCK_N": 4})]
    assert seen[-1] == ("3 (97, 32)", None)  # of several rows only the head: sum_norm ends the others
    assert steps.plan.asked[PlanPlace("small_linear", "m1_n32_k48")] == ({"n": 32, "k": 48}, 1)
    assert not _IN_USE.get()


@pytest.mark.parametrize("kind", [ONE, StepKind(True, 8), StepKind(False, 40)], ids=str)
@pytest.mark.parametrize("name", ["paged_attention", "prefill_attention", "silu_mul", "rms_norm"])
def test_a_wrong_op_shows_in_what_a_step_computes(
    monkeypatch: pytest.MonkeyPatch, kind: StepKind, name: str
) -> None:
    """One channel of one op's result is wrong, or not written at all."""
    from ingot.layers import attention, mlp, norm
    from ingot.layers.products import row_forms as forms

    home = next(module for module in (attention, mlp, norm, forms) if hasattr(module, name))
    steps = Steps(empty(LLAMA, SMALL), SMALL, CPU)
    with torch.inference_mode():
        expected = steps.computed(kind)
        assert agrees(steps.computed(kind), expected)
        original, called = getattr(home, name), []

        def broken(*rest: Any, **named: Any) -> Any:
            result = original(*rest, **named)
            rows = result[0] if isinstance(result, tuple) else result
            rows[-1].view(-1)[3] += 0.5
            called.append(name)
            return result

        monkeypatch.setattr(home, name, broken)
        assert agrees(steps.computed(kind), expected) == (not called)


def test_a_step_that_writes_no_keys_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.layers import attention

    kind = StepKind(False, 40)
    steps = Steps(empty(QWEN3, SMALL), SMALL, CPU)
    with torch.inference_mode():
        expected = steps.computed(kind)
        assert not any(bool(value.isnan().any()) for value in expected)
        monkeypatch.setattr(
            attention, "rope_kv_write", lambda qkv, *rest, **named: qkv[:, :32].view(-1, 4, 8)
        )
        assert any(bool(value.isnan().any()) for value in steps.computed(kind))


def test_the_steps_of_a_7b() -> None:
    build = BuildConfig("fp16", max_batch_size=256, max_seq_len=8192)
    assert [kind.rows for kind in measured_steps(build) if kind.decodes] == [1, 8, 16, 32, 64]
    assert [kind.rows for kind in measured_steps(build) if not kind.decodes] == [512, 2048]
    assert [kind.rows for kind in measured_steps(SMALL)] == [1, 8, 9, 64]


class NoTimer:
    """Runs nothing and takes no time."""

    def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        return lambda: 2.0


def tuned(config: DecoderConfig, build: BuildConfig = SMALL, **rest: Any) -> Any:
    quant = rest.pop("quant", None)
    return tune_model(empty(config, build, quant), build, CPU, timer=NoTimer(), **rest)  # type: ignore[arg-type]


EVERY = {"rope_kv_write", "paged_attention", "prefill_attention"}
OPS_OF = {
    "llama": EVERY | {"rms_norm", "silu_mul", "small_qkv", "small_linear", "small_gate_up"},
    "qwen3": EVERY | {"rms_norm", "silu_mul", "small_linear", "small_gate_up"},
    "gpt2": EVERY | {"layer_norm", "small_qkv", "small_linear"},
}


@pytest.mark.stays("gpt2")
@pytest.mark.parametrize("config", [LLAMA, GPT2, QWEN3], ids=lambda c: c.architecture)
def test_every_op_of_a_model_is_measured(config: DecoderConfig) -> None:
    seen: list[tuple[str, int, int]] = []
    tuning = tuned(config, progress=lambda *step: seen.append(step))
    assert (tuning.plan.tiles, tuning.dropped) == ({}, ())
    assert set(tuning.plan.measured) == OPS_OF[config.architecture]
    heads = f"q4_kv{config.num_kv_heads}_d8"
    assert set(tuning.plan.measured["paged_attention"]) == {f"m{rows}_{heads}" for rows in (1, 8, 16)}
    assert set(tuning.plan.measured["prefill_attention"]) == {f"m64_{heads}"}
    assert {what.split()[0] for what, _, _ in seen} == {"compiling", "timing"}
    assert all(0 <= done < total for _, done, total in seen)
    assert KernelPlan.from_json(tuning.plan.to_json()) == tuning.plan


@pytest.mark.stays("w4a8", "rptq-w8a8")
@pytest.mark.parametrize("scheme", ["w8a16", "w8a8", "w4a8", "rptq-w8a8"])
def test_quantized_products_keep_their_defaults(scheme: str) -> None:
    config = LLAMA.replace(hidden_size=128, intermediate_size=256, head_dim=32)
    found = set(tuned(config, quant=QuantConfig(scheme)).plan.measured)
    assert {"paged_attention", "prefill_attention"} <= found
    assert not {op for op in found if op in ("small_qkv", "small_gate_up")}


def test_a_model_is_tuned_that_a_rotation_would_change() -> None:
    config = GPT2.replace(hidden_size=128, intermediate_size=256, head_dim=32)
    assert tuned(config, quant=QuantConfig("w4a8", rotation=False), ops=["layer_norm"]).plan.measured


def test_only_some_ops() -> None:
    assert list(tuned(LLAMA, ops=["rms_norm"]).plan.measured) == ["rms_norm"]
    with pytest.raises(ConfigError, match=r"no such ops.*rms"):
        tuned(LLAMA, ops=["rms"])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize(
    ("step", "ops"),
    [
        (16, ["paged_attention", "rms_norm", "small_qkv"]),
        *(pytest.param(n, None, marks=pytest.mark.slow) for n in (4, 1)),
    ],
)
def test_steps_of_the_kernels_themselves_agree_with_their_defaults(
    step: int, ops: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some candidates of each op, or all of them."""
    every = search.candidates
    monkeypatch.setattr(search, "candidates", lambda *given: [every(*given)[0], *every(*given)[1::step]])
    modules: list[Any] = [gated_mlp, layer_norm, paged_attention, prefill_attention, rms_norm]
    for module in (*modules, rope_kv_write, small_gate_up, small_linear, small_qkv):
        monkeypatch.setattr(module, "runs_on_gpu", lambda x: True)
    tuning = tuned(
        replace(LLAMA, num_layers=1), BuildConfig("fp16", max_batch_size=1, max_seq_len=16), ops=ops
    )
    assert tuning.dropped == ()
    assert set(tuning.plan.measured) >= set(ops or ["paged_attention", "prefill_attention", "small_qkv"])
