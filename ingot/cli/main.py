"""The ``ingot`` command: its verbs, ``--version``, ``--debug`` and exit codes (docs/terminal.md)."""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ingot.cli.build import build
from ingot.cli.chat.chat import chat
from ingot.cli.diff import diff
from ingot.cli.explain import explain
from ingot.cli.inspect import inspect
from ingot.cli.measure.align import align
from ingot.cli.measure.bench import bench
from ingot.cli.measure.doctor import doctor
from ingot.cli.measure.eval import evaluate
from ingot.cli.measure.profile import profile
from ingot.cli.measure.sweep import sweep
from ingot.cli.merge_delta import merge_delta
from ingot.cli.plan import plan
from ingot.cli.port import port
from ingot.cli.repro import repro
from ingot.cli.run import run
from ingot.cli.serve import serve
from ingot.cli.terminal.console import PrintableLog, print_error, stderr
from ingot.cli.terminal.usage_fixes import usage_fix
from ingot.cli.transcribe import transcribe
from ingot.cli.triton import triton
from ingot.cli.tune import tune
from ingot.cli.verify import verify
from ingot.cli.web import web
from ingot.control_groups import affine_processors, usable_processors
from ingot.errors import IngotError, NoSuchPathError
from ingot.version import VERSION

_UsageError: Any = typer.BadParameter.__base__  # click's, of which typer may have a copy of its own
_WORDS = "ingot.words"  # key of the command line's words in click's context
_FAILED, _MISUSED, _INTERRUPTED, _BROKEN_PIPE = 1, 2, 130, 141


class Verbs(TyperGroup):
    """Runs a verb and turns what it raises into a message and an exit code."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context; wrong flags of ``ingot`` itself are reported as those of verbs are."""
        _open_closed_streams()
        try:
            return super().make_context(info_name, args, parent, **extra)
        except _UsageError as error:
            raise _misuse(error, args) from None
        except OSError as error:  # of --install-completion
            print_error(_of_system(error), ())
            raise typer.Exit(_FAILED) from None

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs in the order of ``_VERBS``; those with verbs of their own would come last."""
        order = [_name(verb) for verbs in _VERBS.values() for verb in verbs]
        return sorted(super().list_commands(ctx), key=order.index)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # shows what the terminal's encoding lacks
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(PrintableLog())
        # OpenMP's waiting threads spin by default, on cores that busy ones may need; on a CPU, PyTorch's wait
        # thousands of times per token. OpenMP reads this when PyTorch is imported: no verb has done so yet.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        if (most := usable_processors()) < affine_processors():  # by a quota, which OpenMP does not see
            os.environ.setdefault("OMP_NUM_THREADS", str(most))
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except _UsageError as error:
            raise _misuse(error, ctx.meta[_WORDS], ctx.invoked_subcommand) from None
        except KeyboardInterrupt:
            stderr().print("interrupted")
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:
            _forget_stdout()
            raise typer.Exit(_BROKEN_PIPE) from None
        except (IngotError, OSError) as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            if isinstance(error, OSError):  # a full disk, a file that may not be read
                _forget_stdout()
                error = _of_system(error)
            verb = self.get_command(ctx, ctx.invoked_subcommand or "")
            parts = [verb, *getattr(verb, "commands", {}).values()] if verb is not None else []
            print_error(error, {flag for part in parts for param in part.params for flag in param.opts})
            raise typer.Exit(_exit_code(error, ctx.invoked_subcommand)) from None


def _of_system(error: OSError) -> IngotError:
    return IngotError(error.strerror or str(error), seen=error.filename)


def _misuse(error: Any, words: list[str], verb: str | None = None) -> typer.Exit:
    """Print click's error in the form of all others and return the exit."""
    what = error.format_message().rstrip(".")
    if what:  # else click has shown the help
        pattern = r"^Invalid value(?: for '?([^':]+)'?(?: \(env var: [^)]*\))?)?: "
        what = re.sub(pattern, lambda m: f"{m[1]}: " if m[1] else "", what)
        path = error.ctx.command_path if error.ctx is not None else f"ingot {verb}" if verb else "ingot"
        fix = usage_fix(error) or f"see `{path} --help`"
        after = dict(itertools.pairwise(words)).get("--json", "")
        is_file = after == "-" or after.endswith(".json") or f"({after})" in what
        if is_file or any(word.startswith("--json=") for word in words):
            fix = "--json prints JSON on stdout; --json-file FILE writes it to a file"
        what = what if what[1:2].isupper() else what[:1].lower() + what[1:]  # a name in capitals stays
        print_error(IngotError(what, fix=fix))
    return typer.Exit(_MISUSED)


def _exit_code(error: IngotError, verb: str | None) -> int:
    """2 if the command line is wrong, 1 if the work failed; verbs that judge keep 1 for their verdict."""
    judges = verb in ("diff", "align", "eval", "doctor", "plan")
    misused = judges or isinstance(error, NoSuchPathError) or bool(error.fields)
    return _MISUSED if misused else _FAILED


app = typer.Typer(
    cls=Verbs,
    name="ingot",
    help="Turn a checkpoint into an engine, and run it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ingot {VERSION}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="INGOT_DEBUG", help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Turn a checkpoint into an engine, and run it."""
    try:
        os.getcwd()
    except FileNotFoundError:  # oneMKL, which PyTorch brings, would end the process at its first product
        raise NoSuchPathError("the working folder was removed", fix="change into one that is there") from None


_VERBS: dict[str, tuple[Any, ...]] = {
    "Build": (plan, merge_delta, port, build, tune, doctor),
    "Run": (run, chat, transcribe, serve, web, triton, explain),
    "Prove": (inspect, verify, align, diff, repro),
    "Measure": (evaluate, bench, sweep, profile),
}


def _name(verb: Any) -> str:
    return str(verb.info.name if isinstance(verb, typer.Typer) else verb.__name__.replace("_", "-"))


for _panel, _verbs in _VERBS.items():
    for _verb in _verbs:
        if isinstance(_verb, typer.Typer):
            app.add_typer(_verb, rich_help_panel=_panel)
        else:
            app.command(rich_help_panel=_panel)(_verb)


def _open_closed_streams() -> None:
    """Open a closed stdin, stdout or stderr on nothing. Else the next file that is opened would take its
    number, and what a library prints would go into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nothing = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(nothing.fileno(), nothing.fileno() <= 2)
            setattr(sys, name, nothing)


def _forget_stdout() -> None:
    """Discard what is still buffered, so that the interpreter's last flush does not fail."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
    except OSError:  # stdout is not a file
        return
