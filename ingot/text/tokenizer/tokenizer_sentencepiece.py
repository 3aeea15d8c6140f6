"""SentencePiece vocabularies (LLaMA, Vicuna)."""

from __future__ import annotations

from pathlib import Path

import sentencepiece

from ingot.errors import TokenizerError
from ingot.text.tokenizer.token_text import SPACE_MARK, Utf8Stream, piece_bytes
from ingot.text.tokenizer.tokenizer_base import Tokenizer, split_at, token_pattern
from ingot.text.tokenizer.tokenizer_folder import COPY_AGAIN, AddedToken, TokenizerFolder

# ModelProto.normalizer_spec.add_dummy_prefix = false; an appended protobuf message is merged.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with Hugging Face's Llama rules.

    Control pieces written in a text are special tokens. With ``legacy`` (the default of
    tokenizer_config.json) the text after each special token starts with the dummy-prefix space again;
    without it only the first text.
    """

    def __init__(self, model: bytes, folder: TokenizerFolder, files: tuple[Path, ...]) -> None:
        self._processor = _processor(model)
        size, unknown = self._processor.get_piece_size(), self._processor.unk_id()
        special = {i for i in range(size) if self._processor.is_control(i) or self._processor.is_unknown(i)}
        special |= {self._processor.piece_to_id(text) for text in folder.special_texts()} - {unknown}
        tokens = {i: AddedToken(self._processor.id_to_piece(i), i) for i in sorted(special)}
        for token in folder.added_tokens():
            tokens.setdefault(token.id, token)
        added = list(tokens.values())
        ids = {token.text: token.id for token in added}
        bos_id = _named_id(folder, "bos_token", ids, self._processor.bos_id())
        eos_id = _named_id(folder, "eos_token", ids, self._processor.eos_id())
        super().__init__(
            added,
            vocab_size=size,
            bos_id=bos_id,
            eos_id=eos_id,
            files=files,
            prefix_ids=(bos_id,) if bos_id is not None and folder.flag("add_bos_token", True) else (),
            suffix_ids=(eos_id,) if eos_id is not None and folder.flag("add_eos_token", False) else (),
        )
        # The library does not cut text at added tokens that are not special.
        self._ordinary = {one.text: AddedToken(one.text, one.id) for one in added if not one.special}
        self._ordinary_pattern = token_pattern(self._ordinary)
        self._has_prefix = self._processor.encode("a", out_type=str)[0].startswith(SPACE_MARK)
        is_legacy = folder.flag("legacy", True)
        self._inner = self._processor if is_legacy else _processor(model + _NO_DUMMY_PREFIX)

    @classmethod
    def from_model(cls, folder: TokenizerFolder, path: Path) -> SentencePieceTokenizer:
        """Read a tokenizer.model; raises ``TokenizerError`` where it is not a SentencePiece model."""
        try:
            return cls(path.read_bytes(), folder, folder.files(path))
        except (OSError, RuntimeError) as error:
            what = f"{path} is not a SentencePiece model"
            raise TokenizerError(what, seen=error, fix=COPY_AGAIN) from error

    def text_stream(self) -> Utf8Stream:
        return Utf8Stream(per_byte=True, strip_space=self._has_prefix)

    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        ids: list[int] = []
        for part in split_at(text, self._ordinary_pattern, self._ordinary):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += (self._processor if first else self._inner).encode(part)
            first = False
        return ids

    def _vocabulary_bytes(self, token_id: int) -> bytes:
        if token_id >= self._processor.get_piece_size():
            return b""
        return piece_bytes(self._processor.id_to_piece(token_id))


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    if not model:
        raise RuntimeError("the file is empty")
    processor = sentencepiece.SentencePieceProcessor()
    processor.load_from_serialized_proto(model)
    return processor


def _named_id(folder: TokenizerFolder, name: str, ids: dict[str, int], fallback: int) -> int | None:
    """Id of a named token; the model's own when no file has one or it is not in the vocabulary."""
    named = ids.get(folder.named_token(name) or "", fallback)
    return named if named >= 0 else None
