"""One scheme's figures of the headline table, in one process: latency, a long prompt, 256 mixed requests.

Batches of 1, 8, 32 and 64 requests with 512 prompt tokens and 128 new ones, a prompt of 2048 tokens alone,
then the mixed load, all on one engine with random weights that has room for 256 requests. The JSON holds the
spread (median, p90, least, most) and the seconds of every run, machine, versions, commit and command.

    python benchmarks/headline.py w8a8 --json /tmp/w8a8.1.json
    python benchmarks/headline.py w8a8 --kv-dtype int8 --parts mixed --json /tmp/w8a8_int8.1.json

``--small`` runs two layers and few tokens: it leaves the kernels in Triton's cache, and its times mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot.measure.bench.ceiling import Ceiling, measure_ceiling
from ingot.measure.bench.doubts import doubts
from ingot.measure.bench.latency import Latency, measure_latency
from ingot.measure.bench.throughput import measure_throughput
from ingot.measure.side.ingot_side import IngotSide
from ingot.measure.side.machine import machine
from ingot.measure.side.side_spec import SideSpec
from ingot.measure.side.token_load import fixed, mixed

SHAPE = Path(__file__).parent / "shapes" / "llama-7b.json"
BATCHES, REQUESTS, LONGEST = (1, 8, 32, 64), 256, 4096
PARTS = ("latency", "prefill", "mixed")
FEW_TOKENS, FEW_NEW = 48, 3  # of --small
Row = dict[str, Any]


def figures(side: IngotSide, parts: list[str], ceiling: Ceiling, repeats: int, small: bool) -> Row:
    """Every part's figures, by name."""
    found: Row = {}
    prompt, new = (FEW_TOKENS, FEW_NEW) if small else (512, 128)
    side.warm_up(REQUESTS if "mixed" in parts else max(BATCHES))
    if "latency" in parts:
        wanted = Latency(BATCHES, prompt, new, repeats)
        found["latency"] = [
            lean(entry)
            | {"new_tokens": new, "floor_ms": floor_ms(side, entry["batch"], prompt + new / 2, ceiling)}
            for entry in measure_latency(side, wanted, ceiling)
        ]
    if "prefill" in parts:
        wanted = Latency((1,), prompt if small else 2048, 1, 2 * repeats + 1)
        found["prefill"] = lean(next(measure_latency(side, wanted, ceiling)))
    if "mixed" in parts:
        load = fixed(REQUESTS, prompt, new) if small else mixed(REQUESTS)
        found["mixed"] = lean(measure_throughput(side, load, repeats, ceiling)) | {
            "new_tokens": load.new_tokens
        }
    return found


def lean(entry: Row) -> Row:
    """An entry of ``ingot bench`` with the seconds of its runs in place of every request's times."""
    raw = entry.pop("raw")
    runs = raw if isinstance(raw, dict) else {"load": raw}
    return entry | {"seconds_of_runs": {name: [run["seconds"] for run in own] for name, own in runs.items()}}


def floor_ms(side: IngotSide, batch: int, context: float, ceiling: Ceiling) -> float:
    """How long the bytes of a decode step take to read at the measured ceiling."""
    return round(side.work.decode_bytes(batch, context) / ceiling.read_gb_s / 1e6, 4)


def measured(given: argparse.Namespace, shape: Path) -> Row:
    """The record of one scheme."""
    spec = SideSpec(
        random_weights=str(shape),
        device=given.device,
        quant=given.scheme,
        kv_dtype=given.kv_dtype,
        max_batch_size=REQUESTS,
        max_seq_len=LONGEST,
        cache_tokens=max(REQUESTS * 2 * 64, LONGEST) if given.small else None,
    )
    side = IngotSide(spec)
    ceiling = measure_ceiling(side.device, side.dtype)
    found = figures(side, given.parts, ceiling, given.repeats, given.small)
    entries = [*found.get("latency", []), *(found[part] for part in ("prefill", "mixed") if part in found)]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(side.device),
        "ceiling": ceiling.to_json(),
        "scheme": given.scheme,
        "kv_dtype": given.kv_dtype,
        "facts": side.facts(),
        **found,
        "doubts": doubts(entries),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scheme", help="none, w8a16, w4a16, w8a8, w4a8, rptq-w8a8")
    parser.add_argument("--kv-dtype", default="auto", help="of the KV cache")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs, after one that is thrown away")
    parser.add_argument("--shape", type=Path, default=SHAPE, help="config.json to fill with random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=None, help="of the CPU")
    parser.add_argument("--small", action="store_true", help="two layers, few tokens: compiles the kernels")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        shape = given.shape
        if given.small:
            config = json.loads(shape.read_text(encoding="utf-8"))
            shape = Path(folder) / "config.json"
            shape.write_text(json.dumps(config | {"num_hidden_layers": 2}), encoding="utf-8")
        record = measured(given, shape)
    given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for entry in record.get("latency", []):
        times = entry["decode_ms"]
        print(f"batch {entry['batch']}: {times['p50']:.2f} ms ({times['least']:.2f} to {times['most']:.2f})")
    if "mixed" in record:
        print(f"mixed: {record['mixed']['output_tokens_per_s']:.0f} output tokens/s")
    for doubt in record["doubts"]:
        print(f"doubt: {doubt}")


if __name__ == "__main__":
    main()
