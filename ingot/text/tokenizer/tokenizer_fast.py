"""Tokenizers run by the ``tokenizers`` library: tokenizer.json, or byte-level BPE built in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from ingot.errors import TokenizerError
from ingot.text.tokenizer.token_text import (
    SPACE_MARK,
    Utf8Stream,
    byte_alphabet,
    byte_level_bytes,
    piece_bytes,
)
from ingot.text.tokenizer.tokenizer_base import CANNOT_ENCODE, Tokenizer, check_text, library_errors
from ingot.text.tokenizer.tokenizer_folder import TURN_TOKENS, AddedToken, TokenizerFolder

_NUM_PROBES = 64
# Hugging Face's Llama classes put the begin token themselves, whatever tokenizer.json says.
LLAMA_CLASSES = ("LlamaTokenizer", "LLaMATokenizer", "CodeLlamaTokenizer")


class FastTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer``.

    Where the decoder is byte-level or SentencePiece's with byte fallback, decoding joins bytes, which keeps a
    valid character next to invalid bytes as SentencePiece does (the library's ByteFallback loses it). With
    any other decoder the library decodes.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, folder: TokenizerFolder, files: tuple[Path, ...]
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        _add_missing(backend, folder)
        self._backend = backend
        self._literals: dict[bool, tokenizers.Tokenizer] = {}
        added = [
            AddedToken(token.content, i, special=token.special, lstrip=token.lstrip, rstrip=token.rstrip)
            for i, token in backend.get_added_tokens_decoder().items()
        ]
        bos_id = _id_of(backend, folder.named_token("bos_token"))
        eos_id = _id_of(backend, folder.named_token("eos_token"))
        prefix_ids, suffix_ids = _template(backend)
        own_begin = folder.tokenizer_class in LLAMA_CLASSES
        if own_begin or backend.post_processor is None:  # vocab.json has no template: OPT's flag puts </s>
            puts_bos = bos_id is not None and folder.flag("add_bos_token", own_begin)
            prefix_ids = (bos_id,) if puts_bos and bos_id is not None else ()
            suffix_ids = (eos_id,) if eos_id is not None and folder.flag("add_eos_token", False) else ()
        super().__init__(
            added,
            vocab_size=backend.get_vocab_size(with_added_tokens=False),
            bos_id=bos_id,
            eos_id=eos_id,
            files=files,
            prefix_ids=prefix_ids,
            suffix_ids=suffix_ids,
        )
        self._decoding = _decoding(_state(backend.decoder))
        self._spaces_first_only = _is_first_only(_state(backend.pre_tokenizer))
        self._alphabet = byte_alphabet()
        self.joins_bytes = self._decoding is not None

    @classmethod
    def from_json(cls, folder: TokenizerFolder, path: Path) -> FastTokenizer:
        """Read a tokenizer.json. Raises ``TokenizerError`` if the library refuses the file."""
        what = f"the tokenizers library cannot read {path}"
        with library_errors(what, TokenizerError, "copy the file again, or update the tokenizers package"):
            backend = tokenizers.Tokenizer.from_file(str(path))
            added = backend.get_added_tokens_decoder().values()
            if any(token.content in TURN_TOKENS and not token.special for token in added):
                tree = json.loads(backend.to_str())
                for token in tree["added_tokens"]:
                    token["special"] = token["special"] or token["content"] in TURN_TOKENS
                backend = tokenizers.Tokenizer.from_str(json.dumps(tree))
            return cls(backend, folder, folder.files(path))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """See ``Tokenizer.encode``; the library itself parses special tokens."""
        if not parse_special:
            return super().encode(text, add_special_tokens=add_special_tokens, parse_special=False)
        check_text(text)
        with library_errors(CANNOT_ENCODE):
            ids = self._backend.encode(text, add_special_tokens=False).ids
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        if self._decoding is not None:
            return super().decode(ids, skip_special_tokens=skip_special_tokens)
        known = [int(i) for i in ids if 0 <= i < self.vocab_size]
        with library_errors("the tokenizer cannot decode these ids"):
            return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def text_stream(self) -> Utf8Stream:
        if self._decoding in ("pieces", "stripped pieces"):
            return Utf8Stream(per_byte=True, strip_space=self._decoding == "stripped pieces")
        return Utf8Stream()

    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        with library_errors(CANNOT_ENCODE):
            return self._literal(first=first).encode(text, add_special_tokens=False).ids

    def patterns(self) -> list[str]:
        """Every string that its normalizer, pre-tokenizer and decoder hold."""
        parts = (self._backend.normalizer, self._backend.pre_tokenizer, self._backend.decoder)
        return [text for part in parts for text in _strings(_state(part))]

    def _vocabulary_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._decoding == "bytes":
            return byte_level_bytes(token, self._alphabet)
        return piece_bytes(token)

    def _literal(self, *, first: bool) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as text, since the library's switch is on the tokenizer, which
        threads share. Where only the start of a sequence gets a leading space, text in the middle has a copy
        that adds none.
        """
        first = first or not self._spaces_first_only
        if first not in self._literals:
            data = self._backend.to_str()
            if not first:
                tree = json.loads(data)
                data = json.dumps({**tree, "pre_tokenizer": _never_prepend(tree["pre_tokenizer"])})
            copy = tokenizers.Tokenizer.from_str(data)
            copy.encode_special_tokens = True
            self._literals[first] = copy
        return self._literals[first]


def byte_level_bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], *, split: str | None, normalise: bool
) -> tokenizers.Tokenizer:
    """Byte-level BPE (Radford et al. 2019) of a vocabulary and its merges in order of priority.

    Args:
        split: pre-tokenizer regex; None is GPT-2's own.
        normalise: apply NFC first, as Qwen does.
    """
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated")
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut, level])
    else:
        backend.pre_tokenizer = level
    if normalise:
        backend.normalizer = tokenizers.normalizers.NFC()
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _add_missing(backend: tokenizers.Tokenizer, folder: TokenizerFolder) -> None:
    """Add the tokens that only the JSON files next to tokenizer.json name."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in folder.added_tokens():
        if token.text in known:
            continue
        known.add(token.text)
        entry = tokenizers.AddedToken(
            token.text, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=token.special
        )
        if token.special:
            backend.add_special_tokens([entry])
        else:
            backend.add_tokens([entry])
        if backend.token_to_id(token.text) != token.id:
            raise TokenizerError(
                f"added token {token.text!r} of {folder.path} does not get its own id",
                seen=backend.token_to_id(token.text),
                allowed=token.id,
                fix="added_tokens_decoder or added_tokens.json",
            )
    names = [text for text in folder.special_texts() if text not in known]
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, normalized=False, special=True) for text in names]
    )


def _template(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the post-processor puts before and after a text, found with a text that has ids."""
    tokens = (backend.id_to_token(i) or "" for i in range(_NUM_PROBES))
    for text in ("a", *tokens):
        bare = backend.encode(text, add_special_tokens=False).ids
        framed = backend.encode(text).ids
        places = [n for n in range(len(framed)) if framed[n : n + len(bare)] == bare]
        if bare and places:
            return tuple(framed[: places[0]]), tuple(framed[places[0] + len(bare) :])
    return tuple(backend.encode("").ids), ()


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _state(component: Any) -> dict[str, Any]:
    """The JSON of a decoder or pre-tokenizer."""
    return {} if component is None else json.loads(component.__getstate__())


def _strings(state: Any) -> Iterator[str]:
    if isinstance(state, str):
        yield state
    elif isinstance(state, (dict, list)):
        for inner in state.values() if isinstance(state, dict) else state:
            yield from _strings(inner)


def _decoding(decoder: dict[str, Any]) -> str | None:
    """How ids become bytes: "bytes" (byte-level), "pieces", "stripped pieces" (SentencePiece), or None."""
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return "bytes"
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or steps[0].get("content") != " ":
        return None
    if steps[0].get("pattern") != {"String": SPACE_MARK}:
        return None
    if kinds[3:] == []:
        return "pieces"
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return "stripped pieces" if steps[3:] == [strip] else None


def _is_first_only(state: Any) -> bool:
    """Whether a Metaspace step adds its space at the start of the sequence alone."""
    if isinstance(state, dict):
        return state.get("prepend_scheme") == "first" or any(map(_is_first_only, state.values()))
    return isinstance(state, list) and any(map(_is_first_only, state))


def _never_prepend(state: Any) -> Any:
    """A pre-tokenizer's JSON whose Metaspace step adds no space."""
    if isinstance(state, dict):
        return {k: "never" if k == "prepend_scheme" else _never_prepend(v) for k, v in state.items()}
    return [_never_prepend(item) for item in state] if isinstance(state, list) else state
