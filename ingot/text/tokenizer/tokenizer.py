"""Loads a folder's tokenizer: tokenizer.json, SentencePiece, tiktoken, or GPT-2's vocabulary and merges."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.errors import TokenizerError
from ingot.sandbox.limited_process import LimitedProcess, ProcessEndedError, ProcessLimits
from ingot.text.tokenizer.tokenizer_base import Tokenizer, library_errors
from ingot.text.tokenizer.tokenizer_fast import LLAMA_CLASSES, FastTokenizer, byte_level_bpe
from ingot.text.tokenizer.tokenizer_folder import CONFIG_FILE, TokenizerFolder, file_text, read_object
from ingot.text.tokenizer.tokenizer_sentencepiece import SentencePieceTokenizer
from ingot.text.tokenizer.tokenizer_tiktoken import (
    END_OF_TEXT,
    QWEN,
    QWEN_SPLIT,
    TiktokenTokenizer,
    whisper_rules,
    whisper_vocabulary,
)

__all__ = ["Tokenizer", "default_tokens", "load_foreign_tokenizer", "load_tokenizer"]

PROBE_LIMITS = ProcessLimits(seconds=30, memory=2 << 30)
VOCABULARY_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
GPT2_CLASS, QWEN2_CLASS, QWEN1_CLASS = "GPT2Tokenizer", "Qwen2Tokenizer", "QWenTokenizer"
VOCABULARIES = {
    "LlamaTokenizer": "tokenizer.json or tokenizer.model",
    GPT2_CLASS: "vocab.json and merges.txt",
    QWEN1_CLASS: "qwen.tiktoken",
}
QWEN2_MODELS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def load_tokenizer(folder: Path, model: Mapping[str, Any] | None = None) -> Tokenizer | None:
    """The tokenizer of a checkpoint or engine folder; None when there are no tokenizer files at all.

    tokenizer.json wins over the other formats, as in Hugging Face. The others are told apart by
    ``tokenizer_class`` of tokenizer_config.json or else ``model_type`` of config.json, which ``model``
    replaces.

    Raises:
        TokenizerError: a file is broken, the rules of its vocabulary are unknown, or a vocabulary is missing.
    """
    here = TokenizerFolder(folder, model)
    if found := here.existing("tokenizer.json"):
        here.set_defaults(_class_defaults(here.tokenizer_class))
        return FastTokenizer.from_json(here, found[0])
    if found := here.existing("tokenizer.model"):
        _check_class(here, LLAMA_CLASSES)
        return SentencePieceTokenizer.from_model(here, found[0])
    if tiktokens := here.existing(*sorted(path.name for path in folder.glob("*.tiktoken"))):
        return _load_tiktoken(here, tiktokens)
    for names in VOCABULARY_PAIRS:
        found = here.existing(*names)
        if len(found) == len(names):
            return _load_byte_level(here, found[0], found[1])
        if found and not (names[0] == "vocab.json" and here.existing(*VOCABULARY_PAIRS[1])):
            raise TokenizerError(f"{folder} has half a vocabulary", seen=found[0].name, allowed=names)
    found = here.existing(CONFIG_FILE, "special_tokens_map.json", "added_tokens.json")
    if found:  # an incomplete download
        named = f", which names {here.tokenizer_class}" if here.tokenizer_class else ""
        raise TokenizerError(
            f"{here.path} has no vocabulary for its tokenizer",
            seen=f"{', '.join(path.name for path in found)}{named}",
            allowed=VOCABULARIES.get(here.tokenizer_class or "", " or ".join(VOCABULARIES.values())),
            fix="download the missing file; to build without a tokenizer, remove these files too",
        )
    return None


def load_foreign_tokenizer(
    folder: Path, limits: ProcessLimits = PROBE_LIMITS, model: Mapping[str, Any] | None = None
) -> Tokenizer | None:
    """``load_tokenizer`` for files that no build has tried: a process of its own first loads tokenizer.json
    or tokenizer.model and encodes texts, as a library that runs out of memory ends its process. Raises
    ``TokenizerError``: as ``load_tokenizer``, or that process reached a limit or crashed.
    """
    if TokenizerFolder(folder).existing("tokenizer.json", "tokenizer.model"):
        with LimitedProcess("ingot.text.tokenizer.tokenizer_probe", limits) as process:
            try:
                process.ask({"folder": str(folder)})
            except ProcessEndedError as error:
                raise TokenizerError(f"the tokenizer in {folder} {error}", fix="use another one") from None
    return load_tokenizer(folder, model)


def default_tokens(here: TokenizerFolder) -> dict[str, str]:
    """Named tokens for chat templates: from the files, else from the tokenizer class that they name."""
    here.set_defaults(_class_defaults(here.tokenizer_class))
    return here.named_tokens()


def _class_defaults(name: str | None) -> dict[str, str]:
    """Named tokens of Hugging Face's class where no file has them."""
    if name in LLAMA_CLASSES:
        return {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if name == QWEN2_CLASS:
        return {"eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    if name == GPT2_CLASS:
        return {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    return {}


def _load_tiktoken(here: TokenizerFolder, paths: tuple[Path, ...]) -> Tokenizer:
    if here.model_type == "whisper" and len(paths) > 1:  # OpenAI keeps both of its vocabularies in one folder
        paths = (
            tuple(path for path in paths if path.stem == whisper_vocabulary(here.model_vocab_size)) or paths
        )
    if len(paths) > 1:
        names = [path.name for path in paths]
        raise TokenizerError(f"{here.path} has several .tiktoken files", seen=names, allowed="one")
    if here.model_type == "whisper":
        rules = whisper_rules(here.model_vocab_size)
        found = TiktokenTokenizer.from_ranks(here, paths[0], rules, needs_model_config=True)
        if found.vocab_size != here.model_vocab_size:  # another model's: special tokens would be off
            raise TokenizerError(
                f"{paths[0]} is not the vocabulary of this model",
                seen=f"{found.vocab_size} tokens with the special ones",
                allowed=here.model_vocab_size,
                fix=f"put {whisper_vocabulary(here.model_vocab_size)}.tiktoken there",
            )
        return found
    _check_class(here, (QWEN1_CLASS,))
    by_name = here.tokenizer_class == QWEN1_CLASS or paths[0].name == "qwen.tiktoken"
    if not by_name and here.model_type != "qwen":
        raise TokenizerError(
            f"nothing says which rules {paths[0]} follows",
            allowed="qwen.tiktoken, or any name beside the config.json of Qwen v1 or Whisper",
            fix=f'put "tokenizer_class": "{QWEN1_CLASS}" into tokenizer_config.json',
        )
    return TiktokenTokenizer.from_ranks(here, paths[0], QWEN, needs_model_config=not by_name)


def _load_byte_level(here: TokenizerFolder, vocabulary: Path, merges: Path) -> Tokenizer:
    _check_class(here, (GPT2_CLASS, QWEN2_CLASS))
    by_model = here.tokenizer_class is None and here.model_type in QWEN2_MODELS
    is_qwen2 = by_model or here.tokenizer_class == QWEN2_CLASS
    ids = read_object(vocabulary)
    bad = [token for token, i in ids.items() if isinstance(i, bool) or not isinstance(i, int) or i < 0]
    if bad or not ids or len(set(ids.values())) != len(ids):
        seen = f"{bad[0]!r}: {ids[bad[0]]!r}" if bad else f"{len(ids)} tokens, {len(set(ids.values()))} ids"
        raise TokenizerError(f"{vocabulary} must give every token a unique id", seen=seen)
    pairs = []
    for number, line in enumerate(file_text(merges).split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.removesuffix("\r").split(" ")
        if len(parts) != 2 or not all(parts):
            raise TokenizerError(f"{merges}, line {number} is not a pair of tokens", seen=line[:80])
        pairs.append((parts[0], parts[1]))
    here.set_defaults(_class_defaults(QWEN2_CLASS if is_qwen2 else GPT2_CLASS))
    with library_errors(f"{merges} does not fit {vocabulary.name}", TokenizerError, "copy both files again"):
        backend = byte_level_bpe(ids, pairs, split=QWEN_SPLIT if is_qwen2 else None, normalise=is_qwen2)
        return FastTokenizer(backend, here, here.files(vocabulary, merges, needs_model_config=by_model))


def _check_class(here: TokenizerFolder, allowed: tuple[str, ...]) -> None:
    """Refuse a folder that names another tokenizer."""
    name = here.tokenizer_class
    if name is not None and name not in (*allowed, "PreTrainedTokenizer", "TokenizersBackend"):
        raise TokenizerError(
            f"the tokenizer that {here.path} names cannot be read from its files",
            seen=name,
            allowed=allowed,
            fix="add its tokenizer.json (save_pretrained of the fast tokenizer writes one)",
        )
