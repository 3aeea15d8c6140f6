"""How fixes and sizes are written and read."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.cli.terminal.field_flags import fixes_text
from ingot.config.units import parse_size, size_text
from ingot.errors import ConfigError
from ingot.memory.fix_text import fixes_in_python, where_of

GIB = 1 << 30


def shown(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Fixes as an error's data has them."""
    return [{"changes": one, "where": where_of(one), "cost": "limits", "note": ""} for one in changes]


class TestWords:
    @pytest.mark.parametrize(
        ("changes", "where"),
        [
            ({"memory_fraction": 0.91}, "RuntimeConfig(memory_fraction=0.91)"),
            ({"max_seq_len": 64}, "LLM(max_seq_len=64)"),
            (
                {"max_batch_size": 1, "token_budget": 64, "cache_tokens": 128},
                "LLM(max_batch_size=1, runtime=RuntimeConfig(token_budget=64, cache_tokens=128))",
            ),
            ({"kv_dtype": "int8"}, "RuntimeConfig(kv_dtype='int8')"),
            ({"dtype": "fp16"}, "build(dtype='fp16')"),
            ({"quant": "w8a16"}, "build(quant='w8a16')"),
            ({"dtype": "fp16", "max_seq_len": 64}, "build(dtype='fp16'), LLM(max_seq_len=64)"),
            ({"gpu": "24GiB"}, "the machine"),
        ],
    )
    def test_what_takes_them_in_python(self, changes: dict[str, Any], where: str) -> None:
        assert where_of(changes) == where
        note = fixes_in_python(shown(changes))
        assert note == f"{where} (costs limits)"

    def test_a_verb_shows_its_own_flags(self) -> None:
        both_changes = {"dtype": "fp16", "max_seq_len": 64}
        fixes = shown({"memory_fraction": 0.91}, {"max_seq_len": 64}, both_changes)
        takes = {"--max-seq-len", "--device"}
        build = "`ingot build` with --dtype fp16, then --max-seq-len 64 (costs limits)"
        assert fixes_text(fixes, takes) == f"--max-seq-len 64 (costs limits) or {build}"
        both = "`ingot build` with --dtype fp16 --max-seq-len 64 (costs limits)"
        assert fixes_text(fixes[2:], set()) == both
        assert fixes_text(fixes[2:], {"--dtype", *takes}) == "--dtype fp16 --max-seq-len 64 (costs limits)"
        assert fixes_text(fixes[:1], {"--memory-fraction"}) == "--memory-fraction 0.91 (costs limits)"

    def test_three_at_most_and_never_nothing(self) -> None:
        fixes = shown(*({"token_budget": n} for n in range(5)))
        assert fixes_in_python(fixes).count(" or ") == 2
        assert (
            fixes_text(fixes, {"--device"})
            == fixes_in_python([])
            == "stop other processes that use the device's memory"
        )


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("24GiB", 24 * GIB), ("24 gib", 24 * GIB), ("80GB", 80 * 10**9), ("1.5Gi", 3 * GIB // 2)],
    )  # fmt: skip
    def test_are_read(self, text: str, size: int) -> None:
        assert parse_size(text, "gpu") == size

    @pytest.mark.parametrize("text", ["24", "", "GiB", "-1GiB", "0GB", "24 parsecs", "1e9GB"])
    def test_others_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="gpu"):
            parse_size(text, "gpu")

    def test_are_written(self) -> None:
        assert [size_text(n) for n in (7, 13_500_000, 2.5e12)] == ["7 bytes", "13.5 MB", "2.50 TB"]
