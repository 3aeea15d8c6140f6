"""Write a trained pocket model as a Qwen v1 Hugging Face folder: fp16 safetensors, configs, tokenizer.

Same weights and vocabulary in, same bytes out.

    python -m recipes.export_pocket --run run/ --out models/pocket-chat
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from recipes.fp16 import half
from recipes.pocket_model import PocketShape
from recipes.tokenizer import Tokenizer


def model_config(shape: PocketShape) -> dict[str, Any]:
    """config.json with the keys of a Qwen v1 checkpoint."""
    return {
        "architectures": ["QWenLMHeadModel"],
        "attn_dropout_prob": 0.0,
        "bf16": False,
        "emb_dropout_prob": 0.0,
        "fp16": True,
        "fp32": False,
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": 2 * shape.branch,
        "kv_channels": shape.head_dim,
        "layer_norm_epsilon": 1e-06,
        "max_position_embeddings": 8192,
        "model_type": "qwen",
        "no_bias": True,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "onnx_safe": None,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": shape.length,
        "tie_word_embeddings": False,
        "tokenizer_class": "QWenTokenizer",
        "transformers_version": "4.32.0",
        "use_cache": True,
        "use_dynamic_ntk": True,
        "use_flash_attn": "auto",
        "use_logn_attn": True,
        "vocab_size": shape.vocab,
    }


def generation_config(shape: PocketShape, tokenizer: Tokenizer) -> dict[str, Any]:
    """generation_config.json in Qwen's chat form; greedy."""
    return {
        "chat_format": "chatml",
        "eos_token_id": tokenizer.end_of_text,
        "pad_token_id": tokenizer.end_of_text,
        "max_window_size": shape.length - 256,
        "max_new_tokens": 256,
        "do_sample": False,
        "top_k": 0,
        "top_p": 0.8,
        "repetition_penalty": 1.0,
        "transformers_version": "4.31.0",
    }


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def export(weights: dict[str, torch.Tensor], shape: PocketShape, vocabulary: Path, out: Path) -> None:
    """Write the whole folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    target = out / "qwen.tiktoken"
    if vocabulary.resolve() != target.resolve():
        shutil.copyfile(vocabulary, target)
    tokenizer = Tokenizer.load(target)
    save_file(half(weights), out / "model.safetensors", metadata={"format": "pt"})
    _write_json(out / "config.json", model_config(shape))
    _write_json(out / "generation_config.json", generation_config(shape, tokenizer))
    _write_json(
        out / "tokenizer_config.json",
        {"tokenizer_class": "QWenTokenizer", "model_max_length": shape.length},
    )


def main() -> None:
    """Parse the command line and export a run's folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, required=True, help="folder that train_pocket wrote")
    parser.add_argument("--tokenizer", type=Path, default=Path("models/pocket-chat/qwen.tiktoken"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shape = PocketShape(**json.loads((args.run / "train.json").read_text())["shape"])
    export(load_file(args.run / "weights.safetensors"), shape, args.tokenizer, args.out)


if __name__ == "__main__":
    main()
