"""Flags with which ``ingot build`` measures the engine and stores the metrics in its proof."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.options.flags import DTYPES, option

if TYPE_CHECKING:
    from ingot.measure.evaluate.planned_metrics import Proving

_PANEL = "Metrics in the proof (docs/proof.md)"


_PROVE = (
    "Measure the engine on this file and store the metrics in its proof: running text (perplexity), articles "
    "with summaries (ROUGE), prompts with answers (exact, contains)."
)
_AGAINST = (
    "What --prove compares with: hf (the Hugging Face class on the same checkpoint), hf:CHECKPOINT, or "
    "another engine or checkpoint."
)
_THRESHOLD = (
    "Limit on a metric, by its name in the proof; a build that misses a limit is discarded. May be repeated."
)
_LIMITS = "for differences, the limits of `ingot eval`"
_VERBS = "Evaluations to run: perplexity, divergence, summarize, answers. May be repeated."


@dataclass(frozen=True)
class ProveFlags:
    """What is measured on the finished engine."""

    prove: Annotated[Path | None, option(_PROVE, panel=_PANEL, metavar="DATA")] = None
    against: Annotated[str | None, option(_AGAINST, panel=_PANEL, metavar="hf|CHECKPOINT")] = None
    against_dtype: Annotated[
        str | None, option("Compute dtype of the reference.", shown="its own", panel=_PANEL)
    ] = None
    threshold: Annotated[
        list[str] | None, option(_THRESHOLD, shown=_LIMITS, panel=_PANEL, metavar="NAME=X")
    ] = None
    prove_samples: Annotated[int | None, option("Use the first N items.", panel=_PANEL, min=1)] = None
    prove_with: Annotated[
        list[str] | None, option(_VERBS, shown="chosen by the data", panel=_PANEL, metavar="VERB")
    ] = None

    def check(self, *, proof: bool) -> None:
        """Refuse flags that contradict each other."""
        if self.prove is not None and not proof:
            raise typer.BadParameter(
                "metrics are stored in the proof, and --no-proof omits it", param_hint="--prove"
            )
        if self.against_dtype is not None and self.against_dtype not in DTYPES:
            raise typer.BadParameter(
                f"{self.against_dtype}; allowed: {', '.join(DTYPES)}", param_hint="--against-dtype"
            )
        if self.against_dtype is not None and self.against is None:
            raise typer.BadParameter("it needs --against", param_hint="--against-dtype")
        for field in fields(self):
            if self.prove is None and getattr(self, field.name) is not None:
                flag = f"--{field.name.replace('_', '-')}"
                raise typer.BadParameter("it needs --prove, the data to measure on", param_hint=flag)

    def metrics(
        self, checkpoint: str, revision: str | None, chat_template: str | None, tokenizer: Path | None
    ) -> Proving | None:
        """What to measure, checked before anything is built; None without ``--prove``."""
        if self.prove is None:
            return None
        from ingot.measure.evaluate.planned_metrics import plan_proving

        return plan_proving(
            self.prove,
            checkpoint,
            against=self.against,
            against_dtype=self.against_dtype or "auto",
            samples=self.prove_samples,
            verbs=self.prove_with or (),
            thresholds=self.threshold or (),
            chat_template=chat_template,
            tokenizer=tokenizer,
            revision=revision,
        )
