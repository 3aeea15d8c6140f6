"""The streaming product of few rows on a GPU: near float64, and the same bits in any step."""

from __future__ import annotations

import pytest
import torch

from ingot.kernels.cache.paged_cache import PagedCache
from ingot.kernels.cache.qkv_placement import Placement, QkvHeads, TokenPlaces
from ingot.kernels.norm.rms_norm import rms_norm
from ingot.kernels.product.few_rows.stream_product import stream_gate_up, stream_linear, stream_qkv
from ingot.kernels.weight.stored_weight import StoredWeight, dequantized
from tests.kernels.test_stream_product import packed

BRAIN = torch.bfloat16
HOPPERS = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Hopper's"
)
FORMS = pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 128, False), (4, 64, False), (4, 128, True), (8, 0, True)]
)
pytestmark = [pytest.mark.gpu, HOPPERS, pytest.mark.usefixtures("poisoned_allocations")]


def there(outputs: int, columns: int, bits: int, group: int, symmetric: bool) -> StoredWeight:
    """Random, of outputs of order one."""
    found = packed(outputs, columns, bits, group, symmetric=symmetric)
    assert found.scales is not None
    found.scales.mul_(1 / columns**0.5 / (4.6 if bits == 4 else 74))
    zeros = None if found.zeros is None else found.zeros.cuda()
    return StoredWeight(found.values.cuda(), columns, found.scales.cuda(), zeros, bits, group)


def drawn(*sizes: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*sizes, device="cuda", generator=random).to(BRAIN)


def whole(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    return x.double() @ dequantized(weight, torch.float64).T


def near(y: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(y.double(), wanted, rtol=1e-2, atol=2e-2)


@FORMS
@pytest.mark.parametrize(
    ("outputs", "columns"), [(4096, 4096), (32, 256), (96, 520), (9600, 136), (4096, 14336), (64, 16384)]
)
def test_linear(outputs: int, columns: int, bits: int, group: int, symmetric: bool) -> None:
    """With one tile per program and several, whole steps and not; a row of a wider tensor, at any place."""
    weight = there(outputs, columns, bits, group, symmetric)
    wide, bias, added = drawn(2, columns + 11), drawn(outputs, seed=1), drawn(1, outputs, seed=2)
    for at in (8, 3):
        x = wide[1:, at : at + columns]
        y = stream_linear(x, weight, bias, added)
        near(y, whole(x, weight) + bias.double() + added.double())
        near(stream_linear(x, weight), whole(x, weight))
        assert torch.equal(stream_linear(x, weight, bias, added, overlap=1, programs=7), y)


@FORMS
@pytest.mark.parametrize(("inner", "columns"), [(14336, 4096), (48, 520), (3072, 1024)])
def test_gate_up(inner: int, columns: int, bits: int, group: int, symmetric: bool) -> None:
    weight, x = there(2 * inner, columns, bits, group, symmetric), drawn(1, columns)
    gate, up = whole(x, weight).to(BRAIN).double().chunk(2, dim=1)
    y = stream_gate_up(x, weight)
    near(y, torch.nn.functional.silu(gate) * up)
    assert torch.equal(stream_gate_up(x, weight, overlap=1, programs=7), y)


@FORMS
def test_norms_are_those_of_their_own_kernel(bits: int, group: int, symmetric: bool) -> None:
    weight, norm = there(6144, 4096, bits, group, symmetric), drawn(4096, seed=3)
    for seed, size in enumerate((1, 30, 1e-3, 7, 0)):
        x = drawn(1, 4096, seed=seed) * size
        normed, _ = rms_norm(x, norm, 1e-5)
        linear, gates = stream_linear(normed, weight), stream_gate_up(normed, weight)
        assert torch.equal(stream_linear(x, weight, None, None, norm, 1e-5), linear)
        assert torch.equal(stream_gate_up(x, weight, norm, 1e-5), gates)


@FORMS
@pytest.mark.parametrize("head_dim", [128, 64])
def test_heads(head_dim: int, bits: int, group: int, symmetric: bool) -> None:
    """Queries, keys and values where they belong, nothing else written; a row without a slot writes none."""
    heads, half = QkvHeads(32 * 128 // head_dim, 8 * 128 // head_dim, head_dim), head_dim // 2
    weight, x, bias = there(6144, 4096, bits, group, symmetric), drawn(1, 4096), drawn(6144, seed=1)
    angles = torch.rand(512, half, device="cuda") * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    sums = (whole(x, weight) + bias.double()).to(BRAIN).double().view(1, -1, 2, half)
    a, b = sums.unbind(2)
    for slot, token in ((5, 3), (100, 511), (-1, 0), (127, 90)):
        cos, sin = (t.double() for t in table[token].chunk(2))
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=2).flatten(2)
        q, k = turned[:, : heads.num_heads], turned[0, heads.num_heads : -heads.num_kv_heads]
        v = sums.flatten(2)[0, -heads.num_kv_heads :]
        keys, values = torch.full((2, 8, heads.num_kv_heads, 16, head_dim), 9.0, device="cuda").to(BRAIN)
        index, place_of = (torch.tensor([one], device="cuda") for one in (token, slot))
        place = Placement(table, TokenPlaces(index, index, place_of), PagedCache(keys, values), heads)
        near(stream_qkv(x, weight, bias, None, 0.0, place), q)
        for cache, wanted in ((keys, k), (values, v)):
            rows = cache.transpose(1, 2).flatten(0, 1)
            others = torch.ones(len(rows), dtype=torch.bool, device="cuda")
            if slot >= 0:
                near(rows[slot], wanted)
                others[slot] = False
            assert (rows[others] == 9).all()


@FORMS
def test_chains_of_early_starts_give_the_same_bits(bits: int, group: int, symmetric: bool) -> None:
    """Eager and in a graph, many times: no stage is read before its words are there, or after."""
    up, down = there(8192, 4096, bits, group, symmetric), there(4096, 4096, bits, group, symmetric)
    norm, x = drawn(4096, seed=3), drawn(1, 4096)

    def chain() -> torch.Tensor:
        hidden = x
        for _ in range(6):
            hidden = stream_linear(stream_gate_up(hidden, up, norm, 1e-5), down, None, hidden)
        return hidden

    first = chain()
    assert all(torch.equal(first, chain()) for _ in range(20))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = chain()
    for _ in range(20):
        last.fill_(float("nan"))
        graph.replay()
        assert torch.equal(first, last)
