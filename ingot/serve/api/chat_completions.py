"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from ingot.config.grammar_spec import Thinking
from ingot.config.sampling_params import SamplingParams
from ingot.llm.outputs import TokenLogprobs
from ingot.llm.prompt_inputs import PromptLike, with_chat_stops
from ingot.serve.api.answer_parts import AnswerParts, delta
from ingot.serve.api.logprob_text import finite
from ingot.serve.api.sampling_fields import sampling_params
from ingot.serve.api.tool_fields import read_tools
from ingot.serve.api_call import ApiCall
from ingot.serve.api_errors import bad_request
from ingot.serve.engine_calls.answering import Answering, Job
from ingot.serve.json_parts import LazyList
from ingot.serve.media_parts import picture_places
from ingot.serve.request_schemas import ChatRequest
from ingot.serve.response_formats import read_format
from ingot.serve.served_model import ServedModel


class ChatCall(ApiCall):
    """A conversation to answer; raises ApiError where a value cannot be served."""

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
        vocab_size = model.engine.limits.vocab_size
        params = sampling_params(body, model.defaults.params, vocab_size, max_tokens=limit, logprobs=logprobs)
        self._wanted = params
        self.params = with_chat_stops(params, model.side.text)
        self.tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls, read_format(body))
        self.form = self.tools.form
        self._thoughts: Thinking = "no"
        self._asked = asked
        self._body = body
        self.messages = body.messages

    def asked(self) -> tuple[list[PromptLike], SamplingParams]:
        if picture_places(self.messages):
            raise bad_request("X-Ingot-Explain explains prompts of text, without images", "messages")
        variables = self._body.chat_template_kwargs or {}
        return [self.model.conversation(self.messages, variables, self.tools.offered)], self._wanted

    def jobs(self) -> list[Job]:
        variables = self._body.chat_template_kwargs or {}
        ids, starts = self.model.chat_prompt(self.messages, variables, self.tools.offered)
        self.model.check_ids(ids, self._asked or 1, "messages")
        self.model.read_pictures(self.messages, self.slots, self.cancelled)
        pictures = tuple(zip(self.slots, starts, strict=True))
        self._thoughts = self.model.thoughts(ids)
        return [Job(ids, self.model.held(self.params, self.form, (), self._thoughts), pictures=pictures)]

    def new_parts(self) -> AnswerParts:
        calls = bool(self.tools.offered)
        return AnswerParts(thoughts=self._thoughts, calls=calls, most_calls=self.tools.most_calls)

    def choices(self, found: Answering) -> Iterator[dict[str, Any]]:
        for index, answer in enumerate(found.answers(0)):
            parts = self.new_parts()
            parts.feed(answer.text or "", final=True)
            choice = {"index": index, "message": parts.message()}
            choice |= {"logprobs": self._logprobs(answer.logprobs or [])}
            yield choice | {"finish_reason": parts.finish_reason(answer.finish_reason)}

    async def parts(self, found: Answering) -> AsyncGenerator[dict[str, Any], None]:
        """Deltas; the first of each answer names the role, and each has one thing."""
        readers: dict[int, AnswerParts] = {}
        async for index, piece in found.pieces():
            is_first = index not in readers
            parts = readers.setdefault(index, self.new_parts())
            ends = piece.finish_reason is not None
            deltas = [delta(part) for part in parts.feed(piece.text, final=ends)]
            if not deltas and (is_first or ends or piece.logprobs):
                deltas = [{} if parts.tool_calls else {"content": ""}]
            for place, one in enumerate(deltas, start=1):
                role = {"role": "assistant"} if is_first and place == 1 else {}
                reason = parts.finish_reason(piece.finish_reason) if place == len(deltas) else None
                logprobs = self._logprobs(piece.logprobs if place == 1 else ())
                yield {"index": index, "delta": role | one, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self.params.logprobs is None:
            return None
        return {"content": LazyList(lambda: map(self._entry, tokens)), "refusal": None}

    def _entry(self, one: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in one.top]
        return {**self._token(one.token_id, one.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        tokenizer = self.model.tokenizer
        data = tokenizer.token_bytes(token)
        return {"token": tokenizer.token_text(token), "logprob": finite(logprob), "bytes": list(data)}
