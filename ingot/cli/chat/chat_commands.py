"""The slash commands of a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot.cli.options.sampling_flags import check_alone, read_value, value_names
from ingot.cli.terminal.console import print_error, stderr
from ingot.errors import IngotError, RequestError

if TYPE_CHECKING:
    from ingot.text.chat.chat_turns import Turns

_KEYS = """A pasted text of several lines is one message; Alt-Enter begins a new line, and three double quotes
begin and end a block of lines. Tab completes, Ctrl-C stops an answer."""
_RESET = "default"


class Command(NamedTuple):
    usage: str
    help: str
    run: Callable[[str], None]


class Commands:
    """The commands of a conversation.

    Args:
        sampling: the values that the command line gave.
        without: sampling values that a chat does not have.
        retry: answers the last message again.
    """

    def __init__(
        self,
        talk: Turns[Any],
        sampling: dict[str, Any],
        without: tuple[str, ...],
        retry: Callable[[], None],
    ) -> None:
        self._talk, self._values = talk, dict(sampling)
        self.names = [name for name in value_names() if name not in without]
        self._saved: Path | None = None
        self.table = {
            command.usage.partition(" ")[0]: command
            for command in (
                Command("/clear", "forget the conversation", self._clear),
                Command("/image FILE", "show a picture with the next message; any number", self._image),
                Command("/retry", "answer the last message again", lambda _: retry()),
                Command("/set NAME VALUE", f"set a sampling value, or {_RESET}; /set shows them", self._set),
                Command("/system TEXT", "set the system message; without TEXT: show it", self._system),
                Command("/save FILE", "write the conversation to a JSON file", self._save),
                Command("/help", "this", self._help),
                Command("/exit", "end (so does Ctrl-D)", lambda _: None),
            )
        }

    def completions(self) -> dict[str, list[str] | None]:
        """The words that may follow each command; None: a file."""
        return {
            name: None if name in ("/save", "/image") else self.names if name == "/set" else []
            for name in self.table
        }

    def run(self, line: str) -> bool:
        """Run a command line; False ends the chat."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        command = self.table.get(name)
        if command is None:
            note = f'no such command: {name}; /help lists them. A message may begin with """'
            stderr().print(note, style="yellow", markup=False)
            return True
        command.run(rest.strip())
        return True

    def _clear(self, rest: str) -> None:
        self._talk.clear()
        _say("conversation cleared")

    def _image(self, text: str) -> None:
        if not text:
            raise RequestError("/image needs a picture's file", fix="/image photo.jpg")
        self._talk.show(str(_path(text)))
        count = len(self._talk.pictures)
        _say(f"{count} picture{'s' if count > 1 else ''} will be shown with the next message")

    def _system(self, text: str) -> None:
        self._talk.system = text or self._talk.system
        _say(f"system: {self._talk.system or '(from the chat format)'}")

    def _help(self, rest: str) -> None:
        width = max(len(command.usage) for command in self.table.values()) + 2
        lines = [f"{command.usage:<{width}}{command.help}" for command in self.table.values()]
        stderr().print("\n".join([*lines, _KEYS]), markup=False)

    def _set(self, text: str) -> None:
        written, _, value = text.partition(" ")
        name = written.removeprefix("--").replace("-", "_")
        if not name:
            given = [f"{name} {value}" for name, value in self._values.items()]
            _say(f"set: {', '.join(given) or 'nothing, so all are defaults'}")
            _say(f"names: {', '.join(self.names)}")
            return
        if name not in self.names:
            raise RequestError("no such sampling value", seen=written, allowed=self.names)
        if not value.strip():
            _say(f"{name}: {self._values.get(name, 'the default')}")
            return
        values = {k: v for k, v in self._values.items() if k != name}
        if value.strip() != _RESET:
            values[name] = read_value(name, value.strip())
            check_alone(values)
        self._talk.set_values(values)
        self._values = values
        _say(f"{name}: {values.get(name, 'the default')}")

    def _save(self, text: str) -> None:
        messages = [_saved(message) for message in self._talk.messages()]
        if not text or not self._talk.turns:
            what = "there is nothing to save yet" if text else "/save needs a file name"
            raise RequestError(what, fix="/save chat.json")
        path = _local(text)
        if path.exists() and path != self._saved:
            raise RequestError("the file exists", seen=path, fix="another name")
        try:
            path.write_text(json.dumps(messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError("the conversation cannot be written", seen=error) from None
        self._saved = path
        _say(f"{path}: {len(messages)} messages")


def _path(text: str) -> Path:
    """A file name; a terminal quotes or escapes one with spaces that is dropped on it."""
    path = _local(text)
    if not path.exists():
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            return _local(text[1:-1])
        if "\\" in text:
            return _local(re.sub(r"\\(.)", r"\1", text))
    return path


def _local(text: str) -> Path:
    from ingot.checkpoint.hub import local_path

    return local_path(text)


def _saved(message: dict[str, Any]) -> dict[str, Any]:
    """A message for a file: a picture that was decoded is named by its path."""
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = [{"type": "image", "image": one["path"]} if one["type"] == "input" else one for one in content]
    return {**message, "content": parts}


def show_refusal(error: IngotError) -> None:
    """Print why a command failed, without flags: a chat has none."""
    fix = None if error.fields else error.fix
    print_error(IngotError(error.what, seen=error.seen, allowed=error.allowed, fix=fix))


def _say(text: str) -> None:
    stderr().print(text, style="dim", markup=False)
