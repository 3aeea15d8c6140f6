"""The text side of an engine: tokenizer, chat format, ids that end a text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.engine.integrity import check_files
from ingot.engine.manifest import TOKENIZER_FOLDER, Manifest
from ingot.errors import ConfigError
from ingot.models.model_registry import text_half
from ingot.text.chat.chat_renderer import FORMATS, ChatFormat, load_chat_format, stop_ids_for
from ingot.text.tokenizer.tokenizer import Tokenizer, load_foreign_tokenizer, load_tokenizer
from ingot.text.tokenizer.tokenizer_folder import TOOL_TEMPLATES

_MOST_NAMED = 4  # tokens in a note
TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class TextParts:
    """A checkpoint without tokenizer files has no ``tokenizer``: its engine takes and gives token ids.

    ``chat_template`` names a built-in format that the user chose; ``template_file`` is a Jinja file that they
    gave. ``model_config``: the config.json that the tokenizer needs beside it, where it is no file.
    """

    tokenizer: Tokenizer | None
    chat: ChatFormat | None
    stop_ids: tuple[int, ...]
    files: tuple[Path, ...] = ()
    chat_template: str | None = None
    template_file: Path | None = None
    model_config: dict[str, Any] | None = None

    def name_of(self, file: Path) -> str:
        if file == self.template_file:
            return TEMPLATE_FILE
        return TOOL_TEMPLATES[0] if _is_tool_template(file) else file.name

    def notes(self, vocab_size: int) -> Iterator[str]:
        """A line about tokens that a model whose embedding has ``vocab_size`` rows does not know: a request
        with one of them fails.
        """
        if self.tokenizer is None or self.tokenizer.vocab_size <= vocab_size:
            return
        past = range(vocab_size, self.tokenizer.vocab_size)
        texts = {i: self.tokenizer.token_text(i) for i in past if self.tokenizer.token_bytes(i)}
        named = [f"{token} {text!r}" for token, text in itertools.islice(texts.items(), _MOST_NAMED)]
        more = f" and {len(texts) - len(named)} more" if len(texts) > len(named) else ""
        if named:
            yield (
                f"the embedding's {vocab_size} rows leave out tokens of the tokenizer, and requests with "
                f"them are refused: {', '.join(named)}{more}"
            )


def read_text_parts(
    source: Checkpoint,
    chat_template: str | None = None,
    tokenizer_folder: str | Path | None = None,
    vocab_size: int | None = None,
) -> TextParts:
    """Tokenizer and chat format of a checkpoint, or of another ``tokenizer_folder`` for a model whose
    embedding has ``vocab_size`` rows.

    Raises:
        TokenizerError: tokenizer files or the template are broken.
        ConfigError: the other folder has no tokenizer, or one with more tokens than the embedding has rows.
    """
    config, folder = source.config if source.alone else None, source.text_folder
    if tokenizer_folder is not None:
        config, folder = None, Path(tokenizer_folder)
    tokenizer = load_foreign_tokenizer(folder, model=config)
    if tokenizer_folder is not None:
        _check_fits(tokenizer, folder, vocab_size)
    chat = load_chat_format(folder, source.generation_config, chat_template)
    ends = source.generation_config, text_half(source.config)
    stops = tuple(sorted(stop_ids_for(*ends, tokenizer, chat)))
    files = () if tokenizer is None else tuple(tokenizer.files)
    template_file = Path(chat_template) if chat_template and chat_template not in FORMATS else None
    if template_file is not None:
        kept = (f for f in files if f.name != TEMPLATE_FILE and not _is_tool_template(f))
        files = (*kept, template_file)
    builtin = None if template_file else chat_template
    if not any(file.suffix == ".tiktoken" for file in files):
        config = None
    return TextParts(tokenizer, chat, stops, files, builtin, template_file, config)


def _check_fits(tokenizer: Tokenizer | None, folder: Path, vocab_size: int | None) -> None:
    """Raise ConfigError where a folder has no tokenizer, or one with ids that have no embedding."""
    if tokenizer is None:
        what = "there is no tokenizer in this folder" if folder.is_dir() else "there is no such folder"
        allowed = "a folder with tokenizer.json, tokenizer.model, or a vocabulary"
        raise ConfigError(what, seen=folder, allowed=allowed, field="tokenizer")
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            "the tokenizer has more tokens than the model's embedding has rows",
            seen=f"{tokenizer.vocab_size} tokens in {folder}",
            allowed=f"at most {vocab_size}",
            field="tokenizer",
            fix="`tokenizer` with the one that the model was trained with",
        )


def _is_tool_template(file: Path) -> bool:
    return any(file.as_posix().endswith(f"/{name}") for name in TOOL_TEMPLATES)


def read_engine_text(folder: Path, manifest: Manifest) -> TextParts:
    """Tokenizer and chat format of an engine folder.

    Raises:
        EngineError: as ``check_files``.
    """
    check_files(folder, manifest)
    place = folder / TOKENIZER_FOLDER
    tokenizer = load_tokenizer(place) if place.is_dir() else None
    chat = load_chat_format(place, manifest.generation, manifest.chat_template)
    return TextParts(tokenizer, chat, manifest.stop_ids, chat_template=manifest.chat_template)
