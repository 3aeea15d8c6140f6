"""Prompts that are computed a few layers per step beside decodes give what they give alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.step_sizes import LAYERED_TOKENS
from ingot.engine.engine_loader import setting_of
from ingot.layers.decoder_forward import Between
from ingot.memory.ledger import ledger
from ingot.memory.step_memory import layered_bytes, step_buffer_bytes
from tests.e2e.same_tokens import ALONE, Asked, Rows, alone, run
from tests.e2e.turns import turns
from tests.e2e.watch import check_idle, watch
from tests.tiny_models import random_ids, save_model, tiny_config
from tests.unit.fake_matcher import AtOnce, FakeMatcher

LAYERED: dict[str, Any] = {
    "block_size": 4, "token_budget": 24, "prompt_chunk": 3, "long_prompt": 9, "prompt_share": 0.1,
}  # fmt: skip
LENGTHS = (2, 40, 5, 61, 30)
ASKED: Asked = [
    (random_ids(n, seed=n), SamplingParams(max_new_tokens=40 if n < 9 else 6, ignore_eos=True, seed=n))
    for n in LENGTHS
]


def llm_of(folder: Path, runtime: dict[str, Any], **more: Any) -> LLM:
    with turns():
        return LLM(folder, "cpu", max_batch_size=8, max_seq_len=96, runtime=RuntimeConfig(**runtime, **more))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(tiny_config("llama", num_hidden_layers=5), folder, seed=3)
    return folder


@pytest.mark.stays("gpt2-auto", "llama-int8")
@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [("llama", "auto"), ("gpt2", "auto"), ("gemma2", "auto"), ("gemma3", "int8"), ("llama", "int8")],
)
def test_logits_are_those_of_the_prompt_alone(tmp_path: Path, kind: str, kv_dtype: Any) -> None:
    """In models of many layers too, whose steps begin and end everywhere, and with a sliding window."""
    more = {"gpt2": {"n_layer": 5}, "llama": {"num_hidden_layers": 5}}.get(kind, {})
    save_model(tiny_config(kind, **more), tmp_path, seed=3)
    expected, rows = alone(llm_of(tmp_path, ALONE, kv_dtype=kv_dtype), ASKED)
    llm = llm_of(tmp_path, LAYERED, kv_dtype=kv_dtype)
    with watch(llm) as steps:
        found, mixed = run(llm, ASKED)
    assert steps.layered > 5
    assert {(one.first, one.last) for one in steps.layers} >= {(0, 1), (1, 2), (1, 3), (3, 4)}
    assert {one.chunk.count for one in steps.layers} >= {4, 7, 11}
    assert found == expected
    assert far(rows, mixed) < (2e-2 if kv_dtype == "int8" else 2e-5)  # chunks round the same values


def far(rows: Rows, others: Rows) -> float:
    """Relative to the largest logit."""
    top = max(float(row.abs().max()) for row in rows.values())
    return max(float((rows[key] - others[key]).abs().max()) for key in rows) / top


def test_a_tap_sees_every_token_of_every_layer(llama: Path) -> None:
    """While it is open nothing runs by layers, and a chunk in flight starts over."""
    llm = llm_of(llama, LAYERED)
    for index, (ids, params) in enumerate(ASKED[:2]):
        llm.executor.add(f"r{index}", ids, params)
    with watch(llm) as steps:
        for _ in range(10):
            llm.executor.step()
        assert not steps.layers[-1].ends
        begun = len(steps.layers)
        with llm.tap("layers.4") as seen:
            start = sum(share.count for step in steps.steps for share in step)
            while llm.executor.has_work:
                llm.executor.step()
    computed = sum(share.count for step in steps.steps for share in step)
    assert len(steps.layers) == begun
    assert len(seen["layers.4"]) == computed - start
    check_idle(llm)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_layers_go_on_while_a_lone_grammar_waits_for_its_mask(
    llama: Path, run_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps without requests, whose times say nothing about decodes."""
    llm, reported = llm_of(llama, LAYERED), list[float | None]()
    layered = llm.executor.runner.layered
    assert layered is not None
    monkeypatch.setattr(layered.pace, "measured", lambda *news: reported.append(news[-1]))
    through, modes = layered.forward.run_layers, set[bool]()

    def noted(*given: Any) -> None:
        modes.add(torch.is_inference_mode_enabled())
        through(*given)

    monkeypatch.setattr(layered.forward, "run_layers", noted)
    with watch(llm) as steps:
        found = beside_a_grammar(llm, run_ahead)
    assert modes == {True}
    assert found == beside_a_grammar(llm_of(llama, ALONE), run_ahead)
    between = sum(not step for step in steps.steps)
    assert (between > 5) == run_ahead
    assert len({(one.chunk.start, one.first) for one in steps.layers}) == len(steps.layers) > 20
    assert reported.count(None) in (between - 1, between), "the last one's time may be left untold"


def beside_a_grammar(llm: LLM, run_ahead: bool) -> dict[str, list[int]]:
    """Answers of a stream with a grammar, and of a long prompt that comes meanwhile."""
    executor, found = llm.executor, {"stream": list[int](), "long": list[int]()}
    executor.run_ahead, executor.masks._threads = run_ahead, AtOnce()
    matcher = FakeMatcher(llm.engine.manifest.model.vocab_size, 1)
    executor.add("stream", *ASKED[0], matcher=matcher)
    for _ in range(3):
        for update in executor.step():
            found[update.request_id] += update.token_ids
    executor.add("long", *ASKED[3])
    while executor.has_work:
        for update in executor.step():
            found[update.request_id] += update.token_ids
    check_idle(llm)
    return found


def test_its_memory_is_in_the_ledger(llama: Path) -> None:
    """Of the buffers, and of the hidden states of the longest chunk."""
    runtime = RuntimeConfig(prompt_chunk=3, prompt_share=0.1, block_size=16)
    llm = LLM(llama, "cpu", max_batch_size=2, max_seq_len=128, runtime=runtime)
    layered, kept = llm.executor.runner.layered, []
    assert layered is not None
    through = layered.forward.run_layers

    def kept_through(at: Between, *rest: Any) -> None:
        through(at, *rest)
        assert isinstance(at.x, torch.Tensor)
        kept.append(at.x.nbytes + at.hidden.nbytes)

    layered.forward.run_layers = kept_through  # type: ignore[method-assign]
    layered.warm_up()
    assert list(layered._buffers) == list(LAYERED_TOKENS)
    setting = setting_of(llm.engine.manifest, llm.engine.dtype, llm.engine.device).replace(runtime=runtime)
    buffers = 0
    for rows, buffer in layered._buffers.items():
        assert buffer._arrivals is not None
        own, tiles = buffer._device.nbytes + buffer._arrivals.nbytes, len(buffer.host["tile_list"])
        assert step_buffer_bytes(rows, 1, 8, 1, setting.model.num_kv_heads, tiles=tiles) == own
        buffers += own
    assert max(kept) == 2 * LAYERED_TOKENS[-1] * setting.model.hidden_size * 4
    wanted = layered_bytes(setting.model, torch.float32, runtime, setting.max_seq_len)
    assert buffers + max(kept) <= wanted < 1.1 * (buffers + max(kept)), "tiles are as small as there are"
    (item,) = [item for item in ledger(setting).items if item.name == "a chunk between layers"]
    assert item.bytes == wanted
    assert layered_bytes(setting.model, torch.float32, RuntimeConfig(), setting.max_seq_len) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_on_a_gpu_beside_graphs(tmp_path: Path, kind: str, run_ahead: bool) -> None:
    """Streams and the long prompt between them give what each gives alone, as near as fp16 sums in another
    order; the pace is the clock's.
    """
    save_model(tiny_config(kind, num_hidden_layers=6, max_position_embeddings=2048), tmp_path, seed=3)
    short = [(random_ids(n, seed=n), 400) for n in (5, 20, 33)]
    long = [(random_ids(n, seed=n), 8) for n in (1500, 900)]
    prompts = [ids for ids, _ in short + long]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True, logprobs=8) for _, n in short + long]
    limits: dict[str, Any] = {"max_batch_size": 8, "max_seq_len": 2048, "compute_dtype": "fp16"}
    plain = RuntimeConfig(prefix_reuse=False)
    expected = [
        LLM(tmp_path, "cuda", runtime=plain, **limits).generate(prompt, values)[0]
        for prompt, values in zip(prompts, params, strict=True)
    ]
    runtime = plain.replace(prompt_chunk=64, long_prompt=64, prompt_share=0.5, run_ahead=run_ahead)
    llm = LLM(tmp_path, "cuda", runtime=runtime, **limits)
    llm.warm_up()
    with watch(llm) as steps:
        found = llm.generate(prompts, params)
    assert (steps.ahead > 0) == run_ahead
    assert steps.layered > 4
    assert {one.chunk.count for one in steps.layers} & set(LAYERED_TOKENS)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids[0] == other.token_ids[0]
        a, b = dict(one.logprobs[0].top), dict(other.logprobs[0].top)
        shared = [token for token in a if token in b]
        assert len(shared) >= 6
        assert [a[token] for token in shared] == pytest.approx([b[token] for token in shared], abs=0.03)
    check_idle(llm)


@pytest.mark.gpu
def test_a_warm_up_builds_what_chunks_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tiny_config("llama", num_hidden_layers=6, max_position_embeddings=2048), tmp_path, seed=3)
    runtime = RuntimeConfig(prefix_reuse=False, prompt_chunk=64, long_prompt=64, prompt_share=0.5)
    llm = LLM(tmp_path, "cuda", compute_dtype="fp16", max_batch_size=8, max_seq_len=2048, runtime=runtime)
    llm.warm_up()
    built: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **reported: built.append(reported["repr"])
    )
    with watch(llm) as steps:
        llm.generate(
            [random_ids(5, seed=5), random_ids(1500, seed=6), random_ids(1500, seed=7)],  # a step holds two
            [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (400, 4, 4)],
        )
    assert steps.layered > 4
    assert built == []
