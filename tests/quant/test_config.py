"""Which scheme a layer gets, from flags, files and manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.config.quant import QuantConfig
from ingot.config.quant_file import read_quant
from ingot.errors import ConfigError

MIXED = {"layers.0.*": "w4a16", "*.down_proj": "w8a16", "layers.1.self_attn.o_proj": "none"}
CONFIGS = [
    QuantConfig(),
    QuantConfig("w8a16"),
    QuantConfig("w4a16"),
    QuantConfig("w4a16", group=32, symmetric=True, head="w8a16"),
    QuantConfig("w8a16", group=64, layers=MIXED),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_round_trip(config: QuantConfig) -> None:
    assert QuantConfig.from_json(config.to_json()) == config
    assert hash(QuantConfig.from_json(config.to_json())) == hash(config)


def test_manifests_of_before_read() -> None:
    assert QuantConfig.from_json({"scheme": "none"}) == QuantConfig()


def test_defaults() -> None:
    assert (QuantConfig("w4a16").group, QuantConfig("w4a16").symmetric) == (128, False)
    assert (QuantConfig("w8a16").group, QuantConfig("w8a16").symmetric) == (0, True)
    assert (QuantConfig().dense, QuantConfig(head="w8a16").dense) == (True, False)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"scheme": "w3"}, r"seen: w3; allowed: .*w8a16.*w4a16.*--quant"),
        ({"scheme": "w4a16", "group": 48}, r"group size; seen: 48; allowed: .*32, 64, 128.*--group-size"),
        ({"scheme": "w8a16", "group": 128}, r"seen: 128; allowed: .*0.*--group-size"),
        ({"scheme": "w8a16", "symmetric": False}, r"seen: False; allowed: .*True.*--asymmetric"),
        ({"scheme": "w4a16", "symmetric": 1}, r"seen: 1; allowed: .*True, False"),
        ({"scheme": "w4a16", "method": "magic"}, r"seen: magic; allowed: .*round"),
        ({"head": "w4a16"}, r"seen: w4a16; allowed: .*w8a16.*--quant-head"),
        ({"layers": {"layers.0.*": "w5"}}, r"layers\.0\.\*.*seen: w5"),
        ({"layers": ["layers.0.*"]}, r"patterns"),
    ],
)
def test_bad_values(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        QuantConfig.from_json(values)


def test_the_last_pattern_counts() -> None:
    config = QuantConfig("w8a16", layers=MIXED, head="w8a16")
    names = ("layers.0.mlp.gate_up_proj", "layers.0.mlp.down_proj", "layers.1.self_attn.o_proj")
    assert [config.at(name).scheme for name in names] == ["w4a16", "w8a16", "none"]
    assert [config.at(name).group for name in names] == [128, 0, 0]
    assert config.at("layers.1.self_attn.qkv_proj").scheme == "w8a16"
    assert QuantConfig("w4a16", layers={"*": "w4a16"}).at("lm_head").scheme == "none"


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    config = QuantConfig("w8a16", layers={"layers.9.*": "none", "*": "w8a16"})
    with pytest.raises(ConfigError, match=r"match no linear layer; seen: \['layers.9.\*'\].*layers.0.mlp"):
        config.check_names(["layers.0.mlp.up_proj", "lm_head"])


def test_a_file_holds_a_scheme_for_each_layer(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text("scheme: w4a16\ngroup: 64\nlayers:\n  layers.3.mlp.down_proj: w8a16\n")
    found = read_quant(str(path), head="w8a16")
    assert found == QuantConfig("w4a16", 64, layers={"layers.3.mlp.down_proj": "w8a16"}, head="w8a16")
    assert read_quant(str(path), group=32).group == 32
    assert read_quant(found) is found
    assert read_quant(None) == QuantConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scheme: [", "is no YAML"),
        ("- w4a16", "holds no fields"),
        ("schema: w4a16", r"no such field; seen: \['schema'\]"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_quant(str(path))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*--quant"):
        read_quant("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"seen: w2; allowed: .*FILE.yaml"):
        read_quant("w2")
