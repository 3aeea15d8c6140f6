"""Models in several GGUF files, as the ``gguf`` package cuts them: read from any part or the folder."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from ingot import LLM, SamplingParams, build
from ingot.checkpoint.checkpoint_reader import open_checkpoint, read_config
from ingot.checkpoint.gguf.gguf_parts import GgufId, models_of, of_type
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.engine.manifest import Manifest
from ingot.errors import CheckpointError, NoSuchPathError
from ingot.measure.align.align_session import align
from ingot.proof.verify_engine import verify
from tests.e2e.terminal import ingot
from tests.gguf.gguf_files import tiny, write_gguf
from tests.gguf.test_gguf import check_logits

PARTS = [f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of 21 tensors in three parts."""
    folder = tmp_path_factory.mktemp("parts")
    write_gguf(folder / "model.gguf", tiny("llama"), "Q8_0", most=8)
    assert sorted(path.name for path in folder.iterdir()) == PARTS
    return folder


@pytest.fixture
def parts(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "parts")


@pytest.mark.parametrize("given", ["", *PARTS])
def test_any_part_or_the_folder_is_the_model(given: str, parts: Path, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "whole.gguf", tiny("llama"), "Q8_0")
    model.load_state_dict(
        {n: v if "proj.w" in n else v.half().float() for n, v in model.state_dict().items()}
    )
    check_logits(parts / given, model).close()


def test_it_is_built_and_proven(parts: Path, tmp_path: Path) -> None:
    folder = build(parts, tmp_path / "engine", device="cpu", dtype="fp32")
    assert Manifest.read(folder).quant.source == "gguf"
    assert verify(folder, "cpu", source=str(parts / PARTS[2]), note=False).verdict == "proven"


@pytest.mark.slow
def test_other_verbs(parts: Path, tmp_path: Path) -> None:
    folder = build(parts, tmp_path / "engine", device="cpu", dtype="fp32", proof=False)
    assert align(folder, parts, [[1, 2, 3]], steps=1, device="cpu", original="hf").aligned
    assert ingot("inspect", parts).exit_code == 0
    assert ingot("plan", parts, "--gpu", "24GiB").exit_code == 0


@pytest.mark.parametrize("missing", [[0], [1], [2], [0, 2]])
def test_missing_parts_are_named(missing: list[int], parts: Path) -> None:
    names = [PARTS[place] for place in missing]
    for name in names:
        (parts / name).unlink()
    left = next(name for name in PARTS if name not in names)
    words = rf"parts of .*{left} are missing \({len(names)} of 3\); seen: {', '.join(names)}"
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(parts / left)
    if 0 in missing:
        with pytest.raises(CheckpointError, match=r"are missing \(\d of 3\)"):
            open_checkpoint(parts)


def test_a_truncated_part_is_named(parts: Path) -> None:
    content = (parts / PARTS[1]).read_bytes()
    for size in (0, 4, 40, len(content) // 2, len(content) - 64):
        (parts / PARTS[1]).write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=rf"{PARTS[1]} is (truncated or damaged|not a GGUF file)"):
            open_checkpoint(parts)


def test_a_big_endian_part_is_named(parts: Path) -> None:
    content = bytearray((parts / PARTS[2]).read_bytes())
    content[4:8] = struct.pack(">I", 3)
    (parts / PARTS[2]).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{PARTS[2]} is a big-endian GGUF file"):
        open_checkpoint(parts)


def test_parts_in_another_order(parts: Path) -> None:
    (parts / PARTS[1]).rename(parts / "other")
    (parts / PARTS[2]).rename(parts / PARTS[1])
    (parts / "other").rename(parts / PARTS[2])
    words = rf"{PARTS[1]} does not belong to the other parts; seen: split.no 2, split.count 3; allowed: 1, 3"
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(parts)


def test_a_part_of_a_model_with_other_tensors(parts: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "model.gguf", tiny("qwen3", num_hidden_layers=1), "Q8_0", most=5)
    shutil.copy(other / PARTS[1], parts / PARTS[1])
    with pytest.raises(CheckpointError, match=rf"{PARTS[1]} does not belong.*split.tensors.count"):
        open_checkpoint(parts)


def test_a_part_of_a_wider_model(parts: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "model.gguf", tiny("llama", intermediate_size=128), "Q8_0", most=8)
    shutil.copy(other / PARTS[1], parts / PARTS[1])
    with pytest.raises(CheckpointError, match=r"(?s)do not fit the model.*mis-shaped"):
        LLM(parts, "cpu")


def replace(path: Path, old: str, new: str) -> None:
    content = path.read_bytes()
    assert content.count(old.encode()) == 1
    assert len(old) == len(new)
    path.write_bytes(content.replace(old.encode(), new.encode()))


def test_a_tensor_in_two_parts(parts: Path) -> None:
    names = [next(iter(headers(parts / name))) for name in PARTS[1:]]
    replace(parts / PARTS[1], names[0], ("x" * 80)[: len(names[0])])
    twice = ("x" * 80)[: len(names[1])]
    replace(parts / PARTS[2], names[1], twice)
    if len(names[0]) != len(names[1]):
        twice_in_first = next(n for n in headers(parts / PARTS[1]) if len(n) == len(names[1]))
        replace(parts / PARTS[1], twice_in_first, twice)
    words = rf"{PARTS[2]} does not belong.*{twice}, which {PARTS[1]} has too"
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(parts)


def headers(path: Path) -> list[str]:
    import gguf

    return [tensor.name for tensor in gguf.GGUFReader(path).tensors]


def test_a_tensor_that_no_part_has(parts: Path) -> None:
    for name in PARTS:
        content = (parts / name).read_bytes()
        place = content.index(b"split.tensors.count") + len("split.tensors.count") + 4
        assert struct.unpack("<i", content[place : place + 4]) == (21,)
        (parts / name).write_bytes(content[:place] + struct.pack("<i", 22) + content[place + 4 :])
    words = "21 tensors in all parts; allowed: split.tensors.count 22"
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(parts)


def test_parts_under_other_names(parts: Path) -> None:
    for number, name in enumerate(PARTS):
        (parts / name).rename(parts / f"{number}.gguf")
    with pytest.raises(CheckpointError, match=r"0\.gguf is one part of 3.*NAME-00001-of-00003\.gguf"):
        open_checkpoint(parts / "0.gguf")


def test_folders(parts: Path) -> None:
    (parts / "mmproj-model.gguf").write_bytes(b"a picture encoder's")
    assert resolve_checkpoint(str(parts)) == parts / PARTS[0]
    assert read_config(parts)["model_type"] == "llama"
    (parts / "another.gguf").write_bytes(b"")
    with pytest.raises(NoSuchPathError, match=r"several GGUF models; seen: another\.gguf, model-00001"):
        resolve_checkpoint(parts)
    (parts / "config.json").write_text("{}")
    (parts / "model.safetensors").write_bytes(b"")
    assert resolve_checkpoint(parts) == parts


def test_version_2_is_read(parts: Path) -> None:
    """Its layout is that of version 3, and so are the answers."""

    def answered() -> tuple[int, ...]:
        with LLM(parts, "cpu") as llm:
            params = SamplingParams(max_new_tokens=4, ignore_eos=True)
            return tuple(llm.generate([[5, 6, 7]], params)[0].token_ids)

    third = answered()
    for name in PARTS:
        content = bytearray((parts / name).read_bytes())
        content[4:8] = struct.pack("<I", 2)
        (parts / name).write_bytes(content)
    assert answered() == third


def test_names_of_models() -> None:
    names = [
        "b-Q8_0.gguf",
        "a-Q4_K_M-00002-of-00002.gguf",
        "mmproj-a-F16.gguf",
        "x/a-UD-Q4_K_XL.GGUF",
        "a.txt",
    ]
    parts = ["a-Q4_K_M-00001-of-00002.gguf", "a-Q4_K_M-00002-of-00002.gguf"]
    models = models_of(names)
    assert models == [parts, ["b-Q8_0.gguf"], ["x/a-UD-Q4_K_XL.GGUF"]]
    assert of_type(models, "q4_k_m") == [parts]
    assert of_type(models, "Q4_K") == of_type(models, "_K_M") == of_type(models, ".*") == []
    assert of_type(models, "Q4_K_XL") == [["x/a-UD-Q4_K_XL.GGUF"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name:Q4_K_M", ("org/name", "Q4_K_M", "")),
        ("org/name/a.gguf", ("org/name", "", "a.gguf")),
        ("org/name/q4/a-00001-of-00002.gguf", ("org/name", "", "q4/a-00001-of-00002.gguf")),
        *((text, None) for text in ("org/name", "name:Q4", "org/a.gguf", "org/name/../../etc/a.gguf")),
        *((text, None) for text in ("/org/name/a.gguf", "./name/x/a.gguf", "~/x/y/a.gguf", "org/name:", "")),
    ],
)
def test_ids(text: str, expected: tuple[str, str, str] | None) -> None:
    found = GgufId.of(text)
    assert (None if found is None else (found.repo, found.kind, found.file)) == expected
