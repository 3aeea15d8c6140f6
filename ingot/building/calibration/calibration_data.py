"""Samples to calibrate with, from a file of texts or conversations.

``.txt`` is one running text, cut into windows; ``.json`` a list of records; all else has one record per line:
``{"text"}``, ``{"token_ids"}`` (padded ones with their ``"attention_mask"``), ``{"messages"}``,
``{"conversations"}`` (ShareGPT's), or ``{"prompt"}`` or ``{"article"}`` with its answer. Conversations go
through the chat template, answers included, as the model sees them when it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ingot.building.calibration.sample_records import (
    BadSample,
    decoded,
    evenly,
    file_records,
    made_of,
    needed,
    raw_file,
    text_of,
)
from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.config.decoder_config import DecoderConfig
from ingot.config.files.table_rows import is_hub
from ingot.engine.assembly import Assembly
from ingot.engine.engine_text import TextParts
from ingot.errors import ConfigError
from ingot.text.chat.chat_format import ChatFormat
from ingot.text.tokenizer.tokenizer_base import Tokenizer

SAMPLES, LENGTH = 128, 512
SHAPES = (
    '{"text": "…"}, {"messages": […]}, {"conversations": […]}, {"prompt" or "article": "…", "answer" or '
    '"answers" or "summary" or "highlights": "…"} or {"token_ids": […]}'
)
_ANSWERS = ("answer", "answers", "summary", "highlights")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


@dataclass(frozen=True)
class CalibrationData:
    """Samples and where they are from.

    Attributes:
        samples: token ids, none empty.
        records: how many the file holds; of a running text, its windows.
        sha256: of the file; of a manifest with its recordings.
        features: of a model with an encoder, the input that each sample reads, float32: a window [mels,
            frames], or pixels [3, side, side]; None of a sample of text alone.
        embeddings: rows [tokens, hidden_size] of each sample, float32, whose ids are placeholders; empty: all
            samples are tokens.
    """

    path: Path
    samples: tuple[tuple[int, ...], ...]
    records: int
    sha256: str
    features: tuple[torch.Tensor | None, ...] = field(default=(), compare=False)
    embeddings: tuple[torch.Tensor, ...] = field(default=(), compare=False)

    @property
    def num_tokens(self) -> int:
        return sum(len(one) for one in self.samples)


@dataclass(frozen=True)
class SampleFile:
    """What a build is given to calibrate with.

    Attributes:
        path: a file or folder.
        count: most samples to take of it.
        prompt_seed: draws questions about inputs; None: nothing is drawn.
    """

    path: Path
    count: int
    assembly: Assembly
    source: Checkpoint
    text: TextParts
    device: torch.device
    prompt_seed: int | None = None

    @property
    def length(self) -> int:
        """Most tokens of a sample: as long as the build takes, 512 at most."""
        return min(LENGTH, self.assembly.build.max_seq_len)

    @property
    def config(self) -> DecoderConfig:
        return self.assembly.model_config


def read_calibration_data(
    path: Path,
    tokenizer: Tokenizer | None,
    chat: ChatFormat | None,
    *,
    samples: int = SAMPLES,
    length: int = LENGTH,
) -> CalibrationData:
    """At most ``samples`` records, evenly spread over the file (of a data set of the hub the first), each cut
    to ``length`` tokens.

    Without a chat format a conversation's contents are joined by line ends. Raises ConfigError where a limit
    is too small, the file cannot be read, a chosen record is no sample, or there is none.
    """
    check_limits(samples, length)
    digest = hashlib.sha256()
    if path.suffix == ".txt" and not is_hub(path):
        raw = raw_file(path)
        digest.update(raw)
        windows = _windows(decoded(path, raw), needed(tokenizer, "a text"), length)
        return CalibrationData(path, tuple(evenly(windows, samples)), len(windows), digest.hexdigest())
    records = file_records(path, SHAPES, samples, digest)
    chosen = evenly(records, samples)
    kept = made_of(path, chosen, lambda record: _ids(record, tokenizer, chat)[:length], SHAPES)
    return CalibrationData(path, tuple(kept), len(records), digest.hexdigest())


def check_limits(samples: int, length: int) -> None:
    """Raise ConfigError where no sample, or none of two tokens, would be left."""
    if samples < 1 or length < 2:
        raise ConfigError(
            "calibration needs at least one sample of two tokens or more",
            seen=f"{samples} samples of {length} tokens",
            allowed="at least 1 sample of at least 2 tokens",
            field="calib_samples",
        )


def _windows(text: str, tokenizer: Tokenizer, length: int) -> list[tuple[int, ...]]:
    """Pieces of a text, each behind the tokenizer's prefix; a short rest is dropped unless it is all."""
    prefix = tokenizer.prefix_ids
    ids, room = tokenizer.encode(text, add_special_tokens=False), length - len(prefix)
    pieces = [ids[start : start + room] for start in range(0, len(ids), max(room, 1))]
    whole = [piece for piece in pieces if len(piece) == room] or pieces
    return [(*prefix, *piece) for piece in whole]


def _ids(record: Mapping[str, Any], tokenizer: Tokenizer | None, chat: ChatFormat | None) -> tuple[int, ...]:
    ids = token_ids(record) if "token_ids" in record else _of_text(record, tokenizer, chat)
    if not ids:
        raise BadSample("it has no tokens")
    return tuple(ids)


def token_ids(record: Mapping[str, Any]) -> list[int]:
    """The ids that a record has, without those that its attention_mask says are padding."""
    ids, mask = record["token_ids"], record.get("attention_mask")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise BadSample("token_ids is not a list of token ids")
    if mask is None:
        return ids
    if not isinstance(mask, list) or len(mask) != len(ids) or any(one not in (0, 1) for one in mask):
        raise BadSample("attention_mask is not a list of 0 and 1, one for each of token_ids")
    kept = [i for i, one in enumerate(mask) if one]
    if kept and kept != list(range(kept[0], kept[-1] + 1)):
        raise BadSample("attention_mask leaves out tokens between others: only the ends can be padding")
    return [ids[i] for i in kept]


def _of_text(record: Mapping[str, Any], tokenizer: Tokenizer | None, chat: ChatFormat | None) -> list[int]:
    own = needed(tokenizer, "a text")
    if "text" in record:
        return own.encode(text_of(record["text"]))
    messages = conversation(record)
    if chat is None:
        return own.encode("\n".join(message["content"] for message in messages))
    ends = messages[-1]["role"] == "user"
    return chat.prompt_ids(messages, own, add_generation_prompt=ends)


def conversation(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """The conversation of a record; its own answer follows a user's last word."""
    if "messages" in record:
        found = [_message(one, "role", "content") for one in _list(record["messages"], "messages")]
    elif "conversations" in record:
        found = [_message(one, "from", "value") for one in _list(record["conversations"], "conversations")]
    else:
        asked = next((record[name] for name in ("prompt", "article") if name in record), None)
        if asked is None:
            raise BadSample(f"none of the known fields among {sorted(map(str, record))[:8]}")
        found = [{"role": "user", "content": text_of(asked)}]
    answer = next((record[name] for name in _ANSWERS if name in record), None)
    if isinstance(answer, list):
        answer = answer[0] if answer else None
    if answer is not None and found[-1]["role"] == "user":
        found.append({"role": "assistant", "content": text_of(answer)})
    return found


def _message(one: object, who: str, what: str) -> dict[str, str]:
    role = one.get(who) if isinstance(one, dict) else None
    if not isinstance(one, dict) or not isinstance(role, str):
        raise BadSample(f"a message without {who}")
    return {"role": _ROLES.get(role, role), "content": text_of(one.get(what))}


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise BadSample(f"{name} is not a list of messages")
    return value
