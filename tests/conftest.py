"""Where the third-party test data is, and which tests need a GPU."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadFileScheduling

from tests.forked import start_helper
from tests.forked_workers import fork_workers
from tests.grid import make_no_slow_cases, mark_the_rest_slow
from tests.kernels.compiled_once import compile_once

if not torch.cuda.is_available():
    # Without a GPU the kernels' numbers are checked under Triton's interpreter, which must be chosen before
    # any kernel is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.pop("INGOT_DEBUG", None)  # a traceback would be among what verbs print
os.environ.pop("COLUMNS", None)  # of pytest's workers; verbs would break their tables at it

# Test workers share the cores; threads that wait for each other cost more than they bring.
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("INGOT_TEST_DATA", ROOT.parent / "shared" / "data"))


# Folders whose files share servers and engines: one worker takes all of a folder.
TOGETHER = ("tests/speech", "tests/serve")
# Files and folders that take long: the workers of ``make test`` take them whole in this order, and short
# ones are left to fill up the end.
LONGEST = (
    "tests/kernels/test_compile_sm_90.py",
    "tests/kernels/test_compile_sm_80.py",
    "tests/kernels/test_compile_few.py",
    *TOGETHER,
    "tests/support/test_cells.py",
    "tests/quant/test_engines.py",
    "tests/measure/evaluate/test_doctor.py",
    "tests/gguf/test_gguf.py",
    "tests/quant/test_cpu_layers.py",
    "tests/quant/test_calibrated_speech.py",
    "tests/unit/test_hub.py",
    "tests/vision/test_verbs.py",
    "tests/vision/test_server.py",
    "tests/e2e/test_invariance.py",
    "tests/e2e/test_grammar.py",
    "tests/quant/test_packed.py",
    "tests/quant/test_source.py",
    "tests/vision/test_calibration.py",
    "tests/parity/test_fused_steps.py",
    "tests/measure/align/test_small_faults.py",
    "tests/unit/test_chat_templates.py",
    "tests/unit/test_audio_length.py",
    "tests/quant/test_fp8_blocks.py",
    "tests/vision/test_align.py",
    "tests/measure/bench/test_sweep_speech.py",
)
_MANY_OBJECTS = 20_000


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of third-party test data; skips where it is absent."""
    if not DATA.is_dir():
        pytest.skip(f"no test data at {DATA}; set INGOT_TEST_DATA")
    return DATA


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    """Where kernels are interpreted, the interpreter repeats nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from tests.kernels.quick_interpreter import quick_interpreter

    with quick_interpreter():
        yield


@pytest.fixture(scope="session", autouse=True)
def frozen_libraries() -> Iterator[None]:
    """What a load test or a server in this process gives back to the garbage collector is its own: the
    libraries stay out of every collection (see ``pytest_collection_finish``).
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """No test cuts the power: what is written need not be on the disk."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def same_group_limits() -> Iterator[None]:
    """What the control groups of this process leave is read once, not each time a model is opened."""
    from ingot import device

    read = device._group_limits
    once = functools.cache(lambda: [*read(device.PROC)])
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            device, "_group_limits", lambda proc: once() if proc == device.PROC else read(proc)
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def brief_proofs() -> Iterator[tuple[int, dict[str, int]]]:
    """Builds prove with 5 new tokens a golden case: enough to leave a cache's block; and without the case of
    200 tokens, a third of what ``verify`` takes. Gives how many new tokens it is for users.
    """
    from ingot.building.golden import golden_cases as golden
    from ingot.building.golden import golden_prompts

    whole = golden.NEW_TOKENS, golden_prompts._LENGTHS
    few = {name: length for name, length in golden_prompts._LENGTHS.items() if name != "long"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(golden, "NEW_TOKENS", 5)
        monkeypatch.setattr(golden_prompts, "_LENGTHS", few)
        yield whole


@pytest.fixture
def fresh_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of ``LimitedProcess`` are not forked, where a test measures what they take."""
    monkeypatch.setattr("tests.forked_workers._WORKERS", ())


@pytest.fixture(scope="module")
def long_proofs(brief_proofs: tuple[int, dict[str, int]]) -> Iterator[None]:
    """Builds prove with the case of 200 tokens, too."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("ingot.building.golden.golden_prompts._LENGTHS", brief_proofs[1])
        yield


@pytest.fixture
def whole_proofs(brief_proofs: tuple[int, dict[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds prove as they do for users."""
    monkeypatch.setattr("ingot.building.golden.golden_cases.NEW_TOKENS", brief_proofs[0])
    monkeypatch.setattr("ingot.building.golden.golden_prompts._LENGTHS", brief_proofs[1])


@pytest.fixture
def weights_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models on the CPU keep the weights that a GPU's kernels read, whose references a test then runs."""
    from ingot.layers.cpu_weights import settle_weights
    from ingot.runtime import setup

    monkeypatch.setattr(setup, "settle_weights", lambda model, packs: settle_weights(model, packs=False))


@pytest.fixture
def without_llvmlite(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What users of plain ``ingot`` have: a CPU multiplies by what PyTorch packs."""
    from ingot.kernels.cpu import llvm_module
    from ingot.memory import memory_sizes

    # The last counts packed weights.
    known = (llvm_module._binding, llvm_module.host_cpu, memory_sizes._counted)
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    for one in known:
        one.cache_clear()
    yield
    for one in known:
        one.cache_clear()


@pytest.fixture
def cpu_kernels() -> None:
    """A CPU multiplies by kernels of ours; skips where they cannot be compiled."""
    from ingot.kernels.cpu.llvm_module import host_cpu

    cpu = host_cpu()
    if cpu is None or not cpu.fma:
        pytest.skip("needs llvmlite, and PyTorch with GNU's OpenMP")


@pytest.fixture(scope="session")
def golden(data: Path) -> Path:
    """The golden outputs of the original implementations."""
    return data / "golden"


def unit(nodeid: str) -> str:
    """What one worker takes as a whole: the test's file, or its folder."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)


class ByUnit(LoadFileScheduling):
    """As ``--dist loadfile``, by units."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByUnit | None:
    return ByUnit(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """In a fresh checkout each worker rewrites the asserts of its share of the test files, before all read
    them; pytest itself would rewrite all of them in every worker. What is collected stays: looking for
    garbage among it takes seconds.
    """
    gc.disable()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and not sys.dont_write_bytecode and session.config.args == session.config.getini("testpaths"):
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        for file in files[int(worker) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
            with suppress(Exception, pytest.skip.Exception):  # reported where it is collected
                importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    make_no_slow_cases(metafunc)


def pytest_collection_finish() -> None:
    """The libraries and the tests stay: the collections that Ingot asks for need not walk through them. The
    little garbage among them stays, too: to look for it takes each worker a second.
    """
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file leaves behind, engines that others share and libraries that it was the first to need, stays
    out of collections too, once it is so much that they take time.
    """
    if nextitem is not None and nextitem.path != item.path and len(gc.get_objects(2)) > _MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Processes of tests begin where this one is now: with all libraries, and before any test."""
    gc.enable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background, and passed on
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not session.config.option.collectonly and not torch.cuda.is_available():
        compile_once(ROOT / ".pytest_cache" / "cpu_kernels")
        start_helper()
        fork_workers()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first; grids are thinned out; tests marked ``gpu`` skip, saying so, where there
    is no CUDA device, and those marked ``network`` where they are not asked for.
    """
    mark_the_rest_slow(items)
    for item in items:
        asked = "network" in item.config.option.markexpr
        if item.get_closest_marker("network") is not None and not asked:  # a keyword is also of its folder
            item.add_marker(pytest.mark.skip(reason="needs the Hugging Face hub: make network-test"))
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(unit(item.nodeid), len(places)))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
