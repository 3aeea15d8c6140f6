"""The options of RPTQ: which inputs are reordered, in how many clusters, and how ranges are measured.

Sites have the paper's names. R2, queries and keys, is not among them: the KV cache rounds those per token
and head (``kv_dtype="int8"``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from ingot.config.json_config import JsonConfig
from ingot.config.quantization.quant_error import QuantFieldError

# Source: github.com/hahnyuan/RPTQ4LLM, main.py; there the outputs of norms have max(8, abits) bits.
PUBLISHED_CLUSTERS = {"R1": 32, "R3": 4, "R4": 32, "R5": 32}  # R3: of each head
SITES = tuple(PUBLISHED_CLUSTERS)
AFTER_NORMS = ("R1", "R4")
RANGES = ("ema-minmax", "minmax", "mse")
_OF_LEAF = {"o_proj": "R3", "gate_up_proj": "R4", "up_proj": "R4", "down_proj": "R5"}


def site_of(module: str) -> str:
    """The site of a linear layer's input by the layer's name: ``R1`` (input of attention), ``R3``
    (attention's output), ``R4`` (input of the MLP) or ``R5`` (input of its last layer).
    """
    return _OF_LEAF.get(module.rpartition(".")[2], "R1")


@dataclass(frozen=True)
class RptqConfig(JsonConfig):
    """How inputs are cut into clusters, with the defaults of the paper's code.

    Attributes:
        reorder: sites whose channels are ordered by cluster; the others keep their order and have one scale.
        clusters: most clusters of a site, of each head at R3; a cluster takes whole blocks, so there are
            never more of them than blocks.
        ranges: ``ema-minmax``: a moving average over records, 0.99 of the old and 0.01 of the new one;
            ``minmax``: the extremes of all records; ``mse``: those, clipped where a sample's error is least.
        eight_bits: sites that ``rptq-w4a4`` rounds to 8 bits instead of 4.

    Raises:
        ConfigError: an unknown site or range method, or a number out of range.
    """

    reorder: tuple[str, ...] = SITES
    clusters: dict[str, int] = field(default_factory=dict, hash=False)
    ranges: str = RANGES[0]
    eight_bits: tuple[str, ...] = AFTER_NORMS

    def __post_init__(self) -> None:
        for name in ("reorder", "eight_bits"):
            object.__setattr__(self, name, _sites(name, getattr(self, name)))
        if not isinstance(self.clusters, dict):
            raise QuantFieldError("clusters", "clusters maps sites to numbers", seen=self.clusters)
        _sites("clusters", tuple(self.clusters))
        for count in self.clusters.values():
            if type(count) is not int or count < 1:
                allowed = "a whole number, at least 1"
                raise QuantFieldError("clusters", "invalid number of clusters", seen=count, allowed=allowed)
        object.__setattr__(self, "clusters", PUBLISHED_CLUSTERS | self.clusters)
        if self.ranges not in RANGES:
            raise QuantFieldError("ranges", "unknown way to measure ranges", seen=self.ranges, allowed=RANGES)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Rebuild from ``to_json`` output or a part of it; raises as the class does."""
        known = [one.name for one in fields(cls)]
        if not isinstance(data, Mapping) or not {*data} <= {*known}:
            raise QuantFieldError("rptq", "rptq maps these options to values", seen=data, allowed=known)
        return super().from_json(dict(data))

    @property
    def summary(self) -> str:
        """For people: what is reordered, and how."""
        counts = [f"{site} in {self.clusters[site]}" for site in self.reorder]
        reordered = f"reordered {', '.join(counts)} clusters at most" if counts else "not reordered"
        return f"{reordered}, ranges by {self.ranges}"


def _sites(name: str, found: object) -> tuple[str, ...]:
    """Known sites in their order, each once."""
    if not isinstance(found, tuple) or any(site not in SITES for site in found):
        r2 = isinstance(found, tuple) and "R2" in found
        advice = f"{{{name}}}: leave R2 out, queries and keys are rounded by the KV cache" if r2 else ""
        raise QuantFieldError(name, "unknown RPTQ site", seen=found, allowed=SITES, advice=advice)
    return tuple(site for site in SITES if site in found)
