"""The quantization schemes by name, and what each lets a config choose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

METHODS = ("round", "gptq", "awq", "smoothquant")
ACTIVATIONS = ("dynamic", "static")
WEIGHT_SCALES = ("channel", "tensor")
BLOCKS = "block"  # weight scales of 128 rows and columns, beside activations by 128 columns
GROUPS = (0, 32, 64, 128)
DENSE_BITS = 16  # of weights and activations in the engine's dtype


@dataclass(frozen=True)
class SchemeInfo:
    """What a scheme stores, and the values that fields of ``QuantConfig`` may have with it, defaults first.

    Attributes:
        weight_bits, input_bits: of weights and activations; 16: they keep the engine's dtype.
        method: how its quantized values may be chosen.
        group: columns that may share a scale; (0,): one scale per row.
        activations: the scales that activations may have; ``none``: the scheme decides.
        rotation: whether the hidden states may be rotated.
        floating: quantized values are e4m3 (fp8); otherwise they are whole numbers.
        in_blocks: activations have scales for blocks of reordered columns, always from samples.
        wider: the scheme with the next more bits, for ``ingot doctor``; empty: it does not offer this one.
    """

    weight_bits: int = DENSE_BITS
    input_bits: int = DENSE_BITS
    method: tuple[str, ...] = METHODS[:1]
    group: tuple[int, ...] = GROUPS[:1]
    symmetric: tuple[bool, ...] = (True,)
    activations: tuple[str, ...] = ("none",)
    weight_scales: tuple[str, ...] = WEIGHT_SCALES[:1]
    rotation: tuple[bool, ...] = (False,)
    floating: bool = False
    in_blocks: bool = False
    wider: str = ""

    @property
    def weight_only(self) -> bool:
        """Whether weights alone are quantized."""
        return self.weight_bits < DENSE_BITS == self.input_bits


_WEIGHT_METHODS = ("round", "gptq", "awq")

SCHEMES = {
    "none": SchemeInfo(),
    "w8a16": SchemeInfo(8, method=_WEIGHT_METHODS, wider="none"),
    "w4a16": SchemeInfo(4, method=_WEIGHT_METHODS, group=GROUPS, symmetric=(False, True), wider="w8a16"),
    "w8a8": SchemeInfo(
        8,
        8,
        method=("round", "smoothquant"),
        activations=ACTIVATIONS,
        weight_scales=WEIGHT_SCALES,
        wider="w8a16",
    ),
    "w8a8-fp8": SchemeInfo(
        8,
        8,
        activations=ACTIVATIONS[:1],
        weight_scales=(*WEIGHT_SCALES, BLOCKS),
        floating=True,
        wider="w8a16",
    ),
    "w4a8": SchemeInfo(
        4,
        8,
        method=("round", "gptq"),
        group=(64, 128),
        symmetric=(False,),
        activations=ACTIVATIONS[:1],
        rotation=(True, False),
        wider="w8a16",
    ),
} | {
    f"rptq-w{weight_bits}a{input_bits}": SchemeInfo(
        weight_bits, input_bits, method=("gptq", "round"), group=GROUPS[1:], in_blocks=True, wider="w8a16"
    )
    for weight_bits, input_bits in ((8, 8), (4, 8), (4, 4))
}
MILDEST = "w8a16"  # the narrow scheme that costs least quality
HEADS = ("none", MILDEST)
WITH_8_BITS = {"rptq-w4a4": "rptq-w4a8"}  # the scheme of RPTQ's sites in 8 bits


def weight_only_schemes() -> tuple[str, ...]:
    """The schemes whose activations keep the engine's dtype."""
    return tuple(name for name, info in SCHEMES.items() if info.weight_only)


def block_schemes() -> tuple[str, ...]:
    """The schemes whose activations have scales for blocks of columns."""
    return tuple(name for name, info in SCHEMES.items() if info.in_blocks)


def narrow_schemes() -> tuple[str, ...]:
    """The schemes that store weights in fewer bits than the engine's dtype."""
    return tuple(name for name, info in SCHEMES.items() if info.weight_bits < DENSE_BITS)


def sample_free_schemes() -> tuple[str, ...]:
    """The narrow schemes that can be built without calibration samples."""
    return tuple(name for name in narrow_schemes() if not SCHEMES[name].in_blocks)


def ladder_schemes() -> tuple[str, ...]:
    """The schemes that ``ingot doctor`` can start from, fewest bits first."""
    wider = (name for name, info in SCHEMES.items() if info.wider)
    return tuple(sorted(wider, key=lambda name: SCHEMES[name].weight_bits))


def saves_time_only(scheme: str) -> bool:
    """Whether a scheme takes as many bytes as the next wider one; blocks are of int8."""
    info = SCHEMES[scheme]
    return info.in_blocks or info.weight_bits == SCHEMES[info.wider].weight_bits


def choosing(field: str) -> tuple[str, ...]:
    """The schemes with a choice for this field of ``QuantConfig``."""
    return tuple(name for name, info in SCHEMES.items() if len(getattr(info, field)) > 1)


def of_method(method: str) -> tuple[str, ...]:
    """The schemes with this method."""
    return tuple(name for name, info in SCHEMES.items() if method in info.method)


def stored_as(bits: int, activations: str, *, floating: bool = False) -> str:
    """The scheme of a quantized checkpoint with so many weight bits and such scales of activations;
    ``floating``: in e4m3.
    """
    return next(
        name
        for name, info in SCHEMES.items()
        if info.weight_bits == bits
        and activations in info.activations
        and not info.in_blocks
        and info.floating == floating
    )


def floating_schemes() -> tuple[str, ...]:
    """The schemes in e4m3, which a GPU computes from compute capability 8.9 on."""
    return tuple(name for name, info in SCHEMES.items() if info.floating)


def listed(names: Iterable[str], last: str = "and") -> str:
    """For people: ``a``, ``a and b``, ``a, b and c``."""
    *before, end = names
    return f"{', '.join(before)} {last} {end}" if before else end


def ladder(scheme: str) -> tuple[str, ...]:
    """A scheme and those with more bits, up to the engine's dtype."""
    wider = SCHEMES[scheme].wider
    return (scheme, *ladder(wider)) if wider else (scheme,)
