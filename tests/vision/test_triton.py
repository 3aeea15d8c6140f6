"""Pictures in requests to Triton, with an engine process of its own; Triton is played by ``fake_triton``."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ingot import LLM, Prompt, build
from tests.image.pictures import png as written_png
from tests.serve import fake_triton
from tests.serve.fake_triton import Request
from tests.serve.test_triton_backend import opened
from tests.vision.conftest import COLOUR, POCKET

GREEDY = '{"max_tokens": 24, "temperature": 0, "stop": ["###"]}'
ASKED = f"###Human: <Img><ImageHere></Img> {COLOUR}###Assistant: "


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module that only Triton's own process has, and a backend."""
    folder = tmp_path_factory.mktemp("triton") / "vision"
    build(POCKET, folder, device="cpu", proof=False, max_batch_size=4)
    sys.modules["triton_python_backend_utils"] = fake_triton.module()
    found = opened(folder, unproven="true")
    yield found
    found.close()
    del sys.modules["triton_python_backend_utils"]
    sys.modules.pop("ingot.adapters.triton.backend", None)


def asked(backend: Any, text: str, images: list[str], **tensors: Any) -> Any:
    given = {"image": images} if images else {}
    request = Request({"text_input": text, **given, **tensors}, GREEDY)
    backend.execute([request])
    return request.sender


def encoded(url: str) -> str:
    return url.partition(",")[2]


def test_pictures_stand_at_their_marks(backend: Any, llm: LLM, urls: list[str]) -> None:
    """Whole, streamed, and several: what the engine says in this process; BOS stands once."""

    def alone(text: str, *shown: str) -> str:
        first, *rest = text.split("<ImageHere>")
        parts: list[Any] = [first]
        for url, one in zip(shown, rest, strict=True):
            parts += [llm.read_image(url), *([one] if one else [])]
        (output,) = llm.generate([Prompt(parts)], max_new_tokens=24, temperature=0.0, stop=("###",))
        return str(output.text)

    wanted = alone(ASKED, urls[0])
    assert wanted.strip() == "orange"
    assert asked(backend, ASKED, [encoded(urls[0])], stream=True).text() == wanted
    assert asked(backend, ASKED, [urls[0]]).text() == ASKED + wanted
    both = "###Human: <Img><ImageHere></Img> <Img><ImageHere></Img> What is there?###Assistant: "
    found = asked(backend, both, [*map(encoded, urls)], stream=True, return_num_input_tokens=True).parts()
    assert "".join(part["text_output"] for part in found) == alone(both, *urls)
    begins = "<ImageHere> is this?###Assistant: <ImageHere>"
    assert asked(backend, begins, [*map(encoded, urls)], stream=True).text() == alone(begins, *urls)


def test_a_mark_without_pictures_is_text(backend: Any, llm: LLM) -> None:
    (output,) = llm.generate([ASKED], max_new_tokens=24, temperature=0.0, stop=("###",))
    assert asked(backend, ASKED, [], stream=True).text() == output.text


@pytest.mark.parametrize(
    ("text", "images", "words"),
    [
        (ASKED, ["AA=="], "image[0]: this is no picture"),
        (ASKED, ["????"], "image[0]: the data URL is not in base64"),
        (ASKED, ["data:,x"], "image[0]: the data URL is not in base64"),
        (ASKED, ["https://example.com/cat.png"], "image[0]: the data URL is not in base64"),
        ("No mark", ["AA=="], "<ImageHere> 0 times, and there are 1 images"),
        (f"{ASKED}{ASKED}", ["AA=="], "<ImageHere> 2 times, and there are 1 images"),
        ("<ImageHere>" * 1000, ["AA=="] * 1000, "in image"),
    ],
)
def test_what_is_refused(backend: Any, urls: list[str], text: str, images: list[str], words: str) -> None:
    error = asked(backend, text, images).error()
    assert (error.code, words in error.message) == ("INVALID_ARG", True), error.message
    assert "messages" not in error.message
    assert asked(backend, ASKED, [urls[0]], exclude_input_in_output=True).text().strip() == "orange"


def test_a_bomb_is_one_request_s(backend: Any, urls: list[str]) -> None:
    bomb = base64.b64encode(written_png(50_000, 50_000, 8, 2, bytes(1 << 16))).decode()
    assert "too many pixels" in asked(backend, ASKED, [bomb]).error().message
    model = backend._service._model
    assert model.engine.windows.taken == 0
