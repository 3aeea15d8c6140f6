"""MiniGPT-4: a ViT, BLIP-2's Q-Former and a projector, whose outputs stand in a LLaMA's prompt.

Source: the official implementation. The Llama-2 variant has no Q-Former: it drops the class token and joins
four
neighbouring patches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ingot.checkpoint.minigpt4_files import ARCHITECTURE, JOINED, MODEL, SECTION
from ingot.checkpoint.weight_map import (
    Concat,
    Filled,
    Ignore,
    Rename,
    Rule,
    SquarePositions,
    Squeezed,
    WeightMap,
)
from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import EncoderConfig, StackConfig
from ingot.config.json_config import JsonConfig
from ingot.config.modality import PICTURE
from ingot.errors import CheckpointError
from ingot.layers.build_context import BuildContext
from ingot.layers.encoder_blocks.qformer import QFormer, QFormerConfig
from ingot.layers.encoder_blocks.vit import VisionTransformer
from ingot.layers.encoder_pass import MODULE_BY_MODULE, EncoderPass
from ingot.layers.linear import Linear
from ingot.layers.norm import LayerNorm
from ingot.models.architecture import Architecture, LayerRange, weight_and_bias
from ingot.models.hf_values import HfConfig, flag, integer
from ingot.models.llama import OWN_LLAMA_KEYS, llama_weight_map, own_llama_config
from ingot.reference.plain_vision import PlainQFormer, PlainVisionEncoder

_VIT_EPS, _LN_VISION_EPS, _QFORMER_EPS = 1e-6, 1e-5, 1e-12
_PLACEHOLDER = 0  # LLaMA's <unk>, which no text becomes


@dataclass(frozen=True)
class VisionSettings(JsonConfig):
    """The encoder's own settings; ``qformer`` None: the Llama-2 variant."""

    stack: StackConfig
    image_size: int
    patch_size: int
    ln_vision: bool
    blocks: int
    qformer: QFormerConfig | None = None

    @property
    def grid(self) -> int:
        """Patches of a side."""
        return self.image_size // self.patch_size

    @property
    def outputs(self) -> int:
        return self.grid**2 // JOINED if self.qformer is None else self.qformer.queries

    @property
    def projected(self) -> int:
        return JOINED * self.stack.hidden_size if self.qformer is None else self.qformer.stack.hidden_size


class MiniGPT4Encoder(nn.Module):
    """[3, side, side] pixels → [positions, hidden_size of the LLM]."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        super().__init__()
        settings = settings_of(config)
        stack, self.side = settings.stack, settings.image_size
        self.outputs = settings.outputs
        self.vit = VisionTransformer(stack, settings.patch_size, settings.grid, ctx.at("vit"))
        self.ln_vision = LayerNorm(stack.hidden_size, _LN_VISION_EPS, ctx)
        self.qformer = None if settings.qformer is None else QFormer(settings.qformer, ctx.at("qformer"))
        self.projector = Linear(settings.projected, config.hidden_size, bias=True, ctx=ctx.at("projector"))

    @property
    def longest(self) -> tuple[int, ...]:
        return 3, self.side, self.side

    def positions(self, shape: tuple[int, ...]) -> int:
        return self.outputs

    def forward(self, features: torch.Tensor, forward_pass: EncoderPass = MODULE_BY_MODULE) -> torch.Tensor:
        """Normalised pixels of one picture, or of N [N, 3, side, side] → the positions of each in order."""
        pictures = features if features.dim() == 4 else features[None]
        seen = self.ln_vision(self.vit(pictures, forward_pass))[0]
        if self.qformer is not None:
            found = self.qformer(seen, len(pictures), forward_pass)
        else:
            found = self.joined(seen, len(pictures))
        encoded: torch.Tensor = self.projector(found)
        return encoded

    def joined(self, seen: torch.Tensor, pictures: int = 1) -> torch.Tensor:
        """Without the class token, four neighbouring patches side by side."""
        return seen.unflatten(0, (pictures, -1))[:, 1:].reshape(-1, self.projector.in_features)


def settings_of(config: DecoderConfig) -> VisionSettings:
    assert config.encoder is not None
    return VisionSettings.from_json(config.encoder.settings)


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of the joined files (checkpoint/minigpt4_files.py) → DecoderConfig."""
    own = hf.get(SECTION)
    if not isinstance(own, dict):
        raise CheckpointError(
            f"config.json of a MiniGPT-4 has no section {SECTION}",
            seen=type(own).__name__,
            fix="a YAML file that names the official files, in place of a folder",
        )
    text = own_llama_config(hf, MODEL)
    stack = StackConfig(
        integer(own, "vit_width"),
        integer(own, "vit_inner"),
        integer(own, "vit_depth"),
        integer(own, "vit_heads"),
        norm_eps=_VIT_EPS,
    )
    qformer = None
    if "queries" in own:
        keys = ("width", "inner", "layers", "heads")
        width, inner, layers, heads = (integer(own, f"qformer_{key}") for key in keys)
        qformer_stack = StackConfig(width, inner, layers, heads, norm_eps=_QFORMER_EPS)
        qformer = QFormerConfig(qformer_stack, integer(own, "queries"), stack.hidden_size)
    settings = VisionSettings(
        stack=stack,
        image_size=integer(own, "image_size"),
        patch_size=integer(own, "patch_size"),
        ln_vision=flag(own, "ln_vision", False),
        blocks=integer(own, "vit_blocks"),
        qformer=qformer,
    )
    size = stack.hidden_size
    values = (settings.grid**2 + 1) * (4 * size + 2 * max(stack.intermediate_size, 2 * size))
    encoder = EncoderConfig(
        hidden_size=text.hidden_size,
        max_positions=settings.outputs,
        features=(3, settings.image_size, settings.image_size),
        activation_values=-(-values // settings.outputs),
        modality=PICTURE.name,
        placeholder_id=_PLACEHOLDER,
        penalizes_prompt=False,
        settings=settings.to_json(),
    )
    return text.replace(wiring="prefix", encoder=encoder)


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """The official files' names, after the names of their parts → ours."""
    text, settings = llama_weight_map(config, layers), settings_of(config)
    rules: list[Rule] = [
        *_vit(settings),
        *_ln_vision(settings),
        *weight_and_bias("encoder.projector", "projector.llama_proj"),
    ]
    if settings.qformer is not None:
        rules += _queries(settings.qformer)
    return replace(text, rules=(*text.rules, *rules))


def _vit(settings: VisionSettings) -> list[Rule]:
    """Without the blocks whose outputs are not used, the norm after them and the classifier."""
    rules: list[Rule] = [
        *weight_and_bias("encoder.vit.patch_embedding", "vit.patch_embed.proj"),
        Squeezed("encoder.vit.class_embedding", "vit.cls_token"),
        SquarePositions("encoder.vit.embed_positions.weight", "vit.pos_embed", settings.grid),
        *map(Ignore, ("vit.norm.*", "vit.fc_norm.*", "vit.head.*", "vit.mask_token", "vit.lm_head.*")),
    ]
    for index in range(settings.stack.num_layers):
        ours, theirs = f"encoder.vit.layers.{index}", f"vit.blocks.{index}"
        biases = (f"{theirs}.attn.q_bias", f"{theirs}.attn.v_bias")
        rules += [
            Rename(f"{ours}.self_attn.qkv_proj.weight", f"{theirs}.attn.qkv.weight"),
            Concat(f"{ours}.self_attn.qkv_proj.bias", biases, gap=(1, settings.stack.hidden_size)),
            *weight_and_bias(f"{ours}.self_attn.o_proj", f"{theirs}.attn.proj"),
            *weight_and_bias(f"{ours}.input_layernorm", f"{theirs}.norm1"),
            *weight_and_bias(f"{ours}.post_attention_layernorm", f"{theirs}.norm2"),
            *weight_and_bias(f"{ours}.mlp.up_proj", f"{theirs}.mlp.fc1"),
            *weight_and_bias(f"{ours}.mlp.down_proj", f"{theirs}.mlp.fc2"),
        ]
    unused = range(settings.stack.num_layers, settings.blocks)
    return rules + [Ignore(f"vit.blocks.{index}.*") for index in unused]


def _ln_vision(settings: VisionSettings) -> list[Rule]:
    """Ones and zeros where no file has it, as in the original."""
    if settings.ln_vision:
        part = "projector" if settings.qformer is None else "qformer"
        return weight_and_bias("encoder.ln_vision", f"{part}.ln_vision")
    size = settings.stack.hidden_size
    return [Filled("encoder.ln_vision.weight", size, 1.0), Filled("encoder.ln_vision.bias", size, 0.0)]


def _queries(config: QFormerConfig) -> list[Rule]:
    """Without BLIP-2's text: its embeddings, its feed-forward, its classifier and its projectors."""
    bert = "qformer.Qformer.bert"
    rules: list[Rule] = [
        Squeezed("encoder.qformer.queries", "qformer.query_tokens"),
        *weight_and_bias("encoder.qformer.norm", f"{bert}.embeddings.LayerNorm"),
        *map(Ignore, (f"{bert}.embeddings.*_ids", f"{bert}.embeddings.*_embeddings.weight")),
        *map(Ignore, (f"{bert}.encoder.layer.*.intermediate.*", f"{bert}.encoder.layer.*.output.*")),
        *map(Ignore, ("qformer.Qformer.cls.*", "qformer.t5_proj.*", "qformer.opt_proj.*")),
    ]
    for index in range(config.stack.num_layers):
        ours, theirs = f"encoder.qformer.layers.{index}", f"{bert}.encoder.layer.{index}"
        rules += [
            *_joined(f"{ours}.self_attn.qkv_proj", f"{theirs}.attention.self", ("query", "key", "value")),
            *weight_and_bias(f"{ours}.self_attn.o_proj", f"{theirs}.attention.output.dense"),
            *weight_and_bias(f"{ours}.self_attn_norm", f"{theirs}.attention.output.LayerNorm"),
            *weight_and_bias(f"{ours}.mlp.up_proj", f"{theirs}.intermediate_query.dense"),
            *weight_and_bias(f"{ours}.mlp.down_proj", f"{theirs}.output_query.dense"),
            *weight_and_bias(f"{ours}.mlp_norm", f"{theirs}.output_query.LayerNorm"),
        ]
        if index % config.cross_every == 0:
            ours, theirs = f"{ours}.encoder_attn", f"{theirs}.crossattention"
            rules += [
                *weight_and_bias(f"{ours}.q_proj", f"{theirs}.self.query"),
                *_joined(f"{ours}.kv_proj", f"{theirs}.self", ("key", "value")),
                *weight_and_bias(f"{ours}.o_proj", f"{theirs}.output.dense"),
                *weight_and_bias(f"{ours}_norm", f"{theirs}.output.LayerNorm"),
            ]
    return rules


def _joined(ours: str, theirs: str, parts: tuple[str, ...]) -> list[Rule]:
    """Weights and biases of several products as one."""
    return [
        Concat(f"{ours}.{kind}", tuple(f"{theirs}.{part}.{kind}" for part in parts))
        for kind in ("weight", "bias")
    ]


def plain_encoder(config: DecoderConfig) -> PlainVisionEncoder:
    settings = settings_of(config)
    own = settings.qformer
    queries = None if own is None else PlainQFormer(own.stack, own.cross_every)
    return PlainVisionEncoder(settings.stack, settings.patch_size, _LN_VISION_EPS, JOINED, queries)


MINIGPT4 = Architecture(
    MODEL,
    (ARCHITECTURE,),
    MODEL,
    OWN_LLAMA_KEYS | {SECTION},
    config_from_hf,
    weight_map,
    MiniGPT4Encoder,
    plain_encoder=plain_encoder,
)
