"""``ingot chat``: talk with an engine, or with a server."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Collection, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.chat.chat_commands import Commands, show_refusal
from ingot.cli.chat.chat_lines import (
    QUOTES,
    Lines,
    PipedLines,
    TerminalLines,
    history_file,
    next_message,
)
from ingot.cli.chat.line_wrap import WordWrap
from ingot.cli.opening import check_key, open_llm
from ingot.cli.options.flags import Device, Threads, field_flags, option
from ingot.cli.options.limit_flags import Limits
from ingot.cli.options.sampling_flags import sampling_flags
from ingot.cli.terminal.console import print_error, stderr, write
from ingot.cli.terminal.signals import StopOnInterrupt
from ingot.errors import IngotError, RequestError

if TYPE_CHECKING:
    from ingot.text.chat.chat_turns import Turns

_SERVER = "Server"
_URL = "Chat with the server at this address in place of an engine; any with OpenAI's API."
_MODEL = "The server's model; needed where it has several."
_IMAGE = "A picture that goes with the first message, where pictures are taken; may be repeated."
_WITHOUT = ("n", "num_beams", "length_penalty", "early_stopping", "logprobs")


@dataclass(frozen=True)
class Remote:
    """A server to chat with."""

    url: Annotated[str | None, option(_URL, shown="none", panel=_SERVER, metavar="http://HOST:PORT")] = None
    model: Annotated[str | None, option(_MODEL, shown="the only one", panel=_SERVER)] = None
    api_key: Annotated[
        str | None,
        option("The server's key.", shown="none", panel=_SERVER, envvar="INGOT_API_KEY", show_envvar=True),
    ] = None


@field_flags("limits")
@field_flags("remote")
@sampling_flags(*_WITHOUT)
def chat(
    context: typer.Context,
    sampling: dict[str, Any],
    limits: Limits,
    remote: Remote,
    engine: Annotated[
        str | None,
        typer.Argument(
            help="An engine folder, a checkpoint folder or a Hugging Face id; none with --url.",
            metavar="ENGINE",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, option("The system message.", metavar="TEXT")] = None,
    image: Annotated[list[str] | None, option(_IMAGE, "--image", metavar="FILE")] = None,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Chat with an engine or a server. /help lists the commands; each line of a piped stdin is a turn.

    A terminal's messages are remembered in ~/.local/state/ingot/chat_history (or in $XDG_STATE_HOME).
    """
    if (engine is None) == (remote.url is None):
        raise typer.BadParameter("give an engine, or --url for a server's")
    if remote.url is not None:
        ours = [word for word in limits.words() if word.startswith("--")]
        ours += [flag for flag, value in (("--device", device), ("--threads", threads)) if value is not None]
        if ours:
            raise typer.BadParameter("the server at --url decides this", param_hint=", ".join(ours))
        talk: Turns[Any] = _remote(remote, system, sampling)
    else:
        llm = open_llm(str(engine), device, threads, limits, verb="`ingot chat`")
        from ingot.llm.conversation import Conversation

        llm.default_params.replace(**sampling)  # refuses what is out of range
        talk = Conversation(llm, system)
        talk.set_values(sampling)
        llm.chat_ids(talk.messages("Hello"))  # fails now if the engine cannot chat
    for file in image or ():
        try:
            talk.show(file)
        except RequestError as error:
            raise RequestError(error.what, seen=error.seen, allowed=error.allowed, field="image") from None
    takes = [flag for param in context.command.params for flag in param.opts]
    chat = TerminalChat(talk, sampling, takes)
    failed = chat.run(_lines(chat.commands))
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


class TerminalChat:
    """A conversation on the terminal.

    Args:
        takes: the flags that errors may name.
    """

    def __init__(self, talk: Turns[Any], sampling: dict[str, Any], takes: Collection[str]) -> None:
        self._talk, self._takes = talk, takes
        self._failed = False
        self.commands = Commands(talk, sampling, _WITHOUT, lambda: self._answer(talk.retry))

    def run(self, lines: Lines) -> bool:
        """Answer all messages and do what commands say; whether one of them failed."""
        while (message := next_message(lines)) is not None:
            if message.startswith("/") and "\n" not in message:
                try:
                    if not self.commands.run(message.rstrip()):
                        break
                except IngotError as error:
                    show_refusal(error)
                    self._failed = True
            elif message.strip():
                question = message.removeprefix(QUOTES)
                self._answer(lambda question=question: self._talk.ask(question))  # type: ignore[misc]
        return self._failed

    def _answer(self, ask: Callable[[], Generator[Any, None, None]]) -> None:
        """Stream an answer; an error is shown, and the chat goes on."""
        edge = shutil.get_terminal_size if sys.stdout.isatty() else None
        before, reason = self._talk.num_dropped, None
        out = WordWrap(write, edge and (lambda: edge().columns))
        try:
            with StopOnInterrupt() as stop, closing(ask()) as pieces:
                for piece in pieces:
                    out.add(piece.text)
                    reason = piece.finish_reason
                    if stop.requested:
                        break
            out.add("\n")
        except IngotError as error:
            out.end()
            print_error(error, self._takes)
            self._failed = True
            return
        if stop.requested:
            stderr().print("(stopped)", style="dim")
        elif reason == "length":
            stderr().print("(cut off; --max-new-tokens sets the limit)", style="dim")
        if self._talk.num_dropped > before == 0:
            stderr().print("(the oldest turns no longer fit and are dropped from now on)", style="dim")


def _lines(commands: Commands) -> Lines:
    """Messages from a terminal that can show what is typed, or from a pipe."""
    if sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty()):
        stderr().print("/help lists the commands, Ctrl-D ends the chat", style="dim")
        return TerminalLines(commands.completions(), history_file(os.environ))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    return PipedLines()


def _remote(remote: Remote, system: str | None, sampling: dict[str, Any]) -> Turns[Any]:
    from ingot.serve.remote_chat import RemoteConversation, RemoteServer

    check_key(remote.api_key)
    server = RemoteServer(str(remote.url), remote.api_key)
    names = [remote.model] if remote.model else list(server.models())
    if len(names) != 1:
        raise RequestError("the server has several models", seen=len(names), allowed=names, field="model")
    return RemoteConversation(server, names[0], system, sampling)
