"""``/v1/responses``, without storage."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from ingot.serve.api.chat_completions import ChatCall
from ingot.serve.api.response_input import as_chat, in_words_of_responses
from ingot.serve.api.response_items import ResponseItems
from ingot.serve.api_call import usage
from ingot.serve.api_errors import ApiError
from ingot.serve.engine_calls.answering import Answering
from ingot.serve.request_schemas import ResponsesRequest
from ingot.serve.served_model import ServedModel

_encoder = msgspec.json.Encoder()


class ResponseCall(ChatCall):
    """A chat whose answer is a response; raises ApiError where a value cannot be served. Nothing is stored:
    ``store`` is answered by false.
    """

    id_prefix = "resp"
    ends_with_done = False  # the last event says how it ended

    def __init__(self, model: ServedModel, body: ResponsesRequest) -> None:
        try:
            chat, self._places = as_chat(body)
            super().__init__(model, chat)
        except ApiError as error:
            raise in_words_of_responses(error) from None
        if self.form is not None and self.form.field == "response_format":
            self.form = self.form._replace(field="text.format")
        self._asked_for = body
        self._sequence = 0

    @asynccontextmanager
    async def begun(self, *, by_piece: bool) -> AsyncGenerator[Answering, None]:
        """As ``ApiCall.begun``, with the words of this API in errors."""
        try:
            async with super().begun(by_piece=by_piece) as found:
                yield found
        except ApiError as error:
            raise in_words_of_responses(error, self._places) from None

    def full_answer(self, found: Answering) -> dict[str, Any]:
        (answer,) = found.answers(0)
        items, parts = ResponseItems(), self.new_parts()
        for part in parts.feed(answer.text or "", final=True):
            list(items.add(part))
        list(items.finish(complete=answer.finish_reason == "stop"))
        return self._ended(found, items, answer.finish_reason, parts.reasoning)

    async def chunks(self, found: Answering) -> AsyncGenerator[bytes, None]:
        """Typed events; an error after the first of them is the last event, ``response.failed``."""
        items, parts, reason = ResponseItems(), self.new_parts(), None
        yield self._event({"type": "response.created", "response": self._response("in_progress")})
        yield self._event({"type": "response.in_progress", "response": self._response("in_progress")})
        try:
            async for _, piece in found.pieces():
                reason = piece.finish_reason
                for part in parts.feed(piece.text, final=reason is not None):
                    for one in items.add(part):
                        yield self._event(one)
        except ApiError as error:
            failed = {"error": {"code": "server_error", "message": error.message}, "output": items.output}
            yield self._event({"type": "response.failed", "response": self._response("failed") | failed})
            return
        for one in items.finish(complete=reason == "stop"):
            yield self._event(one)
        response = self._ended(found, items, reason, parts.reasoning)
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def _event(self, value: dict[str, Any]) -> bytes:
        data = _encoder.encode(value | {"sequence_number": self._sequence})
        self._sequence += 1
        return b"event: " + value["type"].encode() + b"\ndata: " + data + b"\n\n"

    def _ended(
        self, found: Answering, items: ResponseItems, reason: str | None, thoughts: str
    ) -> dict[str, Any]:
        status = "completed" if reason == "stop" else "incomplete"
        counts = usage(found)
        # Tokens of thoughts are those that their text has by itself.
        thought = len(self.model.tokenizer.encode(thoughts, add_special_tokens=False)) if thoughts else 0
        spent = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": sum(found.reused.values()), "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": counts["total_tokens"],
        }
        ending: dict[str, Any] = {"output": items.output, "usage": spent}
        if status == "completed":
            ending["completed_at"] = int(time.time())
        else:
            ending["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._response(status) | ending

    def _response(self, status: str) -> dict[str, Any]:
        """The response before its end: what was asked for, with the values that are used."""
        body = self._asked_for
        format = None if body.text is None else body.text.format
        reasoning = {"effort": None, "summary": None} | (body.reasoning or {})
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": reasoning,
            "store": False,
            "temperature": self.params.temperature,
            "text": {"format": format or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": None} | tool for tool in body.tools or []],
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            **({} if body.user is None else {"user": body.user}),
        }
