"""A run of tests in forks reports what a run in one process reports, and a fork that dies fails one test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests are not forked beside a GPU")

CONFTEST = """
import os, time
import pytest
from tests.forked_runs import ForkedRun

def pytest_addoption(parser):
    parser.addoption("--forks", type=int, default=0)

def pytest_runtestloop(session):
    if session.config.option.forks:
        unit = lambda nodeid: nodeid.partition("::")[0]
        ForkedRun(session, unit, lambda: None).run(session.config.option.forks)
        return True

@pytest.fixture(scope="session")
def session_file():
    yield
    with open("ended", "a") as file:
        file.write(f"{os.getpid()} ")

@pytest.fixture(scope="session")
def shared(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared", numbered=False)  # refused where there is one
    while len([*folder.parents[1].glob("fork*/shared")]) < request.config.option.forks:
        time.sleep(0.01)

@pytest.fixture(scope="module")
def module_file():
    yield
    with open("modules", "a") as file:
        file.write("module ")
"""
USUAL = """
import os, sys, warnings
import pytest

class Own(UserWarning): ...

def test_shared(shared, session_file, module_file): ...
def test_fails():
    print("printed")
    os.system("echo by a program")
    print("an error", file=sys.stderr)
    assert 1 == 2
@pytest.mark.skip(reason="this one")
def test_skips(): ...
@pytest.mark.xfail
def test_fails_as_expected(): assert 0
def test_warns(): warnings.warn(Own(object()))
def test_teardown(broken): ...
@pytest.fixture
def broken():
    yield
    raise ValueError("at the end")
def test_passes(session_file): ...
"""
OTHER = """
def test_shared(shared, session_file, module_file): ...
def test_passes(session_file): ...
"""


def run(folder: Path, *words: str, **files: str) -> tuple[int, str, dict[str, list[str]]]:
    """pytest's exit code, its output, and of each test what is not as it should be."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    options = ["-rA", "-p", "no:cacheprovider", "--junitxml=found.xml", "--basetemp=temp"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with (folder / "output").open("w") as file:
        command = [sys.executable, "-m", "pytest", *options, *words]
        done = subprocess.run(command, cwd=folder, env=variables, stdout=file, stderr=file, timeout=60)
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(folder / "found.xml").iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        found[name] = [f"{child.tag}: {child.get('message')}" for child in case]
    return done.returncode, (folder / "output").read_text(), found


def test_it_reports_what_one_process_does(tmp_path: Path) -> None:
    found = {}
    for count in (0, 2):
        (tmp_path / f"{count}").mkdir()
        code, output, cases = run(tmp_path / f"{count}", f"--forks={count}", usual=USUAL, other=OTHER)
        lines = sorted(
            line
            for line in output.splitlines()
            if re.match("PASSED|FAILED|ERROR|SKIPPED|XFAIL|-+ Captured", line)
        )
        totals = re.sub(" in .*", "", output.splitlines()[-1])
        found[count] = code, cases, lines, totals, output.count("Own:"), output.count("at the end")
        for text in ("printed", "by a program", "an error", "assert 1 == 2"):
            assert text in output
        assert len((tmp_path / f"{count}" / "modules").read_text().split()) == 2
    assert found[2] == found[0]
    assert len(found[2][1]) == 9
    # Each process ends its own fixtures, once.
    ended = (tmp_path / "2" / "ended").read_text().split()
    assert len(ended) == len({*ended}) == 2


def test_a_fork_that_dies_fails_its_test_alone(tmp_path: Path) -> None:
    dies = "import os, signal, time, warnings\ndef test_before(): warnings.warn('once')\n"
    dies += "def test_killed():\n    if os.fork() == 0:\n        time.sleep(3)\n"  # it has the fork's files
    dies += "    os.kill(os.getpid(), signal.SIGKILL)\ndef test_after(): ...\n"
    code, output, cases = run(
        tmp_path, "--forks=1", dies=dies, exits="import os\ndef test_it(): os._exit(3)\n"
    )
    assert code == 1, output
    assert ", 1 warning in" in output.splitlines()[-1]
    assert cases == {
        "test_dies.test_before": [],
        "test_dies.test_killed": ["failure: The process of this test ended by SIGKILL."],
        "test_dies.test_after": [],
        "test_exits.test_it": ["failure: The process of this test ended with exit code 3."],
    }


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    waits = "import time\ndef test_waits(session_file): time.sleep(50)\n"
    fails = "import time\ndef test_fails():\n    time.sleep(0.2)\n    assert 0\ndef test_after(): ...\n"
    code, output, _ = run(tmp_path, "--forks=2", "-x", waits=waits, fails=fails)
    assert code == 2 or "stopping after 1 failures" in output, output
    assert "1 failed in" in output.splitlines()[-1]
    assert (tmp_path / "ended").exists()  # of the test that was interrupted
