"""Traces: written anywhere by one file, read as the original."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ingot.errors import CheckpointError, NoSuchPathError, RequestError
from ingot.measure.align import trace as trace_file
from ingot.measure.align.align_session import align
from ingot.measure.align.stages.stage_names import StageFile
from ingot.measure.align.trace import TraceWriter, main, read_header, run_steps, trace
from tests.measure.align.conftest import Spoil, Weights
from tests.support.shown_errors import raises_shown
from tests.tiny_models import make_model, random_ids, tiny_config

HERE = Path(__file__).parent
IDS = list(b"hello")


@pytest.fixture(scope="session")
def old_trace(originals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the old Qwen, made by a process that cannot import Ingot."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(trace_file.__file__, folder / "trace_copy.py")
    shutil.copy(HERE / "old_qwen.py", folder)
    out = folder / "old.safetensors"
    command = [sys.executable, "old_qwen.py", originals["qwen"], out, *map(str, IDS)]
    subprocess.run(list(map(str, command)), cwd=folder, check=True, env={"PATH": ""})
    return out


@pytest.mark.stays("fp16")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_clean_engine(dtype: str, old_trace: Path, originals: dict[str, Path]) -> None:
    report = align(originals["qwen"], old_trace, device="cpu", dtype=dtype)
    assert report.aligned
    assert report.reference == "trace of OldQwen, fp32"
    assert report.steps == 3
    assert {row.step for row in report.rows} == {0, 1, 2, 3}
    assert "layers.1.residual" in {row.stage for row in report.rows}
    assert [(c.stage, c.is_bad) for c in report.cases[0].checks] == [("token ids", False)]


def test_a_wrong_engine(old_trace: Path, spoil: Spoil) -> None:
    def swap(weights: Weights) -> None:
        a, b = (f"transformer.h.1.mlp.{name}.weight" for name in ("w1", "w2"))
        weights[a], weights[b] = weights[b], weights[a]

    assert align(spoil("qwen", swap), old_trace, device="cpu").first_stage == "layers.1.mlp"


def test_other_token_ids(old_trace: Path, originals: dict[str, Path]) -> None:
    report = align(originals["qwen"], old_trace, ["hellp"], device="cpu")
    assert report.first_stage == "token ids"
    assert report.cases[0].checks[0].first == 4
    assert report.first is None, "the tensors are compared on the trace's ids"


def test_a_trace_of_huggingface_in_bf16(originals: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(originals["llama"], dtype=torch.bfloat16)
    path = tmp_path / "bf16.safetensors"
    with trace(model, path):
        run_steps(model, random_ids(9), 2)
    report = align(originals["llama"], path, device="cpu")
    assert report.aligned
    assert report.noise == "bf16 against fp32, with the engine's weights"
    assert any(row.difference.relative > 1e-3 for row in report.rows)


def test_the_file_is_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {
        "odd": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "ids": torch.arange(4),
        "turned": torch.randn(4, 6).t(),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.5, dtype=torch.float64),
    }
    writer = TraceWriter(path)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_tensor_of_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_CHUNK", 7)
    writer = TraceWriter(tmp_path / "x.safetensors")
    tensor = torch.randn(5, 3)
    writer.add("it", tensor)
    writer.close()
    assert torch.equal(load_file(tmp_path / "x.safetensors")["it"], tensor)


def test_what_a_trace_records(tmp_path: Path) -> None:
    model = make_model(tiny_config("gpt2"))
    path = tmp_path / "x.safetensors"
    plain = model(torch.tensor([random_ids(4)])).logits
    with trace(model, path, ["*.mlp", "*ln_1"], note="mine"):
        traced = model(input_ids=torch.tensor([random_ids(4)])).logits
    assert torch.equal(plain, traced)
    assert "forward" not in model.__dict__
    header = read_header(str(path))
    metadata = header.pop("__metadata__")
    layers = {f"0/transformer.h.{i}.{name}" for i in range(2) for name in ("mlp", "ln_1", "ln_1/in")}
    assert set(header) == layers | {"0/input_ids", "0/logits"}
    assert metadata["model"] == "GPT2LMHeadModel"
    assert metadata["note"] == "mine"
    assert '"transformer.h.0.mlp": "GPT2MLP"' in metadata["modules"]
    assert '"torch"' in metadata["versions"]


def test_a_failing_block_leaves_no_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ZeroDivisionError), trace(model, tmp_path / "x.safetensors"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no module matches"), trace(model, tmp_path / "x", ["nothing"]):
        pass


def test_a_module_called_twice(tmp_path: Path) -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    path = tmp_path / "x.safetensors"
    with trace(model, path):
        model(torch.ones(1, 2))
    assert {"0/0", "0/0#1", "0/1"} <= set(read_header(str(path)))


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "making.py").write_text(
        "from tests.tiny_models import make_model, tiny_config\n"
        "def make():\n    return make_model(tiny_config('llama'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["--model", "making:make", "--ids", "1 2 3", "--steps", "2", "-o", "x.safetensors"]) == 0
    found = StageFile(tmp_path / "x.safetensors")
    assert found.steps == 2
    assert [found.start(step) for step in range(3)] == [0, 3, 4]
    assert main(["--list", "x.safetensors"]) == 0
    assert "0/model.layers.1.mlp  F32 1x3x32" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["--ids", "1"])
    assert stopped.value.code == 2


def test_bad_traces(originals: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a trace"):
        align(originals["llama"], originals["llama"] / "model.safetensors")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(CheckpointError, match="not a trace"):
        align(originals["llama"], tmp_path / "text")
    with pytest.raises(NoSuchPathError):
        StageFile(tmp_path / "absent")
    cases = {
        "no known module names": {"0/input_ids": torch.tensor([[1]]), "0/odd": torch.ones(1, 1)},
        "no token ids": {"0/h.0.ln_1": torch.ones(1, 1, 2)},
        "several sequences": {
            "0/input_ids": torch.ones(2, 3, dtype=torch.int64),
            "0/h.0.ln_1": torch.ones(2, 3, 2),
        },
    }
    for number, (message, tensors) in enumerate(cases.items()):
        path = tmp_path / f"{number}.safetensors"
        save_file(tensors, path, metadata={"format": trace_file.FORMAT})
        with raises_shown(CheckpointError, message):
            align(originals["llama"], path)


def test_a_trace_of_another_model(old_trace: Path, originals: dict[str, Path], tmp_path: Path) -> None:
    model = make_model(tiny_config("llama", num_hidden_layers=1))
    with trace(model, tmp_path / "x.safetensors"):
        run_steps(model, random_ids(4), 1)
    with pytest.raises(CheckpointError, match="a different model"):
        align(originals["llama"], tmp_path / "x.safetensors", device="cpu")
    with pytest.raises(RequestError, match="one prompt"):
        align(originals["qwen"], old_trace, ["a", "b"], device="cpu")
