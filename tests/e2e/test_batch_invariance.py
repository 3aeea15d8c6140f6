"""With ``batch_invariant`` a request's logits have the same bits however it is run; on a GPU in 16 bits.

Every run is compared with the request alone, in one piece and uncached; each test proves that its way of
running happened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.layers.attention import Attention
from ingot.layers.linear import Linear
from ingot.quant.schemes.scheme_registry import InvariantDense
from ingot.runtime.scheduling.scheduled_batch import ScheduledBatch
from tests.e2e.watch import check_idle, watch
from tests.tiny_models import random_ids, save_model, tiny_config

WIDE = {"vocab_size": 997, "hidden_size": 256, "intermediate_size": 688, "head_dim": 64}
WIDE |= {"max_position_embeddings": 512}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mha": ("llama", WIDE | {"num_key_value_heads": 4}),
    "gqa": ("llama", WIDE | {"num_key_value_heads": 2}),
    "gpt2": ("gpt2", {"vocab_size": 997, "n_positions": 512, "n_embd": 256}),
    "window": ("mistral", WIDE | {"sliding_window": 90}),
    "qwen3": ("qwen3", WIDE),
    "gemma2": ("gemma2", WIDE | {"sliding_window": 90}),
    "gemma3": ("gemma3", WIDE | {"sliding_window": 90}),
}
NORMS = ("gqa", "gpt2")  # a kind with each
PLACES = [
    pytest.param("cpu", "fp32", id="cpu"),
    pytest.param("cuda", "fp16", id="fp16", marks=pytest.mark.gpu),
    pytest.param("cuda", "bf16", id="bf16", marks=pytest.mark.gpu),
]
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
PROMPTS = [random_ids(n, seed=n, vocab_size=997) for n in (7, 280, 64, 1, 33)]
OTHERS = [random_ids(1 + 7 * n % 90, seed=100 + n, vocab_size=997) for n in range(33)]
Rows = dict[tuple[tuple[int, ...], int], torch.Tensor]
Make = Callable[..., LLM]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(kind, device, dtype, token_budget=...): a batch-invariant LLM, made once for equal arguments."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def folder(kind: str) -> Path:
        name, changes = KINDS[kind]
        save_model(tiny_config(name, **changes), root / kind, seed=1)
        return root / kind

    @functools.cache
    def made(kind: str, device: str, dtype: str, batch: int = 8, **runtime: Any) -> LLM:
        values = {"block_size": 16, "cache_tokens": 16384, "batch_invariant": True} | runtime
        config = RuntimeConfig(**values, run_ahead=False)  # its logits never leave the graph
        return LLM(
            folder(kind), device, compute_dtype=dtype, max_batch_size=batch, max_seq_len=512, runtime=config
        )

    return made


@contextmanager
def logits_of(llm: LLM) -> Iterator[Rows]:
    """The logits that a request's tokens were chosen from, by its prompt and its length then."""
    rows: Rows = {}
    runner = llm.executor.runner
    run = runner.run

    def recorded(step: ScheduledBatch) -> torch.Tensor:
        logits = run(step)
        sampling = [item.request for item in step.requests if item.samples]
        bits = logits.cpu().view(torch.int16 if logits.dtype.itemsize == 2 else torch.int32)
        for row, request in zip(bits, sampling, strict=True):
            rows[tuple(request.prompt_ids), request.num_tokens] = row.clone()
        return logits

    runner.run = recorded  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        runner.run = run  # type: ignore[method-assign]


def run(llm: LLM, prompts: Sequence[list[int]]) -> Rows:
    """The logits' bits of all prompts, in flight together."""
    with logits_of(llm) as rows:
        llm.generate(list(prompts), GREEDY)
    check_idle(llm)
    assert rows
    return rows


@pytest.fixture
def expected(make: Make) -> Callable[..., Rows]:
    """Each prompt alone, in one piece, never from the cache, without graphs."""
    return functools.partial(_alone, make)


@functools.cache
def _alone(make: Make, kind: str, device: str, dtype: str) -> Rows:
    llm = make(kind, device, dtype, prefix_reuse=False, cuda_graphs=False)
    rows: Rows = {}
    for prompt in PROMPTS:
        rows |= run(llm, [prompt])
    assert len(rows) == 12 * len(PROMPTS)
    return rows


def assert_same(rows: Rows, expected: Rows, prompts: Sequence[list[int]] = PROMPTS) -> None:
    """These prompts' logits are bitwise those expected."""
    wanted = {tuple(p) for p in prompts}
    mine = {key: row for key, row in rows.items() if key[0] in wanted}
    assert len(mine) == 12 * len(prompts), "a text took another turn"
    assert [key for key, row in mine.items() if not torch.equal(row, expected[key])] == []


@pytest.mark.stays("gqa-33", "gpt2-9", "window-2")
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, marks=pytest.mark.slow if size > 2 and kind not in NORMS else ())
        for kind in KINDS
        for size in (2, 7, 8, 9, 33)
    ],
)
def test_in_any_company(
    make: Make, expected: Callable[..., Rows], kind: str, size: int, device: str, dtype: str
) -> None:
    llm = make(kind, device, dtype, batch=40)
    others = OTHERS[: size - 1]
    some = 1 if size > 9 else 2 if size > 2 else len(PROMPTS)
    for prompt in PROMPTS[:some] if device == "cpu" else PROMPTS:
        with watch(llm) as steps:
            rows = run(llm, [*others[: size // 2], prompt, *others[size // 2 :]])
        assert steps.largest_batch == size
        assert_same(rows, expected(kind, device, dtype), [prompt])


@pytest.mark.stays("64-gqa", "2048-gpt2", "16-window")
@pytest.mark.grid(1)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [16, 64, 2048])
def test_in_any_chunks(
    make: Make, expected: Callable[..., Rows], kind: str, device: str, dtype: str, budget: int
) -> None:
    llm = make(kind, device, dtype, token_budget=budget)
    with watch(llm) as steps:
        rows = run(llm, PROMPTS)
    assert (steps.chunks > 0) == (budget < 2048)
    assert_same(rows, expected(kind, device, dtype))


@pytest.mark.stays("True-gqa")
@pytest.mark.grid(1)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("kind", ["mha", "gqa", "gpt2", "window"])
@pytest.mark.parametrize("reuse", [False, True])
def test_after_a_preemption(
    make: Make, expected: Callable[..., Rows], kind: str, device: str, dtype: str, reuse: bool
) -> None:
    llm = make(kind, device, dtype, block_size=4, cache_tokens=512, prefix_reuse=reuse, token_budget=100)
    prompts = [PROMPTS[1], *OTHERS[5:9], PROMPTS[0]]
    with watch(llm) as steps:
        rows = run(llm, [*prompts, PROMPTS[4]])
    assert steps.preemptions > 0
    assert_same(rows, expected(kind, device, dtype), [PROMPTS[i] for i in (0, 1, 4)])


@pytest.mark.stays("gpt2")
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("kind", ["mha", "gpt2"])
def test_on_a_cached_beginning(
    make: Make, expected: Callable[..., Rows], kind: str, device: str, dtype: str
) -> None:
    llm = make(kind, device, dtype)
    llm.generate([PROMPTS[1][:100], PROMPTS[2][:17]], GREEDY)
    with watch(llm) as steps:
        rows = run(llm, PROMPTS)
    assert sorted(set(steps.first_starts.values())) == [0, 16, 96]
    assert_same(rows, expected(kind, device, dtype))


@pytest.mark.stays("gqa", "gpt2", "qwen3")
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoded_token_is_a_prompts_token(
    make: Make, expected: Callable[..., Rows], kind: str, device: str, dtype: str
) -> None:
    """Teacher-forced logits of prompt and answer are, to the bit, those the answer was chosen from."""
    llm = make(kind, device, dtype)
    prompt = PROMPTS[1]
    answer = llm.generate(prompt, GREEDY)[0].token_ids
    forced = llm.logits(prompt + answer)
    alone = expected(kind, device, dtype)
    for length in range(len(prompt), len(prompt) + 12):
        bits = alone[tuple(prompt), length]
        wide = bits.view(
            {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
        ).float()
        assert torch.equal(forced[length - 1], wide)


def test_the_model_is_switched_over(make: Make) -> None:
    llm = make("gqa", "cpu", "fp32")
    modules = list(llm.engine.model.modules())
    linear = [m.scheme for m in modules if isinstance(m, Linear)]
    assert len(linear) == 9
    assert all(isinstance(scheme, InvariantDense) for scheme in linear)
    assert all(m.batch_invariant for m in modules if isinstance(m, Attention))
    assert not llm.executor.runner.forward.fused
    assert not RuntimeConfig().batch_invariant
