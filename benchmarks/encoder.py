"""What a Whisper encoder's time is made of: products, attention by PyTorch's ways, and what is between them.

Windows of 1500 positions, so many at once, in fp16. Figures are µs of one layer as a CUDA graph, each part
by itself, beside its arithmetic at 800 Tflop/s or its bytes at 3 TB/s, whichever is more. "encoder" is all of
it, features to outputs, with a graph and without; "features" is samples on the host to features on the GPU.

    python benchmarks/encoder.py small large-v3 --windows 1 8 --json docs/results/whisper/encoder.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from timing import graph_us  # noqa: E402
from whisper import NAMES, SHAPES, noise  # noqa: E402

from ingot import LLM  # noqa: E402
from ingot.audio.log_mel import features_by  # noqa: E402
from ingot.kernels.norm.layer_norm import layer_norm  # noqa: E402
from ingot.kernels.product.prompt_gate_up import prompt_up  # noqa: E402
from ingot.layers.decoder import Decoder  # noqa: E402
from ingot.measure.side.machine import machine  # noqa: E402

FLOPS, BYTES = 800e12, 3.0e12
WAYS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Row = dict[str, Any]


def part(call: Callable[[], Any], floor_s: float) -> Row:
    """Median and least µs, and the floor."""
    try:
        times = graph_us([call] * 4, 20)
    except RuntimeError as error:
        return {"error": str(error)[:200]}
    return {
        "us": round(statistics.median(times) / 4, 1),
        "least_us": round(times[0] / 4, 1),
        "floor_us": round(1e6 * floor_s, 1),
    }


def of_layer(size: int, inner: int, heads: int, windows: int) -> dict[str, Row]:
    """The parts of a layer."""
    rows = 1500 * windows
    found: dict[str, Row] = {}

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float16, device="cuda") * 0.05

    for name, width, depth in (
        ("qkv", 3 * size, size),
        ("o", size, size),
        ("up", inner, size),
        ("down", size, inner),
    ):
        x, weight, bias = made(rows, depth), made(width, depth), made(width)
        call = lambda x=x, weight=weight, bias=bias: F.linear(x, weight, bias)  # noqa: E731
        floor = 2 * rows * width * depth / FLOPS
        found[name] = part(call, floor)
        if name == "up":
            bent = lambda x=x, weight=weight, bias=bias: F.gelu(F.linear(x, weight, bias))  # noqa: E731
            found["up, then gelu"] = part(bent, floor)
            own = lambda x=x, weight=weight, bias=bias: prompt_up(x, weight, bias)  # noqa: E731
            found["up with gelu"] = part(own, floor)
        if name in ("o", "down"):
            sums = made(rows, width)
            add = lambda x=x, weight=weight, sums=sums: sums.addmm_(x, weight.t())  # noqa: E731
            found[f"{name}, added"] = part(add, floor)
    heads_of = made(rows, 3 * size).unflatten(1, (3, heads, -1)).unflatten(0, (windows, -1))
    query, key, value = heads_of.permute(2, 0, 3, 1, 4)
    for name, way in WAYS.items():

        def attend(way: SDPBackend | None = way) -> torch.Tensor:
            if way is None:
                return F.scaled_dot_product_attention(query, key, value)
            with sdpa_kernel(way):
                return F.scaled_dot_product_attention(query, key, value)

        found[f"attention, {name}"] = part(attend, 4 * 1500 * rows * size / FLOPS)
    x, other, wide, weight = made(rows, size), made(rows, size), made(rows, inner), made(size)
    moved = 2 * rows * size
    found["gelu"] = part(lambda: F.gelu(wide), 2 * wide.nbytes / BYTES)
    found["norm"] = part(lambda: layer_norm(x, weight, weight, 1e-5), 2 * moved / BYTES)
    found["norm with sum"] = part(lambda: layer_norm(x, weight, weight, 1e-5, other), 4 * moved / BYTES)
    found["sum"] = part(lambda: x + other, 3 * moved / BYTES)
    return found


def whole(model: Decoder, mels: int, windows: int) -> Row:
    """ms of features to outputs."""
    features = torch.randn(windows, mels, 3000, dtype=torch.float16, device="cuda")
    times = graph_us([lambda: model.encode(features)], 10)
    begun = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.encode(features)
        launched = time.perf_counter() - start
        torch.cuda.synchronize()
        begun.append((time.perf_counter() - start, launched))
    total, host = sorted(begun)[len(begun) // 2]
    return {
        "graph_ms": round(statistics.median(times) / 1e3, 2),
        "eager_ms": round(1e3 * total, 2),
        "host_ms": round(1e3 * host, 2),
    }


def reading(mels: int, windows: int) -> Row:
    """ms of samples on the host to features on the GPU, one after another."""
    times = []
    for number in range(12):
        samples = noise(windows, number)
        torch.cuda.synchronize()
        start = time.perf_counter()
        features_by(torch.device("cuda"), samples, mels)
        times.append(1e3 * (time.perf_counter() - start))
    return {"p50_ms": round(statistics.median(times[2:]), 2), "most_ms": round(max(times[2:]), 2)}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", choices=NAMES)
    parser.add_argument("--windows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    record: Row = {"command": shlex.join(["python", *sys.argv]), "machine": machine(torch.device("cuda"))}
    for name in given.shapes:
        shape = SHAPES / f"whisper-{name}.json"
        config = json.loads(shape.read_text(encoding="utf-8"))
        llm = LLM.from_config(shape, "cuda", dtype="fp16", max_batch_size=1)
        sizes = [config[key] for key in ("d_model", "encoder_ffn_dim", "encoder_attention_heads")]
        for windows in given.windows:
            record[f"{name}, {windows}"] = {
                "layer": of_layer(*sizes, windows),
                "encoder": whole(llm.engine.model, config["num_mel_bins"], windows),
                "features": reading(config["num_mel_bins"], windows),
            }
            print(name, windows, json.dumps(record[f"{name}, {windows}"]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
