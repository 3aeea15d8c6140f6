"""Rows of a table in the host's memory, to the bit."""

from __future__ import annotations

import pytest
import torch

from ingot.errors import IngotError
from ingot.kernels.weight.host_rows import host_rows
from tests.kernels.numerics import DTYPES, launched, normal

IDS = [5, 0, 22, 5, 21]


def expected(table: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return torch.stack([table[i] for i in ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 96, 1024, 2500])
def test_the_rows_of_a_table(width: int, dtype: torch.dtype) -> None:
    table, ids = normal(23, width, dtype=dtype), torch.tensor(IDS)
    assert torch.equal(launched(host_rows)(table, ids), expected(table, IDS))
    assert torch.equal(host_rows(table, ids), expected(table, IDS))


def test_no_rows() -> None:
    assert launched(host_rows)(
        normal(3, 8, dtype=torch.float16), torch.tensor([], dtype=torch.int64)
    ).shape == (0, 8)


def test_what_it_takes() -> None:
    table, ids = normal(23, 8, dtype=torch.float32), torch.tensor(IDS)
    with pytest.raises(IngotError, match="ids has the wrong dtype"):
        host_rows(table, ids.int())
    with pytest.raises(IngotError, match="table is not contiguous"):
        host_rows(table[:, :4], ids)
    with pytest.raises(IngotError, match="table has the wrong dtype"):
        host_rows(table.to(torch.int32), ids)


@pytest.mark.gpu
class TestPinned:
    """What only a GPU has: pinned memory, and graphs that read it."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [96, 4096])
    def test_a_gpu_reads_it(self, width: int, dtype: torch.dtype) -> None:
        table = normal(23, width, dtype=dtype)
        found = host_rows(table.pin_memory(), torch.tensor(IDS, device="cuda"))
        assert found.is_cuda
        assert torch.equal(found.cpu(), expected(table, IDS))

    def test_a_graph_reads_what_the_ids_are_then(self) -> None:
        table = normal(23, 4096, dtype=torch.float16).pin_memory()
        ids = torch.tensor(IDS, device="cuda")
        host_rows(table, ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = host_rows(table, ids)
        ids.copy_(torch.tensor(IDS[::-1]))
        graph.replay()
        assert torch.equal(found.cpu(), expected(table, IDS[::-1]))

    def test_pageable_memory_is_refused(self) -> None:
        with pytest.raises(IngotError, match="pinned memory"):
            host_rows(normal(23, 8, dtype=torch.float16), torch.tensor(IDS, device="cuda"))

    def test_a_table_on_the_gpu_is_refused(self) -> None:
        with pytest.raises(IngotError, match="table is on another device"):
            host_rows(normal(23, 8, dtype=torch.float16, device="cuda"), torch.tensor(IDS, device="cuda"))
