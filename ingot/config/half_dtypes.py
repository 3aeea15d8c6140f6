"""Names of the dtypes of a model's halves: ``fp16``, or ``encoder=fp16,decoder=fp32``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

AUTO = "auto"
_WIDEST = "fp32"
_ENCODER = "encoder."


def in_encoder(name: str) -> bool:
    """Whether a module or tensor of this name is an encoder's."""
    return name.startswith(_ENCODER)


@dataclass(frozen=True)
class HalfDtypes:
    """Names of dtypes, perhaps ``auto``. A model without an encoder has the same name twice."""

    decoder: str
    encoder: str

    @classmethod
    def of(cls, decoder: str, encoder: str | None = None) -> Self:
        """``encoder`` None: the decoder's."""
        return cls(decoder, encoder or decoder)

    @property
    def other(self) -> str | None:
        """The encoder's, if it is not the decoder's."""
        return None if self.encoder == self.decoder else self.encoder

    def __str__(self) -> str:
        return self.decoder if self.other is None else f"encoder={self.encoder},decoder={self.decoder}"

    def or_else(self, own: HalfDtypes) -> HalfDtypes:
        """With those of ``own`` in the place of ``auto``."""
        pairs = (self.decoder, own.decoder), (self.encoder, own.encoder)
        return HalfDtypes(*(theirs if name == AUTO else name for name, theirs in pairs))

    def at(self, name: str) -> str:
        """The dtype for a module or tensor of this name."""
        return self.encoder if in_encoder(name) else self.decoder

    @property
    def wider(self) -> str:
        """The one with more bits; the decoder's if both have as many."""
        return _WIDEST if _WIDEST in (self.decoder, self.encoder) else self.decoder
