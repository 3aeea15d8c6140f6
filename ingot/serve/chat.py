"""``/v1/chat/completions``.

Owns the shape of messages, deltas and their log-probabilities. Knows no HTTP.

    await ChatCall(model, decode(ChatRequest, data)).answer()
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ingot.config.sampling import SamplingParams
from ingot.llm.outputs import TokenLogprobs
from ingot.llm.prompts import PromptLike
from ingot.processors.tokenizer import Tokenizer
from ingot.serve.answering import Answering, Job
from ingot.serve.api_call import ApiCall, shown
from ingot.serve.errors import bad_request
from ingot.serve.logprob_text import finite
from ingot.serve.model import ServedModel
from ingot.serve.sampling import sampling_params
from ingot.serve.schemas import ChatRequest


class ChatCall(ApiCall):
    """A conversation to answer.

    Raises:
        ApiError: a value cannot be served.
    """

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    names_no_usage = True

    def __init__(self, model: ServedModel, body: ChatRequest) -> None:
        super().__init__(model, body, body.n or 1)
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if asked == 0:
            raise bad_request("max_tokens: Expected `int` >= 1", "max_tokens")
        named = "max_new_tokens" in model.defaults.used
        limit = asked or (model.defaults.params.max_new_tokens if named else None)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = sampling_params(body, model.defaults.params, max_tokens=limit, logprobs=logprobs)
        self._wanted = params
        self._params = model.with_chat_stops(params)
        self._asked = asked
        self._body = body

    def asked(self) -> tuple[list[PromptLike], SamplingParams]:
        """The conversation."""
        variables = self._body.chat_template_kwargs or {}
        return [self.model.conversation(self._body.messages, variables)], self._wanted

    def jobs(self) -> list[Job]:
        """One prompt."""
        ids = self.model.chat_ids(self._body.messages, self._body.chat_template_kwargs or {})
        self.model.check_ids(ids, self._asked or 1, "messages")
        return [Job(ids, self._params)]

    def choices(self, found: Answering) -> list[dict[str, Any]]:
        """A message for each answer."""
        return [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer.logprobs or []),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(found.answers(0))
        ]

    async def parts(self, found: Answering) -> AsyncGenerator[dict[str, Any], None]:
        """Deltas; the first of each answer names the role."""
        begun: set[int] = set()
        async for index, piece in found.pieces():
            if not shown(piece, is_first=index not in begun):
                continue
            role = {} if index in begun else {"role": "assistant"}
            begun.add(index)
            yield {
                "index": index,
                "delta": {**role, "content": piece.text},
                "logprobs": self._logprobs(piece.logprobs),
                "finish_reason": piece.finish_reason,
            }

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._params.logprobs is None:
            return None
        return {"content": [_entry(one, self.model.tokenizer) for one in tokens], "refusal": None}


def _entry(one: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_token(token, logprob, tokenizer) for token, logprob in one.top]
    return {**_token(one.token_id, one.logprob, tokenizer), "top_logprobs": top}


def _token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": tokenizer.token_text(token), "logprob": finite(logprob), "bytes": list(data)}
