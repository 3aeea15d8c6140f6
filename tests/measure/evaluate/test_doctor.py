"""`ingot doctor`: sensitivities that are the runtime's, mixes that hold, files that build."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ingot import build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.errors import ConfigError
from ingot.measure.evaluate.data_file import read_data
from ingot.measure.evaluate.doctor import Diagnosis, Wanted, doctor
from ingot.measure.evaluate.doctor.precision_probe import PrecisionProbe
from ingot.measure.evaluate.loss_limits import limits_for
from ingot.measure.evaluate.token_divergence import divergence
from ingot.measure.side.side_spec import SideSpec
from tests.e2e.terminal import ingot
from tests.measure.evaluate.conftest import write_ids
from tests.tiny_models import random_ids, save_model, tiny_config

ROOT = Path(__file__).parents[3]
POCKET = ROOT / "models" / "pocket-chat"
PLANTED = "layers.1.mlp.gate_up_proj"
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
OPERATORS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "ids.jsonl"
    return write_ids(path, *(random_ids(40, seed=n) for n in range(6)))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, wide enough that 4 bits are fewer bytes; one product has a column in each group of huge
    weights that read next to nothing, so that its scales are far too large for all others.
    """
    folder = tmp_path_factory.mktemp("planted") / "hf"
    save_model(tiny_config("llama", **WIDE), folder, seed=1)
    tensors = load_file(folder / "model.safetensors")
    loud = [3, 170]
    tensors["model.layers.1.post_attention_layernorm.weight"][loud] = 1e-4
    for part in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{part}.weight"][:, loud] = 6.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def usual(data: Path) -> tuple[object, ...]:
    """Words of ``ingot doctor``; of a flag that is given twice the last counts."""
    return ("--data", data, "--quant", "w4a16", "--budget", "kl_mean=1", "--device", "cpu")


def diagnosed(checkpoint: Path, samples: Path, budget: float, **wanted: object) -> Diagnosis:
    quant = QuantConfig(str(wanted.pop("quant", "w4a16")))
    data = read_data(samples)
    return doctor(Wanted(str(checkpoint), quant, budget, device="cpu", **wanted), data)  # type: ignore[arg-type]


def kl_of(checkpoint: Path, quant: QuantConfig, samples: Path, folder: Path) -> float:
    """Mean KL of an engine with these schemes, by the runtime."""
    return kl_of_engine(
        build(checkpoint, folder, quant=quant, device="cpu", proof=False), checkpoint, samples
    )


def kl_of_engine(engine: Path, checkpoint: Path, samples: Path) -> float:
    sides = [SideSpec(str(one), device="cpu") for one in (engine, checkpoint)]
    found = divergence(sides[0], sides[1], read_data(samples), limits_for("divergence"))
    return float(found.record["divergence"]["kl_mean"])


# --- sensitivities ---------------------------------------------------------------------------------------


@pytest.mark.stays("w4a16-llama", "w8a8-qwen2")
@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "tied"])
@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_a_layer_alone_costs_what_an_engine_with_it_costs(
    kind: str, scheme: str, samples: Path, tmp_path: Path
) -> None:
    config = tiny_config("llama", tie_word_embeddings=True) if kind == "tied" else tiny_config(kind)
    save_model(config, tmp_path / "hf", seed=3)
    found = diagnosed(tmp_path / "hf", samples, 10.0, quant=scheme)
    assert len(found.layers) == 8
    for layer in found.layers[::3]:
        for narrow in (scheme, "w8a16"):
            quant = QuantConfig(layers={layer.name: narrow})
            other = kl_of(tmp_path / "hf", quant, samples, tmp_path / f"{layer.name}-{narrow}")
            assert layer.kl[narrow] == pytest.approx(other, rel=2e-2, abs=1e-9), (layer.name, narrow)
            assert other > 0


def test_the_planted_layer_is_the_most_sensitive(planted: Path, samples: Path, tmp_path: Path) -> None:
    found = diagnosed(planted, samples, 10.0)
    ordered = sorted(found.layers, key=lambda layer: -layer.kl["w4a16"])
    assert ordered[0].name == PLANTED
    save_model(tiny_config("llama", **WIDE), tmp_path / "plain", seed=1)
    plain = {layer.name: layer.kl["w4a16"] for layer in diagnosed(tmp_path / "plain", samples, 10.0).layers}
    assert max(plain, key=lambda name: plain[name]) != PLANTED
    assert ordered[0].kl["w4a16"] > 4 * plain[PLANTED]
    assert all(0 < layer.kl["w8a16"] < layer.kl["w4a16"] for layer in found.layers)
    assert {layer.name for layer in found.layers} == {f"layers.{i}.{o}" for i in range(2) for o in OPERATORS}


def test_texts_in_windows_and_batches_count_as_a_divergence_does(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (100, 2, 90, 3, 128)
    path = write_ids(tmp_path / "long.jsonl", *(random_ids(n, seed=n) for n in sizes), [5])
    monkeypatch.setattr("ingot.measure.evaluate.doctor.precision_probe.BATCH_TOKENS", 130)
    found = diagnosed(llama, path, 10.0)
    assert found.facts["counts"]["counted_tokens"] == sum(sizes) - len(sizes)
    assert found.facts["counts"]["too_short"] == 1
    whole = kl_of(llama, QuantConfig("w4a16"), path, tmp_path / "e")
    assert found.uniform["w4a16"].measured == pytest.approx(whole, rel=1e-2)


# --- mixes -----------------------------------------------------------------------------------------------


def test_the_mix_keeps_the_planted_layer_in_more_bits(planted: Path, samples: Path, tmp_path: Path) -> None:
    all_asked = diagnosed(planted, samples, 10.0).uniform["w4a16"]
    budget = 0.5 * all_asked.measured
    out, reported = tmp_path / "mixed.yaml", tmp_path / "found.json"
    words = ("--budget", f"kl_mean={budget}", "--out", out, "--json-file", reported)
    shown = ingot("doctor", planted, *usual(samples), *words)
    assert shown.exit_code == 0, shown.output
    first = next(line for line in shown.stdout.splitlines() if line.startswith("layers."))
    assert first.startswith(PLANTED)
    assert "measured" in shown.stdout.splitlines()[-1]
    record = json.loads(reported.read_text())
    chosen = {layer["name"]: layer["scheme"] for layer in record["layers"]}
    assert chosen[PLANTED] != "w4a16"
    assert sum(scheme == "w4a16" for scheme in chosen.values()) >= 4
    assert record["chosen"]["kl_measured"] <= budget
    assert record["chosen"]["bytes"] < record["uniform"]["w8a16"]["bytes"]
    quant = read_quant(str(out))
    assert {name: quant.at(name).scheme for name in chosen} == chosen
    engine = tmp_path / "engine"
    assert ingot("build", planted, "-o", engine, "--quant", out, "--device", "cpu").exit_code == 0
    limit = ("--max-delta", f"kl_mean={budget}", "--max-delta", "top1_disagreement=100")
    against = ("--against", planted, "--json", "--device", "cpu")
    judged = ingot("eval", "divergence", engine, "--data", samples, *limit, *against)
    assert judged.exit_code == 0, judged.output
    measured = json.loads(judged.stdout)["divergence"]["kl_mean"]
    assert measured == pytest.approx(record["chosen"]["kl_measured"], rel=1e-3)
    head = out.read_text().split("scheme:")[0]
    assert record["data"]["sha256"] in head
    assert f"{record['chosen']['kl_measured']:.3e} measured" in head
    assert f"{record['chosen']['kl_predicted']:.3e} predicted" in head
    assert sorted(tmp_path.iterdir()) == [engine, reported, out], "nothing else is left"


def test_a_budget_that_the_asked_scheme_keeps_changes_nothing(planted: Path, samples: Path) -> None:
    found = diagnosed(planted, samples, 10.0)
    assert found.quant == QuantConfig("w4a16")
    assert len(found.tried) == 1


@pytest.mark.slow
def test_smaller_budgets_take_more_bytes_and_hold(planted: Path, samples: Path) -> None:
    most = diagnosed(planted, samples, 10.0).uniform["w4a16"].measured
    before = 0
    for part in (0.6, 0.2, 0.05, 0.001):
        found = diagnosed(planted, samples, part * most)
        assert found.chosen is not None
        assert found.chosen.measured <= part * most
        assert found.chosen.num_bytes > before
        before = found.chosen.num_bytes


def test_w8a8_moves_few_weights_out_of_8_bits(planted: Path, samples: Path, tmp_path: Path) -> None:
    most = diagnosed(planted, samples, 10.0, quant="w8a8").uniform["w8a8"]
    found = diagnosed(planted, samples, 0.6 * most.measured, quant="w8a8")
    assert found.chosen is not None
    moved = {name: scheme for name, scheme in found.chosen.schemes.items() if scheme != "w8a8"}
    assert 0 < len(moved) < 7
    assert found.chosen.measured <= 0.6 * most.measured
    assert found.quant is not None
    whole = kl_of(planted, found.quant, samples, tmp_path / "e")
    assert whole == pytest.approx(found.chosen.measured, rel=2e-2)


def test_a_budget_that_no_mix_keeps(planted: Path, samples: Path, tmp_path: Path) -> None:
    out = tmp_path / "mixed.yaml"
    words = (*usual(samples), "--out", out)
    shown = ingot("doctor", planted, *words, "--budget", "kl_mean=1e-9", "--up-to", "w8a16")
    assert shown.exit_code == 1
    assert "no mix stays within 1e-09 nats: all layers in w8a16 give" in shown.stdout
    assert "--up-to none" in shown.stdout
    shown = ingot("doctor", planted, *words, "--budget", "kl_mean=1e-15")
    assert shown.exit_code == 1
    assert "nothing is gained" in shown.stdout
    assert not list(tmp_path.iterdir())


def test_a_diagnosis_is_the_same_twice(planted: Path, samples: Path) -> None:
    first, second = (diagnosed(planted, samples, 0.05) for _ in range(2))
    assert first.layers == second.layers
    assert first.tried == second.tried


# --- w4a8 --------------------------------------------------------------------------------------------------


def rotated(checkpoint: Path, samples: Path, quant: QuantConfig, budget: float = 10.0) -> Diagnosis:
    return doctor(Wanted(str(checkpoint), quant, budget, "bytes", device="cpu"), read_data(samples))


@pytest.mark.stays("rotated-qwen2", "plain-qwen2")
@pytest.mark.parametrize("kind", ["qwen2", "tied", "gpt2"])
@pytest.mark.parametrize(
    "quant", [QuantConfig("w4a8", 64), QuantConfig("w4a8", 64, rotation=False)], ids=["rotated", "plain"]
)
def test_a_layer_of_w4a8_costs_what_an_engine_with_it_costs(
    kind: str, quant: QuantConfig, samples: Path, tmp_path: Path
) -> None:
    sizes = {} if kind == "gpt2" else {"hidden_size": 64, "intermediate_size": 96}
    tied = {"tie_word_embeddings": True} if kind == "tied" else {}
    config = tiny_config("llama" if kind == "tied" else kind, **sizes, **tied)
    save_model(config, tmp_path / "hf", seed=3)
    if kind == "gpt2" and quant.rotation:
        with pytest.raises(ConfigError, match=r"cannot be rotated.*rotation: false"):
            rotated(tmp_path / "hf", samples, quant)
        return
    found = rotated(tmp_path / "hf", samples, quant)
    assert found.ladder == ("w4a8", "w8a16", "none")
    for layer in (found.layers[place] for place in (1, 2, 3)):
        own = quant.replace(scheme="none", layers={layer.name: "w4a8"})
        other = kl_of(tmp_path / "hf", own, samples, tmp_path / layer.name)
        assert layer.kl["w4a8"] == pytest.approx(other, rel=1e-4), layer.name
        assert layer.num_bytes["w4a8"] < layer.num_bytes["w8a16"]


def test_a_mix_of_w4a8_is_built(samples: Path, tmp_path: Path) -> None:
    quant = QuantConfig("w4a8", 64)
    save_model(tiny_config("llama", **WIDE), tmp_path / "hf", seed=3)
    whole = rotated(tmp_path / "hf", samples, quant).uniform["w4a8"].measured
    found = rotated(tmp_path / "hf", samples, quant, whole / 3)
    assert found.chosen is not None
    assert found.quant is not None
    assert len({*found.chosen.schemes.values()}) > 1
    assert (found.quant.rotation, found.quant.group) == (True, 64)
    measured = kl_of(tmp_path / "hf", found.quant, samples, tmp_path / "mix")
    assert measured == pytest.approx(found.chosen.measured, rel=1e-2)
    assert measured <= whole / 3 * 1.01


# --- RPTQ --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opt") / "hf"
    save_model(tiny_config("opt", hidden_size=64, ffn_dim=96), folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def calib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calib") / "calib.jsonl"
    return write_ids(path, *(random_ids(60, seed=100 + n) for n in range(6)))


@pytest.mark.stays("opt-rptq-w4a4", "llama-rptq-w4a4")
@pytest.mark.parametrize(
    ("kind", "scheme"), [("opt", "rptq-w4a8"), ("opt", "rptq-w4a4"), ("llama", "rptq-w4a4")]
)
def test_a_layer_alone_in_blocks_costs_what_an_engine_with_it_costs(
    kind: str, scheme: str, opt: Path, llama: Path, samples: Path, calib: Path, tmp_path: Path
) -> None:
    """Its order, ranges and values are those that a build chooses, wherever the order is kept."""
    folder = {"opt": opt, "llama": llama}[kind]
    wanted = Wanted(str(folder), QuantConfig(scheme, 32), 10.0, device="cpu", calib=calib)
    found = doctor(wanted, read_data(samples))
    assert found.ladder == (scheme, "w8a16", "none")
    assert found.quant == wanted.quant
    for layer in found.layers[:4]:
        quant = QuantConfig("none", 32, layers={layer.name: scheme})
        engine = build(
            folder, tmp_path / layer.name, quant=quant, device="cpu", proof=False, calib=calib, dtype="fp32"
        )
        other = kl_of_engine(engine, folder, samples)
        assert layer.kl[scheme] == pytest.approx(other, rel=2e-2), layer.name
        assert layer.num_bytes[scheme] >= layer.num_weights, "of int8"


def test_rptq_from_the_terminal_to_an_engine(opt: Path, samples: Path, calib: Path, tmp_path: Path) -> None:
    """A file of RPTQ's options goes in, and a mix with them comes out, which builds."""
    given, out, reported = (tmp_path / name for name in ("rptq.yaml", "mixed.yaml", "found.json"))
    given.write_text("scheme: rptq-w4a4\ngroup: 32\nrptq: {ranges: minmax, eight_bits: [R1, R3, R4]}\n")
    words = ("--data", samples, "--calib", calib, "--quant", given, "--device", "cpu")
    shown = ingot("doctor", opt, *words, "--budget", "kl_mean=9", "--out", out, "--json-file", reported)
    assert shown.exit_code == 0, shown.output
    assert "layers.1.mlp.down_proj" in shown.stdout
    assert shown.stderr.replace("\n", "").endswith(f"--quant {out} --calib {calib}")
    whole = json.loads(reported.read_text())["uniform"]["rptq-w4a4"]["kl_measured"]
    shown = ingot("doctor", opt, *words, "--budget", f"kl_mean={whole / 2}", "--out", out, "--force")
    assert shown.exit_code == 0, shown.output
    quant = read_quant(str(out))
    assert quant.rptq is not None
    assert (quant.scheme, quant.group, quant.rptq.ranges) == ("rptq-w4a4", 32, "minmax")
    assert 0 < len(quant.layers) < 8
    engine = build(opt, tmp_path / "engine", quant=quant, device="cpu", proof=False, calib=calib)
    assert kl_of_engine(engine, opt, samples) < whole


# --- the terminal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--budget", "0.01"), "kl_mean=X"),
        (("--budget", "kl_mean=-1"), "kl_mean=X"),
        (("--budget", "kl_mean=nan"), "kl_mean=X"),
        (("--budget", "ppl=1"), "kl_mean=X"),
        (("--quant", "w5a16"), "unknown quantization scheme"),
        (("--quant", "none"), "nothing to choose"),
        (("--quant", "w4a8", "--group-size", "32"), "unsupported group size"),
        (("--quant", "rptq-w8a8"), "this scheme needs calibration data"),
        (("--calib-samples", "4"), "this scheme uses no calibration data"),
        (("--quant", "rptq-w8a8", "--calib", "absent.jsonl"), "absent.jsonl"),
        (("--quant", "rptq-w8a8", "--calib-samples", "0"), "--calib-samples"),
        (("--quant", "rptq-w4a8", "--calib", "absent.jsonl", "--least", "bytes"), "no fewer bytes"),
        (("--quant", "w8a8", "--least", "bytes"), "no fewer bytes"),
        (("--least", "joules"), "no such objective"),
        (("--up-to", "w8a8"), "no such scheme for --up-to"),
        (("--group-size", "48"), "unsupported group size"),
        (("--out", "mixed.txt"), "by their extension"),
        (("--out", "absent/mixed.yaml"), "cannot be written"),
        (("--data", "absent.jsonl"), "cannot be read"),
        (("--window", "4096"), "larger than the context"),
        (("--where", "task"), "FIELD=VALUE"),
    ],
)
def test_what_is_misused(
    words: tuple[str, ...], reported: str, llama: Path, samples: Path, tmp_path: Path
) -> None:
    shown = ingot("doctor", llama, *usual(samples), "--out", tmp_path / "m.yaml", *words)
    assert shown.exit_code == 2, shown.output
    assert reported in shown.stderr
    assert not list(tmp_path.iterdir())


def test_checkpoints_and_data_that_do_not_serve(llama: Path, samples: Path, tmp_path: Path) -> None:
    def refused(checkpoint: Path, data: Path) -> str:
        shown = ingot("doctor", checkpoint, *usual(data), "--out", tmp_path / "m.yaml")
        assert shown.exit_code == 2, shown.output
        return str(shown.stderr)

    text = tmp_path / "text.txt"
    text.write_text("some words")
    assert "has no tokenizer" in refused(llama, text)
    odd = write_ids(tmp_path / "odd.jsonl", [1, 97])
    assert "a token id outside the vocabulary" in refused(llama, odd)
    engine = build(llama, tmp_path / "engine", device="cpu", proof=False)
    assert "an engine's schemes are fixed" in refused(engine, samples)
    refused(tmp_path / "absent", samples)
    assert not (tmp_path / "m.yaml").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_the_old_file(
    number: int, llama: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mixed.yaml"
    out.write_text("scheme: w8a16\n")
    monkeypatch.setattr(PrecisionProbe, "together", lambda self, options: os.kill(os.getpid(), number))
    more = ("--out", out, "--force", "--json-file", tmp_path / "j.json")
    shown = ingot("doctor", llama, *usual(samples), *more)
    assert shown.exit_code == 128 + number
    assert out.read_text() == "scheme: w8a16\n"
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_that_is_there_is_replaced_by_force_alone(
    llama: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "doctor.yaml"
    out.write_text("scheme: w8a16\n")
    for more in ((), ("--out", out)):
        shown = ingot("doctor", llama, *usual(samples), *more)
        assert shown.exit_code == 2
        assert "--force replaces it" in shown.stderr
        assert out.read_text() == "scheme: w8a16\n"
    assert ingot("doctor", llama, *usual(samples), "--force").exit_code == 0
    assert read_quant(str(out)) != QuantConfig("w8a16")


def test_a_quantized_config_is_no_beginning(llama: Path, samples: Path) -> None:
    with pytest.raises(ConfigError, match="starts from one scheme"):
        doctor(Wanted(str(llama), QuantConfig("w4a16", method="gptq"), 1.0), read_data(samples))


def test_the_json_and_the_tables(llama: Path, samples: Path, tmp_path: Path) -> None:
    words = (*usual(samples), "--out", tmp_path / "m.yaml")
    shown = ingot("doctor", llama, *words, "--json")
    record = json.loads(shown.stdout)
    assert record["held"] is True
    assert record["ladder"] == ["w4a16", "w8a16", "none"]
    by_operator = {name: own["w4a16"] for name, own in record["operators"].items()}
    assert sum(by_operator.values()) == pytest.approx(record["uniform"]["w4a16"]["kl_predicted"])
    assert set(record["decoder_layers"]) == {"layers.0", "layers.1"}
    assert set(by_operator) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert record["uniform"]["none"] == {
        "bytes": record["uniform"]["none"]["bytes"],
        "kl_predicted": 0.0,
        "kl_measured": 0.0,
        "schemes": {"none": 8},
    }
    shown = ingot("doctor", llama, *words, "--force")
    for reported in ("summed by operator", "summed by decoder layer", "the mix", "all w8a16", "KL measured"):
        assert reported in shown.stdout


@pytest.mark.gpu
def test_a_gpu_finds_the_same(planted: Path, samples: Path) -> None:
    data = read_data(samples)
    there, here = (
        doctor(Wanted(str(planted), QuantConfig("w4a16"), 0.05, device=device), data)
        for device in ("cuda", "cpu")
    )
    for one, other in zip(there.layers, here.layers, strict=True):
        assert one.kl["w4a16"] == pytest.approx(other.kl["w4a16"], rel=1e-2)
    assert there.quant == here.quant
