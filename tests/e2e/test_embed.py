"""Prompts as vectors: Hugging Face's last hidden states, pooled, however the prompts are batched and cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from ingot import LLM, RuntimeConfig, SamplingParams
from ingot.errors import RequestError
from ingot.runtime.likelihood import keep_sum
from tests.e2e.mixed import Make
from tests.e2e.watch import check_idle
from tests.tiny_models import random_ids

PROMPTS = [random_ids(count, seed=count) for count in (1, 2, 17, 40, 128)]
KINDS = ("gpt2", "llama", "qwen3", "gemma2", "window")


def pooled_by_huggingface(folder: Path, pooling: str) -> torch.Tensor:
    attention = "eager" if folder.name == "gemma2" else "sdpa"
    model = AutoModel.from_pretrained(folder, attn_implementation=attention).eval()
    with torch.no_grad():
        states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]
    return torch.stack([s[-1] if pooling == "last" else s.mean(0) for s in states])


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_hugging_faces_last_hidden_states(
    make: Make, folders: dict[str, Path], kind: str, pooling: str
) -> None:
    found = make(kind).embed(PROMPTS, pooling=pooling)
    assert found.shape == (len(PROMPTS), 32)
    assert found.dtype == torch.float32
    assert found.device.type == "cpu"
    expected = pooled_by_huggingface(folders[kind], pooling)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_prompt_in_chunks_is_the_prompt_at_once(make: Make, pooling: str) -> None:
    whole, cut = make("llama"), make("llama", token_budget=16)
    found = cut.embed(PROMPTS, pooling)
    torch.testing.assert_close(found, whole.embed(PROMPTS, pooling), rtol=1e-5, atol=1e-5)
    each = torch.cat([cut.embed(ids, pooling) for ids in PROMPTS])
    torch.testing.assert_close(found, each, rtol=1e-5, atol=1e-5)


def test_a_preempted_prompt_counts_its_tokens_once(make: Make) -> None:
    executor = make("llama", cache_tokens=128, token_budget=16).executor
    prompt, before = random_ids(90, seed=1), executor.num_preemptions
    executor.add("answer", random_ids(30, seed=3), SamplingParams(max_new_tokens=20))
    executor.add_reading("prompt", prompt, keep_sum, hidden=True)
    while executor.has_work:
        executor.step()
    found = executor.take_reading("prompt").kept.sum(0) / len(prompt)
    assert executor.num_preemptions > before
    torch.testing.assert_close(found, make("llama").embed([prompt])[0], rtol=1e-5, atol=1e-5)


def test_more_prompts_than_the_batch_holds_and_again_after_a_prefix_was_cached(make: Make) -> None:
    llm = make("llama", batch=2)
    expected = make("llama").embed(PROMPTS)
    llm.generate(PROMPTS[3], SamplingParams(max_new_tokens=1))
    for _ in range(2):
        torch.testing.assert_close(llm.embed(PROMPTS), expected, rtol=1e-5, atol=1e-5)
    check_idle(llm)


def test_answers_and_logits_beside_them_stay_the_same(make: Make) -> None:
    llm = make("qwen3")
    params = SamplingParams(max_new_tokens=30)
    expected, vectors = llm.generate(PROMPTS[:3], params), llm.embed(PROMPTS)
    stream = llm.stream_many(PROMPTS[:3], params)
    tokens: list[list[int]] = [[], [], []]
    for place, piece in stream:
        tokens[place] += piece.token_ids
        if len(tokens[0]) == 3:
            break
    # The stream's requests decode in the steps that compute these.
    torch.testing.assert_close(llm.embed(PROMPTS), vectors, rtol=1e-5, atol=1e-5)
    for place, piece in stream:
        tokens[place] += piece.token_ids
    assert tokens == [output.token_ids for output in expected]
    check_idle(llm)


def test_a_tap_sees_each_token_once(make: Make) -> None:
    llm = make("llama")
    with llm.tap("norm") as seen:
        vectors = llm.embed(PROMPTS[2])
    assert seen["norm"].shape == (17, 32)
    torch.testing.assert_close(seen["norm"].mean(0), vectors[0], rtol=1e-5, atol=1e-5)


def test_no_prompts_give_no_rows(make: Make) -> None:
    assert make("llama").embed([]).shape == (0, 32)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1], []], "prompt 2: the prompt is empty"),
        ([[1], random_ids(129)], "prompt 2: the prompt is too long; seen: 129 tokens; allowed: <= 128"),
        ([[1, 97]], "token ids outside the vocabulary"),
        ("text", "no tokenizer"),
        ([[{"role": "user", "content": "Hi"}]], "a prompt is text"),
    ],
)
def test_what_cannot_be_computed_is_refused(make: Make, prompts: list[list[int]], words: str) -> None:
    llm = make("llama")
    with pytest.raises(RequestError, match=words):
        llm.embed(prompts)
    check_idle(llm)


def test_pooling_is_mean_or_last(make: Make) -> None:
    with pytest.raises(RequestError, match="unknown pooling; seen: max; allowed: mean, last"):
        make("llama").embed([[1]], pooling="max")


def test_text_is_tokenized_and_the_empty_text_refused(tiny: Path) -> None:
    llm = LLM(tiny, "cpu", runtime=RuntimeConfig(cache_tokens=512))
    ids = llm.prompt_ids("Hello")
    torch.testing.assert_close(llm.embed("Hello"), llm.embed([ids]))
    with pytest.raises(RequestError, match="prompt 2: the text is empty"):
        llm.embed(["Hello", ""])


@pytest.mark.gpu
def test_fused_steps_on_a_gpu_give_the_same(make: Make) -> None:
    expected = make("llama").embed(PROMPTS)
    found = make("llama", "cuda", dtype="fp16").embed(PROMPTS)  # the first has one token, as a decode has
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.03)
