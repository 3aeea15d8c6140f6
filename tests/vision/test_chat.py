"""``ingot chat`` about pictures: ``--image`` and ``/image``, with an engine and with a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM, SamplingParams
from ingot.cli.chat.chat import TerminalChat
from ingot.cli.chat.chat_lines import Lines
from ingot.errors import RequestError
from ingot.llm.conversation import Conversation
from ingot.serve.remote_chat import RemoteConversation, RemotePiece, RemoteServer
from recipes.vision.draw import draw, png
from recipes.vision.scenes import held_out_scene
from tests.e2e.terminal import ingot
from tests.vision.conftest import COLOUR, POCKET, url_of

GREEDY = SamplingParams(max_new_tokens=48, temperature=0.0)


class Typed(Lines):
    """What is typed, line by line."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    def read(self, prompt: str) -> str | None:
        return next(self._lines, None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """An orange square, another scene, and a file that is no picture."""
    folder = tmp_path_factory.mktemp("chat") / "my pictures"
    folder.mkdir()
    for name, picture in zip("ab", draw([held_out_scene(1), held_out_scene(2)]), strict=True):
        (folder / f"{name}.png").write_bytes(png(picture))
    (folder / "note.txt").write_text("no picture")
    return [folder / "a.png", folder / "b.png", folder / "note.txt"]


def test_a_chat_about_pictures(
    llm: LLM, files: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each goes with the next message and stays in the conversation: read and encoded once."""
    encoded: list[Any] = []
    encode = llm.engine.model.encode
    monkeypatch.setattr(llm.engine.model, "encode", lambda f, walk: encoded.append(f) or encode(f, walk))
    chat = Conversation(llm, params=GREEDY)
    lines = [f"/image {files[0]}", COLOUR, "Where is it?", f"/image {files[1]}", f"/image {files[0]}"]
    assert not TerminalChat(chat, {}, []).run(Typed(*lines, "What is there?", "/retry"))
    assert len(encoded) <= 2
    out, err = capsys.readouterr()
    talk: list[Any] = []
    shown = [[files[0]], [], [files[1], files[0]]]
    for parts, question in zip(shown, [COLOUR, "Where is it?", "What is there?"], strict=True):
        content = [{"type": "image", "image": str(file)} for file in parts]
        content += [{"type": "text", "text": question}]
        talk += [{"role": "user", "content": content}]
        talk += [{"role": "assistant", "content": llm.chat(talk, GREEDY).text}]
    answers = [one["content"] for one in talk if one["role"] == "assistant"]
    assert [one for _, one in chat.turns] == answers
    assert answers[0].strip() == "orange"
    assert out.split() == " ".join([*answers, answers[-1]]).split()
    assert "1 picture will be shown" in err
    assert "2 pictures will be shown" in err
    assert chat.pictures == []


def test_what_is_saved_can_be_asked_again(llm: LLM, files: list[Path], tmp_path: Path) -> None:
    chat = Conversation(llm, "Look.", GREEDY)
    saved = tmp_path / "chat.json"
    assert not TerminalChat(chat, {}, []).run(Typed(f"/image {files[0]}", COLOUR, f"/save {saved}"))
    *talk, answer = json.loads(saved.read_text())
    assert talk[1]["content"][0] == {"type": "image", "image": str(files[0])}
    assert llm.chat(talk, GREEDY).text == answer["content"]


@pytest.mark.parametrize("written", ["'{}'", '"{}"', "{}"])
def test_names_as_terminals_write_dropped_files(llm: LLM, files: list[Path], written: str) -> None:
    chat = Conversation(llm, params=GREEDY)
    name = str(files[0]) if written != "{}" else str(files[0]).replace(" ", "\\ ")
    assert not TerminalChat(chat, {}, []).run(Typed(f"/image {written.format(name)}"))
    assert len(chat.pictures) == 1


def test_what_cannot_be_shown(llm: LLM, files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The chat goes on, and a picture that waits is there as before; /clear forgets it."""
    chat = Conversation(llm, params=GREEDY)
    lines = [f"/image {files[1]}", f"/image {files[2]}", f"/image {files[0]}.no", "/image"]
    lines += [f"/image {files[0].parent}", "/image https://example.com/cat.png"]
    assert TerminalChat(chat, {}, []).run(Typed(*lines))
    err = " ".join(capsys.readouterr().err.split())
    for words in ("no picture that can be read", "needs a picture's file", "this is a folder"):
        assert words in err
    assert err.count("there is no such picture") == 2  # an address is a file's name here
    assert len(chat.pictures) == 1
    TerminalChat(chat, {}, []).run(Typed("/clear"))
    assert chat.pictures == []


def test_a_question_that_is_not_answered_keeps_its_picture(llm: LLM, files: list[Path]) -> None:
    chat = Conversation(llm, params=GREEDY)
    chat.show(str(files[0]))
    with pytest.raises(RequestError, match="prompt"):
        list(chat.ask("word " * 3000))
    assert len(chat.pictures) == 1
    assert "".join(piece.text for piece in chat.ask(COLOUR)).strip() == "orange"


def test_the_verb(files: list[Path]) -> None:
    words = ("chat", POCKET, "--device", "cpu", "--max-batch-size", 2, "--temperature", 0)
    found = ingot(*words, "--image", files[0], stdin=f"{COLOUR}\n/help\n")
    assert (found.exit_code, found.stdout.strip()) == (0, "orange")
    assert "/image FILE" in found.stderr
    refused = ingot(*words, "--image", files[2], stdin="Hi\n")
    assert (refused.exit_code, "--image" in refused.stderr) == (2, True), refused.stderr
    assert "no picture that can be read" in refused.stderr


def test_an_error_says_which_part_and_what_to_do(llm: LLM, files: list[Path]) -> None:
    part = {"type": "image", "image": str(files[2])}
    with pytest.raises(
        RequestError, match=r"messages\[0\]\.content\[1\]: .*convert it to PNG or JPEG"
    ) as found:
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "Hi"}, part]}])
    assert found.value.field == "messages[0].content[1]"


def test_an_engine_of_text(files: list[Path]) -> None:
    pocket = Path(__file__).parents[2] / "models/pocket-chat"
    found = ingot("chat", pocket, "--device", "cpu", "--image", files[0], stdin="Hi\n")
    assert (found.exit_code, "this engine takes no pictures" in found.stderr) == (2, True), found.stderr


def test_a_server_gets_data_urls(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's own bytes, in each round; a model that reads text alone is refused before."""
    bodies: list[Any] = []
    server = RemoteServer("http://127.0.0.1:9")

    def answer(body: Any) -> Any:
        bodies.append(body)
        yield RemotePiece("orange", "stop")

    monkeypatch.setattr(server, "chat", answer)
    monkeypatch.setattr(server, "models", lambda: {"m": ["text", "image"], "t": ["text"], "other": None})
    talk = RemoteConversation(server, "m", None, {})
    assert not TerminalChat(talk, {}, []).run(Typed(f"/image {files[0]}", COLOUR, "Where is it?"))
    part = {"type": "image_url", "image_url": {"url": url_of(files[0].read_bytes())}}
    first = {"role": "user", "content": [part, {"type": "text", "text": COLOUR}]}
    rest = [{"role": "assistant", "content": "orange"}, {"role": "user", "content": "Where is it?"}]
    assert [body["messages"] for body in bodies] == [[first], [first, *rest]]
    with pytest.raises(RequestError, match=r"t takes no pictures.*it reads text"):
        RemoteConversation(server, "t", None, {}).show(str(files[0]))
    with pytest.raises(RequestError, match="no picture that can be read"):
        RemoteConversation(server, "other", None, {}).show(str(files[2]))
