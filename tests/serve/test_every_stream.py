"""Every kind of answer × every failure × n: the error is sent, the answer ends, and its resources are freed.

Beside an engine that is this test: it takes the messages of the server, and says what the test wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from ingot import SamplingParams
from ingot.config.server_config import ServeConfig
from ingot.serve.api.chat_completions import ChatCall
from ingot.serve.api.completions import CompletionCall
from ingot.serve.api.embeddings_endpoint import EmbeddingCall
from ingot.serve.api.responses import ResponseCall
from ingot.serve.api.simple_chat import SimpleChat
from ingot.serve.api_errors import ApiError, stopping
from ingot.serve.app import ServerState, make_app
from ingot.serve.engine_calls.answering import Answering, Job
from ingot.serve.engine_calls.engine_client import EngineClient
from ingot.serve.engine_calls.process_protocol import (
    Abort,
    Add,
    Embed,
    Gauges,
    LoadEngine,
    Logprob,
    News,
    Ready,
    Scored,
    ScorePrompt,
    StepNews,
)
from ingot.serve.engine_calls.server_metrics import Metrics
from ingot.serve.grammar_checks import GrammarChecks
from ingot.serve.request_schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponsesRequest,
    SimpleChatRequest,
    decode,
)
from ingot.serve.served_model import ServedModel, TextSide
from ingot.serve.speech_service import SpeechService, TranscriptionResult
from ingot.speech.speech_options import TranscribeOptions
from tests.serve.client import PATIENCE, ROOT, is_gone

POCKET = ROOT / "models" / "pocket-chat"
GRAMMARS = GrammarChecks()  # whose processes try each grammar once
WORD = 1586  # a token of the pocket model with text
MESSAGES = [{"role": "user", "content": "Hi"}]
LOGPROB = Logprob(WORD, -0.5, ((WORD, -0.5), (65, -1.5)))


class Engine:
    """What the server has sent, and an engine to say something with."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.client = EngineClient("m", LoadEngine("nowhere"), ServeConfig(), self.metrics.of("m"))
        self.client.limits = Ready(3008, 8, 256)
        self.client._run = self  # type: ignore[assignment]
        self.sent: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.sent += messages

    def asked(self, *kinds: type) -> list[Any]:
        """Messages of these kinds."""
        return [one for one in self.sent if isinstance(one, kinds)]

    def step(self, *news: News, scored: list[Scored] | None = None) -> None:
        self.client._receive(StepNews(list(news), scored or [], Gauges()))

    def score(self) -> None:
        """Answer what is to be scored."""
        for one in self.asked(ScorePrompt):
            self.step(scored=[Scored(one.id, [LOGPROB] * (len(one.prompt_ids) - 1))])

    def token(self, *, end: bool = False) -> None:
        """A token of every answer."""
        for one in self.asked(Add):
            for index in range(one.params["n"]):
                logprobs = () if one.params.get("logprobs") is None else (LOGPROB,)
                reason = "length" if end else None
                self.step(News(one.id, index, (WORD,), reason, logprobs=logprobs))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def side() -> TextSide:
    return TextSide.read("m", POCKET)


@contextlib.asynccontextmanager
async def served(side: TextSide) -> AsyncIterator[tuple[Engine, ServedModel]]:
    """A model on such an engine; in the end it must have given everything back."""
    engine, grammars = Engine(), GRAMMARS
    model = ServedModel(side, engine.client, grammars)
    try:
        yield engine, model
        assert engine.client._taken == 0
        assert engine.client._owners == {}
        assert (grammars._used, dict(grammars._users)) == (0, {})
    finally:
        model.close()


def chat(n: int, **values: Any) -> Callable[[ServedModel], Any]:
    body = {"model": "m", "messages": MESSAGES, "n": n, "max_tokens": 9, **values}
    return lambda model: ChatCall(model, decode(ChatRequest, json.dumps(body).encode()))


def completion(n: int, **values: Any) -> Callable[[ServedModel], Any]:
    body = {"model": "m", "prompt": ["A fire", "The"], "n": n, "max_tokens": 9, **values}
    return lambda model: CompletionCall(model, decode(CompletionRequest, json.dumps(body).encode()))


def response(n: int) -> Callable[[ServedModel], Any]:
    body = {"model": "m", "input": "Hi", "max_output_tokens": 9}
    return lambda model: ResponseCall(model, decode(ResponsesRequest, json.dumps(body).encode()))


def simple(n: int) -> Callable[[ServedModel], Any]:
    body = {"prompt": "Hi", "max_tokens": 9}
    return lambda model: SimpleChat(model, decode(SimpleChatRequest, json.dumps(body).encode()))


KINDS: dict[str, Callable[[int], Callable[[ServedModel], Any]]] = {
    "chat": chat,
    "chat with logprobs": lambda n: chat(n, logprobs=True, top_logprobs=2),
    "chat with a grammar": lambda n: chat(n, guided_choice=["a", "b"]),
    "completion": completion,
    "echo": lambda n: completion(n, echo=True),
    "echo with logprobs": lambda n: completion(n, echo=True, logprobs=2),
    "score": lambda n: completion(n, echo=True, logprobs=2, max_tokens=0),
    "response": response,
    "simple chat": simple,
}
TOKENS = [kind for kind in KINDS if kind != "score"]
SCORED = ["echo with logprobs", "score"]


def first_open(engine: Engine) -> Any:
    """What the engine has not answered yet."""
    return next(one for one in engine.asked(Add, ScorePrompt) if one.id in engine.client._owners)


def refuse(engine: Engine) -> None:
    engine.step(News(first_open(engine).id, 0, (), error="no", refused=True))


def fail(engine: Engine) -> None:
    engine.step(News(first_open(engine).id, 0, (), error="not numbers"))


FAILURES: dict[str, tuple[Callable[[Engine], None], int, str | None]] = {
    "the engine dies": (lambda engine: engine.client._lose("dead"), 500, "engine_dead"),
    "the engine refuses it": (refuse, 400, None),
    "the engine fails with it": (fail, 500, "engine_error"),
    "the server stops": (lambda engine: engine.client.fail_all(stopping()), 503, "server_stopping"),
}


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await test()

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def read(call: Any, *, stream: bool, into: list[bytes]) -> None:
    """Read an answer to its end."""
    if not stream:
        into.append(str(await call.answer()).encode())
        return
    async for data in call.events():
        into.append(data)


def error_of(task: asyncio.Task[None], events: list[bytes], kind: str) -> tuple[int, str | None]:
    """How an answer failed."""
    error = task.exception()
    if error is None:  # the events of a response end by saying so
        assert kind == "response"
        last = json.loads(events[-1].split(b"data: ")[1])
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        return 0, None
    assert isinstance(error, ApiError), error
    return error.status, error.code


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_ends_it(side: TextSide, kind: str, failure: str, stream: bool) -> None:
    """Before anything came, while prompts are scored, and after the first tokens of each of ``n`` answers."""
    act, status, code = FAILURES[failure]
    whens = ["first", *(["scored"] if kind in SCORED else []), *(["token"] if kind in TOKENS else [])]

    async def main(when: str, n: int) -> None:
        async with served(side) as (engine, model):
            events: list[bytes] = []
            task = asyncio.create_task(read(KINDS[kind](n)(model), stream=stream, into=events))
            await until(lambda: engine.asked(Add, ScorePrompt))
            if when == "scored":  # but for one prompt
                one = engine.asked(ScorePrompt)[-1]
                engine.step(scored=[Scored(one.id, [LOGPROB] * (len(one.prompt_ids) - 1))])
            if when == "token":
                engine.score()
                engine.token()
            for _ in range(5):
                await asyncio.sleep(0)
            were_open = set(engine.client._owners)
            act(engine)
            await asyncio.wait([task])
            found = error_of(task, events, kind)
            assert found == ((0, None) if found[0] == 0 else (status, code))
            if stream and when == "token":
                assert len(events) >= n
            if failure == "the engine dies":
                with pytest.raises(ApiError, match="dead"), model.engine.places(1):
                    pass
            elif failure == "the server stops":
                with pytest.raises(ApiError, match="stopping"):
                    await read(KINDS[kind](n)(model), stream=stream, into=[])
            else:
                assert {one.id for one in engine.asked(Abort)} == were_open

    for when in whens:
        for n in (1,) if kind in ("response", "simple chat") else (1, 3):
            run(lambda when=when, n=n: main(when, n))  # type: ignore[misc]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_ends_well_and_a_client_that_leaves_gives_all_back(
    side: TextSide, kind: str, stream: bool
) -> None:
    async def main(*, leaves: bool) -> None:
        async with served(side) as (engine, model):
            events: list[bytes] = []
            task = asyncio.create_task(read(KINDS[kind](1)(model), stream=stream, into=events))
            await until(lambda: engine.asked(Add, ScorePrompt))
            engine.score()
            engine.token()
            await asyncio.sleep(0)
            if leaves:
                task.cancel()
                await asyncio.wait([task])
                assert {one.id for one in engine.asked(Abort)} >= {one.id for one in engine.asked(Add)}
            else:
                engine.token(end=True)
                await task
                assert events
                assert not engine.asked(Abort)

    for leaves in (False, True) if kind != "score" else (False,):
        run(lambda leaves=leaves: main(leaves=leaves))  # type: ignore[misc]


@pytest.mark.parametrize("failure", FAILURES)
def test_embeddings_fail(side: TextSide, failure: str) -> None:
    """Between two batches, too: what asks in several parts is refused the next one."""
    act, status, code = FAILURES[failure]

    async def main() -> None:
        async with served(side) as (engine, model):
            body = {"model": "m", "input": ["a"] * 20}
            call = EmbeddingCall(model, decode(EmbeddingRequest, json.dumps(body).encode()))
            task = asyncio.create_task(call.answer())
            await until(lambda: engine.asked(Embed))
            assert len(engine.asked(Embed)) == 8
            if failure == "the engine refuses it" or failure == "the engine fails with it":
                error = failure == "the engine refuses it"
                engine.step(News(engine.asked(Embed)[3].id, 0, (), error="no", refused=error))
            else:
                act(engine)
            await asyncio.wait([task])
            error_found = task.exception()
            assert isinstance(error_found, ApiError)
            assert (error_found.status, error_found.code) == (status, code)

    run(main)


def test_the_next_part_of_a_large_request_is_refused(side: TextSide) -> None:
    """Windows of a recording: one had ended when the server stopped, and the next one is not begun."""

    async def main() -> None:
        async with served(side) as (engine, model):
            job = Job([1], SamplingParams(max_new_tokens=1))
            with model.engine.places(1):
                with model.engine.answering([job], None, by_piece=False) as found:
                    engine.token(end=True)
                    await found.finish()
                model.engine.fail_all(stopping())
                with (
                    pytest.raises(ApiError, match="stopping"),
                    model.engine.answering([job], None, by_piece=False),
                ):
                    pass
            assert len(engine.asked(Add)) == 1

    run(main)


def test_the_first_token_is_counted_once(side: TextSide) -> None:
    """Of a request and not of each of its answers; the others are between tokens."""

    async def main() -> None:
        async with served(side) as (engine, model):
            task = asyncio.create_task(read(completion(3)(model), stream=True, into=[]))
            await until(lambda: engine.asked(Add))
            for _ in range(3):
                engine.token()
            engine.token(end=True)
            await task
            value = engine.metrics.registry.get_sample_value
            labels = {"model_name": "m"}
            assert value("ingot_time_to_first_token_seconds_count", labels) == 1
            assert value("ingot_inter_token_latency_seconds_count", labels) == 3 * 2 * 3
            assert value("ingot_request_success_total", {**labels, "finished_reason": "length"}) == 6

    run(main)


def test_places_are_always_released(side: TextSide) -> None:
    """Also where the prompt, a grammar or the room for it is refused, before the engine is asked."""
    bad: list[Callable[[ServedModel], Any]] = [
        chat(1, messages=[{"role": "nobody", "content": "Hi"}]),
        chat(2, guided_regex="(a"),
        chat(1, guided_regex="a*" * 3, ignore_eos=True),
        completion(2, prompt=[[5000]]),
        completion(1, prompt=["x " * 300]),
        completion(500),
    ]

    async def main() -> None:
        async with served(side) as (engine, model):
            for make in bad:
                with pytest.raises(ApiError):
                    await read(make(model), stream=True, into=[])
            assert engine.sent == []
            with model.engine.places(model.engine.most_answers), pytest.raises(ApiError, match="already has"):
                await read(chat(1)(model), stream=True, into=[])
            with model.engine.places(model.engine.most_answers):
                pass

    run(main)


def test_health_says_why(side: TextSide) -> None:
    """And that it is well again."""

    async def get(app: Any, path: str) -> tuple[int, bytes]:
        sent: list[Any] = []
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, asyncio.Event().wait, send)
        return sent[0]["status"], b"".join(one.get("body", b"") for one in sent)

    async def main() -> None:
        async with served(side) as (engine, model):
            state = ServerState({"m": model}, ServeConfig(), engine.metrics)
            app = make_app(state, None, None)
            assert await get(app, "/health") == (200, b'{"status":"ok"}')
            engine.client._lose("the engine's process was ended by SIGKILL")
            status, body = await get(app, "/health")
            assert status == 503
            assert b"m: the engine's process was ended by SIGKILL" in body
            assert b'ingot_engine_alive{model_name="m"} 0.0' in (await get(app, "/metrics"))[1]
            engine.client.lost = None
            assert (await get(app, "/health"))[0] == 200
            assert b'ingot_engine_alive{model_name="m"} 1.0' in (await get(app, "/metrics"))[1]

    run(main)


class TestSpeech:
    """What a speech model holds is given back, and its processes end."""

    @contextlib.asynccontextmanager
    async def service(self) -> AsyncIterator[tuple[SpeechService, Engine]]:
        side = TextSide.read("w", ROOT / "models" / "pocket-whisper")
        engine = Engine()
        assert side.speech_features is not None
        client = EngineClient(
            "w", LoadEngine("nowhere"), ServeConfig(), engine.metrics.of("w"), side.speech_features
        )
        client.limits, client._run = Ready(3008, 8, 256), engine  # type: ignore[assignment]
        engine.client = client
        service = SpeechService(side.manifest, side.tokenizer, client, ServeConfig())
        try:
            yield service, engine
        finally:
            service.close()

    async def transcribed(self, service: SpeechService) -> TranscriptionResult | None:
        data = (ROOT / "examples" / "speech" / "talk.ogg").read_bytes()
        last = None
        async with contextlib.aclosing(
            service.segments(lambda: data, TranscribeOptions(language="en"))
        ) as found:
            async for one in found:
                last = one
        return last if isinstance(last, TranscriptionResult) else None

    @pytest.mark.parametrize("failure", ["the engine dies", "the server stops", "the client leaves"])
    def test_seconds_places_and_slots_are_given_back(self, failure: str) -> None:
        async def main() -> None:
            async with self.service() as (service, engine):
                task = asyncio.create_task(self.transcribed(service))
                await until(lambda: engine.asked(Add))
                assert service._held > 1
                if failure == "the client leaves":
                    task.cancel()
                else:
                    FAILURES[failure][0](engine)
                await asyncio.wait([task])
                assert (service._held, engine.client._taken, engine.client._owners) == (0, 0, {})
                windows = engine.client.windows
                assert windows is not None
                assert len(windows._free) == windows._made == 1

        run(main)

    def test_a_stop_waits_for_no_file_that_is_being_decoded(self) -> None:
        """Its process hangs; waiting clients learn that the server stops."""

        async def main() -> None:
            async with self.service() as (service, engine):
                process = service._all[0]
                with contextlib.suppress(Exception):
                    await asyncio.to_thread(process.ask_bytes, b"")
                task = asyncio.create_task(self.transcribed(service))
                await until(lambda: any(one._running is not None for one in service._all))
                pids = [one._running.process.pid for one in service._all if one._running is not None]
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                service.close()
                await until(lambda: all(map(is_gone, pids)))
                await asyncio.wait([task])
                assert isinstance(task.exception(), ApiError) or engine.asked(Add)

        run(main)


def test_answerings_of_several_prompts_count_all_their_choices() -> None:
    """``done`` only with the last of them."""
    jobs = [Job([1], SamplingParams(max_new_tokens=1, n=2)) for _ in range(2)]
    found = Answering(jobs, None, by_piece=True, most_unread=5)
    for position in range(2):
        for index in range(2):
            assert not found.done
            found.take(position, News("7", index, (5,), "length"))
    assert found.done


def test_messages_of_scores_are_small() -> None:
    """A part of a long prompt's scores takes the server's decoder a few milliseconds."""
    from ingot.serve.engine_calls.prompt_scoring import PART_VALUES

    data = msgspec.msgpack.encode(Scored("7", [LOGPROB] * (PART_VALUES // 3)))
    assert len(data) < 64 << 10
