"""Pictures over HTTP: the answers of ``llm.chat``, whole and in streams, and what is refused."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ingot import LLM
from ingot.serve.long_prompts import is_long
from tests.e2e.terminal import ingot
from tests.image.pictures import png as written_png
from tests.serve.client import JSON, PATIENCE, Server, is_gone, started, wait_for
from tests.vision.conftest import COLOUR, POCKET, image, url_of

CHAT = "/v1/chat/completions"
NAME = "pocket-vision"
RESPONSES = "/v1/responses"
WORKER = b"ingot.image.image_worker"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The process that decodes must end with it."""
    with started(POCKET, "--unproven", "--name", NAME, "--max-batch-size", 8) as found:
        yield found
        pids = found.child_pids(WORKER)
        assert len(pids) == 1
    wait_for("the process that decodes to end", lambda: all(map(is_gone, pids)))


def asked(*parts: dict[str, Any], text: str = COLOUR) -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def body(messages: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 48} | more


def alone(llm: LLM, messages: list[Any]) -> str:
    text = llm.chat(messages, temperature=0.0, max_new_tokens=48).text
    assert text is not None
    return text


def test_the_official_client(server: Server, llm: LLM, urls: list[str]) -> None:
    """Streamed, not streamed, several answers and the second round say what ``llm.chat`` does."""
    talk = asked(image(urls[0]))
    wanted = alone(llm, talk)
    assert wanted.strip() == "orange"
    address = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=address, api_key="none", timeout=PATIENCE) as client:
        create = client.chat.completions.create
        values: Any = {"model": NAME, "temperature": 0, "max_tokens": 48}
        whole = create(messages=talk, logprobs=True, **values)
        assert [one.message.content for one in whole.choices] == [wanted]
        assert whole.choices[0].finish_reason == "stop"
        assert whole.choices[0].logprobs
        assert whole.usage
        assert whole.usage.prompt_tokens == len(llm.prompt_ids(talk))
        chunks = create(messages=talk, stream=True, **values)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
        again = [*talk, {"role": "assistant", "content": wanted}, {"role": "user", "content": "Where is it?"}]
        assert create(messages=again, **values).choices[0].message.content == alone(llm, again)
        cut = create(messages=talk, stop="range", **values).choices[0]
        assert (cut.message.content, cut.finish_reason) == (wanted[: wanted.index("range")], "stop")
        (model,) = client.models.list().data
        assert model.model_extra
        assert model.model_extra["input_modalities"] == ["text", "image"]


def test_several_pictures_and_texts_beside_them(server: Server, llm: LLM, urls: list[str]) -> None:
    both = [*asked(image(urls[0])), {"role": "assistant", "content": "orange"}]
    both += asked({"type": "text", "text": "And now?"}, image(urls[1]), image(urls[0]), text="What is there?")
    for talk in (both, asked(image(urls[1]), text="What is there?"), asked(text="Hello"), both[::-2]):
        reply = server.post(CHAT, body(talk))
        assert reply.json["choices"][0]["message"]["content"] == alone(llm, talk)


def test_long_texts_keep_their_pictures(server: Server, llm: LLM, urls: list[str]) -> None:
    """A process of its own makes ids of them."""
    parts = [{"type": "text", "text": "a"}] * 90  # each value counts: 9,000 characters
    talk = asked(*parts, image(urls[0]), image(urls[1]))
    assert is_long(talk[0]["content"][:90])
    found = server.post("/tokenize", {"model": NAME, "messages": talk}).json
    assert found["tokens"] == llm.prompt_ids(talk)
    assert server.child_pids(b"ingot.text.prompt_worker")
    reply = server.post(CHAT, body(talk))
    assert reply.json["choices"][0]["message"]["content"] == alone(llm, talk)


def test_answers_of_a_form_see_the_picture(server: Server, urls: list[str]) -> None:
    """Their grammar is compiled before the engine takes them."""
    said = [
        server.post(CHAT, body(asked(image(urls[0])), guided_choice=[" green", " orange", " blue"])).json
        for _ in range(2)
    ]
    assert {one["choices"][0]["message"]["content"] for one in said} == {" orange"}


def test_tokenize_has_the_placeholders(server: Server, llm: LLM, urls: list[str]) -> None:
    talk = asked({"type": "text", "text": "Look:"}, image(urls[0]))
    found = server.post("/tokenize", {"model": NAME, "messages": talk}).json
    assert found["tokens"] == llm.prompt_ids(talk)


def test_several_answers_are_drawn_of_one_prompt(server: Server, llm: LLM, urls: list[str]) -> None:
    """Those of ``llm.chat``, whole and in a stream, and not all the same; the prompt counts once."""
    drawn: Any = {"temperature": 1.5, "seed": 5}
    talk = asked(image(urls[1]), text="Describe this image.")
    wanted = [one.text for one in llm.chat(talk, n=3, max_new_tokens=24, **drawn).answers]
    assert len(set(wanted)) > 1
    asks = body(talk, n=3, max_tokens=24, stream_options={"include_usage": True}, **drawn)
    found = server.post(CHAT, {**asks, "stream_options": None}).json
    assert [one["message"]["content"] for one in found["choices"]] == wanted
    assert found["usage"]["prompt_tokens"] == len(llm.prompt_ids(talk))
    texts = ["", "", ""]
    *events, last = server.events(CHAT, asks)
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert (texts, last["usage"]) == (wanted, found["usage"])


def bomb() -> str:
    """A PNG that says 50,000 x 50,000."""
    return url_of(written_png(50_000, 50_000, 8, 2, bytes(1 << 16)))


CUT = url_of(written_png(64, 64, 8, 2, bytes(64 * 193))[:60])
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (image("https://example.com/cat.png"), "nothing is fetched"),
        (image("/etc/passwd"), "nothing is fetched"),
        (image("file:///etc/passwd"), "nothing is fetched"),
        ({"type": "image_url", "image_url": "http://169.254.169.254/latest"}, "nothing is fetched"),
        (image(None), "data URL"),
        ({"type": "image_url"}, "data URL"),
        (image("data:image/png;base64,????"), "messages[0]"),
        (image(url_of(b"no picture")), "no picture"),
        (image("data:image/png;base64," + "%20" * 99_999), "empty"),
        (image("data:image/png,abc"), "base64"),
        (image("data:image/png;base64,é"), "base64"),
        (image(url_of(SVG)), "SVG"),
        (image(url_of(b"<!doctype html><html></html>")), "no picture"),
        (image(CUT), "cut off"),
        (image(bomb()), "pixels"),
        ({"type": "image", "image": "/etc/passwd"}, "image_url here"),
        ({"type": "input_audio", "input_audio": {}}, "does not take speech"),
        ({"type": "input", "input": 3}, "not a text part"),
    ],
)
def test_what_is_refused(server: Server, urls: list[str], part: dict[str, Any], message: str) -> None:
    for more in ({}, {"stream": True}):
        reply = server.post(CHAT, body(asked(part), **more))
        assert reply.status == 400, reply.data
        assert reply.error["param"].startswith("messages[0].content[0]")
        assert "messages[0].content[0]" in reply.error["message"]
        assert message in reply.error["message"]
    good = server.post(CHAT, body(asked(image(urls[0]))))
    assert good.json["choices"][0]["message"]["content"].strip() == "orange"


def test_pictures_of_others_than_the_user_and_explanations(server: Server, urls: list[str]) -> None:
    said = [{"role": "assistant", "content": [image(urls[0])]}, {"role": "user", "content": "Hi"}]
    reply = server.post(CHAT, body([*asked(text="Hi"), *said]))
    assert (reply.status, "only messages of the user" in reply.error["message"]) == (400, True)
    headers = {"Content-Type": "application/json", "X-Ingot-Explain": "1"}
    reply = server.request("POST", CHAT, body(asked(image(urls[0]))), headers)
    assert (reply.status, "without images" in reply.error["message"]) == (400, True)


def test_too_many_pictures_are_not_decoded(server: Server) -> None:
    reply = server.post(CHAT, body(asked(*[image(url_of(b"no picture"))] * 1000)))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")


def shown(url: Any) -> dict[str, Any]:
    """A part of an item of ``/v1/responses``."""
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def test_responses(server: Server, llm: LLM, urls: list[str]) -> None:
    """Pictures between texts, in a stream, and in the next round: the answers of the same chat."""
    say = {"type": "input_text", "text": "Look: "}
    asks = [say, say, shown(urls[0]), {"type": "input_text", "text": COLOUR}]
    talk = asked({"type": "text", "text": "Look: Look: "}, image(urls[0]))
    wanted = alone(llm, talk)
    address = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=address, api_key="none", timeout=PATIENCE) as client:
        items: Any = [{"role": "user", "content": asks}]
        values: Any = {"model": NAME, "temperature": 0, "max_output_tokens": 48}
        whole = client.responses.create(input=items, **values)
        assert whole.output_text == wanted
        assert whole.usage
        assert whole.usage.input_tokens == len(llm.prompt_ids(talk))
        with client.responses.stream(input=items, **values) as stream:
            assert stream.get_final_response().output_text == wanted
        items += [one.model_dump(exclude_none=True) for one in whole.output]
        items += [{"role": "user", "content": [shown(urls[1]), {"type": "input_text", "text": "And here?"}]}]
        again = [*talk, {"role": "assistant", "content": wanted}]
        again += asked(image(urls[1]), text="And here?")
        assert client.responses.create(input=items, **values).output_text == alone(llm, again)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (shown("https://example.com/cat.png"), "nothing is fetched"),
        (shown(None), "data URL"),
        ({"type": "input_image", "file_id": "file-1"}, "a stored file"),
        (shown(url_of(b"no picture")), "no picture"),
        ({"type": "input_file", "file_data": "data:,"}, "not a part of text"),
    ],
)
def test_what_responses_refuse(server: Server, urls: list[str], part: Any, message: str) -> None:
    """By the place in the input, not in the conversation that it becomes."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [{"role": "user", "content": [shown(urls[0])]}, call]
    items += [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 3 + [shown(urls[0]), part]}]
    for more in ({}, {"stream": True}):
        asks = {"model": NAME, "input": items, "instructions": "Be brief.", "max_output_tokens": 4}
        reply = server.post(RESPONSES, asks | more)
        assert (reply.status, reply.error["param"]) == (400, "input[2].content[4]"), reply.data
        assert message in reply.error["message"]
        assert "messages" not in reply.error["message"]
        assert "input[2].content[4]" in reply.error["message"]


def test_too_many_pictures_of_a_response(server: Server) -> None:
    items = [{"role": "user", "content": [shown(url_of(b"no picture"))] * 1000}]
    reply = server.post(RESPONSES, {"model": NAME, "input": items})
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "input")
    assert "messages" not in reply.error["message"]


def test_the_terminal_chat(server: Server, urls: list[str], tmp_path: Path) -> None:
    file = tmp_path / "scene.png"
    file.write_bytes(base64.b64decode(urls[0].partition(",")[2]))
    words = ("chat", "--url", f"http://127.0.0.1:{server.port}", "--temperature", 0, "--image", file)
    found = ingot(*words, stdin=f"{COLOUR}\n")
    assert (found.exit_code, found.stdout.strip()) == (0, "orange"), found.stderr


def test_a_detail_and_a_text_as_address_are_taken(server: Server, urls: list[str]) -> None:
    """Some clients send the address by itself, and others a ``detail`` of their own."""
    for value in (urls[0], {"url": urls[0], "detail": "huge", "more": [1]}):
        reply = server.post(CHAT, body(asked({"type": "image_url", "image_url": value})))
        assert reply.json["choices"][0]["message"]["content"].strip() == "orange"


def test_bodies_may_be_as_large_as_pictures(server: Server, urls: list[str]) -> None:
    """16 MiB to the byte."""
    data = json.dumps(body(asked(image(urls[0]), {"type": "text", "text": "x", "unread": "@"}))).encode()
    full = data.replace(b"@", b"@" * ((16 << 20) - len(data) + 1))
    assert (len(full), server.post(CHAT, full).status) == (16 << 20, 200)
    for path in (CHAT, RESPONSES, "/tokenize"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON['Content-Type']}\r\n"
            connection.sendall(f"{head}Content-Length: {len(full) + 1}\r\n\r\n".encode())
            assert connection.recv(1 << 12).startswith(b"HTTP/1.1 413 ")


def test_tokenize_decodes_nothing(server: Server, llm: LLM, urls: list[str]) -> None:
    """It says how long a prompt is; whether its pictures can be read, a request says."""
    found = server.post("/tokenize", {"model": NAME, "messages": asked(image(url_of(b"no picture")))}).json
    assert found["tokens"] == llm.prompt_ids(asked(image(urls[0])))


def test_a_client_that_leaves_ends_the_decoding(server: Server, urls: list[str]) -> None:
    """60 pictures of 16 megapixels take twelve seconds; the process that decodes is idle at once."""
    good = body(asked(image(urls[0])))
    server.post(CHAT, good)
    slow = url_of(written_png(4096, 4096, 1, 0, bytes(4096 * 513)))
    before = cpu_seconds(server)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("POST", CHAT, json.dumps(body(asked(*[image(slow)] * 60))).encode(), JSON)
    wait_for("the first picture", lambda: cpu_seconds(server) > before + 0.1)
    connection.close()
    reply = server.post(CHAT, good)
    assert reply.json["choices"][0]["message"]["content"].strip() == "orange"
    after = cpu_seconds(server)
    time.sleep(0.5)
    assert cpu_seconds(server) == after


def cpu_seconds(server: Server) -> float:
    """That the process which decodes has taken."""
    (pid,) = server.child_pids(WORKER)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
