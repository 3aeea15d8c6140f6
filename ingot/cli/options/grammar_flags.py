"""The flags that hold answers to a grammar.

Covers ``--json-schema``, ``--regex`` and ``--choice``, of which a call takes one.

    GrammarFlags(choice=["yes", "no"]).grammar()
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.options.flags import option
from ingot.config.files.json_text import read_text
from ingot.config.grammar_spec import Grammar

PANEL = "Structured answers"


@dataclass(frozen=True)
class GrammarFlags:
    """What the text of an answer must be; at most one is given."""

    json_schema: Annotated[
        Path | None,
        option(
            "JSON, valid under the schema in this file.",
            panel=PANEL,
            shown=False,
            exists=True,
            dir_okay=False,
        ),
    ] = None
    regex: Annotated[str | None, option("Text that the whole pattern matches.", panel=PANEL, shown=False)] = (
        None
    )
    choice: Annotated[
        list[str] | None, option("This text; repeated, one of several.", panel=PANEL, shown=False)
    ] = None

    def grammar(self) -> Grammar | None:
        """The grammar; None without a flag."""
        if sum(bool(one) for one in (self.json_schema, self.regex, self.choice)) > 1:
            raise typer.BadParameter("give one of --json-schema, --regex and --choice")
        if self.json_schema is not None:
            try:
                return Grammar.json_schema(read_text(self.json_schema))
            except (OSError, UnicodeDecodeError) as error:
                raise typer.BadParameter(f"{self.json_schema}: {error}", param_hint="--json-schema") from None
        if self.regex:
            return Grammar.regex(self.regex)
        return Grammar.choice(self.choice) if self.choice else None
