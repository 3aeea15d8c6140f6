"""Whisper. Source: Hugging Face's ``WhisperForConditionalGeneration``; keys have no bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ingot.checkpoint.weight_map import Concat, Rename, Rule, WeightMap
from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig, StackConfig
from ingot.config.modality import SPEECH
from ingot.layers.build_context import BuildContext
from ingot.layers.embedding import Embedding
from ingot.layers.encoder_blocks.convolution import (
    FrameConvolution,
    gelu_convolutions,
    takes_convolutions,
)
from ingot.layers.encoder_blocks.encoder import EncoderStack
from ingot.layers.encoder_pass import MODULE_BY_MODULE, EncoderPass
from ingot.layers.norm import LayerNorm
from ingot.models.architecture import Architecture, LayerRange, head_rule, weight_and_bias
from ingot.models.hf_values import HfConfig, flag, head_size, integer, refused
from ingot.models.whisper_generation import SpeechGeneration
from ingot.reference.plain_speech import PlainSpeechEncoder

_KEYS = frozenset(
    {"vocab_size", "d_model", "num_mel_bins", "max_source_positions", "max_target_positions"}
    | {f"{side}_{key}" for side in ("encoder", "decoder") for key in ("layers", "attention_heads", "ffn_dim")}
    | {"activation_function", "scale_embedding", "tie_word_embeddings"}
    # Of the same layers once more, of training, of a classifier and of the decoding.
    | {"num_hidden_layers", "is_encoder_decoder", "encoder_layerdrop", "decoder_layerdrop", "init_std"}
    | {"apply_spec_augment", "use_weighted_layer_sum", "classifier_proj_size", "forced_decoder_ids"}
    | {f"mask_{axis}_{key}" for axis in ("time", "feature") for key in ("prob", "length", "min_masks")}
    | {"median_filter_width"}
)
_NORM_EPS = 1e-5  # of torch's LayerNorm; no key says another


class WhisperEncoder(nn.Module):
    """Two convolutions (the second halves the frames), positions, layers, a norm."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        assert config.encoder is not None
        stack = StackConfig.from_json(config.encoder.settings)
        size, mels = stack.hidden_size, config.encoder.features[0]
        self.conv1 = FrameConvolution(mels, size, stride=1, dtype=ctx.dtype)
        self.conv2 = FrameConvolution(size, size, stride=2, dtype=ctx.dtype)
        self.embed_positions = Embedding(config.encoder.max_positions, size, ctx)
        self.layers = EncoderStack(stack, ctx.at("layers"))
        self.norm = LayerNorm(size, stack.norm_eps, ctx)

    @property
    def longest(self) -> tuple[int, int]:
        """[mels, frames] of a full window."""
        return self.conv1.in_channels, 2 * self.embed_positions.weight.shape[0]

    def positions(self, shape: tuple[int, ...]) -> int:
        """Number of encoder positions: two frames each."""
        return -(-shape[1] // 2)

    def forward(self, features: torch.Tensor, forward_pass: EncoderPass = MODULE_BY_MODULE) -> torch.Tensor:
        """[mels, frames] → [positions, hidden_size]; of N windows [N, mels, frames] one after another."""
        windows = features if features.dim() == 3 else features[None]
        if forward_pass.unobserved and takes_convolutions(self.conv1, self.conv2, windows):
            hidden = gelu_convolutions(self.conv1, self.conv2, windows)
        else:
            hidden = F.gelu(self.conv2(F.gelu(self.conv1(windows)))).transpose(1, 2)
        hidden = (hidden + self.embed_positions.weight[: hidden.shape[1]]).flatten(0, 1).contiguous()
        encoded: torch.Tensor = self.norm(self.layers(hidden, len(windows), forward_pass))[0]
        return encoded


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    if hf.get("activation_function", "gelu") != "gelu":
        raise refused("activation_function", hf["activation_function"], "'gelu'")
    if flag(hf, "scale_embedding", False):
        raise refused("scale_embedding", True, "false, as in every published Whisper")
    size, positions = integer(hf, "d_model"), integer(hf, "max_source_positions")
    heads, inner = integer(hf, "encoder_attention_heads"), integer(hf, "encoder_ffn_dim")
    head_size(size, heads)
    stack = StackConfig(size, inner, integer(hf, "encoder_layers"), heads, norm_eps=_NORM_EPS)
    encoder = EncoderConfig(
        hidden_size=size,
        max_positions=positions,
        features=(integer(hf, "num_mel_bins"), 0),
        activation_values=4 * size + 2 * max(inner, 2 * size),
        modality=SPEECH.name,
        settings=stack.to_json(),
    )
    heads = integer(hf, "decoder_attention_heads")
    return DecoderConfig(
        architecture="whisper",
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=size,
        intermediate_size=integer(hf, "decoder_ffn_dim"),
        num_layers=integer(hf, "decoder_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_size(size, heads),
        max_positions=integer(hf, "max_target_positions"),
        norm="layer_norm",
        norm_eps=_NORM_EPS,
        mlp="gelu",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=flag(hf, "tie_word_embeddings", True),
        wiring="cross",
        encoder=encoder,
    )


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Hugging Face names → ours; files come with and without the ``model.`` prefix."""
    assert config.encoder is not None
    size, ours, theirs = config.hidden_size, "layers.{layer}.", "decoder.layers.{layer}."
    rules: list[Rule] = [
        Rename("embed_tokens.weight", "decoder.embed_tokens.weight"),
        Rename("embed_positions.weight", "decoder.embed_positions.weight"),
        head_rule(config, "proj_out.weight"),
        Rename("encoder.embed_positions.weight", "encoder.embed_positions.weight"),
        *weight_and_bias("norm", "decoder.layer_norm"),
        *weight_and_bias("encoder.norm", "encoder.layer_norm"),
        *weight_and_bias("encoder.conv1", "encoder.conv1"),
        *weight_and_bias("encoder.conv2", "encoder.conv2"),
        *_layer(ours, theirs, size),
        *weight_and_bias(ours + "encoder_attn_layernorm", theirs + "encoder_attn_layer_norm"),
        *weight_and_bias(ours + "encoder_attn.q_proj", theirs + "encoder_attn.q_proj"),
        *weight_and_bias(ours + "encoder_attn.o_proj", theirs + "encoder_attn.out_proj"),
        *_joined(ours + "encoder_attn.kv_proj", theirs + "encoder_attn.", "kv", size),
    ]
    for index in range(config.encoder.settings["num_layers"]):
        rules += _layer(f"encoder.layers.{index}.", f"encoder.layers.{index}.", size)
    return WeightMap(tuple(rules), config.num_layers, layers, prefixes=("model.", ""))


def _joined(ours: str, theirs: str, parts: str, size: int) -> list[Rule]:
    """Some of q, k and v in one product; keys have no bias."""
    biases = tuple(f"{theirs}{part}_proj.bias" for part in parts if part != "k")
    return [
        Concat(ours + ".weight", tuple(f"{theirs}{part}_proj.weight" for part in parts)),
        Concat(ours + ".bias", biases, gap=(parts.index("k"), size)),
    ]


def _layer(ours: str, theirs: str, size: int) -> list[Rule]:
    """The modules that layers of encoder and decoder share."""
    return [
        *_joined(ours + "self_attn.qkv_proj", theirs + "self_attn.", "qkv", size),
        *weight_and_bias(ours + "self_attn.o_proj", theirs + "self_attn.out_proj"),
        *weight_and_bias(ours + "input_layernorm", theirs + "self_attn_layer_norm"),
        *weight_and_bias(ours + "post_attention_layernorm", theirs + "final_layer_norm"),
        *weight_and_bias(ours + "mlp.up_proj", theirs + "fc1"),
        *weight_and_bias(ours + "mlp.down_proj", theirs + "fc2"),
    ]


def plain_encoder(config: DecoderConfig) -> PlainSpeechEncoder:
    assert config.encoder is not None
    return PlainSpeechEncoder(StackConfig.from_json(config.encoder.settings))


WHISPER = Architecture(
    "whisper",
    ("WhisperForConditionalGeneration",),
    "whisper",
    _KEYS,
    config_from_hf,
    weight_map,
    WhisperEncoder,
    check_generation=SpeechGeneration.of,
    plain_encoder=plain_encoder,
)
