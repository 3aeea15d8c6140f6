"""The operations of a profiled step, read from the events of a Chrome trace as ``torch.profiler`` writes it.

    trace = read_trace(json.load(file)["traceEvents"], on_gpu=True)
    trace.ops[0]                       # Op("few_linear_kernel", "qkv", start=12.0, us=3.4, end=15.4, step=0)

On a GPU an operation is a kernel, a copy or a fill; its module is that of the range in which the host
launched it. On a CPU it is one of PyTorch's operators, without the time of the operators that it calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import DeviceError

STEP = "ingot step"
OTHER = "other"  # outside every module
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_ON_HOST, _RANGE, _GRAPH = "cpu_op", "user_annotation", "cudaGraphLaunch"

Event = Mapping[str, Any]
Thread = tuple[Any, Any]


@dataclass(frozen=True)
class Op:
    """One kernel, copy or operator.

    Attributes:
        module: the innermost range around its launch; ``other``: none but the step's.
        start, us: microseconds; ``us`` is its own time, without what it calls.
        end: when it ends, with what it calls.
        step: which of the profiled steps it belongs to, from 0.
    """

    name: str
    module: str
    start: float
    us: float
    end: float
    step: int


@dataclass(frozen=True)
class StepTrace:
    """Operations of ``steps`` equal steps, by their start; ``graphs``: CUDA graphs that they launched."""

    steps: int
    ops: tuple[Op, ...]
    graphs: int = 0


@dataclass(frozen=True)
class _Range:
    start: float
    end: float
    name: str
    step: int = 0


def read_trace(events: Iterable[Event], *, on_gpu: bool) -> StepTrace:
    """The operations inside the ranges named ``STEP``.

    Raises:
        DeviceError: there is no such range, or no operation in one: the profiler saw nothing of the device.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    ranges = _ranges(spans)
    steps = sorted((r for found in ranges.values() for r in found if r.name == STEP), key=lambda r: r.start)
    found = _device_ops(spans, ranges, steps) if on_gpu else _host_ops(spans, ranges)
    ops = tuple(sorted(found, key=lambda op: op.start))
    if not ops:
        raise DeviceError(
            "the profiler recorded no kernels" if on_gpu else "the profiler recorded no operators",
            seen=f"{len(spans)} events in {len(steps)} steps",
            fix="run again with KINETO_LOG_LEVEL=0, which shows why",
        )
    starts = [_start(event) for event in spans if event["name"] == _GRAPH and event.get("cat") in _LAUNCHES]
    graphs = sum(any(one.start <= start < one.end for one in steps) for start in starts)
    return StepTrace(len(steps), ops, graphs)


def _ranges(spans: Sequence[Event]) -> dict[Thread, list[_Range]]:
    """Ranges by thread, outer before inner; each of a step knows its number."""
    found: dict[Thread, list[_Range]] = defaultdict(list)
    step_starts = sorted(_start(e) for e in spans if e.get("cat") == _RANGE and e["name"] == STEP)
    numbers = {start: number for number, start in enumerate(step_starts)}
    for event in spans:
        if event.get("cat") == _RANGE:
            start = _start(event)
            one = _Range(start, _end(event), str(event["name"]), numbers.get(start, 0))
            found[_thread(event)].append(one)
    for ranges in found.values():
        ranges.sort(key=lambda one: (one.start, -one.end))
    return found


def _device_ops(
    spans: Sequence[Event], ranges: Mapping[Thread, Sequence[_Range]], steps: Sequence[_Range]
) -> Iterator[Op]:
    """Kernels, copies and fills. One whose launch was not recorded belongs to the step in which it ran."""
    launches = {
        event["args"]["correlation"]: event
        for event in spans
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    kernels = [event for event in spans if event.get("cat") in _ON_DEVICE]
    pairs = [(launches.get(event.get("args", {}).get("correlation")), event) for event in kernels]
    by_launch: dict[Thread, list[tuple[Event, Event]]] = defaultdict(list)
    for launch, event in pairs:
        if launch is not None:
            by_launch[_thread(launch)].append((launch, event))
            continue
        own = next((one for one in steps if one.start <= _start(event) < one.end), None)
        if own is not None:
            yield _op(event, OTHER, own.step)
    for thread, items in by_launch.items():
        items.sort(key=lambda pair: _start(pair[0]))
        places = _places([_start(launch) for launch, _ in items], ranges.get(thread, ()))
        for (_, event), place in zip(items, places, strict=True):
            if place is not None:
                yield _op(event, *place)


def _host_ops(spans: Sequence[Event], ranges: Mapping[Thread, Sequence[_Range]]) -> Iterator[Op]:
    """Operators, each with its own time."""
    by_thread: dict[Thread, list[Event]] = defaultdict(list)
    for event in spans:
        if event.get("cat") == _ON_HOST:
            by_thread[_thread(event)].append(event)
    for thread, items in by_thread.items():
        items.sort(key=lambda event: (_start(event), -_end(event)))
        places = _places([_start(event) for event in items], ranges.get(thread, ()))
        own = [float(event["dur"]) for event in items]
        open_: list[int] = []
        for index, event in enumerate(items):
            while open_ and _end(items[open_[-1]]) <= _start(event):
                open_.pop()
            if open_:
                own[open_[-1]] -= float(event["dur"])
            open_.append(index)
        for event, place, us in zip(items, places, own, strict=True):
            if place is not None:
                yield _op(event, *place, us=max(us, 0.0))


def _places(times: Sequence[float], ranges: Sequence[_Range]) -> list[tuple[str, int] | None]:
    """Of each time, in order, the innermost range around it and its step; None: it is in no step."""
    found: list[tuple[str, int] | None] = []
    open_: list[_Range] = []
    following = 0
    for time in times:
        while following < len(ranges) and ranges[following].start <= time:
            open_.append(ranges[following])
            following += 1
        open_ = [one for one in open_ if one.end > time]
        step = next((one for one in open_ if one.name == STEP), None)
        if step is None:
            found.append(None)
            continue
        inner = open_[-1].name
        found.append((OTHER if inner == STEP else inner, step.step))
    return found


def _op(event: Event, module: str, step: int, us: float | None = None) -> Op:
    own = float(event["dur"]) if us is None else us
    return Op(str(event["name"]), module, _start(event), own, _end(event), step)


def _thread(event: Event) -> Thread:
    return event.get("pid"), event.get("tid")


def _start(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])
