"""What the verbs write: data on stdout, everything else on stderr, colour only on terminals.

Covers the two consoles, error messages and number formats.

    stderr().print("loading")
"""

from __future__ import annotations

import codecs
import json
import logging
import math
import re
import shlex
import sys
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ingot.cli.terminal.field_flags import flags_of, in_flags
from ingot.cli.terminal.fix_flags import fixes_text
from ingot.config.units import size_text as size_text
from ingot.errors import IngotError, OutOfMemoryError, printable, shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

    from ingot.measure.side.text_table import Table

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LATE_CONTROL = re.compile(r"[\x7f-\x9f]")  # JSON need not escape them


def stdout() -> Console:
    """The console for data. Lines are never wrapped or cut."""
    return _console(stderr=False)


def stderr() -> Console:
    """The console for progress, logs and errors."""
    return _console(stderr=True)


class PrintableLog(logging.Formatter):
    """Log lines with flags for fields, and without what would steer a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        record.msg = in_flags(str(record.msg))  # what is filled in stays as it is
        return printable(super().format(record))


def write(text: str) -> None:
    """Text of a model to stdout, at once; on a terminal without control characters that could steer it."""
    sys.stdout.write(_CONTROL.sub("\ufffd", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """One line of JSON on stdout; numbers that JSON cannot hold (infinity, NaN) become null."""
    escaped = codecs.lookup(sys.stdout.encoding or "ascii").name != "utf-8"
    text = json.dumps(finite(value), ensure_ascii=escaped)
    sys.stdout.write(_LATE_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")


def json_text(value: Any) -> str:
    """A file of JSON that people may read; numbers as in ``print_json``."""
    return json.dumps(finite(value), indent=1, ensure_ascii=False) + "\n"


def print_facts(facts: Iterable[tuple[str, str]], width: int) -> None:
    """A line each on stdout: a name, and what is to be said of it behind ``width`` characters."""
    for name, value in facts:
        stdout().print(f"  {name:<{width}}", style="cyan", end="")
        stdout().print(value, markup=False)


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> Iterator[str]:
    """Rows as lines whose columns stand two spaces apart, those in ``right`` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def print_error(error: IngotError, takes: Collection[str] = ()) -> None:
    """What happened, and what was seen, allowed and to be changed on lines of their own, with flags for the
    fields that the error names.

    Args:
        takes: the flags of the verb that failed: an out-of-memory error shows no others.
    """
    console, fix = stderr(), error.fix
    if takes and isinstance(error, OutOfMemoryError) and error.ledger is not None:
        fix = fixes_text(error.ledger["fixes"], takes)
    elif fix is not None:
        is_default = fix == ", ".join(error.fields)
        fix = flags_of(error.fields, takes) if is_default else in_flags(fix, takes)
    allowed = None if error.allowed is None else in_flags(_listed(error.allowed), takes)
    console.print("error:", style="bold red", end=" ")
    console.print(shown(in_flags(error.what, takes)), markup=False)
    for name, value in (("seen", error.seen), ("allowed", allowed), ("fix", fix)):
        if value is not None:
            console.print(f"  {name}: {shown(_listed(value))}", markup=False)
    for line in error.lines if isinstance(error, OutOfMemoryError) else ():
        console.print(f"  {line}", markup=False)


def print_table(table: Table) -> None:
    """On stdout, with lines on a terminal, as aligned text elsewhere."""
    from ingot.measure.side.text_table import plain

    if not stdout().is_terminal:
        stdout().print(plain(table), markup=False)
        return
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=Text(table.title), title_justify="left")
    for i, name in enumerate(table.columns):
        shown.add_column(Text(name), justify="left" if i == 0 else "right")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    stdout().print(shown)


def command_line() -> str:
    """The command that runs, for a record."""
    return shlex.join(["ingot", *sys.argv[1:]])


def speed_text(num_tokens: int, seconds: float) -> str:
    """``12 tokens in 0.31 s (38.7 tokens/s)``."""
    rate = f" ({num_tokens / seconds:.1f} tokens/s)" if seconds > 0 else ""
    return f"{num_tokens} tokens in {seconds:.2f} s{rate}"


def _console(stderr: bool) -> Console:
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for part in super().render(renderable, options):
                yield part if part.control else part._replace(text=printable(part.text))

    return PlainConsole(stderr=stderr, soft_wrap=True, highlight=False, emoji=False)


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def finite(value: Any) -> Any:
    """The value with null for every number that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value
