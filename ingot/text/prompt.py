"""The parts of a prompt, and their encoding to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ingot.errors import RequestError
from ingot.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Input:
    """Features of a picture or of speech as the model takes them: a tensor, an array or nested lists.

    Its place in a prompt is where the model sees it; with cross-attention any place will do.

    Attributes:
        name: identifies the values; an engine encodes a name once. Named features are a tensor that is not
            written to again, of finite values; on a GPU they stay there. None: the values are copied to the
            CPU, checked and hashed.
    """

    features: Any
    name: bytes | None = None


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Rows in a prompt in place of tokens, like ``inputs_embeds`` of Hugging Face: outputs of the embedding
    layer, scaled where a model scales them (Gemma-2), without positions (GPT-2).

    Attributes:
        rows: floats [tokens, hidden_size], a tensor or array; its values are copied.
    """

    rows: Any


Part = str | Sequence[int] | Input | Embeddings
Piece = list[int] | Input | Embeddings


@dataclass(frozen=True)
class Prompt:
    """Text, token ids, inputs and embeddings in order. A ``str`` or a list of ids is a prompt of one part.

    The tokenizer's prefix (BOS) comes once, and only when the first part is text.

        Prompt(["What is ", Input(picture), "?"]).pieces(tokenizer)
    """

    parts: tuple[Part, ...]

    def __init__(self, parts: str | Sequence[Part] | Prompt) -> None:
        if isinstance(parts, Prompt):
            parts = parts.parts
        if isinstance(parts, str):
            parts = (parts,)
        object.__setattr__(self, "parts", tuple(_checked(p) for p in parts))
        if not self.parts:
            raise RequestError("the prompt has no parts", fix="give text or token ids")

    @classmethod
    def of(cls, value: object) -> Prompt:
        """The prompt of a ``str``, a list of ids or a ``Prompt``. Raises ``RequestError`` if it is none of
        these.
        """
        if isinstance(value, (str, Prompt)):
            return cls(value)
        prompt = cls.__new__(cls)
        object.__setattr__(prompt, "parts", (_checked(value),))  # which is checked once: it may be long
        return prompt

    def token_ids(self, tokenizer: Tokenizer | None) -> list[int]:
        """All parts as token ids. Raises ``RequestError`` if a part is an input, or text without a
        tokenizer.
        """
        ids: list[int] = []
        for piece in self.pieces(tokenizer):
            if isinstance(piece, (Input, Embeddings)):
                seen = "an input" if isinstance(piece, Input) else "embeddings"
                raise RequestError("only text and token ids are taken here", seen=seen, fix="the prompt")
            ids += piece
        return ids

    def pieces(self, tokenizer: Tokenizer | None) -> list[Piece]:
        """Each part as token ids; inputs and embeddings as they are. Raises ``RequestError`` if a part is
        text and there is no tokenizer.
        """
        pieces: list[Piece] = []
        for index, part in enumerate(self.parts):
            if isinstance(part, (Input, Embeddings)):
                pieces.append(part)
            elif not isinstance(part, str):
                pieces.append(list(part))
            elif tokenizer is None:
                raise RequestError(
                    "the engine has no tokenizer",
                    seen="a text prompt",
                    allowed="token ids",
                    field="ids",
                    fix='`ids="1 2 3"`, or a list of ids in Python',
                )
            else:
                pieces.append(tokenizer.encode(part, add_special_tokens=index == 0))
        return pieces


def _checked(part: object) -> Part:
    if isinstance(part, (str, Input, Embeddings)):
        return part
    ids: list[int] = []
    whole = isinstance(part, Iterable) and not isinstance(part, (bytes, bytearray, Mapping))
    if whole:
        items = part.tolist() if hasattr(part, "tolist") else list(part)  # type: ignore[call-overload]
        if isinstance(items, list) and set(map(type, items)) == {int}:  # the usual case, in microseconds
            return items
        ids = [int(i) for i in items if isinstance(i, Integral) and not isinstance(i, bool)]
        whole = len(ids) == len(items)
    if not whole:
        raise RequestError(
            "a prompt is text, a list of token ids, or a Prompt of these",
            seen=repr(part)[:80],
            fix="give text or token ids",
        )
    return ids
