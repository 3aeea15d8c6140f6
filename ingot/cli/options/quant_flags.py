"""Flags with which ``ingot build`` quantizes, and the config that they make."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ingot.cli.options.flags import option
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.config.quantization.rptq_options import AFTER_NORMS, PUBLISHED_CLUSTERS, RANGES, SITES
from ingot.config.quantization.scheme_table import HEADS, SCHEMES, choosing, listed, narrow_schemes, of_method

RARE_QUANT = "Quantization, rarely needed"
_PANEL = "Quantization"
_BY_ROW = listed(name for name in choosing("group") if 0 in SCHEMES[name].group)
_COARSE = listed(name for name in choosing("group") if 32 not in SCHEMES[name].group)
_SCALED = listed(choosing("activations"))
_ROTATING = listed(choosing("rotation"))
_QUANT = f"Quantize: {', '.join(narrow_schemes())}, PART=…,PART=… (encoder, decoder, …) or FILE.yaml."
_BLOCK = f"per block in RPTQ: 32 (not {_COARSE}), 64, 128."
_GROUP = f"Columns per scale in {_BY_ROW} (0: one scale per row) and {_COARSE}, or {_BLOCK}"
_SYMMETRIC = f"Whether {listed(choosing('symmetric'))} goes without zero points."
_SMOOTH = f"({listed(of_method('smoothquant'))}) smoothquant"
_METHOD = f"How quantized values are chosen: round, or with --calib gptq, awq or {_SMOOTH}."
_ACTIVATIONS = f"Activation scales in {_SCALED}: dynamic, one per token, or static, from --calib."
_ALPHA = "Strength of smoothquant: 0 to 1 (higher moves more of the outliers into the weights), or search."
_SCALES = (
    f"Weight scales in {listed(choosing('weight_scales'))}: one per channel, or one per tensor; of fp8 "
    "also block, one per 128 x 128."
)
_ROTATE = f"Whether {_ROTATING} rotates the hidden states to spread outliers over channels."
_RPTQ = f"of RPTQ ({listed(SITES)}; docs/int8.md)"
_CLUSTERS = f"Most clusters at the sites {_RPTQ}: one number, or SITE=NUMBER,…"
_REORDER = f"Sites {_RPTQ} whose channels are reordered: R1,R3,… or none."
_RANGES = f"How RPTQ measures ranges: {listed(RANGES, 'or')}."
_EIGHT_BITS = "Sites of rptq-w4a4 whose activations have 8 bits: R1,R4,… or none."
_PUBLISHED = ", ".join(f"{site}={count}" for site, count in PUBLISHED_CLUSTERS.items())
_CALIB = (
    "Calibration samples (.jsonl, .json, .csv, .parquet, .txt, hf:ID[:CONFIG]:SPLIT, or .npy of embeddings), "
    "similar to what the engine will run; for speech a manifest or folder of recordings, for pictures one of "
    "pictures."
)
_SAMPLES = "Maximum samples to use from --calib: up to 512 tokens, or a window of speech, each."

_DRAWN = "Pictures: draw the question about each from the four of MiniGPT-4's training, by this seed."
_FIXED = "the first for all, in the chat format"


@dataclass(frozen=True)
class QuantFlags:
    """How weights and activations are quantized, and the calibration samples."""

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
    clusters: Annotated[str | None, option(_CLUSTERS, shown=_PUBLISHED, panel=RARE_QUANT)] = None
    reorder: Annotated[str | None, option(_REORDER, shown=",".join(SITES), panel=RARE_QUANT)] = None
    ranges: Annotated[str | None, option(_RANGES, shown=RANGES[0], panel=RARE_QUANT)] = None
    eight_bits: Annotated[str | None, option(_EIGHT_BITS, shown=",".join(AFTER_NORMS), panel=RARE_QUANT)] = (
        None
    )
    calib: Annotated[Path | None, option(_CALIB, panel=_PANEL)] = None
    calib_samples: Annotated[int | None, option(_SAMPLES, shown="128", panel=RARE_QUANT)] = None
    calib_prompt_seed: Annotated[int | None, option(_DRAWN, shown=_FIXED, panel=RARE_QUANT)] = None

    def config(self) -> QuantConfig:
        """The config of these flags."""
        alpha: float | str | None = self.alpha
        if alpha is not None:
            with suppress(ValueError):  # a name
                alpha = float(alpha)
        return read_quant(
            self.quant,
            group=self.group_size,
            symmetric=self.symmetric,
            head=HEADS[-1] if self.quant_head else None,
            method=self.method,
            activations=self.activations,
            alpha=alpha,
            weight_scales=self.weight_scales,
            rotation=self.rotate,
            rptq=self._rptq(),
        )

    def _rptq(self) -> dict[str, object]:
        """The options of RPTQ that were given."""
        given: dict[str, object] = {} if self.ranges is None else {"ranges": self.ranges}
        for name, text in (("reorder", self.reorder), ("eight_bits", self.eight_bits)):
            if text is not None:
                given[name] = () if text == "none" else tuple(part.strip() for part in text.split(","))
        if self.clusters is not None:  # 16: at every site, or R1=16,R5=8
            pairs = [part.strip().partition("=") for part in self.clusters.split(",")]
            counts = {site: _whole(count) for site, _, count in pairs}
            given["clusters"] = (
                counts if "=" in self.clusters else dict.fromkeys(SITES, _whole(self.clusters))
            )
        return given


def _whole(text: str) -> int | str:
    return int(text) if text.strip().isdecimal() else text
