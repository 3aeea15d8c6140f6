"""Models whose stream is turned: the same outputs, and no loud channel."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.config.quantization.quant_config import QuantConfig
from ingot.errors import ConfigError
from ingot.models.llama import LLAMA
from ingot.quant.methods import hadamard
from ingot.quant.methods import rotated_weights as engine_rotated
from ingot.quant.methods.rotated_weights import can_rotate, rotated
from tests.quant.models import log_probs, opened, planned
from tests.tiny_models import random_ids, save_model, tiny_config

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "own value for each head": ("mistral", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "96 channels": ("llama", {"hidden_size": 96, "head_dim": 24}),
    "odd": ("llama", {"hidden_size": 36, "head_dim": 10}),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_it_did(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    save_model(tiny_config(kind, **changes), tmp_path, seed=3)
    decoder, load = opened(tmp_path, 128)
    with open_checkpoint(tmp_path) as source:
        assembly = planned(tmp_path, QuantConfig("w4a8", rotation=True), max_seq_len=128)
        turned = {target: assembly.load(target, source).double() for target in assembly.mapped}
    ids = [random_ids(40, seed=7), random_ids(3, seed=8)]
    if decoder.tied:  # the head is a matrix of its own
        config = assembly.model_config.replace(tie_word_embeddings=False)
        decoder = assembly.architecture.empty_model(config, assembly.build, QuantConfig())
        assert not torch.equal(turned["lm_head.weight"], turned["embed_tokens.weight"])
    torch.testing.assert_close(
        log_probs(decoder, load, ids, {n: t.float() for n, t in turned.items()}),
        log_probs(opened(tmp_path, 128)[0], load, ids),
        rtol=1e-4,
        atol=1e-4,
    )
    norms = [n for n in turned if n.endswith("norm.weight") and "self_attn" not in n]
    assert len(norms) == 5
    assert all(bool((turned[n] == 1).all()) for n in norms)
    same = {n for n, t in turned.items() if torch.equal(t, load(n).double())}
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in same} <= {"q_norm", "k_norm", "gate_up_proj"}


def test_what_is_packed_is_not_rounded_before(tmp_path: Path) -> None:
    """Weights for 4 bits stay in fp32, all else is in the engine's dtype; the same each time."""
    save_model(tiny_config("qwen2"), tmp_path, seed=3)
    quant = QuantConfig("w4a8", layers={"*.o_proj": "w8a16", "*.down_proj": "none"})
    assembly = planned(tmp_path, quant, "bf16")
    with open_checkpoint(tmp_path) as source:
        load = partial(assembly.load, checkpoint=source)
        dtypes = {n.removeprefix("layers.0."): load(n).dtype for n in assembly.mapped if ".1." not in n}
        name = "layers.1.self_attn.qkv_proj.weight"
        assert torch.equal(load(name), load(name))
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {"self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}


def test_it_is_turned_on_the_device(tmp_path: Path) -> None:
    """All of a layer that the rotation changes; nothing of it is computed where the file is read."""
    save_model(tiny_config("qwen2"), tmp_path, seed=3)
    assembly = planned(tmp_path, QuantConfig("w4a8"), "bf16")
    with open_checkpoint(tmp_path) as source:
        names = [name for name in assembly.mapped if name.startswith("layers.")]
        here = {name: assembly.load(name, source) for name in names}
        there = {name: assembly.load(name, source, torch.device("meta")) for name in names}
    left = [name for name, tensor in there.items() if tensor.device.type == "cpu"]
    assert len(left) == 4
    assert all("norm" in name for name in left)
    for name, tensor in there.items():
        assert (tensor.shape, tensor.dtype) == (here[name].shape, here[name].dtype)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_embedding_and_head_take_little_of_the_device(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows at a time, with the same bits."""
    save_model(tiny_config("llama", tie_word_embeddings=False), tmp_path, seed=3)
    decoder, load = opened(tmp_path)
    whole, turned = rotated(name, decoder.config, load), []

    def rotate(part: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
        turned.append(len(part))
        return hadamard.rotate(part, factors=factors)

    monkeypatch.setattr(engine_rotated, "rotate", rotate)
    monkeypatch.setattr(engine_rotated, "_ROWS_PIECE", 5 * whole.shape[1])
    assert torch.equal(rotated(name, decoder.config, load, torch.device("cpu")), whole)
    assert sum(turned) == len(whole)
    assert max(turned) == 5


def test_loud_channels_are_spread(tmp_path: Path) -> None:
    model = save_model(tiny_config("llama", hidden_size=64, head_dim=16), tmp_path, seed=3)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, [5, 40]] *= 30
    model.save_pretrained(tmp_path)
    decoder, load = opened(tmp_path)
    plain = load("embed_tokens.weight")
    turned = rotated("embed_tokens.weight", decoder.config, load)
    loudness = [float((t.abs().amax(1) / t.square().mean(1).sqrt()).mean()) for t in (plain, turned)]
    assert loudness[0] > 5
    assert loudness[1] < 3


def test_a_model_with_layer_norms_is_refused(tmp_path: Path) -> None:
    save_model(tiny_config("gpt2"), tmp_path, seed=3)
    with pytest.raises(ConfigError, match=r"cannot be rotated.*layer_norm.*RMSNorm.*rotation=False"):
        planned(tmp_path, QuantConfig("w4a8"))
    planned(tmp_path, QuantConfig("w4a8", rotation=False))


@pytest.mark.parametrize("changes", [{"post_norms": True}, {"norm": "layer_norm"}])
def test_other_norms_keep_a_model_from_being_rotated(changes: dict[str, Any]) -> None:
    config = LLAMA.read_config(tiny_config("llama").to_dict())
    assert can_rotate(config)
    assert not can_rotate(config.replace(**changes))
