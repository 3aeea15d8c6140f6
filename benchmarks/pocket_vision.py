"""What fewer bits cost models/pocket-vision: exact answers about unseen scenes, size, and time.

128 training scenes with conversations calibrate; 1,000 held-out questions are answered together, greedily, by
the engine as it is served. "one" is a question of 20 that are answered alone, in ms; "per_second" are answers
of 256 together. Engines are built here.

    python benchmarks/pocket_vision.py --json docs/results/pocket_vision_precisions.json
    python benchmarks/pocket_vision.py --count 60 w8a8 rptq-w8a8
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot import LLM, build
from ingot.config.quantization.quant_file import read_quant
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import resolve_device
from ingot.measure.side.machine import machine
from recipes.vision.draw import draw
from recipes.vision.evaluate import MOST, Item, Result, held_out_items, messages_of, summary
from recipes.vision.samples import write_samples
from recipes.vision.scenes import held_out_scene

MODEL = Path(__file__).resolve().parents[1] / "models/pocket-vision/minigpt4.yaml"
Row = dict[str, Any]
ENGINES: Row = {
    "fp32": {"dtype": "fp32"},
    "fp16": {},
    "bf16": {"dtype": "bf16"},
    "w8a16": {"quant": "w8a16"},
    "w4a16": {"quant": "w4a16"},
    "w4a16 gptq": {"quant": "w4a16", "method": "gptq"},
    "w4a16 awq": {"quant": "w4a16", "method": "awq"},
    "w8a8": {"quant": "w8a8"},
    "w8a8 static": {"quant": "w8a8", "activations": "static"},
    "w8a8 smoothquant": {"quant": "w8a8", "method": "smoothquant"},
    "rptq-w8a8": {"quant": "rptq-w8a8"},
    "rptq-w4a8": {"quant": "rptq-w4a8"},
    "rptq-w4a4": {"quant": "rptq-w4a4"},
    "parts": {"quant": "vit=w8a8,qformer=w8a16,llm=rptq-w4a8"},
}


def built(name: str, folder: Path, calib: Path) -> Path:
    """The engine of a name."""
    options = dict(ENGINES[name])
    dtype, quant = options.pop("dtype", "fp16"), options.pop("quant", None)
    config = read_quant(quant, **options)
    samples = {"calib": calib} if config.calibrated else {}
    return build(MODEL, folder / name.replace(" ", "-"), dtype=dtype, quant=config, proof=False, **samples)


def answered(engine: Path, count: int) -> Row:
    """Exact answers to the first ``count`` questions, and the engine's size."""
    items = held_out_items(range(count))
    with LLM(engine) as llm:
        outputs = llm.chat(talks_of(items), max_new_tokens=MOST, temperature=0.0)
    results = [Result(item, (one.text or "").strip()) for item, one in zip(items, outputs, strict=True)]
    megabytes = sum(file.stat().st_size for file in engine.rglob("*")) / 1e6
    found = summary(results)
    return {"exact": found["all"], "by_task": found, "megabytes": round(megabytes, 2)}


def timed(engine: Path, together: int) -> Row:
    """A question alone, and many together, both behind the same once more."""
    talks = talks_of(held_out_items(range(together)))
    values: Any = {"max_new_tokens": MOST, "temperature": 0.0}
    with LLM(engine, runtime=RuntimeConfig(prefix_reuse=False)) as llm:
        alone, whole = [], []
        for talk in [*talks[:5], *talks[:20]]:
            begun = time.perf_counter()
            llm.chat(talk, **values)
            alone.append(1e3 * (time.perf_counter() - begun))
        for _ in range(4):
            begun = time.perf_counter()
            llm.chat(talks, **values)
            whole.append(together / (time.perf_counter() - begun))
    return {"one": spread(alone[5:]), "per_second": spread(whole[1:])}


def spread(values: list[float]) -> Row:
    """Median, p90, least and most."""
    found = sorted(values)
    places = {"median": len(found) // 2, "p90": int(0.9 * len(found)), "least": 0, "most": -1}
    return {name: round(found[place], 3) for name, place in places.items()}


def talks_of(items: list[Item]) -> list[Any]:
    """The questions with their pictures."""
    pictures = draw([held_out_scene(item.scene) for item in items])
    return [messages_of(item, picture) for item, picture in zip(items, pictures, strict=True)]


def made(name: str, folder: Path, calib: Path, count: int) -> Row:
    """Build an engine and ask it."""
    return answered(built(name, folder, calib), count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(ENGINES))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--together", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=1, help="engines that are built and asked at once")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: Row = {"command": shlex.join(["python", *sys.argv]), "machine": machine(resolve_device("auto"))}
    found |= {"items": given.count, "together": given.together, "engines": {}}
    with tempfile.TemporaryDirectory(prefix="ingot-pocket-vision-") as name:
        folder = Path(name)
        calib = write_samples(folder / "samples", 128)
        with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
            asked = {one: pool.submit(made, one, folder, calib, given.count) for one in given.names}
            for one, answer in asked.items():
                found["engines"][one] = answer.result()
                print(one, found["engines"][one]["exact"], flush=True)
                _write(given.json, found)
        for one in given.names:  # nothing runs beside it
            found["engines"][one] |= timed(folder / one.replace(" ", "-"), given.together)
            print(one, found["engines"][one]["one"], found["engines"][one]["per_second"], flush=True)
            _write(given.json, found)


def _write(path: Path | None, found: Row) -> None:
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
