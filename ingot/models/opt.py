"""OPT. Source: Hugging Face's ``OPTForCausalLM``; two unused rows stand before the first position's."""

from __future__ import annotations

from ingot.checkpoint.weight_map import Concat, Ignore, Rename, RowsFrom, Rule, WeightMap
from ingot.config.decoder_config import DecoderConfig
from ingot.errors import CheckpointError
from ingot.models.architecture import Architecture, LayerRange, head_rule, weight_and_bias
from ingot.models.hf_values import HfConfig, flag, head_size, integer, short

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_KEYS = frozenset(
    {"vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads"}
    | {"max_position_embeddings", "activation_function", "tie_word_embeddings", "enable_bias"}
    | {"do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine"}
    | {"word_embed_proj_dim"}
    | {"init_std", "layerdrop"}  # of training
)
_NORM_EPS = 1e-5  # of torch's LayerNorm; no key says another
_UNUSED_POSITIONS = 2


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    hidden, heads = integer(hf, "hidden_size"), integer(hf, "num_attention_heads")
    _check_layers(hf, hidden)
    activation = hf.get("activation_function")
    activation = "relu" if activation is None else activation
    if activation not in list(_ACTIVATIONS):
        raise CheckpointError(
            "unsupported activation_function in config.json",
            seen=short(activation),
            allowed=sorted(_ACTIVATIONS),
            fix="a model with one of these",
        )
    bias = flag(hf, "enable_bias", True)
    return DecoderConfig(
        architecture="opt",
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(hf, "ffn_dim"),
        num_layers=integer(hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_size(hidden, heads),
        max_positions=integer(hf, "max_position_embeddings", default=2048),
        norm="layer_norm",
        norm_eps=_NORM_EPS,
        mlp=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=flag(hf, "tie_word_embeddings", True),
    )


def _check_layers(hf: HfConfig, hidden: int) -> None:
    """Refuse what opt-350m and old fine-tunings have and the decoder stack has not."""
    odd = [
        f"{key} {str(not usual).lower()}"
        for key, usual in (
            ("do_layer_norm_before", True),
            ("_remove_final_layer_norm", False),
            ("layer_norm_elementwise_affine", True),
        )
        if flag(hf, key, usual) is not usual
    ]
    width = integer(hf, "word_embed_proj_dim", default=hidden)
    odd += [f"word_embed_proj_dim {width}"] if width != hidden else []
    if odd:
        raise CheckpointError(
            "unsupported layers of OPT in config.json",
            seen=", ".join(odd),
            allowed="norms before attention and MLP and after the last layer, with weights, and embeddings "
            f"as wide as the hidden size ({hidden})",
            fix="another size of OPT: all published ones except opt-350m have these layers",
        )


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Hugging Face names → ours; files come with and without the ``model.`` prefix."""
    ours, theirs = "layers.{layer}.", "decoder.layers.{layer}."
    parts = [f"{theirs}self_attn.{part}_proj." for part in "qkv"]
    linears = {"self_attn.o_proj": "self_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2"}
    kinds = ("weight", "bias") if config.mlp_bias else ("weight",)
    rules: list[Rule] = [
        Rename("embed_tokens.weight", "decoder.embed_tokens.weight"),
        RowsFrom("embed_positions.weight", "decoder.embed_positions.weight", start=_UNUSED_POSITIONS),
        *weight_and_bias("norm", "decoder.final_layer_norm"),
        *weight_and_bias(f"{ours}input_layernorm", f"{theirs}self_attn_layer_norm"),
        *weight_and_bias(f"{ours}post_attention_layernorm", f"{theirs}final_layer_norm"),
        *(Concat(f"{ours}self_attn.qkv_proj.{k}", tuple(part + k for part in parts)) for k in kinds),
        *(Rename(f"{ours}{a}.{k}", f"{theirs}{b}.{k}") for a, b in linears.items() for k in kinds),
        head_rule(config),
        Ignore("decoder.version"),
    ]
    return WeightMap(tuple(rules), config.num_layers, layers, prefixes=("model.", ""))


OPT = Architecture("opt", ("OPTForCausalLM",), "opt", _KEYS, config_from_hf, weight_map)
