"""A trained picture model in the layout of MiniGPT-4's official files, in fp16, and read back from it.

    python -m recipes.vision.export --run run --out models/pocket-vision

The folder has ``llama/`` (a Hugging Face LLaMA with its tokenizer), ``eva_vit_g.pth``,
``blip2_pretrained_flant5xxl.pth``, ``pretrained_minigpt4.pth`` and ``minigpt4.yaml``, which names them.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.fp16 import half
from recipes.vision.model import MiniGPT4, Shape

VIT, QFORMER, PROJECTOR = "eva_vit_g.pth", "blip2_pretrained_flant5xxl.pth", "pretrained_minigpt4.pth"
TOKENIZER = ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
MOST_BYTES = 12_000_000  # of the whole folder


def llama_config(shape: Shape) -> dict[str, Any]:
    """config.json of LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.inner,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def description(shape: Shape) -> dict[str, str | int]:
    """minigpt4.yaml: the parts' files, and the sizes that the files do not say."""
    return {
        "model": "minigpt4",
        "llm": "llama",
        "vit": VIT,
        "qformer": QFORMER,
        "projector": PROJECTOR,
        "image_size": shape.image,
        "vit_depth": shape.vit_depth,
        "vit_heads": shape.vit_heads,
        "qformer_heads": shape.qformer_heads,
    }


def _part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _save(data: dict[str, Any], path: Path) -> None:
    """torch.save, with member names that do not depend on the path."""
    buffer = io.BytesIO()
    torch.save(data, buffer)
    path.write_bytes(buffer.getvalue())


def export(weights: dict[str, Tensor], shape: Shape, tokenizer: Path, out: Path) -> int:
    """Write the whole folder; returns its bytes.

    Raises:
        OverflowError: a weight does not fit fp16.
        ValueError: the folder is larger than ``MOST_BYTES``.
    """
    llama = out / "llama"
    llama.mkdir(parents=True, exist_ok=True)
    if tokenizer.resolve() != llama.resolve():
        for name in TOKENIZER:
            shutil.copyfile(tokenizer / name, llama / name)
    found = half(weights)
    save_file(_part(found, "llama_model."), llama / "model.safetensors", metadata={"format": "pt"})
    (llama / "model.safetensors").chmod(0o644)
    _save(_part(found, "visual_encoder."), out / VIT)
    bridge = ("Qformer.", "query_tokens", "ln_vision.")
    _save(
        {"model": {name: tensor for name, tensor in found.items() if name.startswith(bridge)}}, out / QFORMER
    )
    projector = {name: tensor for name, tensor in found.items() if name.startswith("llama_proj.")}
    _save({"model": projector}, out / PROJECTOR)
    configs = {
        "config": llama_config(shape),
        "generation_config": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }
    for name, content in configs.items():
        (llama / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    lines = [f"{key}: {value}\n" for key, value in description(shape).items()]
    (out / "minigpt4.yaml").write_text("".join(lines))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise ValueError(f"{out} has {size} bytes; at most {MOST_BYTES} are allowed")
    return size


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder in the official layout, in fp32, under the names of ``MiniGPT4``.

    Tensors that the model does not use stay in.
    """
    weights: dict[str, Tensor] = {}
    for path in sorted((folder / "llama").iterdir()):
        if path.suffix in (".bin", ".safetensors"):
            stored = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
            weights |= {f"llama_model.{name}": tensor for name, tensor in stored.items()}
    vit = torch.load(folder / VIT, weights_only=True)
    weights |= {f"visual_encoder.{name}": tensor for name, tensor in vit.items()}
    for name in (QFORMER, PROJECTOR):
        weights |= torch.load(folder / name, weights_only=True)["model"]
    return {name: tensor.float() for name, tensor in weights.items()}


def read_shape(folder: Path) -> Shape:
    """The sizes of an exported folder, from its YAML, its config.json and its tensors."""
    lines = (folder / "minigpt4.yaml").read_text().splitlines()
    stated = dict(line.split(": ", 1) for line in lines)
    config = json.loads((folder / "llama" / "config.json").read_text())
    weights = read_weights(folder)
    layers = {name.split(".")[4] for name in weights if name.startswith("Qformer.bert.encoder.layer.")}
    inner = weights["Qformer.bert.encoder.layer.0.intermediate_query.dense.weight"]
    patches = weights["visual_encoder.patch_embed.proj.weight"]
    queries = weights["query_tokens"]
    return Shape(
        image=int(stated["image_size"]),
        patch=patches.shape[-1],
        vit_width=patches.shape[0],
        vit_heads=int(stated["vit_heads"]),
        vit_depth=int(stated["vit_depth"]),
        queries=queries.shape[1],
        qformer_hidden=queries.shape[2],
        qformer_heads=int(stated["qformer_heads"]),
        qformer_layers=len(layers),
        qformer_inner=inner.shape[0],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        layers=config["num_hidden_layers"],
        inner=config["intermediate_size"],
        vocab=config["vocab_size"],
    )


def load_exported(folder: Path) -> MiniGPT4:
    """The model of an exported folder, in fp32 on the CPU."""
    model = MiniGPT4(read_shape(folder))
    model.load_state_dict(read_weights(folder))
    return model.eval()


def main() -> None:
    """Export a run's folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, required=True, help="folder that recipes.vision.train wrote")
    parser.add_argument("--tokenizer", type=Path, default=Path("models/pocket-vision/llama"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shape = Shape(**json.loads((args.run / "train.json").read_text())["shape"])
    size = export(load_file(args.run / "weights.safetensors"), shape, args.tokenizer, args.out)
    print(f"{size} bytes")


if __name__ == "__main__":
    main()
