"""The table of a server's load curve, as Markdown.

print(LOAD_TABLES["load-curve"]())
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.result_values import value_at as of
from benchmarks.tables import Row, at, markdown

SIDES = {"Ingot": "load_curve/ingot.json", "vLLM 0.22.1": "load_curve/vllm.json"}
COLUMNS = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("tpot_ms", "p90"), ("itl_ms", "p99"))


def load_curve() -> str:
    """docs/serving-load.md: rates of requests, both servers on one GPU."""
    head = ["requests/s", "server", "output tokens/s"]
    head += [f"{name.removesuffix('_ms').upper()} {percent}, ms" for name, percent in COLUMNS]
    sides = {name: of(file)["results"] for name, file in SIDES.items()}
    rows = []
    for both in zip(*sides.values(), strict=True):
        assert len({one["load"] for one in both}) == 1
        for name, one in zip(sides, both, strict=True):
            rows.append([str(round(one["rate"])), name, *_figures(one)])
    return markdown(head, rows)


def _figures(one: Row) -> list[str]:
    speed = at(one, "output_tokens_per_s", digits=4)
    return [speed, *(at(one, name, percent) for name, percent in COLUMNS)]


LOAD_TABLES: dict[str, Callable[[], str]] = {"load-curve": load_curve}
