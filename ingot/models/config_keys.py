"""Keys of a config.json that may be ignored; every other unknown key is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ingot.errors import CheckpointError
from ingot.models.hf_values import short

# Names and patterns: read elsewhere (dtype, quantization, tokens); for people; for training; other outputs of
# Hugging Face's classes; defaults of sampling, which are taken from generation_config.json.
_IDLE = (
    *("architectures", "model_type", "dtype", "torch_dtype", "quantization_config", "compression_config"),
    *("*token_id", "*token_ids", "tokenizer_*", "bos_token", "eos_token", "pad_token", "unk_token"),
    *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "transformers.js_config"),
    *("auto_map", "custom_pipelines", "unsloth_*", "license", "author", "created_date", "base_model*"),
    *("_attn_implementation*", "attn_implementation", "*flash_attn*", "*flash_attention*"),
    *("*dropout*", "*_pdrop", "initializer_*", "gradient_checkpointing*", "neftune_noise_alpha"),
    *("use_cache", "return_dict*", "use_return_dict", "torchscript", "keys_to_ignore_at_inference"),
    *("output_attentions", "output_hidden_states", "output_past", "output_scores", "is_decoder"),
    *("chunk_size_feed_forward", "use_bfloat16", "tf_legacy_loss"),
    *("id2label", "label2id", "num_labels", "_num_labels", "problem_type", "finetuning_task"),
    *("task_specific_params", "prefix", "summary_*", "max_length", "max_new_tokens", "min_length"),
    *("min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "num_beams"),
    *("num_beam_groups", "num_return_sequences", "early_stopping", "length_penalty", "repetition_penalty"),
    *("diversity_penalty", "*no_repeat_ngram_size", "exponential_decay_length_penalty", "bad_words_ids"),
    *("suppress_tokens", "begin_suppress_tokens", "remove_invalid_values", "renormalize_logits"),
)
# Values that change nothing; for other keys these are null, false, 0 and everything empty.
_NEUTRAL: Mapping[str, object] = {
    "is_causal": True,
    "causal": True,
    "use_rope": True,
    "truncate": True,
    "partial_rotary_factor": 1,
    "logit_scale": 1,
    "logits_scaling": 1,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
}


def check_keys(
    settings: Mapping[str, Any], read: Collection[str], model: str, within: str | None = None
) -> None:
    """Refuse settings that are not read and may change what the model computes.

    Args:
        settings: a config.json, or an object within one.
        read: the keys that are read, and those known to change nothing.
        model: whose keys these are, for the message.
        within: the key of that object.

    Raises:
        CheckpointError: one for all of them, by name and value.
    """
    odd = {key: value for key, value in settings.items() if key not in read and not _passed_over(key, value)}
    if not odd:
        return
    prefix = f"{within}." if within else ""
    raise CheckpointError(
        f"config.json has settings unknown to Ingot's {model} that may change what it computes",
        seen=", ".join(f"{prefix}{key}={short(value)}" for key, value in sorted(odd.items())),
        fix="use a model without them; if its authors say that one has no effect on the logits, remove that "
        "one from config.json",
    )


def _passed_over(key: str, value: object) -> bool:
    if key in _NEUTRAL:
        return value is None or value == _NEUTRAL[key]
    return not value or any(fnmatchcase(key, pattern) for pattern in _IDLE)
