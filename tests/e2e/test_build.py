"""A build gives the same bytes, whole or not at all, in the memory of one shard; a damaged engine is
refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ingot import LLM, SamplingParams, build
from ingot.errors import BuildError, CheckpointError, ConfigError, EngineError, RequestError
from tests.tiny_models import edit_config, random_ids, save_model, tiny_config

IDS = random_ids(20, seed=3)
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA of two layers, in shards, without a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(tiny_config("llama"), folder, seed=1, max_shard_size="16KB")
    return folder


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path) -> Path:
    """A fresh engine of it."""
    return build(checkpoint, tmp_path / "engine", device="cpu", max_batch_size=4)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )


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


class TestBytes:
    BUILD = "import sys; from ingot import build; build(*sys.argv[1:3], device='cpu', dtype=sys.argv[3])"

    @pytest.mark.parametrize("dtype", ["auto", "bf16"])
    def test_two_processes_write_the_same(self, checkpoint: Path, tmp_path: Path, dtype: str) -> None:
        for seed in ("1", "2"):
            done = run_python(self.BUILD, checkpoint, tmp_path / seed, dtype, PYTHONHASHSEED=seed)
            assert done.returncode == 0, done.stderr
        first, second = contents(tmp_path / "1"), contents(tmp_path / "2")
        assert {"manifest.json", "weights.safetensors", "plan.json"} <= set(first)
        first.pop("plan.json"), second.pop("plan.json")
        assert first == second
        assert len(list(tmp_path.iterdir())) == 2

    def test_with_a_tokenizer_too(self, golden: Path, tmp_path: Path) -> None:
        folder = golden / "llama_aidreams260K" / "hf"
        engines = [build(folder, tmp_path / name, device="cpu") for name in ("a", "b")]
        first, second = map(contents, engines)
        assert any(name.startswith("tokenizer/") for name in first)
        assert first == second

    def test_the_manifest_tells_the_hash_of_every_tensor(self, engine: Path) -> None:
        manifest = json.loads((engine / "manifest.json").read_text())
        data = (engine / "weights.safetensors").read_bytes()
        assert int.from_bytes(data[:8], "little") % 8 == 0, "tensors start aligned"
        tensors = load_file(engine / "weights.safetensors")
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert list(header) == list(manifest["tensors"])
        for name, tensor in tensors.items():
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            assert manifest["tensors"][name]["sha256"] == digest


class TestWhatIsBuilt:
    def test_engine_is_the_checkpoint_in_memory(self, checkpoint: Path, engine: Path) -> None:
        built, memory = LLM(engine, "cpu"), LLM(checkpoint, "cpu", max_batch_size=4)
        assert torch.equal(built.logits(IDS), memory.logits(IDS))
        assert built.generate(IDS, PARAMS) == memory.generate(IDS, PARAMS)

    def test_layers_are_the_full_models_own(self, checkpoint: Path, tmp_path: Path) -> None:
        full = LLM(checkpoint, "cpu")
        first = LLM(build(checkpoint, tmp_path / "first", layers="0:1", device="cpu"), "cpu")
        second = LLM(build(checkpoint, tmp_path / "second", layers=(1, 2), device="cpu"), "cpu")
        assert first.engine.manifest.model.num_layers == second.engine.manifest.model.num_layers == 1
        with full.tap("layers.0") as whole:
            full.logits(IDS)
        with first.tap("layers.*") as part:
            first.logits(IDS)
        assert list(part) == ["layers.0"]
        assert torch.equal(part["layers.0"], whole["layers.0"])
        ours, theirs = second.engine.model.layers[0], full.engine.model.layers[1]
        for name, weight in ours.named_parameters():
            assert torch.equal(weight, theirs.get_parameter(name))

    @pytest.mark.parametrize("layers", ["0:3", "2:3", (0, 9)])
    def test_layers_that_are_not_there(self, checkpoint: Path, tmp_path: Path, layers: Any) -> None:
        with pytest.raises(ConfigError, match=r"0:2.*--layers"):
            build(checkpoint, tmp_path / "engine", layers=layers, device="cpu")

    @pytest.mark.parametrize("layers", ["1:1", "x", "1", (1, 0), (0,)])
    def test_layers_that_are_no_range(self, checkpoint: Path, tmp_path: Path, layers: Any) -> None:
        with pytest.raises(ConfigError, match="START:END"):
            build(checkpoint, tmp_path / "engine", layers=layers, device="cpu")

    def test_limits(self, checkpoint: Path, tmp_path: Path) -> None:
        llm = LLM(build(checkpoint, tmp_path / "e", max_seq_len=24, max_batch_size=2, device="cpu"), "cpu")
        output = llm.generate(IDS, PARAMS)[0]
        assert (len(output.token_ids), output.finish_reason) == (4, "length")
        with pytest.raises(RequestError, match=r"24 tokens.*<= 23.*--max-seq-len"):
            llm.generate(random_ids(24), PARAMS)
        assert llm.logits(random_ids(24)).shape[0] == 24
        prompts = [random_ids(n) for n in (3, 4, 5)]
        assert len(llm.generate(prompts, PARAMS)) == 3
        assert llm.executor.max_batch_size == 2

    @pytest.mark.parametrize("values", [{"max_seq_len": 0}, {"max_batch_size": 0}, {"dtype": "int3"}])
    def test_values_out_of_range(self, checkpoint: Path, tmp_path: Path, values: dict[str, Any]) -> None:
        flag = "--" + next(iter(values)).replace("_", "-")
        with pytest.raises(ConfigError, match=flag):
            build(checkpoint, tmp_path / "engine", device="cpu", **values)
        assert list(tmp_path.iterdir()) == []

    def test_learned_positions_bound_the_length(self, tmp_path: Path) -> None:
        save_model(tiny_config("gpt2"), tmp_path / "gpt2")
        with pytest.raises(ConfigError, match=r"129.*128"):
            build(tmp_path / "gpt2", tmp_path / "engine", max_seq_len=129, device="cpu")

    @pytest.mark.parametrize(
        ("dtype", "stored", "tolerance"), [("fp16", "F16", 0.02), ("bf16", "BF16", 0.15)]
    )
    def test_dtypes(
        self, checkpoint: Path, tmp_path: Path, dtype: str, stored: str, tolerance: float
    ) -> None:
        full = LLM(checkpoint, "cpu").logits(IDS)
        folder = build(checkpoint, tmp_path / "engine", dtype=dtype, device="cpu")
        with safe_open(folder / "weights.safetensors", "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}  # noqa: SIM118
        error = float((LLM(folder, "cpu").logits(IDS) - full).abs().max() / full.abs().max())
        assert 0 < error < tolerance

    @pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
    def test_weights_that_do_not_fit_fp16(
        self, checkpoint: Path, tmp_path: Path, source: torch.dtype
    ) -> None:
        folder = tmp_path / "checkpoint"
        model = save_model(tiny_config("llama"), folder, seed=1)
        state = {name: tensor.to(source) for name, tensor in model.state_dict().items()}
        state["model.layers.1.mlp.down_proj.weight"][3, 4] = 1e5
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(BuildError, match=r"layers\.1\.mlp\.down_proj\.weight: largest .*--dtype bf16"):
            build(folder, tmp_path / "engine", dtype="fp16", device="cpu")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]
        build(folder, tmp_path / "engine", dtype="bf16", device="cpu")

    def test_auto_is_the_dtype_of_most_weights(self, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoint"
        state = save_model(tiny_config("llama"), folder).state_dict()
        mixed = {k: t if t.dim() == 1 else t.to(torch.bfloat16) for k, t in state.items()}
        save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
        llm = LLM(build(folder, tmp_path / "engine", device="cpu"), "cpu")
        assert (llm.engine.manifest.build.dtype, llm.engine.manifest.source_dtype) == ("bf16", "bf16+fp32")

    def test_without_a_tokenizer(self, engine: Path) -> None:
        llm = LLM(engine, "cpu")
        output = llm.generate(IDS, PARAMS)[0]
        assert (output.text, len(output.token_ids)) == (None, 12)
        for call in (llm.generate, llm.logits, llm.stream):
            with pytest.raises(RequestError, match=r"no tokenizer.*token ids"):
                call("Hello")
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "Hello"}])
        with pytest.raises(RequestError, match=r"tokenizer.*stop"):
            llm.generate(IDS, PARAMS.replace(stop=("end",)))


class TestWholeOrNot:
    def test_another_folder_is_never_replaced(self, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("years")
        (tmp_path / "file").write_text("text")
        for name in ("mine", "file"):
            for force in (False, True):
                with pytest.raises(BuildError, match="no engine"):
                    build(checkpoint, tmp_path / name, force=force, device="cpu")
        assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "mine"]

    def test_an_engine_is_replaced_only_with_force(self, checkpoint: Path, engine: Path) -> None:
        before = contents(engine)
        with pytest.raises(BuildError, match=r"exists.*--force"):
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
            with pytest.raises(expected):
                build(
                    checkpoint,
                    target,
                    dtype="bf16",
                    device="cpu",
                    force=force,
                    progress=interrupt_with(error),
                )
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

    KILLED = """
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
        assert len(list(engine.parent.iterdir())) == 2, "the orphan"
        build(checkpoint, engine, device="cpu", max_batch_size=4, force=True)
        assert [p.name for p in engine.parent.iterdir()] == ["engine"]
        assert contents(engine) == before

    def test_an_engine_that_a_killed_build_had_moved_aside_comes_back(
        self, checkpoint: Path, engine: Path
    ) -> None:
        before = contents(engine)
        engine.rename(engine.parent / f".ingot-build-engine-{dead_pid()}-old")
        with pytest.raises(BuildError, match="exists"):
            build(checkpoint, engine, device="cpu")
        assert contents(engine) == before

    def test_the_build_of_another_target_is_let_be(self, checkpoint: Path, tmp_path: Path) -> None:
        """``llama-7`` under way is no orphan of ``llama`` by a process 7."""
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

    def test_a_link_to_an_engine_stays_a_link(self, checkpoint: Path, engine: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(engine)
        build(checkpoint, tmp_path / "link", dtype="bf16", device="cpu", force=True)
        assert (tmp_path / "link").is_symlink()
        assert LLM(engine, "cpu").engine.manifest.build.dtype == "bf16"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["engine", "link"]


def dead_pid() -> int:
    """The id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


class TestDisk:
    def test_too_little_space_is_told_before(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Usage(NamedTuple):
            total: int = 1 << 40
            used: int = 1 << 40
            free: int = 1 << 20

        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage())
        seen: list[str] = []
        with pytest.raises(BuildError, match=r"too full.*0\.00 GB free.*-o"):
            build(checkpoint, tmp_path / "e", device="cpu", progress=lambda name, *_: seen.append(name))
        assert seen == []
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("file", ["WEIGHTS_FILE", "MANIFEST_FILE", "PLAN_FILE"])
    def test_a_full_disk_while_writing(
        self, checkpoint: Path, engine: Path, monkeypatch: pytest.MonkeyPatch, file: str
    ) -> None:
        """/dev/full answers every write as a full disk does."""
        before = contents(engine)
        monkeypatch.setattr(f"ingot.engine.builder.{file}", "/dev/full")
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
from ingot.engine import builder
build(sys.argv[1], sys.argv[2] + "-first", device="cpu", dtype="bf16", layers="0:1")
open("/proc/self/clear_refs", "w").write("5")
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) // 1024
before = peak()
build(sys.argv[1], sys.argv[2], device="cpu", dtype="bf16")
print(peak() - before)
"""

    def test_a_build_needs_about_one_shard(self, tmp_path: Path) -> None:
        """8 shards of 16 MB of fp32 become bf16: the peak grows by less than three shards."""
        config = tiny_config(
            "llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=8,
            num_key_value_heads=8, head_dim=64, vocab_size=1000,
        )  # fmt: skip
        folder = tmp_path / "checkpoint"
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        write_zeros(folder, 12, 512, 1024, 1000)
        shards = [p.stat().st_size / 2**20 for p in folder.glob("*.safetensors")]
        assert len(shards) == 8
        assert max(shards) < 20
        done = run_python(self.PEAK, folder, tmp_path / "engine")
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < 3 * max(shards), f"{done.stdout.strip()} MiB"


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


def cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def swap_weights(engine: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(engine / "weights.safetensors")
    change(tensors)
    save_file(tensors, engine / "weights.safetensors")


TAMPERINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights cut": (lambda e: cut(e / "weights.safetensors", 0.7), "weights.safetensors"),
    "weights cut in the header": (lambda e: cut(e / "weights.safetensors", 0.001), "weights.safetensors"),
    "weights gone": (lambda e: (e / "weights.safetensors").unlink(), "weights.safetensors"),
    "manifest cut": (lambda e: cut(e / "manifest.json", 0.5), "manifest.json"),
    "manifest a list": (lambda e: (e / "manifest.json").write_text("[]"), "manifest.json"),
    "manifest no text": (lambda e: (e / "manifest.json").write_bytes(b"\xff\xfe\x00"), "manifest.json"),
    "format version": (
        lambda e: edit(e / "manifest.json", lambda d: d.update(format_version=99)),
        "99.*build it again",
    ),
    "unknown key": (lambda e: edit(e / "manifest.json", lambda d: d.update(colour="red")), "colour"),
    "unknown architecture": (
        lambda e: edit(e / "manifest.json", lambda d: d["model"].update(architecture="bert")),
        "bert",
    ),
    "another size": (
        lambda e: edit(e / "manifest.json", lambda d: d["model"].update(hidden_size=64)),
        "do not match",
    ),
    "more layers": (
        lambda e: edit(e / "manifest.json", lambda d: d["model"].update(num_layers=3)),
        "layers.2",
    ),
    "no tensors": (lambda e: edit(e / "manifest.json", lambda d: d.update(tensors={})), "do not match"),
    "tensor entry": (
        lambda e: edit(e / "manifest.json", lambda d: d["tensors"]["norm.weight"].update(shape=[31])),
        "norm.weight",
    ),
    "stored shape": (
        lambda e: swap_weights(e, lambda t: t.update({"norm.weight": torch.ones(31)})),
        "norm.weight",
    ),
    "stored dtype": (
        lambda e: swap_weights(e, lambda t: t.update({"norm.weight": torch.ones(32).half()})),
        "norm.weight",
    ),
    "tensor gone": (lambda e: swap_weights(e, lambda t: t.pop("norm.weight")), "norm.weight"),
    "tensor more": (lambda e: swap_weights(e, lambda t: t.update(extra=torch.ones(1))), "extra"),
    "plan no json": (lambda e: (e / "plan.json").write_text("{"), "plan.json"),
    "plan unknown kernel": (
        lambda e: (e / "plan.json").write_text('{"tiles": {"teleport": {"x": 1}}}'),
        "teleport",
    ),
}


class TestDamagedEngine:
    @pytest.mark.parametrize("name", TAMPERINGS)
    def test_is_refused(self, engine: Path, name: str) -> None:
        tamper, told = TAMPERINGS[name]
        tamper(engine)
        with pytest.raises(EngineError, match=re.compile(told, re.S)):
            LLM(engine, "cpu")

    @pytest.mark.parametrize("how", ["gone", "cut"])
    def test_tokenizer_files_are_checked(self, golden: Path, tmp_path: Path, how: str) -> None:
        folder = build(golden / "llama_aidreams260K" / "hf", tmp_path / "engine", device="cpu")
        file = next((folder / "tokenizer").glob("*.json"))
        file.unlink() if how == "gone" else cut(file, 0.9)
        with pytest.raises(EngineError, match=re.escape(file.name)):
            LLM(folder, "cpu")

    def test_a_folder_that_is_no_engine_is_taken_for_a_checkpoint(self, tmp_path: Path) -> None:
        (tmp_path / "weights.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"config\.json"):
            LLM(tmp_path, "cpu")

    def test_an_engine_has_its_own_limits(self, engine: Path) -> None:
        with pytest.raises(ConfigError, match=r"max_seq_len.*build it again"):
            LLM(engine, "cpu", max_seq_len=9)


def test_a_config_that_does_not_fit_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    edit_config(folder, intermediate_size=40)
    with pytest.raises(CheckpointError, match=r"mis-shaped.*gate"):
        build(folder, tmp_path / "engine", device="cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
