"""The package's only use of ``transformers``: whether it has a class, loading that, and its tokenizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ingot.building.random_weights import config_manifest
from ingot.checkpoint.checkpoint_files import CONFIG, read_json
from ingot.checkpoint.checkpoint_reader import open_checkpoint
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE
from ingot.device import parse_dtype
from ingot.engine.assembly import build_config
from ingot.engine.manifest import is_engine
from ingot.errors import CheckpointError, DeviceError, to_install
from ingot.measure.side.freed_memory import gpu_memory, lacks_memory
from ingot.measure.side.qwen_v1 import QWEN_V1, qwen2_config, qwen2_weights
from ingot.measure.side.side_spec import decoder_config
from ingot.memory.host_memory import expect_class_room


def check_huggingface(path: str | None, field: str = "against") -> None:
    """Raise DeviceError if transformers is not installed, CheckpointError if the path is an engine."""
    _need_transformers(f"`{field}=hf`", "pip install transformers")
    if path is not None and is_engine(Path(path)):
        raise CheckpointError(
            "Hugging Face's class reads a checkpoint, not an engine",
            seen=path,
            field=field,
            fix=f"`{field}=hf:CHECKPOINT`, with the checkpoint that the engine was built from",
        )


def check_class(folder: Path) -> str | None:
    """Why there is no class for this checkpoint; None if there is one."""
    fix = f"{to_install('align')}, or `original=ingot` for Ingot's own fp32 path"
    _need_transformers("`original=hf`", fix)
    kind = str(class_config(folder).get("model_type"))
    missing = f"transformers {version('transformers')} has no class for {kind!r}"
    library = importlib.util.find_spec("transformers")
    roots = (library.submodule_search_locations if library is not None else None) or ()
    folders = {kind.replace("-", "_"), kind.replace("-", "_").removesuffix("_text")}
    if not any((Path(root) / "models" / name).is_dir() for root in roots for name in folders):
        return missing  # without the import, which takes a second
    import transformers

    names = transformers.models.auto.modeling_auto
    known = {*names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *names.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES}
    return None if kind in known else missing


def load_class(
    source: Path,
    dtype: torch.dtype,
    device: torch.device,
    fix: str,
    *,
    is_random: bool = False,
    num_layers: int | None = None,
    widest: torch.dtype | None = None,
    attention: str | None = None,
    instead: str | None = None,
) -> Any:
    """The class on the device, if there is room for it.

    Args:
        source: a checkpoint's folder; with ``is_random`` a config.json or its folder.
        fix: advice that takes less of a CPU's memory.
        num_layers: how many of the first layers are kept; None: all.
        widest: dtype that it will be cast to, if wider than ``dtype``.
        attention: of ``transformers``; None: the class's default.
        instead: a value of ``original`` to advise if the class cannot load the checkpoint.

    Raises:
        OutOfMemoryError: it does not fit.
        CheckpointError: the class cannot load the checkpoint.
    """
    hf = class_config(source)
    expect_class_room(hf, widest or dtype, device, fix, num_layers)
    options = {"attn_implementation": attention} if attention else {}
    with class_memory("a larger GPU, or `device=cpu`"):
        try:
            model = _read(source, hf, dtype, device, options, num_layers, is_random=is_random)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            if lacks_memory(error):
                raise
            why = next(iter(str(error).splitlines()), type(error).__name__)
            what = "Hugging Face's class cannot load this"
            at_fault = None if instead is None else "original"
            advice = None if instead is None else f"`original={instead}`"
            raise CheckpointError(what, seen=f"{source}: {why}", field=at_fault, fix=advice) from None
        return model.to(device).eval()


def class_log_mel(samples: torch.Tensor, mels: int) -> torch.Tensor:
    """Features [mels, N // 160] of samples [N] at 16 kHz, by Whisper's feature extractor."""
    found = class_features(mels)(samples.numpy(), sampling_rate=16000, padding=False, truncation=False)
    return torch.from_numpy(found["input_features"][0])


def class_memory(fix: str) -> AbstractContextManager[None]:
    return gpu_memory("Hugging Face's class does not fit", fix)


def class_features(mels: int) -> Any:
    return _transformers().WhisperFeatureExtractor(feature_size=mels)


def generation_defaults(pad: int) -> Any:
    """A generation config that has no end token."""
    return _transformers().GenerationConfig(pad_token_id=pad)


def transformers_version() -> str:
    return version("transformers")


def generation_config(folder: Path | None, **values: Any) -> Any:
    """The folder's generation config, or one of ``values`` if it has none for speech."""
    kind = _transformers().GenerationConfig
    if folder is not None and (folder / "generation_config.json").is_file():
        found = kind.from_pretrained(folder, local_files_only=True)
        if getattr(found, "no_timestamps_token_id", None) is not None:
            return found
    return kind(**values)


class ClassTokenizer:
    """Hugging Face's tokenizer of a folder."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, folder: Path) -> ClassTokenizer | None:
        only_tiktoken = (folder / "qwen.tiktoken").is_file() and not (folder / "tokenizer.json").is_file()
        if importlib.util.find_spec("transformers") is None or only_tiktoken:  # Qwen v1's own code reads it
            return None
        try:
            return cls(_transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True))
        except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError):
            return None

    def ids(self, text: str) -> list[int]:
        """Text → ids, special tokens added as its files say."""
        found: list[int] = self._tokenizer(text)["input_ids"]
        return found

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]] | None:
        """Messages → prompt and ids; None without a chat template."""
        if not self._tokenizer.chat_template:
            return None
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text, self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _need_transformers(named: str, fix: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise DeviceError(f"transformers is not installed, and {named} needs it", fix=fix)


def _transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def class_config(source: Path) -> dict[str, Any]:
    return read_json(source / CONFIG if source.is_dir() else source)


def class_dtype(source: Path, wanted: str, device: torch.device, *, is_random: bool) -> torch.dtype:
    """As Ingot chooses it: on a GPU the weights' dtype, or the config's without weights; fp32 on a CPU."""
    if wanted != "auto":
        return parse_dtype(wanted)
    if device.type == "cpu":
        return torch.float32
    if is_random:
        return parse_dtype(config_manifest(source, wanted).build.dtype)
    with open_checkpoint(source) as checkpoint:
        return parse_dtype(build_config(checkpoint, wanted, DEFAULT_MAX_BATCH_SIZE, None, None).dtype)


def _read(
    source: Path,
    hf: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    options: dict[str, Any],
    num_layers: int | None,
    *,
    is_random: bool,
) -> Any:
    """The class, with random weights made on the device, or others read on the CPU."""
    transformers = _transformers()
    takes_speech = hf.get("model_type") == "whisper"
    auto = transformers.AutoModelForSpeechSeq2Seq if takes_speech else transformers.AutoModelForCausalLM
    is_qwen_v1 = QWEN_V1 in (hf.get("architectures") or ())
    if is_qwen_v1:
        config = transformers.Qwen2Config(**qwen2_config(decoder_config(hf)))
    elif is_random:
        values = {k: v for k, v in hf.items() if k not in ("model_type", "dtype", "torch_dtype")}
        config = transformers.AutoConfig.for_model(hf.get("model_type"), **values)
    else:
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    if num_layers is not None and takes_speech:
        config.decoder_layers = num_layers
    elif num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    if is_random:
        with device:
            return auto.from_config(config, dtype=dtype, **options)
    if is_qwen_v1:
        with open_checkpoint(source) as checkpoint:
            weights = qwen2_weights(checkpoint)
        if "lm_head.weight" in weights:  # a stored head is used, whatever the config says
            config.tie_word_embeddings = False
        model = auto.from_config(config, dtype=dtype, **options)
        missing = model.load_state_dict(weights, strict=False)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        odd = [*(name for name in missing.missing_keys if name not in tied), *missing.unexpected_keys]
        if odd:
            raise ValueError(f"tensors do not fit Qwen2: {odd}")
        return model
    return auto.from_pretrained(source, config=config, dtype=dtype, local_files_only=True, **options)
