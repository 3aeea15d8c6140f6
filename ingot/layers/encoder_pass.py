"""How an encoder goes through its layers: by kernels or module by module, and who looks on.

Owns what its call is told besides features. Knows no layer.

    encoder(features, EncoderPass(fused=True))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingot.layers.step_record import Recorded


@dataclass(frozen=True)
class EncoderPass:
    """One way through the layers.

    Attributes:
        fused: whether kernels may do more than a module; else every module is called, and its hooks fire.
        see: is told what layers have on their way, under the names of step_record.py.
        between: called behind every layer.
    """

    fused: bool = False
    see: Callable[[str, Recorded], None] | None = None
    between: Callable[[], None] | None = None

    def seen(self, name: str, value: object) -> None:
        """Tell of a value that may be written over later."""
        if self.see is not None:
            assert isinstance(value, Recorded)
            self.see(name, value)

    def layer_ended(self) -> None:
        """Everything of a layer is launched."""
        if self.between is not None:
            self.between()


MODULE_BY_MODULE = EncoderPass()
