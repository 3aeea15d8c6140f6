"""An architecture from outside the package: LLaMA's mathematics with q/k norms and tensor names of its own.

register(DUMMY)
build(checkpoint, engine)
"""

from __future__ import annotations

from ingot.checkpoint.weight_map import Concat, Rename, WeightMap
from ingot.config.decoder_config import DecoderConfig
from ingot.models.architecture import Architecture, LayerRange
from ingot.models.hf_values import HfConfig
from ingot.models.llama import LLAMA_KEYS, llama_config
from ingot.models.model_registry import register

NAME, CLASS = "dummy", "DummyForCausalLM"
_OURS, _THEIRS = "layers.{layer}.", "blocks.{layer}."
_NAMES = {
    "input_layernorm": "first_norm",
    "post_attention_layernorm": "second_norm",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
    "self_attn.o_proj": "attention.out",
    "mlp.down_proj": "feed.down",
}


def config_from_hf(hf: HfConfig) -> DecoderConfig:
    """config.json → DecoderConfig: LLaMA's keys."""
    return llama_config(hf, NAME, qk_norm=True)


def weight_map(config: DecoderConfig, layers: LayerRange = None) -> WeightMap:
    """Stored tensor names → Ingot's."""
    attention, feed = _THEIRS + "attention.", _THEIRS + "feed."
    rules = (
        Rename("embed_tokens.weight", "table"),
        Rename("norm.weight", "last_norm.weight"),
        Rename("lm_head.weight", "head.weight"),
        *(Rename(f"{_OURS}{ours}.weight", f"{_THEIRS}{theirs}.weight") for ours, theirs in _NAMES.items()),
        Concat(_OURS + "self_attn.qkv_proj.weight", tuple(f"{attention}{p}.weight" for p in "qkv")),
        Concat(_OURS + "mlp.gate_up_proj.weight", (f"{feed}gate.weight", f"{feed}up.weight")),
    )
    return WeightMap(rules, config.num_layers, layers)


DUMMY = Architecture(NAME, (CLASS,), NAME, frozenset(LLAMA_KEYS), config_from_hf, weight_map)


def register_dummy() -> None:
    """Make the architecture known."""
    register(DUMMY)
