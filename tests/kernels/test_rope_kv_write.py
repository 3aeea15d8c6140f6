"""Head norms, rotary embedding, logn scaling and the cache write against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from ingot.errors import IngotError
from ingot.kernels.cache.rope_kv_write import QkvParts
from tests.kernels.flat_calls import rope_kv_write, rope_kv_write_triton
from tests.kernels.numerics import DTYPES, IMPLEMENTATIONS, Implementation, assert_near, normal

SLOTS = [37, -1, 0, 21, 5]
POSITIONS = [29, 0, 3, 40, 12]
CASES = {
    # heads, kv_heads, head_dim, rotary_dim, norm, logn_length
    "plain": (4, 2, 64, 64, False, 0),
    "gpt2": (3, 3, 64, 0, False, 0),
    "tiny": (1, 1, 8, 8, False, 0),
    "partial": (6, 1, 48, 24, False, 0),
    "wide": (2, 2, 80, 80, False, 0),
    "qwen3": (8, 2, 128, 128, True, 0),
    "qwen": (2, 2, 128, 128, False, 8),
    "everything": (5, 5, 96, 32, True, 8),
    "norm_only": (2, 1, 32, 0, True, 0),
    "no queries": (0, 20, 64, 0, False, 0),
}


def make_arguments(case: str, dtype: torch.dtype, device: str) -> tuple[list[Any], dict[str, Any]]:
    heads, kv_heads, head_dim, rotary_dim, norm, logn = CASES[case]
    tokens = len(SLOTS)
    qkv = normal(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    table = None
    if rotary_dim:
        angles = torch.arange(50)[:, None] * 100.0 ** (-torch.arange(rotary_dim // 2) * 2 / rotary_dim)
        table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    positions = torch.tensor(POSITIONS, device=device)
    slots = torch.tensor(SLOTS, device=device)
    caches = [
        torch.full((3, kv_heads, 16, head_dim), fill, dtype=dtype, device=device) for fill in (7.0, 9.0)
    ]
    options: dict[str, Any] = {"norm_eps": 1e-6, "logn_length": logn}
    if norm:
        options["q_norm_weight"] = normal(head_dim, dtype=dtype, device=device, seed=3)
        options["k_norm_weight"] = normal(head_dim, dtype=dtype, device=device, seed=4)
    rows = positions + 2  # a request whose table starts at row 2
    return [qkv, table, rows, positions, slots, *caches, heads, kv_heads, head_dim], options


def expected_in_float64(arguments: list[Any], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Token by token, head by head, channel pair by channel pair: q, key cache, value cache."""
    qkv, table, rows, positions, slots, keys, values, heads, kv_heads, head_dim = arguments
    wide = qkv.double().view(len(qkv), -1, head_dim).clone()
    keys, values = keys.double().clone(), values.double().clone()
    for token in range(len(qkv)):
        for head in range(heads + kv_heads):
            x = wide[token, head]
            if "q_norm_weight" in options:
                weight = options["q_norm_weight" if head < heads else "k_norm_weight"].double()
                x = x / math.sqrt(float((x**2).mean()) + options["norm_eps"]) * weight
            if table is not None:
                half = table.shape[1] // 2
                cos, sin = table[rows[token], :half].double(), table[rows[token], half:].double()
                a, b = x[:half].clone(), x[half : 2 * half].clone()
                x = torch.cat((a * cos - b * sin, b * cos + a * sin, x[2 * half :]))
            if options["logn_length"] and head < heads:
                x = x * max(1.0, math.log(positions[token] + 1, options["logn_length"]))
            wide[token, head] = x
        slot = int(slots[token])
        if slot >= 0:
            keys[slot // 16, :, slot % 16] = wide[token, heads : heads + kv_heads]
            values[slot // 16, :, slot % 16] = wide[token, heads + kv_heads :]
    return wide[:, :heads], keys, values


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_rope_kv_write(impl: Implementation, dtype: torch.dtype, case: str) -> None:
    arguments, options = make_arguments(case, dtype, impl.device)
    q64, keys64, values64 = expected_in_float64(arguments, options)
    q = impl(rope_kv_write, rope_kv_write_triton)(*arguments, **options)
    assert q.is_contiguous()
    loosen = 4 if CASES[case][4] else 1  # the norm rounds once more, and rotation subtracts rounded values
    assert_near(q, q64, loosen)
    assert_near(arguments[5], keys64, loosen)
    assert torch.equal(arguments[6].double(), values64), "values are copied, not computed"


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_norms_round_before_the_weight(impl: Implementation, dtype: torch.dtype) -> None:
    """As RMSNorm does: nearly every value bit by bit, since sums in fp32 have another order."""
    arguments, options = make_arguments("norm_only", dtype, impl.device)
    heads = arguments[0].double().view(len(SLOTS), -1, 32)[:, :2]
    normed = heads / torch.sqrt((heads**2).mean(-1, keepdim=True) + options["norm_eps"])
    expected = normed.to(dtype) * options["q_norm_weight"]
    q = impl(rope_kv_write, rope_kv_write_triton)(*arguments, **options)
    assert float((q == expected).double().mean()) > 0.99


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wide_head_norms_round_after_the_weight(impl: Implementation, dtype: torch.dtype) -> None:
    """As Gemma-3's class does with a 16-bit weight plus one in fp32: rounded once, in queries and keys."""
    arguments, options = make_arguments("norm_only", dtype, impl.device)
    stored = options.pop("q_norm_weight"), options.pop("k_norm_weight")
    wide = {f"{part}_norm_weight": 1 + weight.float() for part, weight in zip("qk", stored, strict=True)}
    heads = arguments[0].view(len(SLOTS), -1, 32)
    q = impl(rope_kv_write, rope_kv_write_triton)(*arguments, **options, **wide)
    written = [(place, slot) for place, slot in enumerate(SLOTS) if slot >= 0]
    keys = torch.stack([arguments[5][slot // 16, :, slot % 16] for _, slot in written])
    given = heads[:, :2], heads[[place for place, _ in written], 2:3]
    for got, rows, weight in zip((q, keys), given, stored, strict=True):
        theirs = Gemma3RMSNorm(32, options["norm_eps"]).to(got)
        theirs.weight.data = weight
        assert float((got == theirs(rows)).double().mean()) > 0.99
    narrow = {name: weight.to(dtype) for name, weight in wide.items()}
    rounded = impl(rope_kv_write, rope_kv_write_triton)(*arguments, **options, **narrow)
    assert float((rounded == q).double().mean()) < 0.95, "rounding the weight shows"


@pytest.mark.grid(1)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("biased", [False, True])
def test_parts_are_added_up_first(impl: Implementation, dtype: torch.dtype, case: str, biased: bool) -> None:
    """As of the sum, rounded once: values to the bit, queries and keys but for the last of them."""
    found = []
    for added in (False, True):
        arguments, options = make_arguments(case, dtype, impl.device)
        width = arguments[0].shape[1]
        parts = normal(2, len(SLOTS), width, dtype=torch.float32, device=impl.device, seed=7)
        bias = normal(width, dtype=dtype, device=impl.device, seed=8) if biased else None
        arguments[0] = QkvParts(parts, bias, dtype)
        arguments[0] = arguments[0].product() if added else arguments[0]
        q = impl(rope_kv_write, rope_kv_write_triton)(*arguments, **options)
        found.append((q, arguments[5], arguments[6]))
    (q, keys, values), (wanted_q, wanted_keys, wanted_values) = found
    assert q.dtype == dtype
    assert torch.equal(values, wanted_values)
    assert_near(q, wanted_q.double())
    assert_near(keys, wanted_keys.double())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_heads", [1, 16])
def test_other_tiles_strided_rows_and_a_strided_cache(impl: Implementation, block_heads: int) -> None:
    arguments, options = make_arguments("everything", torch.float32, impl.device)
    q64, keys64, values64 = expected_in_float64(arguments, options)
    arguments[0] = torch.nn.functional.pad(arguments[0], (0, 16))[:, :-16]
    both = torch.stack((arguments[5], arguments[6]), dim=1)  # [num_blocks, 2, kv_heads, block_size, head_dim]
    arguments[5], arguments[6] = both[:, 0], both[:, 1]
    options["tiles"] = {"BLOCK_HEADS": block_heads, "num_warps": 1}
    assert_near(impl(rope_kv_write, rope_kv_write_triton)(*arguments, **options), q64)
    assert_near(both[:, 0], keys64)
    assert_near(both[:, 1], values64)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_tokens(impl: Implementation) -> None:
    arguments, options = make_arguments("plain", torch.float32, impl.device)
    for index in (0, 2, 3, 4):
        arguments[index] = arguments[index][:0]
    assert impl(rope_kv_write, rope_kv_write_triton)(*arguments, **options).shape == (0, 4, 64)
    assert (arguments[5] == 7).all()


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(5, 100), "qkv has the wrong shape"),
        (1, torch.zeros(50, 66), "rotary_dim"),
        (1, torch.zeros(50, 64).half(), "cos_sin has the wrong dtype"),
        (2, torch.zeros(4, dtype=torch.int64), "rope_rows has the wrong shape"),
        (4, torch.zeros(5, dtype=torch.int32), "slot_mapping has the wrong dtype"),
        (5, torch.zeros(3, 2, 16, 32), "key_cache has the wrong shape"),
        (6, torch.zeros(3, 2, 32, 64)[:, :, ::2], "differ in layout"),
        (8, 3, "multiple"),
        (0, QkvParts(torch.zeros(2, 5, 100), None, torch.float32), "qkv has the wrong shape"),
        (0, QkvParts(torch.zeros(2, 5, 512).half(), None, torch.float32), "qkv has the wrong dtype"),
        (0, QkvParts(torch.zeros(2, 5, 512), torch.zeros(4), torch.float32), "bias has the wrong shape"),
    ],
)
def test_refused(index: int, value: Any, message: str) -> None:
    arguments, options = make_arguments("plain", torch.float32, "cpu")
    arguments[index] = value
    with pytest.raises(IngotError, match=message):
        rope_kv_write(*arguments, **options)


def test_refused_options() -> None:
    arguments, options = make_arguments("plain", torch.float32, "cpu")
    with pytest.raises(IngotError, match="k_norm_weight has the wrong shape"):
        rope_kv_write(*arguments, **options, q_norm_weight=torch.zeros(64), k_norm_weight=torch.zeros(32))
    weight = torch.zeros(64)
    with pytest.raises(IngotError, match="k_norm_weight has the wrong dtype"):
        rope_kv_write(*arguments, **options, q_norm_weight=weight, k_norm_weight=weight.half())
    with pytest.raises(IngotError, match="logn_length"):
        rope_kv_write(*arguments, logn_length=1)
