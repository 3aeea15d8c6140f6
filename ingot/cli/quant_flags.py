"""The flags with which ``ingot build`` quantizes.

Owns their names and help, and the config that they make. Knows no scheme's arithmetic.

    @field_flags("quantized")
    def build(quantized: QuantFlags, ...) -> None: ...
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ingot.cli.flags import option
from ingot.config.quant import QuantConfig
from ingot.config.quant_file import read_quant

RARE_QUANT = "Quantization, rarely needed"
_PANEL = "Quantization"
_QUANT = "Quantize: w8a16, w4a16, w8a8, w4a8, rptq-w8a8, -w4a8, -w4a4, or FILE.yaml."
_BLOCK = "per block in RPTQ: 32 (not w4a8), 64, 128."
_GROUP = f"Columns per scale in w4a16 (0: one scale per row) and w4a8, or {_BLOCK}"
_SYMMETRIC = "Whether w4a16 goes without zero points."
_METHOD = "How quantized values are chosen: round, or with --calib gptq, awq or (w8a8) smoothquant."
_ACTIVATIONS = "Activation scales in w8a8: dynamic, one per token, or static, from --calib."
_ALPHA = "Strength of smoothquant: 0 to 1 (higher moves more of the outliers into the weights), or search."
_SCALES = "Weight scales in w8a8: one per channel, or one per tensor."
_ROTATE = "Whether w4a8 rotates the hidden states to spread outliers over channels."
_CALIB = "Calibration samples (.jsonl, .json or .txt), similar to what the engine will run."
_SAMPLES = "Maximum samples to use from --calib, up to 512 tokens each."


@dataclass(frozen=True)
class QuantFlags:
    """How weights, activations and cache are stored, and the samples that choose their values."""

    quant: Annotated[str | None, option(_QUANT, shown="none", panel=_PANEL)] = None
    group_size: Annotated[int | None, option(_GROUP, shown="128", panel=_PANEL)] = None
    symmetric: Annotated[
        bool | None, option(_SYMMETRIC, "--symmetric/--asymmetric", shown="asymmetric", panel=RARE_QUANT)
    ] = None
    quant_head: Annotated[bool, option("Also store the head in 8 bits.", "--quant-head", panel=_PANEL)] = (
        False
    )
    method: Annotated[str | None, option(_METHOD, shown="round; gptq for RPTQ", panel=_PANEL)] = None
    activations: Annotated[str | None, option(_ACTIVATIONS, shown="dynamic", panel=RARE_QUANT)] = None
    alpha: Annotated[str | None, option(_ALPHA, shown="0.5", panel=RARE_QUANT)] = None
    weight_scales: Annotated[str | None, option(_SCALES, shown="channel", panel=RARE_QUANT)] = None
    rotate: Annotated[
        bool | None, option(_ROTATE, "--rotate/--no-rotate", shown="rotate for w4a8", panel=RARE_QUANT)
    ] = None
    calib: Annotated[Path | None, option(_CALIB, panel=_PANEL)] = None
    calib_samples: Annotated[int | None, option(_SAMPLES, shown="128", panel=RARE_QUANT)] = None

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
