"""Kernels that are built before they run: none runs meanwhile; what fails is raised where it is launched."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.compiler
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ingot.kernels import build_worker, triton_hooks
from ingot.kernels.built_ahead import (
    _Noted,
    build_side_by_side,
    built_ahead,
    can_note_launches,
    noted_folders,
    without_launches,
)
from ingot.kernels.triton_hooks import active_mode


def _copy(x, y, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(y, tl.load(x))


class Machine:
    """A GPU that is not there, and a compiler that builds nothing: what was built and launched."""

    def __init__(self) -> None:
        self.built: list[int] = []
        self.launched: list[int] = []
        self.handed_over: list[list[int]] = []
        self.kept: set[int] = set()
        self.error: Exception | None = None
        self.kernel = JITFunction(_copy)
        self.x = torch.zeros(4)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def hand_over(self, kernels: list[Any]) -> None:
        self.handed_over.append([size for source, _, _ in kernels for size in source.constants.values()])

    def get_group(self, name: str) -> dict[str, str] | None:
        return {} if self.asked in self.kept else None

    def cache_key(self, source: Any, *unused: Any) -> str:
        (self.asked,) = source.constants.values()
        return str(self.asked)

    def compile(self, src: Any, **options: Any) -> Any:
        (size,) = src.constants.values()
        if self.error is not None:
            raise self.error
        self.built.append(size)
        return _Built(self, size)

    def launch(self, size: int) -> None:
        self.kernel[(1,)](self.x, self.x, SIZE=size)


class _Built:
    def __init__(self, machine: Machine, size: int) -> None:
        self._machine, self._size = machine, size
        self.function = self.packed_metadata = None

    @property
    def run(self) -> Callable[..., None]:
        return lambda *_: self._machine.launched.append(self._size)

    def launch_metadata(self, *_: object) -> None: ...


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    before = driver._active
    driver.set_active(made)
    monkeypatch.setattr(triton.compiler, "compile", made.compile)
    monkeypatch.setattr("triton.runtime.jit.get_cache_key", made.cache_key)
    monkeypatch.setattr("ingot.kernels.built_ahead.get_cache_manager", lambda key: made)
    monkeypatch.setattr("ingot.kernels.built_ahead.build_side_by_side", made.hand_over)
    monkeypatch.setattr("ingot.kernels.built_ahead._NOTED", _Noted())
    monkeypatch.setattr("ingot.kernels.built_ahead.find_kernel_folder", lambda: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    yield made
    driver.set_active(before)


def test_kernels_are_handed_over_once_and_run_after_the_block(machine: Machine) -> None:
    with built_ahead():
        for size in (1, 2, 3, 1, 2):
            machine.launch(size)
    assert machine.handed_over == [[1, 2, 3]]
    assert machine.built == machine.launched == []
    machine.launch(2)
    machine.launch(2)
    assert (machine.built, machine.launched) == ([2], [2, 2])


def test_folders_of_kernels_are_noted_built_or_not(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that were found, which a later start needs as well."""
    monkeypatch.setattr(machine, "cache_dir", "/triton/ABC", raising=False)
    machine.kept.add(1)
    with built_ahead():
        machine.launch(1)
    assert noted_folders() == {"ABC"}
    monkeypatch.setattr(machine, "cache_dir", "/triton/DEF")
    with built_ahead():
        machine.launch(2)
    assert noted_folders() == {"ABC", "DEF"}


def test_triton_gets_something_to_keep_at_once(machine: Machine) -> None:
    """Of its versions some keep by themselves what is handed over; others would prepare every launch anew."""
    noted = _Noted()
    kept: list[Any] = []
    source = SimpleNamespace(name="copy", constants={(2,): 1})
    noted._launched = SimpleNamespace()
    noted._launched.compile = None
    machine.cache_key(source)

    def build() -> None:
        noted._launched.compile(source, target=None, options=None)  # type: ignore[union-attr]

    assert noted.submit("key", build, kept.append) is kept[0]
    assert noted.take_missing() == [(source, None, None)]
    assert noted._launched.compile is None


def test_what_an_earlier_block_launched_is_built_with_the_next(machine: Machine) -> None:
    with without_launches():
        machine.launch(1)
    assert machine.handed_over == []
    with built_ahead():
        for size in (1, 2, 3):
            machine.launch(size)
    with built_ahead():
        machine.launch(1)
    assert machine.handed_over == [[1, 2, 3]]


def test_kernels_in_the_folder_and_a_few_are_not_handed_over(machine: Machine) -> None:
    machine.kept = {2}
    with built_ahead():
        for size in (1, 2, 3):
            machine.launch(size)
    assert machine.handed_over == []


def test_on_one_core_kernels_are_built_where_they_are_launched(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    with built_ahead():
        for size in (1, 2, 3):
            machine.launch(size)
    assert machine.handed_over == []


def test_integers_that_no_kernel_has_written_are_zeros(machine: Machine) -> None:
    with built_ahead():
        x = torch.empty(8, dtype=torch.int64)
        made = [x, torch.empty_like(x), x.new_empty(8), torch.empty_strided((8,), (1,), dtype=torch.int32)]
        floats = torch.empty(8)
    assert all((tensor == 0).all() for tensor in made)
    assert floats.isnan().all()  # as the tests fill what is not written


def test_a_kernel_that_cannot_be_built_raises_where_it_is_launched(machine: Machine) -> None:
    machine.error = OSError("the disk is full")
    with built_ahead():
        machine.launch(1)
    with pytest.raises(OSError, match="the disk is full"):
        machine.launch(1)
    machine.error = None
    machine.launch(1)
    assert (machine.built, machine.launched) == ([1], [1])


def test_an_interrupted_block_leaves_launches_as_they_were(machine: Machine) -> None:
    usual = JITFunction.run

    def interrupted() -> None:
        with built_ahead():
            machine.launch(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert JITFunction.run is usual
    assert machine.handed_over == []
    machine.launch(1)
    assert machine.built == machine.launched == [1]


def test_launches_of_other_threads_run(machine: Machine) -> None:
    with built_ahead():
        other = threading.Thread(target=machine.launch, args=(3,))
        other.start()
        other.join()
    assert machine.launched == [3]


# --- the processes ---------------------------------------------------------------------------------------


def in_processes(monkeypatch: pytest.MonkeyPatch, kernels: list[Any], build: Callable[..., None]) -> None:
    """The worker's ``main``, in this process and those that it forks."""
    monkeypatch.setattr(build_worker, "end_with", lambda parent: None)
    monkeypatch.setattr(build_worker, "build", build)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps(kernels))))
    build_worker.main(0)


def test_each_kernel_is_built_once_by_two_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(name: str, target: None, options: None) -> None:
        with (tmp_path / name).open("a") as file:
            file.write(f"{os.getpid()} ")
        both = time.monotonic() + 5
        while len(builders(tmp_path)) < 2 and time.monotonic() < both:
            time.sleep(0.01)

    in_processes(monkeypatch, [(f"kernel{index}", None, None) for index in range(300)], build)
    assert len(list(tmp_path.iterdir())) == 300
    assert all(len(path.read_text().split()) == 1 for path in tmp_path.iterdir())
    assert len(builders(tmp_path) - {os.getpid()}) == 2


def builders(folder: Path) -> set[int]:
    return {int(number) for path in folder.iterdir() for number in path.read_text().split()}


def test_a_kernel_that_ends_its_process_and_one_that_fails_leave_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(name: str, target: None, options: None) -> None:
        if name == "fatal":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "wrong":
            raise ValueError(name)
        (tmp_path / name).touch()

    names = ["fatal", "wrong", *"abcd"]
    in_processes(monkeypatch, [(name, None, None) for name in names], build)
    assert sorted(path.name for path in tmp_path.iterdir()) == list("abcd")


def test_a_process_that_cannot_start_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels are built where they are launched."""
    monkeypatch.setattr("ingot.kernels.built_ahead._BOOT", "raise SystemExit(1)")
    build_side_by_side([("kernel", None, None)] * 20000)
    assert "building 20000 kernels on" in caplog.text


def in_python(code: str, folder: Path) -> subprocess.Popen[str]:
    """A process that compiles kernels instead of interpreting them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE)


@pytest.mark.slow
def test_what_was_built_is_found(tmp_path: Path) -> None:
    """Kernels with named tuples among their constants, for a GPU that is not there."""
    code = """
import triton
from triton.backends.compiler import GPUTarget
from ingot.kernels.built_ahead import build_side_by_side
from tests.kernels.compile_kernels import CASES, caught_launches, source_of
names = [name for name in CASES if name.startswith(("norms 4096", "few rows", "token feed"))][:4]
launches = [one for name in names for one in caught_launches(CASES[name])][:6]
target = GPUTarget("cuda", 90, 32)
kernels = [(source, target, options) for source, options in (source_of(*one) for one in launches)]
build_side_by_side(kernels)
hits = []
triton.knobs.compilation.listener = lambda **seen: hits.append(seen["cache_hit"])
for source, _, options in kernels:
    triton.compile(source, target=target, options=options)
print(len(hits), all(hits))
"""
    process = in_python(code, tmp_path)
    said, _ = process.communicate(timeout=300)
    count, every = said.split()
    assert (int(count) >= 4, every) == (True, "True")
    assert not list(tmp_path.glob("**/tmp.pid*")), "an unfinished file is left"


@pytest.mark.slow
def test_no_process_outlives_the_one_that_asked(tmp_path: Path) -> None:
    code = f"""
from ingot.kernels import built_ahead
built_ahead._BOOT = '''
import json, os, sys, time
sys.path[:] = json.loads(sys.argv[1])
from ingot.kernels import build_worker
def build(*kernel):
    open("{tmp_path}/" + str(os.getpid()), "w").close()
    time.sleep(300)
build_worker.build = build
build_worker.main(int(sys.argv[2]))
'''
built_ahead.build_side_by_side([(None, None, None)] * 4)
"""
    process = in_python(code, tmp_path / "cache")
    until = time.monotonic() + 120
    while not (found := [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.wait()
    while any(is_alive(one) for one in found):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_this_triton_has_the_hooks() -> None:
    """Where this fails after an update of Triton, starts build one kernel after the other: see what replaces
    the part that is named, and ``triton_hooks``.
    """
    assert triton_hooks.hooks_missing() is None


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        (None, "_async_compile.active_mode"),
        (SimpleNamespace(), "_async_compile.active_mode"),
        (SimpleNamespace(active_mode=None), "_async_compile.active_mode"),
        (SimpleNamespace(active_mode=active_mode), "AsyncCompileMode.submit"),
        (
            SimpleNamespace(
                active_mode=active_mode,
                AsyncCompileMode=SimpleNamespace(submit=lambda self, compile_fn: None),
            ),
            "AsyncCompileMode.submit",
        ),
    ],
)
def test_a_triton_without_hooks_launches_and_says_so(
    module: Any,
    missing: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Kernels run in the block then, and none is handed over."""
    monkeypatch.setattr(triton_hooks, "_mode", module)
    can_note_launches.cache_clear()
    try:
        for size in range(4):
            with built_ahead():
                machine.launch(size)
                assert machine.launched == list(range(size + 1))
                assert torch.empty(3, dtype=torch.int64).fill_(5).tolist() == [5] * 3
    finally:
        can_note_launches.cache_clear()
    assert machine.built == [0, 1, 2, 3]
    assert not machine.handed_over
    (line,) = [record.message for record in caplog.records]
    assert missing in line
    assert triton.__version__ in line
    assert "one after the other" in line


def test_a_launch_without_warmup_is_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, grid: None)
    assert "warmup" in str(triton_hooks.hooks_missing())


def test_no_module_of_triton_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, triton_hooks._MODULE, None)
    assert triton_hooks._found_mode() is None


def test_the_compiler_s_hash_is_begun_beside_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    done = threading.Event()

    def triton_key() -> None:
        begun.append(threading.current_thread().name)
        done.set()

    assert triton_hooks.cache.triton_key.cache_info, "a second call gets the first one's hash"
    monkeypatch.setattr(triton_hooks.cache, "triton_key", triton_key)
    triton_hooks.hash_compiler()
    assert done.wait(10)
    assert begun == ["compiler's hash"]
    monkeypatch.delattr(triton_hooks.cache, "triton_key")
    triton_hooks.hash_compiler()
