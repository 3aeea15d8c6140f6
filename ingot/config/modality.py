"""What goes into a model beside token ids, and what messages call it.

Covers the three modalities as data.

    config.modality.takes_text          # False: its answers follow from a recording
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
        takes_text: whether a user's text is part of a prompt; of speech the answers follow from the recording
            alone, by the rules of transcripts.
    """

    name: str
    model: str
    takes_text: bool = True


TEXT = Modality("text", "a model of text")
SPEECH = Modality("speech", "a model of speech", takes_text=False)
PICTURE = Modality("picture", "a model of pictures and text")
MODALITIES = {one.name: one for one in (TEXT, SPEECH, PICTURE)}


def modality_named(name: str) -> Modality:
    """Raises:
    ConfigError: an encoder takes nothing of that name.
    """
    found = MODALITIES.get(name)
    if found is None or found is TEXT:
        allowed = [one.name for one in MODALITIES.values() if one is not TEXT]
        raise ConfigError("unknown modality of an encoder", seen=name, allowed=allowed)
    return found


def expect_text(modality: Modality, what: str, instead: str = TRANSCRIBE) -> None:
    """Refuse a model without text in its prompts where text goes in.

    Args:
        what: what was asked for, as the subject of a sentence.

    Raises:
        ConfigError: the model's answers follow from other inputs alone.
    """
    if not modality.takes_text:
        raise ConfigError(f"{what} needs a model of text", seen=modality.model, field="engine", fix=instead)
