"""What RPTQ costs the pocket picture model: exact answers about held-out scenes; training scenes calibrate.

128 drawn scenes with a conversation each calibrate all parts; scenes that training never saw are asked about.
The file is written after every engine, and the same command goes on where it stopped.

    python benchmarks/rptq_vision.py --json docs/results/pocket_vision_rptq.json --count 300
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.rptq_sites import config
from ingot import build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.measure.side.machine import machine
from recipes.vision.draw import draw, png
from recipes.vision.evaluate import held_out_items, score_engine, summary
from recipes.vision.scenes import training_scene
from recipes.vision.talk import conversation

MODEL = Path(__file__).resolve().parents[1] / "models" / "pocket-vision" / "minigpt4.yaml"
SAMPLES = 128
NAMES = (
    "none",
    "rptq-w4a4 128 ema-minmax -",
    "rptq-w4a4 128 mse R5",
    "rptq-w8a8 128 ema-minmax -",
    "rptq-w4a4 128 ema-minmax R1,R4,R5",
    "rptq-w4a8 128 minmax -",
    "rptq-w4a4 128 mse -",
)


def write_samples(folder: Path) -> Path:
    """Records of training scenes, their pictures as PNG."""
    lines = []
    for number in range(SAMPLES):
        rng = random.Random(f"calibration {number}")
        scene = training_scene(rng)
        (folder / f"{number}.png").write_bytes(png(draw([scene])[0]))
        messages = []
        for turn in conversation(scene, rng, 1 + number % 2):
            messages += [{"role": "user", "content": turn.question}]
            messages += [{"role": "assistant", "content": turn.answer}]
        lines.append(json.dumps({"image": f"{number}.png", "messages": messages}) + "\n")
    path = folder / "samples.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=NAMES, help="of engines; all without")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--count", type=int, default=300, help="held-out scenes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"command": shlex.join(["python", *sys.argv])}
    found |= {"machine": machine(torch.device("cpu")), "count": given.count, "calib_samples": SAMPLES}
    found["engines"] = {}
    if given.json.is_file():
        before = json.loads(given.json.read_text(encoding="utf-8"))
        if before["machine"] != found["machine"] or before["count"] != given.count:
            parser.error(f"{given.json} is of another commit, machine or number of scenes: name another file")
        found["engines"] = before["engines"]
    items = held_out_items(range(given.count))
    with tempfile.TemporaryDirectory() as work:
        calib = write_samples(Path(work))
        for name in given.names:
            if name in found["engines"]:
                continue
            begun, folder = time.perf_counter(), Path(work) / "engine"
            quant = QuantConfig() if name == "none" else config(name)
            samples: dict[str, Any] = {} if name == "none" else {"calib": calib}
            build(MODEL, folder, device="cpu", quant=quant, proof=False, force=True, **samples)
            built = time.perf_counter() - begun
            scores = summary(score_engine(str(folder), items))
            found["engines"][name] = {"build_seconds": round(built, 1), "exact": scores}
            given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {scores['all']} %, {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
