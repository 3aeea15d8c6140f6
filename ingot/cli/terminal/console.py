"""The terminal: data on stdout, everything else on stderr, colour only on terminals."""

from __future__ import annotations

import codecs
import json
import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ingot.cli.terminal.field_flags import fixes_text, flags_of, in_flags
from ingot.config.units import size_text as size_text
from ingot.errors import IngotError, OutOfMemoryError, printable, shown

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment
    from rich.table import Table as RichTable

    from ingot.measure.side.text_table import Table

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LEAST_SCREEN, _USUAL_SCREEN, _MOST_SCREEN = 20, 80, 10_000  # columns
_MOST_NUMBER = 20  # characters of a column that is never wrapped
_LATE_CONTROL = re.compile(r"[\x7f-\x9f]")  # JSON need not escape them


def stdout() -> Console:
    """The console for data. What it prints is never wrapped or cut."""
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


def print_verdict(verdict: str, text: str, style: str) -> None:
    """Print a coloured verdict and a text after it. On a screen that is narrower the text goes on below."""
    first, *others = _wrapped(f"{verdict} {text}", _screen())
    console = stdout()
    console.print(first[: len(verdict)], style=style, end="")
    console.print("\n".join((first[len(verdict) :], *others)), markup=False)


def print_facts(facts: Iterable[tuple[str, str]], width: int) -> None:
    """Print a line per fact: its name, padded to ``width``, and its text. On a screen that is narrower the
    text goes on below itself, at a space.
    """
    console, columns, margin = stdout(), _screen(), width + 2
    for name, value in facts:
        lines = _wrapped(value, None if columns is None else max(columns - margin, _LEAST_SCREEN))
        console.print(f"  {name:<{width}}", style="cyan", end="")
        console.print(f"\n{' ' * margin}".join(lines), markup=False)


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> Iterator[str]:
    """Rows as lines with columns two spaces apart; those in ``right`` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def print_rows(rows: Sequence[Sequence[str]], right: Container[int] = (), names: int = 0) -> None:
    """Print rows in columns, two spaces in. On a screen that is narrower each row goes on below itself; where
    the first row has the columns' names, the columns do, after the first ``names`` of them again.
    """
    from ingot.measure.side.text_table import Table, narrow

    lines, width = list(aligned(rows, right)), _screen()
    if width is None or max(map(len, lines), default=0) + 2 <= width:
        parts = [[line] for line in lines]
    elif not names:
        parts = [_wrapped("  ".join(filter(None, row)), max(width - 4, _LEAST_SCREEN)) for row in rows]
    else:
        head, *body = [(" ".join(row[:names]), *row[names:]) for row in rows]
        tables = narrow(Table("", head, tuple(body)), width - 2)
        parts = [
            [line]
            for table in tables
            for line in aligned([table.columns, *table.rows], range(1, len(table.columns)))
        ]
    for part in parts:
        stdout().print("  " + "\n    ".join(part), markup=False)


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
    """Print a table; ruled on a terminal, aligned text elsewhere. On a screen that is narrower its columns
    continue below, after the names again.
    """
    from ingot.measure.side.text_table import narrow, plain

    console, width = stdout(), _screen()
    ruled = _ruled(table) if console.is_terminal else None
    if ruled is not None and console.measure(ruled, options=_wide(console)).minimum <= console.width:
        console.print(ruled)
    elif width is None:
        console.print(plain(table), markup=False)
    else:
        for number, part in enumerate(narrow(table, width)):
            if number:
                console.print()
            print_lines(plain(part).splitlines())


def _wide(console: Console) -> ConsoleOptions:
    """Options of a screen that no table is wider than."""
    return console.options.update(width=_MOST_SCREEN)


def _ruled(table: Table) -> RichTable:
    """The table with rules; columns of long texts may be wrapped, others not."""
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=Text(table.title), title_justify="left")
    for i, cells in enumerate(zip(table.columns, *table.rows, strict=True)):
        width = max(map(len, cells))
        least = width if width <= _MOST_NUMBER else None
        shown.add_column(Text(cells[0]), justify="left" if i == 0 else "right", min_width=least)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def print_lines(lines: Iterable[str]) -> None:
    """Print lines; on a screen that is narrower they go on below, at a space."""
    console, width = stdout(), _screen()
    for line in lines:
        console.print("\n".join(_wrapped(line, width)), markup=False)


def _wrapped(text: str, width: int | None) -> list[str]:
    """The text in lines of ``width`` columns, split at spaces; a longer word stays whole."""
    if width is None or len(text) <= width:
        return [text]
    indent = text[: len(text) - len(text.lstrip())]
    return wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _screen() -> int | None:
    """Columns of the screen: of a terminal, or those that COLUMNS says; None: a file or a pipe."""
    console = stdout()
    return max(console.width, _LEAST_SCREEN) if console.is_terminal or _columns() else None


def _columns() -> int:
    """What COLUMNS says; 0 where it says nothing."""
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdecimal() else 0


def print_report(lines: Iterable[str], tables: Iterable[Table]) -> None:
    """Print lines, then tables with an empty line before each."""
    print_lines(lines)
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

    nothing = os.environ.get("COLUMNS", "").isdecimal() and not _columns()  # then Rich would print nothing
    width = _USUAL_SCREEN if nothing else None
    return PlainConsole(stderr=stderr, width=width, soft_wrap=True, highlight=False, emoji=False)


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def finite(value: Any) -> Any:
    """The value with None for infinity and NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value
