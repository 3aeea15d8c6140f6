"""What the server's process and an engine's process say to each other.

Frames are four bytes of length, big-endian, and a msgpack array whose first element names the type; decoding
builds these types and nothing else. The conversation: ``LoadEngine``; ``Ready`` or ``Failed``; then ``Add``,
``ScorePrompt``, ``Embed``, ``Attend`` and ``Abort`` one way, and one ``StepNews`` per step of the executor
the other way. ``Failed`` is the last thing an engine says. The end of the stream ends the engine's process;
to the server it is the engine's death.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec

from ingot.errors import EngineError, IngotError, OutOfMemoryError

MOST_BYTES = 256 << 20  # of a frame: log-probabilities of a long prompt take a few dozen MiB
_HEAD = 4

Message = TypeVar("Message")
Reason = Literal["stop", "length", "abort"]


class LoadEngine(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What to open; None: the library's default. ``runtime``: fields of ``RuntimeConfig``. ``features``: the
    descriptor of the memory that features come in (``windows.py``), and their shape. ``manifest``: the sha256
    of the engine's manifest.json, which may not be another one by now.
    """

    path: str
    device: str | None = None
    threads: int | None = None
    max_batch_size: int | None = None
    max_seq_len: int | None = None
    runtime: dict[str, Any] = {}
    features: tuple[int, tuple[int, ...]] | None = None
    manifest: str | None = None


class Add(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request for answers; ``params``: ``SamplingParams`` as JSON. Its ``n`` answers share the id.
    ``slot``: where the features that the prompt begins with are. ``grammar_bytes``: of its compiled grammar,
    as the server's trial found. ``salt``: of its part of the prefix cache. ``pictures``: the slot of each and
    the place of its first placeholder in the prompt.
    """

    id: str
    prompt_ids: list[int]
    params: dict[str, Any]
    slot: int | None = None
    grammar_bytes: int = 0
    salt: str = ""
    pictures: list[tuple[int, int]] = []


class ScorePrompt(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A prompt whose tokens' log-probabilities are wanted, each with the ``top`` likeliest tokens."""

    id: str
    prompt_ids: list[int]
    top: int
    salt: str = ""


class Embed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A prompt whose vector is wanted; ``pooling`` as in ``LLM.embed``."""

    id: str
    prompt_ids: list[int]
    pooling: str
    salt: str = ""


class Attend(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A prompt of which is wanted what its tokens attend to in its input; as ``LLM.cross_attention``."""

    id: str
    prompt_ids: list[int]
    heads: list[tuple[int, int]]
    below: int
    slot: int


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """End a request, or one of its answers; an unknown id is ignored."""

    id: str
    index: int | None = None


ToEngine = LoadEngine | Add | ScorePrompt | Embed | Attend | Abort


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine is loaded; its limits in this process."""

    vocab_size: int
    max_batch_size: int
    max_seq_len: int


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine could not be loaded, or a step failed: the parts of an ``IngotError``, those of an
    ``OutOfMemoryError`` with its ``ledger``.
    """

    what: str
    seen: str | None = None
    allowed: str | None = None
    fix: str | None = None
    fields: tuple[str, ...] = ()
    ledger: dict[str, Any] | None = None
    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        if not isinstance(error, IngotError):
            return cls(f"the engine failed: {type(error).__name__}: {error}")
        seen, allowed = (None if value is None else str(value) for value in (error.seen, error.allowed))
        if isinstance(error, OutOfMemoryError):
            ledger = None if error.ledger is None else dict(error.ledger)
            return cls(error.what, seen, allowed, error.fix, (), ledger, error.lines)
        return cls(error.what, seen, allowed, error.fix, error.fields)

    def error(self) -> IngotError:
        seen, allowed, fix = self.seen, self.allowed, self.fix
        if self.ledger is None:
            return EngineError(self.what, seen=seen, allowed=allowed, fix=fix, field=self.fields)
        return OutOfMemoryError(
            self.what, seen=seen, allowed=allowed, fix=fix, ledger=self.ledger, lines=self.lines
        )


class Logprob(msgspec.Struct, array_like=True, frozen=True):
    """A token's log-probability under the model, and the likeliest tokens at its place as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class News(msgspec.Struct, array_like=True, frozen=True):
    """What a step brought one answer, as the executor's ``Update``; ``error`` ends the whole request, which
    is at fault itself where it was ``refused``.
    """

    id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: Reason | None = None
    stop_id: int | None = None
    logprobs: tuple[Logprob, ...] = ()
    error: str | None = None
    refused: bool = False
    stop_logprob: float | None = None
    num_reused: int = 0


class Scored(msgspec.Struct, array_like=True, frozen=True):
    """A part of a scored prompt, with an entry for each of its tokens; all have one but the first. A prompt's
    parts come in order, ``last`` with the last.
    """

    id: str
    logprobs: list[Logprob]
    last: bool = True


class Embedded(msgspec.Struct, array_like=True, frozen=True):
    """Float32 values, little-endian: a prompt's vector of unit length, ``hidden_size`` of them; or the
    log-probabilities of all its tokens but the first, then scores [tokens, heads, positions].
    """

    id: str
    vector: bytes


class Gauges(msgspec.Struct, array_like=True, frozen=True):
    """The executor after a step; ``cache_usage`` is the used fraction of its KV cache. ``prefix_queries`` and
    ``prefix_hits``: prompt tokens looked for and found in the prefix cache since it started.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0


class StepNews(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The news of all requests from one step, in one frame."""

    news: list[News]
    scored: list[Scored]
    gauges: Gauges
    embedded: list[Embedded] = []


FromEngine = Ready | Failed | StepNews


class FrameError(Exception):
    """What came is no frame of this protocol."""


_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(_HEAD, "big") + data


class Splitter(Generic[Message]):
    """Bytes as they come → whole messages of one direction."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with ``data``.

        Raises:
            FrameError: a frame is too long, or holds no message of this direction.
        """
        held, start, found = self._held, 0, []
        held += data
        while len(held) - start >= _HEAD:
            size = int.from_bytes(held[start : start + _HEAD], "big")
            if size > MOST_BYTES:
                raise FrameError(f"a frame of {size} bytes")
            end = start + _HEAD + size
            if len(held) < end:
                break
            try:
                found.append(self._decoder.decode(memoryview(held)[start + _HEAD : end]))
            except msgspec.DecodeError as error:
                raise FrameError(f"a frame that is no message: {error}") from None
            start = end
        del held[:start]
        return found
