"""GPT-2. Source: Hugging Face's ``GPT2LMHeadModel``; its ``Conv1D`` weights are stored [in, out]."""

from __future__ import annotations

from ingot.checkpoint.weight_map import Ignore, Rename, Rule, Transpose, WeightMap
from ingot.config.decoder_config import DecoderConfig
from ingot.errors import CheckpointError
from ingot.models.architecture import Architecture, LayerRange, head_rule, weight_and_bias
from ingot.models.hf_values import HfConfig, flag, head_size, integer, number

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
_KEYS = frozenset(
    {"vocab_size", "n_embd", "hidden_size", "n_head", "num_attention_heads", "n_layer", "num_hidden_layers"}
    | {"n_positions", "n_ctx", "n_inner", "activation_function", "layer_norm_epsilon", "tie_word_embeddings"}
    | {"scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"}
    | {"predict_special_tokens"}  # of the medium and larger ones, where it says nothing
)


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    activation = hf.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise CheckpointError(
            "unsupported activation_function in config.json",
            seen=activation,
            allowed=sorted(_ACTIVATIONS),
            fix="a model with one of these",
        )
    odd = [k for k in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn") if flag(hf, k, False)]
    if odd or not flag(hf, "scale_attn_weights", True):
        raise CheckpointError(
            "unsupported attention scaling in config.json",
            seen=odd or "scale_attn_weights false",
            fix="a model with Hugging Face's defaults",
        )
    hidden, heads = integer(hf, "n_embd", "hidden_size"), integer(hf, "n_head", "num_attention_heads")
    return DecoderConfig(
        architecture="gpt2",
        vocab_size=integer(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(hf, "n_inner", default=4 * hidden),
        num_layers=integer(hf, "n_layer", "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_size(hidden, heads),
        max_positions=integer(hf, "n_positions", "n_ctx"),
        norm="layer_norm",
        norm_eps=number(hf, "layer_norm_epsilon", default=1e-5),
        mlp=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=flag(hf, "tie_word_embeddings", True),
    )


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Hugging Face names → ours; files come with and without the ``transformer.`` prefix."""
    ours, theirs = "layers.{layer}.", "h.{layer}."
    rules: list[Rule] = [
        Rename("embed_tokens.weight", "wte.weight"),
        Rename("embed_positions.weight", "wpe.weight"),
        *weight_and_bias("norm", "ln_f"),
        *weight_and_bias(f"{ours}input_layernorm", f"{theirs}ln_1"),
        *weight_and_bias(f"{ours}post_attention_layernorm", f"{theirs}ln_2"),
        head_rule(config),
        Ignore("h.*.attn.bias"),
        Ignore("h.*.attn.masked_bias"),
    ]
    linears = {
        "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }
    rules += [Transpose(f"{ours}{a}.weight", f"{theirs}{b}.weight") for a, b in linears.items()]
    rules += [Rename(f"{ours}{a}.bias", f"{theirs}{b}.bias") for a, b in linears.items()]
    return WeightMap(tuple(rules), config.num_layers, layers, prefixes=("transformer.", ""))


GPT2 = Architecture("gpt2", ("GPT2LMHeadModel",), "gpt2", _KEYS, config_from_hf, weight_map)
