"""What an architecture would make of another model's config.json: the keys that it reads, does not know,
would refuse or lacks. Nothing is compared by name alone: the architecture's own ``config_from_hf`` runs.

reading = read_with(LLAMA, checkpoint.config)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.config.decoder_config import DecoderConfig
from ingot.config.json_config import JsonConfig
from ingot.errors import IngotError
from ingot.models.architecture import Architecture
from ingot.models.config_keys import check_keys
from ingot.models.hf_values import short

# Field of DecoderConfig: what families call it in config.json.
MEANINGS: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim", "kv_channels"),
    "max_positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "mlp": ("hidden_act", "hidden_activation", "activation_function"),
    "qkv_bias": ("attention_bias", "use_qkv_bias", "qkv_bias"),
    "qk_norm": ("qk_norm", "use_qk_norm", "qk_layernorm"),
    "rope.theta": ("rope_theta", "rotary_emb_base"),
    "rope.dim": ("partial_rotary_factor", "rotary_pct", "rotary_dim"),
    "rope": ("rope_parameters", "rope_scaling"),
    "local_rope": ("rope_local_base_freq",),
    "sliding_window": ("sliding_window",),
    "full_layers": ("layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
    "query_scalar": ("query_pre_attn_scalar",),
    "attention_softcap": ("attn_logit_softcapping",),
    "logit_softcap": ("final_logit_softcapping",),
    "embedding_scale": ("embedding_multiplier",),
    "tie_word_embeddings": ("tie_word_embeddings",),
}
_STAND_IN = 64  # for a size that is missing: only names of tensors depend on it
_ALWAYS = {"model_type", "architectures"}
_MOST_KEYS = 512  # of one object; a config with more is damaged


@dataclass(frozen=True)
class Refusal(JsonConfig):
    """A value that the architecture does not take; ``key`` is dotted within an object."""

    key: str
    value: str
    why: str


@dataclass(frozen=True)
class ConfigReading(JsonConfig):
    """One config.json read by one architecture.

    Attributes:
        reads: keys of it that the architecture reads.
        renamed: its key → the key under which the architecture reads that meaning.
        unknown: keys that it refuses because it does not know them, with their values.
        refused: values that it refuses under keys that it knows.
        missing: keys that it needs.
        unread: keys that it knows and does not read: without effect in its own family.
        defaults: keys that are not there, for which it has a default of its own family.
        idle: keys without effect on any model's logits, or switched off.
        config: what it makes of the rest, with stand-ins for what is missing; None: nothing.
    """

    reads: tuple[str, ...]
    renamed: dict[str, str]
    unknown: dict[str, str]
    refused: tuple[Refusal, ...]
    missing: tuple[str, ...]
    unread: tuple[str, ...]
    defaults: tuple[str, ...]
    idle: tuple[str, ...]
    config: DecoderConfig | None

    @property
    def known_share(self) -> float:
        """Share of the keys with an effect that it takes as they are, 0 to 1."""
        taken = len(set(self.reads) - {refusal.key.partition(".")[0] for refusal in self.refused})
        all_keys = taken + len(self.renamed) + len(self.unknown) + len(self.refused)
        return taken / all_keys if all_keys else 0.0


class _Recorded(dict[str, Any]):
    """A config that records which of its keys are looked up, in order."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.append(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.append(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.append(str(key))
        return super().__contains__(key)


def meaning_of(key: str) -> str | None:
    """The field of DecoderConfig that a key of config.json sets in most families."""
    name = key.rpartition(".")[2]
    return next((field for field, names in MEANINGS.items() if name in names), None)


def read_with(architecture: Architecture, hf: Mapping[str, Any]) -> ConfigReading:
    """Read a config with an architecture that it is not of; raises nothing for what the config holds."""
    values = {str(key): value for key, value in list(hf.items())[:_MOST_KEYS]}
    values |= {"model_type": architecture.model_type, "architectures": list(architecture.hf_names[:1])}
    unknown = {key: value for key, value in values.items() if not _known(architecture, key, value)}
    renamed = _renamed(architecture, unknown, values)
    for key, theirs in renamed.items():
        values[theirs] = values[key]
    values = {key: value for key, value in values.items() if key not in unknown}
    config, asked, refused, missing = _read(architecture, values)
    own = [str(key) for key in hf]
    reads = tuple(key for key in own if key in asked and key not in unknown)
    others = architecture.keys - _ALWAYS
    unread = tuple(key for key in own if key in others and key not in reads and hf[key])
    return ConfigReading(
        reads=reads,
        renamed=renamed,
        unknown={key: short(value) for key, value in unknown.items() if key not in renamed},
        refused=tuple(refused),
        missing=tuple(missing),
        unread=unread,
        defaults=tuple(sorted(asked - set(own) - set(renamed.values()) - set(missing) - _ALWAYS)),
        idle=tuple(key for key in own if key not in reads and key not in unknown and key not in unread),
        config=config,
    )


def _known(architecture: Architecture, key: str, value: object) -> bool:
    try:
        check_keys({key: value}, architecture.keys, architecture.name)
    except IngotError:
        return False
    return True


def _renamed(
    architecture: Architecture, unknown: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, str]:
    """Unknown key → the key of the same meaning that the architecture reads and the config does not have."""
    found: dict[str, str] = {}
    for key in unknown:
        names = MEANINGS.get(meaning_of(key) or "", ())
        free = [n for n in names if n in architecture.keys and n not in values and n not in found.values()]
        if free and meaning_of(key) != "rope.dim":
            found[key] = free[0]
    return found


def _read(
    architecture: Architecture, values: dict[str, Any]
) -> tuple[DecoderConfig | None, set[str], list[Refusal], list[str]]:
    """Read, taking out what is refused and filling in what is missing, until nothing is."""
    refused: list[Refusal] = []
    missing: list[str] = []
    asked: set[str] = set()
    for _ in range(len(values) + 16):
        recorded = _Recorded(values)
        error = _error(architecture, recorded)
        asked |= set(recorded.asked)
        if not isinstance(error, Exception):
            return error, asked, refused, missing
        at_fault = _at_fault(architecture, values, recorded.asked, error)
        if at_fault is not None:
            path, values = at_fault
            owner: Any = recorded
            for part in path:
                owner = dict.__getitem__(owner, part)
            why = _what(error) if len(path) > 1 else f"{_what(error)}{_seen(error, owner)}"
            refused.append(Refusal(".".join(path), short(owner), why))
            continue
        key = _lacking(recorded, error)
        is_there = key is None
        if is_there and recorded.asked:
            key = recorded.asked[-1]
        if key is None or values.get(key) == _STAND_IN:
            break
        if is_there and key in values:  # needed, and not valid
            refused.append(Refusal(key, short(values[key]), _what(error)))
        elif key not in {refusal.key for refusal in refused}:
            missing.append(key)
        values = values | {key: _STAND_IN}
    return None, asked, refused, missing


def _error(architecture: Architecture, values: Mapping[str, Any]) -> DecoderConfig | Exception:
    """The config, or what reading it raises: a file may hold anything."""
    try:
        return architecture.config_from_hf(values)
    except (IngotError, ValueError, TypeError, AttributeError, ArithmeticError, LookupError) as error:
        return error


def _what(error: Exception) -> str:
    return error.what if isinstance(error, IngotError) else f"{type(error).__name__}: {error}"


def _seen(error: Exception, value: object) -> str:
    """What an error saw within an object."""
    inside = isinstance(error, IngotError) and isinstance(value, dict) and error.seen is not None
    return f" ({error.seen})" if inside else ""  # type: ignore[attr-defined]


def _at_fault(
    architecture: Architecture, values: dict[str, Any], asked: list[str], error: Exception
) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """The key whose removal changes the error, and the config without it."""
    trials = [(path, _removed(values, path)) for path in _candidates(values, asked, str(error))]
    # A message that lists several changes with each, but not what it says; one of a missing key lists all.
    texts: tuple[Callable[[Exception], str], ...] = (_what,) if _lacks(error) else (_what, str)
    for text in texts:
        for path, without in trials:
            other = _error(architecture, without)
            if not isinstance(other, Exception):
                return path, without
            if text(other) != text(error) and not (_lacks(other) and path[0] in _what(other)):
                return path, without
    return None


def _candidates(values: Mapping[str, Any], asked: list[str], text: str) -> Iterator[tuple[str, ...]]:
    """Keys that may be at fault: those that the message names, then others from the last read back."""
    last = [key for key in dict.fromkeys(reversed(asked)) if key in values]
    for key in sorted(last, key=lambda key: key not in text):
        inner = values[key]
        if isinstance(inner, dict) and len(inner) > 1:
            yield from ((key, str(part)) for part in list(inner)[:_MOST_KEYS])
        yield (key,)


def _removed(values: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    key = path[0]
    if len(path) == 1:
        return {name: value for name, value in values.items() if name != key}
    return {**values, key: {name: value for name, value in values[key].items() if name != path[1]}}


def _lacks(error: Exception) -> bool:
    """Whether an error is that a key is not there."""
    return _what(error).startswith("config.json lacks")


def _lacking(recorded: _Recorded, error: Exception) -> str | None:
    """The first key that an error names, was looked up and is not there."""
    named = {word.strip("'") for word in _what(error).split()}
    asked = dict.fromkeys(recorded.asked)
    return next((key for key in asked if key in named and not dict.__contains__(recorded, key)), None)
