"""``ingot merge-delta``: weights that are published as a difference become a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.options.flags import option
from ingot.cli.terminal.console import size_text, stderr
from ingot.cli.terminal.signals import ends_once
from ingot.cli.terminal.step_list import bar_shown


def merge_delta(
    base: Annotated[str, typer.Argument(help="A LLaMA's folder or Hugging Face id.", metavar="BASE")],
    delta: Annotated[
        str, typer.Argument(help="The folder or id of a delta over it: Vicuna v0 or v1.1.", metavar="DELTA")
    ],
    output: Annotated[Path, option("The checkpoint folder to create.", "--output", "-o")],
    force: Annotated[bool, option("Replace an existing checkpoint.", "--force")] = False,
) -> None:
    """Add a delta to its base: a checkpoint. An interrupted merge leaves nothing behind."""
    with ends_once():
        from ingot.building import delta_merge as merging

        with bar_shown() as progress:
            merge = merging.merge_delta(base, delta, output, force=force, progress=progress)
    for note in merge.notes:
        stderr().print(f"note: {note}", markup=False)
    added = f", {merge.added_rows} added to the vocabulary" if merge.added_rows else ""
    typer.echo(f"{merge.folder}: {size_text(merge.size)}, {merge.tensors} tensors{added}")
