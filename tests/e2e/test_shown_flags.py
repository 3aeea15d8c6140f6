"""Every flag that an out-of-memory error shows is taken by the verb that failed, and then it runs.

A CPU plays a GPU of any size: what the ledger counts is all that the device has.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams, build
from ingot.building.ledger_source import read_setting
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine import engine_loader as loader
from ingot.errors import OutOfMemoryError
from ingot.measure.bench.ceiling import Ceiling
from ingot.memory import memory_error
from ingot.memory.ledger import CONTEXT_BYTES, WORKSPACE_BYTES, Capacity, Ledger, MemorySetting, ledger
from ingot.memory.memory_error import explained
from ingot.memory.memory_fixes import Fix
from ingot.runtime import executor, setup
from ingot.runtime.step.runner import Runner
from tests.e2e.advice import MAX_SEQ_LEN, VERBS, call, shown
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny
from tests.tiny_models import random_ids, save_model, tiny_config

GIB = 1 << 30
KIB = 1 << 10
DEFAULT = RuntimeConfig()
SetCard = Callable[[int], Capacity]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines of one checkpoint: as usual, of very many requests, and in fp32."""
    root = tmp_path_factory.mktemp("shown")
    checkpoint = write_tiny(root / "hf", seq_length=MAX_SEQ_LEN)
    limits: dict[str, Any] = {"device": "cpu", "max_seq_len": MAX_SEQ_LEN, "proof": False}
    return {
        "checkpoint": checkpoint,
        "usual": build(checkpoint, root / "usual", max_batch_size=8, **limits),
        "wide": build(checkpoint, root / "wide", max_batch_size=4096, **limits),
        "fp32": build(checkpoint, root / "fp32", max_batch_size=8, dtype="fp32", **limits),
    }


@pytest.fixture(params=["weights", "cache"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SetCard:
    """card(bytes): from now on the device has this many, and runs out while it loads or sizes its cache."""
    there: list[Capacity] = []

    def setting_of(*args: Any, **values: Any) -> MemorySetting:
        return MemorySetting(*args, **values | {"device": "cuda"})

    def room(model: Any, device: Any, setting: MemorySetting) -> tuple[int, int]:
        found = ledger(setting, there[-1])
        return (found.usable or 0) - found.fixed, found.of("activations")

    @contextmanager
    def loading(what: str, setting: MemorySetting, device: Any, own: int | None = None) -> Iterator[Capacity]:
        on_card = setting.replace(device="cuda")
        with explained(what, on_card, device, own=own) as capacity:
            if request.param == "weights" and not ledger(on_card, capacity).loads:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            yield capacity

    def set_card(total: int) -> Capacity:
        there.append(Capacity("a card", total))
        monkeypatch.setattr(loader, "explained", loading)
        monkeypatch.setattr(loader, "compute_dtypes", lambda m, *_: m.build.dtypes)
        monkeypatch.setattr(setup, "MemorySetting", setting_of)
        monkeypatch.setattr(setup, "_gpu_room", room)
        for module in (memory_error, executor):
            monkeypatch.setattr(module, "capacity_of", lambda device, own=None: there[-1])
        return there[-1]

    return set_card


def bill(engine: Path, runtime: RuntimeConfig = DEFAULT) -> Ledger:
    return ledger(read_setting(str(engine), runtime=runtime))


def card_lacking(found: Ledger, short: int) -> int:
    """The size of a card that lacks ``missing`` bytes for one longest request."""
    setting = found.setting
    needed = found.fixed + setting.blocks_per_request * setting.block_bytes
    return math.ceil((needed - short) / setting.runtime.memory_fraction)


class TestRun:
    """Every kind of fix, by ``ingot run``."""

    def check(self, engine: Path, tmp: Path, expected: list[str], *asked: object) -> None:
        failed = call(VERBS["run"], tmp, engine, *asked)
        assert failed.exit_code == 1
        found = shown(failed.stderr)
        assert [" ".join(re.findall(r"--[a-z-]+", fix)) for fix in found] == expected
        for fix in found:
            done = call(VERBS["run"], tmp, engine, *asked, *fix.split())
            assert done.exit_code == 0, (fix, done.stderr)
            assert len(json.loads(done.stdout)["answers"][0]["token_ids"]) == 3

    def test_headroom_limits_and_steps(self, engines: dict[str, Path], card: SetCard, tmp_path: Path) -> None:
        card(card_lacking(bill(engines["usual"]), 100 * KIB))
        self.check(engines["usual"], tmp_path, ["--memory-fraction", "--max-seq-len", "--token-budget"])

    def test_batch(self, engines: dict[str, Path], card: SetCard, tmp_path: Path) -> None:
        card(card_lacking(bill(engines["wide"]), 100 * KIB))
        self.check(engines["wide"], tmp_path, ["--memory-fraction", "--max-batch-size", "--max-seq-len"])

    @pytest.mark.parametrize("cache", [[], ["--cache-tokens", 2048]], ids=["", "a cache of its own"])
    def test_several_changes_at_once(
        self, engines: dict[str, Path], card: SetCard, tmp_path: Path, cache: list[object]
    ) -> None:
        """Where no change alone is enough; the last is a larger card, in words."""
        runtime = RuntimeConfig(memory_fraction=0.95, cache_tokens=2048 if cache else None)
        whole = bill(engines["usual"], runtime)
        steps = whole.setting.replace(runtime=runtime.replace(token_budget=64))
        card(card_lacking(whole, whole.of("activations") - ledger(steps).of("activations") + 100 * KIB))
        asked = ["--memory-fraction", 0.95, *cache]
        failed = call(VERBS["run"], tmp_path, engines["usual"], *asked)
        together, larger = shown(failed.stderr)
        words = "--max-batch-size 1 --max-seq-len [0-9]+ --token-budget 64" + " --cache-tokens [0-9]+" * bool(
            cache
        )
        assert re.fullmatch(words, together)
        assert larger == "a card sold as 8 GB, with these settings"
        assert call(VERBS["run"], tmp_path, engines["usual"], *asked, *together.split()).exit_code == 0

    def test_a_larger_card_alone(self, engines: dict[str, Path], card: SetCard, tmp_path: Path) -> None:
        card(GIB)
        failed = call(VERBS["run"], tmp_path, engines["usual"])
        assert shown(failed.stderr) == ["a card sold as 8 GB, with these settings"]

    def test_another_dtype_is_another_build(
        self, engines: dict[str, Path], card: SetCard, tmp_path: Path
    ) -> None:
        asked = ["--memory-fraction", 0.95]
        whole = bill(engines["fp32"], RuntimeConfig(memory_fraction=0.95))
        activations = whole.of("activations") * 0.45
        card(card_lacking(whole, int(activations)))
        failed = call(VERBS["run"], tmp_path, engines["fp32"], *asked)
        (again,) = [fix for fix in shown(failed.stderr) if "build" in fix]
        match = re.fullmatch("`ingot build` with (--dtype fp16)", again)
        assert match is not None
        words = (*match[1].split(), "--max-seq-len", MAX_SEQ_LEN, "--max-batch-size", 8, "--device", "cpu")
        target = tmp_path / "fp16"
        assert ingot("build", engines["checkpoint"], "-o", target, "--no-proof", *words).exit_code == 0
        assert call(VERBS["run"], tmp_path, target, *asked).exit_code == 0

    @pytest.mark.parametrize("card", ["cache"], indirect=True)
    def test_a_cache_below_one_request(self, engines: dict[str, Path], card: SetCard, tmp_path: Path) -> None:
        self.check(engines["usual"], tmp_path, ["--cache-tokens", "--max-seq-len"], "--cache-tokens", 128)


class TestVerbs:
    @pytest.mark.parametrize("card", ["cache"], indirect=True)
    @pytest.mark.parametrize("verb", VERBS)
    def test_each_takes_what_it_shows(
        self,
        engines: dict[str, Path],
        card: SetCard,
        tmp_path: Path,
        verb: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        ceiling = Ceiling(1.0, 1.0, "fp16", 1, 1)  # measuring one takes half a minute in fp16 on a CPU
        monkeypatch.setattr("ingot.measure.bench.bench_session.measure_ceiling", lambda *_: ceiling)
        card(card_lacking(bill(engines["usual"]), 100 * KIB))
        failed = call(VERBS[verb], tmp_path, engines["usual"])
        assert failed.exit_code == (2 if verb == "eval" else 1)
        found = shown(failed.stderr)
        assert len(found) == 3
        for fix in found:
            done = call(VERBS[verb], tmp_path, engines["usual"], *fix.split())
            assert done.exit_code == 0, (fix, done.stderr)

    @pytest.mark.parametrize("card", ["cache"], indirect=True)
    def test_verify_shows_its_one_flag(self, engines: dict[str, Path], card: SetCard, tmp_path: Path) -> None:
        engine = build(engines["checkpoint"], tmp_path / "proven", device="cpu", max_batch_size=8)
        setting = read_setting(str(engine), runtime=RuntimeConfig(cache_tokens=2048))
        card(card_lacking(ledger(setting), 100 * KIB))
        failed = ingot("verify", engine, "--device", "cpu")
        assert failed.exit_code == 1
        first, *others = shown(failed.stderr)
        assert all(fix.startswith(("`ingot build` with", "a card sold as")) for fix in others)
        assert ingot("verify", engine, "--device", "cpu", *first.split()).exit_code == 0

    @pytest.mark.parametrize("verb", ["run", "chat"])
    def test_a_step_that_runs_out(
        self, engines: dict[str, Path], tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> Any:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 2 bytes")

        with monkeypatch.context() as patched:
            patched.setattr(Runner, "run", fail)
            failed = call(VERBS[verb], tmp_path, engines["usual"])
        assert failed.exit_code == 1
        assert "a step does not fit" in failed.stderr
        assert shown(failed.stderr) == ["--token-budget 1024"]
        assert call(VERBS[verb], tmp_path, engines["usual"], "--token-budget", 1024).exit_code == 0


def arguments(fix: Fix) -> dict[str, Any]:
    """Those of ``LLM`` that a fix names."""
    limits = {"max_batch_size": fix.setting.max_batch_size, "max_seq_len": fix.setting.max_seq_len}
    return limits | {"runtime": fix.setting.runtime}


class TestPython:
    @pytest.mark.parametrize("card", ["cache"], indirect=True)
    def test_the_error_names_the_arguments(self, engines: dict[str, Path], card: SetCard) -> None:
        card(card_lacking(bill(engines["usual"]), 100 * KIB))
        with pytest.raises(OutOfMemoryError) as error:
            LLM(engines["usual"], "cpu")
        assert error.value.ledger is not None
        named = {"LLM": functools.partial(LLM, engines["usual"], "cpu"), "RuntimeConfig": RuntimeConfig}
        for reported in error.value.ledger["fixes"]:
            if reported["cost"] != "hardware":
                found = eval(reported["where"], named)
                is_llm = isinstance(found, LLM)
                assert (found if is_llm else LLM(engines["usual"], "cpu", runtime=found)).generate("Hi")


@pytest.mark.gpu
class TestGpu:
    """A GPU that says it has less memory than it has: each fix that is shown then loads and answers.

    It is not filled: other tests may run beside this one.
    """

    @pytest.fixture(scope="class")
    def engine(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        root = tmp_path_factory.mktemp("gpu")
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
        changes = {"num_key_value_heads": 8, "num_hidden_layers": 4, "max_position_embeddings": 65536}
        save_model(tiny_config("llama", **sizes, **changes), root / "hf", seed=1)
        limits: dict[str, Any] = {"max_batch_size": 1024, "max_seq_len": 65536}
        return build(root / "hf", root / "engine", dtype="fp16", tune=False, proof=False, **limits)

    @pytest.mark.parametrize("runtime", [DEFAULT, RuntimeConfig(token_budget=32768)], ids=["", "long steps"])
    def test_each_fix_loads_and_answers(
        self, engine: Path, runtime: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids, params = random_ids(20, seed=3), SamplingParams(max_new_tokens=5, ignore_eos=True)
        small = LLM(engine, "cuda", max_seq_len=64, max_batch_size=1, runtime=RuntimeConfig(cache_tokens=64))
        expected = list(small.generate(ids, params)[0].token_ids)
        del small
        torch.cuda.empty_cache()
        total = card_lacking(bill(engine, runtime), short=8 << 20)
        self.pretend(monkeypatch, total)
        fixes, text = self.fixes(engine, runtime)
        names = {next(iter(fix.changes)) for fix in fixes}
        assert {"memory_fraction", "max_seq_len"} <= names, text
        assert all(fix.where in text for fix in fixes[:3]), ([fix.where for fix in fixes], text)
        for fix in fixes:
            if fix.cost != "hardware":
                self.pretend(monkeypatch, total)
                before = torch.cuda.memory_allocated()
                assert self.answer(engine, fix, ids, params) == expected, fix.changes
                gc.collect()
                torch.cuda.empty_cache()
                left = torch.cuda.memory_allocated() - before
                assert left <= WORKSPACE_BYTES, f"{fix.changes}: {left} bytes stay"

    def test_a_tiny_share(self, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        total = torch.cuda.mem_get_info()[1]
        self.pretend(monkeypatch, total)
        fixes, _ = self.fixes(engine, RuntimeConfig(memory_fraction=max(GIB / total, 0.005)))
        assert next(iter(fixes[0].changes)) == "memory_fraction"
        assert LLM(engine, "cuda", **arguments(fixes[0])).generate([1, 2, 3])

    @staticmethod
    def answer(engine: Path, fix: Fix, ids: list[int], params: SamplingParams) -> list[int]:
        """What the engine answers with a fix; an error says which it was and how much there was."""
        try:
            return list(LLM(engine, "cuda", **arguments(fix)).generate(ids, params)[0].token_ids)
        except OutOfMemoryError as error:
            there = f"{torch.cuda.memory_allocated()} allocated, {torch.cuda.mem_get_info()} free and in all"
            pytest.fail(f"{fix.changes} ({fix.needed} of {fix.usable} bytes) does not load: {error}; {there}")

    @staticmethod
    def pretend(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
        """The GPU has ``total`` bytes, of which only tensors that are made from now on take any: what others
        left in the allocator, and what it keeps of it, does not count. An engine that ran is such another:
        the matrix library keeps a workspace for each stream of its graphs (32 MiB), and the next engine's
        graphs have streams of their own; a process that starts with a fix's flags has none of them. Nor has
        it the holes that others left, of which the allocator gives up to 1 MiB more than was asked for: what
        was asked for counts.
        """
        gc.collect()

        def asked_for(which: str) -> int:
            return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])

        left = asked_for("current")

        def mem_get_info(device: Any = None) -> tuple[int, int]:
            return total - CONTEXT_BYTES - (asked_for("current") - left), total

        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: asked_for("current"))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: asked_for("peak"))

    @staticmethod
    def fixes(engine: Path, runtime: RuntimeConfig) -> tuple[list[Fix], str]:
        """What the error of an engine that does not load offers; nothing of it stays on the GPU."""
        try:
            LLM(engine, "cuda", runtime=runtime)
        except OutOfMemoryError as error:
            found, text = (error.ledger or {})["fixes"], str(error)
        else:
            pytest.fail(f"it loaded, with {torch.cuda.mem_get_info()} bytes free and in all")
        gc.collect()
        torch.cuda.empty_cache()
        return [Fix.from_json(reported) for reported in found], text
