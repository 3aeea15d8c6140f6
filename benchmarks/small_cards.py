"""What fits small cards, by the memory ledger alone: one request of 1,024 tokens of the 7B and the 14B shape,
at 8, 12, 16 and 24 GiB. Nothing is measured: the figures are what ``ingot plan`` computes.

    python benchmarks/small_cards.py --json docs/results/small_cards.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.building.ledger_source import read_setting
from ingot.config.quantization.quant_file import read_quant
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import resolve_device
from ingot.measure.side.machine import machine
from ingot.memory.ledger import Capacity, Ledger, MemorySetting, ledger

FILES = {"7B": "llama-7b.json", "14B": "qwen2.5-14b-like.json"}
SHAPES = {name: str(Path(__file__).parent / "shapes" / file) for name, file in FILES.items()}
CARDS_GIB = (8, 12, 16, 24)
TOKENS = 1024
HOST = {"embedding": "host"}
INT8_CACHE = {"kv_dtype": "int8", "memory_fraction": 0.95}  # the largest fraction that plan offers
# name: scheme, scheme of the head, values of RuntimeConfig
SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "16 bits": ("none", "none", {}),
    "w8a16": ("w8a16", "none", {}),
    "w4a16": ("w4a16", "none", {}),
    "w4a16, head in 8 bits": ("w4a16", "w8a16", {}),
    "w4a16, embedding on the host": ("w4a16", "none", HOST),
    "w4a16, head in 8 bits, embedding on the host": ("w4a16", "w8a16", HOST),
    "w4a16, int8 cache, memory_fraction 0.95": ("w4a16", "none", INT8_CACHE),
}


def setting_of(shape: str, name: str) -> MemorySetting:
    """One request of 1,024 tokens in a setting of ``SETTINGS``."""
    scheme, head, runtime = SETTINGS[name]
    return read_setting(
        SHAPES[shape],
        quant=read_quant(scheme).replace(head=head),
        max_batch_size=1,
        max_seq_len=TOKENS,
        runtime=RuntimeConfig(**runtime),
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, where larger ones need more; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def on_card(setting: MemorySetting, gib: int) -> dict[str, Any]:
    """Whether it fits a card of so many GiB, missing bytes, and the longest request that fits."""
    capacity = Capacity(f"{gib} GiB", gib << 30)
    found = ledger(setting, capacity)
    assert found.usable is not None

    def fits(tokens: int) -> bool:
        return ledger(setting.replace(max_seq_len=tokens), capacity).fits

    return {
        "gib": gib,
        "usable": found.usable,
        "fits": found.fits,
        "missing": max(0, found.needed - found.usable),
        "longest": largest(fits, setting.model.max_positions),
    }


def row(shape: str, name: str) -> dict[str, Any]:
    setting = setting_of(shape, name)
    found: Ledger = ledger(setting)
    scheme, head, runtime = SETTINGS[name]
    return {
        "shape": shape,
        "setting": name,
        "dtype": setting.dtype,
        "quant": scheme,
        "head": head,
        "runtime": runtime,
        "needed": found.needed,
        "items": {f"{item.kind}: {item.name}": item.bytes for item in found.items},
        "kinds": {kind: found.of(kind) for kind in dict.fromkeys(item.kind for item in found.items)},
        "cards": [on_card(setting, gib) for gib in CARDS_GIB],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write command and figures here")
    arguments = parser.parse_args()
    rows = [row(shape, name) for shape in SHAPES for name in SETTINGS]
    for one in rows:
        fits = ", ".join(f"{card['gib']} GiB {'yes' if card['fits'] else 'no'}" for card in one["cards"])
        print(f"{one['shape']:4} {one['setting']:45} {one['needed'] / 1e9:6.2f} GB   {fits}")
    if arguments.json:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine(resolve_device("cpu")),
            "tokens": TOKENS,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
