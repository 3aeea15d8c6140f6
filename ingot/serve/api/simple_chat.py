"""``/chat/`` and ``/stream_chat/``, for clients of the demonstration servers of 2023."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ingot.serve.api.chat_completions import ChatCall
from ingot.serve.api_call import event
from ingot.serve.api_errors import bad_request
from ingot.serve.engine_calls.answering import Answering, Job
from ingot.serve.request_schemas import ChatRequest, SimpleChatRequest
from ingot.serve.served_model import ServedModel

_ROLES = ("user", "assistant")


class SimpleChat(ChatCall):
    """A question with the turns before it; raises ApiError where a value cannot be served."""

    ends_with_done = False  # these clients read every event as JSON

    def __init__(self, model: ServedModel, body: SimpleChatRequest) -> None:
        if (body.prompt is None) == (body.query is None):
            raise bad_request("give prompt or query, and not both", "prompt")
        self._question = (body.prompt or "") + (body.query or "")
        self._history = body.history or []
        self._max_length = body.max_length
        turns = [(role, text) for pair in self._history for role, text in zip(_ROLES, pair, strict=True)]
        messages = [{"role": role, "content": text} for role, text in (*turns, ("user", self._question))]
        values = {"temperature": body.temperature, "top_p": body.top_p, "max_tokens": body.max_tokens}
        super().__init__(model, ChatRequest(model=model.name, messages=messages, **values))  # type: ignore[arg-type]

    def jobs(self) -> list[Job]:
        """One prompt; ``max_length`` counts it, too, as Hugging Face's generate does."""
        (job,) = super().jobs()
        if self._max_length is None or job.params is None:
            return [job]
        room = min(self._max_length, self.model.max_seq_len) - len(job.ids)
        if room < 1:
            text = f"prompt and history have {len(job.ids)} tokens"
            raise bad_request(f"{text}; max_length ({self._max_length}) counts them", "max_length")
        limit = min(room, self._asked or room)
        return [replace(job, params=job.params.replace(max_new_tokens=limit))]

    def full_answer(self, found: Answering) -> dict[str, Any]:
        """``response``, the longer ``history``, ``status`` and ``time``."""
        return self._finished(next(self.choices(found))["message"]["content"])

    async def chunks(self, found: Answering) -> AsyncGenerator[bytes, None]:
        """The text so far and what is new of it; the last event has what ``full_answer`` has."""
        text = ""
        async for _, piece in found.pieces():
            text += piece.text
            finished = piece.finish_reason is not None
            body = self._finished(text) if finished else {"response": text}
            if piece.text or finished:
                yield event({"delta": piece.text, "finished": finished} | body)

    def _finished(self, text: str) -> dict[str, Any]:
        return {
            "response": text,
            "history": [*self._history, (self._question, text)],
            "status": 200,
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
