"""Bytes of tokens (GPT-2's alphabet, SentencePiece's pieces), and the stream that joins them to text."""

from __future__ import annotations

import codecs
import re

SPACE_MARK = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's ``bytes_to_unicode``).

    Printable Latin-1 characters stand for themselves, the other bytes, in order, for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return alphabet


def byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """Bytes of a byte-level token; a token with a character outside the alphabet is plain text."""
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


def piece_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: ``<0xE4>`` is one byte, ``▁`` a space."""
    match = _BYTE_PIECE.fullmatch(piece)
    if match:
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode()


class Utf8Stream:
    """Joins bytes to text and never returns half a character.

    Args:
        per_byte: what an invalid sequence becomes: one U+FFFD for every byte (SentencePiece), or one for
            every maximal part of a character (byte-level BPE, as in Python, Rust and the Unicode standard).
        strip_space: drop one space at the very start of the text (SentencePiece's dummy prefix).
    """

    def __init__(self, *, per_byte: bool = False, strip_space: bool = False) -> None:
        errors = "surrogateescape" if per_byte else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._per_byte = per_byte
        self._strip_space = strip_space

    def feed(self, data: bytes) -> str:
        """The characters that ``data`` completes."""
        return self._text(data, final=False)

    def flush(self) -> str:
        """What is left, incomplete characters as U+FFFD."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, *, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._per_byte:
            text = _ESCAPED_BYTE.sub("\ufffd", text)
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        return text
