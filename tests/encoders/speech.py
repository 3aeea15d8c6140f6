"""A tiny encoder-decoder of speech, for tests alone: the mathematics of Hugging Face's Whisper.

Owns its architecture and a checkpoint with random weights. Its config.json is its own.

    model = write_speech(tmp_path)      # Hugging Face's class, with the same weights
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

from ingot.checkpoint.weight_map import Concat, Rename, Rule, Tie, WeightMap
from ingot.config.encoder import EncoderConfig, StackConfig
from ingot.config.model import DecoderConfig
from ingot.layers.context import BuildContext
from ingot.layers.embedding import Embedding
from ingot.layers.encoder import EncoderStack
from ingot.layers.norm import LayerNorm
from ingot.models.base import Architecture, LayerRange
from ingot.models.hf_values import HfConfig, integer
from tests.tiny_models import randomize

SIZE, INNER, LAYERS, HEADS, MELS, FRAMES, POSITIONS, VOCAB = 32, 48, 2, 4, 8, 80, 96, 97
_KEYS = frozenset({"hidden_size", "layers", "heads", "inner", "mels", "frames", "positions", "vocab_size"})


class SpeechEncoder(nn.Module):
    """Two convolutions, the second of which halves the frames, positions, layers, a norm."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        assert config.encoder is not None
        stack = StackConfig.from_json(config.encoder.settings)
        size, mels = stack.hidden_size, config.encoder.features[0]
        self.conv1 = nn.Conv1d(mels, size, 3, padding=1, dtype=ctx.dtype)
        self.conv2 = nn.Conv1d(size, size, 3, stride=2, padding=1, dtype=ctx.dtype)
        self.embed_positions = Embedding(config.encoder.max_positions, size, ctx)
        self.layers = EncoderStack(stack, ctx.at("layers"))
        self.norm = LayerNorm(size, stack.norm_eps, ctx)

    def positions(self, shape: tuple[int, ...]) -> int:
        return -(-shape[1] // 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.conv2(F.gelu(self.conv1(features[None]))))[0].t().contiguous()
        encoded: torch.Tensor = self.norm(self.layers(hidden + self.embed_positions.weight[: len(hidden)]))[0]
        return encoded


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    size, heads, inner = integer(hf, "hidden_size"), integer(hf, "heads"), integer(hf, "inner")
    stack = StackConfig(size, inner, integer(hf, "layers"), heads)
    frames = integer(hf, "frames")
    return DecoderConfig(
        architecture="tiny-speech",
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=size,
        intermediate_size=inner,
        num_layers=integer(hf, "layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size // heads,
        max_positions=integer(hf, "positions"),
        norm="layer_norm",
        norm_eps=1e-5,
        mlp="gelu",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        kind="cross",
        encoder=EncoderConfig(
            size, frames // 2, (integer(hf, "mels"), 0), 8 * size, settings=stack.to_json()
        ),
    )


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    assert config.encoder is not None
    decoder, encoder = "model.decoder.", "model.encoder."
    rules: list[Rule] = [
        Rename("embed_tokens.weight", decoder + "embed_tokens.weight"),
        Rename("embed_positions.weight", decoder + "embed_positions.weight"),
        Tie("lm_head.weight", "embed_tokens.weight", copy="proj_out.weight"),
        Rename("encoder.embed_positions.weight", encoder + "embed_positions.weight"),
        *_both("norm", decoder + "layer_norm"),
        *_both("encoder.norm", encoder + "layer_norm"),
        *_both("encoder.conv1", encoder + "conv1"),
        *_both("encoder.conv2", encoder + "conv2"),
        *_layer("layers.{layer}.", decoder + "layers.{layer}.", config.hidden_size),
        *_both("layers.{layer}.encoder_attn_layernorm", decoder + "layers.{layer}.encoder_attn_layer_norm"),
        *_both("layers.{layer}.encoder_attn.q_proj", decoder + "layers.{layer}.encoder_attn.q_proj"),
        *_both("layers.{layer}.encoder_attn.o_proj", decoder + "layers.{layer}.encoder_attn.out_proj"),
        *_joined(
            "layers.{layer}.encoder_attn.kv_proj",
            decoder + "layers.{layer}.encoder_attn.",
            "kv",
            config.hidden_size,
        ),
    ]
    for index in range(config.encoder.settings["num_layers"]):
        rules += _layer(f"encoder.layers.{index}.", f"{encoder}layers.{index}.", config.hidden_size)
    return WeightMap(tuple(rules), config.num_layers, layers)


def _both(ours: str, theirs: str) -> list[Rule]:
    return [Rename(f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias")]


def _joined(ours: str, theirs: str, parts: str, size: int) -> list[Rule]:
    """Keys have no bias."""
    biases = tuple(f"{theirs}{part}_proj.bias" for part in parts if part != "k")
    return [
        Concat(ours + ".weight", tuple(f"{theirs}{part}_proj.weight" for part in parts)),
        Concat(ours + ".bias", biases, gap=(parts.index("k"), size)),
    ]


def _layer(ours: str, theirs: str, size: int) -> list[Rule]:
    return [
        *_joined(ours + "self_attn.qkv_proj", theirs + "self_attn.", "qkv", size),
        *_both(ours + "self_attn.o_proj", theirs + "self_attn.out_proj"),
        *_both(ours + "input_layernorm", theirs + "self_attn_layer_norm"),
        *_both(ours + "post_attention_layernorm", theirs + "final_layer_norm"),
        *_both(ours + "mlp.up_proj", theirs + "fc1"),
        *_both(ours + "mlp.down_proj", theirs + "fc2"),
    ]


SPEECH = Architecture(
    "tiny-speech", ("TinySpeech",), "tiny-speech", _KEYS, config_from_hf, weight_map, SpeechEncoder
)


def write_speech(folder: Path, seed: int = 0) -> WhisperForConditionalGeneration:
    """Write a checkpoint of random weights; returns Hugging Face's model of them."""
    config = WhisperConfig(
        vocab_size=VOCAB,
        d_model=SIZE,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        num_mel_bins=MELS,
        max_source_positions=FRAMES // 2,
        max_target_positions=POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = randomize(WhisperForConditionalGeneration(config).eval(), seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name != "proj_out.weight"}
    save_file(tensors, folder / "model.safetensors")
    own = {
        "architectures": ["TinySpeech"],
        "model_type": "tiny-speech",
        "hidden_size": SIZE,
        "layers": LAYERS,
        "heads": HEADS,
        "inner": INNER,
        "mels": MELS,
        "frames": FRAMES,
        "positions": POSITIONS,
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(own))
    return model
