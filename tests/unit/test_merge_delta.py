"""``ingot merge-delta``: the sum is FastChat's, and a delta over another base is refused."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ingot.building import delta_merge as merging
from ingot.building.delta_merge import merge_delta
from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.errors import BuildError, CheckpointError, IngotError
from tests.e2e.terminal import ingot
from tests.tiny_models import save_model, tiny_config

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
Tensors = dict[str, torch.Tensor]


def shapes(rows: int = 64, layers: int = 2, hidden: int = 16) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (rows, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        found[f"model.layers.{layer}.self_attn.q_proj.weight"] = (hidden, hidden)
        found[f"model.layers.{layer}.mlp.down_proj.weight"] = (hidden, 24)
    return found | {HEAD: (rows, hidden)}


def random(seed: int, scale: float = 0.02, dtype: torch.dtype = torch.float16, **sizes: int) -> Tensors:
    noise = torch.Generator().manual_seed(seed)
    return {n: (torch.randn(s, generator=noise) * scale).to(dtype) for n, s in shapes(**sizes).items()}


def numpy_sum(left: torch.Tensor, right: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """In fp16 by NumPy, which shares no code with what is tested."""
    return torch.from_numpy(left.numpy() + np.float16(sign) * right.numpy())


def tuned(base: Tensors, seed: int = 5, part: float = 0.05) -> Tensors:
    noise = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in base.items():
        change = torch.randn(tensor.shape, generator=noise) * 0.02 * part
        # a value whose difference from the base fp16 cannot hold would not return, by FastChat either
        near = (tensor.float() + change).half()
        found[name] = torch.where(near.float().abs() > 2 * tensor.float().abs(), tensor, near)
        found[name] = torch.where(found[name].float().abs() < tensor.float().abs() / 2, tensor, found[name])
        found[name] = torch.where(found[name].sign() != tensor.sign(), tensor, found[name])
    return found


def published(base: Tensors, target: Tensors) -> Tensors:
    """A delta as FastChat makes it: rows that the base lacks are over zeros."""
    found = {}
    for name, tensor in target.items():
        wide = torch.zeros_like(tensor)
        wide[: len(base[name])] = base[name]
        found[name] = numpy_sum(tensor, wide, -1)
    return found


def write(folder: Path, tensors: Tensors, layout: str = "safetensors", **config: Any) -> Path:
    folder.mkdir(parents=True)
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **config}
    (folder / "config.json").write_text(json.dumps(text))
    if layout == "safetensors":
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {name: f"pytorch_model-{1 + i % 2:05}-of-00002.bin" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        torch.save({n: t for n, t in tensors.items() if places[n] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def read(folder: Path) -> Tensors:
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


@pytest.fixture(scope="module")
def base() -> Tensors:
    return random(1)


@pytest.fixture
def pair(base: Tensors, tmp_path: Path) -> tuple[Path, Path]:
    delta = write(tmp_path / "delta", published(base, tuned(base)))
    return write(tmp_path / "base", base), delta


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
@pytest.mark.parametrize("other", ["safetensors", "bin"])
def test_v1_1_is_the_target_bit_for_bit(base: Tensors, tmp_path: Path, layout: str, other: str) -> None:
    target = tuned(base)
    a, b = (
        write(tmp_path / "base", base, layout),
        write(tmp_path / "delta", published(base, target), other),
    )
    merge = merge_delta(a, b, tmp_path / "out")
    assert equal(read(tmp_path / "out"), target)
    assert (merge.tensors, merge.added_rows, merge.size) == (7, 0, sum(t.nbytes for t in target.values()))
    with open_checkpoint(tmp_path / "out") as found:
        assert set(found.tensors) == set(target)


def test_v0_takes_its_added_row_as_it_is(base: Tensors, tmp_path: Path) -> None:
    target = tuned(base)
    for seed, name in enumerate((EMBEDDING, HEAD)):
        row = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed)).half()
        target[name] = torch.cat([target[name], row])
    delta = write(tmp_path / "delta", published(base, target), vocab_size=65)
    merge = merge_delta(write(tmp_path / "base", base), delta, tmp_path / "out")
    assert equal(read(tmp_path / "out"), target)
    assert merge.added_rows == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 65


def test_sums_that_round_are_those_of_fp16(base: Tensors, tmp_path: Path) -> None:
    """A base in fp32 is rounded to the delta's dtype first, as FastChat loads it."""
    noise = torch.Generator().manual_seed(3)
    wide = {n: t.float() * (1 + torch.randn(t.shape, generator=noise) * 1e-4) for n, t in base.items()}
    odd = {n: (torch.randn(t.shape, generator=noise) * 3).half() for n, t in base.items()}
    odd[EMBEDDING] = published({n: t.half() for n, t in wide.items()}, tuned(base))[EMBEDDING]
    merge_delta(write(tmp_path / "base", wide), write(tmp_path / "delta", odd), tmp_path / "out")
    expected = {n: numpy_sum(wide[n].half(), odd[n]) for n in odd}
    assert equal(read(tmp_path / "out"), expected)
    assert any(not torch.equal(wide[n] + odd[n].float(), expected[n].float()) for n in odd)


def test_bf16_keeps_its_dtype(base: Tensors, tmp_path: Path) -> None:
    wide = random(1, dtype=torch.bfloat16)
    change = {n: (t.float() * 2**-6).bfloat16() for n, t in random(4, dtype=torch.bfloat16).items()}
    change[EMBEDDING] = (tuned(base)[EMBEDDING].bfloat16().float() - wide[EMBEDDING].float()).bfloat16()
    merge_delta(write(tmp_path / "base", wide), write(tmp_path / "delta", change), tmp_path / "out")
    expected = {n: (wide[n].double() + change[n].double()).bfloat16() for n in wide}
    assert equal(read(tmp_path / "out"), expected)


def test_large_tensors_are_added_in_parts(
    base: Tensors, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.checkpoint.weight_delta._CHUNK", 100)
    merge_delta(*pair, tmp_path / "out")
    assert equal(read(tmp_path / "out"), tuned(base))


def test_files_are_the_deltas(base: Tensors, pair: tuple[Path, Path], tmp_path: Path) -> None:
    for folder, text in zip(pair, ("base", "delta"), strict=True):
        for name in ("tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "code.py"):
            (folder / name).write_text(text)
    (pair[1] / "pytorch_model.bin.index.json").write_text("{}")
    merge = merge_delta(*pair, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("config.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
        *("model-00001.safetensors", "model.safetensors.index.json"),
    }
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    assert (tmp_path / "out" / "tokenizer.model").read_text() == "delta"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == base.keys()
    assert merge.notes == ()


def test_computed_tables_of_older_files_are_left_out(base: Tensors, tmp_path: Path) -> None:
    table = {FREQUENCIES: torch.arange(4).float()}
    a, b = base | table, published(base, tuned(base))
    merge_delta(write(tmp_path / "base", a), write(tmp_path / "delta", b), tmp_path / "out")
    assert equal(read(tmp_path / "out"), tuned(base))
    merge_delta(write(tmp_path / "base2", base), write(tmp_path / "delta2", b | table), tmp_path / "out2")
    assert equal(read(tmp_path / "out2"), tuned(base))


def test_the_result_builds_and_answers_as_the_target(tmp_path: Path) -> None:
    config = tiny_config("llama", torch_dtype="float16")
    model = save_model(config, tmp_path / "base")
    before = {n: t.half().contiguous().clone() for n, t in model.state_dict().items()}
    after = tuned(before, part=0.5)
    save_file(before, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    places = {name: tmp_path / name for name in ("delta", "target")}
    for name, tensors in (("delta", published(before, after)), ("target", after)):
        places[name].mkdir()
        (places[name] / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
        save_file(tensors, places[name] / "model.safetensors", metadata={"format": "pt"})
    merge_delta(tmp_path / "base", places["delta"], tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float16)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert all(torch.equal(t, after[n]) for n, t in loaded.state_dict().items())
    assert torch.isfinite(loaded.float()(ids).logits).all()


def test_one_tensor_of_each_side_is_read_at_a_time(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.checkpoint.checkpoint_writer._SHARD_BYTES", 1)
    written: list[int] = []
    real, reads = Checkpoint.read, []

    def counted(self: Checkpoint, name: str) -> torch.Tensor:
        written.append(len(list(tmp_path.glob(".ingot-*/*.safetensors"))))
        reads.append(name)
        return real(self, name)

    monkeypatch.setattr(Checkpoint, "read", counted)
    merge_delta(*pair, tmp_path / "out")
    assert written[-14:] == [count for count in range(7) for _ in range(2)]
    assert reads[-14::2] == reads[-13::2]
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == 7


def test_shards_are_opened_in_turn(base: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that alternate between the base's files do not open one for every tensor."""
    opened: list[str] = []
    delta = write(tmp_path / "delta", published(base, tuned(base)))
    place = write(tmp_path / "base", base, "bin")
    from ingot.checkpoint import shard_reader as reader

    real = reader.open_shard
    monkeypatch.setattr(reader, "open_shard", lambda p, inner: opened.append(p.name) or real(p, inner))
    merge_delta(place, delta, tmp_path / "out")
    assert sum(name.startswith("pytorch_model-") for name in opened) == 2


# --- refusals --------------------------------------------------------------------------------------------


def refused(base: Path, delta: Path, out: Path, kind: type[IngotError] = CheckpointError) -> IngotError:
    with pytest.raises(kind) as caught:
        merge_delta(base, delta, out)
    assert not out.exists()
    assert not list(out.parent.glob(".ingot-*"))
    return caught.value


def test_one_error_lists_all_differences(base: Tensors, tmp_path: Path) -> None:
    other = random(2, rows=32, layers=3)
    del other["model.norm.weight"]
    place = write(tmp_path / "delta", {n: t / 50 for n, t in other.items()}, num_hidden_layers=3)
    text = str(refused(write(tmp_path / "base", base), place, tmp_path / "out"))
    for part in (
        "num_hidden_layers 2 in BASE and 3 in DELTA",
        "only in BASE: model.norm.weight (1)",
        "only in DELTA: model.layers.2.",
        f"{EMBEDDING} [64, 16] in BASE and [32, 16] in DELTA",
        f"{HEAD} [64, 16] in BASE and [32, 16] in DELTA",
        "LLaMA 7B",
    ):
        assert part in text
    assert "5 differences" in text


def test_another_width_and_other_heads_are_refused(base: Tensors, tmp_path: Path) -> None:
    wide = write(tmp_path / "wide", random(2, scale=0.001, hidden=32), hidden_size=32)
    a = write(tmp_path / "base", base)
    assert "hidden_size 16 in BASE and 32 in DELTA" in str(refused(a, wide, tmp_path / "out"))
    heads = write(tmp_path / "heads", published(base, tuned(base)), num_attention_heads=4)
    assert "num_attention_heads 2 in BASE and 4" in str(refused(a, heads, tmp_path / "out"))


def test_other_tensors_may_not_have_more_rows(base: Tensors, tmp_path: Path) -> None:
    change = published(base, tuned(base))
    change["model.norm.weight"] = torch.zeros(17).half()
    a = write(tmp_path / "base", base)
    text = str(refused(a, write(tmp_path / "delta", change), tmp_path / "out"))
    assert "model.norm.weight [16] in BASE and [17] in DELTA" in text
    change = published(base, tuned(base))
    change[HEAD] = torch.cat([change[HEAD], change[HEAD][:1]])
    text = str(refused(a, write(tmp_path / "uneven", change), tmp_path / "out"))
    assert "embedding and head of DELTA have 64 and 65 rows" in text


@pytest.mark.parametrize("rows", [64, 65])
def test_swapped_is_named(base: Tensors, tmp_path: Path, rows: int) -> None:
    target = tuned(base)
    if rows > 64:
        for name in (EMBEDDING, HEAD):
            target[name] = torch.cat([target[name], target[name][:1]])
    delta = write(tmp_path / "delta", published(base, target))
    error = refused(delta, write(tmp_path / "base", base), tmp_path / "out")
    assert error.what == "BASE and DELTA are swapped"
    assert error.fix == "give the base first"


def test_full_weights_are_refused_as_a_delta(base: Tensors, tmp_path: Path) -> None:
    error = refused(write(tmp_path / "base", base), write(tmp_path / "whole", tuned(base)), tmp_path / "out")
    assert error.what.startswith("DELTA holds whole weights")
    assert "v1.3" in str(error.fix)


@pytest.mark.parametrize("part", [0.01, 0.05, 0.2])
def test_the_right_base_of_one_shape_is_recognised(tmp_path: Path, part: float) -> None:
    """The right base passes at every size of the change; no other random base does."""
    for seed in range(10):
        own = random(seed)
        delta = write(tmp_path / f"delta{seed}", published(own, tuned(own, 100 + seed, part)))
        merge_delta(write(tmp_path / f"base{seed}", own), delta, tmp_path / f"out{seed}")
        other = random(1000 + seed)
        norms = other[EMBEDDING].float().norm(dim=1, keepdim=True) / own[EMBEDDING].float().norm(
            dim=1, keepdim=True
        )
        other[EMBEDDING] = (other[EMBEDDING].float() / norms).half()  # row by row as long as the right ones
        error = refused(write(tmp_path / f"wrong{seed}", other), delta, tmp_path / f"no{seed}")
        assert error.what == "DELTA was made from another base of the same shape"
        assert "LLaMA 1, not Llama 2" in str(error.fix)


def test_an_embedding_that_did_not_change_is_noted(base: Tensors, tmp_path: Path) -> None:
    change = published(base, tuned(base))
    change[EMBEDDING].zero_()
    merge = merge_delta(write(tmp_path / "base", base), write(tmp_path / "delta", change), tmp_path / "out")
    assert "does not show" in merge.notes[0]
    assert "no tokenizer" in merge.notes[1]


def test_a_base_in_bf16_is_noted(base: Tensors, tmp_path: Path) -> None:
    rounded = {n: t.bfloat16() for n, t in base.items()}
    delta = write(tmp_path / "delta", published(base, tuned(base)))
    merge = merge_delta(write(tmp_path / "base", rounded), delta, tmp_path / "out")
    assert "BASE is in bf16" in merge.notes[0]


@pytest.mark.parametrize("role", ["BASE", "DELTA"])
def test_quantized_weights_and_other_models_are_refused(
    pair: tuple[Path, Path], tmp_path: Path, role: str
) -> None:
    def replaced(folder: Path) -> list[Path]:
        return [folder if role == "BASE" else pair[0], folder if role == "DELTA" else pair[1]]

    small = random(1)
    small["model.norm.weight"] = torch.ones(16, dtype=torch.int8)
    error = refused(*replaced(write(tmp_path / "int8", small)), tmp_path / "out")
    assert error.what == f"{role} is quantized"
    error = refused(*replaced(write(tmp_path / "gpt2", random(1), model_type="gpt2")), tmp_path / "out")
    assert error.what == f"{role} is no LLaMA"
    del small[EMBEDDING], small["model.norm.weight"]
    error = refused(*replaced(write(tmp_path / "bare", small)), tmp_path / "out")
    assert f"no {EMBEDDING}" in str(error.seen)


def test_a_sum_that_overflows_is_refused(pair: tuple[Path, Path], base: Tensors, tmp_path: Path) -> None:
    change = published(base, tuned(base))
    change["model.norm.weight"] = torch.full((16,), 65504.0).half()
    large = base | {"model.norm.weight": torch.full((16,), 100.0).half()}
    a, b = write(tmp_path / "large", large), write(tmp_path / "huge", change)
    assert "model.norm.weight: the sum is not finite" in str(refused(a, b, tmp_path / "out"))


def test_an_output_that_exists_is_refused_without_force(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    merge_delta(*pair, out)
    (out / "mine.txt").write_text("old")
    with pytest.raises(BuildError, match="the checkpoint exists"):
        merge_delta(*pair, out)
    assert (out / "mine.txt").exists()
    merge_delta(*pair, out, force=True)
    assert not (out / "mine.txt").exists()
    other = tmp_path / "home"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(BuildError, match="is not a checkpoint"):
        merge_delta(*pair, other, force=True)
    assert (other / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("index", [0, 1])
def test_inputs_are_never_replaced(pair: tuple[Path, Path], tmp_path: Path, index: int) -> None:
    merged = merge_delta(*pair, tmp_path / "merged").folder
    inputs = list(pair)
    inputs[index] = merged
    for target in (merged, merged / ".." / "merged", tmp_path):
        with pytest.raises(BuildError, match=r"the target is (BASE|DELTA) or holds it"):
            merge_delta(*inputs, target, force=True)
    assert (merged / "config.json").exists()


def interrupts(_: str, done: int, __: int) -> None:
    if done == 3:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("before", [False, True])
def test_an_interrupted_merge_leaves_nothing(pair: tuple[Path, Path], tmp_path: Path, before: bool) -> None:
    out = tmp_path / "new" / "out"
    if before:
        merge_delta(*pair, out)
        (out / "mine.txt").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        merge_delta(*pair, out, force=True, progress=interrupts)
    assert out.parent.exists() == before
    assert not before or ([*out.parent.iterdir()] == [out] and (out / "mine.txt").exists())


def test_a_disk_that_fills_leaves_nothing(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Iterator[object], folder: Path) -> None:
        next(tensors)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging, "write_tensors", full)
    error = refused(*pair, tmp_path / "new" / "out", BuildError)
    assert "No space left" in str(error)
    assert not (tmp_path / "new").exists()


# --- the verb --------------------------------------------------------------------------------------------


def test_the_verb(pair: tuple[Path, Path], base: Tensors, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = ingot("merge-delta", *pair, "-o", out)
    assert (done.exit_code, done.stdout) == (0, f"{out}: 6.7 kB, 7 tensors\n")
    assert "note: DELTA has no tokenizer" in done.stderr
    assert equal(read(out), tuned(base))
    with safe_open(out / "model-00001.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    again = ingot("merge-delta", *pair, "-o", out)
    assert again.exit_code == 2
    assert "--force" in again.stderr
    swapped = ingot("merge-delta", *reversed(pair), "-o", tmp_path / "no")
    assert (swapped.exit_code, swapped.stdout) == (1, "")
    assert "error: BASE and DELTA are swapped" in swapped.stderr


def test_the_verb_names_added_tokens(base: Tensors, tmp_path: Path) -> None:
    target = {n: torch.cat([t, t[:1]]) if n in (EMBEDDING, HEAD) else t for n, t in tuned(base).items()}
    a, b = write(tmp_path / "base", base), write(tmp_path / "delta", published(base, target))
    done = ingot("merge-delta", a, b, "-o", tmp_path / "out")
    assert done.stdout.endswith(", 7 tensors, 1 added to the vocabulary\n")


def test_the_verb_is_interrupted(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., object] = merging.merge_delta
    monkeypatch.setattr(
        merging, "merge_delta", lambda *words, **rest: real(*words, **{**rest, "progress": interrupts})
    )
    assert ingot("merge-delta", *pair, "-o", tmp_path / "out").exit_code == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "delta"]
