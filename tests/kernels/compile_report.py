"""What the compiler reports of every kernel for one GPU that is not there, and what holds for any.

Owns the list of kernels, and the run of compile_kernels.py in a process of its own. A file of tests for each
GPU, so that two workers share the work.

    rows = compiled_for(90, tmp_path)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}  # bytes a program may use
LIMIT = 3600  # seconds, of a machine busy with other things: a guard against a hang, no measure of speed
# Of GPUs with warpgroup products and descriptors.
WARPGROUP_KERNELS = {
    "encoder_attention_kernel",
    "hopper_attention_kernel",
    "packed_direct_kernel",
    "packed_prompt_kernel",
    "prompt_gate_up_kernel",
    "stream_kernel",
    "warpgroup_kernel",
}
KERNELS = {
    "encoder_attention_kernel",
    "feed_tokens_kernel",
    "bin_scores_kernel",
    "find_cut_kernel",
    "few_gate_up_kernel",
    "few_linear_kernel",
    "few_qkv_kernel",
    "dequantize_kernel",
    "expand_int8_kernel",
    "gptq_block_kernel",
    "hopper_attention_kernel",
    "host_rows_kernel",
    "int8_matmul_kernel",
    "invariant_attention_kernel",
    "invariant_linear_kernel",
    "invariant_meet_kernel",
    "likeliest_bound_kernel",
    "list_likeliest_kernel",
    "list_scores_kernel",
    "mask_kernel",
    "merge_likeliest_kernel",
    "norm_kernel",
    "packed_direct_kernel",
    "packed_matmul_kernel",
    "packed_prompt_kernel",
    "paged_attention_merge_kernel",
    "paged_attention_single_kernel",
    "paged_stream_kernel",
    "penalize_kernel",
    "pick_token_kernel",
    "prefill_attention_kernel",
    "prompt_gate_up_kernel",
    "rope_kv_write_kernel",
    "silu_mul_blocks_kernel",
    "silu_mul_int8_kernel",
    "silu_mul_kernel",
    "softcap_kernel",
    "stream_kernel",
    "tile_tops_kernel",
    "upload_step_kernel",
    "tile_weights_kernel",
    "transcript_kernel",
    "warpgroup_kernel",
}


def compiled_for(
    capability: int, cache: Path, cases: Sequence[str] = (), *then: int | str
) -> list[dict[str, Any]]:
    """A row a kernel and launch, of all cases or of some, from a process of its own: this one may run
    Triton's interpreter. ``then`` is another GPU and cases of it, whose rows come last.
    """
    root = Path(__file__).resolve().parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", *map(str, [capability, *cases, *then])],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_all_fit(rows: list[dict[str, Any]], capability: int) -> None:
    """Every kernel is there, for this GPU alone, and takes no more shared memory than it has."""
    assert {row["sm"] for row in rows} == {capability}
    assert {row["kernel"] for row in rows} == KERNELS - (set() if capability >= 90 else WARPGROUP_KERNELS)
    assert [row for row in rows if row["shared"] > SHARED_LIMIT[capability]] == []


def check_lanes_agree(rows: list[dict[str, Any]]) -> None:
    """A sum over a warp's lanes is the same number in each: no kernel adds an unrounded product to it."""
    found = [(row["case"], row["kernel"]) for row in rows if row["products_across_lanes"]]
    assert found == []


def check_int8_products(rows: list[dict[str, Any]], least: int) -> list[dict[str, Any]]:
    """Numbers of 8 bits are multiplied by the tensor cores, into int32, and by nothing else; those rows."""
    found = [row for row in rows if row["case"].startswith(("both in 8 bits", "parts in 8 bits"))]
    found = [row for row in found if row["kernel"] != "norm_kernel"]
    assert len(found) >= least
    for row in found:
        names = list(row["products"])
        assert names, row
        assert all(".s32.s8.s8" in name for name in names), row
    return found


def check_invariant_sums(
    rows: list[dict[str, Any]], least: int, kinds: tuple[str, ...] = ("int8 cache",)
) -> None:
    """Decodes and prompts take different instructions: of 16 bits both must sum neighbouring columns."""
    found = [row for row in rows if row["kernel"] == "invariant_attention_kernel"]
    halves = [row for row in found if "fp32" not in row["case"]]
    for kind in kinds:
        assert len([row for row in halves if row["case"].startswith(kind)]) >= least
    assert [row for row in halves if row["operand_runs"] != [2]] == []


def check_prompt_products(rows: list[dict[str, Any]], least: int) -> None:
    """A step's products are waited for together, not each where it is issued: words are unpacked beside.
    A step of 32 columns has two. Words lie where threads need them: one shuffle tells a warp its number. SiLU
    is computed by warps of its own, a few rows at a time.
    """
    found = [row for row in rows if row["kernel"] == "packed_prompt_kernel"]
    assert len(found) >= least
    waits = [(row["product_waits"], sum(row["products"].values())) for row in found]
    assert [row for row in waits if row[0] is not None and row[0] >= row[1]] == []
    assert [row for row in found if row["moves"].get("shuffles", 0) > 1] == []
    gates = [row for row in found if row["loop"] == "gates"]
    assert gates
    assert [row for row in gates if not 0 < row["arithmetic"]["ex2.approx.f32"] <= 32] == []
