"""Tensors that are dequantized come some rows at a time, in the dtype that an engine stores."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from ingot import build
from ingot.building.source import source_check
from ingot.building.source.source_gguf import GgufRows
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.gguf import gguf_weights
from ingot.checkpoint.gguf.gguf_file import GgufFile
from ingot.errors import BuildError
from tests.gguf.gguf_files import Kind, tiny, write_gguf

VOCABULARY = 97


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("wide") / "model.gguf"
    write_gguf(found, tiny("llama", wide=True), "Q4_K", {"ffn_down": "Q6_K", "token_embd": "Q6_K"})
    return found


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Values that are widened at once: at most 1,024; how many each time."""
    seen: list[int] = []
    own = gguf.dequantize

    def watched(blocks: np.ndarray, kind: Kind) -> np.ndarray:
        found = own(blocks, kind)
        seen.append(found.size)
        return found

    monkeypatch.setattr(gguf_weights, "_AT_ONCE", 1024)
    monkeypatch.setattr(gguf, "dequantize", watched)
    return seen


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_they_are_read_in_pieces(path: Path, few: list[int], dtype: torch.dtype | None) -> None:
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, own in (("model.embed_tokens", "token_embd"), ("model.layers.0.mlp.up_proj", "blk.0.ffn_up")):
        tensor = stored[f"{own}.weight"]
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        few.clear()
        with open_checkpoint(path) as source:
            got = source.read(f"{name}.weight", dtype)
        assert (got.dtype, max(few)) == (dtype or torch.float32, 1024)
        assert torch.equal(got, expected.to(got.dtype))


def test_a_build_reads_them_in_its_dtype(
    path: Path, few: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fp32 copy of a tensor is made, neither by the build nor by its comparison with the file."""
    read, item = gguf_weights.GgufWeights.read, GgufRows.__getitem__
    dtypes: dict[str, torch.dtype] = {}
    sizes: list[int] = []

    def watched(self: gguf_weights.GgufWeights, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        found = read(self, name, dtype)
        dtypes[name] = found.dtype
        return found

    def cut(self: GgufRows, part: slice) -> torch.Tensor:
        found = item(self, part)
        if self.shape == (VOCABULARY, 256):
            sizes.append(found.numel())
        return found

    monkeypatch.setattr(gguf_weights.GgufWeights, "read", watched)
    monkeypatch.setattr(GgufRows, "__getitem__", cut)
    monkeypatch.setattr(source_check, "_ROWS", 2048)
    build(path, tmp_path / "engine", device="cpu")
    assert {dtype for name, dtype in dtypes.items() if "norm" not in name} == {torch.float16}
    assert max(few) == 1024
    assert max(sizes) == 2048
    assert sum(sizes) == 2 * VOCABULARY * 256


def test_rows_of_the_second_reading(path: Path) -> None:
    file = GgufFile.open(path)
    for name in ("token_embd.weight", "blk.0.attn_norm.weight", "blk.0.ffn_up.weight"):
        rows = GgufRows(file, name)
        whole = rows[:]
        assert tuple(whole.shape) == rows.shape
        for part in (slice(0, 3), slice(5, 9), slice(len(whole) - 2, len(whole) + 9)):
            assert torch.equal(rows[part], whole[part])


def test_values_beyond_fp16_are_refused_with_their_size(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama", wide=True), "Q6_K")
    file = GgufFile.open(path)
    tensor = file.tensors["blk.0.ffn_down.weight"]
    content = bytearray(path.read_bytes())
    block = tensor.offset + 7 * 210
    content[block + 192 : block + 208] = b"\x7f" * 16  # scales of 127
    content[block + 208 : block + 210] = np.float16(100).tobytes()
    path.write_bytes(content)
    with pytest.raises(BuildError, match=r"weights do not fit fp16; seen: .*down_proj\.weight: largest \d"):
        build(path, tmp_path / "engine", device="cpu", dtype="fp16")
    build(path, tmp_path / "engine", device="cpu", dtype="fp32", proof=False)
