"""Heads of the published Whisper models whose cross-attention follows the speech, and so times words.

Covers the lists, which OpenAI publishes, as does Hugging Face (``alignment_heads`` of
generation_config.json), and how a model is recognized by its sizes. Independent of files.

    heads = published_heads({"decoder_layers": 4, "d_model": 384, "vocab_size": 51865}, "tiny")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ENGLISH, _MULTILINGUAL, _LARGE_V3 = 51864, 51865, 51866  # sizes of the published vocabularies
Heads = tuple[tuple[int, int], ...]  # (layer, head)

LARGE_V1: Heads = (
    (9, 19), (11, 2), (11, 4), (11, 17), (22, 7), (22, 11), (22, 17), (23, 2), (23, 15),
)  # fmt: skip
# (layers of the decoder, width, vocabulary) → heads
PUBLISHED: dict[tuple[int, int, int], Heads] = {
    (4, 384, _ENGLISH): ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)),
    (4, 384, _MULTILINGUAL): ((2, 2), (3, 0), (3, 2), (3, 3), (3, 4), (3, 5)),
    (6, 512, _ENGLISH): ((3, 3), (4, 7), (5, 1), (5, 5), (5, 7)),
    (6, 512, _MULTILINGUAL): ((3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6)),
    (12, 768, _ENGLISH): (
        (6, 6), (7, 0), (7, 3), (7, 8), (8, 2), (8, 5), (8, 7), (9, 0), (9, 4), (9, 8), (9, 10), (10, 0),
        (10, 1), (10, 2), (10, 3), (10, 6), (10, 11), (11, 2), (11, 4),
    ),
    (12, 768, _MULTILINGUAL): (
        (5, 3), (5, 9), (8, 0), (8, 4), (8, 7), (8, 8), (9, 0), (9, 7), (9, 9), (10, 5),
    ),
    (24, 1024, _ENGLISH): (
        (11, 4), (14, 1), (14, 12), (14, 14), (15, 4), (16, 0), (16, 4), (16, 9), (17, 12), (17, 14),
        (18, 7), (18, 10), (18, 15), (20, 0), (20, 3), (20, 9), (20, 14), (21, 12),
    ),
    (24, 1024, _MULTILINGUAL): ((13, 15), (15, 4), (15, 15), (16, 1), (20, 0), (23, 4)),
    (32, 1280, _MULTILINGUAL): (  # large-v2; large-v1 has the same sizes
        (10, 12), (13, 17), (16, 11), (16, 12), (16, 13), (17, 15), (17, 16), (18, 4), (18, 11), (18, 19),
        (19, 11), (21, 2), (21, 3), (22, 3), (22, 9), (22, 12), (23, 5), (23, 7), (23, 13), (25, 5), (26, 1),
        (26, 12), (27, 15),
    ),
    (32, 1280, _LARGE_V3): (
        (7, 0), (10, 17), (12, 18), (13, 12), (16, 1), (17, 14), (19, 11), (21, 4), (24, 1), (25, 6),
    ),
    (4, 1280, _LARGE_V3): ((2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14)),  # large-v3-turbo
}  # fmt: skip


def published_heads(config: Mapping[str, Any], name: str) -> Heads | None:
    """(layer, head) of each, for the published model with this config.json; None: none has its sizes.

    Args:
        name: of the file, without its ending: ``large-v1`` has the sizes of ``large-v2``.
    """
    sizes = (config["decoder_layers"], config["d_model"], config["vocab_size"])
    heads = PUBLISHED.get(sizes)
    return LARGE_V1 if heads is not None and sizes[0] == 32 and "large-v1" in name else heads
