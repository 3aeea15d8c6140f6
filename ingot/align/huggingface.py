"""Hugging Face's class as the original.

Owns the only use of ``transformers`` in the package: loading its class in a precision, running it under a
trace, and its tokenizer. Knows no verdict.

    name, choices = record_class(folder, device, None, noise, paths, cases, steps=4)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ingot.align.precision import Precision, round_weights
from ingot.align.stages import hf_patterns
from ingot.align.trace import run_steps, trace
from ingot.checkpoint.layout import CONFIG, read_json
from ingot.engine.host_room import expect_class_room
from ingot.engine.int8_inputs import Int8Input, rounding
from ingot.errors import CheckpointError, DeviceError


def check_class(folder: Path) -> str | None:
    """Why there is no class for this checkpoint; None where there is one.

    Raises:
        DeviceError: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise DeviceError(
            "transformers is not installed, and --original hf needs it",
            fix="pip install 'ingot[align]', or --original ingot for Ingot's own fp32 path",
        )
    kind = str(read_json(folder / CONFIG).get("model_type"))
    missing = f"transformers {version('transformers')} has no class for {kind!r}"
    if not _has_package(kind):  # read from the disk: the import takes a second, and is of no use then
        return missing
    import transformers

    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return None if kind in known else missing


def _has_package(kind: str) -> bool:
    found = importlib.util.find_spec("transformers")
    roots = (found.submodule_search_locations if found is not None else None) or ()
    return any((Path(root) / "models" / kind.replace("-", "_")).is_dir() for root in roots)


def record_class(
    folder: Path,
    device: torch.device,
    num_layers: int | None,
    noise: Precision,
    paths: Sequence[tuple[Path, Path]],
    cases: Sequence[Sequence[int]],
    steps: int,
    inputs: Sequence[Int8Input] = (),
) -> tuple[str, list[list[int]]]:
    """Trace the class on every case in fp32, and then, loaded no second time, in another precision.

    Args:
        paths: of each case the file in fp32 and the one with noise.
        inputs: of the products that round them to 8 bits; with noise the closest calls go the other way.

    Returns:
        The class's name and the greedy choices of each case in fp32, which both runs are fed.

    Raises:
        CheckpointError: the class cannot load the checkpoint.
    """
    widest = max(torch.float32, noise.compute, key=lambda dtype: dtype.itemsize)
    fix = "--device cuda, or a trace as --reference"
    expect_class_room(read_json(folder / CONFIG), widest, device, fix, num_layers)
    model = _load(folder, num_layers).to(device)
    names = hf_patterns(name for name, _ in model.named_modules())
    choices = []
    for (path, _), ids in zip(paths, cases, strict=True):
        with trace(model, path, names), rounding(model, inputs):
            choices.append(run_steps(model, ids, steps))
    _lower(model, noise)
    for (_, path), ids, forced in zip(paths, cases, choices, strict=True):
        with trace(model, path, names), rounding(model, inputs, flips=True):
            run_steps(model, ids, steps, forced)
    return type(model).__name__, choices


def _load(folder: Path, num_layers: int | None) -> Any:
    """The class in fp32, which holds every value of a checkpoint."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        _cut(config, num_layers)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise CheckpointError(
            "Hugging Face's class cannot load this",
            seen=f"{folder}: {str(error).splitlines()[0]}",
            flag="--original ingot",
        ) from None
    return model.eval()


def _lower(model: Any, precision: Precision) -> None:
    """Round a model in fp32 where it stands, and compute so."""
    if precision.compute == torch.float64:  # eager attention has an fp32 softmax inside
        model.set_attn_implementation("sdpa")
    round_weights(model, precision.weights)
    # not the buffers: rotary frequencies stay fp32, as when it is loaded
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.compute)


def _cut(config: Any, num_layers: int | None) -> None:
    """Keep the first layers only."""
    if num_layers is None:
        return
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


def _is_tiktoken(folder: Path) -> bool:
    """Whether only Qwen v1's own code reads the tokenizer."""
    return (folder / "qwen.tiktoken").is_file() and not (folder / "tokenizer.json").is_file()


class ClassTokenizer:
    """Hugging Face's tokenizer of a folder."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, folder: Path) -> ClassTokenizer | None:
        """None where transformers is missing or has none for it."""
        if importlib.util.find_spec("transformers") is None or _is_tiktoken(folder):
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
