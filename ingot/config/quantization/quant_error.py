"""What to change where a field of ``QuantConfig`` is wrong: a parameter, or a key of a file.

Covers the names that people know fields by.

    raise QuantFieldError("alpha", "invalid alpha", seen=0.7, advice="{method} smoothquant, which takes it")
"""

from __future__ import annotations

from pathlib import Path

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
    """A field of ``QuantConfig`` has a value that the config does not take.

    Args:
        field: its name.
        advice: the fix, fields in braces: ``{method} smoothquant``; empty: the field itself.
    """

    def __init__(
        self,
        field: str,
        what: str,
        *,
        seen: object = None,
        allowed: object = None,
        advice: str = "",
    ) -> None:
        self.quant_field = field
        self.advice = advice or f"{{{field}}}"
        at_fault = field if field in _PARAMETERS else None
        super().__init__(what, seen=seen, allowed=allowed, field=at_fault, fix=self.advice.format_map(_NAMES))

    def in_file(self, path: Path) -> ConfigError:
        """The same error where the value is from a file: the fix names its keys."""
        fix = f"`quant`, in {path}: {self.advice.format_map(_KEYS)}"
        return ConfigError(self.what, seen=self.seen, allowed=self.allowed, field="quant", fix=fix)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.quant_field, self.what, self.seen, self.allowed, self.advice)


def _rebuild(field: str, what: str, seen: object, allowed: object, advice: str) -> QuantFieldError:
    return QuantFieldError(field, what, seen=seen, allowed=allowed, advice=advice)
