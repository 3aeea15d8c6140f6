"""Models over an 8-bit KV cache: close to 16 bits, independent of batching, counted, proven."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.building.ledger_source import read_setting
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_loader import setting_of
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError
from ingot.kernels.cache import cache_scales
from ingot.kernels.cache.cache_scales import NARROW_CACHES, CacheScales
from ingot.layers.forward_batch import LayerCache
from ingot.measure.side.open_side import open_side
from ingot.measure.side.side_spec import SideSpec
from ingot.measure.side.token_load import Ask
from ingot.memory.ledger import ledger
from ingot.proof.golden_replay import FACTOR
from ingot.proof.repro_run import capture_layer, replay
from ingot.proof.step_check import check_steps
from ingot.proof.verify_engine import verify
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.tiny_models import random_ids, save_model, tiny_config

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 11},
    "qwen2": {},
    "qwen3": {},
    "gpt2": {},
}
MOST_KL = {"int8": 1e-3, "fp8": 1e-2}
SEEN = {"int8": 0.02, "fp8": 0.08}  # an error of scales that a proof must see
GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True)
PROMPTS = [random_ids(n, seed=n) for n in (3, 40, 17, 1)]
QUANTIZE = cache_scales.quantize_heads


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for kind, changes in KINDS.items():
        save_model(tiny_config(kind, **changes), root / kind, seed=3)
    write_tiny(root / "qwen")
    return {kind: root / kind for kind in (*KINDS, "qwen")}


@pytest.fixture(scope="module", params=NARROW_CACHES)
def cache(request: pytest.FixtureRequest) -> str:
    """A cache in 8 bits."""
    return str(request.param)


@pytest.fixture(scope="module")
def engine(cache: str, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built for a cache in 8 bits."""
    target = tmp_path_factory.mktemp("engines") / "llama"
    return build(checkpoints["llama"], target, dtype="fp16", kv_dtype=cache, device="cpu")


@pytest.fixture(scope="module")
def wide_heads(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proven engine with heads of 64 channels, in which a closest call that goes the other way does not
    hide a fault.
    """
    folder = tmp_path_factory.mktemp("wide")
    config = tiny_config("llama", hidden_size=256, intermediate_size=300, head_dim=64)
    save_model(config, folder / "checkpoint", seed=3)
    engine = build(folder / "checkpoint", folder / "engine", kv_dtype=cache, device="cpu")
    assert verify(engine, "cpu", note=False).verdict == "proven"
    return engine


def narrow(path: Path, cache: str, **runtime: Any) -> LLM:
    return LLM(path, "cpu", runtime=RuntimeConfig(kv_dtype=cache, **runtime))  # type: ignore[arg-type]


Quantize = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]


def off_by(share: float) -> Quantize:
    """The cache's rounding with scales that are off."""
    right = cache_scales.quantize_heads

    def wrong(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = right(x, dtype)
        return numbers, scales * (1 + share)

    return wrong


def cut_short(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that are cut instead of rounded."""
    scales = QUANTIZE(x, dtype)[1]
    exact = x.float() / scales[..., None]
    if dtype == torch.int8:
        return exact.trunc().to(dtype), scales
    bits = exact.contiguous().view(torch.int32) >> 20 << 20  # three bits of a fraction are left
    return bits.view(torch.float32).to(dtype), scales


def caches(llm: LLM) -> list[LayerCache]:
    return llm.executor.runner.caches


@pytest.mark.parametrize("kind", [*KINDS, "qwen"])
def test_near_to_a_cache_of_16_bits(checkpoints: dict[str, Path], kind: str, cache: str) -> None:
    llm, wide = narrow(checkpoints[kind], cache), LLM(checkpoints[kind], "cpu")
    assert {own.keys.dtype for own in caches(llm)} == {NARROW_CACHES[cache]}
    prompt = random_ids(60, seed=5)
    found, exact = llm.logits(prompt).log_softmax(-1), wide.logits(prompt).log_softmax(-1)
    kl = (exact.exp() * (exact - found)).sum(-1)
    assert 1e-8 < float(kl.mean()) < MOST_KL[cache]


@pytest.mark.stays("int8-llama-False", "fp8-mistral-True")
@pytest.mark.grid(1)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_however_it_is_run(checkpoints: dict[str, Path], kind: str, invariant: bool, cache: str) -> None:
    """Decoded over the cache, in company, in chunks and preempted, as computed from nothing."""
    mode = {"batch_invariant": invariant}
    llm = narrow(checkpoints[kind], cache, **mode)
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(GREEDY.max_new_tokens):
            ids.append(int(llm.logits(ids)[-1].argmax()))
        expected.append(ids[len(prompt) :])
    assert [out.token_ids for out in llm.generate(PROMPTS, GREEDY)] == expected
    chunked = narrow(checkpoints[kind], cache, token_budget=7, block_size=4, **mode)
    assert [out.token_ids for out in chunked.generate(PROMPTS, GREEDY)] == expected
    small = LLM(
        checkpoints[kind],
        "cpu",
        max_seq_len=64,
        runtime=RuntimeConfig(kv_dtype=cache, cache_tokens=80, block_size=4, **mode),  # type: ignore[arg-type]
    )
    assert [out.token_ids for out in small.generate(PROMPTS, GREEDY)] == expected
    assert small.executor.num_preemptions > 0


def test_a_known_prefix_and_copied_blocks_are_read_with_their_scales(
    checkpoints: dict[str, Path], cache: str
) -> None:
    shared = random_ids(21, seed=8)
    beams = SamplingParams(max_new_tokens=9, num_beams=3, ignore_eos=True)
    llm = narrow(checkpoints["llama"], cache, block_size=4)
    again = [llm.generate(shared, beams)[0].token_ids for _ in range(2)]
    plain = narrow(checkpoints["llama"], cache, block_size=64, prefix_reuse=False)
    assert again == [plain.generate(shared, beams)[0].token_ids] * 2


def test_a_copy_without_its_scales_is_noticed(
    checkpoints: dict[str, Path], cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    shared = random_ids(21, seed=8)
    beams = SamplingParams(max_new_tokens=9, num_beams=3, ignore_eos=True)
    expected = narrow(checkpoints["llama"], cache, block_size=4).generate(shared, beams)[0]
    monkeypatch.setattr(LayerCache, "tensors", property(lambda self: (self.keys, self.values)))
    broken = narrow(checkpoints["llama"], cache, block_size=4).generate(shared, beams)[0]
    assert broken.answers[0].score != expected.answers[0].score


def test_an_engine_has_a_default_that_a_run_may_change(engine: Path, cache: str) -> None:
    assert Manifest.read(engine).build.kv_dtype == cache
    own, wide = LLM(engine, "cpu"), LLM(engine, "cpu", runtime=RuntimeConfig(kv_dtype="model"))
    assert (own.runtime.kv_dtype, wide.runtime.kv_dtype) == (cache, "model")
    assert isinstance(caches(own)[0].scales, CacheScales)
    assert caches(wide)[0].scales is None
    assert caches(wide)[0].keys.dtype == torch.float32
    assert not torch.equal(own.logits(PROMPTS[1]), wide.logits(PROMPTS[1]))


def test_unknown_kinds_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown kv_dtype"):
        RuntimeConfig(kv_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown kv_dtype"):
        build(checkpoints["llama"], tmp_path / "engine", kv_dtype="auto", device="cpu")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_byte_is_in_the_ledger(checkpoints: dict[str, Path], kind: str, cache: str) -> None:
    runtime = RuntimeConfig(cache_tokens=300, block_size=16, kv_dtype=cache)  # type: ignore[arg-type]
    llm = LLM(checkpoints[kind], "cpu", runtime=runtime)
    setting = setting_of(llm.engine.manifest, llm.engine.dtype, llm.engine.device, llm.runtime)
    assert ledger(setting).of("KV cache") == sum(own.nbytes for own in caches(llm))
    wide = setting.replace(runtime=runtime.replace(kv_dtype="model"))
    heads = {"llama": (2, 8), "gpt2": (4, 8)}[kind]  # key-value heads, channels
    layers, tokens = 2, 19 * 16
    assert ledger(setting).of("KV cache") == 2 * layers * tokens * heads[0] * (heads[1] + 4)
    assert ledger(wide).of("KV cache") == 2 * layers * tokens * heads[0] * heads[1] * 4


def test_a_plan_knows_an_engines_default(engine: Path, cache: str) -> None:
    assert read_setting(str(engine)).kv_dtype == NARROW_CACHES[cache]
    assert read_setting(str(engine), runtime=RuntimeConfig(kv_dtype="model")).kv_dtype == torch.float16


class TestProof:
    @pytest.mark.stays("int8-llama", "int8-gpt2", "fp8-qwen")
    @pytest.mark.parametrize("kind", [*KINDS, "qwen"])
    def test_an_engine_as_built(
        self, checkpoints: dict[str, Path], kind: str, cache: str, tmp_path: Path
    ) -> None:
        folder = build(checkpoints[kind], tmp_path / kind, dtype="bf16", kv_dtype=cache, device="cpu")
        found = verify(folder, "cpu", note=False)
        assert found.verdict == "proven", found.failures
        assert 0 < max(found.worst.values()) < FACTOR

    @pytest.mark.parametrize("dtype", ["fp16", "bf16"])
    def test_steps_in_16_bits(self, engine: Path, cache: str, dtype: str) -> None:
        """Keys and values that were read back in 16 bits are judged by the gaps of what was stored."""
        llm = LLM(engine, "cpu", compute_dtype=dtype)
        found = check_steps(llm, engine, [(prompt, None) for prompt in PROMPTS], 2)
        assert found.failures == []
        assert max(found.worst["keys"], found.worst["values"]) < 0.3

    @pytest.mark.stays("int8-scale", "fp8-rounding")
    @pytest.mark.parametrize("fault", ["scale", "rounding"])
    def test_a_wrong_cache_fails(
        self, wide_heads: Path, fault: str, cache: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Scales that are off; numbers that are cut instead of rounded."""
        wrong = off_by(SEEN[cache]) if fault == "scale" else cut_short
        monkeypatch.setattr(cache_scales, "quantize_heads", wrong)
        assert verify(wide_heads, "cpu", note=False).verdict == "failed"

    def test_another_cache_is_not_what_was_proven(self, engine: Path) -> None:
        with pytest.raises(ConfigError, match="another KV cache"):
            verify(engine, "cpu", runtime=RuntimeConfig(kv_dtype="model"))

    def test_a_layer_is_replayed_over_such_a_cache(
        self, engine: Path, cache: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bundle = capture_layer(LLM(engine, "cpu"), PROMPTS[1], layer=1, step=2)
        assert bundle.facts.kv_dtype == cache
        found = replay(bundle, torch.device("cpu"))
        assert (found.agrees, found.repeats, found.against_output) == (True, True, 0.0)
        monkeypatch.setattr(cache_scales, "quantize_heads", off_by(2.5 * SEEN[cache]))
        assert not replay(bundle, torch.device("cpu")).agrees


class TestTerminal:
    @pytest.mark.stays("int8")
    def test_plan(self, checkpoints: dict[str, Path], cache: str) -> None:
        asked = ("plan", str(checkpoints["llama"]), "--gpu", "24GiB", "--json", "--dtype", "fp16")
        wide, found = (
            json.loads(ingot(*asked, *more).stdout)["kv_bytes_per_token"]
            for more in ((), ("--kv-dtype", cache))
        )
        assert (wide, found) == (2 * 2 * 2 * 8 * 2, 2 * 2 * 2 * (8 + 4))

    @pytest.mark.stays("fp8")
    def test_build_run_and_inspect(self, checkpoints: dict[str, Path], cache: str, tmp_path: Path) -> None:
        target = str(tmp_path / "engine")
        done = ingot("build", str(checkpoints["qwen"]), "-o", target, "--kv-dtype", cache, "--device", "cpu")
        assert done.exit_code == 0, done.output
        assert cache in next(
            line for line in ingot("inspect", target).stdout.splitlines() if "KV cache" in line
        )
        asked = ("run", target, "one two", "--max-new-tokens", "4", "--device", "cpu")
        for more in ((), ("--kv-dtype", cache), ("--kv-dtype", "model")):
            assert ingot(*asked, *more).exit_code == 0
        assert ingot(*asked, "--kv-dtype", "int4").exit_code == 2

    def test_bench_counts_its_bytes(self, checkpoints: dict[str, Path], cache: str) -> None:
        sides = [
            open_side(SideSpec(path=str(checkpoints["llama"]), device="cpu", kv_dtype=kv, max_batch_size=2))
            for kv in ("model", cache)
        ]
        assert [side.work.kv_bytes for side in sides] == [2 * 2 * 2 * 8 * 4, 2 * 2 * 2 * (8 + 4)]
        assert sides[1].memory().cache < sides[0].memory().cache
        assert sides[1].answer([Ask(5, 3)], [random_ids(5)]).tokens == (3,)


WIDE = {"vocab_size": 997, "hidden_size": 256, "intermediate_size": 688, "head_dim": 64}
WIDE |= {"max_position_embeddings": 512}


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
class TestOnAGpu:
    def test_an_engine_is_proven(self, kv_heads: int, dtype: str, cache: str, tmp_path: Path) -> None:
        """Fused kernels, graphs and modules, against a reference that shares nothing with them."""
        config = tiny_config("llama", **WIDE | {"num_key_value_heads": kv_heads})
        save_model(config, tmp_path / "checkpoint", seed=1)
        folder = build(tmp_path / "checkpoint", tmp_path / "e", dtype=dtype, kv_dtype=cache, tune=False)
        found = verify(folder, "cuda", note=False)
        assert found.verdict == "proven", found.failures

    def test_batch_invariance(self, kv_heads: int, dtype: str, cache: str, tmp_path: Path) -> None:
        config = tiny_config("llama", **WIDE | {"num_key_value_heads": kv_heads})
        save_model(config, tmp_path / "checkpoint", seed=1)
        runtime = RuntimeConfig(kv_dtype=cache, batch_invariant=True, cache_tokens=16384)  # type: ignore[arg-type]
        llm = LLM(tmp_path / "checkpoint", "cuda", compute_dtype=dtype, runtime=runtime, max_seq_len=512)
        params = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=0)
        prompts = [random_ids(n, seed=n, vocab_size=997) for n in (7, 280, 64, 1, 33)]
        together = llm.generate(prompts, params)
        for prompt, output in zip(prompts, together, strict=True):
            alone = llm.generate(prompt, params)[0]
            assert alone.token_ids == output.token_ids
            pairs = zip(alone.logprobs or [], output.logprobs or [], strict=True)
            assert all(one.logprob == other.logprob for one, other in pairs)
