"""Checkpoint → engine folder, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ingot.building.calibration.calibration_cache import cache_path
from ingot.building.calibration.calibration_data import SAMPLES, CalibrationData, SampleFile
from ingot.building.calibration.input_statistics import SeenInputs
from ingot.building.calibration.quantize import (
    Outcome,
    calibration_entry,
    warn_of_few,
    write_calibrated,
)
from ingot.building.calibration.sample_readers import read_samples, reader_of
from ingot.building.golden.golden_cases import make_proof
from ingot.building.source.source_check import compare_with_source
from ingot.building.tuner import tune_model
from ingot.checkpoint.checkpoint_files import CONFIG
from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.checkpoint.minigpt4_files import MiniGPT4Files
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE, BuildConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.quant_file import read_quant
from ingot.device import parse_dtype, resolve_device
from ingot.engine.assembly import Assembly, build_config, make_manifest
from ingot.engine.engine_loader import expect_schemes
from ingot.engine.engine_text import TextParts, read_text_parts
from ingot.engine.manifest import MANIFEST_FILE, PLAN_FILE, PROOF_FILE, TOKENIZER_FOLDER, WEIGHTS_FILE
from ingot.engine.plan_file import plan_text, read_plan
from ingot.engine.proof_file import Proof, write_when
from ingot.engine.source_figures import SourceFigures
from ingot.engine.staging import new_parents, staged_folder
from ingot.engine.weights_file import WeightsWriter
from ingot.errors import BuildError, ConfigError
from ingot.layers.decoder import Decoder
from ingot.memory.host_memory import dense_bytes, expect_room
from ingot.memory.memory_sizes import largest_weight_bytes

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
Finish = Callable[[Path], None]


def build(
    checkpoint: str | Path | MiniGPT4Files,
    engine: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    max_seq_len: int | None = None,
    layers: str | tuple[int, int] | None = None,
    kv_dtype: str = "model",
    quant: str | QuantConfig = "none",
    calib: str | Path | None = None,
    calib_samples: int | None = None,
    calib_prompt_seed: int | None = None,
    chat_template: str | None = None,
    tokenizer: str | Path | None = None,
    plan: str | Path | None = None,
    tune: bool = True,
    proof: bool = True,
    revision: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    tune_progress: Progress | None = None,
    proof_progress: Progress | None = None,
    finish: Finish | None = None,
) -> Path:
    """Build an engine folder from a checkpoint folder, a Hugging Face id, a GGUF file, a ``.pt`` file of
    OpenAI's Whisper, or the files of a MiniGPT-4; returns the folder.

    The same checkpoint, arguments and version give the same bytes on the same machine in every file but
    verify.json, which has the time, and a plan.json that a GPU measured. On another machine the proof and
    calibrated weights follow its arithmetic. A build that fails or is interrupted leaves nothing behind, and
    an engine that was there stays as it was.

    Args:
        dtype: ``fp16``, ``bf16``, ``fp32``, or ``auto``: the checkpoint's own. A model with an encoder takes
            one for each half, too: ``encoder=fp16,decoder=fp32``; a half that is not named is ``auto``.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N``: where kernels are tuned, the proof is computed, and
            schemes that compute when they pack do so. Weights that are only copied need none.
        max_batch_size: most requests in one step.
        max_seq_len: most tokens of one request, prompt and output; None: the model's own, at most 8192.
        layers: ``"0:1"`` keeps only these decoder layers.
        kv_dtype: what the KV cache holds by default: ``model`` (the engine's dtype) or ``int8``.
        quant: a scheme's name, a YAML file of ``QuantConfig``'s fields, or a config.
        calib: a file of samples, for a method of ``quant`` that calibrates (calibration_data.py), or of their
            embeddings (calibration_rows.py); of a speech model recordings (speech_samples.py).
        calib_samples: most samples to take of it, evenly spread, each cut to 512 tokens, or windows of
            speech; None: 128.
        calib_prompt_seed: draws the question about each captioned picture from the four of MiniGPT-4's
            training; None: the first, in the chat format.
        chat_template: ``chatml``, ``vicuna``, ``vicuna-v0`` or a Jinja file, instead of the checkpoint's own.
        tokenizer: a folder with another tokenizer (and chat template) than the checkpoint's, of at most as
            many tokens as the embedding has rows.
        plan: a plan.json to take as it is; nothing is measured.
        tune: on a GPU, measure tile choices for the kernel plan, as ``tune`` does; else the plan is empty.
        proof: compare the stored tensors with the checkpoint, and store golden cases; else it is unproven.
        revision: branch, tag or commit of a hub id.
        force: replace an engine that is already there.
        progress: called as (tensor name, bytes done, bytes in all).
        tune_progress: called as (what is measured, steps done, steps in all).
        proof_progress: called as (what, done, in all) while golden cases and noise floors are made.
        finish: called with the finished engine before it is moved to its place; an error ends the build.

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit its architecture.
        BuildError: the target cannot be written, or what was written is not what the checkpoint holds.
        ConfigError: an argument is out of range.
        DeviceError: there is no such device, it is too old for a scheme, or it cannot measure (``tune``).
        OutOfMemoryError: the host lacks the memory.
    """
    target = Path(engine)
    place = resolve_device(device)
    chosen = read_quant(quant)
    original: Path | MiniGPT4Files
    if isinstance(checkpoint, MiniGPT4Files):
        original = checkpoint
    else:
        original = resolve_checkpoint(checkpoint, revision=revision)
    with open_checkpoint(original) as source:
        config = build_config(source, dtype, max_batch_size, max_seq_len, layers)
        config = config.replace(kv_dtype=kv_dtype)
        assembly = Assembly.of(source, config, chosen)
        expect_schemes(assembly.quant, place)
        text = _read_text(source, original, assembly, chat_template, tokenizer)
        data = _calibration(assembly, calib, calib_samples, calib_prompt_seed, source, text, place)
        _expect_room(assembly, data, place)
        kept_plan = read_plan(Path(plan)) if plan is not None else None
        try:
            size = _size(assembly, text)
            with new_parents(target), staged_folder(target, force=force, size=size) as folder:
                if kept_plan is None and tune and place.type == "cuda":
                    kept_plan = tune_model(assembly.model, config, place, progress=tune_progress).plan
                kept_plan = kept_plan or KernelPlan()
                ranges = cache_path(target)
                seen = _write(folder, source, assembly, text, data, kept_plan, place, progress, ranges)
                source.close()  # its mapped pages count as memory
                if proof:
                    _prove(folder, original, assembly, config, text, place, proof_progress)
                if finish is not None:
                    finish(folder)
            if seen is not None:
                seen.keep()
        except OSError as error:
            raise BuildError("cannot write to the engine's folder", seen=error, fix="-o") from error
    return target


def _read_text(
    source: Checkpoint,
    original: Path | MiniGPT4Files,
    assembly: Assembly,
    chat_template: str | None,
    tokenizer: str | Path | None,
) -> TextParts:
    """The text side; what a user should know of it, of the weights and of their formats is logged."""
    vocab_size = assembly.model_config.vocab_size
    for note in assembly.notes(source):
        _log.warning("%s: %s", original, note)
    text = read_text_parts(source, chat_template, tokenizer, vocab_size)
    for note in text.notes(vocab_size):
        _log.warning("%s: %s", original, note)
    return text


def _prove(
    folder: Path,
    original: Path | MiniGPT4Files,
    assembly: Assembly,
    config: BuildConfig,
    text: TextParts,
    place: torch.device,
    progress: Progress | None,
) -> None:
    """Compare what was stored with the checkpoint, and store golden cases where a model has some."""
    figures = _compared(folder, original, assembly.model, place, progress)
    start = time.perf_counter()
    found = make_proof(folder, assembly.model, config, text.tokenizer, place, progress)
    if found is not None:
        found = Proof.of(found.claims.replace(source=figures), found.made)
        (folder / PROOF_FILE).write_text(found.dump(), encoding="utf-8")
        write_when(folder, round(time.perf_counter() - start, 3))


def _size(assembly: Assembly, text: TextParts) -> int:
    weights = sum(t.numel() * t.element_size() for t in assembly.layout().values())
    return weights + sum(file.stat().st_size for file in text.files) + (1 << 20)


def _write(
    folder: Path,
    source: Checkpoint,
    assembly: Assembly,
    text: TextParts,
    data: CalibrationData | None,
    plan: KernelPlan,
    device: torch.device,
    progress: Progress | None,
    ranges: Path,
) -> SeenInputs | None:
    """Write the folder except for its proof; returns activation ranges that can be kept in ``ranges``."""
    layout = assembly.layout()
    total = sum(t.numel() * t.element_size() for t in layout.values())
    done = 0

    def report(what: str) -> None:
        if progress is not None:
            progress(what, done, total)

    def write(name: str, tensor: torch.Tensor) -> None:
        nonlocal done
        writer.add(name, tensor)
        done += tensor.numel() * tensor.element_size()
        report(name)

    try:
        seen = Outcome()
        with WeightsWriter(folder / WEIGHTS_FILE, layout) as writer:
            if data is not None:
                seen = write_calibrated(assembly, source, data, device, write, ranges, report)
            else:
                for name, tensor in assembly.tensors(source, device):
                    write(name, tensor)
        files = _copy_text(folder / TOKENIZER_FOLDER, text)
        calibration = None if data is None else calibration_entry(data, assembly.build, seen.ranges)
        manifest = make_manifest(assembly, source, text)
        manifest = manifest.replace(tensors=writer.entries, files=files, calibration=calibration)
        (folder / PLAN_FILE).write_text(plan_text(plan), encoding="utf-8")
        (folder / MANIFEST_FILE).write_text(manifest.dump(), encoding="utf-8")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else "the engine cannot be written"
        fix = "nothing was kept; free space or choose another -o"
        raise BuildError(what, seen=f"{error}", fix=fix) from error
    return seen.kept


def _calibration(
    assembly: Assembly,
    calib: str | Path | None,
    samples: int | None,
    prompt_seed: int | None,
    source: Checkpoint,
    text: TextParts,
    device: torch.device,
) -> CalibrationData | None:
    """The samples of a method that needs them; ConfigError where one of method and file is missing."""
    quant, modality = assembly.quant, assembly.model_config.modality
    if quant.calibrated and calib is None:
        raise ConfigError(
            "this method needs calibration data",
            seen=quant.needs_samples,
            allowed=reader_of(modality).shapes,
            field="calib",
            fix="`calib=FILE`",
        )
    if not quant.calibrated and (calib, samples, prompt_seed) != (None, None, None):
        named = {"calib": calib, "calib_samples": samples, "calib_prompt_seed": prompt_seed}
        name, value = next((name, value) for name, value in named.items() if value is not None)
        raise ConfigError(
            "this build uses no calibration data",
            seen=f"{name}={value}",
            field="quant",
            fix="`quant` with `method` gptq, awq or smoothquant, or with `activations=static`; "
            f"or leave out `{name}`",
        )
    if calib is None:
        return None
    count = SAMPLES if samples is None else samples
    data = read_samples(SampleFile(Path(calib), count, assembly, source, text, device, prompt_seed))
    warn_of_few(data, assembly)
    return data


def _expect_room(assembly: Assembly, data: CalibrationData | None, device: torch.device) -> None:
    """Check the host's memory: the largest weight twice, or a layer in fp32 with all samples on a CPU."""
    config = assembly.model_config
    size = 2 * largest_weight_bytes(config, parse_dtype(assembly.build.dtypes.wider))
    if data is not None and device.type == "cpu":
        layer = dense_bytes(config.replace(num_layers=1), torch.float32)
        encoded = 0 if config.encoder is None else len(data.features) * config.encoder.max_positions
        rows = max(data.num_tokens, encoded)
        size = max(size, layer + 2 * rows * config.hidden_size * torch.float32.itemsize)
    fix = "free some of it" if data is None else "fewer `calib_samples`"
    expect_room("the build does not fit this machine's memory", size, fix)


def _compared(
    folder: Path,
    checkpoint: Path | MiniGPT4Files,
    model: Decoder,
    device: torch.device,
    progress: Progress | None,
) -> SourceFigures:
    """How far the stored tensors are from the checkpoint's; BuildError where rounding does not explain it."""
    found = compare_with_source(folder, checkpoint, device, progress, model)
    if found.differences:
        first, more = found.differences[0], len(found.differences) - 1
        raise BuildError(
            "a stored tensor is not what the checkpoint holds, so the build was discarded",
            seen=first.text + (f"; and {more} more" if more else ""),
            allowed="what rounding explains: at most 1 times a limit",
            fix="`device=cpu` or another `quant`; and report it, for a packer or a weight map is wrong",
        )
    return found.figures


def _copy_text(folder: Path, text: TextParts) -> dict[str, str]:
    """Copy tokenizer and template files; returns their hashes by name."""
    if not text.files:
        return {}
    folder.mkdir()
    hashes = {}
    for file in sorted(text.files, key=lambda f: text.name_of(f)):
        name = text.name_of(file)
        shutil.copyfile(file, folder / name)
        hashes[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    if text.model_config is not None:
        data = json.dumps(text.model_config, indent=1).encode()
        (folder / CONFIG).write_bytes(data)
        hashes[CONFIG] = hashlib.sha256(data).hexdigest()
    return hashes
