"""Which chat format a checkpoint uses, and which tokens end its answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError, TokenizerError
from ingot.text.chat.chat_format import ChatFormat, ChatML, Vicuna, VicunaV0
from ingot.text.chat.chat_jinja import JinjaFormat, ToolTemplates
from ingot.text.chat.chat_pictures import PICTURE_FORMATS
from ingot.text.tokenizer.tokenizer import default_tokens
from ingot.text.tokenizer.tokenizer_base import Tokenizer
from ingot.text.tokenizer.tokenizer_folder import (
    CONFIG_FILE,
    TOOL_TEMPLATES,
    TokenizerFolder,
    file_text,
    read_object,
)

__all__ = ["FORMATS", "ChatFormat", "load_chat_format", "stop_ids_for"]

FORMATS = ("chatml", "vicuna", "vicuna-v0", *PICTURE_FORMATS)
QWEN_WINDOW = 6144
Template = tuple[str, str]  # its text, and the file it is from


def load_chat_format(
    folder: Path, generation_config: Mapping[str, Any], override: str | None = None
) -> ChatFormat | None:
    """The chat format of a checkpoint or engine folder; None when nothing names one.

    The first of: ``override`` (one of ``FORMATS`` or the path of a .jinja file), a picture format named by
    ``chat_format`` of generation_config, chat_template.jinja, ``chat_template`` of tokenizer_config.json,
    chat_template.json, ``chat_format`` again. A template named ``tool_use``, in a list or in
    additional_chat_templates/, is for requests with tools.

    Raises:
        TokenizerError: ``override`` is unknown, or a template cannot be read or parsed.
        ConfigError: ``max_window_size`` of generation_config is no positive integer.
    """
    own = generation_config.get("chat_format")
    if override is None and isinstance(own, str) and own in PICTURE_FORMATS:
        override = own  # the folder's template is the language model's, which takes no pictures
    if override is not None:
        return _named(override, folder, generation_config)
    plain, tools = _templates(folder)
    if plain is None and tools is None:
        return ChatML(_window(generation_config, QWEN_WINDOW)) if own == "chatml" else None
    tokens = default_tokens(TokenizerFolder(folder))
    first = None if plain is None else JinjaFormat(*plain, tokens)
    if tools is None:
        return first
    return ToolTemplates((plain or tools)[1], first, JinjaFormat(*tools, tokens))


def stop_ids_for(
    generation_config: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    chat_format: ChatFormat | None,
) -> tuple[int, ...]:
    """Every token that ends an answer, in ascending order: ``eos_token_id`` of both configs and the chat
    format's own; the tokenizer's end of text where these name none. Raises ``ConfigError``: an
    ``eos_token_id`` is neither an id nor a list of ids.
    """
    ids = {*_eos(generation_config, "generation_config"), *_eos(config, "config")}
    if tokenizer is not None and chat_format is not None:
        ids.update(chat_format.stop_ids(tokenizer))
    if not ids and tokenizer is not None and tokenizer.eos_id is not None:
        ids.add(tokenizer.eos_id)
    return tuple(sorted(ids))


def _named(name: str, folder: Path, generation_config: Mapping[str, Any]) -> ChatFormat:
    if name == "chatml":
        return ChatML(_window(generation_config, None))
    if name == "vicuna":
        return Vicuna()
    if name == "vicuna-v0":
        return VicunaV0()
    if name in PICTURE_FORMATS:
        return PICTURE_FORMATS[name]
    path = Path(name)
    if not path.is_file():
        raise TokenizerError(
            "no such chat format", seen=name, allowed=[*FORMATS, "the path of a .jinja file"]
        )
    return JinjaFormat(file_text(path), str(path), default_tokens(TokenizerFolder(folder)))


def _templates(folder: Path) -> tuple[Template | None, Template | None]:
    """The folder's template, and its own for requests with tools."""
    beside = next((folder / name for name in TOOL_TEMPLATES if (folder / name).is_file()), None)
    tools = None if beside is None else (file_text(beside), str(beside))
    path = folder / "chat_template.jinja"
    if path.is_file():
        return (file_text(path), str(path)), tools
    for name in (CONFIG_FILE, "chat_template.json"):
        path = folder / name
        source = read_object(path).get("chat_template")
        if source is not None:
            named = {key: (text, str(path)) for key, text in _named_texts(source, path).items()}
            return named.get("default"), tools or named.get("tool_use")
    return None, tools


def _named_texts(source: Any, path: Path) -> dict[str, str]:
    """Templates by name, "default" and "tool_use", of a text or a list of named texts."""
    named: dict[Any, Any] = {"default": source}
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
    used: dict[str, Any] = {key: named[key] for key in ("default", "tool_use") if key in named}
    if not used or not all(isinstance(text, str) for text in used.values()):
        raise TokenizerError(
            f"chat_template in {path} is neither text nor a list with a text named default or tool_use"
        )
    return used


def _window(generation_config: Mapping[str, Any], default: int | None) -> int | None:
    value = generation_config.get("max_window_size", default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(
            "max_window_size must be a positive integer", seen=value, fix="generation_config.json"
        )
    return value


def _eos(config: Mapping[str, Any], where: str) -> list[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ConfigError(f"eos_token_id of {where} must be an id or a list of ids", seen=value)
    return list(ids)
