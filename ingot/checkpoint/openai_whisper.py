"""OpenAI's Whisper files (``tiny.en.pt``, ``large-v3.pt``) as Hugging Face would store them.

Names of tensors, config.json of their ``dims``, and the heads whose cross-attention follows the speech and so
times words, which OpenAI and Hugging Face publish (``alignment_heads`` of generation_config.json).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ingot.checkpoint.checkpoint_files import shorten
from ingot.errors import CheckpointError

STATE = "model_state_dict"
_SUFFIX = ".pt"
Heads = tuple[tuple[int, int], ...]  # (layer, head)
_DIMS = {
    "n_vocab": "vocab_size",
    "n_mels": "num_mel_bins",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_text_ctx": "max_target_positions",
    "n_text_state": "d_model",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
}
# n_vocab of the published models: those of English alone have one token of text less than the others.
_ENGLISH, _MULTILINGUAL, _LARGE_V3 = 51864, 51865, 51866
_ENGLISH_END = 50256
_WHOLE = {
    "decoder.token_embedding": "decoder.embed_tokens",
    "encoder.ln_post": "encoder.layer_norm",
    "decoder.ln": "decoder.layer_norm",
    "encoder.conv1": "encoder.conv1",
    "encoder.conv2": "encoder.conv2",
}
_PARTS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
_OF_LAYER = (
    {"attn_ln": "self_attn_layer_norm", "cross_attn_ln": "encoder_attn_layer_norm"}
    | {"mlp.0": "fc1", "mlp.2": "fc2", "mlp_ln": "final_layer_norm"}
    | {f"attn.{theirs}": f"self_attn.{name}" for theirs, name in _PARTS.items()}
    | {f"cross_attn.{theirs}": f"encoder_attn.{name}" for theirs, name in _PARTS.items()}
)
_LAYER = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)")
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


def is_openai(path: Path) -> bool:
    """Whether a path is meant as such a file; it may not be there."""
    return path.suffix == _SUFFIX and not path.is_dir()


def config_of(path: Path, values: Mapping[str, object]) -> dict[str, Any]:
    """config.json of a file's ``dims``, which are among the ``values`` beside its tensors.

    Raises CheckpointError where they are missing or not positive integers, or the halves differ in width.
    """
    dims = values.get("dims")
    if not isinstance(dims, Mapping):
        raise CheckpointError(
            f"{path} is not a checkpoint of OpenAI's Whisper: it has no dims",
            seen=shorten(sorted(map(str, values))),
            allowed=f"a dictionary of dims and {STATE}",
            fix="give the original file, or a Hugging Face folder",
        )
    odd = {name: dims.get(name) for name in _DIMS if not _is_size(dims.get(name))}
    if odd:
        wrong = [f"{name}: {'missing' if value is None else repr(value)[:40]}" for name, value in odd.items()]
        raise CheckpointError(
            f"dims of {path} are incomplete",
            seen=shorten(wrong, limit=len(wrong)),
            allowed="a positive integer each",
            fix="download the file again",
        )
    if dims["n_audio_state"] != dims["n_text_state"]:
        raise CheckpointError(
            f"encoder and decoder of {path} differ in width",
            seen=f"n_audio_state {dims['n_audio_state']}, n_text_state {dims['n_text_state']}",
            allowed="the same, as in every published Whisper",
        )
    size = dims["n_text_state"]
    config = {ours: dims[theirs] for theirs, ours in _DIMS.items()}
    config |= {"encoder_ffn_dim": 4 * size, "decoder_ffn_dim": 4 * size, "activation_function": "gelu"}
    vocab_size, names = dims["n_vocab"], ("bos_token_id", "eos_token_id", "pad_token_id")
    if vocab_size >= _ENGLISH:  # a published vocabulary says which ids begin and end a text
        end = _ENGLISH_END + (vocab_size > _ENGLISH)
        config |= dict.fromkeys(names, end) | {"decoder_start_token_id": end + 1}
    return {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", **config}


def generation_of(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json of a file: of a published model's sizes it has the heads that time words."""
    heads = published_heads(config, path.stem)
    return {} if heads is None else {"alignment_heads": [list(head) for head in heads]}


def published_heads(config: Mapping[str, Any], name: str) -> Heads | None:
    """(layer, head) of each, for the published model with this config.json; None: none has its sizes.

    ``name`` of the file, without its ending: ``large-v1`` has the sizes of ``large-v2``.
    """
    sizes = (config["decoder_layers"], config["d_model"], config["vocab_size"])
    heads = PUBLISHED.get(sizes)
    return LARGE_V1 if heads is not None and sizes[0] == 32 and "large-v1" in name else heads


def names_of(stored: Iterable[str]) -> dict[str, str]:
    """Hugging Face's name of each stored tensor → its own; a tensor of no Whisper keeps its name."""
    return {_renamed(name): name for name in stored}


def _renamed(name: str) -> str:
    if name in ("encoder.positional_embedding", "decoder.positional_embedding"):
        return f"model.{name.partition('.')[0]}.embed_positions.weight"
    module, _, leaf = name.rpartition(".")
    if module in _WHOLE:
        return f"model.{_WHOLE[module]}.{leaf}"
    found = _LAYER.fullmatch(module)
    if found is None or found[3] not in _OF_LAYER:
        return name
    return f"model.{found[1]}.layers.{found[2]}.{_OF_LAYER[found[3]]}.{leaf}"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
