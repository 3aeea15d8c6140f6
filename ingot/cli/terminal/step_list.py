"""A line, or a bar, of progress on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ingot.cli.terminal.console import stderr

Progress = Callable[[str, int, int], None]
PIPED_SECONDS = 5.0  # between lines of a long measurement's progress where stderr is no terminal


@contextmanager
def steps_shown() -> Iterator[Progress | None]:
    """A function (what, done, total) that updates one line on stderr; None if that is not a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield None
        return
    from rich.control import Control
    from rich.markup import escape
    from rich.segment import ControlType

    back = Control(ControlType.CARRIAGE_RETURN)  # "\r" in a text is not printed
    width = 0

    def show(what: str, done: int, total: int) -> None:
        nonlocal width
        line = f"{what} ({done + 1}/{total})"
        console.control(back)
        console.print(f"{escape(line):<{width}}", end="", style="dim")
        width = len(line)

    yield show
    if width:
        console.control(back)
        console.print(" " * width, end="")
        console.control(back)


@contextmanager
def status_shown(first: str, seconds: float | None = None) -> Iterator[Callable[[str], None] | None]:
    """A function that shows the current step on stderr, at first ``first``. If that is no terminal, a line
    every so many ``seconds`` at most; None without them.
    """
    if not stderr().is_terminal:
        yield None if seconds is None else _lines_shown(seconds)
        return
    with stderr().status(first) as status:
        yield status.update


def _lines_shown(seconds: float) -> Callable[[str], None]:
    last = time.monotonic()  # what is over sooner needs no line

    def show(what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            stderr().print(what, style="dim", markup=False)

    return show


@contextmanager
def bar_shown() -> Iterator[Progress]:
    """A bar on stderr if that is a terminal. Another total restarts it."""
    with parts_shown() as shown:
        yield shown(lambda done, total: f"{done}/{total}")


@contextmanager
def parts_shown() -> Iterator[Callable[[Callable[[int, int], str]], Progress]]:
    """One bar on stderr, if that is a terminal, for several parts of some work. Yields a function that makes
    a part's progress from its counter: ``shown(lambda done, total: f"{done}/{total}")``.
    """
    console = stderr()
    if not console.is_terminal:
        yield lambda count: lambda what, done, total: None
        return
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
    )
    bars = Bars(
        *columns, TimeRemainingColumn(), console=console, transient=True, redirect_stdout=False
    )  # it would send data to stderr
    with bars as bar:
        task = bar.add_task("starting", total=None, count="")
        last: list[object] = []

        def shown(count: Callable[[int, int], str]) -> Progress:
            def show(what: str, done: int, total: int) -> None:
                if last != [count, total]:
                    last[:] = [count, total]
                    bar.reset(task)
                bar.update(task, description=what, completed=done, total=total, count=count(done, total))

            return show

        yield shown
