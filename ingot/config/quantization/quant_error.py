"""What to change where a field of ``QuantConfig`` is wrong: a flag, or a key of a file.

Covers the names that people know fields by.

    raise QuantFieldError("alpha", "invalid alpha", seen=0.7, advice="{method} smoothquant, which takes it")
"""

from __future__ import annotations

from pathlib import Path

from ingot.errors import ConfigError

_FLAGS = {
    "scheme": "--quant",
    "group": "--group-size",
    "symmetric": "--symmetric or --asymmetric",
    "method": "--method",
    "head": "--quant-head",
    "activations": "--activations",
    "alpha": "--alpha",
    "weight_scales": "--weight-scales",
    "rotation": "--rotate",
    "reorder": "--reorder",
    "clusters": "--clusters",
    "ranges": "--ranges",
    "eight_bits": "--eight-bits",
}
_OPTIONS = "--clusters, --reorder, --ranges or --eight-bits"
_NAMES = _FLAGS | {"layers": "layers", "rptq": _OPTIONS, "source": "the checkpoint", "act_order": "act_order"}
_KEYS = {name: name for name in _NAMES}
_KEYS |= {name: f"rptq: {name}" for name in ("reorder", "clusters", "ranges", "eight_bits")}


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
        self.field = field
        self.advice = advice or f"{{{field}}}"
        fix = self.advice.format_map(_NAMES)
        super().__init__(what, seen=seen, allowed=allowed, fix=fix, flag=fix if field in _FLAGS else None)

    def in_file(self, path: Path) -> ConfigError:
        """The same error where the value is from a file: the fix names its keys."""
        flag = f"--quant, in {path}: {self.advice.format_map(_KEYS)}"
        return ConfigError(self.what, seen=self.seen, allowed=self.allowed, flag=flag)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.field, self.what, self.seen, self.allowed, self.advice)


def _rebuild(field: str, what: str, seen: object, allowed: object, advice: str) -> QuantFieldError:
    return QuantFieldError(field, what, seen=seen, allowed=allowed, advice=advice)
