"""The terminal: data on stdout, everything else on stderr, colour only on terminals."""

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

from ingot.cli.terminal.field_flags import fixes_text, flags_of, in_flags
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
    """Log lines with flags for fields, and without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        record.msg = in_flags(str(record.msg))  # what is filled in stays as it is
        return printable(super().format(record))


def write(text: str) -> None:
    """Write a model's text to stdout at once; to a terminal, without control characters."""
    sys.stdout.write(_CONTROL.sub("\ufffd", text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """Print one line of JSON; infinity and NaN become null."""
    escaped = codecs.lookup(sys.stdout.encoding or "ascii").name != "utf-8"
    text = json.dumps(finite(value), ensure_ascii=escaped)
    sys.stdout.write(_LATE_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")


def json_text(value: Any) -> str:
    """Indented JSON for a file; infinity and NaN become null."""
    return json.dumps(finite(value), indent=1, ensure_ascii=False) + "\n"


def print_facts(facts: Iterable[tuple[str, str]], width: int) -> None:
    """Print a line per fact: its name, padded to ``width``, and its text."""
    for name, value in facts:
        stdout().print(f"  {name:<{width}}", style="cyan", end="")
        stdout().print(value, markup=False)


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> Iterator[str]:
    """Rows as lines with columns two spaces apart; those in ``right`` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def print_error(error: IngotError, takes: Collection[str] = ()) -> None:
    """Print what happened, then what was seen, what is allowed and the fix, with flags for fields.

    Args:
        takes: the flags of the verb that failed; an out-of-memory error shows no others.
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
    """Print a table; ruled on a terminal, aligned text elsewhere."""
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


def print_report(lines: Iterable[str], tables: Iterable[Table]) -> None:
    """Print lines, then tables with an empty line before each."""
    for line in lines:
        stdout().print(line, markup=False)
    for table in tables:
        stdout().print()
        print_table(table)


def command_line() -> str:
    """This process's command."""
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
    """The value with None for infinity and NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value
