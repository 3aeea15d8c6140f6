"""A build is atomic and needs the memory of one shard."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ingot import LLM, build
from ingot.errors import BuildError
from tests.e2e.folders import contents, run_python
from tests.forked import MAY_FORK
from tests.tiny_models import tiny_config


def interrupt_with(
    error: BaseException | Callable[[], Any], after: int = 3
) -> Callable[[str, int, int], None]:
    """A progress callback that fails at a tensor."""
    seen = []

    def progress(name: str, done: int, total: int) -> None:
        seen.append(name)
        if len(seen) == after:
            if isinstance(error, BaseException):
                raise error
            error()

    return progress


class TestWholeOrNot:
    def test_another_folder_is_never_replaced(self, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("years")
        (tmp_path / "file").write_text("text")
        for name in ("mine", "file"):
            for force in (False, True):
                with pytest.raises(BuildError, match="is not an engine"):
                    build(checkpoint, tmp_path / name, force=force, device="cpu")
        assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "mine"]

    def test_an_engine_is_replaced_only_with_force(self, checkpoint: Path, engine: Path) -> None:
        before = contents(engine)
        with pytest.raises(BuildError, match=r"exists.*force"):
            build(checkpoint, engine, dtype="bf16", device="cpu")
        assert contents(engine) == before
        build(checkpoint, engine, dtype="bf16", device="cpu", force=True)
        assert contents(engine) != before
        assert [p.name for p in engine.parent.iterdir()] == ["engine"]

    def test_an_empty_folder_is_taken(self, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert LLM(build(checkpoint, tmp_path / "empty", device="cpu"), "cpu").logits([1]).shape == (1, 97)

    @pytest.mark.parametrize(
        "error", [KeyboardInterrupt(), RuntimeError("x"), OSError(errno.EIO, "I/O")], ids=repr
    )
    def test_a_failed_build_leaves_what_was_there(
        self, checkpoint: Path, engine: Path, error: BaseException
    ) -> None:
        before = contents(engine)
        expected = BuildError if isinstance(error, OSError) else type(error)
        for target, force in ((engine, True), (engine.parent / "new" / "deep", False)):
            progress = interrupt_with(error)
            with pytest.raises(expected):
                build(checkpoint, target, dtype="bf16", device="cpu", force=force, progress=progress)
            assert contents(engine) == before
            assert [p.name for p in engine.parent.iterdir()] == ["engine"]

    def test_a_failed_last_rename_puts_the_engine_back(
        self, checkpoint: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, rename = contents(engine), Path.rename

        def failing(self: Path, target: Path) -> Path:
            if target == engine and not self.name.endswith("-old"):
                raise OSError(errno.EACCES, "no")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", failing)
        with pytest.raises(BuildError):
            build(checkpoint, engine, dtype="bf16", device="cpu", force=True)
        assert contents(engine) == before
        assert [p.name for p in engine.parent.iterdir()] == ["engine"]

    KILLED = f"""{MAY_FORK}
import os, signal, sys
from ingot import build
count = []
def progress(*_):
    count.append(0)
    if len(count) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
build(sys.argv[1], sys.argv[2], device="cpu", force=True, dtype="bf16", progress=progress)
"""

    def test_a_killed_build_is_cleaned_up_by_the_next(self, checkpoint: Path, engine: Path) -> None:
        before = contents(engine)
        done = run_python(self.KILLED, checkpoint, engine)
        assert done.returncode == -signal.SIGKILL
        assert contents(engine) == before
        assert len(list(engine.parent.iterdir())) == 3, "the orphan and its lock"
        build(checkpoint, engine, device="cpu", max_batch_size=4, force=True)
        assert [p.name for p in engine.parent.iterdir()] == ["engine"]
        assert contents(engine) == before

    def test_the_build_of_another_target_is_let_be(self, checkpoint: Path, tmp_path: Path) -> None:
        """A running build of ``llama-7`` is no orphan of ``llama`` by process 7."""
        live = tmp_path / f".ingot-build-llama-{dead_pid()}-{os.getpid()}"
        live.mkdir()
        build(checkpoint, tmp_path / "llama", device="cpu")
        assert live.is_dir()

    def test_odd_names(self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / f".ingot-build-a[b]*-{dead_pid()}").mkdir()
        build(checkpoint, tmp_path / "a[b]*", device="cpu")
        assert [p.name for p in tmp_path.iterdir()] == ["a[b]*"]
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        build(checkpoint, ".", device="cpu")
        assert (tmp_path / "here" / "manifest.json").is_file()


def dead_pid() -> int:
    """The id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


class TestDisk:
    @pytest.mark.parametrize("file", ["WEIGHTS_FILE", "MANIFEST_FILE", "PLAN_FILE"])
    def test_a_full_disk_while_writing(
        self, checkpoint: Path, engine: Path, monkeypatch: pytest.MonkeyPatch, file: str
    ) -> None:
        """/dev/full answers every write as a full disk does."""
        before = contents(engine)
        monkeypatch.setattr(f"ingot.building.builder.{file}", "/dev/full")
        with pytest.raises(BuildError, match=r"disk is full.*nothing was kept"):
            build(checkpoint, engine, device="cpu", force=True)
        assert contents(engine) == before
        assert [p.name for p in engine.parent.iterdir()] == ["engine"]

    def test_a_place_that_cannot_be_written(self, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(BuildError, match="-o"):
            build(checkpoint, tmp_path / "file" / "engine", device="cpu")


class TestMemory:
    PEAK = """
import re, sys
from ingot import build
from ingot.building.golden import golden_cases as golden
golden.NEW_TOKENS = 5  # as tests/conftest.py has it
build(sys.argv[1], sys.argv[2] + "-first", device="cpu", dtype="bf16", layers="0:1")
open("/proc/self/clear_refs", "w").write("5")
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) // 1024
before = peak()
build(sys.argv[1], sys.argv[2], device="cpu", dtype="bf16")
print(peak() - before)
"""

    @pytest.mark.slow
    def test_a_build_needs_about_one_shard(self, tmp_path: Path) -> None:
        """8 shards of 33 MB of fp32 become bf16: the peak grows by less than three shards.

        Some 25 MB of it are the process's and the proof's, whatever the shards' size. Pages of mapped files
        that the system has not taken back yet count, too, at times 30 MB: so the least of up to four builds.
        """
        config = tiny_config(
            "llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=24, num_attention_heads=8,
            num_key_value_heads=8, head_dim=64, vocab_size=1000,
        )  # fmt: skip
        folder = tmp_path / "checkpoint"
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        write_zeros(folder, 24, 512, 1024, 1000)
        shards = [p.stat().st_size / 2**20 for p in folder.glob("*.safetensors")]
        assert len(shards) == 8
        assert max(shards) < 40
        peaks = list[int]()
        while len(peaks) < 4 and (not peaks or min(peaks) >= 3 * max(shards)):
            done = run_python(self.PEAK, folder, tmp_path / f"engine-{len(peaks)}")
            assert done.returncode == 0, done.stderr
            peaks.append(int(done.stdout))
        assert min(peaks) < 3 * max(shards), f"{peaks} MiB"


def write_zeros(folder: Path, layers: int, hidden: int, inner: int, vocab: int) -> None:
    """The weights of such a LLaMA, all 0, in 8 shards."""
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for i in range(layers):
        p = f"model.layers.{i}."
        shapes |= {f"{p}self_attn.{n}_proj.weight": (hidden, hidden) for n in "qkvo"}
        shapes |= {f"{p}mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        shapes |= {f"{p}mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{p}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    names, index = list(shapes), {}
    size = -(-len(names) // 8)
    for shard in range(8):
        file = f"model-{shard + 1:05}-of-00008.safetensors"
        part = names[shard * size : (shard + 1) * size]
        save_file({n: torch.zeros(shapes[n]) for n in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
