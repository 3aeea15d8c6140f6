"""The error of a wrong field of ``QuantConfig``, which names a parameter or the key of a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError

_RPTQ = ("clusters", "reorder", "ranges", "eight_bits")
_NO_PARAMETER = {"layers": "layers", "source": "the checkpoint", "act_order": "act_order"}
_PARAMETERS = (
    *("scheme", "group", "symmetric", "method", "head", "activations", "alpha", "weight_scales", "rotation"),
    *_RPTQ,
)
_NAMES = {name: f"`{name}`" for name in _PARAMETERS} | _NO_PARAMETER
_NAMES["rptq"] = ", ".join(f"`{name}`" for name in _RPTQ[:-1]) + f" or `{_RPTQ[-1]}`"
_KEYS = {name: name for name in (*_NAMES, *_NO_PARAMETER)} | {name: f"rptq: {name}" for name in _RPTQ}


class QuantFieldError(ConfigError):
    """A field of ``QuantConfig`` has an invalid value. ``advice``: the fix, with fields in braces
    (``{method} smoothquant``); empty: the field itself.
    """

    def __init__(
        self, field: str, what: str, *, seen: object = None, allowed: object = None, advice: str = ""
    ) -> None:
        self.quant_field = field
        self.advice = advice or f"{{{field}}}"
        at_fault = field if field in _PARAMETERS else None
        super().__init__(what, seen=seen, allowed=allowed, field=at_fault, fix=self.advice.format_map(_NAMES))

    def in_file(self, path: Path) -> ConfigError:
        """The error for a value from a file: the fix names its keys."""
        fix = f"`quant`, in {path}: {self.advice.format_map(_KEYS)}"
        return ConfigError(self.what, seen=self.seen, allowed=self.allowed, field="quant", fix=fix)

    def __reduce__(self) -> tuple[object, ...]:
        values: dict[str, Any] = {"seen": self.seen, "allowed": self.allowed, "advice": self.advice}
        return partial(QuantFieldError, self.quant_field, self.what, **values), ()
