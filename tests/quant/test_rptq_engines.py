"""Engines of RPTQ with other options than the published ones, and their products beside the paper's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ingot import LLM
from ingot.building.calibration import rptq_layers
from ingot.building.calibration.calibrate import Walk
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.rptq_options import RptqConfig, site_of
from ingot.config.runtime_config import RuntimeConfig
from ingot.engine.engine_loader import load_engine
from ingot.engine.manifest import Manifest
from ingot.errors import ConfigError
from ingot.layers.linear import Linear, linears
from ingot.proof.step_check import check_steps
from ingot.quant.methods.activation_statistics import InputStatistics, RecordRows
from ingot.quant.methods.channel_clusters import channel_orders, orders_by_heads
from ingot.quant.schemes.int8_blocks import Int8Blocks
from tests.quant.conftest import Made
from tests.quant.models import CPU, opened
from tests.tiny_models import random_ids

ALL = ("R1", "R3", "R4", "R5")


def blocks_of(folder: Path) -> dict[str, Linear]:
    return {
        n: one for n, one in linears(LLM(folder, "cpu").engine.model).items() if one.scheme.form == "blocks"
    }


def scheme_of(linear: Linear) -> Int8Blocks:
    assert isinstance(linear.scheme, Int8Blocks)
    return linear.scheme


def test_norms_outputs_have_8_bits_by_default(made: Made) -> None:
    """As in the paper's code, where they have max(8, bits)."""
    bits = {site_of(n): scheme_of(one).input_bits for n, one in blocks_of(made("llama", "rptq-w4a4")).items()}
    assert bits == {"R1": 8, "R3": 4, "R4": 8, "R5": 4}


@pytest.mark.stays("wide1")
@pytest.mark.parametrize("wide", [(), ("R5",), ALL])
def test_sites_in_8_bits(made: Made, wide: tuple[str, ...]) -> None:
    folder = made("qwen2", QuantConfig("rptq-w4a4", 32, rptq=RptqConfig(eight_bits=wide)), proof=True)
    for name, linear in blocks_of(folder).items():
        assert scheme_of(linear).input_bits == (8 if site_of(name) in wide else 4), name
        assert scheme_of(linear).weight_bits == 4


def test_engines_from_before_the_options_keep_their_bits(made: Made) -> None:
    """Their manifests have no word of it, and their activations 4 bits everywhere."""
    folder = made("llama", QuantConfig("rptq-w4a4", 32, rptq=RptqConfig(eight_bits=())))
    now = LLM(folder, "cpu").logits(random_ids(9))
    path = folder / "manifest.json"
    old = json.loads(path.read_text())
    del old["quant"]["rptq"]
    path.write_text(json.dumps(old, indent=2, ensure_ascii=False) + "\n")
    assert Manifest.read(folder).quant.at("layers.0.self_attn.qkv_proj").scheme == "rptq-w4a4"
    assert torch.equal(LLM(folder, "cpu").logits(random_ids(9)), now)


@pytest.mark.stays("gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_site_that_is_not_reordered_has_one_scale(made: Made, kind: str) -> None:
    """The rows that make it stay where they were, which the comparison with the checkpoint sees."""
    folders = {
        name: made(kind, QuantConfig("rptq-w8a8", 32, rptq=options), name, proof=True)
        for name, options in {"one": RptqConfig(reorder=("R1",)), "all": RptqConfig()}.items()
    }
    distinct = {
        name: {n: len(s.unique()) for n, s in steps_of(folder).items()} for name, folder in folders.items()
    }
    assert {n for n in distinct["all"] if distinct["all"][n] > distinct["one"][n]} >= {
        "layers.0.mlp.down_proj",
        "layers.1.mlp.down_proj",
    }
    for name, linear in blocks_of(folders["one"]).items():
        if linear.scheme.ordered:
            order = linear.get_parameter("order").tolist()
            assert (order == sorted(order)) == (site_of(name) == "R4")
        else:
            assert distinct["one"][name] == 1


def steps_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one.get_parameter("steps").clone() for name, one in blocks_of(folder).items()}


def test_ranges_by_each_way(made: Made) -> None:
    """Extremes are widest; an average of records is narrower, and so is what is cut."""
    first = "layers.0.self_attn.qkv_proj"
    found = {}
    for ranges in ("minmax", "ema-minmax", "mse"):
        quant = QuantConfig("rptq-w4a4", 32, rptq=RptqConfig(ranges=ranges, eight_bits=()))
        found[ranges] = steps_of(made("llama", quant, ranges))[first]
    assert bool((found["ema-minmax"] < found["minmax"]).all())
    assert bool((found["mse"] <= found["minmax"]).all())
    assert bool((found["mse"] < found["minmax"]).any())


def test_each_site_has_its_clusters(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the options say, in blocks of the config's size."""
    asked: list[tuple[int, int, int]] = []

    def ordered(low: torch.Tensor, high: torch.Tensor, block: int, clusters: int) -> list[torch.Tensor]:
        asked.append((len(low), block, clusters))
        return channel_orders(low, high, block, clusters)

    def by_heads(*given: Any, block: int, clusters: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        asked.append((0, block, clusters))
        return orders_by_heads(*given, block=block, clusters=clusters)

    monkeypatch.setattr(rptq_layers, "channel_orders", ordered)
    monkeypatch.setattr(rptq_layers, "orders_by_heads", by_heads)
    made("llama", QuantConfig("rptq-w8a8", 64, rptq=RptqConfig(clusters={"R3": 2, "R4": 5, "R5": 7})))
    assert asked == 2 * [(32, 64, 32), (0, 64, 2), (32, 64, 5), (48, 64, 7)]


def test_the_order_is_taken_whose_outputs_are_nearer(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a sample: of a good order and one that tears loud channels apart, whichever stands first."""
    found = []

    def ordered(low: torch.Tensor, *given: Any) -> list[torch.Tensor]:
        good = channel_orders(low, *given)[-1]
        bad = good.view(2, -1).T.flatten()
        return [good, bad] if flip else [bad, good]

    monkeypatch.setattr(rptq_layers, "channel_orders", ordered)
    quant = QuantConfig("rptq-w4a4", 32, rptq=RptqConfig(reorder=("R5",), eight_bits=()))  # two blocks
    for flip in (False, True):
        found.append((made("llama", quant, f"e{flip}") / "weights.safetensors").read_bytes())
    assert found[0] == found[1]


def test_padding_changes_no_bit(made: Made, tmp_path: Path) -> None:
    """Records as a batch has them: padded at either end, and masked."""
    plain, padded = tmp_path / "plain.jsonl", tmp_path / "padded.jsonl"
    records = [random_ids(20 + 7 * n, seed=n) for n in range(6)]
    plain.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in records))
    lines = []
    for number, ids in enumerate(records):
        left, right = (60 - len(ids), 0) if number % 2 else (0, 60 - len(ids))
        mask = [0] * left + [1] * len(ids) + [0] * right
        ids = [3] * left + list(ids) + [3] * right
        lines.append(json.dumps({"token_ids": ids, "attention_mask": mask}) + "\n")
    padded.write_text("".join(lines))
    quant = QuantConfig("rptq-w4a4", 32)
    folders = [made("llama", quant, path.stem, calib=path) for path in (plain, padded)]
    first, second = ((folder / "weights.safetensors").read_bytes() for folder in folders)
    assert first == second


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"token_ids": [1, 2, 3], "attention_mask": [1, 1]}, "one for each of token_ids"),
        ({"token_ids": [1, 2, 3], "attention_mask": [1, 2, 1]}, "0 and 1"),
        ({"token_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "only the ends can be padding"),
        ({"token_ids": [1, 2, 3], "attention_mask": [0, 0, 0]}, "no tokens"),
    ],
)
def test_masks_that_are_none(made: Made, tmp_path: Path, record: dict[str, object], words: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=words):
        made("llama", "rptq-w8a8", calib=path)


@pytest.mark.parametrize("most", [20, 64, 4096])
def test_ranges_are_of_records_however_many_run_at_once(checkpoints: dict[str, Path], most: int) -> None:
    decoder, load = opened(checkpoints["llama"])
    records = [random_ids(5 + 3 * n, seed=n) for n in range(6)]

    def statistic(name: str, width: int) -> InputStatistics:
        return InputStatistics.of(width, records=True)

    walk = Walk(decoder, load, records, CPU, statistic, batch_tokens=most)
    for name in walk.layers:
        for seen in walk.observe(name).inputs.values():
            assert seen.records is not None
            assert seen.records.lowest.shape[0] == len(records)
            assert torch.equal(seen.records.lowest.amin(0), seen.ranges.lowest)
            assert torch.equal(seen.records.highest.amax(0), seen.ranges.highest)
            assert bool((seen.records.lowest.diff(dim=0).abs().amax(1) > 0).all())  # each has its own


def test_spliced_positions_are_apart() -> None:
    seen = InputStatistics.of(3, records=True)
    x = torch.tensor([[1.0, 2, 3], [90, 0, -90], [-1, 5, 0], [4, 4, 4]])
    seen.add(x)
    seen.add_rows(x, RecordRows((3, 1), torch.tensor([False, True, False, False])))
    seen.add_rows(x[:1], None)
    assert seen.records is not None
    assert seen.records.lowest.tolist() == [[-1, 0, -90], [4, 4, 4], [1, 2, 3]]
    assert seen.records.tokens.highest.tolist() == [4, 5, 4]
    assert seen.records.spliced.lowest.tolist() == [90, 0, -90]
    assert (seen.records.tokens.count, seen.records.spliced.count) == (4, 1)


CASES = [("llama", "rptq-w8a8", 32), ("gpt2", "rptq-w4a8", 64), ("qwen2", "rptq-w4a4", 32)]


@pytest.mark.parametrize(("kind", "scheme", "block"), CASES)
def test_fake_quantized_layers_are_the_real_ones(made: Made, kind: str, scheme: str, block: int) -> None:
    """Every layer's product of whole numbers, on what a run gives it, beside the paper's code: rounding in
    floating point. An integer may differ by one where x / scale is within an ulp of a tie; none does else.
    """
    llm = LLM(made(kind, QuantConfig(scheme, block)), "cpu")
    checked = set()
    for name, linear, x in inputs_of(llm):
        rounded, ties = fake_quantized(linear, x)
        weight = linear.dequantized(torch.float32)
        found, expected = linear(x), F.linear(rounded, weight, linear._parameters.get("bias"))
        flips = (ties @ weight.abs().T).double()  # what integers at ties may change
        off = (found.double() - expected.double()).abs() - flips
        assert float(off.max()) < 1e-5 * float(expected.abs().amax()) + 1e-6, name
        assert float((ties > 0).double().mean()) < 1e-3
        checked.add(name)
    assert checked == {n for n, one in linears(llm.engine.model).items() if one.scheme.form == "blocks"}
    assert len(checked) == 8


def test_a_bias_is_not_rounded_to_the_dtype_that_runs(made: Made) -> None:
    """It is in the shift, in fp32; a proof that rounds it is off by parts of a unit in the queries."""
    folder = made("qwen2", QuantConfig("rptq-w8a8", 32), dtype="fp32")
    runs = RuntimeConfig(cache_tokens=512).of_engine("model")
    llm = LLM.of_engine(load_engine(folder, CPU, "bf16", max_seq_len=64, runtime=runs), runs)
    found = check_steps(llm, folder, [(random_ids(40, seed=8), None)], new_tokens=2)
    assert found.failures == []
    assert found.worst["values"] < 0.01


def inputs_of(llm: LLM) -> Iterator[tuple[str, Linear, torch.Tensor]]:
    """Each layer in blocks with what a prompt gives it."""
    seen: list[tuple[str, Linear, torch.Tensor]] = []
    hooks = []
    for name, linear in linears(llm.engine.model).items():
        if linear.scheme.form == "blocks":

            def hook(module: torch.nn.Module, given: tuple[torch.Tensor], name: str = name) -> None:
                assert isinstance(module, Linear)
                seen.append((name, module, given[0].clone()))

            hooks.append(linear.register_forward_pre_hook(hook))
    llm.logits(random_ids(40, seed=8))
    for one in hooks:
        one.remove()
    yield from seen


def fake_quantized(linear: Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An input [T, K] as RPTQ4LLM's fake_quant makes it: rounded, moved by the zero, cut, and back; and the
    scale where x / scale is so near to a tie that fp32 decides, else 0.
    """
    scheme = scheme_of(linear)
    width, block = x.shape[-1], scheme.block
    rows = x.float().flatten(0, -2)
    order = torch.arange(width)
    if scheme.ordered:
        order = linear.get_parameter("order").long()
    scale, zero = (linear.get_parameter(leaf).repeat_interleave(block)[:width] for leaf in ("steps", "zeros"))
    exact = rows[:, order] / scale
    q = (exact.round() + zero).clamp(-(2 ** (scheme.input_bits - 1)), 2 ** (scheme.input_bits - 1) - 1)
    fractions = (exact - exact.floor() - 0.5).abs()
    ties = torch.where(fractions < 2e-6 * exact.abs() + 1e-9, scale.expand_as(exact), 0.0)
    back = torch.empty_like(order)
    back[order] = torch.arange(width)
    return ((q - zero) * scale)[:, back], ties[:, back]
