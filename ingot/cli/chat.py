"""``ingot chat``: talk with an engine, or with a server."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.console import print_error, stderr, write
from ingot.cli.flags import Device, Threads, field_flags, option
from ingot.cli.limits import Limits
from ingot.cli.opening import open_llm
from ingot.cli.sampling import flag_name, sampling_flags, with_given
from ingot.cli.signals import StopOnInterrupt
from ingot.errors import IngotError, RequestError

if TYPE_CHECKING:
    from ingot.processors.turns import Turns

_SERVER = "Server"
_URL = "Chat with the server at this address in place of an engine; any with OpenAI's API."
_MODEL = "The server's model; needed where it has several."
_QUOTES = '"""'
_HELP = """/clear        forget the conversation
/system TEXT  set the system message; without TEXT: show it
/help         this
/exit         end (so does Ctrl-D)
Three double quotes begin and end a multi-line message. Ctrl-C stops an answer."""


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
@sampling_flags("n", "num_beams", "length_penalty", "early_stopping", "logprobs")
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
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Chat with an engine or a server. /help lists the commands; each line of a piped stdin is a turn."""
    if (engine is None) == (remote.url is None):
        raise typer.BadParameter("give an engine, or --url for a server's", param_hint="ENGINE")
    if remote.url is not None:
        _refuse_flags(limits, device, threads)
        talk: Turns[Any] = _remote(remote, system, sampling)
    else:
        talk = _local(str(engine), system, sampling, (device, threads, limits))
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing in input())
        stderr().print("/help lists the commands, Ctrl-D ends the chat", style="dim")
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    takes = [flag for param in context.command.params for flag in param.opts]
    failed = False
    while (message := _next_message()) is not None:
        if message.startswith("/"):
            if not _command(talk, message):
                break
        elif message.strip():
            failed |= not _answer(talk, message.removeprefix(_QUOTES), takes)
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def _local(
    engine: str, system: str | None, sampling: dict[str, Any], how: tuple[str | None, int | None, Limits]
) -> Turns[Any]:
    llm = open_llm(engine, *how, verb="`ingot chat`")
    from ingot.llm.conversation import Conversation

    talk = Conversation(llm, system, with_given(llm.default_params, sampling))
    llm.chat_ids(talk.messages("Hello"))  # an engine that cannot chat says so now
    return talk


def _remote(remote: Remote, system: str | None, sampling: dict[str, Any]) -> Turns[Any]:
    from ingot.serve.remote import RemoteConversation, RemoteServer

    key = remote.api_key
    if key is not None and (not key.isascii() or not key.isprintable()):
        raise typer.BadParameter("the key must be printable ASCII", param_hint="--api-key")
    server = RemoteServer(str(remote.url), key)
    names = [remote.model] if remote.model else server.models()
    if len(names) != 1:
        raise RequestError("the server has several models", seen=len(names), allowed=names, flag="--model")
    return RemoteConversation(server, names[0], system, sampling)


def _refuse_flags(limits: Limits, device: str | None, threads: int | None) -> None:
    """What is for an engine in this process means nothing to a server."""
    words = [word for word in limits.words() if word.startswith("--")]
    words += [flag for flag, value in (("--device", device), ("--threads", threads)) if value is not None]
    if words:
        raise typer.BadParameter("the server at --url decides this", param_hint=", ".join(words))


def _next_message() -> str | None:
    """What the user says next, None at the end of stdin. Ctrl-C throws away what was typed so far.

    A message of several lines keeps its opening quotes, so that it is no command.
    """
    try:
        message = _read_line(">>> ")
        if message is None or not message.startswith(_QUOTES):
            return message
        while message.count(_QUOTES) == 1 or not message.endswith(_QUOTES):
            line = _read_line("... ")
            if line is None:  # the end of a pipe closes the block
                break
            message += f"\n{line}"
        return message.removesuffix(_QUOTES)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        stderr().print("\n(discarded; /exit or Ctrl-D ends the chat)", style="dim")
        return ""


def _read_line(prompt: str) -> str | None:
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
    try:
        return input(prompt)
    except EOFError:
        stderr().print()
        return None


def _command(talk: Turns[Any], message: str) -> bool:
    """Do what a line that begins with / says; False ends the chat."""
    name, _, rest = message.partition(" ")
    console = stderr()
    if name in ("/exit", "/quit"):
        return False
    if name == "/clear":
        talk.clear()
        console.print("conversation cleared", style="dim")
    elif name == "/system":
        talk.system = rest.strip() or talk.system
        console.print(f"system: {talk.system or '(from the chat format)'}", style="dim", markup=False)
    elif name == "/help":
        console.print(_HELP, markup=False)
    else:
        console.print(f"no such command: {name}; /help lists them", style="yellow", markup=False)
    return True


def _answer(talk: Turns[Any], message: str, takes: Collection[str]) -> bool:
    """Stream an answer; an error is shown, with flags of ``takes``, gives False, and the chat goes on."""
    before, reason = talk.num_dropped, None
    try:
        with StopOnInterrupt() as stop, closing(talk.ask(message)) as pieces:
            for piece in pieces:
                write(piece.text)
                reason = piece.finish_reason
                if stop.requested:
                    break
        write("\n")
    except IngotError as error:
        print_error(error, takes)
        return False
    if stop.requested:
        stderr().print("(stopped)", style="dim")
    elif reason == "length":
        stderr().print(f"(cut off; {flag_name('max_new_tokens')} sets the limit)", style="dim")
    if talk.num_dropped > before == 0:
        stderr().print("(the oldest turns no longer fit and are dropped from now on)", style="dim")
    return True
