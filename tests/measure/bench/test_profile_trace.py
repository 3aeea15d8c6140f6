"""A profiled step from recorded events: which kernel belongs to which module, its time, and the gaps.

The events are shaped as PyTorch's profiler writes them on an H100, so no GPU is needed here.
"""

from __future__ import annotations

from typing import Any

import pytest

from ingot.errors import DeviceError
from ingot.measure.bench.ceiling import Ceiling
from ingot.measure.bench.profile.step_figures import LeastWork, step_figures
from ingot.measure.bench.profile.trace_events import STEP, read_trace

CEILING = Ceiling(read_gb_s=1000.0, matmul_tflop_s=100.0, dtype="bf16", read_bytes=1, matmul_size=1)
HOST = {"pid": 7, "tid": 70}


def span(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    place = (
        HOST if cat in ("user_annotation", "cpu_op", "cuda_runtime", "cuda_driver") else {"pid": 0, "tid": 7}
    )
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, **place, "args": args}


def launched(call: str, at: float, kernel: str, start: float, us: float, number: int) -> list[dict[str, Any]]:
    """A kernel and the call that launched it."""
    cat = "cuda_driver" if call == "cuLaunchKernelEx" else "cuda_runtime"
    on_device = "gpu_memcpy" if kernel.startswith("Memcpy") else "kernel"
    return [
        span(cat, call, at, 2, correlation=number),
        span(on_device, kernel, start, us, correlation=number, stream=7),
    ]


def gpu_step(at: float, number: int) -> list[dict[str, Any]]:
    """A step from ``at`` on: 40 µs in QKV of which 10 in a norm, 30 in attention, and a copy to the host.

    The host runs far ahead of the device: every kernel runs outside the range that launched it.
    """
    return [
        span("user_annotation", STEP, at, 200),
        span("user_annotation", "qkv", at + 1, 20),
        *launched("cuLaunchKernelEx", at + 2, "few_qkv_kernel", at + 40, 30, number),
        span("user_annotation", "norm", at + 10, 5),
        *launched("cudaLaunchKernel", at + 11, "norm_kernel", at + 70, 10, number + 1),
        span("user_annotation", "attention", at + 25, 5),
        *launched("cuLaunchKernelEx", at + 26, "paged_kernel", at + 90, 30, number + 2),
        *launched("cudaMemcpyAsync", at + 40, "Memcpy DtoH (Device -> Pinned)", at + 120, 2, number + 3),
        span("gpu_user_annotation", "qkv", at + 40, 40),
        span("cuda_runtime", "cudaEventSynchronize", at + 45, 100, correlation=number + 4),
    ]


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    *launched("cuLaunchKernelEx", 1, "few_qkv_kernel", 5, 1000, 1),  # before the first step
    *gpu_step(2000, 10),
    *gpu_step(3000, 20),
    {"ph": "f", "name": "ac2g", "id": 20, "pid": 0, "tid": 7, "ts": 3040, "cat": "ac2g", "bp": "e"},
]


def figures(events: list[dict[str, Any]], work: dict[str, LeastWork] | None = None) -> dict[str, Any]:
    return step_figures(read_trace(events, on_gpu=True), work or {}, CEILING)


def test_a_kernel_belongs_to_the_innermost_module_that_launched_it() -> None:
    found = figures(EVENTS)
    by_name = {module["module"]: module for module in found["modules"]}
    assert {name: module["us"] for name, module in by_name.items()} == {
        "qkv": 30,
        "attention": 30,
        "norm": 10,
        "other": 2,
    }
    assert [kernel["kernel"] for kernel in by_name["norm"]["kernels"]] == ["norm_kernel"]
    assert by_name["other"]["kernels"][0]["kernel"].startswith("Memcpy")


def test_figures_are_of_one_step() -> None:
    found = figures(EVENTS)
    assert (found["launches"], found["us"], found["share"]) == (4, 72, 1.0)
    assert found["span_us"] == 82
    assert found["busy_us"] == 72
    shares = [module["share"] for module in found["modules"]]
    assert sum(shares) == pytest.approx(1, abs=1e-3)
    assert shares == sorted(shares, reverse=True)


def test_a_gap_is_time_in_which_no_kernel_runs() -> None:
    gaps = figures(EVENTS)["gaps"]
    assert gaps == {
        "us": 10,
        "count": 1,
        "share": round(10 / 82, 4),
        "longest_us": 10,
        "longest_before": "attention",
    }


def test_kernels_that_overlap_are_busy_once() -> None:
    beside = [
        span("user_annotation", STEP, 0, 100),
        *launched("cuLaunchKernelEx", 1, "long", 10, 40, 1),
        *launched("cuLaunchKernelEx", 2, "inside", 20, 10, 2),
        *launched("cuLaunchKernelEx", 3, "starts early", 45, 15, 3),
    ]
    found = figures(beside)
    assert found["us"] == 65
    assert (found["busy_us"], found["span_us"], found["gaps"]["count"]) == (50, 50, 0)


def test_a_graph_is_one_launch_of_many_kernels() -> None:
    graph = [
        span("user_annotation", STEP, 0, 100),
        span("cuda_runtime", "cudaGraphLaunch", 1, 5, correlation=3),
    ]
    graph += [span("kernel", f"kernel {i}", 20 + 10 * i, 9, correlation=3) for i in range(4)]
    assert read_trace(graph, on_gpu=True).graphs == 1
    assert read_trace(EVENTS, on_gpu=True).graphs == 0
    found = figures(graph)
    assert (found["launches"], found["us"]) == (4, 36)
    assert found["gaps"]["us"] == 3


def test_a_kernel_without_a_recorded_launch_counts_where_it_ran() -> None:
    lost = [*EVENTS, span("kernel", "lost", 2190, 5), span("kernel", "lost in no step", 2500, 5)]
    found = figures(lost)
    other = next(module for module in found["modules"] if module["module"] == "other")
    assert {kernel["kernel"]: kernel["launches"] for kernel in other["kernels"]}["lost"] == 0.5
    assert "lost in no step" not in str(found)


def test_rates_are_least_work_by_time() -> None:
    work = {"qkv": LeastWork(15e6, 3e6), "attention": LeastWork(3e6, 2.4e9)}
    modules = {module["module"]: module for module in figures(EVENTS, work)["modules"]}
    qkv, attention = modules["qkv"], modules["attention"]
    assert (qkv["gb_s"], qkv["tflop_s"]) == (500, 0.1)
    assert (qkv["bound"], qkv["share_of_ceiling"]) == ("read", 0.5)
    assert (attention["gb_s"], attention["tflop_s"]) == (100, 80)
    assert (attention["bound"], attention["share_of_ceiling"]) == ("matmul", 0.8)
    assert modules["norm"]["gb_s"] is None


def test_an_operator_on_a_cpu_has_its_own_time() -> None:
    events = [
        span("cpu_op", "aten::mm", 1, 500),  # before the step
        span("user_annotation", STEP, 1000, 100),
        span("user_annotation", "qkv", 1001, 60),
        span("cpu_op", "aten::linear", 1010, 40),
        span("cpu_op", "aten::t", 1011, 4),
        span("cpu_op", "aten::transpose", 1012, 1),
        span("cpu_op", "aten::mm", 1016, 30),
        span("cpu_op", "aten::argmax", 1070, 10),
    ]
    trace = read_trace(events, on_gpu=False)
    assert {op.name: (op.module, op.us) for op in trace.ops} == {
        "aten::linear": ("qkv", 6),
        "aten::t": ("qkv", 3),
        "aten::transpose": ("qkv", 1),
        "aten::mm": ("qkv", 30),
        "aten::argmax": ("other", 10),
    }
    found = step_figures(trace, {}, CEILING)
    assert (found["us"], found["busy_us"], found["gaps"]["us"]) == (50, 50, 20)


def test_events_of_another_thread_are_of_no_module() -> None:
    elsewhere = span("cpu_op", "aten::mm", 1012, 5) | {"tid": 71}
    events = [span("user_annotation", STEP, 1000, 100), span("cpu_op", "aten::add", 1010, 5), elsewhere]
    assert [op.name for op in read_trace(events, on_gpu=False).ops] == ["aten::add"]


@pytest.mark.parametrize("events", [[], [span("user_annotation", STEP, 0, 10)], EVENTS[:3]])
def test_a_profiler_that_saw_nothing_is_an_error(events: list[dict[str, Any]]) -> None:
    with pytest.raises(DeviceError, match="recorded no kernels") as caught:
        read_trace(events, on_gpu=True)
    assert "KINETO_LOG_LEVEL" in str(caught.value)
