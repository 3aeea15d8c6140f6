"""Keys and values of an encoder's outputs in 8 bits, beside the decoder's own: near to 16 bits, however a
request runs, and counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.building.ledger_source import read_setting
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.manifest import Manifest
from ingot.kernels.cache.cache_scales import NARROW_CACHES, CacheScales, dequantize_heads
from ingot.layers.forward_batch import LayerCache
from ingot.memory.ledger import ledger
from ingot.proof.verify_engine import verify
from tests.e2e.terminal import ingot
from tests.e2e.test_narrow_cache import MOST_KL
from tests.encoders.conftest import Side
from tests.encoders.test_pictures import idle
from tests.encoders.test_speech import GREEDY, MIXED, prompt

TOLD = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=5)
HALF_STEP = {"int8": 1 / 254, "fp8": 1 / 16}  # of a head's largest value, and of the value itself


@pytest.fixture(scope="module", params=NARROW_CACHES)
def cache(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def seconds(llm: LLM) -> list[LayerCache]:
    return [one.encoded for one in llm.executor.runner.caches if one.encoded is not None]


def logits(llm: LLM) -> torch.Tensor:
    """Of prompts with speech, behind one another."""
    return torch.cat([llm.logits(prompt(spoken)) for spoken in MIXED if spoken[0] is not None])


def test_near_to_a_cache_of_16_bits(speech: Side, cache: str) -> None:
    llm, wide = speech.open(kv_dtype=cache), speech.open()
    for held in (seconds(llm), llm.executor.runner.caches):
        assert {one.keys.dtype for one in held} == {NARROW_CACHES[cache]}
    found, exact = logits(llm).log_softmax(-1), logits(wide).log_softmax(-1)
    kl = (exact.exp() * (exact - found)).sum(-1)
    assert 1e-8 < float(kl.mean()) < MOST_KL[cache]


def test_each_head_of_a_position_has_its_scale(speech: Side, cache: str) -> None:
    """What the caches hold is the exact keys and values to half a step: of the encoder's outputs in every
    layer, of tokens in the first, which no rounding is before.
    """
    llm, wide = speech.open(kv_dtype=cache), speech.open()
    for engine in (llm, wide):
        engine.logits(prompt(MIXED[0]))
    held = [(*seconds(engine), engine.executor.runner.caches[0]) for engine in (llm, wide)]
    for own, exact in zip(*held, strict=True):
        assert own.scales is not None
        for held, scales, wanted in (
            (own.keys, own.scales.keys, exact.keys),
            (own.values, own.scales.values, exact.values),
        ):
            off = (dequantize_heads(held, scales, torch.float32) - wanted).abs()
            most = wanted.abs().amax(-1, keepdim=True)
            room = most if cache == "int8" else wanted.abs() + most / 2**14
            assert float(wanted.abs().max()) > 0
            assert bool((off <= 1.01 * HALF_STEP[cache] * room + 1e-6).all())


@pytest.mark.stays("int8-preempted", "fp8-chunked")
@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "runtime",
    [
        {},
        {"token_budget": 8},
        {"cache_tokens": 96, "encoder_positions": 64, "token_budget": 8},
        {"batch_invariant": True},
    ],
    ids=["plain", "chunked", "preempted", "invariant"],
)
def test_however_it_is_run(speech: Side, cache: str, runtime: dict[str, Any]) -> None:
    invariant = runtime.get("batch_invariant", False)
    single = speech.open(kv_dtype=cache, batch_invariant=invariant)
    alone = [single.generate(prompt(spoken), GREEDY)[0].token_ids for spoken in MIXED]
    llm = speech.open(kv_dtype=cache, **runtime)
    together = llm.generate([prompt(spoken) for spoken in MIXED], GREEDY)
    assert [out.token_ids for out in together] == alone
    assert idle(llm)


def test_each_of_the_two_caches_is_read(speech: Side, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In decode steps too: wrong scales of one are seen in the tokens after the first."""
    llm = speech.open(kv_dtype=cache)
    exact = llm.generate(prompt(MIXED[0]), TOLD)[0].logprobs
    for which in ("own", "encoded"):
        spoiled = speech.open(kv_dtype=cache)
        caches = spoiled.executor.runner.caches if which == "own" else seconds(spoiled)
        step = spoiled.executor.runner.run
        assert caches[0].scales is not None

        def run(batch: Any, step: Any = step, scales: CacheScales = caches[0].scales) -> torch.Tensor:
            found: torch.Tensor = step(batch)
            scales.values.mul_(3)
            return found

        monkeypatch.setattr(spoiled.executor.runner, "run", run)
        found = spoiled.generate(prompt(MIXED[0]), TOLD)[0].logprobs
        assert found is not None
        assert exact is not None
        assert found[0].logprob == exact[0].logprob
        assert found[1].top != exact[1].top


@pytest.mark.stays("fp8")
def test_the_ledger_counts_it_to_the_byte(speech: Side, cache: str) -> None:
    llm = speech.open(kv_dtype=cache)
    runtime = RuntimeConfig(block_size=16, kv_dtype=cache)  # type: ignore[arg-type]
    setting = read_setting(str(speech.folder), device="cpu", max_batch_size=8, runtime=runtime)
    bill = {(item.kind, item.name): item for item in ledger(setting).items}
    item = bill["encoders", "encoder cache"]
    assert item.bytes == sum(second.nbytes for second in seconds(llm)) > 0
    assert cache in item.note
    shown = ingot("plan", speech.folder, "--gpu", "24GiB", "--kv-dtype", cache)
    assert shown.exit_code == 0
    assert f"positions, {cache}" in shown.output


@pytest.mark.stays("int8")
def test_an_engine_is_built_for_it(speech: Side, cache: str, tmp_path: Path) -> None:
    engine = build(speech.folder, tmp_path / "engine", kv_dtype=cache, device="cpu")
    assert Manifest.read(engine).build.kv_dtype == cache
    assert verify(engine, "cpu", note=False).verdict == "proven"
    assert torch.equal(logits(LLM(engine, "cpu")), logits(speech.open(kv_dtype=cache)))
    wide = LLM(engine, "cpu", runtime=RuntimeConfig(kv_dtype="model"))
    assert torch.equal(logits(wide), logits(speech.open()))
