"""The flags with which ``ingot build`` quantizes.

Owns their names and help, and the config that they make. Knows no scheme's arithmetic.

    @field_flags("quantized")
    def build(quantized: QuantFlags, ...) -> None: ...
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ingot.config.quant import QuantConfig
from ingot.config.quant_file import read_quant

QUANT_PANEL = "Quantization"
RARE_QUANT = "Quantization, rarely needed"


@dataclass(frozen=True)
class QuantFlags:
    """How weights, activations and cache are stored, and the samples that choose their values."""

    quant: Annotated[
        str | None,
        typer.Option(
            help="Quantize: w8a16, w4a16, w8a8, w4a8, rptq-w8a8, -w4a8, -w4a4, or FILE.yaml.",
            show_default="none",
            rich_help_panel=QUANT_PANEL,
        ),
    ] = None
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Columns per scale in w4a16 (0: one scale per row) and w4a8, or per block in "
            "RPTQ: 32 (not w4a8), 64, 128.",
            show_default="128",
            rich_help_panel=QUANT_PANEL,
        ),
    ] = None
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Whether w4a16 goes without zero points.",
            show_default="asymmetric",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None
    quant_head: Annotated[
        bool,
        typer.Option("--quant-head", help="Also store the head in 8 bits.", rich_help_panel=QUANT_PANEL),
    ] = False
    method: Annotated[
        str | None,
        typer.Option(
            help="How quantized values are chosen: round, or with --calib gptq, awq or (w8a8) smoothquant.",
            show_default="round; gptq for RPTQ",
            rich_help_panel=QUANT_PANEL,
        ),
    ] = None
    activations: Annotated[
        str | None,
        typer.Option(
            help="Activation scales in w8a8: dynamic, one per token, or static, from --calib.",
            show_default="dynamic",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None
    alpha: Annotated[
        str | None,
        typer.Option(
            help="Strength of smoothquant: 0 to 1 (higher moves more of the outliers into the "
            "weights), or search.",
            show_default="0.5",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None
    weight_scales: Annotated[
        str | None,
        typer.Option(
            help="Weight scales in w8a8: one per channel, or one per tensor.",
            show_default="channel",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None
    rotate: Annotated[
        bool | None,
        typer.Option(
            "--rotate/--no-rotate",
            help="Whether w4a8 rotates the hidden states to spread outliers over channels.",
            show_default="rotate for w4a8",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None
    calib: Annotated[
        Path | None,
        typer.Option(
            help="Calibration samples (.jsonl, .json or .txt), similar to what the engine will run.",
            rich_help_panel=QUANT_PANEL,
        ),
    ] = None
    calib_samples: Annotated[
        int | None,
        typer.Option(
            help="Maximum samples to use from --calib, up to 512 tokens each.",
            show_default="128",
            rich_help_panel=RARE_QUANT,
        ),
    ] = None

    def config(self) -> QuantConfig:
        """The config of these flags.

        Raises:
            ConfigError: they do not go together.
        """
        return read_quant(
            self.quant,
            group=self.group_size,
            symmetric=self.symmetric,
            head="w8a16" if self.quant_head else None,
            method=self.method,
            activations=self.activations,
            alpha=None if self.alpha is None else _number(self.alpha),
            weight_scales=self.weight_scales,
            rotation=self.rotate,
        )


def _number(text: str) -> float | str:
    """A number where the text is one; else the text."""
    try:
        return float(text)
    except ValueError:
        return text
