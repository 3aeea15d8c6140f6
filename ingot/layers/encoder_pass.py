"""How an encoder goes through its layers: by kernels or module by module, and who looks on.

Owns the arguments of its call besides features. Knows no layer.

    encoder(features, EncoderPass(fused=True))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingot.layers.observer import Observed, Observer


@dataclass(frozen=True)
class EncoderPass:
    """One way through the layers.

    Attributes:
        fused: whether kernels may do more than a module; else every module is called, and its hooks fire.
        observer: receives what layers have on their way, under the names of step_record.py.
        between: called behind every layer.
    """

    fused: bool = False
    observer: Observer | None = None
    between: Callable[[], None] | None = None

    def see(self, name: str, value: Observed) -> None:
        """Show a value that may be written over later."""
        if self.observer is not None:
            self.observer(name, value)

    def layer_ended(self) -> None:
        """Everything of a layer is launched."""
        if self.between is not None:
            self.between()


MODULE_BY_MODULE = EncoderPass()
