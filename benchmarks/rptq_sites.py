"""What RPTQ's options cost the pocket model: blocks, ways to measure ranges, and sites in 4 bits.

Data and measures are those of pocket_quality.py, with the published 128 records to calibrate with. A name is
a scheme, the columns of a block, how ranges are measured, and of ``rptq-w4a4`` the sites in 8 bits: ``-`` is
the published default. The file is written after every engine, and the same command goes on where it stopped.

    python benchmarks/rptq_sites.py --json docs/results/pocket_rptq.json
    python benchmarks/rptq_sites.py --json /tmp/found.json --items 4 "rptq-w4a4 128 mse R5"
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
from benchmarks import pocket_quality
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.rptq_options import RptqConfig
from ingot.measure.side.machine import machine

SAMPLES = 128
NAMES = (
    "rptq-w4a4 128 ema-minmax -",
    "rptq-w4a4 128 mse R5",
    "rptq-w4a4 128 ema-minmax R1,R3,R4",  # each site alone in 4 bits
    "rptq-w4a4 128 ema-minmax R1,R4,R5",
    "rptq-w4a4 128 ema-minmax R3,R4,R5",
    "rptq-w4a4 128 ema-minmax R1,R3,R5",
    "rptq-w4a4 128 ema-minmax none",
    "rptq-w4a4 128 ema-minmax R5",
    "rptq-w4a8 128 ema-minmax -",
    "rptq-w8a8 128 ema-minmax -",
    "rptq-w8a8 128 minmax -",
    "rptq-w4a4 128 mse -",
    "rptq-w8a8 32 minmax -",
    "rptq-w4a4 32 mse -",
)


def config(name: str) -> QuantConfig:
    """The scheme of a name."""
    scheme, block, ranges, sites = name.split()
    if sites == "-":
        return QuantConfig(scheme, int(block), rptq=RptqConfig(ranges=ranges))
    eight = () if sites == "none" else tuple(sites.split(","))
    return QuantConfig(scheme, int(block), rptq=RptqConfig(ranges=ranges, eight_bits=eight))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=NAMES, help="of engines; all without")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument(
        "--items", type=int, default=100, help="conversations and summaries; half more answers"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(torch.device("cpu")),
    }
    found |= {
        "model": pocket_quality.MODEL.name,
        "items": given.items,
        "calib_samples": SAMPLES,
        "engines": {},
    }
    if given.json.is_file():
        before = json.loads(given.json.read_text(encoding="utf-8"))
        if before["machine"] != found["machine"] or before["items"] != given.items:
            parser.error(f"{given.json} is of another commit, machine or number of items: name another file")
        found["engines"] = before["engines"]
    pocket_quality.ENGINES |= {name: config(name) for name in given.names}
    pocket_quality.SPOKEN = ("none", *given.names)
    pocket_quality.SAMPLES = SAMPLES
    with tempfile.TemporaryDirectory() as work:
        pocket = pocket_quality.Pocket(Path(work), given.items)
        for name in ("none", *given.names):
            if name in found["engines"] and name != "none":
                continue
            begun = time.perf_counter()
            found["engines"][name] = pocket_quality.measured(pocket, name)
            given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
