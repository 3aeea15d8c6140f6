"""The shipped picture model: pictures in conversations, from Python and the terminal."""

from __future__ import annotations

import base64
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from ingot import LLM, Output
from ingot.cli.main import app
from ingot.config.decoder_config import DecoderConfig
from ingot.errors import RequestError
from ingot.llm.explain_prompt import explain_request
from ingot.llm.picture_prompts import Pictures
from ingot.llm.prompt_inputs import Input, Prompt
from recipes.vision.draw import draw, png
from recipes.vision.evaluate import held_out_items, messages_of
from recipes.vision.scenes import held_out_scene
from tests.support.shown_errors import raises_shown
from tests.tiny_models import save_model, tiny_config

POCKET = Path(__file__).parents[2] / "models/pocket-vision/minigpt4.yaml"
GREEDY: Any = {"max_new_tokens": 48, "temperature": 0.0}


@pytest.fixture(scope="module")
def picture() -> torch.Tensor:
    """[3, 112, 112] of uint8: an orange square and nothing else."""
    return draw([held_out_scene(1)])[0]


def stripped(output: Output) -> str:
    assert output.text is not None
    return output.text.strip()


def asked(
    image: object, /, question: str = "What colour is the square?", **part: Any
) -> list[dict[str, Any]]:
    shown = part or {"type": "image", "image": image}
    return [{"role": "user", "content": [shown, {"type": "text", "text": question}]}]


def test_unseen_scenes_are_answered_exactly(llm: LLM) -> None:
    items = held_out_items(range(3, 51))
    pictures = draw([held_out_scene(item.scene) for item in items])
    talks = [messages_of(item, shown) for item, shown in zip(items, pictures, strict=True)]
    found = [stripped(output) for output in llm.chat(talks, **GREEDY)]
    assert found == [item.rounds[-1].answer for item in items]


def test_every_way_to_give_a_picture(llm: LLM, picture: torch.Tensor, tmp_path: Path) -> None:
    data = png(picture)
    file = tmp_path / "scene.png"
    file.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    pil = Image.open(io.BytesIO(data))
    given = [file, str(file), data, bytearray(data), io.BytesIO(data), pil, picture, picture.numpy(), url]
    talks = [asked(one) for one in given]
    talks += [asked(None, type="image_url", image_url={"url": url, "detail": "low"})]
    talks += [asked(None, type="image_url", image_url=url), asked(None, type="input_image", image_url=url)]
    assert {stripped(output) for output in llm.chat(talks, **GREEDY)} == {"orange"}
    whole = llm.encode_image(file)
    assert whole.shape == (16, 256)
    assert whole.dtype == torch.float32
    assert all(torch.equal(llm.encode_image(one), whole) for one in (data, pil, picture, url))


def test_a_conversation_is_the_prompt_that_it_becomes(llm: LLM, picture: torch.Tensor) -> None:
    talk = asked(picture)
    pixels = llm._pictures.read(picture)  # type: ignore[union-attr]
    assert llm.engine.text.chat is not None
    assert llm.tokenizer is not None
    content = [{"type": "input", "input": pixels}, talk[0]["content"][1]]
    pieces = llm.engine.text.chat.prompt_pieces([{"role": "user", "content": content}], llm.tokenizer)
    ids = llm.prompt_ids(talk)
    assert ids == llm.prompt_ids(Prompt(pieces)) == llm.chat_ids(talk)
    answered = [llm.generate(one, **GREEDY) for one in (talk, Prompt(pieces))]
    assert answered[0][0].token_ids == llm.chat(talk, **GREEDY).token_ids
    placed = [index for index, piece in enumerate(pieces) if isinstance(piece, Input)]
    start = sum(len(piece) for piece in pieces[: placed[0]] if not isinstance(piece, Input))
    assert ids[start : start + 16] == [0] * 16


def test_second_rounds_and_other_pictures_beside_them(llm: LLM, picture: torch.Tensor) -> None:
    other = draw([held_out_scene(2)])[0]
    talk = asked(picture)
    first = llm.chat(talk, **GREEDY).text
    again = [*talk, {"role": "assistant", "content": first}, {"role": "user", "content": "Where is it?"}]
    alone = llm.chat(again, **GREEDY).token_ids
    beside = llm.chat([asked(other), again, [{"role": "user", "content": "Hello"}], talk], **GREEDY)
    assert beside[1].token_ids == alone
    assert beside[3].text == first
    fresh = LLM(POCKET, "cpu", max_batch_size=2)
    assert fresh.chat(again, **GREEDY).token_ids == alone


def test_an_answer_ends_at_the_frame(llm: LLM, picture: torch.Tensor) -> None:
    output = llm.chat(asked(picture), **GREEDY)
    assert (stripped(output), output.finish_reason) == ("orange", "stop")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": b"no picture"}, r"messages\[0\].content\[0\]: this is no picture"),
        ({"type": "image", "image": "absent.png"}, r"messages\[0\].content\[0\].*absent.png"),
        ({"type": "image"}, "part of type image_url"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "must be a data URL"),
        ({"type": "image_url"}, "must be a data URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,????"}}, r"content\[0\]"),
        ({"type": "input", "input": "text"}, "is not a text part"),
        ({"type": "audio"}, "is not a text part"),
    ],
)
def test_what_is_no_picture(llm: LLM, part: dict[str, Any], message: str) -> None:
    with raises_shown(RequestError, message):
        llm.chat(asked(None, **part), **GREEDY)


def test_a_server_names_no_file(llm: LLM, tmp_path: Path) -> None:
    pictures = Pictures.of(llm.engine.manifest.model, files=False)
    assert pictures is not None
    with pytest.raises(RequestError, match=r"content\[0\]: a picture is a part of type image_url here"):
        pictures.in_messages(asked(tmp_path / "scene.png"))


def test_notes_of_a_picture_are_logged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    with caplog.at_level(logging.WARNING):
        llm.chat(asked(file.getvalue()), **GREEDY)
    assert [record.message for record in caplog.records if "first is read" in record.message] != []


def test_engines_without_pictures(tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path)
    llm = LLM(tmp_path, "cpu")
    assert Pictures.of(llm.engine.manifest.model) is None
    with pytest.raises(RequestError, match=r"takes no pictures.*a model of text"):
        llm.encode_image(b"")
    config: DecoderConfig = llm.engine.manifest.model
    assert config.modality.name == "text"


def test_the_terminal(picture: torch.Tensor, tmp_path: Path) -> None:
    file = tmp_path / "scene.png"
    file.write_bytes(png(picture))
    run = ["run", str(POCKET), "--image", str(file), "--device", "cpu", "--max-batch-size", "2"]
    found = CliRunner().invoke(app, [*run, "What colour is the square?", "--json", "--temperature", "0"])
    assert found.exit_code == 0, found.output
    (result,) = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")][:1]
    assert "orange" in json.dumps(result)
    for more, message in (
        (["--raw", "Hi"], "--raw sends no pictures"),
        (["--ids", "1 2"], "prompts of text"),
    ):
        refused = CliRunner().invoke(app, [*run, *more])
        assert refused.exit_code == 2
        assert message in refused.output


def test_what_reads_pictures_ends_with_the_engine(picture: torch.Tensor) -> None:
    llm = LLM(POCKET, "cpu", max_batch_size=2)
    pictures = llm._pictures
    assert pictures is not None
    llm.encode_image(png(picture))
    assert pictures._reader._running is not None
    llm.close()
    assert pictures._reader._running is None


def test_a_repetition_penalty_does_not_see_the_prompt(llm: LLM, picture: torch.Tensor) -> None:
    """As in the original, whose prompt is embeddings: the answer may have the question's words."""
    talk = asked(picture, "What colour is the square, orange or blue?")
    plain = llm.chat(talk, **GREEDY)
    assert stripped(plain).startswith("orange")
    assert set(plain.token_ids) & set(llm.prompt_ids(talk))
    assert llm.chat(talk, **GREEDY, repetition_penalty=20.0).text == plain.text


def test_the_penalty_is_explained(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hello"}]
    found = explain_request(llm.engine.manifest, llm.engine.text, talk, {"repetition_penalty": 1.05})
    (rule, *_) = found.processors
    assert rule == "repetition_penalty 1.05, on tokens of the answer, and on the prompt's first"
