"""A CPU without enough memory is an error before anything is allocated, and its advice works."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, build
from ingot.building import random_weights
from ingot.building.ledger_source import read_setting
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import HostMemory
from ingot.engine import engine_loader as loader
from ingot.errors import OutOfMemoryError
from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.side.open_side import open_side
from ingot.measure.side.side_spec import SideSpec
from ingot.memory import memory_error
from ingot.memory.host_memory import dense_bytes, expect_class_room, expect_room
from ingot.memory.ledger import CPU_CACHE_BYTES, Ledger, ledger
from ingot.memory.memory_sizes import CPU_PROCESS_BYTES
from tests.e2e.advice import MAX_SEQ_LEN, VERBS, call, shown
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SHAPE = Path(__file__).parents[2] / "benchmarks" / "shapes" / "llama-7b.json"
REFUSED = "does not fit this machine's memory"
SetMemory = Callable[[int], None]

LIMITED = VERBS | {"verify": ("verify", "{engine}", "--device", "cpu")}
OTHERS = {
    "build": ("build", "{checkpoint}", "-o", "{tmp}/built", "--device", "cpu"),
    "doctor": ("doctor", "{checkpoint}", "--data", "{tmp}/text.txt", "--quant", "w8a16", "--budget",
               "kl_mean=1", "--out", "{tmp}/doctor.yaml", "--device", "cpu"),
    "align": ("align", "{engine}", "--reference", "{checkpoint}", "--original", "ingot", "--prompt", "Hi",
              "--device", "cpu"),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("memory") / "hf", seq_length=MAX_SEQ_LEN)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Path:
    target = checkpoint.parent / "engine"
    return build(checkpoint, target, device="cpu", max_seq_len=MAX_SEQ_LEN, max_batch_size=8)


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> SetMemory:
    """available(bytes): from now on the machine has this many left for an engine and its process."""

    def set_memory(num_bytes: int) -> None:
        found = HostMemory("this machine's memory", 64 * GIB, num_bytes, 0)
        monkeypatch.setattr(memory_error, "host_memory", lambda: found)

    ceiling = Ceiling(1.0, 1.0, "fp32", 1, 1)
    monkeypatch.setattr("ingot.measure.bench.bench_session.measure_ceiling", lambda *_: ceiling)
    return set_memory


def bill(path: Path, **values: Any) -> Ledger:
    return ledger(read_setting(str(path), device="cpu", **values))


def lacking(found: Ledger, short: int) -> int:
    """Available memory of which the setting's share is ``missing`` bytes too small."""
    return math.ceil((found.least - short) / found.setting.runtime.memory_fraction)


def flags(stderr: str) -> list[str]:
    """Those of an error's fixes; another machine has none."""
    return [fix for fix in shown(stderr) if fix.startswith("--")]


class TestBeforeAllocating:
    @pytest.fixture(autouse=True)
    def nothing_is_filled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fill(*_: Any) -> None:
            pytest.fail("weights were allocated")

        for module in (loader, random_weights):
            monkeypatch.setattr(module, "fill", fill)

    def test_an_engine(self, engine: Path, available: SetMemory) -> None:
        available(lacking(bill(engine), 1))
        with pytest.raises(OutOfMemoryError, match=REFUSED) as error:
            LLM(engine, "cpu")
        assert error.value.ledger is not None
        assert error.value.ledger["loads"] is False
        assert "available" in error.value.lines[1]

    def test_a_checkpoint(self, checkpoint: Path, available: SetMemory) -> None:
        available(lacking(bill(checkpoint), 1))
        with pytest.raises(OutOfMemoryError, match=REFUSED):
            LLM(checkpoint, "cpu")

    def test_random_weights(self, available: SetMemory) -> None:
        available(20 * GIB)
        with pytest.raises(OutOfMemoryError, match=REFUSED) as error:
            LLM.from_config(SHAPE, "cpu")
        assert "weights 15.5 GB" in error.value.lines[0]
        assert "of available memory (costs hardware)" in str(error.value)

    def test_one_byte_more_is_enough(self, engine: Path, available: SetMemory) -> None:
        available(lacking(bill(engine), 0) + 1)
        with pytest.raises(pytest.fail.Exception, match="weights were allocated"):
            LLM(engine, "cpu")


class TestShare:
    """What ``memory_fraction`` means on a CPU."""

    def test_the_cache_is_what_fits(self, engine: Path, available: SetMemory) -> None:
        found = bill(engine)
        available(lacking(found, -3 * found.setting.block_bytes - 1))
        llm = LLM(engine, "cpu")
        blocks = found.setting.blocks_per_request + 3
        assert llm.executor.blocks.num_blocks == blocks < found.setting.wanted_blocks
        assert llm.generate([[1, 2, 3]])[0].token_ids

    def test_a_smaller_share_leaves_less(self, engine: Path, available: SetMemory) -> None:
        found = bill(engine)
        available(math.ceil(found.needed / 0.9) + 1)
        assert LLM(engine, "cpu").executor.blocks.num_blocks == found.setting.wanted_blocks
        with pytest.raises(OutOfMemoryError, match=r"memory_fraction 0\.5: "):
            LLM(engine, "cpu", runtime=RuntimeConfig(memory_fraction=0.5))

    def test_memory_already_held_for_the_engine_counts_once(
        self, engine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of 5 GiB that this process holds, only its libraries and so many tensors are the engine's."""
        host = HostMemory("this machine's memory", 64 * GIB, 10 * GIB, 5 * GIB)
        monkeypatch.setattr(memory_error, "host_memory", lambda: host)
        cpu = torch.device("cpu")
        found = memory_error.capacity_of(cpu, own=2 * GIB)
        assert found.total - found.others == 12 * GIB + CPU_PROCESS_BYTES
        found = memory_error.capacity_of(cpu)
        assert found.total - found.others == 15 * GIB


class TestVerbs:
    @pytest.mark.stays("run", "verify")
    @pytest.mark.parametrize("verb", LIMITED)
    def test_each_takes_what_it_is_advised(
        self, engine: Path, checkpoint: Path, available: SetMemory, tmp_path: Path, verb: str
    ) -> None:
        values: dict[str, Any] = {}
        if verb == "verify":  # which runs cases of its own
            values = {"runtime": RuntimeConfig(cache_tokens=2048)}
        available(lacking(bill(engine, **values), 100 * KIB))
        failed = call(LIMITED[verb], tmp_path, engine)
        assert failed.exit_code == (2 if verb == "eval" else 1)
        assert REFUSED in failed.stderr
        found = flags(failed.stderr)
        assert found[0].startswith("--memory-fraction")
        assert not re.search("--quant|--dtype|--kv-dtype", failed.stderr)
        for fix in found:
            done = call(LIMITED[verb], tmp_path, engine, *fix.split())
            assert done.exit_code == 0, (fix, done.stderr)

    @pytest.mark.parametrize("verb", OTHERS)
    def test_those_that_hold_something_else(
        self, engine: Path, checkpoint: Path, available: SetMemory, tmp_path: Path, verb: str
    ) -> None:
        available(CPU_PROCESS_BYTES)
        failed = call(OTHERS[verb], tmp_path, engine, checkpoint=checkpoint)
        assert failed.exit_code == (1 if verb == "build" else 2)
        assert "fit this machine's memory" in failed.stderr
        assert not (tmp_path / "built").exists()
        available(GIB)
        done = call(OTHERS[verb], tmp_path, engine, checkpoint=checkpoint)
        assert "memory" not in done.stderr

    @pytest.mark.slow  # two processes; the next test's is as short of memory
    def test_a_sweep_ends_there(self, checkpoint: Path, tmp_path: Path) -> None:
        """In processes of their own, whose limits are real: 7B in 3 GiB of addresses."""
        words = ["sweep", "--random-weights", str(SHAPE), "--dtype", "fp32", "--batch", "1,2"]
        done = limited(*words, "--device", "cpu", "--no-png", "--out", str(tmp_path / "sweep"))
        assert "does not fit" in done.stdout + done.stderr
        assert "died" not in done.stdout + done.stderr

    @pytest.mark.slow
    def test_the_largest_of_all_is_refused_not_killed(self) -> None:
        done = limited("bench", "latency", "--random-weights", str(SHAPE), "--device", "cpu")
        assert done.returncode == 1
        assert REFUSED in done.stderr
        assert "ulimit -v" in done.stderr
        assert "Traceback" not in done.stderr


def limited(*words: str) -> subprocess.CompletedProcess[str]:
    """A verb in a process that may map 3 GiB."""
    command = ["bash", "-c", 'ulimit -v 3145728; exec "$@"', "-", sys.executable, "-m", "ingot", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


class TestDefaultCache:
    def test_it_is_bounded_and_reported(self, checkpoint: Path, tmp_path: Path) -> None:
        engine = build(checkpoint, tmp_path / "wide", device="cpu", max_batch_size=4096, proof=False)
        found = bill(engine)
        assert found.of("KV cache") <= CPU_CACHE_BYTES < 4096 * found.setting.block_bytes * 8
        done = ingot("run", engine, "Hi", "--max-new-tokens", 2, "--device", "cpu")
        tokens = found.setting.wanted_blocks * found.setting.runtime.block_size
        assert f"KV cache: {tokens} tokens" in done.stderr
        assert "--cache-tokens" in done.stderr
        asked = ingot("run", engine, "Hi", "--max-new-tokens", 2, "--device", "cpu", "--cache-tokens", 2048)
        assert "KV cache" not in asked.stderr

    def test_a_full_batch_below_the_bound_fits(self, engine: Path) -> None:
        assert bill(engine).setting.wanted_blocks == 8 * MAX_SEQ_LEN // 64
        assert "KV cache" not in ingot("run", engine, "Hi", "--device", "cpu").stderr

    def test_a_benchmark_gets_what_its_batch_needs(
        self, engine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine's own cache holds one longest request here; requests of a batch must not wait."""
        monkeypatch.setattr("ingot.memory.ledger.CPU_CACHE_BYTES", 0)
        spec = SideSpec(path=str(engine), device="cpu")
        side = open_side(spec)
        each = side.memory().cache // (MAX_SEQ_LEN // 64)
        side.make_room(8, 1024)
        assert side.memory().cache == 8 * 1024 // 64 * each
        side.make_room(2, 64)
        assert side.memory().cache == 8 * 1024 // 64 * each
        asked = open_side(spec.replace(cache_tokens=MAX_SEQ_LEN))
        asked.make_room(8, 1024)
        assert asked.memory().cache == MAX_SEQ_LEN // 64 * each


class TestWithoutLedger:
    def test_the_class_of_hugging_face(self, available: SetMemory) -> None:
        hf = json.loads(SHAPE.read_text())
        config = read_setting(str(SHAPE)).model
        cpu, needed = torch.device("cpu"), dense_bytes(config, torch.float32)
        available(math.ceil((needed + CPU_PROCESS_BYTES) / 0.9) + 1)
        expect_class_room(hf, torch.float32, cpu, fix="less")
        available(math.ceil((needed + CPU_PROCESS_BYTES) / 0.9) - MIB)
        expect_class_room(hf, torch.float16, cpu, fix="less")
        expect_class_room(hf, torch.float32, cpu, fix="less", num_layers=1)
        expect_class_room(hf, torch.float32, torch.device("cuda"), fix="less")
        for dtype in (torch.float32, torch.float64):
            with pytest.raises(OutOfMemoryError, match=r"Hugging Face's class.*fix: less"):
                expect_class_room(hf, dtype, cpu, fix="less")
        assert dense_bytes(config, torch.float64) == 2 * needed == 4 * dense_bytes(config, torch.bfloat16)

    @pytest.mark.stays("align")
    @pytest.mark.parametrize("verb", ["bench", "eval", "align"])
    def test_it_is_asked_about_before_it_is_loaded(
        self, verb: str, checkpoint: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise OutOfMemoryError("Hugging Face's class does not fit this machine's memory")

        monkeypatch.setattr("ingot.measure.side.huggingface.expect_class_room", refuse)
        monkeypatch.setattr("ingot.measure.side.huggingface._read", lambda *_, **__: pytest.fail("loaded"))
        monkeypatch.setattr("ingot.measure.align.original.check_class", lambda folder: None)
        words = {
            "bench": (*VERBS["bench"][:2], "{checkpoint}", *VERBS["bench"][3:], "--against", "hf"),
            "eval": (*VERBS["eval"][:2], "{checkpoint}", *VERBS["eval"][3:], "--against", "hf"),
            "align": (
                "align",
                "{engine}",
                "--reference",
                "{checkpoint}",
                "--prompt",
                "Hi",
                "--device",
                "cpu",
            ),
        }
        failed = call(words[verb], tmp_path, engine, checkpoint=checkpoint)
        assert "Hugging Face's class does not fit" in failed.stderr

    def test_what_fits_and_what_does_not(self, available: SetMemory) -> None:
        available(math.ceil((GIB + CPU_PROCESS_BYTES) / 0.9) + 1)
        expect_room("no", GIB, fix="less")
        with pytest.raises(OutOfMemoryError, match="at most"):
            expect_room("no", GIB + 2, fix="less")
