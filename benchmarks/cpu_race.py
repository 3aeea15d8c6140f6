"""A random Qwen2 of half a billion weights on a CPU: Ingot in each scheme, beside llama.cpp.

Ingot's side needs nothing else; with ``ingot[cpu]`` it multiplies by kernels of its own. llama.cpp runs where
``--llama`` names a folder with node-llama-cpp (``npm i node-llama-cpp``, Node 20 or newer) and files of the
same shape, qwen05_f16.gguf, qwen05_q8_0.gguf and qwen05_q4_0.gguf, which any tool that writes GGUF can make,
and qwen05_q4_0_head_q8_0.gguf, whose tied head is in Q8_0, as llama.cpp's own quantizer makes it.
Both sides take turns, ``--rounds`` times; each figure is the median of the rounds' minima. Every program has
the machine to itself only if you leave it to it.

    python benchmarks/cpu_race.py --llama FOLDER --rounds 3 --json docs/results/cpu_race.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.side_process import last_line

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
SCHEMES = ("none", "w8a16", "w8a8", "w4a16", "w4a16 symmetric", "w4a8")
FILES = ("f16", "q8_0", "q4_0", "q4_0_head_q8_0")
PROMPT = [1000 + 7 * i for i in range(64)]
# One program per side and round: what a process holds of memory and threads is then its own.
NODE = """
import {getLlama} from "node-llama-cpp";
const [file, tokens, threads] = [process.argv[2], +process.argv[3], +process.argv[4]];
const ids = JSON.parse(process.argv[5]);
const llama = await getLlama({gpu: false, build: "never", progressLogs: false, logLevel: "error"});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: 1024, threads, batchSize: 512});
const found = {ttft_ms: [], decode_ms: []};
for (let round = 0; round < 4; round++) {
  const sequence = context.getSequence();
  let last = performance.now(), count = 0;
  for await (const token of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
    const now = performance.now();
    (count ? found.decode_ms : found.ttft_ms).push(now - last);
    last = now;
    if (++count > tokens) break;
  }
  sequence.dispose();
}
console.log(JSON.stringify(found));
process.exit(0);
"""


def run_ingot(scheme: str, tokens: int, threads: int) -> dict[str, list[float]]:
    """Milliseconds of prompts and of decode steps, in this process."""
    import time

    import torch

    from ingot import LLM, SamplingParams
    from ingot.config.quantization.quant_config import QuantConfig
    from ingot.layers.linear import held_bytes

    torch.set_num_threads(threads)
    name, _, symmetric = scheme.partition(" ")
    head = "none" if name == "none" else "w8a16"  # llama.cpp's files quantize the tied head too
    quant = QuantConfig(name, symmetric=True, head=head) if symmetric else QuantConfig(name, head=head)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        llm = LLM.from_config(config, "cpu", max_batch_size=1, max_seq_len=1024, quant=quant)
    found: dict[str, list[float]] = {"ttft_ms": [], "decode_ms": []}
    params = SamplingParams(max_new_tokens=tokens + 1, ignore_eos=True, temperature=0.0)
    for turn in range(4):
        prompt = [token + turn for token in PROMPT]  # no prefix is found again
        last = time.perf_counter()
        for count, _ in enumerate(llm.stream(prompt, params)):
            now = time.perf_counter()
            found["decode_ms" if count else "ttft_ms"].append((now - last) * 1e3)
            last = now
    found["weight_mb"] = [held_bytes(llm.engine.model) / 1e6]
    return found


def run_llama(folder: Path, kind: str, tokens: int, threads: int) -> dict[str, list[float]]:
    """The same of llama.cpp, with its script in the folder of its package."""
    script = folder / "cpu_race.mjs"
    script.write_text(NODE)
    file = folder / f"qwen05_{kind}.gguf"
    words = ["node", str(script), str(file), str(tokens), str(threads), json.dumps(PROMPT)]
    return side_figures("llama.cpp", words)


def side_figures(side: str, words: Sequence[str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads(last_line(side, words))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama", type=Path, help="folder of node-llama-cpp and the GGUF files")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a side's own process
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(run_ingot(args.one, args.new_tokens, args.threads)))
        return
    sides: dict[str, list[dict[str, list[float]]]] = {}
    own = ["--new-tokens", str(args.new_tokens), "--threads", str(args.threads)]
    for number in range(args.rounds):
        for kind in FILES if args.llama else ():
            found = run_llama(args.llama, kind, args.new_tokens, args.threads)
            sides.setdefault(f"llama.cpp {kind}", []).append(found)
        for scheme in args.schemes:
            words = [sys.executable, __file__, "--one", scheme, *own]
            sides.setdefault(scheme, []).append(side_figures(scheme, words))
        print(f"round {number + 1} of {args.rounds} is done", file=sys.stderr)
    _report(sides, args)


def _version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _report(sides: dict[str, list[dict[str, list[float]]]], args: argparse.Namespace) -> None:
    import torch

    from ingot.measure.side.machine import machine

    figures = {
        side: {name: round(statistics.median(min(run[name]) for run in runs), 2) for name in runs[0]}
        for side, runs in sides.items()
    }
    for side, found in figures.items():
        print(f"{side:<16}", "  ".join(f"{name} {value:8.2f}" for name, value in found.items()))
    if args.json:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine(torch.device("cpu")),
            "llvmlite": _version("llvmlite"),
            "threads": args.threads,
            "rounds": args.rounds,
            "prompt_tokens": len(PROMPT),
            "load_average": round(os.getloadavg()[1], 2),
            "sides": {side.replace(" ", "_").replace(".", "_"): found for side, found in figures.items()},
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
