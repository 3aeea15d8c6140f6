"""What each tensor of a model is made of, by the names that checkpoints publish.

This is a second list of these names, written from the published classes and not from the weight maps of
``models/``, by which builds read: a map that joins in a wrong order shows where the two differ.
Sources: the state dicts of transformers' ``LlamaForCausalLM`` and its kin, ``Gemma2ForCausalLM``,
``GPT2LMHeadModel``, ``OPTForCausalLM`` and ``WhisperForConditionalGeneration``, Qwen's own
``QWenLMHeadModel``, and OpenAI's ``Whisper``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

_LAYER = re.compile(r"^((?:encoder\.)?layers)\.(\d+)\.")


@dataclass(frozen=True)
class StackedModules:
    """Modules of a checkpoint whose weights (and biases) are concatenated in one of ours.

    Attributes:
        modules: their names, without a prefix that some files have.
        transposed: the file has [in, out].
        plus: what is added to each value.
        leaf: the last part of a name, where it is not ours.
        first_row: the first row that is ours.
    """

    modules: tuple[str, ...]
    transposed: bool = False
    plus: float = 0.0
    leaf: str | None = None
    first_row: int = 0


Table = Mapping[str, StackedModules]


def _one(name: str) -> StackedModules:
    return StackedModules((name,))


_LLAMA: Table = {
    "embed_tokens": _one("model.embed_tokens"),
    "norm": _one("model.norm"),
    "lm_head": _one("lm_head"),
    "layers.#.input_layernorm": _one("model.layers.#.input_layernorm"),
    "layers.#.self_attn.qkv_proj": StackedModules(
        tuple(f"model.layers.#.self_attn.{part}_proj" for part in "qkv")
    ),
    "layers.#.self_attn.q_norm": _one("model.layers.#.self_attn.q_norm"),
    "layers.#.self_attn.k_norm": _one("model.layers.#.self_attn.k_norm"),
    "layers.#.self_attn.o_proj": _one("model.layers.#.self_attn.o_proj"),
    "layers.#.post_attention_layernorm": _one("model.layers.#.post_attention_layernorm"),
    "layers.#.mlp.gate_up_proj": StackedModules(
        ("model.layers.#.mlp.gate_proj", "model.layers.#.mlp.up_proj")
    ),
    "layers.#.mlp.down_proj": _one("model.layers.#.mlp.down_proj"),
}


def _plus_one(name: str) -> StackedModules:
    return StackedModules((f"model.{name}",), plus=1.0)


_GEMMA2: Table = {
    **_LLAMA,
    "norm": _plus_one("norm"),
    "layers.#.input_layernorm": _plus_one("layers.#.input_layernorm"),
    "layers.#.self_attn_norm": _plus_one("layers.#.post_attention_layernorm"),
    "layers.#.post_attention_layernorm": _plus_one("layers.#.pre_feedforward_layernorm"),
    "layers.#.mlp_norm": _plus_one("layers.#.post_feedforward_layernorm"),
}
_GEMMA3: Table = {
    name: replace(made, modules=tuple(one.removeprefix("model.") for one in made.modules))
    for name, made in _GEMMA2.items()
} | {
    f"layers.#.self_attn.{part}_norm": StackedModules((f"layers.#.self_attn.{part}_norm",), plus=1.0)
    for part in "qk"
}
_QWEN: Table = {
    "embed_tokens": _one("transformer.wte"),
    "norm": _one("transformer.ln_f"),
    "lm_head": _one("lm_head"),
    "layers.#.input_layernorm": _one("transformer.h.#.ln_1"),
    "layers.#.self_attn.qkv_proj": _one("transformer.h.#.attn.c_attn"),
    "layers.#.self_attn.o_proj": _one("transformer.h.#.attn.c_proj"),
    "layers.#.post_attention_layernorm": _one("transformer.h.#.ln_2"),
    # c_proj(w1(x) * silu(w2(x)))
    "layers.#.mlp.gate_up_proj": StackedModules(("transformer.h.#.mlp.w2", "transformer.h.#.mlp.w1")),
    "layers.#.mlp.down_proj": _one("transformer.h.#.mlp.c_proj"),
}
_GPT2: Table = {
    "embed_tokens": _one("wte"),
    "embed_positions": _one("wpe"),
    "norm": _one("ln_f"),
    "lm_head": _one("lm_head"),
    "layers.#.input_layernorm": _one("h.#.ln_1"),
    "layers.#.self_attn.qkv_proj": StackedModules(("h.#.attn.c_attn",), transposed=True),
    "layers.#.self_attn.o_proj": StackedModules(("h.#.attn.c_proj",), transposed=True),
    "layers.#.post_attention_layernorm": _one("h.#.ln_2"),
    "layers.#.mlp.up_proj": StackedModules(("h.#.mlp.c_fc",), transposed=True),
    "layers.#.mlp.down_proj": StackedModules(("h.#.mlp.c_proj",), transposed=True),
}


def _whisper_layer(ours: str, theirs: str) -> dict[str, StackedModules]:
    return {
        f"{ours}.input_layernorm": _one(f"{theirs}.self_attn_layer_norm"),
        f"{ours}.self_attn.qkv_proj": StackedModules(
            tuple(f"{theirs}.self_attn.{part}_proj" for part in "qkv")
        ),
        f"{ours}.self_attn.o_proj": _one(f"{theirs}.self_attn.out_proj"),
        f"{ours}.post_attention_layernorm": _one(f"{theirs}.final_layer_norm"),
        f"{ours}.mlp.up_proj": _one(f"{theirs}.fc1"),
        f"{ours}.mlp.down_proj": _one(f"{theirs}.fc2"),
    }


_OPT: Table = {
    "embed_tokens": _one("decoder.embed_tokens"),
    "embed_positions": StackedModules(("decoder.embed_positions",), first_row=2),
    "norm": _one("decoder.final_layer_norm"),
    "lm_head": _one("lm_head"),
    **_whisper_layer("layers.#", "decoder.layers.#"),
}
_WHISPER: Table = {
    "embed_tokens": _one("decoder.embed_tokens"),
    "embed_positions": _one("decoder.embed_positions"),
    "norm": _one("decoder.layer_norm"),
    "encoder.embed_positions": _one("encoder.embed_positions"),
    "encoder.norm": _one("encoder.layer_norm"),
    "encoder.conv1": _one("encoder.conv1"),
    "encoder.conv2": _one("encoder.conv2"),
    **_whisper_layer("layers.#", "decoder.layers.#"),
    **_whisper_layer("encoder.layers.#", "encoder.layers.#"),
    "layers.#.encoder_attn_layernorm": _one("decoder.layers.#.encoder_attn_layer_norm"),
    "layers.#.encoder_attn.q_proj": _one("decoder.layers.#.encoder_attn.q_proj"),
    "layers.#.encoder_attn.kv_proj": StackedModules(
        ("decoder.layers.#.encoder_attn.k_proj", "decoder.layers.#.encoder_attn.v_proj")
    ),
    "layers.#.encoder_attn.o_proj": _one("decoder.layers.#.encoder_attn.out_proj"),
}


def _openai_layer(ours: str, theirs: str) -> dict[str, StackedModules]:
    return {
        f"{ours}.input_layernorm": _one(f"{theirs}.attn_ln"),
        f"{ours}.self_attn.qkv_proj": StackedModules(
            tuple(f"{theirs}.attn.{part}" for part in ("query", "key", "value"))
        ),
        f"{ours}.self_attn.o_proj": _one(f"{theirs}.attn.out"),
        f"{ours}.post_attention_layernorm": _one(f"{theirs}.mlp_ln"),
        f"{ours}.mlp.up_proj": _one(f"{theirs}.mlp.0"),
        f"{ours}.mlp.down_proj": _one(f"{theirs}.mlp.2"),
    }


_OPENAI: Table = {
    "embed_tokens": _one("decoder.token_embedding"),
    "embed_positions": StackedModules(("decoder",), leaf="positional_embedding"),
    "norm": _one("decoder.ln"),
    "encoder.embed_positions": StackedModules(("encoder",), leaf="positional_embedding"),
    "encoder.norm": _one("encoder.ln_post"),
    "encoder.conv1": _one("encoder.conv1"),
    "encoder.conv2": _one("encoder.conv2"),
    **_openai_layer("layers.#", "decoder.blocks.#"),
    **_openai_layer("encoder.layers.#", "encoder.blocks.#"),
    "layers.#.encoder_attn_layernorm": _one("decoder.blocks.#.cross_attn_ln"),
    "layers.#.encoder_attn.q_proj": _one("decoder.blocks.#.cross_attn.query"),
    "layers.#.encoder_attn.kv_proj": StackedModules(
        ("decoder.blocks.#.cross_attn.key", "decoder.blocks.#.cross_attn.value")
    ),
    "layers.#.encoder_attn.o_proj": _one("decoder.blocks.#.cross_attn.out"),
}
OPENAI = "openai whisper"
TABLES: Mapping[str, Table] = {
    # minigpt4_names.py has an encoder's.
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "minigpt4"), _LLAMA),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "qwen": _QWEN,
    "gpt2": _GPT2,
    "opt": _OPT,
    "whisper": _WHISPER,
    OPENAI: _OPENAI,
}
# Of some files, the longest first.
PREFIXES = {
    "gpt2": ("transformer.",),
    "opt": ("model.",),
    "whisper": ("model.",),
    "gemma3": ("model.language_model.", "language_model.model.", "model."),
}


def made_of(kind: str, module: str, first_layer: int = 0) -> StackedModules | None:
    """What one of our modules is made of; None: the list does not have it.

    ``kind``: the architecture's registry name, or ``OPENAI``; ``first_layer``: the checkpoint's layer that is
    our 0.
    """
    found = _LAYER.match(module)
    if found is None:
        return TABLES[kind].get(module)
    made = TABLES[kind].get(_LAYER.sub(r"\1.#.", module))
    layer = int(found[2]) + (first_layer if found[1] == "layers" else 0)
    if made is None:
        return None
    return replace(made, modules=tuple(name.replace("#", str(layer)) for name in made.modules))
