"""Which scheme a layer gets, from flags, files and manifests."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.options.quant_flags import QuantFlags
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import quant_text, read_quant
from ingot.config.quantization.rptq_options import RptqConfig, site_of
from ingot.errors import ConfigError
from tests.support.shown_errors import raises_shown

MIXED = {"layers.0.*": "w4a16", "*.down_proj": "w8a16", "layers.1.self_attn.o_proj": "none"}
CONFIGS = [
    QuantConfig(),
    QuantConfig("w8a16"),
    QuantConfig("w4a16"),
    QuantConfig("w4a16", group=32, symmetric=True, head="w8a16"),
    QuantConfig("w8a16", group=64, layers=MIXED),
    QuantConfig("w8a8"),
    QuantConfig("w8a8", activations="static", weight_scales="tensor"),
    QuantConfig("w8a8", method="smoothquant", alpha="search", layers={"*.down_proj": "w4a16"}),
    QuantConfig("w4a8", group=64, method="gptq"),
    QuantConfig("w4a8", rotation=False, head="w8a16", layers={"*.down_proj": "w8a8"}),
    QuantConfig("rptq-w8a8"),
    QuantConfig("rptq-w4a4", 64, method="round", head="w8a16", layers={"*.qkv_proj": "w8a8"}),
    QuantConfig("w4a16", 32, layers={"*.o_proj": "rptq-w4a8"}),
    QuantConfig("rptq-w4a4", rptq=RptqConfig(("R5", "R1"), {"R3": 2}, "minmax", eight_bits=())),
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
    w8a8 = QuantConfig("w8a8")
    assert (w8a8.activations, w8a8.alpha, w8a8.weight_scales) == ("dynamic", None, "channel")
    rptq = QuantConfig("rptq-w4a8")
    assert (rptq.group, rptq.symmetric, rptq.method, rptq.calibrated) == (128, True, "gptq", True)
    assert QuantConfig("rptq-w8a8", method="round").calibrated
    assert rptq.rptq == RptqConfig(("R1", "R3", "R4", "R5"), {}, "ema-minmax", ("R1", "R4"))
    assert rptq.rptq.clusters == {"R1": 32, "R3": 4, "R4": 32, "R5": 32}
    assert QuantConfig("w8a16").rptq is None
    beside = QuantConfig("w4a16", 64, layers={"*.o_proj": "rptq-w8a8"})
    assert (beside.method, beside.symmetric, beside.at("layers.0.self_attn.o_proj").group) == (
        "gptq",
        False,
        64,
    )
    assert QuantConfig("w8a16").activations == "none"
    w4a8 = QuantConfig("w4a8")
    assert (w4a8.group, w4a8.symmetric, w4a8.activations, w4a8.rotation) == (128, False, "dynamic", True)
    assert (w8a8.rotation, QuantConfig("w8a16", layers={"*.down_proj": "w4a8"}).rotation) == (False, True)
    assert QuantConfig("w8a8", method="smoothquant").alpha == 0.5
    assert (QuantConfig().dense, QuantConfig(head="w8a16").dense) == (True, False)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"scheme": "w3"}, r"seen: w3; allowed: .*w8a16.*w4a16.*--quant"),
        ({"scheme": "w4a16", "group": 48}, r"group size; seen: 48; allowed: .*32, 64, 128.*--group-size"),
        (
            {"scheme": "w8a16", "group": 128},
            r"seen: 128; allowed: .*0.*--group-size, which w8a16 does not support.*w4a16, w4a8",
        ),
        (
            {"group": 64},
            r"seen: 64; .*fix: --quant, which is missing.*--group-size needs one of w4a16, w4a8, rptq-w8a8",
        ),
        ({"scheme": "w8a16", "symmetric": False}, r"seen: False; allowed: .*True.*--asymmetric"),
        ({"scheme": "w4a16", "group": "64"}, r"seen: '64' of type str; allowed: .*32, 64, 128"),
        ({"scheme": "w4a16", "symmetric": "False"}, r"seen: 'False' of type str; allowed: .*True, False"),
        ({"scheme": "w4a16", "symmetric": 1}, r"seen: 1; allowed: .*True, False"),
        ({"scheme": "w4a16", "method": "magic"}, r"seen: magic; allowed: .*round"),
        ({"head": "w4a16"}, r"seen: w4a16; allowed: .*w8a16.*--quant-head"),
        ({"layers": {"layers.0.*": "w5"}}, r"layers\.0\.\*.*seen: w5"),
        ({"layers": ["layers.0.*"]}, r"patterns"),
        ({"scheme": "w8a16", "activations": "static"}, r"seen: static; allowed: .*none.*--activations"),
        ({"scheme": "w8a8", "activations": "warm"}, r"seen: warm; allowed: .*dynamic.*static"),
        (
            {"scheme": "w8a16", "weight_scales": "tensor"},
            r"seen: tensor; allowed: .*channel.*--weight-scales",
        ),
        ({"scheme": "w8a8", "alpha": 0.5}, r"seen: 0.5; allowed: none.*--alpha.*add --method smoothquant"),
        ({"scheme": "w4a16", "alpha": 0.5}, r"seen: 0.5; .*add --quant w8a8 and --method smoothquant"),
        ({"scheme": "w8a8", "method": "smoothquant", "alpha": 1.5}, r"seen: 1.5; allowed: 0 to 1, or search"),
        ({"scheme": "w8a8", "method": "smoothquant", "alpha": "best"}, r"seen: best; allowed: 0 to 1, or"),
        ({"scheme": "w8a16", "method": "smoothquant"}, r"seen: smoothquant; allowed: .*round.*gptq"),
        (
            {"scheme": "w8a8", "method": "gptq"},
            r"seen: gptq; .*w8a8 supports round, smoothquant; gptq needs one of w8a16, w4a16, w4a8",
        ),
        (
            {"scheme": "w8a16", "method": "gptq", "source": "gptq"},
            r"--method: leave it out, the checkpoint's",
        ),
        ({"scheme": "rptq"}, r"seen: rptq; allowed: .*rptq-w8a8.*rptq-w4a4.*--quant"),
        ({"scheme": "rptq-w8a8", "method": "awq"}, r"seen: awq; allowed: .*round.*gptq"),
        ({"scheme": "rptq-w8a8", "group": 0}, r"seen: 0; allowed: .*32, 64, 128.*--group-size"),
        ({"scheme": "rptq-w8a8", "symmetric": False}, r"seen: False; allowed: .*True"),
        ({"scheme": "rptq-w8a8", "activations": "dynamic"}, r"seen: dynamic; allowed: .*none"),
        (
            {"scheme": "w8a8", "rptq": {"ranges": "minmax"}},
            r"--ranges.*which w8a8 does not support.*a --quant of rptq-w8a8",
        ),
        (
            {"scheme": "rptq-w8a8", "rptq": {"reorder": ["R1", "R2"]}},
            r"seen: \('R1', 'R2'\); allowed: .*R3.*--reorder: leave R2 out, queries and keys",
        ),
        ({"scheme": "rptq-w8a8", "rptq": {"reorder": "R1"}}, r"seen: R1; allowed: .*--reorder$"),
        ({"scheme": "rptq-w8a8", "rptq": {"clusters": {"R1": 0}}}, r"seen: 0; .*at least 1.*--clusters"),
        ({"scheme": "rptq-w8a8", "rptq": {"clusters": {"R1": True}}}, r"seen: True; .*--clusters"),
        ({"scheme": "rptq-w8a8", "rptq": {"clusters": {"R2": 4}}}, r"seen: .*R2.*--clusters: leave R2 out"),
        ({"scheme": "rptq-w8a8", "rptq": {"clusters": 4}}, r"maps sites to numbers; seen: 4.*--clusters"),
        ({"scheme": "rptq-w8a8", "rptq": {"ranges": "max"}}, r"seen: max; .*ema-minmax.*minmax.*--ranges"),
        ({"scheme": "rptq-w8a8", "rptq": {"range": "minmax"}}, r"seen: .*range.*allowed: .*reorder.*ranges"),
        ({"scheme": "rptq-w8a8", "rptq": 5}, r"rptq maps these options.*seen: 5"),
        (
            {"scheme": "rptq-w4a8", "rptq": {"eight_bits": []}},
            r"rptq-w4a8 has no activations in 4 bits.*--eight-bits: leave it out, or use --quant rptq-w4a4",
        ),
        (
            {"scheme": "none", "method": "gptq"},
            r"seen: gptq; allowed: .*round\b.*--quant, which is missing.*"
            r"gptq needs one of w8a16, w4a16, w4a8",
        ),
        ({"scheme": "w4a8", "group": 32}, r"seen: 32; allowed: .*64, 128.*--group-size"),
        ({"scheme": "w4a8", "symmetric": True}, r"seen: True; allowed: .*False.*--asymmetric"),
        ({"scheme": "w4a8", "method": "awq"}, r"seen: awq; allowed: .*round.*gptq"),
        ({"scheme": "w4a8", "activations": "static"}, r"seen: static; allowed: .*dynamic"),
        (
            {"scheme": "w4a8", "layers": {"*.o_proj": "rptq-w4a8"}},
            r"w4a8 and RPTQ cannot be combined in one model",
        ),
        (
            {"scheme": "w8a8", "rotation": True},
            r"seen: True; allowed: .*False.*--rotate, which w8a8 does not support: .*a --quant of w4a8$",
        ),
        ({"scheme": "w4a8", "rotation": "yes"}, r"seen: yes; allowed: .*True, False.*--rotate"),
        (
            {"scheme": "w4a16", "method": "gptq", "activations": "static", "layers": {"*": "w8a8"}},
            r"seen: static; allowed: .*dynamic",
        ),
    ],
)
def test_bad_values(values: dict[str, Any], words: str) -> None:
    with raises_shown(ConfigError, words) as caught:
        QuantConfig.from_json(values)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_last_pattern_counts() -> None:
    config = QuantConfig("w8a16", layers=MIXED, head="w8a16")
    names = ("layers.0.mlp.gate_up_proj", "layers.0.mlp.down_proj", "layers.1.self_attn.o_proj")
    assert [config.at(name).scheme for name in names] == ["w4a16", "w8a16", "none"]
    assert [config.at(name).group for name in names] == [128, 0, 0]
    assert config.at("layers.1.self_attn.qkv_proj").scheme == "w8a16"
    assert QuantConfig("w4a16", layers={"*": "w4a16"}).at("lm_head").scheme == "none"


def test_patterns_in_another_order_choose_otherwise() -> None:
    """Though the configs are equal, and one was asked before the other."""
    patterns = {"layers.0.*": "w8a16", "*.o_proj": "none"}
    one, other = (
        QuantConfig("w4a16", layers=patterns),
        QuantConfig("w4a16", layers=dict([*patterns.items()][::-1])),
    )
    assert one == other
    schemes = [config.at("layers.0.self_attn.o_proj").scheme for config in (one, other)]
    assert schemes == ["none", "w8a16"]


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    config = QuantConfig("w8a16", layers={"layers.9.*": "none", "*": "w8a16"})
    with pytest.raises(ConfigError, match=r"match no linear layer; seen: \['layers.9.\*'\].*layers.0.mlp"):
        config.check_names(["layers.0.mlp.up_proj", "lm_head"])
    config = QuantConfig("w4a16", layers={"lm_head": "w8a16"})
    with pytest.raises(
        ConfigError, match=r"seen: \['lm_head'\].*for lm_head, set `head: w8a16` next to layers"
    ):
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
        ("scheme: [", "is not YAML"),
        ("- w4a16", "contains no fields"),
        (
            "schema: w4a16",
            r"unknown field in the --quant file; seen: \['schema'\].*"
            r"in .*mixed\.yaml: did you mean scheme instead of schema\?",
        ),
        (
            "group_size: 64\nxyz: 1",
            r"seen: \['group_size', 'xyz'\].*mixed\.yaml: did you mean group instead of group_size\?$",
        ),
        ("xyz: 1", r"seen: \['xyz'\].*in .*mixed\.yaml: leave it out"),
        ("scheme: w4a16\ngroup: 48", r"seen: 48; .*fix: --quant, in .*mixed\.yaml: group$"),
        ("scheme: w4a16\nhead: w4a16", r"seen: w4a16; .*fix: --quant, in .*mixed\.yaml: head$"),
        (
            "scheme: w4a16\nlayers: {a.*: w5}",
            r"for 'a\.\*'; seen: w5; .*fix: --quant, in .*mixed\.yaml: layers$",
        ),
        ("scheme: w8a8\nalpha: 0.7", r"in .*mixed\.yaml: alpha, .*, or add method smoothquant$"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(text)
    with raises_shown(ConfigError, words):
        read_quant(str(path))


def test_a_flag_beside_a_file_is_named_itself(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text("scheme: w4a16\n")
    with pytest.raises(ConfigError, match=r"seen: 48; .*fix: `group`$"):
        read_quant(str(path), group=48)


def test_a_file_may_say_whether_to_rotate(tmp_path: Path) -> None:
    path = tmp_path / "q.yaml"
    path.write_text("scheme: w4a8\nrotation: false\nlayers:\n  '*.down_proj': w8a16\n")
    assert read_quant(str(path)) == QuantConfig("w4a8", rotation=False, layers={"*.down_proj": "w8a16"})
    assert read_quant(str(path), rotation=True).rotation is True


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*quant"):
        read_quant("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"seen: w2; allowed: .*FILE.yaml.*to fix: quant"):
        read_quant("w2")


def test_w8a8_beside_others() -> None:
    config = QuantConfig("w4a16", method="gptq", layers={"*.down_proj": "w8a8"})
    assert config.at("layers.0.mlp.down_proj") == QuantConfig("w8a8")
    assert config.at("layers.0.mlp.up_proj").method == "gptq"
    smooth = QuantConfig("w8a8", method="smoothquant", alpha=0.8, head="w8a16", layers={"*.o_proj": "w4a16"})
    assert smooth.at("layers.0.mlp.up_proj") == QuantConfig("w8a8", method="smoothquant", alpha=0.8)
    assert smooth.at("layers.0.self_attn.o_proj") == QuantConfig("w4a16")
    assert smooth.at("lm_head") == QuantConfig("w8a16")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            QuantConfig("w8a8", method="smoothquant"),
            r"SmoothQuant needs calibration.*--method smoothquant --calib",
        ),
        (
            QuantConfig("w8a8", activations="static"),
            r"a static scale needs calibration.*--activations static --calib",
        ),
        (
            QuantConfig("rptq-w8a8", method="round"),
            r"RPTQ.*seen: .*rptq-w8a8.*build .* --quant rptq-w8a8 --calib",
        ),
        (
            QuantConfig("w4a16", layers={"*.o_proj": "rptq-w4a8"}),
            r"RPTQ needs calibration.*--quant FILE.yaml --calib",
        ),
    ],
)
def test_what_needs_samples_is_not_for_memory(config: QuantConfig, words: str) -> None:
    assert config.calibrated
    with raises_shown(ConfigError, words):
        config.check_in_memory()
    QuantConfig("w8a8").check_in_memory()


def test_sites_of_layers() -> None:
    names = {
        "layers.0.self_attn.qkv_proj": "R1",
        "layers.0.self_attn.o_proj": "R3",
        "layers.0.mlp.gate_up_proj": "R4",
        "layers.0.mlp.down_proj": "R5",
        "encoder.layers.3.mlp.up_proj": "R4",
        "layers.0.encoder_attn.q_proj": "R1",
        "layers.0.encoder_attn.kv_proj": "R1",
        "layers.0.encoder_attn.o_proj": "R3",
    }
    assert {name: site_of(name) for name in names} == names


def test_sites_in_8_bits_are_of_the_wider_scheme() -> None:
    names = ("layers.0.self_attn.qkv_proj", "layers.0.mlp.down_proj", "lm_head")
    for eight, schemes in (
        (("R1", "R4"), ("rptq-w4a8", "rptq-w4a4", "none")),
        (("R5",), ("rptq-w4a4", "rptq-w4a8", "none")),
        ((), ("rptq-w4a4", "rptq-w4a4", "none")),
    ):
        quant = QuantConfig("rptq-w4a4", rptq=RptqConfig(eight_bits=eight))
        assert tuple(quant.at(name).scheme for name in names) == schemes
    beside = QuantConfig("w8a8", layers={"*.down_proj": "rptq-w8a8"})
    assert beside.at("layers.0.mlp.down_proj").scheme == "rptq-w8a8"


def test_options_of_rptq_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rptq.yaml"
    path.write_text("scheme: rptq-w4a4\nrptq:\n  clusters: {R1: 8}\n  eight_bits: [R5]\n  ranges: minmax\n")
    quant = read_quant(str(path))
    assert quant.rptq == RptqConfig(clusters={"R1": 8}, eight_bits=("R5",), ranges="minmax")
    over = read_quant(str(path), rptq={"ranges": "mse"}).rptq
    assert over == RptqConfig(clusters={"R1": 8}, eight_bits=("R5",), ranges="mse")
    again = tmp_path / "again.yaml"
    again.write_text(quant_text(quant))
    assert read_quant(str(again)) == quant
    assert read_quant(quant, rptq={"clusters": {"R5": 2}}).rptq == RptqConfig(
        clusters={"R5": 2}, eight_bits=("R5",), ranges="minmax"
    )
    assert "32 clusters" in QuantConfig("rptq-w4a4").summary
    assert QuantConfig("rptq-w4a4").summary.count("R1 and R4 in 8 bits") == 1
    for text, words in (
        ("rptq: {ranges: max}", r"rptq\.yaml: rptq: ranges"),
        ("rptq: {reorder: [R9]}", r"rptq\.yaml: rptq: reorder"),
        ("rptq: 4", r"rptq\.yaml"),
    ):
        path.write_text(f"scheme: rptq-w4a4\n{text}\n")
        with raises_shown(ConfigError, words):
            read_quant(str(path))
    path.write_text("scheme: rptq-w4a4\n")
    with pytest.raises(ConfigError, match=r"fix: `ranges`|`ranges`$"):
        read_quant(str(path), rptq={"ranges": "max"})


def test_flags_of_rptq() -> None:
    def options(**flags: Any) -> RptqConfig | None:
        return QuantFlags(quant="rptq-w4a4", **flags).config().rptq

    assert options() == RptqConfig()
    assert options(clusters="16") == RptqConfig(clusters={"R1": 16, "R3": 16, "R4": 16, "R5": 16})
    assert options(clusters="R1=16, R5=8") == RptqConfig(clusters={"R1": 16, "R5": 8})
    assert options(reorder="none", eight_bits="none") == RptqConfig(reorder=(), eight_bits=())
    assert options(reorder="R1, R4", eight_bits="R5") == RptqConfig(reorder=("R1", "R4"), eight_bits=("R5",))
    assert options(ranges="mse") == RptqConfig(ranges="mse")
    for flag, text in (("clusters", "many"), ("clusters", "R1=-1"), ("reorder", "R2"), ("eight_bits", "1")):
        with raises_shown(ConfigError, f"--{flag.replace('_', '-')}"):
            options(**{flag: text})
