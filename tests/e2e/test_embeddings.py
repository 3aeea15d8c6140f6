"""Embeddings in a prompt: rows of the embedding layer give what their ids give, bit for bit, however they are
scheduled; any other rows give what Hugging Face makes of ``inputs_embeds``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot import LLM, Embeddings, Prompt, SamplingParams, build
from ingot.config.runtime_config import RuntimeConfig
from ingot.errors import RequestError
from tests.tiny_models import make_model, random_ids, save_model, tiny_config

KINDS = ("llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "opt")
GREEDY = SamplingParams(max_new_tokens=10, ignore_eos=True)
BLOCK = 16
BEFORE, MIDDLE, AFTER = random_ids(5, 1), random_ids(20, 2), random_ids(4, 3)
HIDDEN = 32


class Side:
    """Hugging Face's model and its folder."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder
        self.model: Any = save_model(tiny_config(kind), folder)

    def rows(self, ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = self.model.get_input_embeddings()(torch.tensor(ids)).detach()
        return found

    def open(self, **runtime: Any) -> LLM:
        return LLM(self.folder, "cpu", runtime=RuntimeConfig(block_size=BLOCK, **runtime))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Side:
    return Side("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def opened(llama: Side) -> LLM:
    return llama.open()


def others(count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Rows that are no token's."""
    return scale * torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def greedy(llm: LLM, prompts: Any, **values: Any) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(prompts, GREEDY.replace(**values))]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_embedding_give_what_their_ids_give(kind: str, tmp_path: Path) -> None:
    side = Side(kind, tmp_path)
    with side.open() as llm:
        rows, ids = side.rows(MIDDLE), [*BEFORE, *MIDDLE, *AFTER]
        assert torch.equal(llm.logits(Prompt([BEFORE, Embeddings(rows), AFTER])), llm.logits(ids))
        assert torch.equal(llm.logits(Prompt([Embeddings(rows), AFTER])), llm.logits([*MIDDLE, *AFTER]))
        assert greedy(llm, Prompt([BEFORE, Embeddings(rows)])) == greedy(llm, [[*BEFORE, *MIDDLE]])
        free = others(7, 3)
        embeds = torch.cat([side.rows(BEFORE), free, side.rows(AFTER)])[None]
        with torch.inference_mode():
            expected = side.model(inputs_embeds=embeds).logits[0]
        found = llm.logits(Prompt([BEFORE, Embeddings(free), AFTER]))
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


RUNTIMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"token_budget": 7},
    "long-prompts-in-chunks": {"prompt_chunk": 3, "long_prompt": 4},
    "preempted": {"cache_tokens": 96},
    "no-prefix-reuse": {"prefix_reuse": False},
    "batch-invariant": {"batch_invariant": True},
}


def mixed() -> list[Any]:
    one, two = Embeddings(others(9, 4)), Embeddings(others(1, 5))
    return [
        Prompt([BEFORE, one, AFTER]),
        random_ids(30, 6),
        Prompt([one, two, BEFORE, one]),
        Prompt([two]),
        Prompt([random_ids(17, 7), Embeddings(others(33, 8)), random_ids(2, 9)]),
    ]


@pytest.fixture(scope="module")
def alone(opened: LLM) -> list[list[int]]:
    return [greedy(opened, prompt)[0] for prompt in mixed()]


@pytest.mark.stays("chunks", "preempted", "no-prefix-reuse")
@pytest.mark.parametrize("runtime", RUNTIMES.values(), ids=RUNTIMES)
def test_schedules_and_neighbours_change_nothing(
    llama: Side, alone: list[list[int]], runtime: dict[str, Any]
) -> None:
    with LLM(llama.folder, "cpu", max_seq_len=96, runtime=RuntimeConfig(block_size=BLOCK, **runtime)) as llm:
        assert greedy(llm, mixed()) == alone
        assert greedy(llm, mixed()) == alone  # from the prefix cache, where there is one
        if "cache_tokens" in runtime:
            assert llm.executor.num_preemptions > 0
        assert not llm.executor.has_work


def test_answers_and_beams_of_embeddings(llama: Side, opened: LLM) -> None:
    rows, ids = llama.rows(MIDDLE), [*BEFORE, *MIDDLE]
    sampled: Any = {"n": 3, "temperature": 0.8, "seed": 5}
    for values in (sampled, {"num_beams": 3}, {"logprobs": 3}):
        found = opened.generate(Prompt([BEFORE, Embeddings(rows)]), GREEDY.replace(**values))[0]
        expected = opened.generate([ids], GREEDY.replace(**values))[0]
        assert [one.token_ids for one in found.answers] == [one.token_ids for one in expected.answers]
        assert [one.logprobs for one in found.answers] == [one.logprobs for one in expected.answers]


def test_the_prefix_cache_knows_rows_by_their_values_and_place(llama: Side) -> None:
    llm, fresh, reused = llama.open(), llama.open(prefix_reuse=False), []
    reuse = llm.executor.blocks.reuse_prefix
    llm.executor.blocks.reuse_prefix = lambda request: reused.append(reuse(request)) or reused[-1]  # type: ignore
    rows = others(2 * BLOCK, 10)
    changed = rows.clone()
    changed[BLOCK + 3, 7] += 1e-6
    moved = Prompt([[3], Embeddings(rows), AFTER])
    ids = [0] * (2 * BLOCK)  # those that stand for rows
    for prompt, tokens in (
        (Prompt([Embeddings(rows), AFTER]), 0),
        (Prompt([Embeddings(rows), BEFORE]), 2 * BLOCK),
        (Prompt([Embeddings(changed), AFTER]), 0),  # of one tensor all rows count
        (moved, 0),
        (Prompt([ids, AFTER]), 0),
        (Prompt([Embeddings(rows[:BLOCK]), Embeddings(rows[BLOCK:]), AFTER]), 0),
        (Prompt([Embeddings(rows.double()), AFTER]), 2 * BLOCK),
    ):
        found = greedy(llm, prompt)
        assert reused[-1] == tokens
        assert found == greedy(fresh, prompt)


def test_rows_are_what_they_were_when_they_were_given(llama: Side, opened: LLM) -> None:
    given = others(9, 40)
    stream = opened.stream(Prompt([BEFORE, Embeddings(given), AFTER]), GREEDY)
    given.zero_()
    found = [token for piece in stream for token in piece.token_ids]
    with llama.open() as fresh:
        assert [found] == greedy(fresh, Prompt([BEFORE, Embeddings(others(9, 40)), AFTER]))


def test_rows_count_as_tokens(opened: LLM) -> None:
    most = opened.engine.manifest.build.max_seq_len
    out = opened.generate(Prompt([BEFORE, Embeddings(others(9, 4))]), GREEDY)[0]
    assert len(out.prompt_token_ids) == len(BEFORE) + 9
    last = opened.generate(Prompt([Embeddings(others(most - 1, 1))]), SamplingParams(ignore_eos=True))[0]
    assert (len(last.token_ids), str(last.finish_reason)) == (1, "length")
    with pytest.raises(RequestError, match=rf"too long.*{most} tokens.*<= {most - 1}"):
        opened.generate(Prompt([Embeddings(others(most, 1))]))


def test_log_likelihoods_are_of_tokens_alone(llama: Side, opened: LLM) -> None:
    found = opened.log_likelihood(Prompt([BEFORE, Embeddings(llama.rows(MIDDLE)), AFTER]))
    expected = opened.log_likelihood([*BEFORE, *MIDDLE, *AFTER])
    rows = slice(len(BEFORE) - 1, len(BEFORE) + len(MIDDLE) - 1)
    assert found[rows].isnan().all()
    expected[rows] = torch.nan
    assert torch.equal(found.nan_to_num(1.0), expected.nan_to_num(1.0))
    first = opened.log_likelihood(Prompt([Embeddings(llama.rows(MIDDLE)), AFTER]))
    assert first.isnan().tolist() == [True] * (len(MIDDLE) - 1) + [False] * len(AFTER)


def test_hidden_states_of_embeddings(llama: Side, opened: LLM) -> None:
    found = opened.embed([Prompt([BEFORE, Embeddings(llama.rows(MIDDLE))]), [*BEFORE, *MIDDLE]])
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("biased", [{}, {"logits_processors": (lambda ids, logits: logits,)}])
def test_penalties_count_no_row(opened: LLM, biased: dict[str, Any]) -> None:
    """The id that stands for rows is not in the prompt; a bias makes it the answer unless penalized."""
    prompt = Prompt([AFTER, Embeddings(others(3, 4)), BEFORE])
    assert 0 not in [*AFTER, *BEFORE]
    values = {"logit_bias": {0: 60.0}, "repetition_penalty": 100.0, "max_new_tokens": 1, **biased}
    assert greedy(opened, prompt, **values) == [[0]]
    assert greedy(opened, Prompt([AFTER, [0, 0, 0], BEFORE]), **values) != [[0]]


def test_arrays_and_dtypes(opened: LLM) -> None:
    rows = others(4, 1)
    expected = opened.logits(Prompt([Embeddings(rows), AFTER]))
    for given in (
        rows.numpy(),
        rows.double(),
        np.asfortranarray(rows.numpy()),
        rows.to_sparse(),
        rows.tolist(),
        rows.requires_grad_(),
    ):
        assert torch.equal(opened.logits(Prompt([Embeddings(given), AFTER])), expected)
    half = rows.detach().bfloat16()
    found = opened.logits(Prompt([Embeddings(half), AFTER]))
    assert torch.equal(found, opened.logits(Prompt([Embeddings(half.float()), AFTER])))


def nan_row() -> torch.Tensor:
    rows = others(3, 1)
    rows[1, 5], rows[2, 0] = torch.nan, torch.inf
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (others(3, 1)[:, :-1], r"rows of the model's hidden size.*seen: \[3, 31\].*\[at least 1, 32\]"),
        (others(3, 1)[0], r"seen: \[32\]"),
        (others(3, 1)[None], r"seen: \[1, 3, 32\]"),
        (torch.zeros(0, HIDDEN), r"seen: \[0, 32\]"),
        (torch.zeros(3, HIDDEN, dtype=torch.int64), "must be of floats.*int64"),
        (torch.zeros(3, HIDDEN, dtype=torch.complex64), "must be of floats.*complex64"),
        (np.array([["a"]]), "must be a tensor or array of floats"),
        (None, "must be a tensor or array of floats"),
        ([[1.0], [2.0, 3.0]], "must be a tensor or array of floats"),
        (torch.empty(3, HIDDEN, device="meta"), "must be a tensor or array of floats"),
        (nan_row(), "not finite.*2 of 96 are NaN, infinite or too large.*fp32"),
    ],
)
def test_rows_that_are_refused(opened: LLM, rows: Any, message: str) -> None:
    for ask in (opened.generate, opened.logits, opened.log_likelihood, opened.embed):
        with pytest.raises(RequestError, match=f"(?s){message}"):
            ask(Prompt([BEFORE, Embeddings(rows)]))
    assert not opened.executor.has_work


def test_rows_beyond_the_engine_s_dtype_are_refused(llama: Side) -> None:
    with LLM(llama.folder, "cpu", compute_dtype="bf16") as llm:
        assert greedy(llm, Prompt([Embeddings(others(3, 1, scale=1e6))]))
    with LLM(llama.folder, "cpu", compute_dtype="fp16") as llm:
        with pytest.raises(RequestError, match=r"too large.*6\.55e\+04 in fp16"):
            llm.generate(Prompt([Embeddings(others(3, 1, scale=1e6))]))
        assert greedy(llm, Prompt([Embeddings(others(3, 1))]))


def test_what_computes_nothing_takes_no_embeddings(opened: LLM) -> None:
    with pytest.raises(RequestError, match=r"only text and token ids.*seen: embeddings"):
        opened.explain(Prompt([BEFORE, Embeddings(others(2, 1))]))
    with pytest.raises(RequestError, match=r"only text and token ids.*seen: embeddings"):
        Prompt([Embeddings(others(2, 1))]).token_ids(None)


@pytest.mark.parametrize("quant", ["w8a16", "w4a8"])
def test_quantized_engines(tmp_path: Path, quant: str) -> None:
    """``w4a8`` rotates the hidden states: rows are rotated as the embedding's were."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model: Any = save_model(tiny_config("llama", **sizes), tmp_path / "llama")
    with LLM(
        build(tmp_path / "llama", tmp_path / "out", quant=quant, device="cpu", proof=False), "cpu"
    ) as llm:
        rows = model.get_input_embeddings()(torch.tensor(MIDDLE)).detach()
        found = llm.logits(Prompt([BEFORE, Embeddings(rows), AFTER]))
        assert torch.equal(found, llm.logits([*BEFORE, *MIDDLE, *AFTER]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_on_a_gpu_with_text_in_graphs(kind: str, tmp_path: Path) -> None:
    """Steps with rows run without a graph; before and after them graphs go on, and none keeps a row."""
    model: Any = make_model(tiny_config(kind))
    side = Side(kind, tmp_path)
    rows = model.get_input_embeddings()(torch.tensor(MIDDLE)).detach()
    runtime = RuntimeConfig(block_size=BLOCK, token_budget=64)
    with LLM(side.folder, "cuda", compute_dtype="fp32", runtime=runtime) as llm:
        llm.warm_up([1, 2, 4])
        ids = [[*BEFORE, *MIDDLE, *AFTER], random_ids(30, 6), [*MIDDLE, *BEFORE]]
        expected = greedy(llm, ids)
        prompts: list[Any] = [
            Prompt([BEFORE, Embeddings(rows.cuda()), AFTER]),
            ids[1],
            Prompt([Embeddings(rows), BEFORE]),
        ]
        assert greedy(llm, prompts) == expected
        assert greedy(llm, ids) == expected
        with LLM(side.folder, "cpu") as cpu:
            free = Prompt([BEFORE, Embeddings(others(7, 3)), AFTER])
            assert float((llm.logits(free) - cpu.logits(free)).abs().max()) < 1e-3
