"""Reads the dtypes that a user asks for: one, or one for each half of a model with an encoder."""

from __future__ import annotations

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.half_dtypes import AUTO, HalfDtypes
from ingot.device import DTYPES, dtype_name, parse_dtype
from ingot.errors import ConfigError

_HALVES = {"encoder": "encoder", "decoder": "decoder", "llm": "decoder"}


def read_dtypes(named: str | torch.dtype, config: DecoderConfig) -> HalfDtypes:
    """The dtypes that ``named`` means: one for both halves, or ``encoder=DTYPE,decoder=DTYPE`` (``llm`` is
    another word for the decoder). A half that is not named is ``auto``.

    Raises:
        ConfigError: no such dtype or half, a half named twice, or halves of a model without an encoder.
    """
    text = str(named)
    if "=" not in text:
        return HalfDtypes.of(_dtype(text))
    pairs = [[word.strip() for word in part.partition("=")] for part in text.split(",")]
    found = {_HALVES[half]: dtype for half, _, dtype in pairs if half in _HALVES}
    if len(found) != len(pairs):
        raise ConfigError(
            "the halves of a model and their dtypes are not named",
            seen=text,
            allowed="encoder=DTYPE,decoder=DTYPE, each half once (llm is another word for decoder)",
            field="dtype",
        )
    halves = HalfDtypes(*(_dtype(found.get(half, AUTO)) for half in ("decoder", "encoder")))
    if config.encoder is None:
        raise ConfigError(
            f"a {config.architecture} model has no encoder, so it has one dtype",
            seen=text,
            allowed=f"{AUTO}, {', '.join(DTYPES)}",
            field="dtype",
            fix=f"`dtype={halves.decoder}`",
        )
    return halves


def dtypes_of(dtype: torch.dtype | HalfDtypes) -> HalfDtypes:
    """Names of one dtype for both halves, or of two."""
    return dtype if isinstance(dtype, HalfDtypes) else HalfDtypes.of(dtype_name(dtype))


def _dtype(name: str) -> str:
    return name if name == AUTO else dtype_name(parse_dtype(name))
