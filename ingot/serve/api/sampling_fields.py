"""A request's values as sampling parameters."""

from __future__ import annotations

from typing import Any

from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.serve.api_errors import bad_request, refused
from ingot.serve.request_schemas import Sampling

_SAME = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "ignore_eos", "stop_token_ids", "n",
)  # fmt: skip


def sampling_params(
    body: Sampling, defaults: SamplingParams, vocab_size: int, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The engine's defaults with what the request names.

    Args:
        vocab_size: of the model; ids of a bias are below it.
        max_tokens: of each answer; None: to the engine's maximum length.
        logprobs: as in ``SamplingParams``.

    Raises:
        ApiError: a value is out of range; it names the field.
    """
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    values |= {"stop": body.stop, "min_new_tokens": body.min_tokens, "logit_bias": body.logit_bias}
    if body.logit_bias and max(body.logit_bias) >= vocab_size:
        text = f"logit_bias names the token {max(body.logit_bias)}; the model's are below {vocab_size}"
        raise bad_request(text, "logit_bias")
    if body.top_k is not None:
        values["top_k"] = max(body.top_k, 0)  # clients write -1 for all tokens
    named = {name: value for name, value in values.items() if value is not None}
    try:
        return defaults.replace(max_new_tokens=max_tokens, logprobs=logprobs, **named)
    except RequestError as error:
        raise refused(error) from None
