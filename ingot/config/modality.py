"""The modalities of models, and what messages call them.

What a build needs of a modality is registered where it is used: golden inputs in building/golden/,
calibration samples in building/calibration/sample_readers.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ingot.errors import ConfigError

TRANSCRIBE = "`ingot transcribe ENGINE FILE` makes text of speech"
BENCH_TRANSCRIBE = "`ingot bench transcribe ENGINE` measures a speech engine"
EVAL_WER = "`ingot eval wer ENGINE` with `data=MANIFEST` evaluates a speech engine"


@dataclass(frozen=True)
class Modality:
    """One kind of input.

    Attributes:
        name: in manifests.
        model: what messages call a model of it.
        takes_text: a user's text is part of the prompt; a transcript follows from the recording alone.
        in_messages: parts of messages may name an input, as a file or data URL.
        joins_positions: an encoder may have more hidden states inside than outputs.
        private: the warning about a file with hidden states of a request.
    """

    name: str
    model: str
    takes_text: bool = True
    in_messages: bool = False
    joins_positions: bool = False
    private: str = (
        "The file contains the hidden states of a prompt, from which its words can be guessed: "
        "share it only as you would share the prompt."
    )


TEXT = Modality("text", "a model of text")
SPEECH = Modality(
    "speech",
    "a model of speech",
    takes_text=False,
    private="The file contains what the model makes of a recording and its transcript, from which the words "
    "can be guessed: share it only as you would share the recording.",
)
PICTURE = Modality(
    "picture",
    "a model of pictures and text",
    in_messages=True,
    joins_positions=True,
    private="The file contains what the model makes of a picture and a prompt, from which both can be "
    "guessed: share it only as you would share the picture.",
)
MODALITIES = {one.name: one for one in (TEXT, SPEECH, PICTURE)}


def register_modality(modality: Modality) -> None:
    """Add a modality that encoders can name; raises ``ValueError`` where another one has its name."""
    if MODALITIES.get(modality.name, modality) != modality:
        raise ValueError(f"another modality is named {modality.name}")
    MODALITIES[modality.name] = modality


def modality_named(name: str) -> Modality:
    """An encoder's modality; raises ``ConfigError`` where there is none of that name."""
    found = MODALITIES.get(name)
    if found is None or found is TEXT:
        allowed = [one.name for one in MODALITIES.values() if one is not TEXT]
        raise ConfigError("unknown modality of an encoder", seen=name, allowed=allowed)
    return found


def expect_text(modality: Modality, what: str, instead: str = TRANSCRIBE) -> None:
    """Raise ``ConfigError`` where a model takes no text. ``what`` was asked for, as a sentence's subject."""
    if not modality.takes_text:
        raise ConfigError(f"{what} needs a model of text", seen=modality.model, field="engine", fix=instead)
