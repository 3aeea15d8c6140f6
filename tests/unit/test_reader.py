"""Checkpoint folders: every layout, every way in which one can be broken, and memory near one shard."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.errors import CheckpointError

GOLDEN = {
    "qwen_v1_1_safetensors/hf": (27, torch.bfloat16, "transformer.wte.weight", (512, 128)),
    "qwen_v1_1_bin/hf": (19, torch.bfloat16, "transformer.wte.weight", (448, 96)),
    "qwen_v1_0_bin/hf": (19, torch.bfloat16, "transformer.wte.weight", (384, 96)),
    "llama_aidreams260K/hf": (38, torch.float32, "model.embed_tokens.weight", (512, 64)),
    "minigpt4/weight/llama": (23, torch.float16, "model.embed_tokens.weight", (513, 128)),
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Hostile:
    """Pickles as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(3, 5, generator=generator),
        "b.weight": torch.randn(4, 2, generator=generator).to(torch.bfloat16),
        "c.mask": torch.ones(1, 1, 3, 3, dtype=torch.bool),
        "d.scale": torch.tensor(2.5),
        "e.empty": torch.zeros(0, 4),
    }


def save_torch(tensors: object, path: Path) -> None:
    torch.save(tensors, path)


def save_legacy(tensors: object, path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


def save_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)


Save = Callable[[dict[str, torch.Tensor], Path], None]
LAYOUTS: list[tuple[Save, str, str]] = [
    (save_safetensors, "model", "safetensors"),
    (save_torch, "pytorch_model", "bin"),
    (save_legacy, "pytorch_model", "bin"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "made"}')
    return tmp_path


def shard(folder: Path, save: Save, stem: str, suffix: str) -> None:
    """Write ``state`` as two shards with an index."""
    tensors = state()
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:]), start=1):
        file = f"{stem}-{number:05}-of-00002.{suffix}"
        save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def check_state(folder: Path) -> None:
    expected = state()
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(expected)
        for name, tensor in expected.items():
            info = checkpoint.tensors[name]
            assert (info.shape, info.dtype) == (tuple(tensor.shape), tensor.dtype)
            assert (folder / info.file).is_file()
        for name in [*expected, *reversed(expected)]:
            read = checkpoint.read(name)
            assert read.dtype == expected[name].dtype
            assert torch.equal(read, expected[name])


@pytest.mark.parametrize("relative", list(GOLDEN))
def test_golden(golden: Path, relative: str) -> None:
    count, dtype, name, shape = GOLDEN[relative]
    with open_checkpoint(golden / relative) as checkpoint:
        assert len(checkpoint.tensors) == count
        assert checkpoint.tensors[name].shape == shape
        assert checkpoint.config == json.loads((golden / relative / "config.json").read_text())
        assert checkpoint.generation_config == json.loads(
            (golden / relative / "generation_config.json").read_text()
        )
        for stored, info in checkpoint.tensors.items():
            tensor = checkpoint.read(stored)
            assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype)
            assert tensor.dtype == dtype or stored.endswith("inv_freq")
            assert tensor.isfinite().all()


def test_values_are_those_of_the_files(golden: Path) -> None:
    for place, pattern in (("qwen_v1_1_safetensors/hf", "*.safetensors"), ("qwen_v1_0_bin/hf", "*.bin")):
        with open_checkpoint(golden / place) as checkpoint:
            for file in (golden / place).glob(pattern):
                read = (
                    load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
                )
                assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in read.items())


@pytest.mark.parametrize(("save", "stem", "suffix"), [*LAYOUTS, (save_safetensors, "weights", "safetensors")])
def test_one_file(folder: Path, save: Save, stem: str, suffix: str) -> None:
    save(state(), folder / f"{stem}.{suffix}")
    check_state(folder)


@pytest.mark.parametrize(("save", "stem", "suffix"), LAYOUTS)
def test_shards(folder: Path, save: Save, stem: str, suffix: str) -> None:
    shard(folder, save, stem, suffix)
    check_state(folder)


def test_safetensors_are_preferred(folder: Path) -> None:
    shard(folder, save_safetensors, "model", "safetensors")
    save_torch({"other": torch.zeros(1)}, folder / "pytorch_model.bin")
    check_state(folder)


@pytest.mark.parametrize("save", [save_torch, save_legacy])
def test_tied_tensors_and_views_do_not_share_memory(folder: Path, save: Save) -> None:
    base = torch.arange(12.0).view(4, 3)
    save({"wte": base, "lm_head": base, "row": base[1], "turned": base.t()}, folder / "pytorch_model.bin")
    with open_checkpoint(folder) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    assert torch.equal(tensors["turned"], base.t())
    assert torch.equal(tensors["row"], base[1])
    tensors["wte"].fill_(-1)
    assert torch.equal(tensors["lm_head"], base)
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 4


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_writing_to_a_tensor_changes_no_file(folder: Path, file: str) -> None:
    (save_safetensors if file.endswith("safetensors") else save_torch)(state(), folder / file)
    before = (folder / file).read_bytes()
    with open_checkpoint(folder) as checkpoint:
        checkpoint.read("a.weight").fill_(7)
    assert (folder / file).read_bytes() == before


def test_tensors_outlive_the_checkpoint(folder: Path) -> None:
    save_torch(state(), folder / "pytorch_model.bin")
    with open_checkpoint(folder) as checkpoint:
        tensor = checkpoint.read("a.weight")
    assert torch.equal(tensor, state()["a.weight"])
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.read("a.weight")
    checkpoint.close()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_numbers_that_are_not_finite(folder: Path, dtype: torch.dtype) -> None:
    """Largest numbers are fine, NaN is not, wherever it is; integers have none."""
    most = torch.full((40, 50), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    ids = torch.full((4,), torch.iinfo(torch.int32).max, dtype=torch.int32)
    save_file({"fine": most, "least": (-most.double()).to(dtype), "ids": ids}, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        for name in checkpoint.tensors:
            checkpoint.read(name)
    for row, column in ((0, 0), (39, 49), (17, 3)):
        damaged = most.double().clone()
        damaged[row, column] = float("nan")
        save_file({"fine": most, "bad": damaged.to(dtype)}, folder / "model.safetensors")
        with open_checkpoint(folder) as checkpoint:
            checkpoint.read("fine")
            with pytest.raises(
                CheckpointError, match=r"bad has values.*1 NaN and 0 infinite of 2000.*model\."
            ):
                checkpoint.read("bad")


def test_unknown_tensor_offers_near_names(folder: Path) -> None:
    save_safetensors(state(), folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match=r"a\.weight") as caught:
        checkpoint.read("a.weigth")
    assert caught.value.seen == "a.weigth"


def read_all(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        for name in checkpoint.tensors:
            checkpoint.read(name)


def refused(folder: Path, *words: str) -> None:
    """The folder cannot be opened, or read, and the one error says all of ``words``."""
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    for word in words:
        assert word in str(caught.value)


def test_missing_folder_and_file_in_its_place(tmp_path: Path) -> None:
    refused(tmp_path / "none", "does not exist", str(tmp_path / "none"))
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "this is a file")


def test_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model-q4.onnx").write_text("x")
    refused(tmp_path, "no config.json", "model-q4.onnx", "pytorch_model.bin.index.json", "to fix")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_config_that_is_no_json_object(folder: Path, file: str, text: bytes) -> None:
    save_safetensors(state(), folder / "model.safetensors")
    (folder / file).write_bytes(text)
    refused(folder, str(folder / file), "JSON")


def test_no_weights(folder: Path) -> None:
    refused(folder, "no readable weights", "config.json", "model.safetensors")
    save_safetensors(state(), folder / "model-00001-of-00001.safetensors")
    refused(folder, "no readable weights", "index.json")


@pytest.mark.parametrize("names", [("one", "two"), ("adapter_model",)])
def test_two_safetensors_or_an_adapter_are_refused(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        save_safetensors(state(), folder / f"{name}.safetensors")
    refused(folder, "no readable weights")


def test_all_missing_shards_are_listed(folder: Path) -> None:
    shard(folder, save_safetensors, "model", "safetensors")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    refused(
        folder, "are missing (2 of 2)", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    )


def test_tensor_that_its_shard_does_not_hold(folder: Path) -> None:
    shard(folder, save_torch, "pytorch_model", "bin")
    index = folder / "pytorch_model.bin.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["ghost.weight"] = "pytorch_model-00002-of-00002.bin"
    index.write_text(json.dumps(data))
    refused(folder, "ghost.weight", "pytorch_model-00002-of-00002.bin", "1 tensors")


@pytest.mark.parametrize("where", ["../secret.bin", "/etc/passwd", "a\\b.bin", 7, "shard.exe"])
def test_index_may_not_leave_the_folder(folder: Path, where: object) -> None:
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": where}}))
    refused(folder, "names a shard", str(where).replace("\\\\", "\\"))


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', "nonsense"])
def test_index_that_is_none(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "model.safetensors.index.json")


@pytest.mark.parametrize(("save", "stem", "suffix"), LAYOUTS)
@pytest.mark.parametrize("keep", [0, 20, 0.9, -1])
def test_truncated(folder: Path, save: Save, stem: str, suffix: str, keep: float) -> None:
    file = f"{stem}.{suffix}"
    save(state(), folder / file)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: int(len(data) * keep)] if keep == 0.9 else data[: int(keep)])
    refused(folder, file, "to fix: download the file again")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_git_lfs_pointer(folder: Path, file: str) -> None:
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused(folder, "Git LFS pointer", "git lfs pull")


def test_noise_in_a_legacy_file_is_one_error(folder: Path) -> None:
    file = folder / "pytorch_model.bin"
    save_legacy(state(), file)
    data = file.read_bytes()
    for place in range(20, 400, 7):
        file.write_bytes(data[:place] + b"\x07" + data[place + 1 :])
        with contextlib.suppress(CheckpointError):
            read_all(folder)


@pytest.mark.parametrize("save", [save_torch, save_legacy])
def test_hostile_pickle_does_not_run(folder: Path, save: Callable[[object, Path], None]) -> None:
    mark = folder / "ran"
    save({"a": torch.zeros(2), "b": Hostile(f"touch {mark}")}, folder / "pytorch_model.bin")
    refused(folder, "holds code", ".system", "safetensors")
    assert not mark.exists()
    # The pickle is live ammunition: trusting it runs the command.
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert mark.exists()


def test_plain_pickle_is_not_loaded(folder: Path) -> None:
    mark = folder / "ran"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"b": Hostile(f"touch {mark}")}))
    refused(folder, "plain pickle", "safetensors")
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:.*TorchScript", "ignore:.*torch.jit")
def test_torchscript_is_refused(folder: Path) -> None:
    torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)).save(folder / "pytorch_model.bin")
    refused(folder, "holds code", "TorchScript")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_unsupported_dtype_is_named(folder: Path, file: str) -> None:
    save = save_safetensors if file.endswith("safetensors") else save_torch
    save({"fine": torch.zeros(2), "freqs_cis": torch.zeros(2, dtype=torch.complex64)}, folder / file)
    refused(folder, file, "freqs_cis", "bfloat16")


def test_sparse_tensors_are_refused(folder: Path) -> None:
    save_torch({"sparse": torch.eye(3).to_sparse()}, folder / "pytorch_model.bin")
    refused(folder, "sparse")


# VmHWM, the peak of this process alone: ru_maxrss starts from that of the process that started it.
MEASURE = """
import sys
from pathlib import Path
from ingot.checkpoint.checkpoint_reader import open_checkpoint

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = peak()
with open_checkpoint(Path(sys.argv[1])) as checkpoint:
    total = sum(float(checkpoint.read(name).sum()) for name in checkpoint.tensors)
    print(peak() - before, total)
"""


@pytest.mark.slow
@pytest.mark.stays("save_safetensors-model-safetensors")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("save", "stem", "suffix"), LAYOUTS)
def test_memory_stays_near_one_shard(folder: Path, save: Save, stem: str, suffix: str) -> None:
    shards, tensors, mib = 8, 4, 4
    weight_map = {}
    for number in range(shards):
        part = {f"{number}.{i}": torch.ones(mib << 18) for i in range(tensors)}
        file = f"{stem}-{number + 1:05}-of-{shards:05}.{suffix}"
        save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    command = [sys.executable, "-c", MEASURE, str(folder)]
    root = Path(__file__).resolve().parents[2]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split()
    assert float(output[1]) == shards * tensors * (mib << 18)
    grown = int(output[0]) / 1024
    assert grown < 2.5 * tensors * mib, f"{grown:.0f} MiB for shards of {tensors * mib} MiB"
    shutil.rmtree(folder)
