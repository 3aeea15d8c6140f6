"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, in vLLM's shape."""

from __future__ import annotations

from typing import Any

from ingot.serve.api_errors import bad_request
from ingot.serve.request_schemas import DetokenizeRequest, TokenizeRequest
from ingot.serve.served_model import ServedModel


def tokenize(model: ServedModel, body: TokenizeRequest) -> dict[str, Any]:
    """The ids that a prompt or a conversation becomes in a request. May take seconds.

    Raises:
        ApiError: not one of the two is given, or it cannot be encoded.
    """
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give prompt or messages, not both", "prompt")
    if body.messages is not None:
        ids, _ = model.chat_prompt(body.messages, body.chat_template_kwargs or {})
    else:
        ids = model.prompt_ids(body.prompt or "", add_special_tokens=body.add_special_tokens)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_seq_len, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [model.tokenizer.token_text(token) for token in ids]
    return found


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """What lm-eval asks before it tokenizes by the server: the tokens that begin and end a text."""
    tokenizer = model.tokenizer
    named = {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id, "pad_token": None}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        **{name: None if token is None else tokenizer.token_text(token) for name, token in named.items()},
    }


def detokenize(model: ServedModel, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids, special tokens included; ids outside the vocabulary are nothing."""
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}
