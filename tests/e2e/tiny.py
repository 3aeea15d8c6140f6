"""A tiny Qwen v1 checkpoint with random weights and a vocabulary of single bytes.

It chats (nonsense) in milliseconds.

    checkpoint = write_tiny(tmp_path / "tiny")
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NUM_BYTES = 256
NUM_SPECIAL = 208  # endoftext, im_start, im_end and 205 extras
END_OF_TEXT = NUM_BYTES
HIDDEN, LAYERS, HEADS, INNER = 32, 2, 2, 48
FOREIGN_PLAN = {  # of a machine that is not this one
    "gpu": "Some GPU",
    "capability": "9.0",
    "value_bytes": 2,
    "torch": "2.11.0",
    "triton": "3.6.0",
    "tiles": {"rms_norm": {"m8_h32": {"num_warps": 8}}},
    "measured": {"rms_norm": {"m8_h32": {"default_us": 3.0, "best_us": 2.0}}},
}


def write_tiny(folder: Path, seed: int = 0, seq_length: int = 256, **changes: Any) -> Path:
    """Write the checkpoint; ``changes`` go into config.json. Returns the folder."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * INNER,
        "kv_channels": HIDDEN // HEADS,
        "max_position_embeddings": seq_length,
        "no_bias": True,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "rotary_emb_base": 10000,
        "seq_length": seq_length,
        "tie_word_embeddings": False,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "vocab_size": NUM_BYTES + NUM_SPECIAL,
    }
    generation = {"chat_format": "chatml", "eos_token_id": END_OF_TEXT, "max_new_tokens": 8}
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    ranks = (b"%s %d\n" % (base64.b64encode(bytes([i])), i) for i in range(NUM_BYTES))
    (folder / "qwen.tiktoken").write_bytes(b"".join(ranks))
    save_file(_weights(seed), folder / "model.safetensors")
    return folder


def _weights(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    vocab = NUM_BYTES + NUM_SPECIAL
    shapes = {"transformer.wte.weight": (vocab, HIDDEN), "lm_head.weight": (vocab, HIDDEN)}
    for i in range(LAYERS):
        layer = f"transformer.h.{i}."
        shapes |= {
            layer + "attn.c_attn.weight": (3 * HIDDEN, HIDDEN),
            layer + "attn.c_attn.bias": (3 * HIDDEN,),
            layer + "attn.c_proj.weight": (HIDDEN, HIDDEN),
            layer + "mlp.w1.weight": (INNER, HIDDEN),
            layer + "mlp.w2.weight": (INNER, HIDDEN),
            layer + "mlp.c_proj.weight": (HIDDEN, INNER),
        }
    weights = {name: torch.randn(shape, generator=rng) * 0.2 for name, shape in shapes.items()}
    norms = [f"transformer.h.{i}.ln_{j}.weight" for i in range(LAYERS) for j in (1, 2)]
    weights |= {name: torch.ones(HIDDEN) for name in (*norms, "transformer.ln_f.weight")}
    return {name: tensor.half() for name, tensor in weights.items()}
