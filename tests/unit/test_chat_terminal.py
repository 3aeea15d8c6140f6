"""What ``ingot chat`` does on a terminal: editing, pastes, history, completion, and words at the edge."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from ingot.cli.chat import chat_lines
from ingot.cli.chat.chat import TerminalChat
from ingot.cli.chat.chat_lines import TerminalLines, history_file, next_message
from ingot.cli.chat.line_wrap import WordWrap
from ingot.errors import RequestError
from ingot.llm.outputs import Piece
from ingot.text.chat.chat_turns import Turns

COMMANDS = {"/set": ["temperature", "top_p"], "/save": None, "/system": []}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[PipeInput]:
    """What is typed at a terminal."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


def test_a_paste_of_several_lines_is_one_message(keys: PipeInput) -> None:
    lines = TerminalLines(COMMANDS, None)
    keys.send_text("see: \x1b[200~one\r\ntwo\n/exit\x1b[201~ end\r/help\r")
    assert next_message(lines) == "see: one\ntwo\n/exit end"
    assert next_message(lines) == "/help"


def test_alt_enter_and_quotes_make_lines(keys: PipeInput) -> None:
    lines = TerminalLines(COMMANDS, None)
    keys.send_text('one\x1b\rtwo\r"""three\r\rfour"""\r')
    assert next_message(lines) == "one\ntwo"
    assert next_message(lines) == '"""three\n\nfour'


def test_ctrl_c_discards_and_ctrl_d_ends(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    lines = TerminalLines(COMMANDS, None)
    keys.send_text("half\x03")
    assert next_message(lines) == ""
    assert "discarded; /exit or Ctrl-D" in capsys.readouterr().err
    keys.send_text('"""half\r\x03')
    assert next_message(lines) == ""
    keys.send_text("\x04")
    assert next_message(lines) is None


def test_the_history_is_kept_for_its_user_alone(keys: PipeInput, tmp_path: Path) -> None:
    path = history_file({"XDG_STATE_HOME": str(tmp_path / "state")})
    assert path == tmp_path / "state" / "ingot" / "chat_history"
    keys.send_text("first\x1b\rline\rsecond\r")
    one = TerminalLines(COMMANDS, path)
    assert [next_message(one), next_message(one)] == ["first\nline", "second"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    again = TerminalLines(COMMANDS, history_file({"XDG_STATE_HOME": str(tmp_path / "state")}))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys.send_text("\x1b[A\x1b[A\r")  # up, up
    assert next_message(again) == "first\nline"


def test_a_long_history_loses_its_oldest_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_lines, "_MOST_HISTORY", 2000)
    path = history_file({"XDG_STATE_HOME": str(tmp_path)})
    assert path is not None
    path.write_text("".join(f"\n# 2026-01-01 00:00:00\n+message {i}\n" for i in range(100)))
    assert history_file({"XDG_STATE_HOME": str(tmp_path)}) == path
    kept = [line for line in path.read_text().splitlines() if line.startswith("+")]
    assert 40 < len(kept) < 55
    assert kept == [f"+message {i}" for i in range(100 - len(kept), 100)]


def test_where_no_history_can_be_kept_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert history_file({"XDG_STATE_HOME": str(tmp_path / "file")}) is None
    (tmp_path / "ingot").mkdir()
    os.symlink(tmp_path / "file", tmp_path / "ingot" / "chat_history")
    assert history_file({"XDG_STATE_HOME": str(tmp_path)}) is None  # a link could lead anywhere
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    default = tmp_path / "home" / ".local" / "state" / "ingot" / "chat_history"
    assert history_file({}) == default
    assert history_file({"XDG_STATE_HOME": "not/absolute"}) == default


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("/s", ["/set", "/save", "/system"]),
        ("/set t", ["temperature", "top_p"]),
        ("/set temp", ["temperature"]),
        ("/system ", []),
        ("/nothing t", []),
        ("what /s", []),
        ("/s\n/s", []),
        ("", []),
    ],
)
def test_commands_are_completed(keys: PipeInput, typed: str, offered: list[str]) -> None:
    completer = TerminalLines(COMMANDS, None)._session.completer
    assert completer is not None
    found = list(completer.get_completions(Document(typed), CompleteEvent()))
    assert [one.text for one in found] == offered
    rest = typed.rpartition(" ")[2]
    assert all(one.start_position == -len(rest) for one in found)


def test_files_are_completed_after_save(keys: PipeInput, tmp_path: Path) -> None:
    (tmp_path / "chat one.json").write_text("")
    completer = TerminalLines(COMMANDS, None)._session.completer
    assert completer is not None
    (found,) = completer.get_completions(Document(f"/save {tmp_path}/chat o"), CompleteEvent())
    assert found.text == "ne.json"


def test_tab_completes(keys: PipeInput) -> None:
    lines = TerminalLines(COMMANDS, None)
    keys.send_text("/set te\t 0.5\r")
    assert next_message(lines) == "/set temperature 0.5"


class Echo(Turns[Any]):
    """Answers with the question."""

    def _begin(self, question: str) -> tuple[list[tuple[str, str]], Generator[Any, None, None]]:
        return self.turns, (Piece(text) for text in ("re: ", question))

    def set_values(self, values: Mapping[str, Any]) -> None:
        pass

    def _picture(self, path: str) -> dict[str, Any]:
        raise RequestError("no pictures")


def test_lines_that_begin_with_a_slash_are_a_command_only_alone(
    keys: PipeInput, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Echo(None)
    keys.send_text('\x1b[200~/etc/hosts\nwhat is this?\x1b[201~\r"""/help"""\r/nothing\r/exit\rnever\r')
    assert TerminalChat(talk, {}, []).run(TerminalLines(COMMANDS, None)) is False
    assert [question for question, _ in talk.turns] == ["/etc/hosts\nwhat is this?", "/help"]
    assert "no such command: /nothing" in capsys.readouterr().err


# --- words at the edge -----------------------------------------------------------------------------------


def wrapped(text: str, width: int, parts: int = 1) -> str:
    written: list[str] = []
    out = WordWrap(written.append, lambda: width)
    for start in range(0, len(text), parts):
        out.add(text[start : start + parts])
    out.end()
    return "".join(written)


@pytest.mark.parametrize("parts", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("12345678 x", ["12345678", "x"]),
        ("1234567 x", ["1234567", "x"]),
        ("123456 x", ["123456 x"]),
        ("a\n\nbc  de", ["a", "", "bc  de"]),
        ("    code line", ["    code", "line"]),
        ("1234567890123 x", ["1234567890123 x"]),  # the terminal's own second line holds both
        ("1234567890123 wxyz", ["1234567890123", "wxyz"]),
        ("ab 1234567890123", ["ab", "1234567890123"]),
        ("中文字符中文", ["中文字符", "中文"]),
        ("ab 中文字符", ["ab 中文", "字符"]),
        ("a\tbcd ef", ["a", "bcd ef"]),
        ("", [""]),
    ],
)
def test_no_word_crosses_the_edge(text: str, lines: list[str], parts: int) -> None:
    assert wrapped(text, 8, parts).split("\n") == lines


@pytest.mark.parametrize("width", [1, 2, 7, 40])
def test_only_spaces_become_line_ends(width: int) -> None:
    text = "  Words, words; and 1,234 numbers.\n\n```\n    def f():\n        return 中文\n```\nend "
    found = wrapped(text, width)
    assert "".join(found.split()) == "".join(text.split())
    assert found.count("\n") >= text.count("\n")


def test_a_word_is_written_when_it_ends_and_a_long_one_does_not_wait() -> None:
    written: list[str] = []
    out = WordWrap(written.append, lambda: 8)
    out.add("abc")
    assert written == []
    out.add(" d")
    assert written == ["abc"]
    out.add("efghijk")
    assert "".join(written) == "abc\ndefghijk"
    out.add("lm")
    out.end()
    assert "".join(written) == "abc\ndefghijklm"


def test_without_an_edge_all_is_written_at_once() -> None:
    written: list[str] = []
    out = WordWrap(written.append, None)
    out.add("a b")
    assert written == ["a b"]
    out.end()
    assert written == ["a b"]
