"""stablelm, from outside Ingot's package: started by ``ingot port``, nearest to qwen2, score 0.79.

register_stablelm()
build(checkpoint, engine)
"""

from __future__ import annotations

from ingot.checkpoint.weight_map import Concat, Ignore, Rename, WeightMap
from ingot.config.decoder_config import DecoderConfig
from ingot.models.architecture import Architecture, LayerRange, head_rule, weight_and_bias
from ingot.models.hf_values import HfConfig, flag, number
from ingot.models.llama import WINDOW_KEYS
from ingot.models.model_registry import architecture_named, register

NAME = "stablelm"
NEAREST = architecture_named("qwen2")
# Key of config.json -> the key of the same meaning that qwen2 reads.
READ_AS: dict[str, str] = {"layer_norm_eps": "rms_norm_eps"}
OWN = frozenset({"use_qkv_bias", "partial_rotary_factor"})
KEYS = (NEAREST.keys - WINDOW_KEYS) | frozenset(READ_AS) | OWN


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json -> DecoderConfig, by qwen2's reading of the keys that both have."""
    known = {READ_AS.get(key, key): value for key, value in hf.items() if key not in OWN}
    known = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096} | known
    share, stated = number(hf, "partial_rotary_factor", default=0.25), hf.get("rope_parameters")
    if isinstance(stated, dict):
        share = number(stated, "partial_rotary_factor", default=share)
        known["rope_parameters"] = {k: v for k, v in stated.items() if k != "partial_rotary_factor"}
    config = NEAREST.config_from_hf(known)
    assert config.rope is not None
    rope = config.rope.replace(dim=int(config.head_dim * share))
    bias = flag(hf, "use_qkv_bias", False)
    return config.replace(architecture=NAME, norm="layer_norm", qkv_bias=bias, rope=rope)


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Stored tensor names -> Ingot's."""
    ours, theirs = "layers.{layer}.", "model.layers.{layer}."
    qkv = [theirs + f"self_attn.{part}_proj." for part in "qkv"]
    kinds = ("weight", "bias") if config.qkv_bias else ("weight",)
    rules = (
        Rename("embed_tokens.weight", "model.embed_tokens.weight"),
        *weight_and_bias("norm", "model.norm"),
        *weight_and_bias(ours + "input_layernorm", theirs + "input_layernorm"),
        *weight_and_bias(ours + "post_attention_layernorm", theirs + "post_attention_layernorm"),
        *(Concat(f"{ours}self_attn.qkv_proj.{k}", tuple(part + k for part in qkv)) for k in kinds),
        Concat(
            ours + "mlp.gate_up_proj.weight", (theirs + "mlp.gate_proj.weight", theirs + "mlp.up_proj.weight")
        ),
        Rename(ours + "self_attn.o_proj.weight", theirs + "self_attn.o_proj.weight"),
        Rename(ours + "mlp.down_proj.weight", theirs + "mlp.down_proj.weight"),
        Ignore("*.rotary_emb.inv_freq"),
        head_rule(config),
    )
    return WeightMap(rules, config.num_layers, layers)


MODEL = Architecture(NAME, ("StableLmForCausalLM",), "stablelm", KEYS, config_from_hf, weight_map)


def register_stablelm() -> None:
    """Make the architecture known to this process."""
    register(MODEL)
