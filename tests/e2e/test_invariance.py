"""A request's results never depend on how it is run: alone or in a batch, in one piece or in chunks,
preempted, on cached beginnings, under a tap, in blocks of any size, with graphs or without.

Every test proves that the mechanism it is about did happen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from tests.e2e.mixed import GREEDY, PENALISED, PROMPTS, SAMPLED, TOLD, Make, alone, ids_of, mixed_params
from tests.e2e.watch import check_idle, watch
from tests.tiny_models import random_ids

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "window", "gemma2", "gemma3"])
def test_cached_is_uncached(make: Make, kind: str, device: str) -> None:
    llm, prompt = make(kind, device), random_ids(20, seed=3)
    with watch(llm) as steps:
        ids = llm.generate(prompt, GREEDY)[0].token_ids
    assert [step[0].count for step in steps.steps] == [20] + [1] * 23
    rows = llm.logits(prompt + ids)[19:-1]
    assert rows.argmax(-1).tolist() == ids
    assert len(set(ids)) > 2


@pytest.mark.stays("gpt2", "window")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "window", "gemma2", "gemma3"])
def test_batched_is_single(make: Make, kind: str, device: str) -> None:
    llm, params = make(kind, device), mixed_params(len(PROMPTS))
    expected = alone(llm, PROMPTS, params)
    with watch(llm) as steps:
        outputs = llm.generate(PROMPTS, params)
    assert steps.largest_batch == 8
    assert ids_of(outputs) == expected
    check_idle(llm)


@pytest.mark.parametrize("device", DEVICES)
def test_joining_in_flight_is_single(make: Make, device: str) -> None:
    """A request is added at every third step, while others prefill and decode."""
    llm, params = make("llama", device), [v.replace(n=1) for v in mixed_params(len(PROMPTS))]
    expected = alone(llm, PROMPTS, params)
    got: dict[str, list[int]] = {f"join{i}": [] for i in range(len(PROMPTS))}
    with watch(llm) as steps:
        for step in range(200):
            index, due = divmod(step, 3)
            if due == 0 and index < len(PROMPTS):
                llm.executor.add(f"join{index}", PROMPTS[index], params[index])
            for update in llm.executor.step() if llm.executor.has_work else ():
                got[update.request_id] += update.token_ids
    both = [s for s in steps.steps if any(i.count > 1 for i in s) and any(i.count == 1 for i in s)]
    assert len(both) > 4, "prefills beside decodes"
    assert [[ids] for ids in got.values()] == expected
    check_idle(llm)


@pytest.mark.stays("llama-9", "gpt2-256")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [9, 256])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_running_ahead_is_step_by_step(make: Make, kind: str, budget: int, device: str) -> None:
    """With an end token that some meet, chunks, a full cache, penalties, and a request that holds everyone
    back.
    """
    llm = make(kind, device, cache_tokens=144, token_budget=budget)
    stop = llm.generate(PROMPTS[3], SAMPLED)[0].token_ids[7]
    some = (GREEDY, SAMPLED, PENALISED.replace(n=2), TOLD)
    params = [v.replace(ignore_eos=False, stop_token_ids=(stop,)) for v in some] * 2
    params[6] = PENALISED.replace(max_new_tokens=3)
    late = PENALISED.replace(max_new_tokens=4, logits_processors=(lambda ids, logits: logits,))
    found = []
    for ahead in (False, True):
        llm.executor.run_ahead = ahead
        with watch(llm) as steps:
            outputs = llm.generate(PROMPTS, params)
            mixed = llm.generate(PROMPTS, [*params[:-1], late])
        assert (steps.ahead > 20) == ahead
        assert steps.ahead < len(steps.steps)
        assert steps.preemptions > 0 or budget < 256
        assert {a.finish_reason for o in outputs for a in o.answers} == {"stop", "length"}
        found.append([*outputs, *mixed])
        check_idle(llm)
    assert ids_of(found[0]) == ids_of(found[1])
    for one, other in zip(*found, strict=True):
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert (a.token_id, len(a.top)) == (b.token_id, 5)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-4)
    assert sum(len(one.logprobs or ()) for one in found[0]) > 40


@pytest.mark.stays(
    "min_new_tokens", "logit_bias", "repetition_penalty presence_penalty frequency_penalty logprobs"
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.05},
        {"presence_penalty": 0.7},
        {"frequency_penalty": -0.6},
        {"min_new_tokens": 20},
        {"logit_bias": {3: 4.0, 40: -2.0}},
        {"logprobs": 20},
        {"repetition_penalty": 0.8, "presence_penalty": -0.4, "frequency_penalty": 0.3, "logprobs": 0},
    ],
    ids=lambda values: " ".join(values),
)
def test_what_a_rule_gives_ahead_is_what_it_gives_alone(
    make: Make, values: dict[str, Any], device: str
) -> None:
    """Some of the requests have it; no step waits for the host."""
    llm = make("llama", device, block_size=4, cache_tokens=160, token_budget=9)
    stop = llm.generate(PROMPTS[3], GREEDY)[0].token_ids[4]
    ending = [v.replace(ignore_eos=False, stop_token_ids=(stop,)) for v in (GREEDY, SAMPLED)] * 4
    params = [v.replace(**values) if i % 3 else v for i, v in enumerate(ending)]
    expected = alone(make("llama", device), PROMPTS, params)
    llm.executor.run_ahead = True
    with watch(llm) as steps:
        outputs = llm.generate(PROMPTS, params)
    assert steps.ahead == len(steps.steps)
    assert steps.preemptions > 0
    assert steps.chunks > 4
    assert ids_of(outputs) == expected
    assert values.keys() <= {"logprobs"} or expected != alone(make("llama", device), PROMPTS, ending)
    check_idle(llm)


@pytest.mark.stays("llama", "gpt2")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "window", "gemma2", "gemma3"])
def test_chunked_is_whole(make: Make, kind: str, device: str) -> None:
    whole, chunked = make(kind, device), make(kind, device, batch=4, token_budget=7)
    params = mixed_params(len(PROMPTS))
    with watch(chunked) as steps:
        outputs = chunked.generate(PROMPTS, params)
    assert steps.chunks > 20
    assert max(sum(share.count for share in step) for step in steps.steps) == 7
    assert ids_of(outputs) == alone(whole, PROMPTS, params)
    with watch(chunked) as steps:
        logits = chunked.logits(PROMPTS[6])
    assert [share.count for step in steps.steps for share in step] == [7] * 5 + [5]
    assert torch.allclose(logits, whole.logits(PROMPTS[6]), rtol=0, atol=1e-4)


@pytest.mark.stays("150")
@pytest.mark.parametrize("length", [66, 100, 150])
def test_qwen_chunks_know_the_prompts_length(golden: Path, length: int) -> None:
    """The rotary base comes from the prompt's length, of which a first chunk has seen nothing."""
    ids = random_ids(length, seed=length, vocab_size=500)
    folder = golden / "qwen_v1_1_safetensors" / "hf"
    whole, chunked = (
        LLM(folder, "cpu", max_batch_size=4, max_seq_len=200, runtime=RuntimeConfig(token_budget=budget))
        for budget in (256, 19)
    )
    assert whole.engine.model.rope_offset(length) > 0 == whole.engine.model.rope_offset(19)
    with watch(chunked) as steps:
        outputs = chunked.generate(ids, GREEDY)
    assert steps.chunks == -(-length // 19) - 1
    assert outputs[0].token_ids == whole.generate(ids, GREEDY)[0].token_ids
    assert torch.allclose(chunked.logits(ids), whole.logits(ids), rtol=0, atol=1e-4)


@pytest.mark.stays("greedy-False", "penalised-True")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_preempted_is_undisturbed(
    make: Make, params: SamplingParams, prefix_reuse: bool, device: str
) -> None:
    values = [params] * len(PROMPTS)
    small = make("llama", device, block_size=4, cache_tokens=160, prefix_reuse=prefix_reuse)
    with watch(small) as steps:
        outputs = small.generate(PROMPTS, values)
    assert steps.preemptions > 2
    assert steps.restarts
    assert bool(any(steps.restarts)) == prefix_reuse, "with reuse, own blocks are found after a preemption"
    assert ids_of(outputs) == alone(make("llama", device), PROMPTS, values)
    check_idle(small)


@pytest.mark.parametrize("device", DEVICES)
def test_prefix_reuse_changes_nothing(folders: dict[str, Path], make: Make, device: str) -> None:
    system = random_ids(50, seed=50)
    prompts = [system + random_ids(n, seed=n) for n in (3, 9, 20)] + [system[:33], system]
    values = mixed_params(len(prompts))
    fresh = make("llama", device, prefix_reuse=False)
    runtime = RuntimeConfig(block_size=16, cache_tokens=2048)
    sharing = LLM(folders["llama"], device, compute_dtype="fp32", max_batch_size=8, runtime=runtime)
    sharing.generate(prompts[0], values[0])
    with watch(sharing) as steps:
        outputs = sharing.generate(prompts[1:], values[1:])
    starts = sorted(set(steps.first_starts.values()))
    assert starts == [32, 48], "48 tokens of the system prompt, 32 where it is cut"
    with watch(fresh) as steps:
        expected = fresh.generate(prompts, values)
    assert set(steps.first_starts.values()) == {0}
    assert ids_of(outputs) == ids_of(expected)[1:]
    check_idle(sharing)


def test_qwen_shares_a_beginning_only_under_the_same_alpha(golden: Path) -> None:
    folder = golden / "qwen_v1_1_safetensors" / "hf"
    ids = random_ids(120, seed=9, vocab_size=500)
    prompts = [ids[:60], ids[:80], ids[:63], ids[:120]]  # alpha 1, 3, 1, 3; seq_length is 64
    sharing, fresh = (
        LLM(folder, "cpu", max_batch_size=4, max_seq_len=200, runtime=runtime)
        for runtime in (RuntimeConfig(block_size=16, prefix_reuse=reuse) for reuse in (True, False))
    )
    starts = []
    for prompt in prompts:
        with watch(sharing) as steps:
            output = sharing.generate(prompt, GREEDY)[0]
        starts += steps.first_starts.values()
        assert output.token_ids == fresh.generate(prompt, GREEDY)[0].token_ids
    assert starts == [0, 0, 48, 80]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tap_changes_nothing(make: Make, kind: str, device: str) -> None:
    llm, prompt = make(kind, device), PROMPTS[5]
    plain, ids = llm.logits(prompt), llm.generate(prompt, GREEDY)[0].token_ids
    with llm.tap("**") as seen:
        assert torch.equal(llm.logits(prompt), plain)
        count = seen["layers.1"].shape[0]
        assert llm.generate(prompt, GREEDY)[0].token_ids == ids
    assert count == len(prompt)
    assert seen["layers.0.self_attn.qkv_proj"].shape[0] > count
    rows = seen["norm"].shape[0]
    llm.generate(prompt, GREEDY)
    assert seen["norm"].shape[0] == rows, "a closed tap sees nothing"


@pytest.mark.parametrize("device", DEVICES)
def test_a_tap_sees_no_token_beyond_the_end(make: Make, device: str) -> None:
    """A step sent ahead would compute one more for a request that meets its end token."""
    llm, prompt = make("llama", device), PROMPTS[5]
    before = llm.executor.run_ahead
    ids = llm.generate(prompt, GREEDY)[0].token_ids
    params = GREEDY.replace(ignore_eos=False, stop_token_ids=(ids[5],))
    llm.executor.run_ahead = True
    with llm.tap("norm") as seen:
        found = llm.generate(prompt, params)[0].token_ids
    llm.executor.run_ahead = before
    assert found == ids[: ids.index(ids[5])]
    assert seen["norm"].shape[0] == len(prompt) + len(found)


@pytest.mark.parametrize("device", DEVICES)
def test_n_answers(make: Make, device: str) -> None:
    llm, params = make("llama", device), SAMPLED.replace(n=4)
    answers = ids_of(llm.generate(PROMPTS[3], params))[0]
    assert len({tuple(ids) for ids in answers}) == 4
    assert answers[0] == llm.generate(PROMPTS[3], SAMPLED)[0].token_ids
    assert ids_of(llm.generate(PROMPTS[3], params))[0] == answers
    other = ids_of(llm.generate(PROMPTS[3], params.replace(seed=12)))[0]
    assert not {tuple(ids) for ids in other} & {tuple(ids) for ids in answers}
    flat = llm.generate(PROMPTS[3], params.replace(temperature=100.0, top_p=1.0, n=1))[0].token_ids
    assert len(set(flat)) > 15, "every step draws a number of its own"
    unseeded = [llm.generate(PROMPTS[3], params.replace(seed=None, n=1))[0].token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


@pytest.mark.parametrize("device", DEVICES)
def test_beams_among_others_and_preempted_equal_beams_alone(make: Make, device: str) -> None:
    beams = SamplingParams(num_beams=3, n=3, max_new_tokens=12, ignore_eos=True, length_penalty=0.7)
    end = make("llama").generate(PROMPTS[1], GREEDY)[0].token_ids[3]
    ending = beams.replace(stop_token_ids=(end,))
    values = [beams, GREEDY, ending, PENALISED, beams.replace(early_stopping=True)]
    prompts = [PROMPTS[i] for i in (1, 5, 1, 6, 0)]
    roomy = make("llama", device)
    expected = alone(roomy, prompts, values)
    assert expected[0] != expected[2], "the end token matters"
    assert ids_of(roomy.generate(prompts, values)) == expected
    small = make("llama", device, block_size=4, cache_tokens=128)
    with watch(small) as steps:
        outputs = small.generate(prompts, values)
    assert steps.preemptions > 0
    assert steps.largest_batch > 3
    assert ids_of(outputs) == expected
    check_idle(small)


@pytest.mark.stays("4", "64")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [4, 8, 32, 64])
def test_block_size_changes_nothing(make: Make, block_size: int, device: str) -> None:
    llm, params = make("llama", device, block_size=block_size), mixed_params(len(PROMPTS))
    assert llm.executor.runner.caches[0].keys.shape[2] == block_size
    assert ids_of(llm.generate(PROMPTS, params)) == alone(make("llama", device), PROMPTS, params)


def test_a_preempted_request_keeps_its_base(golden: Path) -> None:
    """Qwen v1 beyond its training length."""
    folder = golden / "qwen_v1_1_safetensors" / "hf"
    prompts = [list(range(3, 3 + n)) for n in (118, 52, 150)]  # bases 3, 1 and 7; the second crosses 64
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    roomy = LLM(folder, device="cpu", max_seq_len=200)
    alone = [roomy.generate([p], params)[0].token_ids for p in prompts]
    runtime = RuntimeConfig(block_size=8, cache_tokens=360, token_budget=64)
    tight = LLM(folder, device="cpu", max_seq_len=200, runtime=runtime)
    together = [o.token_ids for o in tight.generate(prompts, params)]
    assert tight.executor.num_preemptions > 0
    assert together == alone
    offsets = {tight.engine.model.rope_offset(len(p)) for p in prompts}
    assert len(offsets) == 3
