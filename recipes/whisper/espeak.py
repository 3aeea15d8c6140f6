"""Speech from text by espeak-ng, with the time of each word and phoneme.

espeak-ng is under the GPL: this recipe loads it to make training data. Ingot never imports it, and neither
the library nor its data is shipped.

    spoken = Espeak().speak("Anna buys a lamp.", "en-us+f2", rate=160, pitch=50)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SYNCHRONOUS, _PHONEME_EVENTS, _PHONEME_IPA, _KEEP_RUNNING = 2, 1, 2, 0x8000
_WORD, _PHONEME = 1, 7
_RATE, _PITCH, _RANGE = 1, 3, 4
_CHARACTERS, _UTF8 = 1, 1
_BUFFER_MS = 200
HINT = "python -m pip install espeakng-loader"


class _Name(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user", ctypes.c_void_p),
        ("id", _Name),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


@dataclass(frozen=True)
class Spoken:
    """One utterance.

    Attributes:
        samples: int16 [N].
        rate: samples per second.
        words: (index of the first character in the text, sample) of each word as espeak counts them.
        phonemes: (name, sample at which it begins), in order; the empty name is a pause.
    """

    samples: np.ndarray
    rate: int
    words: Sequence[tuple[int, int]]
    phonemes: Sequence[tuple[str, int]]


def available() -> bool:
    """Whether the package with the library is installed."""
    try:
        import espeakng_loader  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        return False
    return True


class Espeak:
    """The library, once per process.

    Raises:
        ImportError: espeakng-loader is not installed.
        OSError: the library does not start.
    """

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        folder = str(Path(espeakng_loader.get_data_path()).parent).encode()
        options = _PHONEME_EVENTS | _PHONEME_IPA | _KEEP_RUNNING
        self.rate: int = self._library.espeak_Initialize(_SYNCHRONOUS, _BUFFER_MS, folder, options)
        if self.rate <= 0:
            raise OSError("espeak-ng did not start")
        self._pieces: list[np.ndarray] = []
        self._words: list[tuple[int, int]] = []
        self._phonemes: list[tuple[str, int]] = []
        self._callback = _Callback(self._hear)  # the library keeps the pointer: it must stay alive
        self._library.espeak_SetSynthCallback(self._callback)

    def speak(self, text: str, voice: str, rate: int, pitch: int, pitch_range: int = 50) -> Spoken:
        """Say ``text``.

        Args:
            voice: a language and perhaps a variant, such as "en-gb+m3".
            rate: words per minute, 80 to 450.
            pitch: 0 to 100; pitch_range: 0 (monotone) to 100.

        Raises:
            ValueError: espeak has no such voice.
        """
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"espeak-ng has no voice {voice!r}")
        for parameter, value in ((_RATE, rate), (_PITCH, pitch), (_RANGE, pitch_range)):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._pieces, self._words, self._phonemes = [], [], []
        data = text.encode()
        self._library.espeak_Synth(data, len(data) + 1, 0, _CHARACTERS, 0, _UTF8, None, None)
        samples = np.concatenate(self._pieces) if self._pieces else np.zeros(0, np.int16)
        return Spoken(samples, self.rate, tuple(self._words), tuple(self._phonemes))

    def _hear(self, wave: Any, count: int, events: Any) -> int:
        if count and wave:
            self._pieces.append(np.ctypeslib.as_array(wave, (count,)).copy())
        index = 0
        while events[index].type:
            event = events[index]
            if event.type == _WORD:
                self._words.append((event.text_position - 1, event.sample))
            elif event.type == _PHONEME:
                self._phonemes.append((event.id.string.decode("utf-8", "replace"), event.sample))
            index += 1
        return 0
