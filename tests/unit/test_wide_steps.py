"""Steps with more tokens than the budget, where prompts fill them: when, for whom, and what memory allows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import SamplingParams
from ingot.errors import ConfigError
from ingot.memory.ledger import Capacity, ledger
from ingot.memory.memory_fixes import CARDS
from ingot.memory.wide_steps import with_wide_steps
from ingot.runtime import setup
from ingot.runtime.rehearsal import rehearse
from ingot.runtime.scheduling.kv_cache import BlockManager
from ingot.runtime.scheduling.scheduler import Chunking, Scheduler
from tests.unit.fake_executor import check_empty, fake_executor
from tests.unit.test_ledger import SHAPES, read_setting, seven_b
from tests.unit.test_scheduler import request, run, shares


def scheduler(
    *prompts: int, blocks: int = 64, batch: int = 16, chunking: Chunking | None = None, wide: int = 32
) -> Scheduler:
    """With a budget of 8 tokens, and requests a, b, …"""
    s = Scheduler(BlockManager(blocks, 4, False), batch, 8, None, chunking, wide)
    for index, prompt in enumerate(prompts):
        s.add(request("abcdefghijklmnop"[index], prompt, first=100 * index))
    return s


def counts(s: Scheduler) -> list[int]:
    return [item.count for item in run(s).requests]


class TestWhen:
    def test_prompts_fill_it(self) -> None:
        s = scheduler(10, 10, 10, 10)
        assert shares(run(s)) == [("a", 0, 10), ("b", 0, 10), ("c", 0, 10), ("d", 0, 2)]

    def test_a_token_less_runs_as_usual(self) -> None:
        assert counts(scheduler(10, 10, 11)) == [8]
        assert counts(scheduler(10, 10, 12)) == [10, 10, 12]

    def test_a_long_prompt_that_runs_fills_it_alone(self) -> None:
        s = scheduler(77)
        assert [counts(s) for _ in range(4)] == [[32], [32], [8], [5]]

    def test_those_that_cannot_enter_do_not_count(self) -> None:
        assert counts(scheduler(*[8] * 8, batch=3)) == [8]
        assert counts(scheduler(*[8] * 8, batch=4)) == [8] * 4
        assert counts(scheduler(*[8] * 8, blocks=7)) == [8]
        assert counts(scheduler(*[8] * 8, blocks=8)) == [8] * 4

    def test_decodes_come_first_and_take_their_tokens(self) -> None:
        s = scheduler(3)
        run(s)
        for name in "xyz":
            s.add(request(name, 11, first=40))
        assert shares(run(s)) == [("a", 3, 1), ("x", 0, 11), ("y", 0, 11), ("z", 0, 9)]

    def test_a_step_without_one_to_come_is_not_wide(self) -> None:
        assert counts(scheduler(40, wide=0)) == [8]
        s = scheduler(40, wide=4)
        assert counts(s) == [8]


class TestStreams:
    CUT = Chunking(tokens=2, beyond=8)

    def test_they_stall_for_no_more_than_a_usual_step(self) -> None:
        s = scheduler(3, chunking=self.CUT)
        run(s)
        for name in "wxyz":
            s.add(request(name, 8, first=40))
        assert sum(counts(s)) <= 8

    def test_without_decodes_a_server_takes_it(self) -> None:
        assert counts(scheduler(64, chunking=self.CUT)) == [32]

    def test_whoever_reads_all_logits_counts_as_a_chunk_of_them(self) -> None:
        s = Scheduler(BlockManager(2000, 4, False), 4, 64, None, None, 600)
        for name in "ab":
            s.add(request(name, 400, all_logits=True))
        assert counts(s) == [64]


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_usual_steps(seed: int) -> None:
    """Over a runner that checks what it reads, with prompts that come and go, and preemptions."""

    def answers(wide: int) -> tuple[dict[str, list[int]], int]:
        rng = random.Random(seed)
        executor, runner = fake_executor(40, run_ahead=seed % 2 == 0, token_budget=8, prompt_budget=wide)
        found: dict[str, list[int]] = {}
        for number in range(24):
            prompt = [rng.randrange(1, 23) for _ in range(rng.choice((1, 5, 17, 30)))]
            executor.add(f"r{number}", prompt, SamplingParams(max_new_tokens=6, ignore_eos=True))
            for _ in range(rng.choice((0, 0, 0, 2))):
                collect(executor, found)
        while executor.has_work:
            collect(executor, found)
        check_empty(executor)
        return found, max(step.layout.num_tokens for step in runner.steps)

    (usual, small), (wide, large) = answers(0), answers(32)
    assert wide == usual
    assert small <= 8 < large <= 33


def collect(executor: Any, found: dict[str, list[int]]) -> None:
    for update in executor.step():
        found.setdefault(update.request_id, []).extend(update.token_ids)


@pytest.mark.parametrize(
    ("longest", "blocks", "wide"), [(2, 2000, False), (40, 50, False), (40, 2000, True), (4096, 2000, True)]
)
def test_a_rehearsal_has_one_where_it_fits(longest: int, blocks: int, wide: bool) -> None:
    sizes = {"token_budget": 64, "prompt_budget": 256, "max_batch_size": 8, "max_seq_len": longest}
    executor, runner = fake_executor(blocks, run_ahead=True, **sizes)
    rehearse(executor)
    assert (max(step.layout.num_tokens for step in runner.steps) == 256) == wide
    check_empty(executor)


class TestMemory:
    def budget(self, card: str, **fields: Any) -> int:
        setting = seven_b(**fields)
        found = with_wide_steps(setting, Capacity(card, CARDS[card]))
        return found.runtime.step_budget

    def test_a_large_card_has_room(self) -> None:
        assert self.budget("80 GB") == 8192
        assert self.budget("80 GB", max_batch_size=256) == 8192

    def test_a_small_card_keeps_its_cache(self) -> None:
        assert self.budget("16 GB", max_batch_size=1) == 2048

    def test_what_fits_before_fits_with_it(self) -> None:
        """A card is made so large that the usual steps just fit."""
        usual = seven_b(runtime=RuntimeConfig(prompt_budget=2048, memory_fraction=1.0))
        auto = seven_b(runtime=RuntimeConfig(memory_fraction=1.0))
        needed = ledger(usual).needed
        assert with_wide_steps(auto, Capacity("gpu", needed)).runtime.step_budget == 2048
        assert with_wide_steps(auto, Capacity("gpu", needed + (2 << 30))).runtime.step_budget == 8192

    def test_a_budget_of_ones_own_is_kept(self) -> None:
        for wanted in (100, 2048, 4096):
            runtime = RuntimeConfig(prompt_budget=wanted)
            assert self.budget("80 GB", runtime=runtime) == max(wanted, 2048)
        assert self.budget("80 GB", runtime=RuntimeConfig(token_budget=512)) == 2048

    def test_a_long_step_is_wide_enough(self) -> None:
        assert self.budget("80 GB", runtime=RuntimeConfig(token_budget=32768)) == 32768
        assert self.budget("80 GB", runtime=RuntimeConfig(token_budget=4096)) == 8192

    @pytest.mark.parametrize(("lost", "budget"), [(0, 8192), (10, 8192), (200, 2048)])
    def test_the_measurement_decides(self, lost: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a cache of 1000 blocks wide steps take so many."""
        setting, capacity = seven_b(max_batch_size=256), Capacity("card", CARDS["80 GB"])
        room = (1000 - lost) * setting.block_bytes
        monkeypatch.setattr(setup, "_gpu_room", lambda model, device, wide: (room, 0))
        found = setup._widened(None, torch.device("cuda"), setting, capacity, 1000)  # type: ignore[arg-type]
        assert (found[0], found[1].step_budget) == (1000 - lost if budget > 2048 else 1000, budget)

    @pytest.mark.parametrize(
        ("shape", "budget"), [("gpt2-medium", 2048), ("llama31-8b", 8192), ("gemma3-4b", 8192)]
    )
    def test_small_layers_have_none(self, shape: str, budget: int) -> None:
        """A replayed graph is launched at once, and their kernels one by one take longer than they run."""
        setting = read_setting(str(SHAPES / f"{shape}.json"), max_seq_len=1024, device="cuda")
        found = with_wide_steps(setting, Capacity("card", CARDS["80 GB"]))
        assert found.runtime.step_budget == budget

    def test_a_cpu_has_none(self) -> None:
        assert self.budget("80 GB", device="cpu") == 2048

    def test_its_activations_are_counted(self) -> None:
        wide = ledger(seven_b(runtime=RuntimeConfig(prompt_budget=8192)))
        usual = ledger(seven_b())
        assert wide.of("activations") > 3 * usual.of("activations")
        assert wide.needed > usual.needed

    def test_an_impossible_one_is_named(self) -> None:
        with pytest.raises(ConfigError, match="prompt_budget must be >= 1"):
            RuntimeConfig(prompt_budget=0)
