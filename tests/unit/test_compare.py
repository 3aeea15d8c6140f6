"""Two engines side by side: every kind of difference is found, named and measured."""

from __future__ import annotations

import hashlib
import math
import shutil
from pathlib import Path

import pytest
import torch

from ingot.config.build_config import BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.engine import engine_diff as compare
from ingot.engine.engine_diff import ABSENT, FieldChange, compare_engines, difference, field_changes
from ingot.engine.manifest import Manifest
from ingot.engine.plan_file import write_plan
from ingot.engine.weights_file import WeightsWriter
from ingot.errors import EngineError
from tests.e2e.tiny import FOREIGN_PLAN

MODEL = DecoderConfig("llama", 8, 4, 8, 1, 1, 1, 4, 16)


def tensors() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(5)
    return {"a.weight": torch.randn(4, 3, generator=rng), "b.weight": torch.randn(6, generator=rng)}


def engine(
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
    texts: dict[str, str] | None = None,
    **fields: object,
) -> Path:
    """A folder with a manifest, weights, tokenizer files and a plan; ``fields`` replace the manifest's."""
    (folder / "tokenizer").mkdir(parents=True)
    for name, text in (texts or {}).items():
        (folder / "tokenizer" / name).write_text(text)
    files = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in (texts or {}).items()}
    weights = weights or tensors()
    with WeightsWriter(folder / "weights.safetensors", weights) as writer:
        for name, tensor in weights.items():
            writer.add(name, tensor)
    manifest = Manifest("0.1.0", MODEL, BuildConfig("fp32"), QuantConfig(), writer.entries, files)
    (folder / "manifest.json").write_text(manifest.replace(**fields).dump())
    write_plan(folder / "plan.json", KernelPlan())
    return folder


def test_an_engine_equals_its_copy(tmp_path: Path) -> None:
    one = engine(tmp_path / "one")
    shutil.copytree(one, tmp_path / "two")
    found = compare_engines(one, tmp_path / "two")
    assert found.equal
    names = ("config", "tensors", "files", "plan", "versions", "metrics", "layers")
    assert found.to_json() == {name: [] for name in names} | {"incomparable": None}


def test_configs_differ_by_dotted_name(tmp_path: Path) -> None:
    one = engine(tmp_path / "one", generation={"top_p": 0.8, "eos": [1, 2]})
    two = engine(
        tmp_path / "two", build=BuildConfig("fp32", 8, 99), generation={"eos": [1, 3]}, stop_ids=(7,)
    )
    found = compare_engines(one, two)
    assert {change.name: (change.left, change.right) for change in found.config} == {
        "build.max_batch_size": (64, 8),
        "build.max_seq_len": (8192, 99),
        "generation.top_p": (0.8, ABSENT),
        "generation.eos": ([1, 2], [1, 3]),
        "stop_ids": ([], [7]),
    }
    assert not found.equal
    assert (found.tensors, found.files, found.plan, found.versions) == ((), (), (), ())


def test_versions_plans_and_files_have_their_own_place(tmp_path: Path) -> None:
    one = engine(tmp_path / "one", texts={"tokenizer.json": "aa", "gone": "bb"})
    two = engine(tmp_path / "two", texts={"tokenizer.json": "cc"}, ingot_version="9.9")
    write_plan(two / "plan.json", KernelPlan.from_json(FOREIGN_PLAN))
    (two / "proof.json").write_text("{}")
    found = compare_engines(one, two)
    assert found.versions == (FieldChange("ingot_version", "0.1.0", "9.9"),)
    assert FieldChange("gpu", None, "Some GPU") in found.plan
    assert FieldChange("tiles.rms_norm.m8_h32.num_warps", ABSENT, 8) in found.plan
    assert "sha256" not in {change.name for change in found.plan}
    names = {c.name: (c.left == ABSENT, c.right == ABSENT) for c in found.files}
    assert names == {
        "tokenizer/tokenizer.json": (False, False),
        "tokenizer/gone": (False, True),
        "proof.json": (True, False),
    }
    assert not found.config


def test_a_plan_alone_makes_engines_different(tmp_path: Path) -> None:
    one, two = engine(tmp_path / "one"), engine(tmp_path / "two")
    (two / "plan.json").unlink()
    assert not compare_engines(one, two).equal


def test_changed_values_are_measured(tmp_path: Path) -> None:
    one, weights = engine(tmp_path / "one"), tensors()
    left = weights["a.weight"].clone()
    weights["a.weight"][1, 2] += 0.5
    (change,) = compare_engines(one, engine(tmp_path / "two", weights)).tensors
    assert (change.name, change.aspects) == ("a.weight", ("values",))
    assert change.max_abs == pytest.approx(0.5, rel=1e-6)
    assert change.relative == pytest.approx(0.5 / float(left.norm()), rel=1e-6)


def test_added_removed_and_reshaped_tensors(tmp_path: Path) -> None:
    weights = tensors()
    weights["c.weight"] = weights.pop("a.weight")
    weights["b.weight"] = weights["b.weight"].reshape(2, 3)
    found = compare_engines(engine(tmp_path / "one"), engine(tmp_path / "two", weights))
    by_name = {change.name: change for change in found.tensors}
    assert by_name["a.weight"].right is None
    assert by_name["c.weight"].left is None
    assert by_name["b.weight"].aspects == ("shape",)
    assert by_name["b.weight"].max_abs is None


def test_another_dtype_alone_says_that_no_value_differs(tmp_path: Path) -> None:
    weights = tensors()
    half = {name: tensor.half() for name, tensor in weights.items()}
    wide = {name: tensor.float() for name, tensor in half.items()}
    found = compare_engines(engine(tmp_path / "one", half), engine(tmp_path / "two", wide))
    assert [c.aspects for c in found.tensors] == [("dtype",), ("dtype",)]
    assert [c.max_abs for c in found.tensors] == [0.0, 0.0]
    rounded = compare_engines(engine(tmp_path / "three", weights), tmp_path / "one")
    assert [c.aspects for c in rounded.tensors] == [("dtype", "values"), ("dtype", "values")]


def test_equal_numbers_of_other_bytes(tmp_path: Path) -> None:
    zero = {"a": torch.zeros(2)}
    found = compare_engines(engine(tmp_path / "one", zero), engine(tmp_path / "two", {"a": -zero["a"]}))
    assert found.tensors[0].aspects == ("bytes",)


def test_a_difference_in_a_later_chunk_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_CHUNK", 4)
    left = torch.arange(1.0, 11.0)
    right = left.clone()
    right[9] -= 3
    right[0] += 1
    largest, relative = difference(left, right)
    assert largest == 3.0
    assert relative == pytest.approx(math.sqrt(10 / 385))


def test_special_numbers() -> None:
    nan = difference(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
    assert all(math.isnan(value) for value in nan)
    assert difference(torch.zeros(3), torch.ones(3)) == (1.0, math.inf)
    assert difference(torch.zeros(0), torch.zeros(0)) == (0.0, 0.0)
    assert difference(torch.tensor([1, 5]), torch.tensor([1, 2])) == (3.0, pytest.approx(3 / math.sqrt(26)))


def test_field_changes_of_nested_and_empty_values() -> None:
    changes = field_changes({"a": {"b": 1, "c": {}}, "d": None}, {"a": {"b": 2, "c": {"e": 3}}, "d": None})
    assert changes == (
        FieldChange("a.b", 1, 2),
        FieldChange("a.c", {}, ABSENT),
        FieldChange("a.c.e", ABSENT, 3),
    )


def test_a_damaged_engine_is_not_compared(tmp_path: Path) -> None:
    one = engine(tmp_path / "one", texts={"tokenizer.json": "aa"})
    two, three = tmp_path / "two", tmp_path / "three"
    for copy in (two, three):
        shutil.copytree(one, copy)
    data = bytearray((two / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (two / "weights.safetensors").write_bytes(bytes(data))
    with pytest.raises(EngineError, match=r"hash mismatch.*b\.weight"):
        compare_engines(one, two)
    (three / "tokenizer" / "tokenizer.json").write_text("ab")
    with pytest.raises(EngineError, match=r"tokenizer\.json is missing or has changed"):
        compare_engines(one, three)


def test_weights_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    one, weights = engine(tmp_path / "one"), tensors()
    weights["b.weight"] += 1
    two = engine(tmp_path / "two", weights)
    (two / "weights.safetensors").write_bytes(b"broken")
    with pytest.raises(EngineError, match=r"cannot be read.*weights\.safetensors"):
        compare_engines(one, two)
    with pytest.raises(EngineError, match="not an engine"):
        compare_engines(one, tmp_path)


def test_progress_counts_tensors(tmp_path: Path) -> None:
    one = engine(tmp_path / "one")
    two = engine(tmp_path / "two", {name: t + 1 for name, t in tensors().items()})
    seen: list[tuple[str, int, int]] = []
    compare_engines(one, two, lambda *news: seen.append(news))
    assert seen == [("a.weight", 1, 2), ("b.weight", 2, 2)]
