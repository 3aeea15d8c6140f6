"""``ingot`` on a tiny engine: the frame, ``build``, ``inspect`` and ``diff``."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from benchmarks.figures import ROOT
from ingot.building.builder import build
from ingot.cli.main import app
from ingot.engine.manifest import Manifest
from ingot.engine.plan_file import read_own_plan
from ingot.version import VERSION
from tests.e2e.terminal import ingot
from tests.e2e.tiny import FOREIGN_PLAN, write_tiny


@pytest.fixture(scope="module")
def checkpoint(tiny: Path) -> Path:
    return tiny


@pytest.fixture(scope="module")
def engine(tiny_engine: Path) -> Path:
    return tiny_engine


# --- the frame -------------------------------------------------------------------------------------------


def test_a_working_folder_that_was_removed(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = ingot("run", engine, "hello", "--device", "cpu")
    assert result.exit_code == 2
    assert "error: the working folder was removed" in result.stderr
    assert "fix: change into one that is there" in result.stderr


def test_version_and_help() -> None:
    assert ingot().exit_code == 2
    assert ingot("--version").stdout == f"ingot {VERSION}\n"
    shown = ingot("--help")
    assert shown.exit_code == 0
    verbs = ("build", "tune", "run", "chat", "serve", "plan", "explain", "inspect", "diff", "verify", "align")
    verbs += ("triton", "repro", "sweep", "eval", "bench", "doctor", "web", "merge-delta")
    assert all(verb in shown.stdout for verb in verbs)


@pytest.mark.parametrize(
    ("typed", "offered"), [("ingot tr", "transcribe\ntriton"), ("ingot run --ra", "--raw")]
)
def test_the_shell_completes_verbs_and_flags(typed: str, offered: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    environment = {"_INGOT_COMPLETE": "complete_bash", **words}
    assert CliRunner().invoke(app, env=environment, prog_name="ingot").stdout.strip() == offered


def test_completion_is_installed_for_the_shell_that_asks(tmp_path: Path) -> None:
    """A bash that has read its files then completes verbs."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("no bash")
    start = "from ingot.cli.main import app; app(prog_name='ingot')"
    script = tmp_path / "ingot"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{start}" "$@"\n')
    script.chmod(0o755)
    asked = "COMP_WORDS=(ingot transc) COMP_CWORD=1; _ingot_completion ingot; echo ${COMPREPLY[@]}"
    text = f"ingot --install-completion; . ~/.bashrc; complete -p ingot; {asked}"
    place = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([bash, "-c", text], capture_output=True, text=True, env=place, check=True)
    assert "bash completion installed" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["complete -o default -F _ingot_completion ingot", "transcribe"]


def test_completion_that_cannot_be_installed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bashrc").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        "shellingham.detect_shell", lambda *_: ("bash", "bash")
    )  # make's parents are no shells
    result = ingot("--install-completion")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: Is a directory\n  seen: {tmp_path / '.bashrc'}")


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from ingot.cli.main import app\n"
        "verbs = (['run'], ['align'], ['plan'], ['doctor'], ['bench', 'latency'])\n"
        "for words in (['--help'], ['--version'], *([*verb, '--help'] for verb in verbs)):\n"
        "    try: app(words)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "print([m for m in ('torch', 'triton', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("OMP_WAIT_POLICY", None, "passive"),
        ("OMP_WAIT_POLICY", "active", "active"),
        ("OMP_NUM_THREADS", None, "3"),
        ("OMP_NUM_THREADS", "40", "40"),
    ],
)
def test_threads_that_wait_sleep_and_are_as_many_as_a_quota_allows(
    name: str, given: str | None, expected: str
) -> None:
    """The setting is there when torch is imported, and the user's own stays."""
    code = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'torch': print(os.environ.get('{name}')); sys.exit(7)\n"
        "from ingot.cli import main\n"
        "main.affine_processors, main.usable_processors = lambda: 64, lambda: 3\n"
        "sys.meta_path.insert(0, Watch())\n"
        "main.app(['run', 'models/pocket-chat', 'Hi'])"
    )
    others = {key: value for key, value in os.environ.items() if key != name}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=others | ({name: given} if given else {}),
    )
    assert (done.stdout, done.returncode) == (f"{expected}\n", 7), done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("run", "{nowhere}", "Hi"), 2),
        (("chat", "{nowhere}"), 2),
        (("tune", "{nowhere}"), 2),
        (("inspect", "{nowhere}"), 2),
        (("diff", "{engine}", "{nowhere}"), 2),
        (("diff", "{engine}", "{checkpoint}"), 2),  # 1 says that two engines differ
        (("build", "{nowhere}", "-o", "{new}"), 2),
        (("build", "{checkpoint}", "-o", "{new}", "--plan", "{nowhere}"), 2),
        (("build", "{checkpoint}", "-o", "{new}", "--dtype", "int3"), 2),
        (("build", "{checkpoint}", "-o", "{engine}"), 2),
        (("build", "{engine}", "-o", "{new}"), 2),
        (("build", "{checkpoint}/config.json", "-o", "{new}"), 2),
        (("inspect", "{checkpoint}/config.json"), 2),
        (("sweep", "{engine}", "--out", "{new}", "--no-png", "--quant", "w8a16"), 2),
        (("run", "{engine}", "Hi", "--file", "{nowhere}"), 2),
        (("run", "{engine}", "--file", "{nowhere}"), 2),
        (("run", "{engine}", "Hi", "--num-beams", "5"), 2),  # more than the engine's batch
        (("run", "{engine}", "Hi", "--device", "tpu"), 2),
        (("run", "{engine}", "x" * 128), 1),
        (("verify", "{nowhere}"), 2),
        (("verify", "{checkpoint}"), 2),
        (("tune", "{checkpoint}"), 2),
        (("build", "x"), 2),
        (("run", "x", "a", "--top-k", "b"), 2),
        (("bench", "latency", "{nowhere}"), 2),
        (("bench", "latency", "--random-weights", "{nowhere}"), 2),
        (("bench", "throughput", "{engine}", "--requests", "{nowhere}"), 2),
    ],
)
def test_misuse_exits_with_2_and_failure_with_1(
    words: tuple[str, ...], code: int, engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    places = {"nowhere": tmp_path / "nowhere", "new": tmp_path / "new"}
    result = ingot(*(w.format(engine=engine, checkpoint=checkpoint, **places) for w in words), stdin="")
    assert result.exit_code == code, result.stderr
    assert "error: " in result.stderr
    if words[-1] == "{checkpoint}" and "-o" not in words:
        assert "not an engine" in result.stderr


def test_the_manifest_itself_is_no_engine(engine: Path) -> None:
    result = ingot("verify", engine / "manifest.json")
    assert (result.exit_code, "but this is a file" in result.stderr) == (2, True)
    assert str(engine) in result.stderr.split("fix: give its folder,")[1].replace("\n", "")


def test_an_error_is_a_message_of_lines_and_no_traceback(engine: Path) -> None:
    result = ingot("run", engine, "hello", "--top-p", "4", "--device", "cpu")
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == "error: top_p is out of range"
    assert lines[1:] == ["  seen: 4.0", "  allowed: a number in (0.0, 1.0]", "  fix: --top-p"]


def test_debug_shows_the_traceback(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" in ingot("--debug", "diff", engine, "nowhere").stderr
    monkeypatch.setenv("INGOT_DEBUG", "1")
    result = ingot("diff", engine, "nowhere")
    assert "Traceback" in result.stderr
    assert result.exit_code == 2


# --- build -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("whole_proofs")
def test_build_says_path_and_size_last(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    words = ("build", checkpoint, "-o", target, "--device", "cpu")
    result = ingot(*words)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith(f"{target}: 13")
    assert " kB, built in " in result.stdout
    assert result.stderr == ""
    again = ingot(*words)
    assert again.exit_code == 2
    assert "error: the engine exists" in again.stderr
    assert ingot(*words, "--force", "--dtype", "fp32").exit_code == 0
    assert Manifest.read(target).build.dtype == "fp32"


def test_build_flags_reach_the_engine(checkpoint: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(FOREIGN_PLAN))
    flags = {
        "--dtype": "bf16",
        "--max-batch-size": 3,
        "--max-seq-len": 99,
        "--layers": "0:1",
        "--chat-template": "vicuna",
        "--plan": plan,
        "--device": "cpu",
    }
    words = [word for pair in flags.items() for word in pair]
    assert ingot("build", checkpoint, "-o", tmp_path / "out", *words).exit_code == 0
    manifest = Manifest.read(tmp_path / "out")
    assert (manifest.build.dtype, manifest.build.max_batch_size) == ("bf16", 3)
    assert (manifest.build.max_seq_len, manifest.build.layers) == (99, (0, 1))
    assert manifest.chat_template == "vicuna"
    assert read_own_plan(tmp_path / "out").gpu == "Some GPU"
    shown = ingot("inspect", tmp_path / "out").stdout
    assert (
        "kernel plan   1 choices other than the defaults, 1 measured on Some GPU with Triton 3.6.0" in shown
    )


def test_a_failed_build_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    result = ingot("build", checkpoint, "-o", tmp_path / "new" / "out", "--layers", "0:9", "--device", "cpu")
    assert result.exit_code == 2
    assert "fix: --layers" in result.stderr
    assert list(tmp_path.iterdir()) == []


# --- inspect and diff ------------------------------------------------------------------------------------


def test_inspect_names_the_facts(engine: Path, checkpoint: Path) -> None:
    result = ingot("inspect", engine)
    assert result.exit_code == 0
    lines = [line.strip().partition("  ") for line in result.stdout.splitlines()[1:]]
    facts = {name: value for name, _, value in lines if value}
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["parameters"] == "47,456"
    assert facts["KV cache"] == "256 bytes per token in fp16"  # 2 · 2 layers · 32 wide · 2 bytes
    assert facts["on a GPU"] == "decode, 1 to 32 requests: small kernels"
    assert facts["limits"] == "4 requests per step, 128 tokens per request"
    assert facts["tokenizer"] == "tiktoken, 464 ids"
    assert facts["chat format"] == "chatml"
    assert facts["sampling"] == "max_new_tokens 8"
    assert facts["kernel plan"] == "defaults, nothing measured"
    assert "embed_tokens.weight" not in result.stdout
    of_checkpoint = ingot("inspect", checkpoint).stdout
    assert of_checkpoint.startswith(f"checkpoint {checkpoint}\n")
    assert "47,456" in of_checkpoint


def test_inspect_json_and_tensors(engine: Path) -> None:
    value = json.loads(ingot("inspect", engine, "--json", "--tensors").stdout)
    manifest = Manifest.read(engine)
    assert value["model"] == manifest.model.to_json()
    assert value["num_parameters"] == 47456
    assert value["default_params"]["max_new_tokens"] == 8
    assert value["tensors"]["norm.weight"]["sha256"] == manifest.tensors["norm.weight"].sha256
    assert "tensors" not in json.loads(ingot("inspect", engine, "--json").stdout)
    assert manifest.tensors["norm.weight"].sha256 in ingot("inspect", engine, "--tensors").stdout
    nowhere = ingot("inspect", engine / "nowhere")
    assert (nowhere.exit_code, "neither a folder nor" in nowhere.stderr) == (2, True)


def test_a_build_names_the_file_that_calibration_leaves(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "samples.txt").write_text("Some text to calibrate with. " * 20)
    words = ("--device", "cpu", "--no-proof", "--force")
    calibrated = ("--quant", "w8a8", "--method", "smoothquant", "--calib", tmp_path / "samples.txt")
    result = ingot("build", checkpoint, "-o", tmp_path / "engine", *words, *calibrated)
    assert f"note: {tmp_path / 'engine.calibration.safetensors'} (" in result.stderr
    assert "calibration" not in ingot("build", checkpoint, "-o", tmp_path / "engine", *words).stderr


@pytest.mark.usefixtures("whole_proofs")
def test_the_bar_of_a_build_shows_every_part_from_its_beginning(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(
        "ingot.cli.terminal.step_list.stderr", lambda: Console(file=shown, force_terminal=True, width=120)
    )
    monkeypatch.setattr("rich.live.Live.start", lambda live, **_: None)  # no thread: what is told is drawn
    update = Progress.update

    def drawn(bar: Progress, *values: Any, **named: Any) -> None:
        update(bar, *values, **named)
        (task,) = bar.tasks
        seen.append((task.description, task.completed, task.total))

    seen: list[tuple[str, float, float | None]] = []
    monkeypatch.setattr(Progress, "update", drawn)
    assert ingot("build", checkpoint, "-o", tmp_path / "engine", "--device", "cpu").exit_code == 0
    size = max(total or 0 for _, _, total in seen)
    parts = (
        "comparing with the checkpoint",
        "golden cases, prompts",
        "golden cases, new tokens",
        "noise floors",
    )
    firsts = {name: next(i for i, now in enumerate(seen) if now[0] == name) for name in parts}
    compared, *proof = (seen[i] for i in firsts.values())
    assert compared[:2] == (parts[0], 0)
    assert proof == [(parts[1], 0, 2), (parts[2], 0, 16), (parts[3], 0, 2)]
    assert list(firsts.values()) == sorted(firsts.values())
    written = [done for _, done, total in seen if total == size]
    assert written[-1] == size
    assert len(written) == firsts[parts[0]]  # the bytes' bar ends where the comparison begins


def test_the_error_of_an_unsupported_model_does_not_advise_to_rename_it(tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", architectures=["MambaForCausalLM"])
    result = ingot("plan", other)
    assert (result.exit_code, "unsupported architecture" in result.stderr) == (2, True)
    result = ingot("build", other, "-o", tmp_path / "engine")
    assert "fix: architectures" not in result.stderr
    assert "under another name the model would compute something else" in result.stderr


def test_diff(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = build(write_tiny(tmp_path / "seed1", seed=1), tmp_path / "other", max_seq_len=64, device="cpu")
    same = ingot("diff", engine, engine)
    assert (same.exit_code, same.stdout) == (0, "equal\n")
    assert json.loads(ingot("diff", engine, engine, "--json").stdout)["equal"] is True
    result = ingot("diff", engine, other)
    assert result.exit_code == 1
    assert "  build.max_seq_len: 128 -> 64\n" in result.stdout
    assert "  lm_head.weight: values; max-abs " in result.stdout
    assert "norm.weight" not in result.stdout  # all ones in both
    value = json.loads(ingot("diff", engine, other, "--json").stdout)
    assert value["equal"] is False
    assert {"name": "build.max_batch_size", "left": 4, "right": 64} in value["config"]
    assert all(change["relative"] > 0.5 for change in value["tensors"])
    failed = ingot("diff", engine, checkpoint)
    assert (failed.exit_code, "not an engine" in failed.stderr) == (2, True)
