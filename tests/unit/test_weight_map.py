"""Weight maps: each rule, layers and prefixes, and one error that lists all mismatches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.checkpoint.name_rules import Rule
from ingot.checkpoint.shard_reader import TensorInfo
from ingot.checkpoint.weight_map import (
    Concat,
    Ignore,
    Rename,
    RowsFrom,
    SplitRule,
    Tie,
    Transpose,
    WeightMap,
    resolve,
)
from ingot.errors import CheckpointError

LLAMA: tuple[Rule, ...] = (
    Rename("embed.weight", "model.embed_tokens.weight"),
    Concat(
        "layers.{layer}.qkv.weight",
        tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.weight" for part in "qkv"),
    ),
    Rename("layers.{layer}.o.weight", "model.layers.{layer}.self_attn.o_proj.weight"),
    Concat(
        "layers.{layer}.gate_up.weight",
        ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
    ),
    Rename("layers.{layer}.down.weight", "model.layers.{layer}.mlp.down_proj.weight"),
    Rename("layers.{layer}.norm1.weight", "model.layers.{layer}.input_layernorm.weight"),
    Rename("layers.{layer}.norm2.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
    Rename("norm.weight", "model.norm.weight"),
    Ignore("*.rotary_emb.inv_freq"),
)


def infos(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(shape, torch.float32, "f") for name, shape in shapes.items()}


def stored(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    (folder / "config.json").write_text("{}")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return open_checkpoint(folder)


def llama_shapes(hidden: int, kv: int, inner: int, vocab: int, layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocab, hidden)}
    for layer in range(layers):
        shapes |= {
            f"layers.{layer}.norm1.weight": (hidden,),
            f"layers.{layer}.qkv.weight": (hidden + 2 * kv, hidden),
            f"layers.{layer}.o.weight": (hidden, hidden),
            f"layers.{layer}.norm2.weight": (hidden,),
            f"layers.{layer}.gate_up.weight": (2 * inner, hidden),
            f"layers.{layer}.down.weight": (hidden, inner),
        }
    return shapes | {"norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def fails(
    weight_map: WeightMap, available: dict[str, TensorInfo], expected: dict[str, tuple[int, ...]]
) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(weight_map, available, expected)
    return str(caught.value)


def test_llama_bin_with_its_inv_freq(golden: Path) -> None:
    with open_checkpoint(golden / "minigpt4/weight/llama") as checkpoint:
        weights = WeightMap((*LLAMA, Rename("lm_head.weight", "lm_head.weight")), num_layers=2)
        expected = llama_shapes(128, 128, 352, 513, 2)
        mapped = resolve(weights, checkpoint.tensors, expected)
        assert [m.target for m in mapped] == list(expected)
        tensors = {m.target: m.load(checkpoint) for m in mapped}
        for m in mapped:
            tensor = tensors[m.target]
            assert tensor.is_contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (m.shape, m.dtype)
            assert (m.shape, m.dtype) == (expected[m.target], torch.float16)
        for row, part in enumerate("qkv"):
            rows = tensors["layers.1.qkv.weight"][row * 128 : (row + 1) * 128]
            assert torch.equal(rows, checkpoint.read(f"model.layers.1.self_attn.{part}_proj.weight"))


def test_llama_tied_with_grouped_queries(golden: Path) -> None:
    folder = golden / "llama_aidreams260K/hf"
    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    expected = llama_shapes(hidden, kv, config["intermediate_size"], config["vocab_size"], layers)
    with open_checkpoint(folder) as checkpoint:
        weights = WeightMap((*LLAMA, Tie("lm_head.weight", "embed.weight")), num_layers=layers)
        head = resolve(weights, checkpoint.tensors, expected)[-1]
        assert (head.target, head.tied_to) == ("lm_head.weight", "embed.weight")
        assert torch.equal(head.load(checkpoint), checkpoint.read("model.embed_tokens.weight"))


def test_qwen_prefix_with_a_head_beside_it(golden: Path) -> None:
    rules: tuple[Rule, ...] = (
        Rename("embed.weight", "wte.weight"),
        Rename("layers.{layer}.qkv.weight", "h.{layer}.attn.c_attn.weight"),
        Rename("lm_head.weight", "lm_head.weight"),
        Ignore("h.*.c_attn.bias"),
        Ignore("h.*.mlp.*"),
        Ignore("h.*.c_proj.weight"),
        Ignore("*ln_?.weight"),
    )
    with open_checkpoint(golden / "qwen_v1_1_safetensors/hf") as checkpoint:
        weights = WeightMap(rules, num_layers=3, prefixes=("transformer.", ""))
        expected = {"embed.weight": (512, 128), "lm_head.weight": (512, 128)}
        expected |= {f"layers.{layer}.qkv.weight": (384, 128) for layer in range(3)}
        mapped = {m.target: m.sources for m in resolve(weights, checkpoint.tensors, expected)}
    assert mapped["layers.2.qkv.weight"] == ("transformer.h.2.attn.c_attn.weight",)
    assert mapped["lm_head.weight"] == ("lm_head.weight",)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_prefixes(prefix: str) -> None:
    weights = WeightMap(
        (Rename("a", "wte"), Rename("b", "h.b"), Ignore("h.bias")), prefixes=("transformer.", "")
    )
    names = [f"{prefix}{name}" for name in ("wte", "h.b", "h.bias")]
    available = {name: TensorInfo((2,), torch.float32, "f") for name in names}
    mapped = resolve(weights, available, {"b": (2,), "a": (2,)})
    assert [(m.target, m.sources) for m in mapped] == [("b", (f"{prefix}h.b",)), ("a", (f"{prefix}wte",))]


def test_the_prefixed_name_is_taken_where_both_are_there() -> None:
    weights = WeightMap((Rename("a", "wte"), Rename("b", "h.b")), prefixes=("transformer.", ""))
    available = dict.fromkeys(
        ("wte", "transformer.wte", "transformer.h.b"), TensorInfo((2,), torch.half, "f")
    )
    reported = fails(weights, available, {"a": (2,), "b": (2,)})
    assert re.search(r"unexpected tensors in the checkpoint \(1\): wte\b", reported)
    weights = WeightMap((*weights.rules, Ignore("wte")), prefixes=weights.prefixes)
    assert resolve(weights, available, {"a": (2,), "b": (2,)})[0].sources == ("transformer.wte",)


def test_transpose_concat_split_values(tmp_path: Path) -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.arange(10.0, 14.0).view(2, 2)
    rules = (Transpose("t", "a"), Concat("c", ("a", "b"), dim=1), SplitRule(("p", "q"), "b2", (1, 3), dim=-1))
    with stored(tmp_path, a=a, b=b, b2=torch.arange(8.0).view(2, 4)) as checkpoint:
        expected = {"q": (2, 3), "c": (2, 5), "t": (3, 2), "p": (2, 1)}
        made = {m.target: m.load(checkpoint) for m in resolve(WeightMap(rules), checkpoint.tensors, expected)}
    assert made["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert made["c"].tolist() == [[0, 1, 2, 10, 11], [3, 4, 5, 12, 13]]
    assert made["p"].tolist() == [[0], [4]]
    assert made["q"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert all(t.is_contiguous() for t in made.values())


def test_split_parts_share_no_memory(tmp_path: Path) -> None:
    with stored(tmp_path, x=torch.zeros(4, 2)) as checkpoint:
        weights = WeightMap((SplitRule(("p", "q"), "x", (2, 2)),))
        first, second = resolve(weights, checkpoint.tensors, {"p": (2, 2), "q": (2, 2)})
        p, q = first.load(checkpoint), second.load(checkpoint)
    assert p.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()
    assert p.untyped_storage().nbytes() == 16


def test_concat_of_two_dtypes_takes_the_one_that_holds_both(tmp_path: Path) -> None:
    parts = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(1, dtype=torch.float16)}
    with stored(tmp_path, **parts) as checkpoint:
        (mapped,) = resolve(WeightMap((Concat("c", ("a", "b")),)), checkpoint.tensors, {"c": (3,)})
        assert mapped.dtype == mapped.load(checkpoint).dtype == torch.float32


@pytest.mark.parametrize("copy", [None, "lm_head", "transformer.lm_head"])
@pytest.mark.parametrize("listed", [True, False])
def test_a_tie_takes_a_copy_or_none(copy: str | None, listed: bool) -> None:
    weights = WeightMap((Rename("embed", "wte"), Tie("lm_head", "embed")), prefixes=("transformer.", ""))
    names = ["transformer.wte", *([copy] if copy else [])]
    available = {name: TensorInfo((4, 2), torch.bfloat16, "f") for name in names}
    mapped = resolve(weights, available, {"embed": (4, 2), **({"lm_head": (4, 2)} if listed else {})})
    assert [m.tied_to for m in mapped] == [None, "embed"][: 1 + listed]
    assert all(m.sources == ("transformer.wte",) for m in mapped)


def test_a_copy_of_another_name() -> None:
    weights = WeightMap((Rename("embed", "wte"), Tie("head", "embed", copy="lm_head.weight")))
    available = {name: TensorInfo((4,), torch.float32, "f") for name in ("wte", "lm_head.weight")}
    assert len(resolve(weights, available, {"embed": (4,), "head": (4,)})) == 2


def test_some_layers_are_numbered_from_0(golden: Path) -> None:
    with open_checkpoint(golden / "minigpt4/weight/llama") as checkpoint:
        weights = WeightMap((*LLAMA, Rename("lm_head.weight", "lm_head.weight")), num_layers=2, layers=(1, 2))
        expected = llama_shapes(128, 128, 352, 513, 1)
        mapped = {m.target: m for m in resolve(weights, checkpoint.tensors, expected)}
        assert mapped["layers.0.o.weight"].sources == ("model.layers.1.self_attn.o_proj.weight",)
        assert not any("layers.0." in source for m in mapped.values() for source in m.sources)


def test_left_out_layers_may_be_absent() -> None:
    weights = WeightMap((Rename("l.{layer}", "h.{layer}"),), num_layers=40, layers=(0, 1))
    assert len(resolve(weights, {"h.0": TensorInfo((1,), torch.float32, "f")}, {"l.0": (1,)})) == 1
    beyond = {f"h.{n}": TensorInfo((1,), torch.float32, "f") for n in (0, 39, 40)}
    text = fails(weights, beyond, {"l.0": (1,)})
    assert "unexpected tensors in the checkpoint (1): h.40" in text


@pytest.mark.parametrize("layers", [(0, 0), (2, 1), (-1, 1), (0, 5)])
def test_a_range_that_is_none(layers: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError, match="layers=START:END"):
        WeightMap((), num_layers=4, layers=layers)


def test_one_error_lists_all() -> None:
    rules = (
        Rename("fine", "fine"),
        Rename("gone", "gone"),
        Rename("typo", "spare"),
        Concat("pair", ("left", "right"), dim=0),
        SplitRule(("one", "two"), "whole", (2, 2)),
        Transpose("turned", "cube"),
        Rename("wide", "wide"),
        Tie("head", "nowhere"),
    )
    available = infos(
        fine=(1,), spare=(1,), left=(2, 3), right=(2, 4), whole=(5,), cube=(1, 2, 3), wide=(7, 8), extra=(1,)
    )
    names = ("fine", "gone", "tipo", "one", "two", "turned")
    expected: dict[str, tuple[int, ...]] = {**dict.fromkeys(names, (2,)), "fine": (1,)}
    expected |= {"pair": (4, 3), "wide": (8, 7)}
    text = fails(WeightMap(rules), available, expected)
    for line in (
        "missing from the checkpoint (1): gone (for gone)",
        "unexpected tensors in the checkpoint (1): extra",
        "that the model does not have (2): typo, nowhere (for the tied head)",
        "tensors of the model that no rule makes (1): tipo",
        "mis-shaped (5): ",
        "one: whole [5] is not [2, 2] along 0",
        "turned: only a matrix can be transposed, cube is [1, 2, 3]",
        "pair: cannot be joined along 0: left [2, 3], right [2, 4]",
        "wide: [7, 8] from wide, the model has [8, 7]",
    ):
        assert line in text
    assert "fine" not in text


def test_a_target_is_made_once() -> None:
    rules = (Rename("a", "x"), Rename("a", "y"), Tie("b", "a"), Rename("b", "z"))
    text = fails(WeightMap(rules), infos(x=(1,), y=(1,), z=(1,)), {"a": (1,), "b": (1,)})
    assert "made by two rules (2): a, b" in text


def test_long_lists_are_shortened() -> None:
    weights = WeightMap((Rename("l.{layer}", "h.{layer}"),), num_layers=30)
    text = fails(weights, {}, {f"l.{n}": (1,) for n in range(30)})
    assert "missing from the checkpoint (30): h.0 (for l.0)" in text
    assert "and 22 more" in text
    assert "h.29" not in text


def test_8_bit_floats_do_not_join_others() -> None:
    available = {
        "a": TensorInfo((1,), torch.float8_e4m3fn, "f"),
        "b": TensorInfo((1,), torch.float8_e5m2, "f"),
    }
    assert "mis-shaped (1): c:" in fails(WeightMap((Concat("c", ("a", "b")),)), available, {"c": (2,)})


def test_a_scalar_cannot_be_split_or_joined() -> None:
    rules = (SplitRule(("a", "b"), "x", (1, 1)), Concat("c", ("x", "x")))
    text = fails(WeightMap(rules), infos(x=()), {"a": (1,), "b": (1,), "c": (2,)})
    assert "mis-shaped (3)" in text
    assert "there is no dimension 0: x []" in text


def test_a_gap_puts_zeros_before_a_source() -> None:
    biases = (torch.ones(2), torch.full((2,), 3.0))
    rule = Concat("layers.{layer}.qkv.bias", ("h.{layer}.q.bias", "h.{layer}.v.bias"), gap=(1, 2)).bind(4, 0)
    assert (rule.target, rule.sources) == ("layers.0.qkv.bias", ("h.4.q.bias", "h.4.v.bias"))
    assert rule.shape(rule.target, [(2,), (2,)]) == (6,)
    assert rule.build(rule.target, biases).tolist() == [1, 1, 0, 0, 3, 3]
    first = Concat("kv.bias", ("v.bias",), gap=(0, 2))
    assert first.build("kv.bias", biases[1:]).tolist() == [0, 0, 3, 3]
    assert Concat("qk", ("q", "k")).shape("qk", [(2, 5), (2, 5)]) == (4, 5)


def test_rows_from_a_place_on(tmp_path: Path) -> None:
    """What is before is not kept in memory; a table without such a row is named."""
    weights = WeightMap((RowsFrom("positions", "table", start=2),))
    table = torch.arange(10.0).view(5, 2)
    with stored(tmp_path, table=table) as checkpoint:
        (mapped,) = resolve(weights, checkpoint.tensors, {"positions": (3, 2)})
        found = mapped.load(checkpoint)
    assert found.tolist() == [[4, 5], [6, 7], [8, 9]]
    assert found.untyped_storage().nbytes() == found.nbytes
    for shape in ((2, 2), ()):
        with pytest.raises(CheckpointError, match=re.escape(f"table {list(shape)} has no row 2")):
            resolve(weights, infos(table=shape), {"positions": (3, 2)})
