"""The tables of the docs about what a build compares with its checkpoint, from the records of
``source_faults.py``.

    print(SOURCE_TABLES["source-faults"]())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.result_values import significant
from benchmarks.result_values import value_at as of
from benchmarks.tables import NONE, made_by, markdown

Row = dict[str, Any]
FAULTS, ALARMS = "source_faults_cpu.json", "source_false_alarms_cpu.json"
COSTS = {"source_cost_7b.json": "7B shape", "source_cost_pocket_cpu.json": "models/pocket-chat"}
SHOWN = (
    *("dense", "w8a16", "w4a16", "w4a16 gptq", "w4a16 awq", "w8a8", "w8a8 smoothquant"),
    *("w4a8", "w4a8 gptq", "rptq-w8a8", "rptq-w4a8"),
)


def _cell(row: Row | None) -> str:
    if row is None:
        return NONE
    if not row["differences"]:
        return "passes" if row["fault"] is None else "**not seen**"
    share = row["share"]
    if row["measure"] == "copied" or share is None:
        return "refused"
    return "refused, > 1000" if share > 1000 else f"refused, {significant(share, 2)}"


def faults() -> str:
    """Faults by schemes: by how many times the limit the worst measure is off."""
    rows: list[Row] = of(FAULTS, "rows")
    cells = {(row["fault"], row["scheme"]): row for row in rows}
    named = list(dict.fromkeys(row["fault"] for row in rows))
    table = markdown(
        ["fault", *SHOWN],
        [[fault or "none", *(_cell(cells.get((fault, scheme))) for scheme in SHOWN)] for fault in named],
    )
    planted = [row for row in rows if row["fault"] is not None]
    unseen = [f"{row['scheme']}: {row['fault']}" for row in planted if not row["differences"]]
    schemes = len({row["scheme"] for row in rows})
    refused = f"{len(planted) - len(unseen)} of {len(planted)} faults in {schemes} schemes are refused"
    return f"{table}\n\n{refused}; not seen: {'; '.join(unseen) or 'none'}. {made_by(FAULTS)}."


def alarms() -> str:
    """How many sound engines were refused."""
    rows: list[Row] = of(ALARMS, "rows")
    wrong = sum(row["differences"] > 0 for row in rows)
    schemes, kinds = (len({row[key] for row in rows}) for key in ("scheme", "kind"))
    most = max(row["worst"] for row in rows)
    return (
        f"{wrong} of {len(rows)} sound engines, each of another seed, of {schemes} schemes and {kinds} "
        f"architectures were refused; the largest deviation was {most:.4g} of its limit. {made_by(ALARMS)}."
    )


def cost() -> str:
    """The comparison's seconds and its share of builds."""
    sides = [(name, row) for file, name in COSTS.items() for row in of(file, "rows")]
    table = markdown(
        ["checkpoint", "scheme", "build, s", "comparison, s", "of the build"],
        [
            [
                name,
                row["scheme"],
                significant(row["seconds"], 3),
                significant(row["comparison_s"], 3),
                f"{100 * row['share']:.1f} %",
            ]
            for name, row in sides
        ],
    )
    return f"{table}\n\n{' '.join(f'{made_by(file)}.' for file in COSTS)}"


SOURCE_TABLES: dict[str, Callable[[], str]] = {
    "source-faults": faults,
    "source-alarms": alarms,
    "source-cost": cost,
}
