"""The vocabulary, as LLaMA's: 512 pieces of byte-pair encoding with byte fallback, learned from the talk.

python -m recipes.vision.vocabulary --out models/pocket-vision/llama
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece

from recipes.vision.talk import END, Round, corpus, prompt

PIECES = 512
_CONTROL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


@dataclass(frozen=True)
class Example:
    """Token ids of a conversation: the picture's embeddings stand between ``before`` and ``after``."""

    before: list[int]
    after: list[int]
    answer: list[int]


class Vocabulary:
    """Token ids of prompts and answers, as the original makes them: each text by itself, one BOS."""

    def __init__(self, folder: Path) -> None:
        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        self.begin, self.end = self.processor.bos_id(), self.processor.eos_id()
        self.size: int = self.processor.get_piece_size()

    def example(self, rounds: Sequence[Round], system: bool = True) -> Example:
        """A conversation whose last answer is to be learned; ``###`` and </s> end it."""
        before, after = prompt(rounds, system)
        answer = self.processor.encode(rounds[-1].answer + END)
        return Example(
            [self.begin, *self.processor.encode(before)], self.processor.encode(after), [*answer, self.end]
        )

    def text(self, ids: Sequence[int]) -> str:
        """An answer's text: what comes before ``###`` and </s>."""
        kept = list(ids)
        if self.end in kept:
            kept = kept[: kept.index(self.end)]
        return str(self.processor.decode(kept)).split(END)[0].strip()


def learn() -> bytes:
    """tokenizer.model, the same bytes each time."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        vocab_size=PIECES,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json of a LLaMA folder."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        **{
            name: {
                "__type": "AddedToken",
                "content": text,
                "lstrip": False,
                "normalized": True,
                "rstrip": False,
                "single_word": False,
            }
            for name, text in _CONTROL.items()
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "pad_token": None,
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
    }


def write(folder: Path) -> None:
    """Learn the vocabulary and write a tokenizer folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(learn())
    for name, content in (("tokenizer_config", tokenizer_config()), ("special_tokens_map", _CONTROL)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Learn the vocabulary and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
