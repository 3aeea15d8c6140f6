"""``ingot`` as a process: signals, pipes and terminals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ingot.building.builder import build
from tests.e2e.tiny import write_tiny
from tests.forked import take_terminal

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds; only a failing test waits this long
INGOT = [sys.executable, "-m", "ingot"]

# A build that takes about 7 seconds: 17 tensors, each of which waits.
SLOW_BUILD = """# may be forked
import sys, time
from ingot.cli.main import app
from ingot.engine.weights_file import WeightsWriter
add = WeightsWriter.add
WeightsWriter.add = lambda self, *values: (time.sleep(0.4), add(self, *values))
app(sys.argv[1:], prog_name="ingot")
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("process")
    checkpoint = write_tiny(folder / "checkpoint", seq_length=8192)
    return build(checkpoint, folder / "engine", device="cpu", max_batch_size=1)


def start(words: list[object], **pipes: object) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    return subprocess.Popen([str(w) for w in words], env=environment, cwd=ROOT, **pipes)  # type: ignore[call-overload,no-any-return]


def wait_for(what: object, condition: object) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"no {what} in {PATIENCE:.0f} s"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_an_interrupted_build_leaves_nothing_and_keeps_the_engine(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    checkpoint = write_tiny(tmp_path / "checkpoint")
    target = build(checkpoint, tmp_path / "out" / "engine", device="cpu", dtype="fp32")
    before = {file.name: file.read_bytes() for file in target.rglob("*") if file.is_file()}
    words = ["build", checkpoint, "-o", target, "--force", "--dtype", "fp16", "--device", "cpu"]
    process = start([sys.executable, "-c", SLOW_BUILD, *words], stderr=subprocess.PIPE)
    staged = lambda: [f for f in target.parent.iterdir() if f.name.startswith(".ingot-build-")]  # noqa: E731
    wait_for("staged folder", lambda: staged() and any(staged()[0].iterdir()))
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, errors.decode()
    assert b"Traceback" not in errors
    assert list(target.parent.iterdir()) == [target]
    assert {file.name: file.read_bytes() for file in target.rglob("*") if file.is_file()} == before


def test_run_streams_into_a_pipe(engine: Path) -> None:
    words = ["run", engine, "a", "b", "--max-new-tokens", 8000, "--ignore-eos", "--device", "cpu"]
    process = start([*INGOT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(12)
    assert process.poll() is None  # thousands of tokens are to come
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130


def test_a_closed_pipe_is_not_an_error(engine: Path) -> None:
    words = ["run", engine, *["a", "b"] * 20, "--max-new-tokens", 64, "--ignore-eos", "--device", "cpu"]
    process = start([*INGOT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 141
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_a_message(engine: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = start([*INGOT, "inspect", engine], stdout=full, stderr=subprocess.PIPE)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert errors.splitlines()[0] == b"error: No space left on device"
    assert b"Traceback" not in errors


def test_ctrl_c_stops_an_answer_and_not_the_chat(engine: Path) -> None:
    words = ["chat", engine, "--device", "cpu", "--ignore-eos", "--max-new-tokens", 8000]
    pipe = subprocess.PIPE
    process = start([*INGOT, *words], stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"/system still here\n/exit\n")
    process.stdin.flush()
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert out.endswith(b"\n")
    assert b"(stopped)" in errors
    assert b"system: still here" in errors
    assert b"Traceback" not in errors


class Terminal:
    """A process whose three streams are one terminal."""

    def __init__(self, words: list[object]) -> None:
        self._own, other = pty.openpty()
        self.process = start(
            [*INGOT, *words],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(other)
        self.seen = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._own, 4096):
                self.seen += data
        except OSError:  # the terminal's other end is closed
            return

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def expect(self, pattern: bytes) -> None:
        wait_for(pattern, lambda: re.search(pattern, self.seen))

    def end(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        os.close(self._own)
        return code


def test_chat_on_a_terminal(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")  # nobody answers where the cursor is
    terminal = Terminal(["chat", engine, "--device", "cpu", "--max-new-tokens", 9, "--ignore-eos"])
    terminal.expect(b">>>")
    terminal.type("half a line\x03")
    terminal.expect(rb"(?s)/exit or Ctrl-D ends the chat.*>>>")  # keys before the prompt are the tty's
    terminal.type("/set max_n\t 2\r")
    terminal.expect(rb"(?s)max_new_tokens: 2.*>>>")
    terminal.type("\x1b[200~hello\rall\x1b[201~\r")
    terminal.expect(rb"(?s)cut off; --max-new-tokens.*>>>")
    terminal.type(f"/save {tmp_path}/chat.json\r")
    terminal.expect(rb"(?s)2 messages.*>>>")
    terminal.type("/set max_new_tokens 8000\r")
    terminal.expect(rb"(?s)max_new_tokens: 8000.*>>>")
    terminal.type("again\r")
    terminal.expect(rb"(?s)max_new_tokens: 8000.*again.*\n.{2000}")
    terminal.type("\x03")  # it stops the answer, and not the chat
    terminal.expect(rb"(?s)\(stopped\).*>>>")
    terminal.type("/system still here\r")
    terminal.expect(rb"(?s)system: still here.*>>>")
    terminal.type("\x04")
    assert terminal.end() == 0
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved[0] == {"role": "user", "content": "hello\nall"}
    assert b"+hello\n+all\n" in (tmp_path / "ingot" / "chat_history").read_bytes()
    assert b"Traceback" not in terminal.seen
    assert terminal.process.returncode == 0


def test_run_streams_to_a_terminal_without_control_characters(engine: Path) -> None:
    words = ["run", engine, "hello", "--temperature", 1, "--seed", 1, "--max-new-tokens", 300, "--ignore-eos"]
    terminal = Terminal([*words, "--device", "cpu"])
    terminal.expect(rb"300 tokens in [0-9.]+ s")
    assert terminal.end() == 0
    answer = terminal.seen.split(b"300 tokens")[0]
    answer = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", answer)  # our own status line and colours
    assert re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]", answer) is None
    assert "\ufffd".encode() in answer
