"""What fewer bits cost the pocket model: quality figures of docs/quantization.md and docs/int8.md; RPTQ's are
rptq_sites.py's.

Odd lines of recipes/heldout.jsonl calibrate, even ones are measured: KL, top-1 and perplexity on the first
100 conversations, ROUGE-L of 100 summaries, 150 exact answers. Everything is beside the dense model, in fp32
on one CPU thread. The file is written after every engine, and the same command goes on where it stopped.

    python benchmarks/pocket_quality.py --json docs/results/pocket_quality.json
    python benchmarks/pocket_quality.py --json /tmp/found.json --items 4 w8a16 w8a8
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot import build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.scored_answers import AnswerSettings, answers, summarize
from ingot.measure.evaluate.token_divergence import divergence
from ingot.measure.side.machine import machine
from ingot.measure.side.side_spec import SideSpec

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "pocket-chat"
SAMPLES = 64
Row = dict[str, Any]


def weight_only() -> Row:
    """Name → scheme, of weights alone: by rounding, AWQ and GPTQ."""
    formats: Row = {"w8a16": {}}
    for group in (32, 64, 128, 0):
        formats[f"w4a16 {group}"] = {"group": group}
    formats["w4a16 128 symmetric"] = {"group": 128, "symmetric": True}
    found = {
        f"{name} {method}": QuantConfig(name.split()[0], method=method, **more)
        for name, more in formats.items()
        for method in ("round", "awq", "gptq")
    }
    return {"w8a16 head": QuantConfig("w8a16", head="w8a16"), **found}


def eight_bits() -> Row:
    """Name → scheme, of activations in fewer bits."""
    found: Row = {"w8a8": QuantConfig("w8a8"), "w8a8 tensor": QuantConfig("w8a8", weight_scales="tensor")}
    found["w8a8 static"] = QuantConfig("w8a8", activations="static")
    for how in ("dynamic", "static"):
        for alpha in (0.5, 0.7, "search"):
            smooth = QuantConfig("w8a8", activations=how, method="smoothquant", alpha=alpha)
            found[f"w8a8 {how} smoothquant {alpha}"] = smooth
    for group in (128, 64):
        for method in ("round", "gptq"):
            for rotation in (False, True):
                name = f"w4a8 {group} {method}{' rotated' * rotation}"
                found[name] = QuantConfig("w4a8", group=group, method=method, rotation=rotation)
    return found


ENGINES: Row = {"none": QuantConfig(), **weight_only(), **eight_bits()}
CACHES = {f"{name} {kv}": (name, kv) for name, kv in (("none", "int8"), ("none", "fp8"))}
CACHES |= {f"{name} int8": (name, "int8") for name in ("w8a16 round", "w8a8")}
SPOKEN = (
    *("none", "w8a16 round", "w4a16 128 round", "w4a16 128 awq", "w4a16 128 gptq", "w8a8"),
    *("w8a8 dynamic smoothquant 0.5", "w8a8 static smoothquant search", "w4a8 128 round rotated"),
    *("w4a8 128 gptq rotated", "none int8", "none fp8", "w8a8 int8"),
)


class Pocket:
    """The data in ``work``, and what the dense model answers."""

    def __init__(self, work: Path, items: int) -> None:
        self.work, self.items = work, items
        lines = (ROOT / "recipes" / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        self.calib, self.held, self.asked = (work / f"{name}.jsonl" for name in ("calib", "held", "asked"))
        self.calib.write_text("".join(lines[::2]), encoding="utf-8")
        self.held.write_text("".join(lines[1::2]), encoding="utf-8")
        asked = [line for line in lines[1::2] if json.loads(line)["task"] != "summary"]
        self.asked.write_text("".join(asked), encoding="utf-8")
        self.dense: dict[str, list[str]] = {}

    def engine(self, name: str) -> tuple[Path, float]:
        """Where it was built, and in how many seconds."""
        folder, quant = self.work / name.replace(" ", "-"), ENGINES[name]
        given: Row = {"calib": self.calib, "calib_samples": SAMPLES} if quant.calibrated else {}
        begun = time.perf_counter()
        build(MODEL, folder, device="cpu", quant=quant, proof=False, force=True, **given)
        return folder, time.perf_counter() - begun

    def distance(self, spec: SideSpec) -> Row:
        """KL in nats, other first choices in %, perplexity."""
        data, dense = read_data(self.held, limit=self.items), SideSpec(str(MODEL), device="cpu", name="dense")
        found = divergence(spec, dense, data, ()).record
        kept = ("kl_mean", "kl_p99", "top1_disagreement", "top1_regret")
        metrics = {name: found["divergence"][name] for name in kept}
        return metrics | {"perplexity": found["sides"][0]["metrics"]["perplexity"], "counts": found["counts"]}

    def words(self, spec: SideSpec) -> Row:
        """ROUGE-L, exact answers in %, and how many texts are the dense model's."""
        asking, found = AnswerSettings(max_new_tokens=80), {}
        summaries = read_data(self.held, where=[("task", "summary")], limit=self.items)
        evaluations = (
            ("rougeL", summarize(spec, None, summaries, (), asking)),
            (
                "exact",
                answers(spec, None, read_data(self.asked, limit=self.items + self.items // 2), (), asking),
            ),
        )
        for metric, evaluation in evaluations:
            texts = [row["ingot"]["answer"] for row in evaluation.rows]
            dense = self.dense.setdefault(metric, texts)
            found[metric] = evaluation.record["sides"][0]["metrics"][metric]
            found[f"same_{metric}"] = sum(a == b for a, b in zip(texts, dense, strict=True))
            found[f"of_{metric}"] = len(texts)
        return found


def measured(pocket: Pocket, name: str) -> Row:
    """The line of one engine, or of one with a cache in 8 bits."""
    base, cache = CACHES.get(name, (name, "auto"))
    folder, seconds = pocket.engine(base)
    spec = SideSpec(str(folder), device="cpu", kv_dtype=cache)
    metrics = {"build_seconds": round(seconds, 2), **pocket.distance(spec)}
    return metrics | (pocket.words(spec) if name in SPOKEN else {})


def main() -> None:
    known = [*ENGINES, *CACHES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=known, help="of engines; all without")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument(
        "--items", type=int, default=100, help="conversations, and summaries; half more answers"
    )
    given = parser.parse_args()
    if unknown := set(given.names) - set(known):
        parser.error(f"no engine of the name {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    torch.set_num_threads(1)
    found: Row = {"command": shlex.join(["python", *sys.argv]), "machine": machine(torch.device("cpu"))}
    found |= {"model": MODEL.name, "items": given.items, "calib_samples": SAMPLES, "engines": {}}
    if given.json.is_file():
        before = json.loads(given.json.read_text(encoding="utf-8"))
        if before["machine"] != found["machine"] or before["items"] != given.items:
            parser.error(f"{given.json} is of another commit, machine or number of items: name another file")
        found["engines"] = before["engines"]
    with tempfile.TemporaryDirectory() as work:
        pocket = Pocket(Path(work), given.items)
        for name in ("none", *(n for n in given.names if n != "none")):
            if name in found["engines"] and name != "none":
                continue
            begun = time.perf_counter()
            found["engines"][name] = measured(pocket, name)
            given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
