"""``tune``, the plan in an engine, and what a plan of another machine does."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ingot
from ingot import LLM, SamplingParams
from ingot.building.builder import build
from ingot.building.tuner import tuning
from ingot.config.kernel_plan import KernelPlan, PlanMachine
from ingot.engine import engine_facts as describe
from ingot.engine import engine_loader as loader
from ingot.engine import plan_file
from ingot.engine.engine_diff import compare_engines
from ingot.engine.plan_file import read_own_plan, read_plan, usable_plan, write_plan
from ingot.errors import BuildError, ConfigError, DeviceError, EngineError
from ingot.proof.verify_engine import verify
from tests.e2e.terminal import ingot as run
from tests.e2e.tiny import FOREIGN_PLAN, write_tiny
from tests.tiny_models import save_model, tiny_config

FOREIGN = KernelPlan.from_json(FOREIGN_PLAN)
HERE = PlanMachine("Some GPU", "9.0", 2, "2.11.0", "3.6.0")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_engine, tmp_path / "engine"))


@pytest.mark.parametrize("words", [(), ("--device", "cpu")])
@no_gpu
def test_a_cpu_cannot_tune(engine: Path, words: tuple[str, ...]) -> None:
    before = (engine / "plan.json").read_text()
    result = run("tune", engine, *words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[0] == "error: tuning needs the GPU that will run the engine"
    assert "the machine with the GPU" in result.stderr
    assert (engine / "plan.json").read_text() == before
    with pytest.raises(DeviceError):
        ingot.tune(engine)


def test_the_engine_is_looked_for_before_the_gpu(tmp_path: Path) -> None:
    result = run("tune", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr


@no_gpu
def test_a_build_on_a_cpu_has_an_empty_plan(tiny: Path, engine: Path, tmp_path: Path) -> None:
    assert read_own_plan(engine) == KernelPlan()
    words = ("build", tiny, "-o", tmp_path / "other", "--no-tune", "--max-seq-len", 64)
    assert run(*words).exit_code == 0
    assert (tmp_path / "other" / "plan.json").read_text() == (engine / "plan.json").read_text()


class TestOnAPretendedGpu:
    """``tune`` as on a GPU: the kernels' twins run, and a clock that stands still."""

    @pytest.fixture(autouse=True)
    def pretend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Still:
            def prepare(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
                return lambda: 2.0

        monkeypatch.setattr(tuning, "gpu", lambda name: torch.device("cpu"))
        monkeypatch.setattr(tuning, "GraphTimer", Still)

    def test_the_plan_goes_into_the_engine(self, engine: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        shutil.copytree(engine, copy)
        result = run("tune", engine)
        assert (result.exit_code, result.stderr) == (0, "")
        lines = result.stdout.splitlines()
        assert lines[0].split() == "op shape and rows default us best us gain tiles".split()  # noqa: SIM905
        assert ["small_qkv", "m1_n96_k32", "2.00", "2.00", "0.0%", "default"] in [x.split() for x in lines]
        assert re.match(r"0 of \d+ choices differ from the defaults; [\d.]+ s, [\d.]+ s of it", lines[-1])
        plan = read_own_plan(engine)
        assert plan.gpu == "CPU"
        assert plan.measured["small_qkv"]["m1_n96_k32"].default_us == 2.0
        assert sorted(f.name for f in engine.iterdir()) == sorted(f.name for f in copy.iterdir())
        assert {change.name for change in compare_engines(copy, engine).plan} >= {"gpu"}
        assert not compare_engines(copy, engine).files
        LLM(engine, device="cpu").generate([[1, 2]], SamplingParams(max_new_tokens=2))

    def test_elsewhere_and_as_json(self, engine: Path, tmp_path: Path) -> None:
        before = (engine / "plan.json").read_text()
        result = run("tune", engine, "--output", tmp_path / "p.json", "--ops", "rms_norm,silu_mul", "--json")
        assert result.exit_code == 0
        assert (engine / "plan.json").read_text() == before
        plan = KernelPlan.from_json(json.loads(result.stdout)["plan"])
        assert read_plan(tmp_path / "p.json") == plan
        assert set(plan.measured) == {"rms_norm", "silu_mul"}

    def test_some_ops_keep_the_others_of_this_machine(
        self, engine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ingot.tune(engine)
        assert set(ingot.tune(engine, ops=["rms_norm"]).plan.measured) > {"rms_norm"}
        monkeypatch.setattr(tuning, "usable_plan", lambda *rest: (KernelPlan(), "measured elsewhere"))
        assert set(ingot.tune(engine, ops=["rms_norm"]).plan.measured) == {"rms_norm"}

    def test_unknown_ops_are_named(self, engine: Path) -> None:
        result = run("tune", engine, "--ops", "rms_nrm")
        assert result.exit_code == 2
        assert "seen: rms_nrm" in result.stderr
        assert "fix: --ops" in result.stderr


@pytest.mark.parametrize("change", [{}, {"gpu": "Another"}, {"triton": "3.7.0"}, {"value_bytes": 4}])
def test_only_a_plan_of_this_machine_is_used(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_file, "machine_of", lambda device, dtype: replace(HERE, **change))
    plan, why_not = usable_plan(FOREIGN, torch.device("cuda", 0), torch.float16)
    assert plan == (KernelPlan() if change else FOREIGN)
    assert (why_not is None) == (not change)
    assert usable_plan(FOREIGN, torch.device("cpu"), torch.float32) == (FOREIGN, None)


def test_a_foreign_plan_is_reported_and_defaults_run(
    engine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_plan(engine / "plan.json", FOREIGN)
    expected = LLM(engine, device="cpu").generate([[1, 2]], SamplingParams(max_new_tokens=4))[0]
    assert not caplog.records
    monkeypatch.setattr(plan_file, "usable_plan", lambda *rest: (KernelPlan(), "measured with GPU A, not B"))
    monkeypatch.setattr(describe, "usable_plan", lambda *rest: (KernelPlan(), "measured with GPU A, not B"))
    llm = LLM(engine, device="cpu")
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "using default tiles, not the kernel plan: measured with GPU A, not B" in caplog.text
    assert llm.engine.plan == KernelPlan()
    assert llm.generate([[1, 2]], SamplingParams(max_new_tokens=4))[0].token_ids == expected.token_ids
    assert "not used here: measured with GPU A, not B" in run("inspect", engine).stdout


def test_a_plan_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, KernelPlan())
    before = path.read_text()

    def full(self: Path, text: str, **rest: Any) -> None:
        self.touch()
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BuildError, match="disk is full"):
        write_plan(path, FOREIGN)
    monkeypatch.undo()
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def edited(engine: Path, old: str, new: str) -> None:
    path = engine / "plan.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


EDITS: dict[str, Callable[[Path], object]] = {
    "a value": lambda e: edited(e, '"num_warps": 8', '"num_warps": 4'),
    "the hash": lambda e: edited(e, '"sha256": "', '"sha256": "0'),
    "no hash": lambda e: (e / "plan.json").write_text(json.dumps(FOREIGN_PLAN)),
    "a key twice": lambda e: edited(e, "{\n", '{\n  "gpu": "Another",\n'),
    "a blank": lambda e: edited(e, "{\n", "{ \n"),
    "cut": lambda e: (e / "plan.json").write_text("{"),
    "a list": lambda e: (e / "plan.json").write_text("[]"),
    "no text": lambda e: (e / "plan.json").write_bytes(b"\xff"),
}


class TestEditedPlans:
    """A plan that is not as it was written is refused wherever the engine is read, on a CPU, too."""

    @pytest.mark.parametrize("edit", EDITS)
    def test_load_verify_diff_and_tune_refuse_it(
        self, engine: Path, tmp_path: Path, edit: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_plan(engine / "plan.json", FOREIGN)
        shutil.copytree(engine, tmp_path / "whole")
        EDITS[edit](engine)
        with pytest.raises(EngineError, match=r"has changed.*plan\.json was changed.*`ingot tune"):
            LLM(engine, "cpu")
        found = verify(engine, "cpu")
        assert [(f.kind, f.name, f.message) for f in found.failures] == [
            ("file", "plan.json", "plan.json was changed")
        ]
        assert run("diff", tmp_path / "whole", engine).exit_code == 2
        monkeypatch.setattr(tuning, "gpu", lambda name: torch.device("cpu"))
        with pytest.raises(EngineError, match=r"kernel plan was changed.*delete plan\.json"):
            ingot.tune(engine, ops=["rms_norm"])

    def test_an_intact_or_deleted_plan_is_accepted(self, engine: Path) -> None:
        write_plan(engine / "plan.json", FOREIGN)
        assert verify(engine, "cpu").verdict == "proven"
        (engine / "plan.json").unlink()
        assert verify(engine, "cpu").verdict == "proven"

    def test_a_plan_that_a_user_gives_may_have_no_hash(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.json"
        write_plan(path, FOREIGN)
        assert read_plan(path) == FOREIGN
        path.write_text(path.read_text().replace('"num_warps": 8', '"num_warps": 4'))
        with pytest.raises(ConfigError, match="edited after its sha256 was written"):
            read_plan(path)
        path.write_text(json.dumps(FOREIGN_PLAN))
        assert read_plan(path) == FOREIGN


UNREADABLE_PLANS = {  # whole, but not of this version
    '{"tiles": {"teleport": {"x": 1}}}': "the plan names unknown kernels: teleport",
    '{"tiles": {"rms_norm": {"num_warps": 8}}}': "rms_norm has no such keys: num_warps",
}


@pytest.mark.parametrize("text", UNREADABLE_PLANS)
def test_on_a_gpu_an_unreadable_plan_is_a_single_error(
    engine: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "expect_capability", lambda device: None)
    (engine / "plan.json").write_text(plan_file._sealed(json.loads(text)))
    with pytest.raises(EngineError) as caught:
        loader.load_engine(engine, torch.device("cuda"))
    error = caught.value
    assert error.what == "the engine's kernel plan was written by another version of Ingot"
    assert str(error.seen).startswith(f"{engine / 'plan.json'}: {UNREADABLE_PLANS[text]}")
    assert error.fix == f"`ingot tune {engine}`, or delete plan.json to run with the defaults"
    assert str(error).count("fix") == 1


@pytest.mark.parametrize("text", UNREADABLE_PLANS)
def test_on_a_cpu_an_unreadable_plan_is_only_a_warning(
    engine: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = LLM(engine, device="cpu").generate([[1, 2]], SamplingParams(max_new_tokens=4))
    (engine / "plan.json").write_text(plan_file._sealed(json.loads(text)))
    assert LLM(engine, device="cpu").generate([[1, 2]], SamplingParams(max_new_tokens=4)) == expected
    (record,) = caplog.records
    reported = "ignoring plan.json, which cannot be read (a CPU needs no kernel plan): "
    assert record.getMessage().startswith(reported)
    assert UNREADABLE_PLANS[text] in record.getMessage()


@no_gpu
def test_inspect_on_a_cpu_shows_that_a_plan_is_not_used(engine: Path) -> None:
    assert "kernel plan   defaults, nothing measured\n" in run("inspect", engine).stdout
    write_plan(engine / "plan.json", FOREIGN)
    assert "with Triton 3.6.0; not used here: a CPU runs no kernels\n" in run("inspect", engine).stdout
    assert json.loads(run("inspect", engine, "--json").stdout)["plan_unused"] == "a CPU runs no kernels"
    (engine / "plan.json").write_text("{")
    assert "plan.json was changed" in run("inspect", engine).stderr


@pytest.mark.gpu
def test_a_tuned_engine_computes_the_same(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "head_dim": 64}
    save_model(tiny_config("llama", **sizes, num_key_value_heads=4), tmp_path / "hf", seed=5)
    limits = {"dtype": "fp16", "max_batch_size": 9, "max_seq_len": 128}
    plain = build(tmp_path / "hf", tmp_path / "plain", tune=False, **limits)
    tuned = build(tmp_path / "hf", tmp_path / "tuned", **limits)
    assert read_own_plan(plain) == KernelPlan()
    plan = read_own_plan(tuned)
    assert plan.gpu == torch.cuda.get_device_name()
    assert {"small_qkv", "small_linear", "small_gate_up", "paged_attention"} <= set(plan.measured)
    assert not compare_engines(plain, tuned).tensors
    prompts = [list(range(3 + i, 40 + i)) for i in range(9)]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)
    outputs = [LLM(folder, device="cuda").generate(prompts, params) for folder in (plain, tuned)]
    for one, other in zip(*outputs, strict=True):
        assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=0.02)
    again = ingot.tune(tuned, ops=["small_qkv"])
    assert set(again.plan.measured) == set(plan.measured)


@pytest.mark.gpu
def test_a_plan_of_another_gpu_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = write_tiny(tmp_path / "tiny")
    engine = build(checkpoint, tmp_path / "engine", max_seq_len=64, max_batch_size=4, tune=False)
    tiles = {"small_qkv": {"m1_n96_k32": {"BLOCK_N": 1 << 20}}}  # compiles nowhere
    write_plan(engine / "plan.json", FOREIGN.replace(tiles=tiles))
    llm = LLM(engine, device="cuda")
    assert "using default tiles, not the kernel plan" in caplog.text
    assert llm.generate([[1, 2]], SamplingParams(max_new_tokens=4))[0].token_ids
