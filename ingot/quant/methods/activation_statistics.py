"""What calibration records of the input of a linear layer, batch by batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from ingot.errors import BuildError
from ingot.quant.methods.gptq import HessianSum

SAMPLE_ROWS = 512


class ChannelRange:
    """Smallest, largest and mean absolute value of each channel, fp32 [K] on a device."""

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self.lowest = torch.full((in_features,), torch.inf, device=device)
        self.highest = torch.full((in_features,), -torch.inf, device=device)
        self.total_abs = torch.zeros(in_features, dtype=torch.float64, device=device)

    def add(self, x: torch.Tensor) -> None:
        """Tokens [T, K]; none is fine."""
        if not x.shape[0]:
            return
        wide = x.float()
        torch.minimum(self.lowest, wide.amin(0), out=self.lowest)
        torch.maximum(self.highest, wide.amax(0), out=self.highest)
        self.total_abs += wide.abs().sum(0)
        self.count += x.shape[0]

    def absmax(self) -> torch.Tensor:
        """[K], largest magnitude of each channel; BuildError where nothing was added or it is not finite."""
        if not self.count:
            raise BuildError("calibration saw no tokens", fix="`calib` with at least one sample")
        finite = torch.isfinite(self.total_abs)
        if not bool(finite.all()):
            seen = f"channel {int((~finite).nonzero()[0])}"
            raise BuildError("activations are not finite during calibration", seen=seen, fix="`dtype=bf16`")
        return torch.maximum(self.highest, -self.lowest)

    def mean_abs(self) -> torch.Tensor:
        """[K], mean magnitude of each channel."""
        self.absmax()
        return (self.total_abs / self.count).float()

    def tensors(self) -> dict[str, torch.Tensor]:
        own = {"lowest": self.lowest, "highest": self.highest, "total_abs": self.total_abs}
        return {name: tensor.cpu() for name, tensor in ({"count": torch.tensor(self.count)} | own).items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        found = cls(tensors["lowest"].shape[0])
        found.count = int(tensors["count"])
        for name in ("lowest", "highest", "total_abs"):
            setattr(found, name, tensors[name])
        return found


class TokenSample:
    """At most ``rows`` of the added tokens, drawn evenly; the same for the same batches and seed."""

    def __init__(
        self,
        in_features: int,
        device: torch.device | str = "cpu",
        rows: int = SAMPLE_ROWS,
        seed: int = 0,
    ) -> None:
        self._most = rows
        self._generator = torch.Generator().manual_seed(seed)
        self._keys = torch.empty(0, dtype=torch.float64)
        self.x = torch.empty(0, in_features, device=device)

    def add(self, x: torch.Tensor) -> None:
        """Tokens [T, K]: every token draws a key, and the smallest keys stay, in the order they came."""
        new = torch.rand(x.shape[0], generator=self._generator, dtype=torch.float64)
        keys = torch.cat([self._keys, new])
        kept = keys.argsort(stable=True)[: self._most].sort().values
        old, fresh = kept[kept < len(self._keys)], kept[kept >= len(self._keys)] - len(self._keys)
        if not len(fresh):
            return
        device = self.x.device
        rows = x[fresh.to(x.device)].to(self.x)
        self.x = torch.cat([self.x[old.to(device)], rows])
        self._keys = keys[kept]


@dataclass(frozen=True, slots=True)
class RecordRows:
    """Which record each row of an input [T, K] belongs to.

    Attributes:
        lengths: rows of each record, one after another, T in all.
        spliced: bool [T], rows that stand for an input (a picture, embeddings) and not for a token; None:
            there are none.
    """

    lengths: tuple[int, ...]
    spliced: torch.Tensor | None = None


class RecordRanges:
    """Ranges [K] of each record by itself, on a device, and of spliced positions and tokens apart."""

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self._lowest: list[torch.Tensor] = []
        self._highest: list[torch.Tensor] = []
        self.tokens, self.spliced = ChannelRange(in_features, device), ChannelRange(in_features, device)

    def add(self, x: torch.Tensor, rows: RecordRows | None) -> None:
        """Tokens [T, K] of whole records; without ``rows`` they are one record of tokens."""
        lengths = (x.shape[0],) if rows is None else rows.lengths
        for record in x.float().split(lengths):
            self._lowest.append(record.amin(0))
            self._highest.append(record.amax(0))
        if rows is None or rows.spliced is None:
            self.tokens.add(x)
        else:
            spliced = rows.spliced.to(x.device)
            self.tokens.add(x[~spliced])
            self.spliced.add(x[spliced])

    @property
    def lowest(self) -> torch.Tensor:
        """[records, K]."""
        return torch.stack(self._lowest)

    @property
    def highest(self) -> torch.Tensor:
        """[records, K]."""
        return torch.stack(self._highest)


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """The statistics of one input that a scheme needs; None: not gathered."""

    ranges: ChannelRange
    hessian: HessianSum | None = None
    sample: TokenSample | None = None
    records: RecordRanges | None = None

    @classmethod
    def of(
        cls,
        in_features: int,
        device: torch.device | str = "cpu",
        *,
        hessian: bool = False,
        sample: int = 0,
        records: bool = False,
    ) -> Self:
        """Empty: ranges always, a Hessian for GPTQ, a sample for AWQ and SmoothQuant, records for RPTQ."""
        return cls(
            ChannelRange(in_features, device),
            HessianSum(in_features, device) if hessian else None,
            TokenSample(in_features, device, sample) if sample else None,
            RecordRanges(in_features, device) if records else None,
        )

    def add(self, x: torch.Tensor) -> None:
        """Tokens [T, K]."""
        for one in (self.ranges, self.hessian, self.sample):
            if one is not None:
                one.add(x)

    def add_rows(self, x: torch.Tensor, rows: RecordRows | None) -> None:
        """Tokens [T, K] of whole records, which ``add`` gets too."""
        if self.records is not None:
            self.records.add(x, rows)
