"""The server that is measured, and the bodies of requests to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ingot.errors import ConfigError

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
Content = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True)
class ServerPrompt:
    """A text, token ids or a chat's messages, and the tokens to generate."""

    content: Content
    new_tokens: int


@dataclass(frozen=True)
class ServerTarget:
    """A server of the OpenAI protocol.

    Attributes:
        url: with or without ``/v1``.
        model: None: the server's only one.
        endpoint: ``completions`` or ``chat``.
        ignore_eos: ask for exactly the wanted tokens, as vLLM, llama.cpp, SGLang and Ingot can.
        timeout_s: of one whole request.

    Raises:
        ConfigError: the URL is malformed or holds a password, or the endpoint is unknown.
    """

    url: str
    model: str | None = None
    endpoint: str = "completions"
    api_key: str | None = field(default=None, repr=False)
    ignore_eos: bool = True
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("not a URL", seen=self.url, allowed="http://HOST:PORT", field="url")
        if parts.username is not None:
            raise ConfigError(
                "a URL with a password would be in the record", field="api_key", fix="`api_key`, and `url`"
            )
        if self.endpoint not in PATHS:
            raise ConfigError(
                "unknown endpoint", seen=self.endpoint, allowed=", ".join(PATHS), field="endpoint"
            )

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def body(self, model: str, prompt: ServerPrompt) -> bytes:
        """The request as JSON.

        Raises:
            ConfigError: messages for ``completions``, or token ids for ``chat``.
        """
        asked = {
            "model": model,
            **self._content(prompt.content),
            "max_tokens": prompt.new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(asked | ({"ignore_eos": True} if self.ignore_eos else {})).encode()

    def _content(self, content: Content) -> dict[str, Any]:
        is_messages = not isinstance(content, str) and isinstance(content[0], dict)
        if self.endpoint == "chat":
            if isinstance(content, str):
                return {"messages": [{"role": "user", "content": content}]}
            if is_messages:
                return {"messages": content}
            raise ConfigError("a chat takes no token ids", field="endpoint", fix="`endpoint=completions`")
        if is_messages:
            raise ConfigError("messages need a chat", field="endpoint", fix="`endpoint=chat`")
        return {"prompt": content}

    def to_json(self) -> dict[str, Any]:
        """Without the key."""
        return {
            "url": self.base,
            "endpoint": self.endpoint,
            "ignore_eos": self.ignore_eos,
            "timeout_s": self.timeout_s,
        }
