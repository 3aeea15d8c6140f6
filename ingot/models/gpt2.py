"""GPT-2: learned positions, LayerNorm, biases everywhere, tanh GELU.

Owns the reading of its config and its weight map. Knows no other architecture.
Source: the Hugging Face class ``GPT2LMHeadModel``; its ``Conv1D`` weights are stored [in, out] and
transposed here.
"""

from __future__ import annotations

from ingot.checkpoint.weight_map import Ignore, Rename, Rule, Tie, Transpose, WeightMap
from ingot.config.model import DecoderConfig
from ingot.errors import CheckpointError
from ingot.models.base import Architecture, HfConfig, LayerRange, require

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json of a GPT-2 model → DecoderConfig."""
    activation = hf.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise CheckpointError("unsupported activation", seen=activation, allowed=sorted(_ACTIVATIONS))
    odd = [k for k in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn") if hf.get(k)]
    if odd or hf.get("scale_attn_weights") is False:
        raise CheckpointError("unsupported attention scaling", seen=odd or "scale_attn_weights false")
    hidden, heads = (
        int(require(hf, "n_embd", "hidden_size")),
        int(require(hf, "n_head", "num_attention_heads")),
    )
    return DecoderConfig(
        architecture="gpt2",
        vocab_size=int(require(hf, "vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(hf.get("n_inner") or 4 * hidden),
        num_layers=int(require(hf, "n_layer", "num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=int(require(hf, "n_positions", "n_ctx")),
        norm="layer_norm",
        norm_eps=float(hf.get("layer_norm_epsilon", 1e-5)),
        mlp=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Hugging Face names → ours; files come with and without the ``transformer.`` prefix."""
    ours, theirs = "layers.{layer}.", "h.{layer}."
    head: tuple[Rule, ...] = (Rename("lm_head.weight", "lm_head.weight"),)
    if config.tie_word_embeddings:
        head = (Tie("lm_head.weight", "embed_tokens.weight"),)
    rules: list[Rule] = [
        Rename("embed_tokens.weight", "wte.weight"),
        Rename("embed_positions.weight", "wpe.weight"),
        Rename("norm.weight", "ln_f.weight"),
        Rename("norm.bias", "ln_f.bias"),
        *head,
        Ignore("h.*.attn.bias"),
        Ignore("h.*.attn.masked_bias"),
    ]
    norms = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
    linears = {
        "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }
    rules += [
        Rename(f"{ours}{a}.{k}", f"{theirs}{b}.{k}") for a, b in norms.items() for k in ("weight", "bias")
    ]
    rules += [Transpose(f"{ours}{a}.weight", f"{theirs}{b}.weight") for a, b in linears.items()]
    rules += [Rename(f"{ours}{a}.bias", f"{theirs}{b}.bias") for a, b in linears.items()]
    return WeightMap(tuple(rules), config.num_layers, layers, prefixes=("transformer.", ""))


GPT2 = Architecture("gpt2", ("GPT2LMHeadModel",), config_from_hf, weight_map)
