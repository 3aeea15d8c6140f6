"""How fixes and sizes are written and read."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.config.units import parse_size, size_text
from ingot.errors import ConfigError
from ingot.memory.fix_text import told_fixes, where_of

GIB = 1 << 30


def shown(*flags: str) -> list[dict[str, Any]]:
    """Fixes as an error's data has them."""
    return [{"flags": f, "where": where_of(f), "cost": "limits", "note": ""} for f in flags]


class TestWords:
    @pytest.mark.parametrize(
        ("flags", "where"),
        [
            ("--memory-fraction 0.91", "RuntimeConfig(memory_fraction=0.91)"),
            ("--max-seq-len 64", "LLM(max_seq_len=64)"),
            (
                "--max-batch-size 1 --token-budget 64 --cache-tokens 128",
                "LLM(max_batch_size=1, runtime=RuntimeConfig(token_budget=64, cache_tokens=128))",
            ),
            ("--dtype fp16", "ingot build"),
            ("--quant w8a16", "ingot build"),
            ("--dtype fp16 --max-seq-len 64", "ingot build, LLM(max_seq_len=64)"),
            ("--gpu 24GiB", "the machine"),
        ],
    )
    def test_what_takes_them_in_python(self, flags: str, where: str) -> None:
        assert where_of(flags) == where

    def test_a_verb_is_told_its_own_flags(self) -> None:
        fixes = shown("--memory-fraction 0.91", "--max-seq-len 64", "--dtype fp16 --max-seq-len 64")
        takes = {"--max-seq-len", "--device"}
        build = "`ingot build` with --dtype fp16, then --max-seq-len 64 (costs limits)"
        assert told_fixes(fixes, takes) == f"--max-seq-len 64 (costs limits) or {build}"
        both = "`ingot build` with --dtype fp16 --max-seq-len 64 (costs limits)"
        assert told_fixes(fixes[2:], set()) == both
        assert told_fixes(fixes[2:], {"--dtype", *takes}) == "--dtype fp16 --max-seq-len 64 (costs limits)"

    def test_three_at_most_and_never_nothing(self) -> None:
        fixes = shown(*(f"--token-budget {n}" for n in range(5)))
        assert told_fixes(fixes).count(" or ") == 2
        assert (
            told_fixes(fixes, {"--device"})
            == told_fixes([])
            == "stop other processes that use the device's memory"
        )


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("24GiB", 24 * GIB), ("24 gib", 24 * GIB), ("80GB", 80 * 10**9), ("1.5Gi", 3 * GIB // 2)],
    )  # fmt: skip
    def test_are_read(self, text: str, size: int) -> None:
        assert parse_size(text, "--gpu") == size

    @pytest.mark.parametrize("text", ["24", "", "GiB", "-1GiB", "0GB", "24 parsecs", "1e9GB"])
    def test_others_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--gpu"):
            parse_size(text, "--gpu")

    def test_are_written(self) -> None:
        assert [size_text(n) for n in (7, 13_500_000, 2.5e12)] == ["7 bytes", "13.5 MB", "2.50 TB"]
