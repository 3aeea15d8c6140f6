"""config.json as published: one checkpoint or more per family and era, and the quirks of fine-tunes.

REAL["llama-1"]["model_type"]
"""

from __future__ import annotations

from typing import Any

from tests.unit.real_gemma2 import GEMMA2
from tests.unit.real_gemma3 import GEMMA3
from tests.unit.real_whisper import WHISPER

Config = dict[str, Any]

_LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-06,
    "use_cache": True,
    "vocab_size": 32000,
}
_LLAMA2: Config = _LLAMA | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
}
_LLAMA3: Config = _LLAMA2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "vocab_size": 128256,
}
_LLAMA3_ROPE: Config = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA31: Config = _LLAMA3 | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": _LLAMA3_ROPE,
    "transformers_version": "4.43.0.dev0",
}
_MISTRAL: Config = _LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
}
_QWEN2: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
_QWEN3: Config = _QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.51.0",
    "vocab_size": 151936,
}
_QWEN1: Config = {
    "architectures": ["QWenLMHeadModel"],
    "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"},
    "bf16": False,
    "fp16": False,
    "fp32": False,
    "initializer_range": 0.02,
    "kv_channels": 128,
    "layer_norm_epsilon": 1e-06,
    "model_type": "qwen",
    "no_bias": True,
    "onnx_safe": None,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 8192,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_dynamic_ntk": True,
    "use_flash_attn": "auto",
    "use_logn_attn": True,
    "vocab_size": 151936,
}
_GPT2: Config = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
_OPT: Config = {
    "_name_or_path": "facebook/opt-125m",
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "transformers_version": "4.21.0.dev0",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
# What PretrainedConfig once wrote of every model: defaults of sampling and of other tasks.
_FULL_DUMP: Config = {
    **dict.fromkeys(
        ("bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "finetuning_task")
    ),
    **dict.fromkeys(("decoder_start_token_id", "exponential_decay_length_penalty", "forced_bos_token_id")),
    **dict.fromkeys(("forced_eos_token_id", "pad_token_id", "prefix", "problem_type", "sep_token_id")),
    **dict.fromkeys(("suppress_tokens", "task_specific_params", "tokenizer_class")),
    **dict.fromkeys(("add_cross_attention", "early_stopping", "is_decoder", "is_encoder_decoder"), False),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "torchscript"), False),
    **dict.fromkeys(("remove_invalid_values", "return_dict_in_generate", "tf_legacy_loss"), False),
    **dict.fromkeys(("tie_encoder_decoder", "use_bfloat16"), False),
    **dict.fromkeys(("do_sample", "return_dict"), True),
    **dict.fromkeys(("chunk_size_feed_forward", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("diversity_penalty", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("length_penalty", "repetition_penalty", "typical_p"), 1.0),
    **dict.fromkeys(("num_beam_groups", "num_beams", "num_return_sequences"), 1),
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "max_length": 4096,
    "pruned_heads": {},
    "temperature": 0.6,
    "top_k": 50,
    "top_p": 0.9,
}
_GPTQ: Config = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "quant_method": "gptq"}
_YARN: Config = {"factor": 4.0, "original_max_position_embeddings": 32768}


def _without(config: Config, *keys: str) -> Config:
    return {key: value for key, value in config.items() if key not in keys}


REAL: dict[str, Config] = {
    "llama-1 of 2023-03": _LLAMA
    | {
        "architectures": ["LLaMAForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "max_sequence_length": 2048,
        "pad_token_id": -1,
        "torch_dtype": "float16",
        "transformers_version": "4.27.0.dev0",
    },
    "llama-1": _LLAMA
    | {
        "max_position_embeddings": 2048,
        "max_sequence_length": 2048,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.0.dev0",
    },
    "vicuna-1.5-16k": _LLAMA2
    | {
        "_name_or_path": "vicuna-7b-v1.5-16k",
        "max_sequence_length": 16384,
        "pad_token_id": 0,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
    },
    "llama-2": _LLAMA2,
    "llama-2 with a padding token past the vocabulary": _LLAMA2
    | {"pad_token_id": 32000, "pretraining_tp": 2},
    "llama-2 dumped in full": _FULL_DUMP | _LLAMA2,
    "llama-2 gptq": _LLAMA2 | {"quantization_config": _GPTQ},
    "code-llama": _LLAMA2 | {"max_position_embeddings": 16384, "rope_theta": 1000000, "vocab_size": 32016},
    "yarn-llama-2": _LLAMA2
    | {
        "auto_map": {"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
        "max_position_embeddings": 131072,
        "rope_scaling": {"factor": 32.0, "finetuned": True, "type": "yarn"}
        | {"original_max_position_embeddings": 4096},
    },
    "llama-3": _LLAMA3,
    "llama-3.1": _LLAMA31,
    "llama-3.1 with both names of the type": _LLAMA31 | {"rope_scaling": _LLAMA3_ROPE | {"type": "llama3"}},
    "llama-3.2-1b": _LLAMA31
    | {
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0},
        "tie_word_embeddings": True,
        "transformers_version": "4.45.0.dev0",
    },
    "llama-3.1 by unsloth": _LLAMA31
    | {
        "_attn_implementation_autoset": True,
        "pad_token_id": 128004,
        "unsloth_fixed": True,
        "unsloth_version": "2024.9",
    },
    "llama-3.1 by transformers 5": _without(_LLAMA31, "rope_scaling", "rope_theta", "torch_dtype")
    | {
        "dtype": "bfloat16",
        "head_dim": 128,
        "rope_parameters": _LLAMA3_ROPE | {"rope_theta": 500000.0},
        "transformers_version": "5.0.0",
    },
    "llama-3.1-minitron-width": _LLAMA31 | {"head_dim": 128, "hidden_size": 3072, "intermediate_size": 9216},
    "smollm2": _LLAMA3
    | {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "is_llama_config": True,
        "pad_token_id": 2,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}},
        "vocab_size": 49152,
    },
    "deepseek-coder": _LLAMA2 | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000},
    "qwen written as llama": _LLAMA2
    | {"attention_bias": True, "max_window_layers": 28, "sliding_window": 1024, "use_sliding_window": False},
    "mistral-0.1": _MISTRAL,
    "mistral-0.3": _MISTRAL
    | {"attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
    "mistral-nemo": _MISTRAL
    | {
        "head_dim": 128,
        "hidden_size": 5120,
        "max_position_embeddings": 1024000,
        "num_hidden_layers": 40,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "ministral-8b": _MISTRAL | {"head_dim": 128, "sliding_window": 32768, "vocab_size": 131072},
    "phi-3 written as mistral": _MISTRAL
    | {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "sliding_window": 2048,
        "unsloth_version": "2024.9",
        "vocab_size": 32064,
    },
    "mistral with a pattern and no window": _MISTRAL
    | {"_sliding_window_pattern": 6, "sliding_window": None, "attention_bias": False},
    "qwen1.5": _QWEN2
    | {
        "max_window_layers": 21,
        "num_key_value_heads": 28,
        "sliding_window": 32768,
        "seq_length": 32768,
        "transformers_version": "4.37.0",
    },
    "codeqwen1.5": _QWEN2
    | {"rotary_emb_base": 1000000, "seq_length": 65536, "max_position_embeddings": 65536},
    "qwen2.5": _QWEN2,
    "qwen2.5-0.5b": _QWEN2
    | {
        "eos_token_id": 151643,
        "hidden_size": 896,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "vocab_size": 151936,
    },
    "qwen2.5 with yarn": _QWEN2 | {"rope_scaling": _YARN | {"type": "yarn"}},
    "qwen2.5-1m": _QWEN2
    | {
        "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192},
        "max_position_embeddings": 1010000,
        "rope_theta": 10000000.0,
    },
    "qwen2.5 by transformers 5": _QWEN2
    | {
        "layer_types": ["full_attention"] * 28,
        "sliding_window": None,
        "dtype": "bfloat16",
        "pad_token_id": None,
    },
    "qwen3": _QWEN3,
    "qwen3-2507 with yarn": _QWEN3
    | {
        "max_position_embeddings": 262144,
        "rope_scaling": _YARN | {"rope_type": "yarn", "attention_factor": 1.0},
    },
    "qwen v1.0": _QWEN1
    | {
        "activation": "swiglu",
        "apply_residual_connection_post_layernorm": False,
        "attn_pdrop": 0.0,
        "bias_dropout_fusion": True,
        "bos_token_id": 151643,
        "embd_pdrop": 0.0,
        "eos_token_id": 151643,
        "ffn_hidden_size": 22016,
        "n_embd": 4096,
        "n_head": 32,
        "n_layer": 32,
        "n_positions": 8192,
        "padded_vocab_size": 151936,
        "params_dtype": "torch.bfloat16",
        "pos_emb": "rotary",
        "resid_pdrop": 0.1,
        "seq_length": 2048,
        "tokenizer_type": "QWenTokenizer",
        "transformers_version": "4.31.0",
        "vocab_size": 151851,
    },
    "qwen-72b": _QWEN1
    | {
        "bf16": True,
        "hidden_size": 8192,
        "intermediate_size": 49152,
        "max_position_embeddings": 32768,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "rope_theta": 1000000,
        "rotary_emb_base": 1000000,
        "seq_length": 32768,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
        "vocab_size": 152064,
    },
    "qwen v1.1": _QWEN1
    | {
        "attn_dropout_prob": 0.0,
        "emb_dropout_prob": 0.0,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "softmax_in_fp32": False,
        "tokenizer_class": "QWenTokenizer",
        "transformers_version": "4.32.0",
        "use_cache_kernel": False,
        "use_cache_quantization": False,
    },
    **GEMMA2,
    **GEMMA3,
    **WHISPER,
    "opt-125m": _OPT,
    "opt-66b": _OPT
    | {"_remove_final_layer_norm": False, "enable_bias": True, "layer_norm_elementwise_affine": True}
    | {"ffn_dim": 36864, "hidden_size": 9216, "num_attention_heads": 72, "num_hidden_layers": 64}
    | {"word_embed_proj_dim": 9216},
    "opt without the keys of opt-350m": _without(
        _OPT, "do_layer_norm_before", "word_embed_proj_dim", "prefix", "activation_dropout"
    ),
    "gpt2": _GPT2,
    "gpt2-medium": _GPT2
    | {"n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True},
    "gpt2-xl": _GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
    "distilgpt2": _GPT2
    | {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "n_layer": 6},
    "gpt2 dumped in full": _FULL_DUMP | _GPT2 | {"gradient_checkpointing": False, "n_inner": None},
    "gpt2 with an author": _GPT2
    | {"author": "A. Person", "created_date": "2021-04-28", "license": "CC-BY-NC-SA 4.0"},
    "gpt2 by transformers 5": _without(_GPT2, "n_ctx")
    | {"dtype": "float32", "scale_attn_weights": True, "tie_word_embeddings": True}
    | dict.fromkeys(
        ("add_cross_attention", "reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx"), False
    ),
}
