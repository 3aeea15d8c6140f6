"""Whether a checkpoint's head is its embedding, as its tensors say.

Covers the comparison of the two where config.json ties them and the checkpoint stores both.

    config = untied_if_stored(architecture, config, checkpoint)
"""

from __future__ import annotations

from ingot.checkpoint.checkpoint_reader import Checkpoint
from ingot.checkpoint.weight_map import stored_copies
from ingot.config.decoder_config import DecoderConfig
from ingot.models.architecture import Architecture


def untied_if_stored(
    architecture: Architecture, config: DecoderConfig, checkpoint: Checkpoint
) -> DecoderConfig:
    """The config, untied where the stored head is another tensor than the embedding.

    ``tie_word_embeddings`` is often left at a default when a fine-tune unties the two. The stored head is the
    one that was trained, and the one that transformers 5 uses. Reads both tensors, if both are stored.

    Raises:
        CheckpointError: one of the two cannot be read.
    """
    if not config.tie_word_embeddings:
        return config
    pairs = stored_copies(architecture.weight_map(config, None), checkpoint.tensors)
    if all(_same(checkpoint, *pair) for pair in pairs):
        return config
    return config.replace(tie_word_embeddings=False)


def _same(checkpoint: Checkpoint, one: str, other: str) -> bool:
    first, second = checkpoint.read(one), checkpoint.read(other)
    return first.shape == second.shape and bool((first == second).all())
