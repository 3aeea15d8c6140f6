"""On a GPU, what a step does to each token by itself gives it the same bits beside any number of others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ingot.kernels.activation.gated_mlp import silu_mul
from ingot.kernels.norm.layer_norm import layer_norm
from ingot.kernels.norm.rms_norm import rms_norm
from tests.kernels.flat_calls import rope_kv_write
from tests.kernels.numerics import normal

pytestmark = pytest.mark.gpu
HALF_DTYPES = [torch.float16, torch.bfloat16]
ROWS = 2100


def check(op: Callable[[slice], torch.Tensor]) -> None:
    """``op`` on some rows is what it is on all of them."""
    everything = op(slice(0, ROWS))
    for count in (1, 2, 7, 8, 9, 33, 64, 300, 1024, 2048):
        for begin in (0, 1, ROWS - count):
            rows = slice(begin, begin + count)
            assert torch.equal(op(rows), everything[rows]), (begin, count)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("hidden", [32, 256, 768, 4096, 5120])
def test_norms(dtype: torch.dtype, hidden: int) -> None:
    x, residual = (normal(ROWS, hidden, dtype=dtype, device="cuda", seed=seed) for seed in (0, 1))
    weight, bias = (normal(hidden, dtype=dtype, device="cuda", seed=seed) for seed in (2, 3))
    check(lambda rows: rms_norm(x[rows], weight, 1e-6)[0])
    check(lambda rows: torch.cat(rms_norm(x[rows], weight, 1e-6, residual[rows]), dim=1))
    check(lambda rows: layer_norm(x[rows], weight, bias, 1e-5)[0])
    check(lambda rows: torch.cat(layer_norm(x[rows], weight, bias, 1e-5, residual[rows]), dim=1))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("inner", [48, 1024, 3072, 11008])
def test_activations(dtype: torch.dtype, inner: int) -> None:
    x = 3 * normal(ROWS, 2 * inner, dtype=dtype, device="cuda")
    check(lambda rows: silu_mul(x[rows]))
    check(lambda rows: torch.nn.functional.gelu(x[rows]))
    check(lambda rows: torch.nn.functional.gelu(x[rows], approximate="tanh"))
    check(lambda rows: torch.nn.functional.relu(x[rows]))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_rotary_embedding(dtype: torch.dtype, norm: bool) -> None:
    qkv = normal(ROWS, 12 * 128, dtype=dtype, device="cuda")
    table = normal(4096, 128, dtype=torch.float32, device="cuda", seed=1)
    weight = normal(128, dtype=dtype, device="cuda", seed=2) if norm else None
    index = torch.arange(ROWS, device="cuda")

    def turned(rows: slice) -> torch.Tensor:
        """Queries, keys and values of these rows, side by side."""
        keys, values = (torch.zeros(33, 2, 64, 128, dtype=dtype, device="cuda") for _ in range(2))
        place = (table, index[rows], index[rows], index[rows], keys, values, 8, 2, 128)
        q = rope_kv_write(qkv[rows], *place, weight, weight, 1e-6, 512)
        written = [cache.transpose(1, 2).flatten(0, 1)[index[rows]] for cache in (keys, values)]
        return torch.cat((q, *written), dim=1)

    check(turned)
