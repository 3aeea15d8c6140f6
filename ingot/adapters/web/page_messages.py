"""Gradio's history and the page's values as the body of ``/v1/chat/completions``."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.adapters.web.page_math import unmarked

ANY_SEED = -1
MOST_PICTURE = 11 << 20  # bytes of a file: in base64 it fits into the body that `ingot serve` takes


class PictureTooLargeError(Exception):
    """A picture's file is larger than ``MOST_PICTURE``."""


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
    model: str, system: str, history: Sequence[Mapping[str, Any]], message: Any, values: Values
) -> dict[str, Any]:
    """A request for the next answer.

    Args:
        history: the messages that the page shows before ``message``. Messages with a title are the page's
            own (thoughts, errors); they and unanswered messages are left out.
        message: a text, or ``{"text", "files"}`` where the page takes files.

    Raises:
        FileNotFoundError: a file is gone.
        PictureTooLargeError: one is too large.
    """
    kept: list[tuple[str, str, list[Path]]] = []
    for one in [*history, {"role": "user", "content": message}]:
        text, given = _parts(one["content"])
        if (one.get("metadata") or {}).get("title") or not (text or given):
            continue
        if kept and kept[-1][0] == one["role"] == "user":
            kept.pop()
        kept.append((one["role"], text, given))
    messages: list[dict[str, Any]] = []
    for role, text, given in kept:
        parts = [*map(_file_part, given), *([{"type": "text", "text": text}] if text else [])]
        messages.append({"role": role, "content": parts if given else text})
    if system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return {"model": model, "messages": messages, **values.to_json()}


def without_oldest(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """A request's messages without their oldest turn, a question and what follows it; None if it is the
    last.
    """
    asked = [place for place, one in enumerate(messages) if one["role"] == "user"]
    if len(asked) < 2:
        return None
    return [*messages[: asked[0]], *messages[asked[1] :]]


def files(message: Any) -> list[Path]:
    found = (message.get("files") or ()) if isinstance(message, Mapping) else ()
    return [Path(one if isinstance(one, str) else one["path"]) for one in found]


def transcript(found: Mapping[str, Any]) -> str:
    """A transcript with its times as the page shows it, from ``verbose_json``."""
    lines = [
        f"**{_clock(one['start'])} – {_clock(one['end'])}** {one['text'].strip()}"
        for one in found.get("segments") or ()
    ]
    return "\n\n".join(lines) or found["text"].strip() or "No speech was found."


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}:{rest:04.1f}"


def _parts(shown: Any) -> tuple[str, list[Path]]:
    """The text and the files of what the page shows."""
    if isinstance(shown, str):
        return unmarked(shown), []
    if isinstance(shown, Mapping):
        return unmarked(shown.get("text") or ""), files(shown)
    texts = [part["text"] for part in shown if part.get("type") == "text"]
    return unmarked("".join(texts)), files({"files": [p["file"] for p in shown if p.get("type") == "file"]})


def _file_part(path: Path) -> dict[str, Any]:
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    is_audio = kind.startswith("audio/")
    if not is_audio and path.stat().st_size > MOST_PICTURE:
        size = f"{MOST_PICTURE >> 20} MiB"
        raise PictureTooLargeError(f"{path.name} is larger than {size}. Send a smaller picture.")
    data = base64.b64encode(path.read_bytes()).decode()
    if is_audio:
        return {"type": "input_audio", "input_audio": {"data": data, "format": path.suffix.removeprefix(".")}}
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
