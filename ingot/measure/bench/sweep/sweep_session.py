"""Precision by batch: speed, memory and quality of one checkpoint, up to the size that no longer fits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
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
from ingot.engine.manifest import MANIFEST_FILE, Manifest
from ingot.errors import ConfigError
from ingot.measure.bench.kernel_bench.kernel_times import read_shape
from ingot.measure.bench.latency import Latency, check_length
from ingot.measure.bench.sweep.request_load import RequestLoad
from ingot.measure.bench.sweep.sweep_line import (
    AUTO_MOST,
    BEYOND_ENGINE,
    DOES_NOT_FIT,
    OK,
    LineWanted,
    Progress,
    Quality,
    Shape,
    SweepLine,
    doubling,
    measure_apart,
)
from ingot.measure.bench.sweep.sweep_record import record_of
from ingot.measure.bench.sweep.sweep_store import Store, check_same
from ingot.measure.bench.transcription_speed import TranscriptionBench
from ingot.measure.side.machine import machine
from ingot.measure.side.open_side import Say, check_classes, silent
from ingot.measure.side.side_spec import HUGGINGFACE, INGOT, SideSpec, against_parts
from ingot.speech.recording_features import mel_bins

Measure = Callable[[SweepLine, LineWanted, Quality | None], Iterator[Progress]]
Record = dict[str, Any]
_ENDS = (DOES_NOT_FIT, BEYOND_ENGINE)


@dataclass(frozen=True)
class Sweep:
    """What is measured.

    Attributes:
        spec: the model and the device; its dtype and sizes are not read.
        dtypes: of arithmetic; ``auto``: the model's own, fp32 on a CPU.
        quants: linear schemes, YAML files of them, or schemes of both halves of a speech model.
        kv_dtypes: of the KV cache, as in ``RuntimeConfig``.
        batches: sizes; empty: 1, 2, 4 and so on until one does not fit, or has all clips.
        shape: equal requests, requests of a file, or clips for a speech model; its batches are not read.
        against: ``hf`` or ``hf:CHECKPOINT``, for a line of Hugging Face's class in the first dtype.
        quality_of: the data of the quality, for the record.
        beside: further sides, under the same load. An engine has one line, as it was built, and so has a
            class of Hugging Face, in the first dtype.
        calib: samples for the schemes that need them.

    Raises:
        ConfigError: an unknown dtype or scheme, a scheme without a checkpoint or samples for it, or sizes
            below 1 or beyond the clips or requests.
    """

    spec: SideSpec
    dtypes: tuple[str, ...] = ("auto",)
    quants: tuple[str, ...] = ("none",)
    kv_dtypes: tuple[str, ...] = ("auto",)
    batches: tuple[int, ...] = ()
    shape: Shape = field(default_factory=lambda: Latency(batches=(1,), repeats=3))
    against: str | None = None
    quality_of: Record | None = None
    threads: int | None = None
    beside: tuple[SideSpec, ...] = ()
    calib: str | None = None

    def __post_init__(self) -> None:
        self._check_precisions()
        for kv_dtype in self.kv_dtypes:
            RuntimeConfig(kv_dtype=kv_dtype)  # type: ignore[arg-type]
        for dtype in self.dtypes:
            if dtype != "auto":
                parse_dtype(dtype)
        if isinstance(self.shape, RequestLoad):
            most, of = len(self.shape.load.asks), "requests"
        else:
            self.shape.replace(batches=self.batches or (1,))
            most, of = (self.shape.clips if isinstance(self.shape, TranscriptionBench) else 0), "clips"
        if most and max(self.sizes) > most:
            raise ConfigError(
                f"a batch has more {of} than there are",
                seen=max(self.sizes),
                allowed=f"<= {most}",
                field="batch",
                fix=f"`batch`, or more `{'sample' if of == 'requests' else of}`",
            )
        places = [(side.kind, os.path.abspath(side.path)) for side in self.sides if side.path is not None]
        if len(set(places)) < len(places):
            raise ConfigError(
                "a side is given more than once",
                seen=", ".join(path for _, path in places),
                field="checkpoint",
                fix="give each CHECKPOINT once",
            )
        if self.against is not None and not against_parts(self.against)[0]:
            raise ConfigError(
                "a sweep compares only with Hugging Face",
                seen=self.against,
                allowed="hf, hf:CHECKPOINT",
                field="against",
            )

    def _check_precisions(self) -> None:
        schemes = {quant: read_quant(quant) for quant in self.quants}
        checkpoints = [side for side in self.sides if is_checkpoint(side)]
        narrow = [kv_dtype for kv_dtype in self.kv_dtypes if kv_dtype in NARROW_KV_DTYPES]
        if not checkpoints and (narrow or self.quants != ("none",)):
            raise ConfigError(
                "an engine and Hugging Face's class are measured as they are: only checkpoints are quantized",
                seen=", ".join((*self.quants, *narrow)),
                field="quant",
                fix="give a CHECKPOINT, or leave out `quant` and `kv_dtype`",
            )
        needing = [quant for quant, scheme in schemes.items() if scheme.calibrated]
        stored = [side for side in checkpoints if side.path is not None]
        if needing and stored and self.calib is None:
            raise ConfigError(
                "this scheme needs samples", seen=", ".join(needing), field="calib", fix="`calib=FILE`"
            )
        if self.calib is not None and not (needing and stored):
            raise ConfigError(
                "no scheme of this sweep uses samples",
                seen=self.calib,
                field="calib",
                fix="leave out `calib`",
            )

    @property
    def sides(self) -> tuple[SideSpec, ...]:
        return (self.spec, *self.beside)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes to try, in growing order."""
        most = AUTO_MOST
        if isinstance(self.shape, TranscriptionBench):
            most = self.shape.clips
        elif isinstance(self.shape, RequestLoad):
            most = min(len(self.shape.load.asks), AUTO_MOST)
        return tuple(sorted(set(self.batches))) or doubling(most)

    def lines(self) -> list[SweepLine]:
        """A line per dtype, scheme and cache dtype of each checkpoint, and one per other side."""
        dtypes = list(dict.fromkeys(self._named(dtype) for dtype in self.dtypes))
        found: list[SweepLine] = []
        for side in self.sides:
            if side.kind == HUGGINGFACE:
                found.append(_class_line(side, dtypes[0], side.path))
            elif side.is_engine:
                found.append(_engine_line(side))
            else:
                found += self._checkpoint_lines(side, dtypes, "" if side is self.spec else f"{side.path}, ")
        if self.against is not None:
            _, path = against_parts(self.against)
            spec = self.spec if path is None else self.spec.replace(path=path, random_weights=None)
            found.append(_class_line(spec, dtypes[0], path and Path(path).name))
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
        if isinstance(shape, RequestLoad):
            return shape.settings()
        if isinstance(shape, TranscriptionBench):
            return {"clips": shape.clips, "tokens_per_second": shape.tokens_per_second, "seed": shape.seed}
        return {"prompt_tokens": shape.prompt_tokens, "new_tokens": shape.new_tokens}

    def _named(self, dtype: str) -> str:
        if dtype != "auto":
            return dtype_name(parse_dtype(dtype))
        if resolve_device(self.spec.device).type == "cpu":
            return "fp32"
        return dtype_name(read_shape(self.spec).dtype)

    def _checkpoint_lines(self, side: SideSpec, dtypes: list[str], before: str) -> list[SweepLine]:
        """A line per precision of a checkpoint or of random weights; ``before``: what names begin with."""
        stored = "none" if side.path is None else read_setting(side.path).quant.label
        narrow = [(quant, kv) for quant in dict.fromkeys(self.quants) for kv in dict.fromkeys(self.kv_dtypes)]
        found = []
        for quant, kv_dtype in narrow:
            label = stored if quant == "none" else quant
            calibrated = side.path is not None and read_quant(quant).calibrated
            for dtype in dtypes:
                words = [
                    dtype,
                    *([] if label == "none" else [label]),
                    *([f"{kv_dtype} cache"] if kv_dtype in NARROW_KV_DTYPES else []),
                ]
                spec = side.replace(dtype=dtype, quant=quant, kv_dtype=kv_dtype)
                calib = self.calib if calibrated else None
                name = before + " ".join(words)
                found.append(SweepLine(name, spec, label, is_stored=quant == "none", calib=calib))
        return found


def is_checkpoint(side: SideSpec) -> bool:
    """Whether Ingot quantizes the side: a checkpoint or random weights, no engine."""
    return side.kind == INGOT and not side.is_engine


def _class_line(side: SideSpec, dtype: str, label: str | None) -> SweepLine:
    """Hugging Face's class; ``label``: its model, where that is not the first side's."""
    name = f"Hugging Face {dtype}" if label is None else f"Hugging Face {dtype}, {label}"
    return SweepLine(name, side.replace(kind=HUGGINGFACE, dtype=dtype, quant="none", kv_dtype="auto"))


def _engine_line(side: SideSpec) -> SweepLine:
    """An engine with its own dtype, scheme, cache and limit of requests."""
    manifest = Manifest.read(Path(side.source))
    label, most = manifest.quant.label, manifest.build.max_batch_size
    return SweepLine(str(side.path).rstrip("/"), side, label, is_stored=True, max_batch_size=most)


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
    for side in wanted.sides:
        _check_takes(side, wanted.shape)
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


def _check_takes(side: SideSpec, shape: Shape) -> None:
    """Raise a ConfigError if the side takes no such load, or none as long."""
    found = read_shape(side)
    model = found.config
    if isinstance(shape, TranscriptionBench):
        mel_bins(model)
        return
    expect_text(model.modality, "a sweep of prompts", "shape=TranscriptionBench() instead of Latency")
    fix = "`prompt_tokens` or `new_tokens`" if isinstance(shape, Latency) else "`max_prompt` or `max_new`"
    if side.is_engine:
        check_length(shape.longest, found.max_seq_len, "the engine's limit", fix)
    else:
        check_length(shape.longest, model.max_positions, "the model's context", fix)


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
    source = _source(line)
    for record in mine:  # those of earlier versions have none
        check_same(record.get("source", source), source, store.folder)
    if not shape.batches and rated:
        return
    head: Record = {"line": line.name, "kind": line.spec.kind, "dtype": line.spec.dtype, "quant": line.quant}
    head["source"] = source
    batch = 0
    with ExitStack() as opened:
        if line.calib is not None:  # removed by this process, whatever ends the other
            folder = opened.enter_context(TemporaryDirectory(dir=store.folder, prefix="build-"))
            shape = replace(shape, folder=folder)
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


def _source(line: SweepLine) -> Record:
    """What a line's points are of, which a later run must find again."""
    path = line.spec.path or line.spec.random_weights or ""
    return {"model": path, "config_sha256": _sha256(line.spec), "calib": line.calib}


def _missing(sizes: tuple[int, ...], mine: list[Record]) -> tuple[int, ...]:
    """The sizes not measured yet, below the first that does not fit."""
    done = {record["batch"] for record in mine if record.get("status") == OK}
    end = min((r["batch"] for r in mine if r.get("status") in _ENDS), default=None)
    return tuple(size for size in sizes if size not in done and (end is None or size < end))


def _shape(model: DecoderConfig) -> Record:
    names = ("architecture", "hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size")
    return {name: getattr(model, name) for name in names}


def _sha256(spec: SideSpec) -> str:
    """The hash of the model's config.json, or of an engine's manifest: what differs at one path."""
    if spec.is_engine:
        return hashlib.sha256((Path(spec.source) / MANIFEST_FILE).read_bytes()).hexdigest()[:16]
    folder = Path(spec.random_weights) if spec.random_weights else resolve_checkpoint(spec.path or "")
    path = folder / CONFIG if folder.is_dir() else folder
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
