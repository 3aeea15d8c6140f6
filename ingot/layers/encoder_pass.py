"""How an encoder goes through its layers: fused or module by module, and who observes it.

encoder(features, EncoderPass(fused=True))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingot.layers.observer import Observed, Observer


@dataclass(frozen=True)
class EncoderPass:
    """Arguments of an encoding besides its features.

    Attributes:
        fused: whether kernels may do more than a module; otherwise every module is called, and its hooks
            fire.
        observer: receives intermediate values, under the names of step_record.py.
        between: called after every layer.
    """

    fused: bool = False
    observer: Observer | None = None
    between: Callable[[], None] | None = None

    @property
    def unobserved(self) -> bool:
        """Whether no value between kernels is seen, by hooks or an observer."""
        return self.fused and self.observer is None

    def see(self, name: str, value: Observed) -> None:
        """Show a value that may be overwritten later."""
        if self.observer is not None:
            self.observer(name, value)

    def layer_ended(self) -> None:
        """Called once everything of a layer is launched."""
        if self.between is not None:
            self.between()


MODULE_BY_MODULE = EncoderPass()
