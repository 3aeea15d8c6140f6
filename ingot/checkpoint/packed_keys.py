"""The settings of a quantization config that do not change what a model computes; all others are refused.

Sources: AutoGPTQ 0.8, GPTQModel 7.7 (``BaseQuantizeConfig.to_dict``), optimum 2.3, AutoRound 0.16 (exports to
GPTQ and AWQ), AutoAWQ 0.2.9, ``GPTQConfig`` and ``AwqConfig`` of transformers 5.23, compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ingot.errors import CheckpointError

Json = Mapping[str, Any]

# What AutoRound notes of its optimization. Keys of activations count where act_bits does.
_AUTOROUND = (
    frozenset({"amp", "autoround_version", "batch_size", "data_type", "enable_minmax_tuning", "iters"})
    | {"enable_norm_bias_tuning", "enable_quanted_input", "enable_alg_ext", "gradient_accumulate_steps"}
    | {"low_gpu_mem_usage", "low_cpu_mem_usage", "lr", "minmax_lr", "momentum", "nsamples", "provider"}
    | {"scale_dtype", "seed", "seqlen", "sampler", "lr_scheduler", "multimodal", "quant_nontext_module"}
    | {"to_quant_block_names", "block_name_to_quantize", "not_use_best_mse", "dynamic_max_gap"}
    | {"act_bits", "act_data_type", "act_dynamic", "act_sym", "act_group_size"}
)
# Which modules are quantized (their tensors say so), how they were, and which kernels should run them.
_GPTQ_AND_AWQ = _AUTOROUND | (
    frozenset({"quant_method", "method", "bits", "group_size", "checkpoint_format", "format", "version"})
    | {"modules_to_not_convert", "modules_in_block_to_quantize", "module_name_preceding_first_block"}
    | {"desc_act", "sym", "lm_head", "dynamic", "pack_dtype", "backend", "exllama_config", "use_exllama"}
    | {"disable_exllama", "use_cuda_fp16", "max_input_length", "model_seqlen", "pad_token_id"}
    | {"cache_block_outputs", "dataset", "tokenizer", "meta", "damp_percent", "damp_auto_increment"}
    | {"true_sequential", "model_name_or_path", "model_file_base_name"}
)
_KNOWN = {
    "gptq": _GPTQ_AND_AWQ | {"static_groups", "is_marlin_format", "act_group_aware", "mse"},
    "awq": _GPTQ_AND_AWQ
    | {"zero_point", "w_bit", "q_group_size", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"},
    "compressed-tensors": frozenset({"quant_method", "format", "config_groups", "ignore", "version"})
    | {"quantization_status", "global_compression_ratio", "run_compressed", "dequantize"}
    | {"kv_cache_scheme", "sparsity_config", "transform_config", "use_optimized_inference"},
    "fp8": frozenset({"quant_method", "fmt", "activation_scheme", "weight_block_size", "dequantize"})
    | {"modules_to_not_convert", "ignored_layers"},
}
_GROUP = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_ARGS = frozenset(
    {"num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "actorder", "scale_dtype"}
    | {"zp_dtype", "observer", "observer_kwargs"}
)
_LONGEST = 60  # characters of a value in a message


def check_packed_keys(kind: str, found: Json, where: str) -> None:
    """Raise CheckpointError for unknown settings of ``where``, unless null, false, 0 or empty."""
    odd = _unknown(found, _KNOWN[kind])
    if kind == "compressed-tensors" and isinstance(found.get("config_groups"), Mapping):
        for name, group in found["config_groups"].items():
            within = f"config_groups.{name}."
            odd |= _unknown(group, _GROUP, within)
            known = {"weights": _ARGS, "input_activations": _ARGS}
            if found.get("format") == "float-quantized":
                known["weights"] |= {"block_structure"}
            for part, own in known.items():
                args = group.get(part) if isinstance(group, Mapping) else None
                odd |= _unknown(args, own, f"{within}{part}.")
    if odd:
        raise CheckpointError(
            f"{where} ({kind}) has settings unknown to Ingot that may change what the stored weights mean",
            seen=", ".join(f"{key}={_short(value)}" for key, value in sorted(odd.items())),
            fix="use a checkpoint without them, or build from the original one with `quant`; if the "
            "quantizer's authors say that one changes nothing that the model computes, remove it",
        )


def _unknown(found: object, known: Collection[str], within: str = "") -> dict[str, object]:
    """By full name, the settings of an object that are on and not ``known``; nothing of other values."""
    if not isinstance(found, Mapping):
        return {}
    return {f"{within}{key}": value for key, value in found.items() if value and key not in known}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
