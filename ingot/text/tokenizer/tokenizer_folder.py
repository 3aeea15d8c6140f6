"""The JSON files next to a vocabulary, and the two keys of config.json that name the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.config.files.json_text import JsonError, load_json, read_text
from ingot.errors import TokenizerError

CONFIG_FILE = "tokenizer_config.json"
COPY_AGAIN = "copy the file again"
# The chat template of requests with tools: in an engine, which has no subfolders, and in a checkpoint.
TOOL_TEMPLATES = ("chat_template_tool_use.jinja", "additional_chat_templates/tool_use.jinja")
SIDE_FILES = (
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    *TOOL_TEMPLATES,
)
# These frame a turn. Some checkpoints do not mark them special; a user must not be able to write them.
TURN_STARTS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>")
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>")
TURN_TOKENS = frozenset(TURN_STARTS + TURN_ENDS)
_MAX_BYTES = 256 << 20
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class AddedToken:
    """A token matched in text before the vocabulary's own rules.

    ``special`` tokens frame a prompt and can be skipped when decoding; others are text that is always one
    token. ``lstrip`` and ``rstrip`` remove white space on that side.
    """

    text: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, empty when there is no such file. Raises ``TokenizerError`` if the file is
    not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = load_json(path)
    except (OSError, JsonError) as error:
        raise TokenizerError(f"{path} is not readable JSON", seen=error, fix=COPY_AGAIN) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object", seen=type(value).__name__)
    return value


def file_text(path: Path) -> str:
    """The text of a file; raises ``TokenizerError`` where it cannot be read or is not UTF-8."""
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is not readable text", seen=error) from error


class TokenizerFolder:
    """The tokenizer files of a checkpoint folder.

    Args:
        model: in place of config.json, for a checkpoint without one.

    Raises:
        TokenizerError: one of the JSON files is broken; the message names it.
    """

    def __init__(self, path: Path, model: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._own_model = model is None
        self.config = read_object(path / CONFIG_FILE)
        self._map = read_object(path / "special_tokens_map.json")
        self._added = read_object(path / "added_tokens.json")
        self._model = read_object(path / "config.json") if model is None else model

    def existing(self, *names: str) -> tuple[Path, ...]:
        """Those of ``names`` that are files here, in this order; raises ``TokenizerError`` where one is
        larger than any vocabulary.
        """
        found = tuple(self.path / name for name in names if (self.path / name).is_file())
        for path in found:
            if path.stat().st_size > _MAX_BYTES:
                size = f"{path.stat().st_size >> 20} MiB"
                raise TokenizerError(
                    f"{path} is too large for a tokenizer", seen=size, allowed=f"<= {_MAX_BYTES >> 20} MiB"
                )
        return found

    def files(self, *vocabulary: Path, needs_model_config: bool = False) -> tuple[Path, ...]:
        """Every file to copy so that the same tokenizer and chat template load elsewhere."""
        names = (*SIDE_FILES, "config.json") if needs_model_config and self._own_model else SIDE_FILES
        return (*vocabulary, *self.existing(*names))

    @property
    def tokenizer_class(self) -> str | None:
        """The class in tokenizer_config.json, without "Fast"."""
        name = self.config.get("tokenizer_class")
        return name.removesuffix("Fast") if isinstance(name, str) else None

    @property
    def model_type(self) -> str | None:
        """``model_type`` of config.json."""
        value = self._model.get("model_type")
        return value if isinstance(value, str) else None

    @property
    def model_vocab_size(self) -> int | None:
        """``vocab_size`` of config.json."""
        value = self._model.get("vocab_size")
        return value if isinstance(value, int) else None

    def flag(self, name: str, default: bool) -> bool:
        """A boolean of tokenizer_config.json."""
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise TokenizerError(f"{name} in {self.path / CONFIG_FILE} must be true or false", seen=value)
        return value

    def set_defaults(self, tokens: dict[str, str]) -> None:
        """Set named tokens that no file has."""
        known = self.config.keys() | self._map.keys()
        self._map.update({name: text for name, text in tokens.items() if name not in known})

    def named_token(self, name: str) -> str | None:
        """Text of ``bos_token`` and the like; None when no file has it or it is empty."""
        for source in (self.config, self._map):
            text = _token_text(source.get(name))
            if text:
                return text
        return None

    def named_tokens(self) -> dict[str, str]:
        """All named tokens that are set, by name."""
        found = ((name, self.named_token(name)) for name in NAMED_TOKENS)
        return {name: text for name, text in found if text}

    def special_texts(self) -> list[str]:
        """Texts of every token that the files mark special, without repeats."""
        texts = list(self.named_tokens().values())
        for source in (self.config, self._map):
            for key in ("additional_special_tokens", "extra_special_tokens"):
                found = source.get(key)
                found = list(found.values()) if isinstance(found, dict) else found
                if isinstance(found, list):
                    texts += filter(None, map(_token_text, found))
        return list(dict.fromkeys(texts))

    def added_tokens(self) -> list[AddedToken]:
        """Tokens with ids of their own: added_tokens_decoder, then added_tokens.json."""
        special = TURN_TOKENS.union(self.special_texts())
        entries = self.config.get("added_tokens_decoder") or {}
        where = self.path / CONFIG_FILE
        if not isinstance(entries, dict):
            raise TokenizerError(f"added_tokens_decoder in {where} must be an object", seen=entries)
        tokens: dict[str, AddedToken] = {}
        for key, entry in entries.items():
            content = _token_text(entry)
            if not (key.isascii() and key.isdigit() and len(key) < 19) or not content:
                raise TokenizerError(f"added_tokens_decoder in {where} has a bad entry", seen={key: entry})
            flags = entry if isinstance(entry, dict) else {}
            is_special = bool(flags.get("special")) or content in special
            strips = {side: bool(flags.get(side)) for side in ("lstrip", "rstrip")}
            tokens[content] = AddedToken(content, int(key), is_special, **strips)
        for text, token_id in self._added.items():
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                where = self.path / "added_tokens.json"
                raise TokenizerError(
                    f"the id of {text!r} in {where} is not a non-negative integer", seen=token_id
                )
            tokens.setdefault(text, AddedToken(text, token_id, special=text in special))
        return sorted(tokens.values(), key=lambda token: token.id)


def _token_text(value: Any) -> str | None:
    """The text of a token, which is a string or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
