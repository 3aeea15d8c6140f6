"""What the page shows, as a request.

Owns the way from Gradio's history and the values of the page to the body of ``/v1/chat/completions``. Knows
neither Gradio nor HTTP: history is plain data.

    body("m", "Answer briefly.", history, "Hello", Values(own=True))
"""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.web.math import unmarked

ANY_SEED = -1


@dataclass(frozen=True)
class Values:
    """How to sample.

    Attributes:
        own: the server's own values hold: only ``max_tokens`` and ``seed`` are sent.
        max_tokens: 0: not sent, as ``ANY_SEED`` is not.
    """

    own: bool = True
    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    repetition_penalty: float = 1.0
    max_tokens: int = 0
    seed: int = ANY_SEED

    def to_json(self) -> dict[str, Any]:
        """The fields of a request."""
        found: dict[str, Any] = {}
        if not self.own:
            names = ("temperature", "top_p", "top_k", "repetition_penalty")
            found = {name: getattr(self, name) for name in names}
        if self.max_tokens:
            found["max_tokens"] = int(self.max_tokens)
        if self.seed != ANY_SEED:
            found["seed"] = int(self.seed)
        return found


def body(
    model: str, system: str, history: Sequence[Mapping[str, Any]], said: Any, values: Values
) -> dict[str, Any]:
    """A request for the next answer.

    Args:
        history: what the page shows before ``said``; messages with a title are the page's own (thoughts and
            errors) and are left out, and so is what was said without being answered.
        said: a text, or ``{"text", "files"}`` where the page takes files.
    """
    messages: list[dict[str, Any]] = []
    for one in [*history, {"role": "user", "content": said}]:
        content = _content(one["content"])
        if (one.get("metadata") or {}).get("title") or not content:
            continue
        if messages and messages[-1]["role"] == one["role"] == "user":
            messages.pop()
        messages.append({"role": one["role"], "content": content})
    if system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return {"model": model, "messages": messages, **values.to_json()}


def without_oldest(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """A request's messages without their oldest turn: a question and what follows it. None where that is the
    last one.
    """
    asked = [place for place, one in enumerate(messages) if one["role"] == "user"]
    if len(asked) < 2:
        return None
    return [*messages[: asked[0]], *messages[asked[1] :]]


def files(said: Any) -> list[Path]:
    """The files of a message."""
    found = (said.get("files") or ()) if isinstance(said, Mapping) else ()
    return [Path(one if isinstance(one, str) else one["path"]) for one in found]


def transcript(found: Mapping[str, Any]) -> str:
    """What was heard, with its times, as the page shows it: of ``verbose_json``."""
    lines = [
        f"**{_clock(one['start'])} – {_clock(one['end'])}** {one['text'].strip()}"
        for one in found.get("segments") or ()
    ]
    return "\n\n".join(lines) or found["text"].strip() or "Nothing was heard."


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}:{rest:04.1f}"


def _content(shown: Any) -> str | list[dict[str, Any]]:
    """A message's content in OpenAI's form: a text, or parts where it has files."""
    if isinstance(shown, str):
        return unmarked(shown)
    if isinstance(shown, Mapping):
        files, texts = list(shown.get("files") or ()), [shown.get("text") or ""]
    else:
        files = [part["file"] for part in shown if part.get("type") == "file"]
        texts = [part["text"] for part in shown if part.get("type") == "text"]
    text = unmarked("".join(texts))
    if not files:
        return text
    return [*map(_file_part, files), *([{"type": "text", "text": text}] if text else [])]


def _file_part(file: str | Mapping[str, Any]) -> dict[str, Any]:
    path = Path(file if isinstance(file, str) else file["path"])
    data = base64.b64encode(path.read_bytes()).decode()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if kind.startswith("audio/"):
        return {"type": "input_audio", "input_audio": {"data": data, "format": path.suffix.removeprefix(".")}}
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
