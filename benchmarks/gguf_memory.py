"""Peak memory of builds from GGUF files of random weights, the types mixed as in Q4_K_M.

Each build runs in a process of its own. ``--side`` names the code: other sides of the file stay.

    python benchmarks/gguf_memory.py --side after --json docs/results/gguf_memory.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# 24 layers; and 2 layers with an embedding of 263 million values, which is the head too.
MODELS: dict[str, dict[str, int]] = {
    "layers": {"hidden": 1024, "inner": 2816, "layers": 24, "heads": 16, "vocab": 32000, "head": 1},
    "embedding": {"hidden": 2048, "inner": 5632, "layers": 2, "heads": 32, "vocab": 128256, "head": 0},
}
_BUILD = """
import sys
from pathlib import Path
from ingot import build
build(sys.argv[1], sys.argv[2], device="cpu", proof=sys.argv[3] == "proof")
lines = Path("/proc/self/status").read_text().splitlines()  # getrusage would count the parent's memory
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


def write_model(path: Path, shape: dict[str, int]) -> None:
    """A LLaMA of random blocks: Q6_K for embedding, head, and half of the values and down products."""
    import gguf

    from tests.gguf.gguf_files import Kind, quantized

    generator, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    hidden, inner, kv = shape["hidden"], shape["inner"], shape["hidden"] // 4
    for key, value in (
        ("block_count", shape["layers"]),
        ("context_length", 2048),
        ("embedding_length", hidden),
        ("feed_forward_length", inner),
        ("attention.head_count", shape["heads"]),
        ("attention.head_count_kv", shape["heads"] // 4),
    ):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)

    def add(name: str, rows: int, columns: int, kind: str) -> None:
        blocks = quantized(np.empty((rows, columns), np.float32), Kind[kind], generator)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=Kind[kind])

    add("token_embd", shape["vocab"], hidden, "Q6_K")
    if shape["head"]:
        add("output", shape["vocab"], hidden, "Q6_K")
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(shape["layers"]):
        more = "Q6_K" if layer % 2 else "Q4_K"
        own = f"blk.{layer}."
        for name, rows, columns, kind in (
            ("attn_q", hidden, hidden, "Q4_K"),
            ("attn_k", kv, hidden, "Q4_K"),
            ("attn_v", kv, hidden, more),
            ("attn_output", hidden, hidden, "Q4_K"),
            ("ffn_gate", inner, hidden, "Q4_K"),
            ("ffn_up", inner, hidden, "Q4_K"),
            ("ffn_down", hidden, inner, more),
        ):
            add(own + name, rows, columns, kind)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{own}{norm}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def peak_mb(path: Path, engine: Path, proof: str) -> int:
    """The largest resident memory of a build, mapped files included, in 10^6 bytes."""
    command = [sys.executable, "-c", _BUILD, str(path), str(engine), proof]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return round(int(done.stdout.split()[-1]) * 1024 / 1e6)


def measure() -> dict[str, Any]:
    """By model: the file's size, and the peaks of a build without and with its proof."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, shape in MODELS.items():
            path = folder / f"{model}.gguf"
            write_model(path, shape)
            peaks = {kind: peak_mb(path, folder / f"{model}-{kind}", kind) for kind in ("weights", "proof")}
            found[model] = {"file_mb": round(path.stat().st_size / 1e6), "peak_mb": peaks}
            path.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--side", default="after")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    from ingot.device import resolve_device
    from ingot.measure.side.machine import machine

    known = json.loads(flags.json.read_text()) if flags.json and flags.json.is_file() else {}
    known[flags.side] = {"models": measure(), "machine": machine(resolve_device("cpu"))}
    text = json.dumps(known, indent=1) + "\n"
    print(text)
    if flags.json:
        flags.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
