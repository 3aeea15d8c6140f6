"""Mixes of little cost, and the patterns and the file that they are written as."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import quant_text, read_quant
from ingot.measure.evaluate.doctor.precision_choice import Mix, Option, choose, cost, expected, settle
from ingot.measure.evaluate.doctor.scheme_patterns import mixed

OPERATORS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def options_of(seed: int, layers: int = 6) -> dict[str, list[Option]]:
    draw = random.Random(seed)
    found = {}
    for index in range(layers):
        size, error = draw.choice([1, 2, 5]), 10 ** draw.uniform(-5, -2)
        wide = error * 10 ** draw.uniform(-3, 0.1)  # now and then no better
        found[f"layers.{index}"] = [
            Option("w4a16", 4 * size, error),
            Option("w8a16", 8 * size, wide),
            Option("none", 16 * size, 0.0),
        ]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_a_choice_holds_and_is_within_a_step_of_the_best(seed: int) -> None:
    options = options_of(seed)
    whole = sum(own[0].error for own in options.values())
    budget = whole * random.Random(seed).uniform(0.01, 1.1)
    mix = choose(options, budget)
    assert expected(mix) <= budget
    mixes = (dict(zip(options, own, strict=True)) for own in itertools.product(*options.values()))
    best = min(cost(one) for one in mixes if expected(one) <= budget)
    step = max(own[-1].cost - own[0].cost for own in options.values())
    assert best <= cost(mix) <= best + step
    for name, own in options.items():
        for option in own:
            if option.cost < mix[name].cost:
                assert expected(mix | {name: option}) > budget, "no layer alone can go back"


def test_choices_are_often_the_best() -> None:
    exact = 0
    for seed in range(60):
        options = options_of(seed)
        budget = 0.3 * sum(own[0].error for own in options.values())
        mixes = (dict(zip(options, own, strict=True)) for own in itertools.product(*options.values()))
        best = min(cost(one) for one in mixes if expected(one) <= budget)
        exact += cost(choose(options, budget)) == best
    assert exact >= 40


def test_a_budget_that_cannot_be_kept_gets_the_least_error() -> None:
    options = {"a": [Option("w4a16", 1, 0.2), Option("w8a16", 2, 0.1)], "b": [Option("w4a16", 1, 0.3)]}
    assert {name: own.scheme for name, own in choose(options, 0.05).items()} == {"a": "w8a16", "b": "w4a16"}


@pytest.mark.parametrize("factor", [0.3, 0.9, 1.0, 1.3, 4.0])
def test_a_measured_mix_holds_whatever_the_sum_is_off_by(factor: float) -> None:
    options = options_of(5, layers=24)
    budget = 0.2 * sum(own[0].error for own in options.values())

    def measure(mix: Mix) -> float:
        return factor * expected(mix)

    found = settle(lambda most: choose(options, most), measure, lambda mix: (cost(mix),), budget)
    assert found.best is not None
    mix, measured = found.best
    assert measured == measure(mix) <= budget
    aimed = choose(options, budget / factor)
    assert cost(mix) <= 1.02 * cost(aimed), "what the sum is off by is made use of"
    assert all(not measured <= budget or cost(mix) <= cost(one) for one, measured in found.tried)


def test_where_nothing_holds_the_widest_mix_was_tried() -> None:
    options = {f"l{i}": [Option("w4a16", 1, 0.2), Option("w8a16", 2, 0.1)] for i in range(4)}
    found = settle(lambda most: choose(options, most), lambda mix: 1.0, lambda mix: (cost(mix),), 0.5)
    assert found.best is None
    assert {option.scheme for option in found.tried[-1][0].values()} == {"w8a16"}


def test_it_ends_where_measurements_make_no_sense() -> None:
    options = options_of(7, layers=12)
    draw = random.Random(0)
    found = settle(
        lambda most: choose(options, most), lambda mix: draw.uniform(0, 0.02), lambda mix: (cost(mix),), 0.01
    )
    assert len(found.tried) < 200
    assert found.best is None or found.best[1] <= 0.01


def names(layers: int) -> list[str]:
    return [f"layers.{index}.{operator}" for index in range(layers) for operator in OPERATORS]


@pytest.mark.parametrize("seed", range(30))
def test_patterns_mean_what_was_chosen(seed: int) -> None:
    draw = random.Random(seed)
    ladder = draw.choice([("w4a16", "w8a16", "none"), ("w8a8", "w8a16", "none"), ("w8a16", "none")])
    chances = [draw.random() ** 3 for _ in ladder]
    schemes = {name: draw.choices(ladder, chances)[0] for name in names(12)}
    asked = QuantConfig(ladder[0], 32 if ladder[0] == "w4a16" else None)
    found = mixed(schemes, asked)
    assert {name: found.at(name).scheme for name in schemes} == schemes
    found.check_names(schemes)
    odd = sum(scheme != found.scheme for scheme in schemes.values())
    assert len(found.layers) <= odd, "patterns are no more than names"


def test_whole_operators_and_whole_layers_are_one_pattern_each() -> None:
    schemes = dict.fromkeys(names(12), "w4a16")
    schemes |= {name: "w8a16" for name in schemes if name.endswith("down_proj")}
    schemes |= {name: "none" for name in schemes if name.startswith("layers.1.")}
    schemes["layers.10.self_attn.o_proj"] = "w8a16"
    found = mixed(schemes, QuantConfig("w4a16"))
    assert found.layers == {
        "*.down_proj": "w8a16",
        "layers.1.*": "none",
        "layers.10.self_attn.o_proj": "w8a16",
    }


@pytest.mark.parametrize(
    "quant",
    [
        QuantConfig("w4a16"),
        QuantConfig("w4a16", 32, True, layers={"*.down_proj": "w8a16", "layers.0.*": "none"}, head="w8a16"),
        QuantConfig("none", 64, layers={"layers.1.mlp.down_proj": "w4a16"}),
        QuantConfig("w8a8", layers={"*.o_proj": "none"}),
        QuantConfig("w8a8", method="smoothquant", alpha="search", activations="static"),
        QuantConfig("w8a16"),
    ],
)
def test_the_file_reads_as_it_was_written(quant: QuantConfig, tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    text = quant_text(quant, ["one line", "two\nlines: - [odd"])
    path.write_text(text, encoding="utf-8")
    assert text.startswith("# one line\n# two\n# lines: - [odd\nscheme: ")
    assert read_quant(str(path)) == quant


def test_a_mix_keeps_what_was_asked_for_w4a8() -> None:
    asked = QuantConfig("w4a8", 64, rotation=False)
    schemes = dict.fromkeys(names(4), "w4a8") | {"layers.2.mlp.down_proj": "w8a16"}
    found = mixed(schemes, asked)
    assert found == asked.replace(layers={"layers.2.mlp.down_proj": "w8a16"})
    assert mixed(dict.fromkeys(names(4), "w8a16"), asked) == QuantConfig("w8a16")
