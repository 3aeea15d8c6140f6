"""The bodies that clients send.

Decoding refuses what is out of bounds, NaN and Infinity, and ignores fields that are not here. Fields that
would change the answer and are not supported are in ``REFUSED``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from ingot.config.sampling_params import MAX_LOGPROBS
from ingot.serve.api_errors import bad_request, invalid_body, unsupported

Body = TypeVar("Body", bound=msgspec.Struct)

Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=1 << 30)]
Size = Annotated[int, Meta(ge=0, le=1 << 30)]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Meta(max_length=16)]
StopIds = Annotated[list[Size], Meta(max_length=64)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
Ids = Annotated[list[Size], Meta(min_length=1)]


class StreamOptions(msgspec.Struct):
    """Of a stream: ``continuous_usage_stats`` puts the usage so far into every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(msgspec.Struct, kw_only=True):
    """What both ways to ask for an answer share; None: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Size | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Integer | None = None
    stop: Stop | Stops | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: Size | None = None
    stop_token_ids: StopIds | None = None
    logit_bias: dict[Size, Bias] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: Any = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: Salt | None = None


class ChatRequest(Sampling, kw_only=True):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    continue_final_message: Any = None


class CompletionRequest(Sampling, kw_only=True):
    """Of ``/v1/completions``."""

    prompt: str | Annotated[list[str | Size | Ids], Meta(min_length=1, max_length=1 << 20)]
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    suffix: str | None = None


class TextOptions(msgspec.Struct):
    """Of a response: ``format`` is a ``response_format`` in one level."""

    format: dict[str, Any] | None = None


class ResponsesRequest(Sampling, kw_only=True):
    """Of ``/v1/responses``."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=10_000)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: Count | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_logprobs: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Of ``/v1/embeddings``; ``pooling`` as in ``LLM.embed``."""

    model: str | None = None
    input: str | Annotated[list[str | Size | Ids], Meta(min_length=1, max_length=1 << 20)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    pooling: Literal["mean", "last"] | None = None
    cache_salt: Salt | None = None


class SimpleChatRequest(msgspec.Struct, kw_only=True):
    """Of ``/chat/`` and ``/stream_chat/``: ``prompt`` or ``query``, and the turns before it."""

    model: str | None = None
    prompt: str | None = None
    query: str | None = None
    history: Annotated[list[tuple[str, str]], Meta(max_length=5000)] | None = None
    max_length: Count | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Of ``/tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Of ``/detokenize``."""

    tokens: list[Size]
    model: str | None = None


class AudioRequest(msgspec.Struct, kw_only=True):
    """Of ``/v1/audio/transcriptions`` and ``/v1/audio/translations``: the fields beside ``file``."""

    model: str | None = None
    language: str | None = None
    prompt: Annotated[str, Meta(max_length=8192)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    stream: bool | None = None
    carry_initial_prompt: bool | None = None
    keywords: Annotated[list[Annotated[str, Meta(max_length=100)]], Meta(max_length=100)] | None = None
    chunking_strategy: Any = None
    include: Any = None
    languages: Any = None
    known_speaker_names: Any = None
    known_speaker_references: Any = None


# Fields of a form that may be there several times.
AUDIO_LISTS = (
    *("timestamp_granularities", "keywords", "include", "languages"),
    *("known_speaker_names", "known_speaker_references"),
)

# Field → what it asks for; values that ask for nothing are let through.
REFUSED = {
    "functions": "function calling by the deprecated functions (send tools)",
    "function_call": "function calling by the deprecated function_call (send tool_choice)",
    "guided_grammar": "a grammar in EBNF",
    "audio": "audio output",
    "modalities": "output other than text",
    "prediction": "a predicted output",
    "web_search_options": "web search",
    "chat_template": "a template in a request",
    "continue_final_message": "continuing a message",
    "suffix": "inserting before a suffix",
    "previous_response_id": "a stored response (send the whole conversation as input)",
    "conversation": "a stored conversation (send all of it as input)",
    "background": "an answer in the background",
    "prompt": "a stored prompt",
    "top_logprobs": "log-probabilities of a response",
    "include": "log-probabilities of a transcript",
    "languages": "a choice of languages (send one as language)",
    "chunking_strategy": "voice activity detection by a request's values",
    "known_speaker_names": "speaker diarization",
    "known_speaker_references": "speaker diarization",
}
# Fields that one kind of body serves and another refuses.
SERVED: dict[type, tuple[str, ...]] = {
    ChatRequest: ("top_logprobs",),
    CompletionRequest: ("prompt",),
    TokenizeRequest: ("prompt",),
    SimpleChatRequest: ("prompt",),
    ResponsesRequest: ("include",),
    AudioRequest: ("prompt",),
}
NOTHING = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "chunking_strategy": ("auto",),
}


def decode(kind: type[Body], data: bytes, *, strict: bool = True) -> Body:
    """A body of this kind; not ``strict``: numbers and booleans may be written as text.

    Raises:
        ApiError: it is not JSON, a value is of the wrong type or out of bounds, or a field is not served yet.
    """
    try:
        body = msgspec.json.decode(data, type=kind, strict=strict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_body(error) from None
    for field, what in REFUSED.items():
        value = None if field in SERVED.get(kind, ()) else getattr(body, field, None)
        if value and value not in NOTHING.get(field, ()):
            raise unsupported(field, what)
    return body


def prompts_of(given: str | list[Any], field: str) -> Sequence[str | list[int]]:
    """The prompts of ``prompt`` or ``input``, which is a text, token ids, or a list of either.

    Raises:
        ApiError: texts and token ids are mixed.
    """
    if isinstance(given, str):
        return [given]
    kinds = {type(one) for one in given}
    if kinds == {int}:
        return [cast(list[int], given)]
    if len(kinds) > 1:
        raise bad_request(f"{field}: texts and token ids are mixed in one list", field)
    return given
