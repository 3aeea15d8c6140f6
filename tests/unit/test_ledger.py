"""The ledger's sums and verdict, and that every fix it offers works."""

from __future__ import annotations

import errno
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.building.ledger_source import read_setting
from ingot.config.decoder_config import DecoderConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.units import parse_size
from ingot.device import HostMemory
from ingot.errors import OutOfMemoryError
from ingot.memory import memory_error
from ingot.memory.host_memory import host_ledger
from ingot.memory.ledger import Capacity, MemorySetting, ledger
from ingot.memory.memory_error import explained, measured, out_of_memory, ran_out
from ingot.memory.memory_fixes import CARDS, COSTS, Fix, eased, fits_by_card, fixes
from ingot.runtime import setup

GIB = 1 << 30
SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
H200 = Capacity("H200", int(139.8 * GIB))
CUDA = torch.device("cuda")


def seven_b(**values: Any) -> MemorySetting:
    return read_setting(str(SHAPES / "llama-7b.json"), **({"max_seq_len": 4096} | values))


class TestSevenBillion:
    """Measured on an H200 (docs/results/memory.json): weights 15.4 GB, cache 116.9, most allocated 133.8."""

    def test_weights_cache_and_what_is_used(self) -> None:
        found = ledger(seven_b(), H200)
        assert found.of("weights") == pytest.approx(15.4e9, rel=0.01)
        assert found.blocks * found.setting.block_bytes == pytest.approx(116.9e9, rel=0.01)
        assert (found.fits, found.loads, found.requests_at_once) == (False, True, 54)
        assert found.used - found.of("process") == pytest.approx(133.8e9, rel=0.05)

    def test_what_is_used_is_all_but_the_unclaimed_reserve(self) -> None:
        found = ledger(seven_b(), H200)
        apart = {item.name: item.bytes for item in found.items if item.kind != "KV cache"}
        assert apart.pop("unclaimed") > 100e6
        cache = found.blocks * found.setting.block_bytes
        assert found.used == sum(apart.values()) + cache

    def test_a_load_holds_one_weight_in_the_dtype_that_it_computes_in(self) -> None:
        """On a GPU; a CPU keeps them all."""
        largest = 151936 * 4096
        for stored in ("fp32", "fp16"):
            setting = seven_b().replace(stored_dtype=stored)
            wide, narrow = (host_ledger(setting.replace(dtype=dtype)) for dtype in ("fp32", "fp16"))
            assert wide.load_memory - narrow.load_memory == 2 * largest
            assert wide.build_memory == narrow.build_memory

    def test_the_formula_of_weights(self) -> None:
        hidden, inner, vocab, layers = 4096, 11008, 151936, 32
        values = layers * (4 * hidden**2 + 3 * hidden * inner + 2 * hidden) + hidden + 2 * vocab * hidden
        rotary = 4096 * 128 * 4
        assert ledger(seven_b()).of("weights") == 2 * values + rotary

    def test_the_host(self) -> None:
        """A build took 5.1 GB at most, a load 15.8, mapped files included."""
        host = host_ledger(seven_b())
        assert host.build_disk == pytest.approx(15.44e9, rel=0.01)
        assert host.load_mapped == pytest.approx(15.1e9, rel=0.05)


class TestVerdict:
    def test_all_of_it(self) -> None:
        found = ledger(seven_b(max_batch_size=4), H200)
        assert found.fits
        assert found.needed == sum(item.bytes for item in found.items)
        assert found.used <= found.needed <= int(H200.total * 0.9)

    def test_others_take_their_part(self) -> None:
        alone = ledger(seven_b(), H200)
        shared = ledger(seven_b(), Capacity("H200", H200.total, others=40 * GIB))
        assert alone.usable is not None
        assert shared.usable == alone.usable - 40 * GIB

    def test_a_cache_below_one_request(self) -> None:
        found = ledger(seven_b(runtime=RuntimeConfig(cache_tokens=4000)), H200)
        assert (found.loads, found.fits) == (False, False)

    def test_without_a_capacity_there_is_none(self) -> None:
        reported = ledger(seven_b()).to_json()
        assert (reported["fits"], reported["loads"]) == (None, None)

    def test_a_cpu_holds_a_copy_of_the_largest_weight_while_it_loads(self) -> None:
        """The embedding, when no step runs yet."""
        found = ledger(seven_b(device="cpu", max_batch_size=1))
        copy = next(item.bytes for item in found.items if item.name == "a weight while loading")
        assert copy + found.of("activations") == 151936 * 4096 * 4
        wide = seven_b(device="cpu", max_batch_size=1, runtime=RuntimeConfig(token_budget=65536))
        assert all(item.bytes == 0 for item in ledger(wide).items if item.name == "a weight while loading")

    def test_blocks_round_up(self) -> None:
        assert seven_b(max_seq_len=65, max_batch_size=3).wanted_blocks == 6

    def test_the_setting_travels(self) -> None:
        setting = seven_b(runtime=RuntimeConfig(cache_tokens=64))
        assert MemorySetting.from_json(setting.to_json()) == setting
        reported = ledger(setting, H200).to_json()
        assert sum(reported["by_kind"].values()) == reported["needed_bytes"]


ASKED = [
    (seven_b(), 24 * GIB),
    (seven_b(), H200.total),
    (seven_b(max_batch_size=1), 20 * GIB),
    (seven_b(max_batch_size=4), 32 * GIB),
    (seven_b(dtype="fp32"), 24 * GIB),
    (seven_b(dtype="fp32"), 40 * GIB),
    (seven_b(max_batch_size=1, max_seq_len=8192), 19 * GIB),
    (seven_b(runtime=RuntimeConfig(cache_tokens=100)), 40 * GIB),
    (seven_b(runtime=RuntimeConfig(cache_tokens=100_000)), 40 * GIB),
    (seven_b(runtime=RuntimeConfig(token_budget=65536), max_batch_size=1), 24 * GIB),
    (seven_b(runtime=RuntimeConfig(token_budget=65536, cache_tokens=100)), 18 * GIB),
    (seven_b(max_batch_size=1, max_seq_len=512, runtime=RuntimeConfig(memory_fraction=0.8)), 22 * GIB),
]


class TestFixes:
    @pytest.mark.parametrize("goal", ["fits", "loads"])
    @pytest.mark.parametrize(("setting", "total"), ASKED)
    def test_every_fix_works(self, setting: MemorySetting, total: int, goal: Any) -> None:
        found = ledger(setting, Capacity("card", total))
        options = fixes(found, goal)
        reached = found.fits if goal == "fits" else found.loads
        assert bool(options) != reached
        assert [COSTS.index(f.cost) for f in options] == sorted(COSTS.index(f.cost) for f in options)
        for fix in options:
            then = ledger(after(setting, fix), capacity_after(fix, total))
            assert then.fits if goal == "fits" else then.loads, fix.changes
            assert fix.needed <= fix.usable

    def test_the_values_are_the_largest(self) -> None:
        setting = seven_b()
        for fix in fixes(ledger(setting, Capacity("card", 24 * GIB))):
            ((name, value),) = fix.changes.items()
            more = {
                "max_batch_size": lambda s, n: s.replace(max_batch_size=n + 1),
                "max_seq_len": lambda s, n: s.replace(max_seq_len=n + 64),
                "cache_tokens": lambda s, n: s.replace(runtime=s.runtime.replace(cache_tokens=n + 64)),
            }[name]
            assert not ledger(more(setting, value), Capacity("card", 24 * GIB)).fits

    def test_what_fits_needs_none(self) -> None:
        assert fixes(ledger(seven_b(max_batch_size=1), H200)) == []

    def test_what_no_change_helps(self) -> None:
        assert fixes(ledger(seven_b(max_batch_size=1), Capacity("card", 2 * GIB)))[0].cost == "hardware"
        assert fixes(ledger(seven_b(max_batch_size=64, max_seq_len=8192), Capacity("card", 2 * GIB))) == []

    @pytest.mark.parametrize("goal", ["fits", "loads"])
    @pytest.mark.parametrize(("others", "share"), [(0, 0.9), (7 * GIB, 0.9), (7 * GIB, 0.6)])
    @pytest.mark.parametrize("short", [GIB // 4, 2 * GIB, 20 * GIB])
    def test_a_cpu_is_not_made_slower(self, short: int, others: int, share: float, goal: Any) -> None:
        """Fewer bits are widened there at every step. What is offered works, the last on another machine."""
        setting = seven_b(device="cpu", max_batch_size=1, runtime=RuntimeConfig(memory_fraction=share))
        host = Capacity("host", others + int((ledger(setting).needed - short) / share), others)
        options = fixes(ledger(setting, host), goal)
        *flags, machine = options
        assert bool(flags) == (short < 20 * GIB)
        for fix in flags:
            assert not {"quant", "dtype", "kv_dtype", "gpu"} & fix.changes.keys()
            then = ledger(after(setting, fix), host)
            assert then.fits if goal == "fits" else then.loads, fix.changes
        assert (machine.cost, machine.changes, machine.where) == ("hardware", {}, "the machine")
        room = float(re.search("[0-9.]+", machine.note)[0]) * 1e9  # type: ignore[index]
        larger = ledger(setting, Capacity("larger", int(room) + 10**8))
        assert larger.fits if goal == "fits" else larger.loads
        assert not ledger(setting, Capacity("smaller", int(room) - 10**8)).loads

    def test_a_cpu_that_was_asked_for_too_small_a_cache_needs_no_other_machine(self) -> None:
        setting = seven_b(device="cpu", runtime=RuntimeConfig(cache_tokens=100))
        options = fixes(ledger(setting, Capacity("host", 100 * GIB)))
        assert [fix.changes for fix in options] == [{"cache_tokens": 4096}, {"max_seq_len": 128}]

    def test_all_of_the_gpu_and_one_limit(self) -> None:
        """Neither all of the GPU nor a limit is enough alone, if others hold most of it."""
        crowded = Capacity("H200", H200.total, int(122.8e9))
        found = ledger(seven_b(max_seq_len=8192), crowded)
        first = fixes(found, "loads")[0]
        assert [*first.changes] == ["memory_fraction", "max_seq_len"]
        assert first.changes["memory_fraction"] == 0.95
        assert first.where.startswith("LLM(max_seq_len=")
        assert "runtime=RuntimeConfig(memory_fraction=0.95)" in first.where
        assert ledger(first.setting, crowded).loads


class TestEased:
    def test_smaller_caches_and_steps_that_start(self) -> None:
        found = ledger(seven_b(max_batch_size=1), H200)
        assert [fix.changes for fix in eased(found)] == [{"memory_fraction": 0.8}, {"token_budget": 1024}]
        assert all(ledger(after(found.setting, fix), H200).loads for fix in eased(found))

    def test_none_that_do_not(self) -> None:
        tight = ledger(seven_b(max_batch_size=1), Capacity("card", int(20.5 * GIB)))
        assert tight.loads
        assert [fix.changes for fix in eased(tight)] == [{"token_budget": 1024}]
        assert eased(ledger(seven_b(), Capacity("card", 8 * GIB))) == []


class TestMeasured:
    """What the device has left is less, or its steps take more, than the ledger counts."""

    def test_the_ledger_then_sees_what_was_found(self) -> None:
        setting = seven_b(max_batch_size=1)
        card = Capacity("card", 24 * GIB)
        found = ledger(setting, card)
        room, steps = (found.usable or 0) - found.fixed, found.of("activations")
        assert found.loads
        assert measured(card, setting, room, steps) == card
        lost = ledger(setting, measured(card, setting, room - 4 * GIB, steps))
        assert (lost.usable or 0) - lost.fixed == room - 4 * GIB
        assert not lost.loads
        assert fixes(lost, "loads")
        larger = measured(card, setting, room - 100, steps + 100)
        assert larger.others == 100
        smaller = measured(card, setting, room - 100, steps - 50)  # steps' surplus may go with other steps
        assert smaller.others == 150


def after(setting: MemorySetting, fix: Fix) -> MemorySetting:
    """The setting with the fix's changes applied."""
    for name, value in fix.changes.items():
        if name in RuntimeConfig.__dataclass_fields__:
            setting = setting.replace(runtime=setting.runtime.replace(**{name: value}))
        elif name != "gpu":
            setting = setting.replace(**{name: QuantConfig(str(value)) if name == "quant" else value})
    return setting


def capacity_after(fix: Fix, total: int) -> Capacity:
    card = fix.changes.get("gpu")
    return Capacity("card", total if card is None else parse_size(str(card), "gpu"))


class TestCards:
    def test_larger_cards_hold_more(self) -> None:
        rows = [row for row in fits_by_card(seven_b()) if (row.dtype, row.quant) == ("fp16", "none")]
        assert [row.card for row in rows] == list(CARDS)
        assert [row.max_batch_size for row in rows] == sorted(row.max_batch_size for row in rows)
        assert (rows[2].max_batch_size, rows[-1].max_batch_size) == (0, 54)

    def test_each_is_the_largest(self) -> None:
        setting = seven_b()
        for row in fits_by_card(setting):
            card = Capacity(row.card, row.total)
            whole = setting.replace(dtype=row.dtype, quant=QuantConfig(row.quant))
            if row.max_batch_size:
                assert ledger(whole.replace(max_batch_size=row.max_batch_size), card).fits
            assert not ledger(whole.replace(max_batch_size=row.max_batch_size + 1), card).fits
            one = whole.replace(max_batch_size=1)
            if row.max_seq_len:
                assert ledger(one.replace(max_seq_len=row.max_seq_len), card).fits
            if row.max_seq_len < one.model.max_positions:
                assert not ledger(one.replace(max_seq_len=row.max_seq_len + 1), card).fits


class TestRuntime:
    @pytest.mark.parametrize(
        "values", [{}, {"max_batch_size": 8}, {"runtime": RuntimeConfig(cache_tokens=6400)}]
    )
    def test_it_takes_the_cache_that_the_ledger_computes(
        self, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        setting = seven_b(**values)
        found = ledger(setting, H200)
        free = H200.total - found.of("process") - found.of("weights")
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, H200.total))
        monkeypatch.setattr(setup, "measured_activations", lambda *_: found.of("activations"))
        assert abs(setup._num_blocks(None, CUDA, setting, H200) - found.blocks) <= 1  # type: ignore[arg-type]

    def test_it_refuses_what_the_ledger_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        setting, total = seven_b(), 18 * GIB
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, total))
        monkeypatch.setattr(setup, "measured_activations", lambda *_: GIB // 4)
        monkeypatch.setattr(memory_error, "capacity_of", lambda device, own=None: Capacity("card", total))
        assert not ledger(setting, Capacity("card", total)).loads
        with pytest.raises(OutOfMemoryError, match="at least 4096 tokens"):
            setup._num_blocks(None, CUDA, setting, Capacity("card", total))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError("out of memory"), False),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_lack_of_memory(error: Exception, expected: bool) -> None:
    assert ran_out(error) is expected


class TestErrors:
    def error(self, setting: MemorySetting, total: int, monkeypatch: pytest.MonkeyPatch) -> OutOfMemoryError:
        monkeypatch.setattr(memory_error, "capacity_of", lambda device, own=None: Capacity("card", total))
        with pytest.raises(OutOfMemoryError) as raised, explained("it does not fit", setting, CUDA):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has little")
        return raised.value

    def test_it_shows_need_supply_and_a_working_fix(self, monkeypatch: pytest.MonkeyPatch) -> None:
        setting = seven_b(max_batch_size=1)
        error = self.error(setting, 20 * GIB, monkeypatch)
        text = str(error)
        assert "it does not fit; seen: CUDA out of memory" in text
        assert "weights 15.4 GB" in text
        assert "the device has 21.5 GB (card), memory_fraction 0.9: 19.3 GB usable" in text
        assert error.ledger is not None
        assert error.ledger["loads"] is False
        best = Fix.from_json(error.ledger["fixes"][0])
        assert best.where in text
        assert ledger(best.setting, Capacity("card", 20 * GIB)).loads

    def test_memory_that_went_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        error = self.error(seven_b(max_batch_size=1), 80 * GIB, monkeypatch)
        assert error.fix is not None
        assert "memory_fraction=0.8" in error.fix

    def test_the_ledger_survives_a_process_boundary(self, monkeypatch: pytest.MonkeyPatch) -> None:
        error = self.error(seven_b(max_batch_size=1), 20 * GIB, monkeypatch)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.ledger, again.lines) == (str(error), error.ledger, error.lines)

    def test_a_host_without_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cpu = torch.device("cpu")
        setting = seven_b(device="cpu", max_batch_size=1)
        host = HostMemory("this machine's memory", 64 * GIB, 60 * GIB, GIB)
        monkeypatch.setattr(memory_error, "host_memory", lambda: host)
        with (
            pytest.raises(OutOfMemoryError, match=r"no; seen: .*can't allocate"),
            explained("no", setting, cpu),
        ):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory")

    def test_a_host_that_is_too_small_is_not_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host = HostMemory("this machine's memory", 64 * GIB, 20 * GIB, GIB)
        monkeypatch.setattr(memory_error, "host_memory", lambda: host)
        setting = seven_b(device="cpu", max_batch_size=1)
        with (
            pytest.raises(OutOfMemoryError, match=r"does not fit this machine's memory.*at most 19\.7 GB"),
            explained("no", setting, torch.device("cpu"), own=0),
        ):
            pytest.fail("the block began")

    def test_other_errors_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory_error, "capacity_of", lambda device, own=None: H200)
        with pytest.raises(RuntimeError, match="another"), explained("no", seven_b(), CUDA):
            raise RuntimeError("another")

    def test_what_was_seen_can_be_given(self) -> None:
        error = out_of_memory("no", seven_b(), Capacity("card", 20 * GIB), seen="a", allowed="b")
        assert (error.seen, error.allowed) == ("a", "b")
        assert error.fix is not None
        assert error.fix.startswith("RuntimeConfig(memory_fraction=0.92) (costs headroom)")


class TestCapacity:
    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 52 * GIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50 * GIB)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")

    def test_others_are_what_is_neither_free_nor_ours(self) -> None:
        found = memory_error.capacity_of(CUDA)
        assert found == Capacity("GPU", 80 * GIB, 18 * GIB - memory_error.CONTEXT_BYTES)

    def test_other_memory_of_the_process_counts_as_taken(self) -> None:
        """Of 50 GiB that this process allocated 15 are the engine's."""
        found = memory_error.capacity_of(CUDA, own=15 * GIB)
        assert found.others == (80 - 10 - 52 + 35) * GIB - memory_error.CONTEXT_BYTES

    def test_the_host(self) -> None:
        assert memory_error.capacity_of(torch.device("cpu")).total > 256 << 20


def test_a_decoder_config_is_all_it_needs() -> None:
    model = DecoderConfig("llama", 97, 32, 48, 2, 4, 2, 8, 128)
    assert ledger(MemorySetting(model, "bf16", 2, 128)).of("KV cache") == 2 * 2 * 16 * 2 * 128 * 2
