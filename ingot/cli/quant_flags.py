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
from ingot.config.schemes import HEADS, NARROW, SCHEMES, choosing, listed, of_method

RARE_QUANT = "Quantization, rarely needed"
_PANEL = "Quantization"
_BY_ROW = listed(name for name in choosing("group") if 0 in SCHEMES[name].group)
_COARSE = listed(name for name in choosing("group") if 32 not in SCHEMES[name].group)
_SCALED = listed(choosing("activations"))
_ROTATING = listed(choosing("rotation"))
_QUANT = f"Quantize: {', '.join(NARROW)}, encoder=…,decoder=… or FILE.yaml."
_BLOCK = f"per block in RPTQ: 32 (not {_COARSE}), 64, 128."
_GROUP = f"Columns per scale in {_BY_ROW} (0: one scale per row) and {_COARSE}, or {_BLOCK}"
_SYMMETRIC = f"Whether {listed(choosing('symmetric'))} goes without zero points."
_SMOOTH = f"({listed(of_method('smoothquant'))}) smoothquant"
_METHOD = f"How quantized values are chosen: round, or with --calib gptq, awq or {_SMOOTH}."
_ACTIVATIONS = f"Activation scales in {_SCALED}: dynamic, one per token, or static, from --calib."
_ALPHA = "Strength of smoothquant: 0 to 1 (higher moves more of the outliers into the weights), or search."
_SCALES = f"Weight scales in {listed(choosing('weight_scales'))}: one per channel, or one per tensor."
_ROTATE = f"Whether {_ROTATING} rotates the hidden states to spread outliers over channels."
_CALIB = (
    "Calibration samples (.jsonl, .json or .txt), similar to what the engine will run; for speech a manifest "
    "or folder of recordings."
)
_SAMPLES = "Maximum samples to use from --calib: up to 512 tokens, or a window of speech, each."


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
        bool | None,
        option(_ROTATE, "--rotate/--no-rotate", shown=f"rotate for {_ROTATING}", panel=RARE_QUANT),
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
            head=HEADS[-1] if self.quant_head else None,
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
