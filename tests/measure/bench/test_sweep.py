"""``ingot sweep``: limits that are found, points that are kept, lines that are refused, what is told."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.building.builder import build
from ingot.cli.measure.sweep_quality import DataQuality
from ingot.errors import CheckpointError, ConfigError, OutOfMemoryError
from ingot.measure.bench.latency import Latency
from ingot.measure.bench.sweep.sweep_line import (
    DIED,
    DOES_NOT_FIT,
    OK,
    LineWanted,
    Progress,
    Quality,
    SweepLine,
    doubling,
    measure_apart,
    measure_line,
)
from ingot.measure.bench.sweep.sweep_record import best, record_of
from ingot.measure.bench.sweep.sweep_report import broken, limits, panels, sweep_table
from ingot.measure.bench.sweep.sweep_session import Sweep, run_sweep
from ingot.measure.bench.sweep.sweep_store import POINTS, Store, read_points
from ingot.measure.side.machine import Memory
from ingot.measure.side.open_side import Side, open_side
from ingot.measure.side.side_spec import SideSpec
from ingot.measure.side.step_work import Work
from ingot.measure.side.timed_run import Run
from ingot.measure.side.token_load import Ask
from tests.quant.packed_checkpoints import Packing, write_packed
from tests.support.shown_errors import raises_shown

SHAPE = Latency((1,), prompt_tokens=8, new_tokens=4, repeats=2)
POINT_KEYS = {"line", "kind", "dtype", "quant", "batch", "status", "at", "settings", "machine", "command"}


class FakeSide:
    """A side whose batches take made-up time, and whose memory ends somewhere."""

    name, vocab_size, max_seq_len = "fake", 97, 64
    device, dtype = torch.device("cpu"), torch.float32
    work = Work(1000, 10, 1000, 100, 10)

    def __init__(self, spec: SideSpec, room: int = 4, error: Exception | None = None) -> None:
        self.max_batch_size = spec.max_batch_size
        self._room = room
        self._error = error or OutOfMemoryError("the KV cache does not hold the batch", seen=f"room {room}")

    def resize(self, batch: int) -> None:
        if batch > self._room:
            raise self._error
        self.max_batch_size = batch

    def warm_up(self, most: int) -> None:
        """Nothing to warm."""

    def answer(self, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
        step = 0.01 * (1 + len(asks) / 10)
        times = [step * (i + 1) for i in range(asks[0].new_tokens)]
        return Run.of(0.0, [times] * len(asks), times[-1])

    def memory(self) -> Memory:
        return Memory(4_000_000, 1_000_000 * self.max_batch_size, None)

    def facts(self) -> dict[str, Any]:
        return {"quantization": "none", "load_s": 0.1}


def measured(opener: Callable[[SideSpec], Any], tried: list[int]) -> Any:
    """A measurement in this process that notes the sizes it tries."""

    def measure(line: SweepLine, wanted: LineWanted, quality: Quality | None) -> Iterator[Progress]:
        for reported in measure_line(line, wanted, quality, opener):
            if "batch" in reported and reported["batch"] not in tried:
                tried.append(reported["batch"])
            yield reported

    return measure


def spec_of(checkpoint: Path) -> SideSpec:
    return SideSpec(path=str(checkpoint), device="cpu")


def swept(checkpoint: Path, out: Path, *, room: int = 4, **wanted: Any) -> tuple[dict[str, Any], list[int]]:
    """The record of a sweep of fake sides, and the sizes that were tried."""
    tried: list[int] = []
    sweep = Sweep(spec_of(checkpoint), shape=wanted.pop("shape", SHAPE), **wanted)
    return run_sweep(sweep, out, measure=measured(lambda s: FakeSide(s, room), tried)), tried


def sizes(line: dict[str, Any]) -> list[int]:
    return [point["batch"] for point in line["points"]]


def test_a_quantized_checkpoint_is_measured_as_it_is(tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "gptq", Packing("gptq")).folder
    shape = Latency((1,), prompt_tokens=4, new_tokens=2, repeats=1)
    sweep = Sweep(spec_of(folder), shape=shape, batches=(1,))
    (line,) = sweep.lines()
    assert (line.name, line.quant, line.spec.quant) == ("fp32 w4a16", "w4a16", "none")
    reported = list(measure_line(line, LineWanted((1,), shape), None))
    point = reported[-1]["point"]
    assert (point["status"], point["facts"]["quantization"]) == (OK, "w4a16")
    dense = SweepLine("fp32", line.spec, "none", is_stored=True)
    with pytest.raises(ConfigError, match="not loaded in the requested precision"):
        list(measure_line(dense, LineWanted((1,), shape), None))


# --- limits ----------------------------------------------------------------------------------------------


def test_doubling_ends_at_the_size_that_does_not_fit_and_the_next_precision_goes_on(
    checkpoint: Path, tmp_path: Path
) -> None:
    record, _ = swept(checkpoint, tmp_path, dtypes=("fp32", "bf16"), room=5)
    assert [line["name"] for line in record["lines"]] == ["fp32", "bf16"]
    for line in record["lines"]:
        assert sizes(line) == [1, 2, 4]
        reason = "the KV cache does not hold the batch: room 5"
        assert line["limit"] == {"batch": 8, "status": DOES_NOT_FIT, "reason": reason}
    assert limits(record)[0] == f"fp32: batch 8 does not fit ({reason})"
    assert [row[-1] for row in sweep_table(record).rows][3] == DOES_NOT_FIT


def test_pytorchs_errors_of_memory_are_limits_and_others_are_not(checkpoint: Path) -> None:
    line, wanted = SweepLine("fp32", spec_of(checkpoint)), LineWanted((1, 2), SHAPE)
    cpu = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")
    for error in (torch.OutOfMemoryError("CUDA out of memory. Tried"), cpu):
        reported = list(measure_line(line, wanted, None, lambda s, error=error: FakeSide(s, 1, error)))
        assert reported[-1]["point"]["status"] == DOES_NOT_FIT
    other = RuntimeError("illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(measure_line(line, wanted, None, lambda s: FakeSide(s, 1, other)))


def test_a_side_that_cannot_even_be_loaded_does_not_fit(checkpoint: Path) -> None:
    def opener(spec: SideSpec) -> Side:
        raise OutOfMemoryError("the weights do not fit", seen="60 GB")

    reported = list(
        measure_line(SweepLine("fp32", spec_of(checkpoint)), LineWanted((4,), SHAPE), None, opener)
    )
    assert reported[0] == {"batch": 4}
    assert reported[-1] == {"point": {"status": DOES_NOT_FIT, "reason": "the weights do not fit: 60 GB"}}


@pytest.mark.slow
def test_the_cache_of_a_real_engine_is_resized_until_it_does_not_hold_the_batch(checkpoint: Path) -> None:
    side = open_side(spec_of(checkpoint).replace(max_batch_size=1, max_seq_len=32))
    first = side.memory()
    side.resize(8)
    second = side.memory()
    assert second.cache == 8 * first.cache
    assert second.weights == first.weights
    asks = [Ask(4, 2)] * 8
    assert side.answer(asks, [[1, 2, 3, 4]] * 8).tokens == (2,) * 8
    with pytest.raises(OutOfMemoryError, match="does not hold the batch"):
        side.resize(1 << 17)  # a CPU's cache is 1 GiB at most


def test_a_process_that_dies_ends_its_line_and_is_tried_again(checkpoint: Path, tmp_path: Path) -> None:
    line = SweepLine("fp32", spec_of(checkpoint))
    reported = list(measure_apart(line, LineWanted((1,), SHAPE, with_quality=True), deadly))
    assert reported[-1]["point"]["status"] == DIED
    assert "killed" in reported[-1]["point"]["reason"]

    def dies(line: SweepLine, wanted: LineWanted, quality: Quality | None) -> Iterator[Progress]:
        yield {"batch": wanted.batches[0]}
        yield reported[-1]

    sweep = Sweep(spec_of(checkpoint), batches=(1, 2), shape=SHAPE)
    record = run_sweep(sweep, tmp_path, measure=dies)
    assert record["lines"][0]["limit"]["status"] == DIED
    assert "fp32: batch 1 could not be measured" in limits(record)[0]
    record, tried = swept(checkpoint, tmp_path, batches=(1, 2))
    assert (tried, record["lines"][0]["limit"]) == ([1, 2], None)


def deadly(spec: SideSpec) -> dict[str, float]:
    """A quality that the machine kills."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def test_a_process_that_dies_of_the_quality_leaves_the_speed(checkpoint: Path, tmp_path: Path) -> None:
    def dies(line: SweepLine, wanted: LineWanted, quality: Quality | None) -> Iterator[Progress]:
        if quality is not None:
            yield {"point": {"status": DIED, "reason": "killed"}}
        else:
            yield from measure_line(line, wanted, None, FakeSide)

    sweep = Sweep(spec_of(checkpoint), batches=(1, 2), shape=SHAPE)
    record = run_sweep(sweep, tmp_path, quality=deadly, measure=dies)
    assert sizes(record["lines"][0]) == [1, 2]
    assert record["lines"][0]["limit"] is None
    assert limits(record) == ["fp32: no quality (killed)"]
    assert broken(record)


# --- points that are kept --------------------------------------------------------------------------------


def test_a_second_run_measures_only_what_is_missing(checkpoint: Path, tmp_path: Path) -> None:
    _, tried = swept(checkpoint, tmp_path, batches=(1, 2))
    assert tried == [1, 2]
    before = (tmp_path / POINTS).read_text()
    _, tried = swept(checkpoint, tmp_path, batches=(1, 2))
    assert tried == []
    assert (tmp_path / POINTS).read_text() == before
    record, tried = swept(checkpoint, tmp_path, batches=(2, 4, 8, 16))
    assert tried == [4, 8]
    assert sizes(record["lines"][0]) == [1, 2, 4]
    _, tried = swept(checkpoint, tmp_path, batches=(8, 16))  # 8 did not fit
    assert tried == []
    for record in read_points(tmp_path / POINTS):
        assert set(record) >= POINT_KEYS
        assert {"torch", "ingot", "commit", "cpu"} <= set(record["machine"])


def test_other_settings_are_refused_by_name_and_fresh_starts_over(checkpoint: Path, tmp_path: Path) -> None:
    swept(checkpoint, tmp_path, batches=(1,))
    other = SHAPE.replace(new_tokens=5)
    with pytest.raises(ConfigError, match="new_tokens 4, now 5") as refused:
        swept(checkpoint, tmp_path, batches=(1,), shape=other)
    assert "`fresh`" in str(refused.value)
    assert "prompt_tokens" not in str(refused.value)
    sweep = Sweep(spec_of(checkpoint), batches=(2,), shape=other)
    record = run_sweep(sweep, tmp_path, fresh=True, measure=measured(FakeSide, []))
    assert sizes(record["lines"][0]) == [2]


def test_points_survive_an_interrupt_and_a_line_that_was_cut_off(checkpoint: Path, tmp_path: Path) -> None:
    def interrupted(line: SweepLine, wanted: LineWanted, quality: Quality | None) -> Iterator[Progress]:
        for reported in measure_line(line, wanted, quality, FakeSide):
            yield reported
            if "point" in reported:
                raise KeyboardInterrupt

    sweep = Sweep(spec_of(checkpoint), batches=(1, 2), shape=SHAPE)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, tmp_path, measure=interrupted)
    with (tmp_path / POINTS).open("a") as file:
        file.write('{"line": "fp32", "batch"')
    record, tried = swept(checkpoint, tmp_path, batches=(1, 2))
    assert tried == [2]
    assert sizes(record["lines"][0]) == [1, 2]


def test_a_full_disk_keeps_the_points(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept(checkpoint, tmp_path, batches=(1,))
    before = (tmp_path / POINTS).read_bytes()

    def half(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text.encode()[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(ConfigError, match=r"cannot be written[\s\S]*No space") as refused:
        swept(checkpoint, tmp_path, batches=(1, 2))
    assert refused.value.field == "out"
    assert (tmp_path / POINTS).read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [POINTS]


def test_a_folder_that_is_a_file_is_refused_by_its_flag(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep").write_text("")
    with pytest.raises(ConfigError, match="cannot be written") as refused:
        swept(checkpoint, tmp_path / "sweep", batches=(1,))
    assert refused.value.field == "out"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / POINTS).write_text('{"no": "point"}\n{"line"')
    with pytest.raises(ConfigError, match="line 1 is not a point"):
        Store(tmp_path).open({})
    with pytest.raises(ConfigError, match="there are no measured points"):
        record_of([])


# --- lines -----------------------------------------------------------------------------------------------


def test_lines_are_named_once_each(checkpoint: Path) -> None:
    spec = spec_of(checkpoint)
    names = [line.name for line in Sweep(spec, ("auto", "fp32", "bf16"), against="hf").lines()]
    assert names == ["fp32", "bf16", "Hugging Face fp32"]
    (_, other) = Sweep(spec, against="hf:org/converted").lines()
    assert (other.name, other.spec.path) == ("Hugging Face fp32, converted", "org/converted")
    assert (doubling()[:4], doubling()[-1]) == ((1, 2, 4, 8), 4096)


def test_an_engine_and_unknown_precisions_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    engine = build(checkpoint, tmp_path / "engine", max_batch_size=2, max_seq_len=32, device="cpu")
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (engine, {"quants": ("w8a16",)}, "only checkpoints are quantized"),
        (engine, {"kv_dtypes": ("int8",)}, "only checkpoints are quantized"),
        (checkpoint, {"quants": ("none", "w3")}, "unknown quantization scheme; seen: w3; allowed: .*none"),
        (checkpoint, {"dtypes": ("fp8",)}, "unknown dtype"),
        (checkpoint, {"against": "vllm"}, "compares only with Hugging Face"),
    ]
    for path, wanted, message in refused:
        with raises_shown(ConfigError, message):
            Sweep(spec_of(path), **wanted)


def test_a_line_a_scheme(checkpoint: Path) -> None:
    lines = Sweep(spec_of(checkpoint), ("fp32",), quants=("none", "w8a16", "w4a16"), against="hf").lines()
    assert [(line.name, line.spec.quant) for line in lines] == [
        ("fp32", "none"), ("fp32 w8a16", "w8a16"), ("fp32 w4a16", "w4a16"), ("Hugging Face fp32", "none"),
    ]  # fmt: skip
    reported = list(measure_line(lines[2], LineWanted((1, 2), SHAPE), None))
    points = [one["point"] for one in reported if "point" in one]
    assert [point["facts"]["quantization"] for point in points] == ["w4a16", "w4a16"]


def test_a_scheme_that_was_not_loaded_is_no_line(checkpoint: Path) -> None:
    line = SweepLine("fp32 w8a16", spec_of(checkpoint), "w8a16")
    with pytest.raises(ConfigError, match="not loaded in the requested precision"):
        list(measure_line(line, LineWanted((1,), SHAPE), None, FakeSide))


# --- quality ---------------------------------------------------------------------------------------------


def test_quality_is_measured_once_a_line_and_decides_the_pareto_line(
    checkpoint: Path, tmp_path: Path
) -> None:
    asked: list[str] = []

    def quality(spec: SideSpec) -> dict[str, float]:
        asked.append(spec.dtype)
        return {"perplexity": {"fp32": 7.0, "bf16": 7.5}[spec.dtype]}

    sweep = Sweep(spec_of(checkpoint), ("fp32", "bf16"), batches=(1, 2), shape=SHAPE)
    for _ in range(2):
        record = run_sweep(sweep, tmp_path, quality=quality, measure=measured(FakeSide, []))
    assert asked == ["fp32", "bf16"]
    assert [line["quality"] for line in record["lines"]] == [{"perplexity": 7.0}, {"perplexity": 7.5}]
    assert record["pareto"] == {"against": "perplexity", "points": [["fp32", 2]]}
    assert "perplexity" in sweep_table(record).columns
    drawn = panels(record)
    assert [bool(panel.front) for panel in drawn] == [False, False, True]
    assert drawn[2].x_label == "perplexity (lower is better)"


def test_a_quality_without_memory_leaves_the_speed(checkpoint: Path) -> None:
    def quality(spec: SideSpec) -> dict[str, float]:
        raise OutOfMemoryError("too long a window")

    line, wanted = SweepLine("fp32", spec_of(checkpoint)), LineWanted((1,), SHAPE, with_quality=True)
    reported = list(measure_line(line, wanted, quality, FakeSide))
    assert {"quality": {}, "reason": "too long a window"} in reported
    assert reported[-1]["point"]["status"] == OK


def test_the_pareto_line_of_speed_against_memory() -> None:
    def point(batch: int, speed: float, memory: float) -> dict[str, Any]:
        sizes = {"weights_gb": memory, "cache_gb": 0.0, "peak_gb": None}
        return {"batch": batch, "figures": {"output_tokens_per_s": speed}, "memory": sizes, "facts": {}}

    a = {"name": "a", "quality": {}, "points": [point(1, 10, 1.0), point(2, 20, 2.0), point(4, 19, 3.0)]}
    b = {"name": "b", "quality": {}, "points": [point(1, 9, 1.5), point(2, 30, 4.0)]}
    assert best([a, b]) == {"against": "memory", "points": [["a", 1], ["a", 2], ["b", 2]]}
    for line, score in ((a, 0.9), (b, 0.8)):  # higher is better
        line["quality"] = {"rouge_l": score}
    assert best([a, b]) == {"against": "rouge_l", "points": [["a", 2], ["b", 2]]}


def test_hugging_face_is_a_line_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    wanted = Sweep(spec_of(checkpoint), batches=(1, 3), shape=SHAPE, against="hf")
    record = run_sweep(wanted, tmp_path, measure=measured(open_side, []))
    ours, theirs = record["lines"]
    assert (ours["name"], theirs["name"]) == ("fp32", "Hugging Face fp32")
    assert sizes(ours) == sizes(theirs) == [1, 3]
    for a, b in zip(ours["points"], theirs["points"], strict=True):
        assert a["memory"]["weights_gb"] == b["memory"]["weights_gb"]
        assert b["memory"]["cache_gb"] > 0
    assert [series.dashed for series in panels(record)[0].series] == [False, True]


def test_an_error_of_the_other_process_arrives(tmp_path: Path) -> None:
    absent = SideSpec(path=str(tmp_path / "absent"), device="cpu")
    with pytest.raises(CheckpointError):
        list(measure_apart(SweepLine("fp32", absent), LineWanted((1,), SHAPE), None))


def test_a_quality_travels_to_another_process_and_into_the_record(tmp_path: Path) -> None:
    import pickle

    file = tmp_path / "text.txt"
    file.write_text("some words")
    quality = DataQuality(str(file), 3)
    assert pickle.loads(pickle.dumps(quality)) == quality
    assert quality.to_json()["limit"] == 3
    assert len(quality.to_json()["sha256"]) == 16
