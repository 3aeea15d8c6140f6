"""Hugging Face's class as the side that is compared with.

Owns the only use of ``transformers`` in the package: loading its class and reading when its tokens arrive.
Its defaults hold (attention, cache, eager); requests run in padded batches, as its ``generate`` takes them.
Knows no measurement.

    HuggingFaceSide(SideSpec(kind="hf", path="checkpoint")).answer(asks, prompts)
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.bench.load import Ask, PromptSource
from ingot.bench.memory import Memory, forget_peak, peak_bytes
from ingot.bench.run import Run
from ingot.bench.side import SideSpec
from ingot.bench.work import Work, weight_bytes
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.checkpoint.layout import CONFIG, read_json
from ingot.config.build import DEFAULT_MAX_SEQ_LEN
from ingot.device import dtype_name, parse_dtype, resolve_device
from ingot.engine.host_room import expect_class_room
from ingot.engine.manifest import is_engine
from ingot.errors import CheckpointError, DeviceError
from ingot.models.registry import find_architecture

_PAD = 0


class HuggingFaceSide:
    """``AutoModelForCausalLM.generate``, greedy."""

    name = "huggingface"

    def __init__(self, spec: SideSpec) -> None:
        check_huggingface(spec)
        transformers = _transformers()
        start = time.perf_counter()
        self.device = resolve_device(spec.device)
        folder = _source(spec)
        hf = read_json(folder / CONFIG if folder.is_dir() else folder)
        config = find_architecture(hf.get("architectures") or ()).read_config(hf)
        self.dtype = _dtype(hf, spec.dtype, self.device)
        expect_class_room(hf, self.dtype, self.device, fix="leave out --against hf, or use --device cuda")
        self._model = _load(
            transformers, folder, hf, self.dtype, self.device, random=spec.random_weights is not None
        )
        self._version = transformers.__version__
        self._load_s = time.perf_counter() - start
        self._warm_up_s = 0.0
        self.vocab_size = config.vocab_size
        self.max_batch_size = spec.max_batch_size
        self.max_seq_len = min(config.max_positions, spec.max_seq_len or DEFAULT_MAX_SEQ_LEN)
        tables = [m for m in self._model.modules() if isinstance(m, torch.nn.Embedding)]
        read = weight_bytes(self._model, [*tables], self._model.get_output_embeddings())
        self.work = Work.of(config, read, self.dtype)

    def resize(self, batch: int) -> None:
        """Padded batches of ``batch`` rows from now on."""
        forget_peak(self.device)
        self.max_batch_size = batch

    def make_room(self, requests: int, tokens: int) -> None:
        """Nothing: ``generate`` makes a cache for each batch."""

    def memory(self) -> Memory:
        """Bytes of weights, of the keys and values of a batch of the longest requests, and the peak since the
        last ``resize``.
        """
        return Memory(
            weights=sum(p.nbytes for p in self._model.parameters()),
            cache=self.max_batch_size * self.max_seq_len * self.work.kv_bytes,
            peak=peak_bytes(self.device),
        )

    def warm_up(self, most: int) -> None:
        """One short generation."""
        start = time.perf_counter()
        asks = [Ask(1, 2)] * min(most, self.max_batch_size)
        self.answer(asks, PromptSource(self.vocab_size, -1).prompts(asks))
        self._warm_up_s += time.perf_counter() - start

    def answer(self, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
        """In batches of ``max_batch_size`` in order; a batch runs until its longest answer ends."""
        arrivals: list[list[float]] = []
        start = time.perf_counter()
        for first in range(0, len(asks), self.max_batch_size):
            part = slice(first, first + self.max_batch_size)
            most = max(a.new_tokens for a in asks[part])
            times = self._generate(prompts[part], most)
            arrivals += [times[: a.new_tokens] for a in asks[part]]
        return Run.of(start, arrivals, time.perf_counter())

    def facts(self) -> dict[str, Any]:
        """Versions, start-up, memory."""
        found = {
            "class": type(self._model).__name__,
            "transformers": self._version,
            "attention": self._model.config._attn_implementation,
            "dtype": dtype_name(self.dtype),
            "load_s": round(self._load_s, 3),
            "warm_up_s": round(self._warm_up_s, 3),
            "max_batch_size": self.max_batch_size,
        }
        if self.device.type == "cuda":
            found["peak_gpu_gb"] = round(torch.cuda.max_memory_allocated(self.device) / 1e9, 3)
        return found

    def _generate(self, prompts: Sequence[list[int]], new_tokens: int) -> list[float]:
        """When each token of a batch arrived on the host; prompts are padded on the left."""
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), _PAD)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        arrivals = _Arrivals()
        with torch.inference_mode():
            self._model.generate(
                ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=_PAD,
                streamer=arrivals,
            )
        return arrivals.times


class _Arrivals:
    """A streamer that notes when ``generate`` hands over the tokens of a step; the first are the prompt."""

    def __init__(self) -> None:
        self._seen_prompt = False
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Tokens, already on the host."""
        if self._seen_prompt:
            self.times.append(time.perf_counter())
        self._seen_prompt = True

    def end(self) -> None:
        """Nothing is left to flush."""


def _source(spec: SideSpec) -> Path:
    """The checkpoint's folder, or the config of random weights."""
    if spec.random_weights is not None:
        return Path(spec.random_weights)
    assert spec.path is not None
    return resolve_checkpoint(spec.path)


def _dtype(hf: dict[str, Any], wanted: str, device: torch.device) -> torch.dtype:
    """As Ingot chooses it: the config's own on a GPU, fp32 on a CPU."""
    if wanted != "auto":
        return parse_dtype(wanted)
    named = hf.get("dtype") or hf.get("torch_dtype") or "fp16"
    return torch.float32 if device.type == "cpu" else parse_dtype(named)


def check_huggingface(spec: SideSpec) -> None:
    """Say early what would only fail once this side's turn comes.

    Raises:
        DeviceError: transformers is not installed.
        CheckpointError: the path is an engine.
    """
    if importlib.util.find_spec("transformers") is None:
        raise DeviceError(
            "transformers is not installed, and --against hf needs it", fix="pip install transformers"
        )
    if spec.path is not None and is_engine(Path(spec.path)):
        raise CheckpointError(
            "Hugging Face's class reads a checkpoint, not an engine",
            seen=spec.path,
            flag="--against hf:CHECKPOINT, or measure the checkpoint itself",
        )


def _transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _load(
    transformers: Any,
    source: Path,
    hf: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    random: bool,
) -> Any:
    """The model on the device, with a generation config that never ends early."""
    auto = transformers.AutoModelForCausalLM
    try:
        if random:
            values = {k: v for k, v in hf.items() if k not in ("model_type", "dtype", "torch_dtype")}
            config = transformers.AutoConfig.for_model(hf.get("model_type"), **values)
            with device:
                model = auto.from_config(config, dtype=dtype)
        else:
            model = auto.from_pretrained(source, dtype=dtype, local_files_only=True).to(device)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            "Hugging Face's class cannot load this", seen=f"{source}: {str(error).splitlines()[0]}"
        ) from None
    model.generation_config = transformers.GenerationConfig(pad_token_id=_PAD)
    return model.eval()
