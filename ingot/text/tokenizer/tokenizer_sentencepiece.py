"""SentencePiece vocabularies (LLaMA, Vicuna).

Covers tokenizer.model and the begin and end tokens that Hugging Face puts around its text. Does not know when
a folder should use it.

    SentencePieceTokenizer.from_model(TokenizerFolder(folder), folder / "tokenizer.model")
"""

from __future__ import annotations

from pathlib import Path

import sentencepiece

from ingot.errors import TokenizerError
from ingot.text.tokenizer.token_text import SPACE_MARK, Utf8Stream, piece_bytes
from ingot.text.tokenizer.tokenizer_base import OrdinaryAddedTokens, Tokenizer
from ingot.text.tokenizer.tokenizer_folder import COPY_AGAIN, AddedToken, TokenizerFolder

# A protobuf message appended to another is merged into it: ModelProto.normalizer_spec.add_dummy_prefix =
# false.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with Hugging Face's Llama rules.

    Control pieces written in a text are special tokens. With ``legacy`` (the default of
    tokenizer_config.json) the text after each special token starts with the dummy-prefix space again;
    without it only the first text.
    """

    def __init__(self, model: bytes, folder: TokenizerFolder, files: tuple[Path, ...]) -> None:
        self._processor = _processor(model)
        added = _special_pieces(self._processor, folder)
        ids = {token.text: token.id for token in added}
        bos_id = _named_id(folder, "bos_token", ids, self._processor.bos_id())
        eos_id = _named_id(folder, "eos_token", ids, self._processor.eos_id())
        super().__init__(
            added,
            vocab_size=self._processor.get_piece_size(),
            bos_id=bos_id,
            eos_id=eos_id,
            files=files,
            prefix_ids=(bos_id,) if bos_id is not None and folder.flag("add_bos_token", True) else (),
            suffix_ids=(eos_id,) if eos_id is not None and folder.flag("add_eos_token", False) else (),
        )
        self._ordinary = OrdinaryAddedTokens(added)
        self._has_prefix = self._processor.encode("a", out_type=str)[0].startswith(SPACE_MARK)
        is_legacy = folder.flag("legacy", True)
        self._inner = self._processor if is_legacy else _processor(model + _NO_DUMMY_PREFIX)

    @classmethod
    def from_model(cls, folder: TokenizerFolder, path: Path) -> SentencePieceTokenizer:
        """Read a tokenizer.model.

        Raises:
            TokenizerError: the file is no SentencePiece model.
        """
        try:
            return cls(path.read_bytes(), folder, folder.files(path))
        except (OSError, RuntimeError) as error:
            what = f"{path} is not a SentencePiece model"
            raise TokenizerError(what, seen=error, fix=COPY_AGAIN) from error

    def text_stream(self) -> Utf8Stream:
        return Utf8Stream(per_byte=True, strip_space=self._has_prefix)

    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        ids: list[int] = []
        for part in self._ordinary.split(text):
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


def _special_pieces(
    processor: sentencepiece.SentencePieceProcessor, folder: TokenizerFolder
) -> list[AddedToken]:
    """Control and unknown pieces of the model, then the tokens that JSON files add."""
    size = processor.get_piece_size()
    special = {i for i in range(size) if processor.is_control(i) or processor.is_unknown(i)}
    special |= {processor.piece_to_id(text) for text in folder.special_texts()} - {processor.unk_id()}
    tokens = {i: AddedToken(processor.id_to_piece(i), i) for i in sorted(special)}
    for token in folder.added_tokens():
        tokens.setdefault(token.id, token)
    return list(tokens.values())


def _named_id(folder: TokenizerFolder, name: str, ids: dict[str, int], fallback: int) -> int | None:
    """Id of a named token; the model's own when no file names one or the name is not in the vocabulary."""
    named = ids.get(folder.named_token(name) or "", fallback)
    return named if named >= 0 else None
