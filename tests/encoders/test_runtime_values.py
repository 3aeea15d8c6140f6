"""What a runtime config says is what the executor has, value by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.step_sizes import most_tokens
from tests.encoders.speech import write_speech
from tests.tiny_models import random_ids, save_model, tiny_config

OTHER: dict[str, Any] = {  # than the defaults
    "block_size": 8, "token_budget": 40, "prompt_chunk": 5, "long_prompt": 11, "prompt_share": 0.3,
    "cache_tokens": 203, "prefix_reuse": False, "kv_dtype": "int8",
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(tiny_config("llama"), folder, seed=3)
    return folder


def of(folder: Path, **values: Any) -> LLM:
    return LLM(folder, "cpu", max_batch_size=3, max_seq_len=50, runtime=RuntimeConfig(**values))


def test_every_value_arrives(llama: Path) -> None:
    executor = of(llama, **OTHER).executor
    blocks, scheduler, runner = executor.blocks, executor.scheduler, executor.runner
    assert (blocks.block_size, blocks.num_blocks, blocks.prefix_reuse) == (8, 26, False)
    assert scheduler.cache is blocks
    assert (scheduler.max_batch_size, scheduler.token_budget, scheduler.encoders) == (3, 40, None)
    assert (scheduler.chunking.tokens, scheduler.chunking.beyond) == (5, 11)
    pace = scheduler.chunking.pace
    assert pace is not None
    assert runner.layered is not None
    assert runner.layered.pace is pace
    assert (pace.share, pace.num_layers) == (0.3, 2)
    assert [(cache.keys.dtype, cache.keys.shape[0], cache.block_size) for cache in runner.caches] == [
        (torch.int8, 26, 8)
    ] * 2
    assert (runner.block_size, runner.max_seq_len, runner.most_tokens) == (8, 50, most_tokens(40, 3))
    admission = executor.admission
    assert (admission.max_seq_len, admission.max_batch_size, admission.blocks) == (50, 3, blocks)
    assert (admission.vocab_size, admission.inputs) == (runner.model.config.vocab_size, None)
    assert not executor.run_ahead, "a CPU has nothing to run ahead of"


def test_what_is_not_said_is_the_default(llama: Path) -> None:
    executor, usual = of(llama).executor, RuntimeConfig()
    assert (executor.blocks.block_size, executor.blocks.prefix_reuse) == (64, True)
    assert executor.blocks.num_blocks == 3, "a full batch of longest requests"
    assert executor.scheduler.token_budget == usual.token_budget
    assert (executor.scheduler.chunking.tokens, executor.scheduler.chunking.pace) == (None, None)
    assert {cache.keys.dtype for cache in executor.runner.caches} == {executor.runner.model.dtype}


@pytest.mark.parametrize("reuse", [True, False])
def test_a_prompt_is_found_again_only_where_the_config_says_so(reuse: bool, llama: Path) -> None:
    llm = of(llama, block_size=8, prefix_reuse=reuse)
    for _ in range(2):
        llm.generate([random_ids(30)], SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert llm.executor.scheduler.prefix_hits == (24 if reuse else 0)
    assert llm.executor.scheduler.prefix_queries == (60 if reuse else 0)


def test_the_encoder_s_values_arrive(tmp_path: Path) -> None:
    write_speech(tmp_path)
    llm = LLM(
        tmp_path,
        "cpu",
        max_batch_size=2,
        runtime=RuntimeConfig(block_size=8, encoder_budget=77, encoder_positions=100),
    )
    encoders, inputs = llm.executor.scheduler.encoders, llm.executor.admission.inputs
    assert encoders is not None
    assert inputs is not None
    assert (encoders.budget, encoders.block_size) == (77, 8)
    assert encoders.num_blocks * 8 >= 100 > (encoders.num_blocks - 1) * 8
    assert inputs.cache_positions == encoders.num_blocks * 8
    second = [cache.encoded for cache in llm.executor.runner.caches]
    assert {len(one.keys) for one in second if one is not None} == {encoders.num_blocks}
    assert None not in second
