"""The messages that a user types in a terminal, or that a pipe holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ingot.cli.terminal.console import stderr

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.key_binding import KeyBindings

QUOTES = '"""'
_FIRST, _NEXT = ">>> ", "... "
_MOST_HISTORY = 1 << 20  # bytes


class Lines(Protocol):
    """Where messages come from."""

    def read(self, prompt: str) -> str | None:
        """One entry; None at the end."""
        ...


class PipedLines:
    """The lines of a stdin that is not a terminal."""

    def read(self, prompt: str) -> str | None:
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None


class TerminalLines:
    """Entries of a terminal, with editing, history and completion. A paste of several lines is one entry;
    Alt-Enter begins a new line.

    Args:
        commands: each command with the words that may follow it; None: a file.
    """

    def __init__(self, commands: Mapping[str, Sequence[str] | None], history: Path | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.output import create_output
        from prompt_toolkit.shortcuts import CompleteStyle

        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=_completer(commands),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            key_bindings=_keys(),
            prompt_continuation=_NEXT,
            enable_suspend=True,
            output=None if sys.stdout.isatty() else create_output(sys.stderr),
        )

    def read(self, prompt: str) -> str | None:
        try:
            return self._session.prompt(prompt)
        except EOFError:
            return None


def next_message(lines: Lines) -> str | None:
    """The next message or command, None at the end. On a terminal, Ctrl-C discards what was typed.

    Three double quotes begin and end a message of several lines. It keeps its opening quotes, which tell it
    from a command.
    """
    try:
        message = lines.read(_FIRST)
        if message is None or not message.startswith(QUOTES):
            return message
        while message.count(QUOTES) == 1 or not message.endswith(QUOTES):
            line = lines.read(_NEXT)
            if line is None:  # the end of a pipe closes the block
                break
            message += f"\n{line}"
        return message.removesuffix(QUOTES)
    except KeyboardInterrupt:
        if isinstance(lines, PipedLines):
            raise
        stderr().print("(discarded; /exit or Ctrl-D ends the chat)", style="dim")
        return ""


def history_file(environment: Mapping[str, str]) -> Path | None:
    """The terminal's history in ``XDG_STATE_HOME`` or ``~/.local/state``, None if it cannot be written. Only
    the user can read it; at 1 MiB the older half is dropped.
    """
    home = environment.get("XDG_STATE_HOME", "")
    try:
        state = Path(home) if home.startswith("/") else Path.home() / ".local" / "state"
        path = state / "ingot" / "chat_history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b") as file:
            os.fchmod(file.fileno(), 0o600)
            data = file.read()
            if len(data) > _MOST_HISTORY:
                _, _, kept = data[len(data) // 2 :].partition(b"\n\n")
                file.seek(0)
                file.write(b"\n" + kept)
                file.truncate()
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return None
    return path


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _completer(commands: Mapping[str, Sequence[str] | None]) -> Completer:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    files = PathCompleter(expanduser=True)

    class Commands(Completer):
        def get_completions(self, document: Document, complete_event: Any) -> Iterator[Completion]:
            text = document.text_before_cursor
            if not text.startswith("/") or "\n" in text:
                return
            name, space, rest = text.partition(" ")
            words: Sequence[str] | None = list(commands) if not space else commands.get(name, ())
            if words is None:
                yield from files.get_completions(Document(rest, len(rest)), complete_event)
                return
            typed = rest if space else name
            yield from (
                Completion(word, -len(typed)) for word in words if word.startswith(typed) and word != typed
            )

    return Commands()
