"""A request's tensors, with the meaning and defaults of Triton's vLLM backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.adapters.triton.triton_tensors import EXTRAS
from ingot.config.sampling_params import SamplingParams
from ingot.serve.api.sampling_fields import sampling_params
from ingot.serve.api_errors import ApiError, bad_request, unsupported
from ingot.serve.request_schemas import Sampling, decode
from ingot.serve.response_formats import AnswerFormat, read_format

DEFAULT_TOKENS = 16  # as with vLLM's backend


class Parameters(Sampling, kw_only=True, forbid_unknown_fields=True):
    """``sampling_parameters``, or the request's own parameters: the values of a completion."""

    model: str = ""


@dataclass(frozen=True)
class Generate:
    """What a request asks for. ``echo``: the answer begins with the prompt; ``extras``: outputs beside the
    text; ``images``: in base64.
    """

    prompt: str
    stream: bool
    echo: bool
    extras: frozenset[str]
    body: Parameters
    images: tuple[str, ...] = ()

    @property
    def new_tokens(self) -> int:
        return DEFAULT_TOKENS if self.body.max_tokens is None else self.body.max_tokens

    @property
    def form(self) -> AnswerFormat | None:
        """What the answer must be; None for any text. Raises as ``read_format``."""
        return read_format(self.body)

    def params(self, defaults: SamplingParams, vocab_size: int) -> SamplingParams:
        """The sampling values; ``defaults`` and ``vocab_size`` are the engine's. Raises ApiError."""
        return sampling_params(self.body, defaults, vocab_size, max_tokens=self.new_tokens, logprobs=None)


def read(tensors: Mapping[str, Any], parameters: str) -> Generate:
    """A request of these tensors.

    Args:
        tensors: texts, lists of texts and booleans by name, of what was sent.
        parameters: the request's own parameters as JSON; ``sampling_parameters`` takes their place.

    Raises:
        ApiError: a value is unknown, of the wrong type or out of range.
    """
    given = tensors.get("sampling_parameters", parameters) or "{}"
    body = _parameters(given)
    stream = bool(tensors.get("stream", body.stream or False))
    echo = not tensors.get("exclude_input_in_output", stream)
    if echo and stream:
        raise bad_request("a stream never repeats the prompt: exclude_input_in_output must be true")
    extras = frozenset(name for name in EXTRAS if tensors.get(f"return_{name}"))
    return Generate(tensors["text_input"], stream, echo, extras, body, tuple(tensors.get("image", ())))


def _parameters(text: str) -> Parameters:
    try:
        body = decode(Parameters, text.encode(), strict=False)  # Triton's clients write numbers as text, too
    except ApiError as error:
        raise bad_request(error.message.replace("the body", "sampling_parameters"), error.param) from None
    if body.stream_options is not None or body.model:
        field = "model" if body.model else "stream_options"
        raise unsupported(field, "a field of OpenAI's API")
    if body.n not in (None, 1):
        raise unsupported("n", "more than one answer")
    if body.max_tokens == 0:
        raise bad_request("max_tokens: Expected `int` >= 1", "max_tokens")
    return body
