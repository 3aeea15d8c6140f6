"""A tiny LLaMA that sees pictures, for tests alone: the mathematics of Hugging Face's Llava.

Owns its architecture and a checkpoint with random weights. Its config.json is its own.

    model = write_pictures(tmp_path)      # Hugging Face's class, with the same weights
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from ingot.checkpoint.weight_map import Concat, Ignore, Rename, Rule, WeightMap
from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig, StackConfig
from ingot.layers.build_context import BuildContext, empty_weight
from ingot.layers.embedding import Embedding
from ingot.layers.encoder_blocks.encoder import EncoderStack
from ingot.layers.encoder_pass import EncoderPass
from ingot.layers.linear import Linear
from ingot.layers.norm import LayerNorm
from ingot.models.architecture import Architecture, LayerRange
from ingot.models.hf_values import HfConfig, integer
from ingot.models.llama import LLAMA_KEYS, llama_config, llama_weight_map
from tests.tiny_models import randomize, tiny_config

WIDTH, INNER, HEADS, IMAGE, PATCH = 24, 40, 3, 20, 4
PICTURE = 96  # the token that stands for a position of a picture
POSITIONS = (IMAGE // PATCH) ** 2
_OWN = ("vision_width", "vision_inner", "vision_heads", "image_size", "patch_size", "picture_token")


class PictureEncoder(nn.Module):
    """CLIP's tower up to its last layer but one, without the class token; then a projector of two layers."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        assert config.encoder is not None
        settings = config.encoder.settings
        stack, self.patch = StackConfig.from_json(settings["stack"]), settings["patch_size"]
        width, size = stack.hidden_size, config.hidden_size
        self.patch_embedding = nn.Conv2d(3, width, self.patch, self.patch, bias=False, dtype=ctx.dtype)
        self.class_embedding = empty_weight(width, dtype=ctx.dtype)
        self.embed_positions = Embedding(config.encoder.max_positions + 1, width, ctx)
        self.first_norm = LayerNorm(width, stack.norm_eps, ctx)
        self.layers = EncoderStack(stack, ctx.at("layers"))
        self.linear_1 = Linear(width, size, bias=True, ctx=ctx.at("linear_1"))
        self.linear_2 = Linear(size, size, bias=True, ctx=ctx.at("linear_2"))

    @property
    def longest(self) -> tuple[int, ...]:
        side = round((self.embed_positions.weight.shape[0] - 1) ** 0.5) * self.patch
        return 3, side, side

    def positions(self, shape: tuple[int, ...]) -> int:
        return (shape[1] // self.patch) * (shape[2] // self.patch)

    def forward(self, features: torch.Tensor, forward_pass: EncoderPass) -> torch.Tensor:
        pictures = features if features.dim() == 4 else features[None]
        patches = self.patch_embedding(pictures).flatten(2).transpose(1, 2)
        tokens = self.class_embedding.expand(len(pictures), 1, -1)
        hidden = torch.cat([tokens, patches], dim=1) + self.embed_positions.weight
        hidden = self.layers(self.first_norm(hidden.flatten(0, 1))[0], len(pictures), forward_pass)
        hidden = hidden.unflatten(0, (len(pictures), -1))[:, 1:].flatten(0, 1)
        encoded: torch.Tensor = self.linear_2(F.gelu(self.linear_1(hidden)))
        return encoded


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    width, patch = integer(hf, "vision_width"), integer(hf, "patch_size")
    side = integer(hf, "image_size")
    stack = StackConfig(width, integer(hf, "vision_inner"), 1, integer(hf, "vision_heads"))
    text = llama_config(hf, "tiny-pictures")
    encoder = EncoderConfig(
        text.hidden_size,
        (side // patch) ** 2,
        (3, side, side),
        8 * width,
        "picture",
        placeholder_id=integer(hf, "picture_token"),
        settings={"stack": stack.to_json(), "patch_size": patch},
    )
    return text.replace(wiring="prefix", encoder=encoder)


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    text, tower = llama_weight_map(config, layers), "model.vision_tower."
    layer, inner = tower + "encoder.layers.0.", "encoder.layers.0."
    rules: list[Rule] = [
        Rename("encoder.patch_embedding.weight", tower + "embeddings.patch_embedding.weight"),
        Rename("encoder.class_embedding", tower + "embeddings.class_embedding"),
        Rename("encoder.embed_positions.weight", tower + "embeddings.position_embedding.weight"),
    ]
    names = {
        "encoder.first_norm": tower + "pre_layrnorm",
        inner + "input_layernorm": layer + "layer_norm1",
        inner + "post_attention_layernorm": layer + "layer_norm2",
        inner + "self_attn.o_proj": layer + "self_attn.out_proj",
        inner + "mlp.up_proj": layer + "mlp.fc1",
        inner + "mlp.down_proj": layer + "mlp.fc2",
        "encoder.linear_1": "model.multi_modal_projector.linear_1",
        "encoder.linear_2": "model.multi_modal_projector.linear_2",
    }
    for kind in ("weight", "bias"):
        rules += [Rename(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in names.items()]
        parts = tuple(f"{layer}self_attn.{part}_proj.{kind}" for part in "qkv")
        rules.append(Concat(f"{inner}self_attn.qkv_proj.{kind}", parts))
    rules += [Ignore(tower + "post_layernorm.*"), Ignore(tower + "encoder.layers.1.*")]
    return replace(text, rules=(*text.rules, *rules))


PICTURES = Architecture(
    "tiny-pictures",
    ("TinyPictures",),
    "tiny-pictures",
    LLAMA_KEYS | set(_OWN),
    config_from_hf,
    weight_map,
    PictureEncoder,
)


def write_pictures(folder: Path, seed: int = 0) -> LlavaForConditionalGeneration:
    """Write a checkpoint of random weights; returns Hugging Face's model of them."""
    text = tiny_config("llama", max_position_embeddings=256)
    assert isinstance(text, LlamaConfig)
    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        image_size=IMAGE,
        patch_size=PATCH,
        hidden_act="gelu",
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=PICTURE)
    model = randomize(LlavaForConditionalGeneration(config).eval(), seed)
    folder.mkdir(parents=True, exist_ok=True)
    stored = model.state_dict().items()
    tensors = {n.replace("model.language_model.", "model."): t.contiguous() for n, t in stored}
    save_file(tensors, folder / "model.safetensors")
    own = dict(zip(_OWN, (WIDTH, INNER, HEADS, IMAGE, PATCH, PICTURE), strict=True))
    shared = {key: value for key, value in text.to_dict().items() if key in LLAMA_KEYS}
    named = {"architectures": ["TinyPictures"], "model_type": "tiny-pictures"}
    (folder / "config.json").write_text(json.dumps(shared | own | named))
    return model
