"""What makes the input of each linear layer: the norm before it, or rows of another product.

This is a second description of the published models, beside building/calibration/rescaling.py, by which
methods change weights: where the two differ, a change of one side does not fit the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import StackConfig

_POST_NORM = "encoder.qformer."


@dataclass(frozen=True)
class Site:
    """The input of ``reader``.

    Attributes:
        maker: a norm, or the product of whose outputs ``size`` rows from ``start`` on make the input.
        size: 0: a norm.
        linear: whether nothing but linear steps lies between, so that factors can move.
        shared: so many neighbouring heads of the input are made by one head of rows.
        head: size of a head; 0: there are none.
        gate: whether the rows before these are of a gate, which moves with them.
    """

    reader: str
    maker: str
    start: int = 0
    size: int = 0
    linear: bool = True
    shared: int = 1
    head: int = 0
    gate: bool = False


def site_of(config: DecoderConfig, reader: str) -> Site | None:
    """The site of a linear layer by its name; None: it is of the head, of the keys and values of
    an encoder, of a projector, or behind a norm after a sum.
    """
    path, _, leaf = reader.rpartition(".")
    layer, _, part = path.rpartition(".")
    if layer.startswith(_POST_NORM) and leaf in ("qkv_proj", "q_proj", "up_proj"):
        return None  # the norm's output is also what branches are added to
    if part == "self_attn":
        if leaf == "qkv_proj":
            return Site(reader, f"{layer}.input_layernorm")
        return _attended(config, reader, f"{path}.qkv_proj", queries=True)
    if part == "encoder_attn":
        if leaf == "q_proj":
            return Site(reader, f"{layer}.encoder_attn_layernorm")
        return _attended(config, reader, f"{path}.kv_proj", queries=False) if leaf == "o_proj" else None
    if part != "mlp":
        return None
    if leaf != "down_proj":
        return Site(reader, f"{layer}.post_attention_layernorm")
    stack = _stack(config, reader)
    if stack is not None:
        relu = stack.activation == "relu"
        return Site(reader, f"{path}.up_proj", 0, stack.intermediate_size, linear=relu)
    size = config.intermediate_size
    if config.gated:
        return Site(reader, f"{path}.gate_up_proj", size, size, gate=True)
    return Site(reader, f"{path}.up_proj", 0, size, linear=config.activation == "relu")


def maker_of(config: DecoderConfig, module: str) -> Site | None:
    """The input that a norm or a product makes, whole or in part; None: it makes none of a layer's."""
    path, _, name = module.rpartition(".")
    layer = path.rpartition(".")[0]
    readers = {
        "input_layernorm": (f"{path}.self_attn.qkv_proj",),
        "encoder_attn_layernorm": (f"{path}.encoder_attn.q_proj",),
        "post_attention_layernorm": (f"{path}.mlp.gate_up_proj", f"{path}.mlp.up_proj"),
        "qkv_proj": (f"{layer}.self_attn.o_proj",),
        "kv_proj": (f"{layer}.encoder_attn.o_proj",),
        "gate_up_proj": (f"{layer}.mlp.down_proj",),
        "up_proj": (f"{layer}.mlp.down_proj",),
    }
    if name == "post_attention_layernorm":
        gated = config.gated and not module.startswith("encoder.")
        readers[name] = readers[name][:1] if gated else readers[name][1:]
    return site_of(config, readers[name][0]) if name in readers else None


def _attended(config: DecoderConfig, reader: str, maker: str, *, queries: bool) -> Site:
    """Values of an attention: behind its keys, and its queries where these are of the same product."""
    stack = _stack(config, reader)
    if stack is not None:
        head, start = stack.hidden_size // stack.num_heads, (2 if queries else 1) * stack.hidden_size
        return Site(reader, maker, start, stack.hidden_size, head=head)
    keys = config.num_kv_heads * config.head_dim
    start = keys + (config.num_heads * config.head_dim if queries else 0)
    shared = config.num_heads // config.num_kv_heads
    return Site(reader, maker, start, keys, shared=shared, head=config.head_dim)


def _stack(config: DecoderConfig, name: str) -> StackConfig | None:
    """The encoder's stack that a layer is of; None: it is the decoder's."""
    if not name.startswith("encoder.") or config.encoder is None:
        return None
    found = config.encoder.settings
    if "stack" in found:  # several: of MiniGPT-4
        found = found["qformer"]["stack"] if name.startswith(_POST_NORM) else found["stack"]
    return StackConfig.from_json(found)
