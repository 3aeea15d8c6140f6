"""Precision by batch: speed, memory and quality of one checkpoint, up to the size that no longer fits."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ingot.building.ledger_source import read_setting
from ingot.checkpoint.checkpoint_files import CONFIG
from ingot.checkpoint.hub import resolve_checkpoint
from ingot.config.build_config import NARROW_KV_DTYPES
from ingot.config.decoder_config import DecoderConfig
from ingot.config.modality import expect_text
from ingot.config.quantization.quant_file import read_quant
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import dtype_name, parse_dtype, resolve_device
from ingot.engine.manifest import is_engine
from ingot.errors import ConfigError
from ingot.measure.bench.kernel_bench.kernel_times import read_shape
from ingot.measure.bench.latency import Latency, check_length
from ingot.measure.bench.sweep.sweep_line import (
    AUTO_MOST,
    DOES_NOT_FIT,
    OK,
    LineWanted,
    Progress,
    Quality,
    SweepLine,
    doubling,
    measure_apart,
)
from ingot.measure.bench.sweep.sweep_record import record_of
from ingot.measure.bench.sweep.sweep_store import Store
from ingot.measure.bench.transcription_speed import TranscriptionBench
from ingot.measure.side.machine import machine
from ingot.measure.side.open_side import Say, check_classes, silent
from ingot.measure.side.side_spec import HUGGINGFACE, SideSpec, against_parts
from ingot.speech.recording_features import mel_bins

Measure = Callable[[SweepLine, LineWanted, Quality | None], Iterator[Progress]]
Record = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """What is measured.

    Attributes:
        spec: the model and the device; its dtype and sizes are not read.
        dtypes: of arithmetic; ``auto``: the model's own, fp32 on a CPU.
        quants: linear schemes, YAML files of them, or schemes of both halves of a speech model.
        kv_dtypes: of the KV cache, as in ``RuntimeConfig``.
        batches: sizes; empty: 1, 2, 4 and so on until one does not fit, or has all clips.
        shape: equal requests, or clips for a speech model; its batches are not read.
        against: ``hf`` or ``hf:CHECKPOINT``, for a line of Hugging Face's class in the first dtype.
        quality_of: the data of the quality, for the record.

    Raises:
        ConfigError: an unknown dtype or scheme, an engine, or sizes below 1 or beyond the clips.
    """

    spec: SideSpec
    dtypes: tuple[str, ...] = ("auto",)
    quants: tuple[str, ...] = ("none",)
    kv_dtypes: tuple[str, ...] = ("auto",)
    batches: tuple[int, ...] = ()
    shape: Latency | TranscriptionBench = field(default_factory=lambda: Latency(batches=(1,), repeats=3))
    against: str | None = None
    quality_of: Record | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for quant in self.quants:
            read_quant(quant)
        for kv_dtype in self.kv_dtypes:
            RuntimeConfig(kv_dtype=kv_dtype)  # type: ignore[arg-type]
        for dtype in self.dtypes:
            if dtype != "auto":
                parse_dtype(dtype)
        self.shape.replace(batches=self.batches or (1,))
        if isinstance(self.shape, TranscriptionBench) and max(self.sizes) > self.shape.clips:
            raise ConfigError(
                "a batch has more clips than there are",
                seen=max(self.sizes),
                allowed=f"<= {self.shape.clips}",
                field="batch",
                fix="`batch`, or more `clips`",
            )
        if self.spec.path is not None and is_engine(Path(self.spec.path)):
            raise ConfigError(
                "an engine has one precision; a sweep loads a checkpoint in several",
                seen=self.spec.path,
                field="checkpoint",
                fix="give a CHECKPOINT, or run `ingot bench latency` on the engine",
            )
        if self.against is not None and not against_parts(self.against)[0]:
            raise ConfigError(
                "a sweep compares only with Hugging Face",
                seen=self.against,
                allowed="hf, hf:CHECKPOINT",
                field="against",
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes to try, in growing order."""
        most = self.shape.clips if isinstance(self.shape, TranscriptionBench) else AUTO_MOST
        return tuple(sorted(set(self.batches))) or doubling(most)

    def lines(self) -> list[SweepLine]:
        """A line per dtype, scheme and cache dtype, Hugging Face's last."""
        dtypes = list(dict.fromkeys(self._named(dtype) for dtype in self.dtypes))
        narrow = [(quant, kv) for quant in dict.fromkeys(self.quants) for kv in dict.fromkeys(self.kv_dtypes)]
        found = [self._line(dtype, quant, kv) for quant, kv in narrow for dtype in dtypes]
        if self.against is not None:
            _, path = against_parts(self.against)
            name = f"Hugging Face {dtypes[0]}"
            spec = self.spec.replace(kind=HUGGINGFACE, dtype=dtypes[0], quant="none")
            if path is not None:
                name, spec = f"{name}, {Path(path).name}", spec.replace(path=path, random_weights=None)
            found.append(SweepLine(name, spec))
        return found

    def settings(self, device_name: str) -> Record:
        model = self.spec.path or self.spec.random_weights or ""
        return {
            "model": model,
            "random_weights": self.spec.random_weights is not None,
            "config_sha256": _sha256(self.spec),
            "machine": device_name,
            "threads": self.threads,
            "repeats": self.shape.repeats,
            "data": self.quality_of,
        } | self._load()

    def _load(self) -> Record:
        shape = self.shape
        if isinstance(shape, TranscriptionBench):
            return {"clips": shape.clips, "tokens_per_second": shape.tokens_per_second, "seed": shape.seed}
        return {"prompt_tokens": shape.prompt_tokens, "new_tokens": shape.new_tokens}

    def _named(self, dtype: str) -> str:
        if dtype != "auto":
            return dtype_name(parse_dtype(dtype))
        if resolve_device(self.spec.device).type == "cpu":
            return "fp32"
        return dtype_name(read_shape(self.spec).dtype)

    def _line(self, dtype: str, quant: str, kv_dtype: str) -> SweepLine:
        stored = self._stored if quant == "none" else quant
        words = [
            dtype,
            *([] if stored == "none" else [stored]),
            *([f"{kv_dtype} cache"] if kv_dtype in NARROW_KV_DTYPES else []),
        ]
        spec = self.spec.replace(dtype=dtype, quant=quant, kv_dtype=kv_dtype)
        return SweepLine(" ".join(words), spec, stored, is_stored=quant == "none")

    @functools.cached_property
    def _stored(self) -> str:
        """The scheme of the checkpoint's weights."""
        return "none" if self.spec.path is None else read_setting(self.spec.path).quant.label


def run_sweep(
    wanted: Sweep,
    folder: Path,
    *,
    quality: Quality | None = None,
    fresh: bool = False,
    command: str = "",
    say: Say | None = None,
    measure: Measure = measure_apart,
) -> Record:
    """Measure what the folder does not hold yet; returns the record of all that it holds.

    Each point is appended to points.jsonl as soon as it is measured. A size that does not fit ends its line,
    as does a process that dies; the next run tries its size again.

    Raises:
        ConfigError: the requests are too long for the model, or the folder holds points of other settings.
        IngotError: a side cannot be loaded for another reason than memory.
    """
    model = read_shape(wanted.spec).config
    if isinstance(wanted.shape, TranscriptionBench):
        mel_bins(model)
    else:
        expect_text(model.modality, "a sweep of prompts", "shape=TranscriptionBench() instead of Latency")
        fix = "`prompt_tokens` or `new_tokens`"
        check_length(wanted.shape.longest, model.max_positions, "the model's context", fix)
    lines = wanted.lines()
    check_classes(line.spec for line in lines)
    here = machine(resolve_device(wanted.spec.device))
    store = Store(folder)
    settings = wanted.settings(here.get("gpu") or here["cpu"] or "unknown CPU")
    store.open(settings, fresh=fresh)
    stamp = {"settings": settings, "shape": _shape(model), "machine": here, "command": command}
    for line in lines:
        _measure_line(line, wanted, store, stamp, quality, say or silent, measure)
    return record_of(store.records)


def _measure_line(
    line: SweepLine,
    wanted: Sweep,
    store: Store,
    stamp: Record,
    quality: Quality | None,
    say: Say,
    measure: Measure,
) -> None:
    mine = [record for record in store.records if record["line"] == line.name]
    rated = quality is None or any("quality" in record for record in mine)
    shape = LineWanted(_missing(wanted.sizes, mine), wanted.shape, not rated, wanted.threads)
    if not shape.batches and rated:
        return
    head = {"line": line.name, "kind": line.spec.kind, "dtype": line.spec.dtype, "quant": line.quant}
    batch = 0
    for update in measure(line, shape, quality):
        batch = update.get("batch", batch)
        if "say" in update:
            say(update["say"])
        at = {"at": datetime.now(UTC).isoformat(timespec="seconds")}
        if "quality" in update:
            store.add(head | update | at | stamp)
        if "point" in update and batch:
            store.add(head | {"batch": batch} | update["point"] | at | stamp)
        if "point" in update and not batch:  # the process died of the quality: once more, without it
            store.add(head | {"quality": {}, "reason": update["point"]["reason"]} | at | stamp)
            _measure_line(line, wanted, store, stamp, None, say, measure)


def _missing(sizes: tuple[int, ...], mine: list[Record]) -> tuple[int, ...]:
    """The sizes not measured yet, below the first that does not fit."""
    done = {record["batch"] for record in mine if record.get("status") == OK}
    end = min((r["batch"] for r in mine if r.get("status") == DOES_NOT_FIT), default=None)
    return tuple(size for size in sizes if size not in done and (end is None or size < end))


def _shape(model: DecoderConfig) -> Record:
    names = ("architecture", "hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size")
    return {name: getattr(model, name) for name in names}


def _sha256(spec: SideSpec) -> str:
    """The hash of the model's config.json, which tells models at one path apart."""
    folder = Path(spec.random_weights) if spec.random_weights else resolve_checkpoint(spec.path or "")
    path = folder / CONFIG if folder.is_dir() else folder
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
