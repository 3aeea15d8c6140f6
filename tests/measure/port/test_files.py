"""The files that ``ingot port -o`` writes: they run, and nothing of a checkpoint becomes code in them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Phi3Config, StableLmConfig

from ingot.errors import CheckpointError
from tests.e2e.terminal import ingot
from tests.measure.port.test_report import SIZES, saved
from tests.tiny_models import edit_config

ROOT = Path(__file__).parents[3]


def run_test(file: Path) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file))
    paths = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        words, capture_output=True, text=True, env=paths, cwd=file.parent, timeout=120, check=False
    )


@pytest.mark.slow
def test_phi3s_port_is_complete_and_its_test_passes(tmp_path: Path) -> None:
    checkpoint = saved(Phi3Config(**SIZES, sliding_window=7), tmp_path / "hf")
    done = ingot("port", checkpoint, "-o", tmp_path / "port")
    assert done.exit_code == 0, done.stderr
    result = run_test(tmp_path / "port" / "test_phi3.py")
    assert "2 passed" in result.stdout, result.stdout


@pytest.mark.slow
def test_stablelms_test_fails_at_what_is_open(tmp_path: Path) -> None:
    checkpoint = saved(StableLmConfig(**SIZES), tmp_path / "hf")
    assert ingot("port", checkpoint, "-o", tmp_path / "port").exit_code == 0
    result = run_test(tmp_path / "port" / "test_stablelm.py")
    assert "4 TODOs are open in" in result.stdout, result.stdout
    assert "TODO config rope_parameters.partial_rotary_factor=0.25" in result.stdout


def test_a_model_with_open_points_is_refused_and_matched_rules_are_there(tmp_path: Path) -> None:
    checkpoint = saved(StableLmConfig(**SIZES), tmp_path / "hf")
    assert ingot("port", checkpoint, "-o", tmp_path / "port").exit_code == 0
    text = (tmp_path / "port" / "stablelm.py").read_text()
    module: dict[str, object] = {"__name__": "stablelm", "__file__": "stablelm.py"}
    exec(compile(text, "stablelm.py", "exec"), module)
    assert len(module["TODO"]) == 4  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"(?s)port of stablelm is not finished.*partial_rotary_factor"):
        module["MODEL"].read_config(json.loads((checkpoint / "config.json").read_text()))  # type: ignore[attr-defined]
    assert '        Rename("embed_tokens.weight", "model.embed_tokens.weight"),\n' in text
    assert "        head_rule(config),\n" in text
    assert 'READ_AS: dict[str, str] = {"layer_norm_eps": "rms_norm_eps"}' in text


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    checkpoint = saved(Phi3Config(**SIZES), tmp_path / "hf")
    (tmp_path / "port").mkdir()
    (tmp_path / "port" / "test_phi3.py").write_text("mine")
    done = ingot("port", checkpoint, "-o", tmp_path / "port")
    assert done.exit_code == 2
    assert "a file is there already" in done.stderr
    assert [file.name for file in (tmp_path / "port").iterdir()] == ["test_phi3.py"]
    (tmp_path / "file").write_text("")
    done = ingot("port", checkpoint, "-o", tmp_path / "file")
    assert done.exit_code == 2
    assert "cannot write the port" in done.stderr


def test_names_and_values_of_a_checkpoint_do_not_become_code(tmp_path: Path) -> None:
    checkpoint = saved(Phi3Config(**SIZES), tmp_path / "hf")
    evil = 'x"\nimport os\nos.abort()\n"""\n\'\'\'<<name>>{layer}'
    tensors = {evil: torch.zeros(2), f"model.layers.0.{evil}.bias": torch.zeros(2)}
    tensors |= {f"{evil}.layers.{i}.mlp.down_proj.weight": torch.zeros(32, 48) for i in (0, 1)}
    save_file(tensors, checkpoint / "model.safetensors")
    changes = {
        evil: evil,
        "architectures": [evil],
        "model_type": evil,
        "rope_scaling": {evil: evil, "type": evil},
    }
    edit_config(checkpoint, **changes)
    done = ingot("port", checkpoint, "-o", tmp_path / "port")
    assert done.exit_code == 0, done.stderr
    files = list((tmp_path / "port").iterdir())
    assert len(files) == 2
    for file in files:
        tree = ast.parse(file.read_text())
        imported = {
            name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
        }
        assert "os" not in imported
        assert not any(isinstance(node, ast.Attribute) and node.attr == "abort" for node in ast.walk(tree))


@pytest.mark.parametrize("kind", ["json", "class", "llama", "../../x", "7b", ""])
def test_the_module_has_a_name_that_nothing_else_has(kind: str, tmp_path: Path) -> None:
    checkpoint = saved(Phi3Config(**SIZES), tmp_path / "hf")
    edit_config(checkpoint, model_type=kind, architectures=["NewThingForCausalLM"])
    assert ingot("port", checkpoint, "-o", tmp_path / "port").exit_code == 0
    names = sorted(file.name for file in (tmp_path / "port").iterdir())
    expected = "x" if kind == "../../x" else "newthing"
    assert names == sorted([f"{expected}.py", f"test_{expected}.py"])
