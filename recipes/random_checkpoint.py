"""A checkpoint of any LLaMA shape with random weights, for speed and memory: neither depends on the values.

It has no tokenizer: samples to calibrate with are token ids.

    python recipes/random_checkpoint.py OUT --shape 7b
    python recipes/random_checkpoint.py OUT --shape 7b --samples OUT/samples.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPES = {
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
    },
}
SHARD_BYTES = 4 << 30


def tensor_shapes(config: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face name and shape of every tensor of ``LlamaForCausalLM``, in order."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, shape in (
            ("input_layernorm", (hidden,)),
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("post_attention_layernorm", (hidden,)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            yield f"{layer}{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def write_checkpoint(folder: Path, shape: str) -> None:
    """Write config.json, fp16 shards of at most 4 GiB and their index; std 0.02 as models are initialised."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    files: dict[str, int] = {}
    size = 0
    for name, dims in tensor_shapes(config):
        tensor = torch.randn(dims, generator=generator, device=device).mul_(0.02).half()
        if len(dims) == 1:
            tensor.fill_(1.0)
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            _save(folder, shards)
            size = 0
        shards[-1][name] = tensor.cpu()
        files[name] = len(shards)
        size += tensor.nbytes
    _save(folder, shards)
    weight_map = {name: _file(number) for name, number in files.items()}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    extra = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16"}
    extra |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config | extra, indent=2))


def write_samples(path: Path, vocab_size: int, samples: int = 128, length: int = 512) -> None:
    """Write records of ``length`` random token ids, the same every time, for ``--calib``."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (samples, length), generator=generator).tolist()
    path.write_text("".join(json.dumps({"token_ids": row}) + "\n" for row in ids), encoding="utf-8")


def _file(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _save(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    save_file(shards[-1], folder / _file(len(shards)), metadata={"format": "pt"})
    shards[-1] = {}
    shards.append({})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--samples", type=Path, help="also write samples to calibrate with")
    arguments = parser.parse_args()
    write_checkpoint(arguments.out, arguments.shape)
    if arguments.samples:
        write_samples(arguments.samples, SHAPES[arguments.shape]["vocab_size"])
