"""The bounds of every field of every body: the last value that is taken, and the first that is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ingot.serve.api_errors import ApiError
from ingot.serve.request_schemas import (
    AudioRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponsesRequest,
    SimpleChatRequest,
    TokenizeRequest,
    decode,
)

MESSAGE = {"role": "user", "content": "Hi"}
REQUIRED: dict[type, dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [MESSAGE]},
    CompletionRequest: {"model": "m", "prompt": "Hi"},
    ResponsesRequest: {"model": "m", "input": "Hi"},
    EmbeddingRequest: {"model": "m", "input": "Hi"},
    AudioRequest: {"model": "m"},
    SimpleChatRequest: {"prompt": "Hi"},
    TokenizeRequest: {"prompt": "Hi"},
    DetokenizeRequest: {"tokens": []},
}
ANSWERS = (ChatRequest, CompletionRequest, ResponsesRequest)
MOST = 1 << 30
# Bodies, field, values that are taken, values that are not.
BOUNDS: list[tuple[tuple[type, ...], str, list[Any], list[Any]]] = [
    (ANSWERS, "n", [1, 128], [0, 129, 1.5]),
    (ANSWERS, "max_tokens", [0, MOST], [-1, MOST + 1]),
    (ANSWERS, "min_tokens", [0, MOST], [-1, MOST + 1]),
    (ANSWERS, "seed", [-(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
    (ANSWERS, "stop", ["a", "a" * 1000, [], ["a"] * 16], ["", "a" * 1001, [""], ["a"] * 17]),
    (ANSWERS, "stop_token_ids", [[], [0] * 64, [MOST]], [[0] * 65, [-1], [MOST + 1]]),
    (ANSWERS, "top_k", [-1, 0, MOST], [-2, MOST + 1]),
    (ANSWERS, "logit_bias", [{"0": -100}, {"0": 100.0}], [{"0": -100.1}, {"0": 100.1}, {"-1": 0}]),
    ((*ANSWERS, EmbeddingRequest), "cache_salt", ["a", "a" * 1024], ["", "a" * 1025]),
    ((ChatRequest,), "messages", [[MESSAGE] * 10_000], [[], [MESSAGE] * 10_001]),
    ((ChatRequest,), "max_completion_tokens", [1, MOST], [0, MOST + 1]),
    ((ChatRequest,), "top_logprobs", [0, 20], [-1, 21]),
    ((CompletionRequest,), "logprobs", [0, 20], [-1, 21]),
    ((CompletionRequest,), "prompt", ["", [""], [0], [[0]]], [[], [[]], [-1], [[MOST + 1]], None]),
    ((ResponsesRequest,), "input", ["", [MESSAGE] * 10_000], [[], [MESSAGE] * 10_001]),
    ((ResponsesRequest,), "max_output_tokens", [1, MOST], [0, MOST + 1]),
    ((EmbeddingRequest,), "input", ["", [""], [0], [[0]]], [[], [[]], [-1], [[MOST + 1]], None]),
    ((EmbeddingRequest,), "dimensions", [1, MOST], [0, MOST + 1]),
    ((EmbeddingRequest,), "encoding_format", ["float", "base64", None], ["int8", ""]),
    ((EmbeddingRequest,), "pooling", ["mean", "last", None], ["max", ""]),
    ((AudioRequest,), "prompt", ["", "a" * 8192], ["a" * 8193]),
    ((AudioRequest,), "temperature", [0, 0.5, 1], [-0.01, 1.01]),
    ((AudioRequest,), "keywords", [[], ["a" * 100] * 100], [["a" * 101], ["a"] * 101]),
    ((AudioRequest,), "response_format", ["json", "text", "srt", "verbose_json", "vtt"], ["tsv", ""]),
    ((AudioRequest,), "timestamp_granularities", [[], ["word", "segment"]], [["letter"], "word"]),
    ((SimpleChatRequest,), "history", [[], [["a", "b"]] * 5000], [[["a", "b"]] * 5001, [["a"]], [["a"] * 3]]),
    ((SimpleChatRequest,), "max_length", [1, MOST], [0, MOST + 1]),
    ((SimpleChatRequest,), "max_tokens", [1, MOST], [0, MOST + 1]),
    ((TokenizeRequest,), "messages", [[MESSAGE], None], [[], [1]]),
    ((DetokenizeRequest,), "tokens", [[], [0, MOST]], [[-1], [MOST + 1], None]),
]
EACH = [
    pytest.param(kind, field, taken, refused, id=f"{kind.__name__}-{field}")
    for kinds, field, taken, refused in BOUNDS
    for kind in kinds
]


@pytest.mark.parametrize(("kind", "field", "taken", "refused"), EACH)
def test_bounds(kind: type[msgspec.Struct], field: str, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        found = decode(kind, msgspec.json.encode(REQUIRED[kind] | {field: value}))
        assert msgspec.json.decode(msgspec.json.encode(getattr(found, field))) == value
    for value in refused:
        with pytest.raises(ApiError) as caught:
            decode(kind, msgspec.json.encode(REQUIRED[kind] | {field: value}))
        assert caught.value.status == 400
        assert str(caught.value.param).partition("[")[0].partition(".")[0] == field


@pytest.mark.parametrize("kind", REQUIRED, ids=lambda kind: kind.__name__)
def test_what_is_not_given_is_none(kind: type[msgspec.Struct]) -> None:
    """Defaults are the model's, so that a body says what its client named."""
    found = decode(kind, msgspec.json.encode(REQUIRED[kind]))
    given = {name: one for name, one in msgspec.to_builtins(found).items() if one is not None}
    expected = REQUIRED[kind] | ({"add_special_tokens": True} if kind is TokenizeRequest else {})
    assert given == expected
    for name in REQUIRED[kind].keys() - {
        "model",
        "prompt" if kind in (SimpleChatRequest, TokenizeRequest) else "",
    }:
        with pytest.raises(ApiError) as caught:
            decode(kind, msgspec.json.encode({k: v for k, v in REQUIRED[kind].items() if k != name}))
        assert caught.value.param == name
