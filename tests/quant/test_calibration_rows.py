"""Embeddings as samples: what files may hold, and engines that are the same as by the tokens they are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ingot.building.calibration.calibrate import Walk
from ingot.building.calibration.calibration_rows import holds_rows, read_calibration_rows
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.rptq_options import RptqConfig
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError
from tests.e2e.terminal import ingot
from tests.quant.conftest import Made
from tests.quant.models import opened
from tests.support.shown_errors import raises_shown
from tests.tiny_models import random_ids

RECORDS = [random_ids(12 + 9 * n, seed=n) for n in range(6)]
WIDTH = max(map(len, RECORDS))


def embedded(checkpoint: Path, scale: float = 1.0) -> list[np.ndarray]:
    """The records as rows of the embedding."""
    _, load = opened(checkpoint)
    table = load("embed_tokens.weight").float() * scale
    return [table[torch.tensor(ids)].numpy() for ids in RECORDS]


def write_rows(folder: Path, rows: list[np.ndarray]) -> Path:
    folder.mkdir()
    for number, one in enumerate(rows):
        np.save(folder / f"{number}.npy", one)
    return folder


def write_padded(path: Path, rows: list[np.ndarray]) -> Path:
    """One array, every other record padded at its beginning."""
    found = np.zeros((len(rows), WIDTH, rows[0].shape[1]), rows[0].dtype)
    for number, one in enumerate(rows):
        start = WIDTH - len(one) if number % 2 else 0
        found[number, start : start + len(one)] = one
    np.save(path, found)
    return path


def write_ids(path: Path) -> Path:
    path.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in RECORDS))
    return path


def weights(folder: Path) -> bytes:
    return (folder / "weights.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("kind", "quant"),
    [
        ("llama", QuantConfig("rptq-w4a4", 32)),
        ("gpt2", QuantConfig("w8a8", activations="static")),  # positions are added to rows, too
        ("qwen2", QuantConfig("w4a16", 32, method="gptq")),
    ],
)
def test_rows_of_tokens_are_the_tokens(
    made: Made, checkpoints: dict[str, Path], tmp_path: Path, kind: str, quant: QuantConfig
) -> None:
    """Padded or not, the same bytes as by the ids."""
    rows = embedded(checkpoints[kind])
    calibs = {
        "ids": write_ids(tmp_path / "ids.jsonl"),
        "rows": write_rows(tmp_path / "rows", rows),
        "padded": write_padded(tmp_path / "padded.npy", rows),
    }
    folders = {name: made(kind, quant, f"engine {name}", calib=path) for name, path in calibs.items()}
    assert weights(folders["ids"]) == weights(folders["rows"]) == weights(folders["padded"])
    for folder in folders.values():
        entry = Manifest.read(folder).calibration
        assert entry is not None
        assert (entry.samples, entry.tokens) == (6, sum(map(len, RECORDS)))
        assert entry.ranges == {}
    others = made(kind, quant, "other", calib=write_rows(tmp_path / "others", [2 * one for one in rows]))
    assert weights(others) != weights(folders["ids"])


def test_rotated_hidden_states_take_rotated_rows(
    made: Made, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    quant, rows = QuantConfig("w4a8", 64, method="gptq"), embedded(checkpoints["llama"])
    by_ids = made("llama", quant, "ids", calib=write_ids(tmp_path / "ids.jsonl"))
    by_rows = made("llama", quant, "rows", calib=write_rows(tmp_path / "r", rows))
    first, second = (load_file(folder / "weights.safetensors") for folder in (by_ids, by_rows))
    pairs = [name for name in first if name.endswith(".pairs")]
    assert len(pairs) == 8
    for name in pairs:  # a rotated row of the table and a rotated row may differ in a last bit
        assert float((first[name] == second[name]).float().mean()) > 0.99, name


def test_records_are_cut_and_spread(tmp_path: Path) -> None:
    rows = [np.full((5 + n, 4), n + 1, np.float16) for n in range(6)]
    path = write_rows(tmp_path / "rows", rows)
    (path / "notes.txt").write_text("not a record")
    found = read_calibration_rows(path, 4, samples=3, length=6)
    assert [one[0, 0].item() for one in found.embeddings] == [1, 3, 5]
    assert [len(one) for one in found.embeddings] == [5, 6, 6]
    assert [len(ids) for ids in found.samples] == [5, 6, 6]
    assert (found.records, found.embeddings[0].dtype) == (6, torch.float32)
    (path / "0.npy").rename(path / "9.npy")
    assert read_calibration_rows(path, 4, samples=3, length=6).sha256 != found.sha256
    assert holds_rows(path)
    assert holds_rows(path / "9.npy")
    assert not holds_rows(path / "notes.txt")


def test_zeros_within_a_record_stay(tmp_path: Path) -> None:
    rows = np.ones((1, 6, 4), np.float32)
    rows[0, [0, 3, 5]] = 0
    np.save(tmp_path / "a.npy", rows)
    (kept,) = read_calibration_rows(tmp_path / "a.npy", 4, samples=9, length=9).embeddings
    assert kept[:, 0].tolist() == [1, 1, 0, 1]


def bad_files(folder: Path) -> dict[str, str]:
    """File name → what is said of it."""
    good = np.ones((3, 4), np.float32)
    np.save(folder / "width.npy", np.ones((3, 5), np.float32))
    np.save(folder / "ids.npy", np.ones((3, 4), np.int64))
    np.save(folder / "flat.npy", np.ones(4, np.float32))
    np.save(folder / "deep.npy", np.ones((1, 1, 3, 4), np.float32))
    np.save(folder / "zeros.npy", np.zeros((2, 3, 4), np.float32))
    np.save(folder / "empty.npy", np.ones((0, 4), np.float32))
    np.save(folder / "none.npy", np.ones((0, 3, 4), np.float32))
    good[1, 2] = np.nan
    np.save(folder / "nan.npy", good)
    np.save(folder / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(folder / "archive", good)
    (folder / "archive.npz").rename(folder / "archive.npy")
    (folder / "cut.npy").write_bytes((folder / "width.npy").read_bytes()[:-8])
    (folder / "text.npy").write_text("hello")
    return {
        "width.npy": r"another hidden size; seen: \[3, 5\]; allowed: .*\[tokens, 4\]",
        "ids.npy": r"no embeddings; seen: int64 \[3, 4\]",
        "flat.npy": r"no embeddings; seen: float32 \[4\]",
        "deep.npy": r"no embeddings; seen: float32 \[1, 1, 3, 4\]",
        "zeros.npy": "record 1 has no rows but zeros",
        "empty.npy": "no rows but zeros",
        "none.npy": "no embeddings to calibrate with",
        "nan.npy": r"record 1 has values that are not finite; seen: .*nan\.npy: 1 values",
        "objects.npy": "cannot be read as embeddings",
        "archive.npy": "seen: an archive",
        "cut.npy": "cannot be read as embeddings",
        "text.npy": "cannot be read as embeddings",
        "missing.npy": "cannot be read as embeddings.*No such file",
    }


def test_files_that_are_none(tmp_path: Path) -> None:
    for name, words in bad_files(tmp_path).items():
        with raises_shown(ConfigError, words) as caught:
            read_calibration_rows(tmp_path / name, 4, samples=2, length=8)
        assert "calib" in str(caught.value), name


def test_values_beyond_the_engine_s_dtype(made: Made, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows", [np.full((40, 32), 1e6, np.float32)])
    with pytest.raises(ConfigError, match="not finite in fp16"):
        made("llama", "rptq-w8a8", calib=path, dtype="fp16")


def test_the_report_of_a_build_has_both_kinds(
    made: Made, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the records are spliced ones: no file has both yet, so the walk is given them."""
    from ingot.building.calibration import quantize

    rows = embedded(checkpoints["llama"], scale=50.0)
    walk = quantize.Walk

    def mixed(*given: object, embeddings: list[torch.Tensor], **named: object) -> object:
        found: Walk[Any] = walk(*given, embeddings=embeddings, **named)  # type: ignore[arg-type]
        found._run.given = {number: one for number, one in found._run.given.items() if number < 3}
        return found

    monkeypatch.setattr(quantize, "Walk", mixed)
    path, folder = write_rows(tmp_path / "rows", rows), tmp_path / "engine"
    flags = ("--quant", "rptq-w8a8", "--group-size", "32", "--ranges", "minmax", "--no-proof")
    built = ingot("build", checkpoints["llama"], "-o", folder, "--calib", path, "--device", "cpu", *flags)
    assert built.exit_code == 0, built.output
    manifest = Manifest.read(folder)
    assert manifest.quant == QuantConfig("rptq-w8a8", 32, rptq=RptqConfig(ranges="minmax"))
    entry = manifest.calibration
    assert entry is not None
    assert list(entry.ranges) == ["R1", "R3", "R4", "R5"]
    for own in entry.ranges.values():
        for low, high in (own.tokens, own.spliced):
            assert low < 0 < high
        assert own.tokens != own.spliced
    line = (
        f"tokens {entry.ranges['R1'].tokens[0]:.3g} to {entry.ranges['R1'].tokens[1]:.3g}, spliced positions"
    )
    assert f"ranges of R1: {line}" in built.output
    assert line in ingot("inspect", folder).output
