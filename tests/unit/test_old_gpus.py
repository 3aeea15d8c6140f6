"""A GPU that is too old for the kernels is refused by name, before any of its memory is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.building.builder import build
from ingot.building.random_weights import engine_from_config
from ingot.device import expect_capability
from ingot.engine.engine_loader import engine_in_memory, load_engine
from ingot.errors import DeviceError
from tests.support.shown_errors import raises_shown
from tests.tiny_models import save_model, tiny_config

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(tiny_config("llama"), folder)
    return folder


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    def is_there(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")

    return is_there


@pytest.mark.parametrize(
    ("capability", "works"),
    {(6, 1): False, (7, 0): False, (7, 5): False, (8, 0): True, (8, 6): True, (8, 9): True, (9, 0): True,
     (10, 0): True, (12, 0): True}.items(),
)  # fmt: skip
def test_kernels_need_a_capability(capability: tuple[int, int], works: bool, card: Any) -> None:
    card(capability)
    expect_capability(torch.device("cpu"))
    if works:
        expect_capability(GPU)
        return
    version = "{}.{}".format(*capability)
    with raises_shown(
        DeviceError, f"too old.*Some Card, compute capability {version}; allowed: 8.0 or later"
    ):
        expect_capability(GPU)


def test_every_way_to_load_refuses_it(checkpoint: Path, tmp_path: Path, card: Any) -> None:
    engine = build(checkpoint, tmp_path / "engine", device="cpu", proof=False)
    card((7, 5))
    for load, path in (
        (load_engine, engine),
        (engine_in_memory, checkpoint),
        (engine_from_config, checkpoint),
    ):
        with raises_shown(DeviceError, "compute capability 7.5.*--device cpu"):
            load(path, GPU)  # type: ignore[operator]


def test_layers_in_fp8_need_a_newer_one(checkpoint: Path, tmp_path: Path, card: Any) -> None:
    engine = build(checkpoint, tmp_path / "engine", device="cpu", proof=False, quant="w8a8-fp8")
    card((8, 6))
    refused = r"fp8 products \(w8a8-fp8\).*compute capability 8.6; allowed: 8.9 or later.*--quant w8a16"
    with raises_shown(DeviceError, refused):
        load_engine(engine, GPU)
    with raises_shown(DeviceError, refused):
        engine_in_memory(checkpoint, GPU, quant="w8a8-fp8")
    with raises_shown(DeviceError, refused):
        engine_from_config(checkpoint, GPU, quant="w8a8-fp8")
