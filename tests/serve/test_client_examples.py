"""examples/clients/ against a server: each says what the server answers, and what went wrong."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.client import ROOT, Server, wait_for
from tests.serve.conftest import NAME, chat

EXAMPLES = ROOT / "examples" / "clients"
QUESTION = "How much is 31 + 46?"
FOUR = ("plain_http.py", "sse_aiohttp.py", "openai_sync.py", "openai_stream.py")
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run an example with the words of its command line; what it prints."""

    def call(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(Path(EXAMPLES, name)), run_name="__main__")
        return capsys.readouterr().out

    return call


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("model", [(), ("--model", NAME)], ids=["the first model", "a named model"])
def test_each_prints_the_servers_answer(server: Server, run: Any, name: str, model: tuple[str, ...]) -> None:
    values: Any = {"top_k": 20, "repetition_penalty": 1.1} if name == "openai_stream.py" else {}
    whole = server.post("/v1/chat/completions", chat(QUESTION, max_tokens=64, **values)).json
    answer, tokens = whole["choices"][0]["message"]["content"], whole["usage"]["completion_tokens"]
    slash = "/" if model else ""
    out = run(name, "--url", f"{url_of(server)}{slash}", *model, QUESTION)
    expected = {
        "plain_http.py": f"{answer}\n{whole['usage']}\n",
        "sse_aiohttp.py": f"> {QUESTION}\n{answer}\n",
        "openai_stream.py": f"> {QUESTION}\n{answer}\n{tokens} tokens\n",
    }
    assert out == expected[name] if name in expected else out.startswith(f"{answer}\nCompletionUsage(")


def test_two_streams_at_once(server: Server, run: Any) -> None:
    out = run("sse_aiohttp.py", "--url", url_of(server))
    assert sorted(re.findall(r"^> (.*)$", out, re.M)) == ["Hello!", "Tell me a story about a fox."]
    wait_for("both to leave", server.idle)


@pytest.mark.parametrize("name", FOUR)
def test_a_refusal_is_shown_as_the_server_says_it(server: Server, run: Any, name: str) -> None:
    with pytest.raises(SystemExit, match=r"the server refused the request.*nobody") as ended:
        run(name, "--url", url_of(server), "--model", "nobody")
    assert NAME in str(ended.value)  # which models there are


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.stays("plain_http.py", "sse_aiohttp.py")  # OpenAI's client tries three times
def test_without_a_server_the_fix_is_named(run: Any, name: str) -> None:
    with pytest.raises(SystemExit, match=rf"no server answers at {NOWHERE}.*ingot serve engines/pocket-chat"):
        run(name, "--url", NOWHERE)


@pytest.mark.parametrize(
    "event", [{"error": {"message": "the engine has ended"}}, {"choices": [], "usage": {"total_tokens": 1}}]
)
async def test_an_event_without_an_answer(
    event: dict[str, Any], aiohttp_replies: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer that began may fail; a chunk of usage has no choice."""
    main = runpy.run_path(str(EXAMPLES / "sse_aiohttp.py"))["main"]
    lines = [{"choices": [{"delta": {"content": "Hi"}}]}, event]
    url = await aiohttp_replies("".join(f": alive\n\ndata: {json.dumps(line)}\n\n" for line in lines))
    if "error" in event:
        with pytest.raises(ExceptionGroup) as failed:
            await main(url, "m", ["?"])
        assert "the engine has ended" in str(failed.value.exceptions[0])
    else:
        await main(url, "m", ["?"])
        assert capsys.readouterr().out == "> ?\nHi\n"


async def test_a_proxys_path_stays_before_the_servers(
    aiohttp_replies: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLES / "sse_aiohttp.py"))["main"]
    event = json.dumps({"choices": [{"delta": {"content": "Hi"}}]})
    await main(await aiohttp_replies(f"data: {event}\n\n", "/llm"), "m", ["?"])
    assert capsys.readouterr().out == "> ?\nHi\n"


@pytest.fixture
async def aiohttp_replies() -> Any:
    """Start a server that answers every POST with one text, below a path; returns its URL."""
    from aiohttp import web

    runners = []

    async def start(text: str, path: str = "") -> str:
        async def reply(request: web.Request) -> web.Response:
            return web.Response(text=text, content_type="text/event-stream")

        app = web.Application()
        app.router.add_post(f"{path}/v1/chat/completions", reply)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}{path}"

    yield start
    for runner in runners:
        await runner.cleanup()


def test_function_calling_is_refused(server: Server, run: Any) -> None:
    with pytest.raises(
        SystemExit, match=r"the server refused the request; .*the chat format of .* takes no tools"
    ):
        run("function_calling.py", "--url", url_of(server))
    with pytest.raises(SystemExit, match=f"no server answers at {NOWHERE}"):
        run("function_calling.py", "--url", NOWHERE, "--model", "qwen3")


@pytest.mark.slow
def test_function_calling(tool_server: Server, run: Any) -> None:
    out = run("function_calling.py", "--url", url_of(tool_server))
    call = re.match(r"add\((\{.*\})\) = (\d+)\n", out, re.S)
    assert call is not None, out
    assert sum(json.loads(call[1]).values()) == int(call[2])


def test_every_example_is_tested() -> None:
    elsewhere = {"transcribe.py", "triton_stream.py"}  # test_transcriptions.py, test_triton_server.py
    assert {file.name for file in EXAMPLES.glob("*.py")} == {*FOUR, "function_calling.py"} | elsewhere
