"""What each tensor of an engine was rounded from: the checkpoint's, after what a method changes first.

That is a rotation, channels in another order, or factors that moved from a product into what makes its input.
A rotation is known; orders and factors are not stored, so they are derived from both sides of where they
stand, which must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ingot.config.decoder_config import DecoderConfig
from ingot.config.quantization.quant_config import HEAD
from ingot.errors import BuildError
from ingot.quant.methods.hadamard import rotate

Read = Callable[[str, str], torch.Tensor]  # our module's name and a leaf → what the checkpoint has
Uncertain = torch.Tensor | float
_FLOAT = 1e-6
_PIECE = 1 << 26  # values of embedding and head on the device at a time
_NORMS = ("norm", "input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class Known:
    """A tensor before it was rounded or cast, and relative errors of its rows and columns, 0 where exact."""

    tensor: torch.Tensor
    rows: Uncertain = 0.0
    columns: Uncertain = 0.0

    @property
    def exact(self) -> bool:
        """Whether it is the checkpoint's, bit by bit."""
        known = isinstance(self.rows, float) and isinstance(self.columns, float)
        return known and not self.rows + self.columns

    def cast(self, dtype: torch.dtype) -> Known:
        """As it is before packing; what had to be derived may be cast to a neighbour of the stored value."""
        derived = not (isinstance(self.rows, float) and isinstance(self.columns, float))
        rows = self.rows + 0.51 * torch.finfo(dtype).eps if derived else self.rows
        return Known(self.tensor.to(dtype), rows, self.columns)


class Origin:
    """Tensors of a checkpoint as they are."""

    def __init__(self, read: Read) -> None:
        self.read = read

    def weight(self, module: str) -> Known:
        """Of a linear layer in fewer bits, before they were chosen."""
        return self.leaf(module, "weight")

    def leaf(self, module: str, leaf: str) -> Known:
        """Any tensor, before it was cast."""
        return Known(self.read(module, leaf))

    def factors(self, module: str) -> torch.Tensor | None:
        """Shares of the limits by which factors of an input and its maker disagree; None: there are none."""
        return None


class Rotated(Origin):
    """Tensors of a model whose hidden states and values of heads an orthogonal matrix rotates.

    Norms have moved into the columns behind them; what writes the hidden states has the matrix behind it, and
    what reads them its transpose. ``rotate`` is the build's; that it is orthogonal is tried with random rows.
    """

    def __init__(self, read: Read, config: DecoderConfig, device: torch.device) -> None:
        super().__init__(read)
        self._config = config
        self._device = device
        for size in {config.hidden_size, config.head_dim}:
            _expect_orthogonal(size)

    def leaf(self, module: str, leaf: str) -> Known:
        path, _, name = module.rpartition(".")
        tensor = self.read(module, leaf)
        if name in _NORMS:
            return Known(torch.ones_like(tensor))
        if module == HEAD:
            return Known(self._rotated(tensor, self.read("norm", "weight")), _FLOAT)
        if module == "embed_tokens":
            return Known(self._rotated(tensor), _FLOAT)
        tensor = tensor.to(self._device)
        layer = path.rpartition(".")[0]
        if name == "qkv_proj":
            size = self._config.num_kv_heads * self._config.head_dim
            heads = tensor[-size:].unflatten(0, (-1, self._config.head_dim))
            rotated = torch.cat([tensor[:-size].float(), rotate(heads, dim=1).flatten(0, 1)])
            weight = leaf == "weight"
            return self._reads(rotated, f"{layer}.input_layernorm") if weight else Known(rotated, _FLOAT)
        if name in ("gate_up_proj", "up_proj"):
            weight = leaf == "weight"
            return self._reads(tensor, f"{layer}.post_attention_layernorm") if weight else Known(tensor)
        if name == "o_proj" and leaf == "weight":
            tensor = rotate(tensor.unflatten(1, (-1, self._config.head_dim))).flatten(1)
        return Known(rotate(tensor, dim=0), _FLOAT) if name in ("o_proj", "down_proj") else Known(tensor)

    def _rotated(self, weight: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
        """A large weight, some rows at a time on the device; the result is where the weight was."""
        factors = None if factors is None else factors.to(self._device)
        parts = weight.split(max(1, _PIECE // weight.shape[1]))
        return torch.cat([rotate(part.to(self._device), factors=factors).to(weight.device) for part in parts])

    def _reads(self, weight: torch.Tensor, norm: str) -> Known:
        return Known(rotate(weight, factors=self.read(norm, "weight").to(weight.device)), _FLOAT)


@lru_cache
def _expect_orthogonal(size: int) -> None:
    """Rotated rows have the same products with one another as before."""
    rows = torch.randn(8, size, generator=torch.Generator().manual_seed(size))
    rotated = rotate(rows)
    error = float((rotated @ rotated.T - rows @ rows.T).abs().max()) / size
    if not error < 1e-4:
        raise BuildError("the rotation is not orthogonal", seen=f"size {size}: {error:.3g}", allowed="< 1e-4")
