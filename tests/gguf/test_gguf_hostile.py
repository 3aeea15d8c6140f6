"""Files that are damaged, of another kind, or made to harm: a clear error, and little memory."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot import LLM, build
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.checkpoint.gguf.gguf_file import GgufFile
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.errors import CheckpointError, IngotError, NoSuchPathError
from tests.e2e.terminal import ingot
from tests.gguf.gguf_files import tiny, write_gguf

ALIGN = "general.alignment"
MUCH = 1 << 62


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def header(fields: list[bytes], tensors: list[bytes], counts: tuple[int, int] | None = None) -> bytes:
    numbers = counts or (len(tensors), len(fields))
    return b"GGUF" + struct.pack("<IQQ", 3, *numbers) + b"".join(fields) + b"".join(tensors)


def field(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def tensor(name: str, dims: list[int], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARRAY = struct.pack("<I", 9)
CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "magic": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "magic alone": (b"GGUF", "truncated or damaged"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "unsupported GGUF version; seen: 1"),
    "version 9": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "unsupported GGUF version; seen: 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "big-endian magic": (b"FUGG" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many tensors": (header([], [], (MUCH, 0)), f"{MUCH} tensors in a file of 24 bytes"),
    "many fields": (header([], [], (0, MUCH)), f"{MUCH} metadata fields"),
    "long key": (header([struct.pack("<Q", MUCH)], []) + bytes(64), "bytes are needed at byte"),
    "long text": (header([field("a", 8, struct.pack("<Q", MUCH))], []), "bytes are needed at byte"),
    "long array": (header([field("a", 9, struct.pack("<IQ", 0, MUCH))], []), "values of a"),
    "long array of texts": (header([field("a", 9, struct.pack("<IQ", 8, MUCH))], []), "values of a"),
    "arrays in arrays": (header([field("a", 9, struct.pack("<IQ", 9, 1) * 50)], []), "unsupported type 9"),
    "type of a field": (header([field("a", 99, b"")], []) + bytes(9), "a of the unknown type 99"),
    "no UTF-8": (header([field("a", 8, text(b"\xff\xfe"))], []), "a is not UTF-8"),
    "field twice": (header([field("a", 4, bytes(4))] * 2, []), "a twice"),
    "alignment 0": (header([field(ALIGN, 4, bytes(4))], []), f"{ALIGN} 0"),
    "alignment 3": (header([field(ALIGN, 4, struct.pack("<I", 3))], []), f"{ALIGN} 3"),
    "alignment as text": (header([field(ALIGN, 8, text("32"))], []), f"{ALIGN} 32"),
    "tensor twice": (header([], [tensor("t", [1], 0)] * 2), "tensor t twice"),
    "beyond the file": (header([], [tensor("t", [4], 0, MUCH)]), "1 tensors beyond its"),
    "huge tensor": (header([], [tensor("t", [1 << 40, 1 << 40], 0)]), "1 tensors beyond its"),
    "no dimension": (header([], [tensor("t", [], 0)]), "t has 0 dimensions"),
    "many dimensions": (header([], [tensor("t", [1] * 9, 0)]), "t has 9 dimensions"),
    "size 0": (header([], [tensor("t", [0, 4], 0)]), "t of shape"),
    "half a block": (header([], [tensor("t", [33, 4], 8)]), r"t of shape \[33, 4\] as Q8_0"),
    "IQ4_XS": (header([], [tensor("t", [256], 23)]), "seen: t: IQ4_XS; allowed: F32, F16, Q4_0"),
    "unknown type": (header([], [tensor("t", [256], 77)]), "seen: t: type 77; allowed: F32, F16, Q4_0"),
    "parts": (
        header([field("split.count", 2, b"\x03\x00")], []),
        "one part of 3.*allowed: NAME-00001-of-00003",
    ),
    "no parts": (header([field("split.count", 2, b"\x00\x00")], []), "unsupported split.count.*seen: 0"),
    "parts as text": (header([field("split.count", 8, text("3"))], []), "unsupported split.count.*seen: 3"),
    "no architecture": (header([], []), "unsupported architecture.*None"),
    "other architecture": (header([field("general.architecture", 8, text("mamba"))], []), "'mamba'"),
    "no embedding": (header([field("general.architecture", 8, text("llama"))], []), "no tensor token_embd"),
}


@pytest.mark.parametrize("case", CASES)
def test_headers(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(CASES[case][0])
    with pytest.raises(CheckpointError, match=CASES[case][1]):
        open_checkpoint(path)


def test_every_truncation_is_named(tmp_path: Path) -> None:
    """At any byte: an error of ours, and no other."""
    whole, cut = tmp_path / "model.gguf", tmp_path / "cut.gguf"
    write_gguf(whole, tiny("llama", num_hidden_layers=1), "Q8_0")
    content = whole.read_bytes()
    for size in [*range(0, 3000, 17), len(content) // 2, len(content) - 64]:
        cut.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"truncated or damaged|not a GGUF file"):
            open_checkpoint(cut)


def test_changed_bytes_are_ours_to_report(tmp_path: Path) -> None:
    """Any byte of the header changed: the file opens, or an error of ours names it; nothing else."""
    whole, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    write_gguf(whole, tiny("llama", num_hidden_layers=1), "Q8_0")
    content = whole.read_bytes()
    generator = np.random.default_rng(3)
    for place in range(0, 1500, 5):
        changed = bytearray(content)
        changed[place] ^= int(generator.integers(1, 256))
        other.write_bytes(changed)
        try:
            open_checkpoint(other).close()
        except IngotError:
            continue


def test_memory_stays_small(tmp_path: Path) -> None:
    """A sparse file of 64 GB of zeros: an array of as many empty texts as fit is refused by its count."""
    path = tmp_path / "model.gguf"
    path.write_bytes(header([field("a", 9, struct.pack("<IQ", 8, 1 << 32))], []))
    with path.open("r+b") as file:
        file.truncate(64 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="values of a"):
        open_checkpoint(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(kind: str = "llama", form: str = "F32", **metadata: Any) -> Path:
        path = tmp_path / "model.gguf"
        write_gguf(path, tiny(kind), form, metadata=metadata)
        return path

    return make


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("expert_count", 8, "llama.expert_count in .*seen: 8"),
        ("attention.sliding_window", 4096, "sliding_window"),
        ("attention.value_length", 8, "value_length in .*seen: 8; allowed: 16"),
        ("rope.dimension_count", 8, "rope.dimension_count in .*seen: 8; allowed: 16"),
        ("attention.head_count_kv", [1, 2], r"seen: \[1, 2\]; allowed: one value for all layers"),
        ("block_count", None, "llama.block_count in .*seen: nothing"),
        ("block_count", "2", "allowed: a positive integer"),
        ("context_length", 0, "allowed: a positive integer"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "allowed: a number"),
        ("rope.scaling.type", "longrope", "allowed: none, linear, yarn"),
        ("rope.scaling.attn_factor", 1.5, "attn_factor in .*seen: 1.5"),
        ("block_count", 3, "do not fit the model.*missing"),
        ("attention.head_count", 8, "do not fit the model.*mis-shaped"),
        ("attention.head_count", 3, "num_heads must be a multiple"),
    ],
)
def test_settings(key: str, value: Any, words: str, write: Write, tmp_path: Path) -> None:
    path = write(**{f"llama.{key}": value})
    with pytest.raises(IngotError, match=f"(?s){words}"):
        build(path, tmp_path / "engine", device="cpu")
    assert not (tmp_path / "engine").exists()


def test_one_number_of_heads_for_every_layer(write: Write) -> None:
    assert (
        LLM(write(**{"llama.attention.head_count_kv": [2, 2]}), "cpu").engine.manifest.model.num_kv_heads == 2
    )


@pytest.mark.parametrize("name", ["eos", "bos"])
def test_ids_beyond_the_vocabulary(name: str, write: Write) -> None:
    path = write(**{f"tokenizer.ggml.{name}_token_id": 9999})
    if name == "eos":
        with pytest.raises(IngotError, match="9999"):
            LLM(path, "cpu")


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama"), "Q8_0")
    content = bytearray(path.read_bytes())
    place = GgufFile.open(path).tensors["blk.0.ffn_up.weight"].offset
    content[place : place + 2] = b"\xff\x7f"  # fp16 NaN
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not finite"):
        build(path, tmp_path / "engine", device="cpu")


def test_paths(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.gguf"
    with pytest.raises(NoSuchPathError, match="no such file"):
        resolve_checkpoint(missing)
    with pytest.raises(CheckpointError, match="cannot read"):
        open_checkpoint(missing)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"folder/model\.gguf is truncated or damaged"):
        open_checkpoint(folder)
    failed = ingot("build", missing, "-o", tmp_path / "engine")
    assert failed.exit_code == 2
    assert "no such file" in failed.stderr
