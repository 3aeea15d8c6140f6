"""config.json and generation_config.json of a GGUF file's metadata, as Hugging Face would have them."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from ingot.checkpoint.gguf.gguf_file import GgufFile
from ingot.errors import CheckpointError

_log = logging.getLogger(__name__)

EMBEDDING, HEAD, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"
# general.architecture → class, and the base of rotary angles where the file names none.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_AGAIN = "convert the model again, or use its original checkpoint"
# llama3's, of all published models; the file has only what they make of the frequencies.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_ENDS = ("eos", "eot", "eom")
_IDS = "tokenizer.ggml.{}_token_id"
_SAMPLER = "general.sampling."
_PENALTY = "repetition_penalty"
# Of a sampler → of generation_config.json.
_SAMPLING = {name: name for name in ("top_k", "top_p", "min_p")}
_SAMPLING |= {"temp": "temperature", "penalty_repeat": _PENALTY}
_NOT_SAMPLED = {"mirostat": 0, "xtc_probability": 0.0}  # and the value that turns it off
_NOT_READ = ("scaling.alpha", "scaling.yarn_log_multiplier", "dimension_sections")


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json; CheckpointError where the architecture or a setting is missing or not supported."""
    return _Settings(file).config()


def generation_of(file: GgufFile) -> dict[str, Any]:
    """generation_config.json: the tokens that begin and end a text, and how tokens are drawn.

    CheckpointError where a value is no number. A warning names samplers that Ingot does not have.
    """
    found = {name: token_id(file, name) for name in ("bos", *_ENDS)}
    ends = [found[name] for name in _ENDS if found[name] is not None]
    config: dict[str, Any] = {} if found["bos"] is None else {"bos_token_id": found["bos"]}
    config |= {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    return config | _sampling(file)


def _sampling(file: GgufFile) -> dict[str, Any]:
    """What ``general.sampling.*`` recommends; {} where the file says nothing of it.

    llama.cpp's converter copies these from generation_config.json except for ``do_sample``: tokens are drawn
    where a file names a value of drawing, unless its temperature is 0 or less.
    """
    given = {key: file.metadata[_SAMPLER + key] for key in _SAMPLING if _SAMPLER + key in file.metadata}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refused(file, _SAMPLER + key, value, "a number")
    found = {_SAMPLING[key]: _decimal(value) for key, value in given.items()}
    drawn = [name for name in found if name != _PENALTY]
    if drawn and found.get("temperature", 1.0) > 0:
        found["do_sample"] = True
    else:
        found = {name: value for name, value in found.items() if name == _PENALTY}
    idle = {key: file.metadata.get(_SAMPLER + key, rests) for key, rests in _NOT_SAMPLED.items()}
    odd = [f"{_SAMPLER}{key} {value}" for key, value in idle.items() if value != _NOT_SAMPLED[key]]
    if found.get(_PENALTY, 1.0) != 1.0 and file.metadata.get(f"{_SAMPLER}penalty_last_n", -1) != -1:
        last = file.metadata[f"{_SAMPLER}penalty_last_n"]
        odd.append(f"{_SAMPLER}penalty_last_n {last} (the penalty covers prompt and output)")
    if odd:
        _log.warning("%s: not applied: %s", file.path, ", ".join(odd))
    return found


def _decimal(value: float) -> float | int:
    """Of a float32 the shortest decimal: 1e-05, not 9.99999974e-06, as JSON files have it."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def token_id(file: GgufFile, name: str) -> int | None:
    """The id of ``bos``, ``eos`` and the like; None: the file names none."""
    key = _IDS.format(name)
    value = file.metadata.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise _refused(file, key, value, "a token's id")
    return value


class _Settings:
    """The metadata of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        kind = file.metadata.get("general.architecture")
        if kind not in ARCHITECTURES:
            raise CheckpointError(
                f"unsupported architecture in {file.path}",
                seen=f"general.architecture {kind!r}",
                allowed=", ".join(ARCHITECTURES),
                fix="a GGUF file of one of these, or the model's Hugging Face checkpoint",
            )
        self._kind: str = kind
        self._own = {
            key.removeprefix(f"{kind}."): value
            for key, value in file.metadata.items()
            if key.startswith(f"{kind}.")
        }

    def config(self) -> dict[str, Any]:
        if self._own.get("expert_count"):
            raise self._refused("expert_count", self._own["expert_count"], "a model without experts")
        if self._own.get("attention.sliding_window"):
            seen = self._own["attention.sliding_window"]
            raise self._refused("attention.sliding_window", seen, "a model without a sliding window")
        tensors = self._file.tensors
        if EMBEDDING not in tensors:
            raise CheckpointError(f"{self._file.path} has no tensor {EMBEDDING}", fix=_AGAIN)
        heads = self._integer("attention.head_count")
        hidden = self._integer("embedding_length")
        head_dim = self._integer("attention.key_length", hidden // heads)
        if self._integer("attention.value_length", head_dim) != head_dim:
            raise self._refused("attention.value_length", self._own["attention.value_length"], head_dim)
        if self._integer("rope.dimension_count", head_dim) != head_dim:
            raise self._refused("rope.dimension_count", self._own["rope.dimension_count"], head_dim)
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self._kind]],
            "model_type": self._kind,
            "vocab_size": tensors[EMBEDDING].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._integer("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": HEAD not in tensors,
            "rope_theta": self._number("rope.freq_base", 1e4),
        }
        if self._kind != "qwen2":
            config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        if self._kind == "llama":
            config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
        scaling = self._scaling(head_dim, config["rope_theta"])
        return config | ({"rope_scaling": scaling} if scaling else {})

    def _scaling(self, head_dim: int, theta: float) -> dict[str, Any]:
        """``rope_scaling``; {} where angles are not scaled."""
        odd = [key for key in _NOT_READ if self._own.get(f"rope.{key}")]
        if odd:
            raise self._refused(f"rope.{odd[0]}", self._own[f"rope.{odd[0]}"], "nothing")
        kind = self._own.get("rope.scaling.type", "linear" if "rope.scale_linear" in self._own else "none")
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        if self._number("rope.scaling.attn_factor", 1.0) != 1.0:
            raise self._refused("rope.scaling.attn_factor", self._own["rope.scaling.attn_factor"], 1.0)
        if FREQUENCIES in self._file.tensors:
            found = self._llama3(head_dim, theta)
            if found and kind != "none":
                raise self._refused("rope.scaling.type", kind, f"none, beside {FREQUENCIES}")
            return found
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return {}
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise self._refused("rope.scaling.type", kind, "none, linear, yarn")
        found = {"rope_type": "yarn", "factor": factor}
        if "rope.scaling.original_context_length" in self._own:
            length = self._integer("rope.scaling.original_context_length")
            found["original_max_position_embeddings"] = length
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in self._own:
                found[name] = self._number(f"rope.scaling.yarn_{name}")
        for name in ("ext_factor", "attn_factor"):
            if self._number(f"rope.scaling.yarn_{name}", 1.0) != 1.0:
                key = f"rope.scaling.yarn_{name}"
                raise self._refused(key, self._own[key], 1.0)
        return found

    def _llama3(self, head_dim: int, theta: float) -> dict[str, Any]:
        """LLaMA 3's scaling, by what each frequency is divided by; {} where that is 1."""
        stored = self._file.tensors[FREQUENCIES]
        if stored.type.name != "F32" or stored.shape != (head_dim // 2,):
            raise self._refused(FREQUENCIES, f"{stored.type.name} {list(stored.shape)}", [head_dim // 2])
        divisors = self._file.blocks(FREQUENCIES).view(np.float32).ravel().astype(np.float64)
        factor = float(divisors.max()) if np.isfinite(divisors).all() else 0.0
        if (divisors == 1).all():
            return {}
        expected = [_divisor(theta ** (-2 * i / head_dim), factor) for i in range(head_dim // 2)]
        if factor <= 1 or not np.allclose(divisors, expected, rtol=1e-4):
            allowed = f"those of llama3 with factors {_LOW} and {_HIGH} and {_ORIGINAL} positions"
            raise self._refused(FREQUENCIES, np.round(divisors[:8], 4).tolist(), allowed)
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LOW,
            "high_freq_factor": _HIGH,
            "original_max_position_embeddings": _ORIGINAL,
        }

    def _value(self, key: str, default: Any = None) -> Any:
        """A setting; of an array, which has one value per layer, the one that all layers have."""
        value = self._own.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self._refused(key, value[:8], "one value for all layers")
            value = value[0]
        if value is None:
            raise self._refused(key, "nothing", "a value")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self._refused(key, value, "a positive integer")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._refused(key, value, "a number")
        return float(_decimal(value))

    def _refused(self, key: str, seen: object, allowed: object) -> CheckpointError:
        own = key if key == FREQUENCIES else f"{self._kind}.{key}"
        return _refused(self._file, own, seen, allowed)


def _divisor(frequency: float, factor: float) -> float:
    """What llama3 divides a frequency by."""
    turns = _ORIGINAL * frequency / (2 * math.pi)
    if turns > _HIGH:
        return 1.0
    if turns < _LOW:
        return factor
    smooth = (turns - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - smooth) / factor + smooth)


def _refused(file: GgufFile, key: str, seen: object, allowed: object) -> CheckpointError:
    return CheckpointError(f"unsupported {key} in {file.path}", seen=seen, allowed=allowed, fix=_AGAIN)
