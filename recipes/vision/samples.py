r"""Pictures with conversations about them, to calibrate with: training scenes, none of them held out.

python -m recipes.vision.samples --out /tmp/samples --count 128
ingot build models/pocket-vision/minigpt4.yaml -o ENGINE --quant rptq-w8a8 --calib /tmp/samples/records.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from recipes.vision.draw import draw, png
from recipes.vision.scenes import training_scene
from recipes.vision.talk import conversation


def write_samples(out: Path, count: int) -> Path:
    """Write ``records.jsonl`` and a PNG for each record."""
    (out / "image").mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        rng = random.Random(f"calibration {number}")
        scene = training_scene(rng)
        name = f"image/{number:03d}.png"
        (out / name).write_bytes(png(draw([scene])[0]))
        messages: list[dict[str, Any]] = []
        for turn in conversation(scene, rng, 1 + number % 2):
            messages += [
                {"role": "user", "content": turn.question},
                {"role": "assistant", "content": turn.answer},
            ]
        lines.append(json.dumps({"image": name, "messages": messages}))
    (out / "records.jsonl").write_text("\n".join(lines) + "\n")
    return out / "records.jsonl"


def main() -> None:
    """Write as many as asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=128)
    args = parser.parse_args()
    print(write_samples(args.out, args.count))


if __name__ == "__main__":
    main()
