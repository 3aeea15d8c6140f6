"""OpenAI's Whisper files (``tiny.en.pt``, ``large-v3.pt``) as Hugging Face would store them.

Covers the names of their tensors, and what their ``dims`` mean in config.json and generation_config.json.
Opens no file.

    config = config_of(path, {"dims": {"n_mels": 80, …}})
    names = names_of(["encoder.blocks.0.attn.query.weight"])    # "model.encoder.layers.0.self_attn.q_proj.…"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ingot.checkpoint.checkpoint_files import shorten
from ingot.checkpoint.openai_whisper_heads import published_heads
from ingot.errors import CheckpointError

STATE = "model_state_dict"
_SUFFIX = ".pt"
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
_ENGLISH = 51864  # n_vocab of the models of English alone; the others have one more token of text
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


def is_openai(path: Path) -> bool:
    """Whether a path is meant as such a file; it may not be there."""
    return path.suffix == _SUFFIX and not path.is_dir()


def config_of(path: Path, values: Mapping[str, object]) -> dict[str, Any]:
    """config.json of a file's ``dims``, which are among the ``values`` beside its tensors.

    Raises:
        CheckpointError: there are none, one is missing or no positive integer, or the halves differ in width.
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
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        **config,
        **_ends(dims["n_vocab"]),
    }


def generation_of(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json of a file: of a published model's sizes it has the heads that time words."""
    heads = published_heads(config, path.stem)
    return {} if heads is None else {"alignment_heads": [list(head) for head in heads]}


def names_of(stored: Iterable[str]) -> dict[str, str]:
    """Hugging Face's name of each stored tensor → its own; a tensor of no Whisper keeps its name."""
    return {_renamed(name): name for name in stored}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _ends(vocab_size: int) -> dict[str, int]:
    """Ids that begin and end a text, by the size of a published vocabulary; nothing for smaller ones."""
    if vocab_size < _ENGLISH:
        return {}
    end = _ENGLISH_END + (vocab_size > _ENGLISH)
    return {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": end + 1,
    }


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
