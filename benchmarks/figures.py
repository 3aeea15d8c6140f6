"""Figures of README and docs, read from docs/results.

A table stands between two comments and is written from JSON by the function of its name in ``tables.py``,
``shape_tables.py``, ``load_table.py``, ``quality_tables.py``, ``source_tables.py``, ``speech_tables.py`` or
``picture_tables.py``.
A figure in a sentence has a comment right behind it, with the file and the path of its value; its own digits
say how it is rounded:

    <!-- figures: headline -->          2.63<!--= headline.json schemes.w8a8.decode.1.p50 --> ms
    | … |
    <!-- end -->

    python benchmarks/figures.py            # exit code 1 where a page says something else than its JSON
    python benchmarks/figures.py --write    # after new measurements
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.result_values import RESULTS, value_at  # noqa: E402

# docs/performance/ is history.
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "ingot").glob("*/README.md")),
)

NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?"
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)
INLINE = re.compile(rf"({NUMBER})<!--= (\S+) (\S[^>]*?) -->")
CODE = re.compile(r"```.*?```|^ {4,}\S.*?$|`[^`\n]*`", re.S | re.M)
UNIT = r"ms|µs|s|GB/s|(?:output )?tokens/s|TOPS|TFLOPS|TFLOP/s"
MEASURED = re.compile(rf"(?<![\w.]){NUMBER} ?(?:{UNIT})(?![\w/])|\d\.\d+e-\d\d|(?<![\w.])\d+e-\d\d")
ROW = re.compile(r"\| \**-?\d[\d,]*\.\d[^|a-z]*\|")  # a cell that is a decimal number
Tables = Mapping[str, Callable[[], str]]


def rounded(value: float, like: str) -> str:
    """A value with as many digits as ``like`` has."""
    plain, _, exponent = like.partition("e")
    digits = len(plain.partition(".")[2])
    if exponent:
        mantissa, _, power = f"{value:.{digits}e}".partition("e")
        return f"{mantissa}e{int(power)}" if len(exponent.lstrip("-")) == 1 else f"{mantissa}e{power}"
    return f"{value:,.{digits}f}" if "," in plain else f"{value:.{digits}f}"


def rewritten(text: str, tables: Tables, results: Path = RESULTS) -> str:
    """A page with the tables and figures that the JSON files give."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{tables[found[2]]()}\n{found[4]}"

    def inline(found: re.Match[str]) -> str:
        value = rounded(value_at(found[2], found[3], results), found[1])
        return f"{value}<!--= {found[2]} {found[3]} -->"

    return INLINE.sub(inline, BLOCK.sub(block, text))


def uncovered(text: str) -> Iterator[str]:
    """Lines with a measured figure (a number and its unit, or a row of decimals) that no JSON gives."""
    free = CODE.sub("", INLINE.sub("", BLOCK.sub("", text)))
    for line in free.splitlines():
        if MEASURED.search(line) or ROW.search(line):
            yield line.strip()


def sources(text: str) -> set[str]:
    """The JSON files that a page's inline figures are of."""
    return {found[2] for found in INLINE.finditer(text)}


def main() -> None:
    from benchmarks.headline_table import write
    from benchmarks.load_table import LOAD_TABLES
    from benchmarks.picture_tables import PICTURE_TABLES
    from benchmarks.quality_tables import QUALITY_TABLES
    from benchmarks.shape_tables import SHAPE_TABLES
    from benchmarks.source_tables import SOURCE_TABLES
    from benchmarks.speech_tables import SPEECH_TABLES
    from benchmarks.tables import GPU_TABLES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="bring the pages in line with the JSON files")
    given = parser.parse_args()
    if given.write:
        write(RESULTS / "headline")
    stale = False
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        others = {**SHAPE_TABLES, **LOAD_TABLES, **QUALITY_TABLES, **SPEECH_TABLES, **SOURCE_TABLES}
        new = rewritten(text, {**GPU_TABLES, **others, **PICTURE_TABLES})
        if given.write:
            page.write_text(new, encoding="utf-8")
        elif new != text:
            print(f"{page.relative_to(ROOT)} differs from its JSON: run python benchmarks/figures.py --write")
            stale = True
        for line in uncovered(new):
            print(f"{page.relative_to(ROOT)}: no file has the figure of: {line}")
            stale = True
    sys.exit(stale)


if __name__ == "__main__":
    main()
