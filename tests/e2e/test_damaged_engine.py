"""A damaged engine is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot import LLM, build
from ingot.errors import CheckpointError, ConfigError, EngineError


def cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """The manifest is changed."""

    def tamper(engine: Path) -> None:
        path = engine / "manifest.json"
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return tamper


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Tensors are changed, and the file is intact."""

    def tamper(engine: Path) -> None:
        tensors = load_file(engine / "weights.safetensors")
        change(tensors)
        save_file(tensors, engine / "weights.safetensors")

    return tamper


TAMPERINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights cut": (lambda e: cut(e / "weights.safetensors", 0.7), "weights.safetensors"),
    "weights cut in the header": (lambda e: cut(e / "weights.safetensors", 0.001), "weights.safetensors"),
    "weights gone": (lambda e: (e / "weights.safetensors").unlink(), "weights.safetensors"),
    "manifest cut": (lambda e: cut(e / "manifest.json", 0.5), "manifest.json"),
    "manifest a list": (lambda e: (e / "manifest.json").write_text("[]"), "manifest.json"),
    "manifest no text": (lambda e: (e / "manifest.json").write_bytes(b"\xff\xfe\x00"), "manifest.json"),
    "format version": (manifest(lambda d: d.update(format_version=99)), "99.*build it again"),
    "unknown key": (manifest(lambda d: d.update(colour="red")), "colour"),
    "unknown architecture": (manifest(lambda d: d["model"].update(architecture="bert")), "bert"),
    "another size": (manifest(lambda d: d["model"].update(hidden_size=64)), "do not match"),
    "more layers": (manifest(lambda d: d["model"].update(num_layers=3)), "layers.2"),
    "no tensors": (manifest(lambda d: d.update(tensors={})), "do not match"),
    "tensor entry": (manifest(lambda d: d["tensors"]["norm.weight"].update(shape=[31])), "norm.weight"),
    "stored shape": (weights(lambda t: t.update({"norm.weight": torch.ones(31)})), "norm.weight"),
    "stored dtype": (weights(lambda t: t.update({"norm.weight": torch.ones(32).half()})), "norm.weight"),
    "tensor gone": (weights(lambda t: t.pop("norm.weight")), "norm.weight"),
    "tensor more": (weights(lambda t: t.update(extra=torch.ones(1))), "extra"),
}


class TestDamagedEngine:
    @pytest.mark.parametrize("name", TAMPERINGS)
    def test_is_refused(self, engine: Path, name: str) -> None:
        tamper, reported = TAMPERINGS[name]
        tamper(engine)
        with pytest.raises(EngineError, match=re.compile(reported, re.S)):
            LLM(engine, "cpu")

    @pytest.mark.parametrize("how", ["gone", "cut"])
    def test_tokenizer_files_are_checked(self, golden: Path, tmp_path: Path, how: str) -> None:
        folder = build(golden / "llama_aidreams260K" / "hf", tmp_path / "engine", device="cpu")
        file = next((folder / "tokenizer").glob("*.json"))
        file.unlink() if how == "gone" else cut(file, 0.9)
        with pytest.raises(EngineError, match=re.escape(file.name)):
            LLM(folder, "cpu")

    def test_a_folder_without_a_manifest_is_read_as_a_checkpoint(self, tmp_path: Path) -> None:
        (tmp_path / "weights.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"config\.json"):
            LLM(tmp_path, "cpu")

    def test_an_engine_has_its_own_layers_and_template(self, engine: Path) -> None:
        with pytest.raises(ConfigError, match=r"chat_template.*layers.*build it again"):
            LLM(engine, "cpu", layers="0:1", chat_template="chatml")
