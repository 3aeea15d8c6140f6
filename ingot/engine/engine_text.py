"""The text side of an engine: tokenizer, chat format, ids that end a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.engine.integrity import check_files
from ingot.engine.manifest import TOKENIZER_FOLDER, Manifest
from ingot.text.chat.chat_renderer import FORMATS, ChatFormat, load_chat_format, stop_ids_for
from ingot.text.tokenizer.tokenizer import Tokenizer, load_foreign_tokenizer, load_tokenizer
from ingot.text.tokenizer.tokenizer_folder import TOOL_TEMPLATES

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


def read_text_parts(source: Checkpoint, chat_template: str | None = None) -> TextParts:
    """Tokenizer and chat format of a checkpoint.

    Raises:
        TokenizerError: tokenizer files or the template are broken.
    """
    config = source.config if source.alone else None
    tokenizer = load_foreign_tokenizer(source.text_folder, model=config)
    chat = load_chat_format(source.text_folder, source.generation_config, chat_template)
    stops = tuple(sorted(stop_ids_for(source.generation_config, source.config, tokenizer, chat)))
    files = () if tokenizer is None else tuple(tokenizer.files)
    template_file = Path(chat_template) if chat_template and chat_template not in FORMATS else None
    if template_file is not None:
        kept = (f for f in files if f.name != TEMPLATE_FILE and not _is_tool_template(f))
        files = (*kept, template_file)
    builtin = None if template_file else chat_template
    if not any(file.suffix == ".tiktoken" for file in files):
        config = None
    return TextParts(tokenizer, chat, stops, files, builtin, template_file, config)


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
