"""Logits and greedy, beam and penalised decoding equal Hugging Face's, for every architecture it has a class
of.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Tokenizer, PreTrainedModel

from ingot import LLM, SamplingParams, build
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import parse_dtype
from ingot.errors import CheckpointError
from tests.tiny_models import edit_config, make_model, random_ids, save_model, tiny_config
from tests.unit.vocabularies import write_opt_tokenizer

TOLERANCE = 1e-4  # of the largest logit
NEW_TOKENS = 32

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "rope_theta": 1000.0,
}
YARN_BARE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
YARN_SCALED = YARN | {"attention_factor": 1.7}
SHARP = {"query_pre_attn_scalar": 1}  # without it so small a model repeats itself

# name: (kind, config changes, prompt length)
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt2": ("gpt2", {}, 20),
    "gpt2-odd": ("gpt2", {"vocab_size": 301, "n_inner": 50, "n_embd": 36, "n_head": 3}, 20),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "activation_function": "gelu"}, 20),
    "gpt2-relu": ("gpt2", {"activation_function": "relu", "layer_norm_epsilon": 1e-3}, 20),
    "gpt2-full-length": ("gpt2", {}, 96),
    "opt": ("opt", {}, 20),
    "opt-odd": ("opt", {"vocab_size": 301, "ffn_dim": 50, "hidden_size": 36, "num_attention_heads": 3}, 20),
    "opt-untied-gelu": ("opt", {"tie_word_embeddings": False, "activation_function": "gelu"}, 21),
    "opt-no-bias": ("opt", {"enable_bias": False}, 20),
    "opt-full-length": ("opt", {}, 96),
    "llama-gqa": ("llama", {}, 20),
    "llama-mha": ("llama", {"num_key_value_heads": 4}, 20),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}, 20),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, 20),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, 20),
    "llama-head-dim": ("llama", {"head_dim": 16}, 20),
    "llama-odd-vocab": ("llama", {"vocab_size": 1031, "intermediate_size": 43, "rms_norm_eps": 1e-3}, 20),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, 90),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}, 90),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}, 90),
    "llama-yarn": ("llama", {"rope_parameters": YARN}, 90),
    "llama-yarn-bare": ("llama", {"rope_parameters": YARN_BARE, "head_dim": 16}, 90),
    "llama-yarn-scaled": ("llama", {"rope_parameters": YARN_SCALED, "head_dim": 32}, 90),
    "llama-long": ("llama", {"max_position_embeddings": 700}, 660),
    "mistral": ("mistral", {}, 20),
    "mistral-window": ("mistral", {"sliding_window": 7}, 40),
    "mistral-window-of-block": ("mistral", {"sliding_window": 64, "head_dim": 12}, 90),
    "qwen2": ("qwen2", {}, 20),
    "qwen2-tied-mqa": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}, 20),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, 40),
    "qwen2-window-unused": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
        40,
    ),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}, 90),
    "qwen3": ("qwen3", {"head_dim": 16}, 20),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}, 20),
    "gemma2": ("gemma2", {}, 40),
    "gemma2-mqa-untied": ("gemma2", {"num_key_value_heads": 1, "tie_word_embeddings": False}, 40),
    "gemma2-mha-bias": ("gemma2", {"num_key_value_heads": 4, "attention_bias": True}, 30),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, 40),
    "gemma2-head-dim": ("gemma2", {"head_dim": 16, "num_attention_heads": 8, "sliding_window": 64}, 90),
    "gemma2-other-layers": (
        "gemma2",
        {"layer_types": [*["full_attention"] * 2, *["sliding_attention"] * 2]},
        40,
    ),
    "gemma3": ("gemma3", SHARP, 40),
    "gemma3-as-published": (
        "gemma3",
        {
            "num_hidden_layers": 7,
            "sliding_window_pattern": 6,
            "rope_parameters": None,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "sliding_window": 20,
            "query_pre_attn_scalar": 16,
        },
        90,
    ),
    "gemma3-other-layers": (
        "gemma3",
        {
            **SHARP,
            "layer_types": [*["full_attention"] * 2, *["sliding_attention"] * 3],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": LINEAR},
        },
        90,
    ),
    "gemma3-cap-bias-untied": (
        "gemma3",
        {"final_logit_softcapping": 4.0, "attention_bias": True, "tie_word_embeddings": False},
        30,
    ),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, 40),
}


def load(folder: Path) -> LLM:
    return LLM(folder, "cpu", max_batch_size=8, runtime=RuntimeConfig(block_size=16))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@torch.inference_mode()
def hf_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()


@torch.inference_mode()
def hf_generate(model: PreTrainedModel, ids: list[int], **options: Any) -> Any:
    return model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **options,
    )


def greedy_ids(model: PreTrainedModel, ids: list[int], **options: Any) -> list[int]:
    """Hugging Face's cached greedy decoding; its winners lead clearly, so that equality means something."""
    output = hf_generate(model, ids, **options)
    best = torch.stack(output.scores).topk(2, dim=-1).values
    assert float((best[..., 0] - best[..., 1]).min()) > 1e-3, "a tie: choose another seed"
    return output.sequences[0, len(ids) :].tolist()


def check(folder: Path, model: PreTrainedModel, length: int) -> None:
    """Logits and cached greedy decoding of the checkpoint equal the model's."""
    ids = random_ids(length, seed=5, vocab_size=model.config.vocab_size)
    llm = load(folder)
    assert relative_error(llm.logits(ids), hf_logits(model, ids)) <= TOLERANCE
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    expected = greedy_ids(model, ids)
    assert len(set(expected)) > 1
    assert llm.generate(ids, params)[0].token_ids == expected


@pytest.mark.stays(
    *("opt", "opt-no-bias", "opt-full-length"),
    *("gpt2", "gpt2-relu", "llama-gqa", "llama-tied", "llama-odd-vocab", "llama-llama3", "llama-yarn"),
    *(
        "mistral",
        "mistral-window",
        "qwen2",
        "qwen2-window",
        "qwen3",
        "gemma2",
        "gemma2-mqa-untied",
        "gemma2-no-caps",
        "gemma3",
        "gemma3-as-published",
        "gemma3-other-layers",
    ),
)
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_ids(name: str, tmp_path: Path) -> None:
    kind, changes, length = VARIANTS[name]
    model = save_model(tiny_config(kind, **changes), tmp_path, seed=1)
    check(tmp_path, model, length)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_opt_in_each_dtype(dtype: str, tmp_path: Path) -> None:
    """Its positions begin at row 2 of their table; what is embedded and normed first is the class's to the
    bit, and so are logits, as far as 16 bits go.
    """
    model = make_model(tiny_config("opt"), seed=1).to(parse_dtype(dtype))
    model.save_pretrained(tmp_path)
    ids = random_ids(40, seed=5)
    llm = LLM(tmp_path, "cpu", compute_dtype=dtype)
    with llm.tap("layers.0.input_layernorm") as seen, torch.inference_mode():
        logits = llm.logits(ids)
        decoder = model.model.decoder
        embedded = decoder.embed_tokens(torch.tensor(ids)) + decoder.embed_positions.weight[2:42]
        normed = decoder.layers[0].self_attn_layer_norm(embedded)
    assert torch.equal(seen["layers.0.input_layernorm"], normed)
    assert relative_error(logits, hf_logits(model, ids)) <= {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.006}[dtype]


@pytest.mark.stays("0", "1", "2")
@pytest.mark.parametrize("seed", range(12))
def test_opt_of_any_size(seed: int, tmp_path: Path) -> None:
    """Sizes, activation, biases and head as they are drawn."""
    draw = random.Random(seed)
    heads = draw.choice([1, 2, 3, 5])
    config = tiny_config(
        "opt",
        vocab_size=draw.randrange(50, 500),
        hidden_size=heads * draw.choice([8, 12, 16, 24, 64]),
        num_attention_heads=heads,
        ffn_dim=draw.randrange(9, 200),
        num_hidden_layers=draw.randrange(1, 4),
        max_position_embeddings=draw.randrange(40, 200),
        activation_function=draw.choice(["relu", "gelu", "gelu_new"]),
        enable_bias=draw.random() < 0.7,
        tie_word_embeddings=draw.random() < 0.7,
    )
    model = save_model(config, tmp_path, seed=seed)
    ids = random_ids(min(config.max_position_embeddings, 60), seed=seed, vocab_size=config.vocab_size)
    assert relative_error(load(tmp_path).logits(ids), hf_logits(model, ids)) <= TOLERANCE


def test_opt_reads_texts_from_its_begin_token_on(tmp_path: Path) -> None:
    """An engine has the tokenizer's files, and so the flag that puts </s> first."""
    save_model(tiny_config("opt", vocab_size=261), tmp_path / "hf", seed=1)
    write_opt_tokenizer(tmp_path / "hf", add_bos_token=True)
    engine = build(tmp_path / "hf", tmp_path / "engine", device="cpu", proof=False)
    llm, theirs = load(engine), GPT2Tokenizer.from_pretrained(str(tmp_path / "hf"))
    answer = llm.generate("Hello there", SamplingParams(max_new_tokens=3))[0]
    assert answer.prompt_token_ids == theirs("Hello there").input_ids
    assert answer.prompt_token_ids[0] == 2


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_opt_files_of_older_versions(prefix: str, tmp_path: Path) -> None:
    """Those of 2022 hold a copy of the tied head and a version, some without ``model.``."""
    model = save_model(tiny_config("opt"), tmp_path, seed=1)
    (tmp_path / "model.safetensors").unlink()
    state = {k.replace("model.", prefix, 1): v.clone() for k, v in model.state_dict().items()}
    state[f"{prefix}decoder.version"] = torch.tensor([3.0])
    state["lm_head.weight"] = model.lm_head.weight.detach().clone()
    write_torch_shards(tmp_path, state, 2)
    check(tmp_path, model, 20)


@pytest.mark.grid(1)
@pytest.mark.parametrize("name", ["llama-theta", "llama-linear", "llama-llama3", "llama-yarn"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_old_style_config_reads_the_same(name: str, type_key: str, tmp_path: Path) -> None:
    kind, changes, length = VARIANTS[name]
    model = save_model(tiny_config(kind, **changes), tmp_path, seed=1)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in config
    scaling = dict(config["rope_parameters"])
    theta = scaling.pop("rope_theta")
    scaling[type_key] = scaling.pop("rope_type")
    old = {"rope_theta": theta, "rope_scaling": None if scaling[type_key] == "default" else scaling}
    edit_config(tmp_path, "rope_parameters", **old)
    check(tmp_path, model, length)


@pytest.mark.stays("gpt2", "qwen3")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "qwen3"])
def test_sharded_safetensors(kind: str, tmp_path: Path) -> None:
    model = save_model(tiny_config(kind), tmp_path, seed=1, max_shard_size="16KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check(tmp_path, model, 20)


@pytest.mark.parametrize(("kind", "shards"), [("gpt2", 1), ("llama", 3)])
def test_torch_files(kind: str, shards: int, tmp_path: Path) -> None:
    model = save_model(tiny_config(kind), tmp_path, seed=1)
    (tmp_path / "model.safetensors").unlink()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_torch_shards(tmp_path, state, shards)
    check(tmp_path, model, 20)


def write_torch_shards(folder: Path, state: dict[str, torch.Tensor], count: int) -> None:
    if count == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    index = {}
    for shard in range(count):
        name = f"pytorch_model-{shard + 1:05}-of-{count:05}.bin"
        part = dict(list(state.items())[shard::count])
        torch.save(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_without_prefix(tied: bool, tmp_path: Path) -> None:
    """The first GPT-2 files lack ``transformer.`` and carry the causal mask as a tensor."""
    model = save_model(tiny_config("gpt2", tie_word_embeddings=tied), tmp_path, seed=1)
    (tmp_path / "model.safetensors").unlink()
    state = {k.removeprefix("transformer."): v.clone() for k, v in model.state_dict().items()}
    if tied:
        state.pop("lm_head.weight", None)
    for layer in range(2):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(state, tmp_path / "pytorch_model.bin")
    check(tmp_path, model, 20)


@pytest.mark.stays("gpt2-1.3", "qwen2-0.8")
@pytest.mark.parametrize("penalty", [1.3, 0.8])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_repetition_penalty(kind: str, penalty: float, tmp_path: Path) -> None:
    model = save_model(tiny_config(kind), tmp_path, seed=2)
    ids = random_ids(12, seed=5)
    expected = greedy_ids(model, ids, repetition_penalty=penalty)
    assert expected != greedy_ids(model, ids)
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, repetition_penalty=penalty)
    assert load(tmp_path).generate(ids, params)[0].token_ids == expected


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "options",
    [
        {"length_penalty": 1.0},
        {"length_penalty": 0.3},
        {"length_penalty": 1.0, "early_stopping": True},
        {"length_penalty": -1.0, "repetition_penalty": 1.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_beam_search(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = save_model(tiny_config(kind), tmp_path, seed=3)
    ids = random_ids(9, seed=4)
    end = greedy_ids(model, ids)[6]
    output = hf_generate(model, ids, num_beams=3, num_return_sequences=2, eos_token_id=end, **options)
    params = SamplingParams(
        num_beams=3, n=2, max_new_tokens=NEW_TOKENS, stop_token_ids=(end,), ignore_eos=True, **options
    )
    answers = load(tmp_path).generate(ids, params)[0].answers
    assert len(answers) == 2
    for answer, sequence, score in zip(answers, output.sequences, output.sequences_scores, strict=True):
        new = sequence[len(ids) :].tolist()
        assert answer.token_ids == (new[: new.index(end)] if end in new else new[:NEW_TOKENS])
        assert answer.finish_reason == ("stop" if end in new else "length")
        assert answer.score == pytest.approx(float(score), abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "names"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (
            "llama",
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "longrope",
        ),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "much"}}, "much"),
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("qwen3", {"hidden_act": "relu"}, "relu"),
        ("gpt2", {"activation_function": "mish"}, "mish"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}, "before false, word_.*opt-350m"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm true"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine false"),
        ("opt", {"activation_function": ["relu"]}, "activation_function.*'relu'"),
        ("opt", {"max_position_embeddings": 130}, r"embed_positions.*\[128, 32\].*\[130, 32\]"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True},
            "window",
        ),
        ("llama", {"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM"),
        ("llama", {"architectures": None}, "architectures"),
        ("llama", {"num_hidden_layers": 3}, "layers.2."),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers"),
        ("llama", {"hidden_size": "wide"}, "wide"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads|num_heads"),
        ("llama", {"num_key_value_heads": 3}, "3"),
        ("llama", {"vocab_size": 96}, "embed_tokens"),
        ("llama", {"rope_parameters": [1]}, "rope"),
    ],
)
def test_unsupported_config_is_one_clear_error(
    kind: str, changes: dict[str, Any], names: str, tmp_path: Path
) -> None:
    save_model(tiny_config(kind, sliding_window=9) if kind == "qwen2" else tiny_config(kind), tmp_path)
    drop = ("rope_parameters",) if "rope_scaling" in changes else ()
    edit_config(tmp_path, *drop, **({"sliding_window": 9} if kind == "qwen2" else {}), **changes)
    with pytest.raises(CheckpointError, match=names):
        load(tmp_path)


def test_window_without_the_switch(tmp_path: Path) -> None:
    """A config that lacks ``use_sliding_window`` means: on for Mistral, off for Qwen2."""
    for kind in ("mistral", "qwen2"):
        model = save_model(tiny_config(kind, sliding_window=7), tmp_path / kind, seed=1)
        edit_config(tmp_path / kind, "use_sliding_window", "layer_types", sliding_window=7)
        check(tmp_path / kind, model, 40)


@pytest.mark.parametrize("full", [0, 1, 2])
def test_max_window_layers_of_old_configs(full: int, tmp_path: Path) -> None:
    """Before ``layer_types``, layers from ``max_window_layers`` on had the window."""
    window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": full}
    model = save_model(tiny_config("qwen2", **window), tmp_path, seed=1)
    edit_config(tmp_path, "layer_types", **window)
    if full == 1:
        with pytest.raises(CheckpointError, match="with and without a sliding window"):
            load(tmp_path)
    else:
        check(tmp_path, model, 40)


def test_yarn_factor_from_the_lengths(tmp_path: Path) -> None:
    """Without a factor it is max_position_embeddings / original_max_position_embeddings."""
    rope = {k: v for k, v in YARN.items() if k != "factor"}
    model = save_model(tiny_config("llama", rope_parameters=rope | {"factor": None}), tmp_path, seed=1)
    edit_config(tmp_path, rope_parameters=rope)
    check(tmp_path, model, 90)
