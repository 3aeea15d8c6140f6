"""The shipped picture model's file, and pictures of scenes that it has not seen."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM
from recipes.vision.draw import draw, png
from recipes.vision.scenes import held_out_scene

POCKET = Path(__file__).parents[2] / "models/pocket-vision/minigpt4.yaml"
COLOUR = "What colour is the square?"


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image(url: Any) -> dict[str, Any]:
    """A part of a message, as OpenAI's clients send it."""
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(POCKET, "cpu", max_batch_size=16) as llm:
        yield llm


@pytest.fixture(scope="session")
def urls() -> list[str]:
    """Of two scenes; the first is an orange square and nothing else."""
    return [url_of(png(picture)) for picture in draw([held_out_scene(1), held_out_scene(2)])]


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of ``urls`` as a file."""
    path = tmp_path_factory.mktemp("scene") / "scene.png"
    path.write_bytes(png(draw([held_out_scene(1)])[0]))
    return path
