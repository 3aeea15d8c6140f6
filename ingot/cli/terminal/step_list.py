"""A line, or a bar, of progress.

Covers how they look.

    with steps_shown() as progress: tune(engine, progress=progress)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ingot.cli.terminal.console import stderr

Progress = Callable[[str, int, int], None]


@contextmanager
def steps_shown() -> Iterator[Progress | None]:
    """A function (what, done, total) that keeps one line on stderr up to date; None where that is no
    terminal.
    """
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
def status_shown(first: str) -> Iterator[Callable[[str], None] | None]:
    """The current step on stderr: ``first``, then what the function is given; None where stderr is no
    terminal.
    """
    if not stderr().is_terminal:
        yield None
        return
    with stderr().status(first) as status:
        yield status.update


@contextmanager
def bar_shown() -> Iterator[Progress]:
    """A bar on stderr; nothing where that is no terminal. Another total begins it anew."""
    with parts_shown() as shown:
        yield shown(lambda done, total: f"{done}/{total}")


@contextmanager
def parts_shown() -> Iterator[Callable[[Callable[[int, int], str]], Progress]]:
    """Makes the progress of each part of some work, all of which share one bar on stderr; nothing where that
    is no terminal. A part says how it counts: ``shown(lambda done, total: f"{done}/{total}")``.
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
