"""Hugging Face's class as the original.

Owns the only use of ``transformers`` in the package: loading its class in a precision, running it under a
trace, and its tokenizer. Knows no verdict.

    name, choices = record_class(folder, device, None, PLAIN, paths, cases, steps=4, forced=None)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.align.precision import Precision, round_weights
from ingot.align.stages import hf_patterns
from ingot.align.trace import run_steps, trace
from ingot.checkpoint.layout import CONFIG, read_json
from ingot.errors import CheckpointError, DeviceError


def check_class(folder: Path) -> str | None:
    """Why there is no class for this checkpoint; None where there is one.

    Raises:
        DeviceError: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise DeviceError(
            "transformers is not installed, and the original is Hugging Face's class",
            fix="pip install 'ingot[align]', or --original ingot for our own fp32 path",
        )
    import transformers

    kind = read_json(folder / CONFIG).get("model_type")
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return None if kind in known else f"transformers {transformers.__version__} has no class for {kind!r}"


def record_class(
    folder: Path,
    device: torch.device,
    num_layers: int | None,
    precision: Precision,
    paths: Sequence[Path],
    cases: Sequence[Sequence[int]],
    steps: int,
    forced: Sequence[list[int]] | None,
) -> tuple[str, list[list[int]]]:
    """Trace the class on every case; returns its name and the greedy choices of each.

    Raises:
        CheckpointError: the class cannot load the checkpoint.
    """
    model = _load(folder, num_layers, precision).to(device)
    names = hf_patterns(name for name, _ in model.named_modules())
    choices = []
    for i, (path, ids) in enumerate(zip(paths, cases, strict=True)):
        with trace(model, path, names):
            choices.append(run_steps(model, ids, steps, None if forced is None else forced[i]))
    return type(model).__name__, choices


def _load(folder: Path, num_layers: int | None, precision: Precision) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wide = precision.compute == torch.float64  # eager attention has an fp32 softmax inside
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        _cut(config, num_layers)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa" if wide else "eager",
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise CheckpointError(
            "Hugging Face's class cannot load this",
            seen=f"{folder}: {str(error).splitlines()[0]}",
            fix="--original ingot",
        ) from None
    round_weights(model, precision.weights)
    for (
        parameter
    ) in model.parameters():  # not the buffers: rotary frequencies stay fp32, as when it is loaded
        parameter.data = parameter.data.to(precision.compute)
    return model.eval()


def _cut(config: Any, num_layers: int | None) -> None:
    """Keep the first layers only."""
    if num_layers is None:
        return
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


class ClassTokenizer:
    """Hugging Face's tokenizer of a folder."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, folder: Path) -> ClassTokenizer | None:
        """None where transformers is missing, or cannot load one."""
        if importlib.util.find_spec("transformers") is None:
            return None
        import transformers

        transformers.logging.set_verbosity_error()
        try:
            return cls(transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True))
        except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError):
            return None

    def ids(self, text: str) -> list[int]:
        """Text → ids, special tokens added as its files say."""
        found: list[int] = self._tokenizer(text)["input_ids"]
        return found

    def chat(self, messages: Sequence[dict[str, Any]]) -> tuple[str, list[int]] | None:
        """Messages → prompt and ids; None without a chat template."""
        if not self._tokenizer.chat_template:
            return None
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text, self._tokenizer(text, add_special_tokens=False)["input_ids"]
