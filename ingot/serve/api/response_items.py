"""The output of a response: its items, and the events by which they come."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from ingot.serve.api.answer_parts import Part, ReasoningDelta
from ingot.text.parsing.tool_calls import ArgumentsDelta, CallStart, ContentDelta

Event = dict[str, Any]
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseItems:
    """Of one answer, part by part; ``output`` holds the items so far, of which the last may be open."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._is_open = False

    def add(self, part: Part) -> Iterator[Event]:
        """The events of a part of the answer."""
        match part:
            case ReasoningDelta(text):
                yield from self._text("reasoning", text)
            case ContentDelta(text):
                yield from self._text("message", text)
            case CallStart(_, call_id, name):
                yield from self._close("completed")
                yield from self._open("function_call", {"call_id": call_id, "name": name, "arguments": ""})
            case ArgumentsDelta(_, text):
                self.output[-1]["arguments"] += text
                yield self._of_item("response.function_call_arguments.delta", delta=text)

    def finish(self, *, complete: bool) -> Iterator[Event]:
        """The events at the end of the answer; an empty one has an empty message."""
        if not self.output:
            yield from self._text("message", "")
        yield from self._close("completed" if complete else "incomplete")

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        """More text of a message or of thoughts, whose one part has it."""
        if not self._is_open or self.output[-1]["type"] != kind:
            yield from self._close("completed")
            own: Event = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._open(kind, {**own, "content": []})
            self.output[-1]["content"].append(_part(kind))
            yield self._of_part("response.content_part.added", part=_part(kind))
        if text:
            self.output[-1]["content"][0]["text"] += text
            yield self._of_part(f"response.{_PARTS[kind]}.delta", delta=text, **_logprobs(kind))

    def _open(self, kind: str, values: dict[str, Any]) -> Iterator[Event]:
        name = f"{_IDS[kind]}_{secrets.token_hex(16)}"
        self.output.append({"type": kind, "id": name, "status": "in_progress", **values})
        self._is_open = True
        item = {**self.output[-1], **({"content": []} if "content" in values else {})}
        yield {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": item}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item = self.output[-1]
        kind = item["type"]
        if kind == "function_call":
            values = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **values)
        else:
            text = item["content"][0]["text"]
            yield self._of_part(f"response.{_PARTS[kind]}.done", text=text, **_logprobs(kind))
            yield self._of_part("response.content_part.done", part=dict(item["content"][0]))
        item["status"] = status
        self._is_open = False
        yield {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": dict(item)}

    def _of_item(self, kind: str, **values: Any) -> Event:
        place = len(self.output) - 1
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": place, **values}

    def _of_part(self, kind: str, **values: Any) -> Event:
        return self._of_item(kind, content_index=0, **values)


def _part(kind: str) -> dict[str, Any]:
    annotations: Event = {"annotations": []} if kind == "message" else {}
    return {"type": _PARTS[kind], "text": "", **annotations, **_logprobs(kind)}


def _logprobs(kind: str) -> Event:
    """Messages name theirs, and there are none."""
    return {"logprobs": []} if kind == "message" else {}
