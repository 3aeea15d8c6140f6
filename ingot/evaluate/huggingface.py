"""Hugging Face's class as the side that is compared with.

Owns this package's only use of ``transformers``: loading its class, its greedy ``generate`` in padded
batches, and its logits. Its defaults hold (attention, cache, eager). Knows no metric.

    HuggingFaceSide(SideSpec(path="checkpoint", kind="hf")).logits(ids)
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ingot.checkpoint.hub import resolve_checkpoint
from ingot.checkpoint.layout import CONFIG, read_json
from ingot.checkpoint.reader import open_checkpoint
from ingot.device import dtype_name, parse_dtype, resolve_device
from ingot.engine.host_room import expect_class_room
from ingot.engine.manifest import is_engine
from ingot.errors import CheckpointError, DeviceError, OutOfMemoryError
from ingot.evaluate.qwen_v1 import QWEN_V1, qwen2_config, qwen2_weights
from ingot.evaluate.side import Generated, SideSpec, longest
from ingot.models.registry import find_architecture
from ingot.runtime.likelihood import target_logprobs

_PAD = 0


class HuggingFaceSide:
    """``AutoModelForCausalLM``; for Qwen v1, which the library does not have, its Qwen2 class."""

    def __init__(self, spec: SideSpec) -> None:
        check_huggingface(spec.path)
        transformers = _transformers()
        start = time.perf_counter()
        self._device = resolve_device(spec.device)
        folder = resolve_checkpoint(spec.path)
        hf = read_json(folder / CONFIG)
        self._dtype = _dtype(hf, spec.dtype, self._device)
        expect_class_room(hf, self._dtype, self._device, fix="leave out --against hf, or use --device cuda")
        self._model = _load(transformers, folder, hf, self._dtype).to(self._device).eval()
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=_PAD)
        self._batch = spec.batch
        self._version = transformers.__version__
        self._load_s = time.perf_counter() - start
        self.max_seq_len = longest(spec)
        self.vocab_size = int(self._model.config.vocab_size)

    def warm_up(self) -> None:
        """One short generation."""
        list(self.generate([[_PAD]], 2, [], []))

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[list[int]], new_tokens: int, stop_ids: Sequence[int], stops: Sequence[str]
    ) -> Iterator[Generated]:
        """In padded batches, in order; a batch runs until its longest answer ends. Stop strings are whoever
        reads the text's to cut at.
        """
        for first in range(0, len(prompts), self._batch):
            part = prompts[first : first + self._batch]
            ids, mask = _padded(part)
            room = self.max_seq_len - ids.shape[1]
            with _memory("--against-batch"):
                out = self._model.generate(
                    ids.to(self._device),
                    attention_mask=mask.to(self._device),
                    max_new_tokens=min(new_tokens, room),
                    do_sample=False,
                    eos_token_id=list(stop_ids) or None,
                )
            for row, tokens in enumerate(out[:, ids.shape[1] :].tolist()):
                end = next((i for i, token in enumerate(tokens) if token in stop_ids), None)
                yield Generated(first + row, tokens[:end], "length" if end is None else "stop")

    @torch.inference_mode()
    def log_likelihood(self, ids: list[int]) -> torch.Tensor:
        """Float32 [num_tokens - 1]."""
        targets = torch.tensor(ids[1:], dtype=torch.int64, device=self._device)
        return target_logprobs(self._logits(ids)[:-1], targets).cpu()

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Float32 [num_tokens, vocab_size]."""
        return self._logits(ids).float().cpu()

    def facts(self) -> dict[str, Any]:
        """Class, versions, dtype."""
        return {
            "class": type(self._model).__name__,
            "transformers": self._version,
            "attention": self._model.config._attn_implementation,
            "dtype": dtype_name(self._dtype),
            "device": str(self._device),
            "max_seq_len": self.max_seq_len,
            "batch": self._batch,
            "load_s": round(self._load_s, 3),
        }

    def close(self) -> None:
        """Free the weights."""
        del self._model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _logits(self, ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size] in the model's dtype, on its device."""
        with _memory("--window"):
            out = self._model(torch.tensor([ids], device=self._device), use_cache=False)
        logits: torch.Tensor = out.logits
        return logits[0]


def check_huggingface(path: str) -> None:
    """Say early what would only fail once this side's turn comes.

    Raises:
        DeviceError: transformers is not installed.
        CheckpointError: the path is an engine.
    """
    if importlib.util.find_spec("transformers") is None:
        raise DeviceError(
            "transformers is not installed, and --against hf needs it", fix="pip install transformers"
        )
    if is_engine(Path(path)):
        raise CheckpointError(
            "Hugging Face's class reads a checkpoint, not an engine",
            seen=path,
            flag="--against hf:CHECKPOINT, with the checkpoint that the engine was built from",
        )


@contextmanager
def _memory(flag: str) -> Iterator[None]:
    """Says which flag takes less memory where the GPU's is too small."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            "Hugging Face's class does not fit the GPU's memory", seen=str(error).split(". ")[0], fix=flag
        ) from None


def _transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _dtype(hf: dict[str, Any], wanted: str, device: torch.device) -> torch.dtype:
    """As Ingot chooses it: the config's own on a GPU, fp32 on a CPU."""
    if wanted != "auto":
        return parse_dtype(wanted)
    named = hf.get("dtype") or hf.get("torch_dtype") or ("bf16" if hf.get("bf16") else "fp16")
    return torch.float32 if device.type == "cpu" else parse_dtype(named)


def _load(transformers: Any, folder: Path, hf: dict[str, Any], dtype: torch.dtype) -> Any:
    try:
        if QWEN_V1 in (hf.get("architectures") or ()):
            return _load_qwen_v1(transformers, folder, hf, dtype)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise CheckpointError(
            "Hugging Face's class cannot load this", seen=f"{folder}: {str(error).splitlines()[0]}"
        ) from None


def _load_qwen_v1(transformers: Any, folder: Path, hf: dict[str, Any], dtype: torch.dtype) -> Any:
    config = find_architecture(hf.get("architectures") or ()).read_config(hf)
    qwen2 = transformers.Qwen2Config(**qwen2_config(config))
    model = transformers.AutoModelForCausalLM.from_config(qwen2, dtype=dtype)
    with open_checkpoint(folder) as checkpoint:
        missing = model.load_state_dict(qwen2_weights(checkpoint), strict=False)
    lost = [name for name in missing.missing_keys if name != "lm_head.weight"]
    if lost or missing.unexpected_keys or (missing.missing_keys and not config.tie_word_embeddings):
        raise ValueError(f"tensors do not fit Qwen2: {[*missing.missing_keys, *missing.unexpected_keys]}")
    return model


def _padded(prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, int64 [prompts, longest], padded on the left."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), _PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask
