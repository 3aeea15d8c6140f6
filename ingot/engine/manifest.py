"""manifest.json: an engine's configs, the hash of every tensor and file, how text ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.config.build_config import MANIFEST_FILE, BuildConfig
from ingot.config.decoder_config import DecoderConfig
from ingot.config.files.json_text import load_json
from ingot.config.json_config import JsonConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.quantization.scheme_table import WITH_8_BITS
from ingot.errors import ConfigError, EngineError, NoSuchPathError
from ingot.text.chat.chat_renderer import FORMATS

FORMAT_VERSION = 3
WEIGHTS_FILE = "weights.safetensors"
PLAN_FILE = "plan.json"
PROOF_FILE = "proof.json"
NOTE_FILE = "verify.json"
TOKENIZER_FOLDER = "tokenizer"
REBUILD = "build the engine again"


@dataclass(frozen=True)
class TensorEntry(JsonConfig):
    """One stored tensor: safetensors dtype name, shape, sha256 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __post_init__(self) -> None:
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in self.shape):
            raise ConfigError("a tensor's shape must be non-negative integers", seen=self.shape)


@dataclass(frozen=True)
class KindRanges(JsonConfig):
    """Lowest and highest value of a site's inputs over all layers, at positions of tokens and at those where
    an input or embeddings are spliced.
    """

    tokens: tuple[float, ...]
    spliced: tuple[float, ...]


@dataclass(frozen=True)
class CalibrationEntry(JsonConfig):
    """The samples of a calibration: the sha256 of their file, how many were taken, their tokens in all and
    the longest; for RPTQ by site the ranges of tokens and of spliced positions, where samples have both.
    """

    sha256: str
    samples: int
    tokens: int
    length: int
    ranges: dict[str, KindRanges] = field(default_factory=dict)

    @property
    def range_lines(self) -> list[tuple[str, str]]:
        """For people: ``R1`` and both of its ranges."""
        span = "{0[0]:.3g} to {0[1]:.3g}".format
        return [
            (site, f"tokens {span(own.tokens)}, spliced positions {span(own.spliced)}")
            for site, own in self.ranges.items()
        ]


@dataclass(frozen=True)
class Manifest(JsonConfig):
    """Everything about an engine except its bytes.

    Attributes:
        model: the decoder as built (fewer layers than the checkpoint's after ``layers``).
        tensors: by module name, in file order.
        files: sha256 of every file under ``tokenizer/``.
        generation: the checkpoint's generation_config.json.
        stop_ids: ids that end a text.
        chat_template: name of a built-in chat template, when the user chose one.
        source_dtype: dtype of the checkpoint's weights.
        calibration: None where ``quant``'s method needs none.
    """

    ingot_version: str
    model: DecoderConfig
    build: BuildConfig
    quant: QuantConfig
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    source_dtype: str = ""
    calibration: CalibrationEntry | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """A manifest names no file outside its engine's folder."""
        if not isinstance(self.files, dict):
            raise ConfigError("files must map names to hashes", seen=self.files)
        odd = [name for name in self.files if name in ("", ".", "..") or set(name) & set("/\\\0")]
        if odd:
            raise ConfigError(f"files must be plain file names in {TOKENIZER_FOLDER}/", seen=odd)
        if self.chat_template is not None and self.chat_template not in FORMATS:
            raise ConfigError(
                "chat_template is not a built-in chat format", seen=self.chat_template, allowed=list(FORMATS)
            )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of an engine folder.

        Raises:
            EngineError: there is none, it is damaged, or another format version wrote it.
        """
        expect_engine(folder)
        path = folder / MANIFEST_FILE
        try:
            data = load_json(path)
            version = data.get("format_version")
            if version != FORMAT_VERSION:
                raise EngineError(
                    "unsupported engine format version",
                    seen=version,
                    allowed=FORMAT_VERSION,
                    fix="build it again with this version of Ingot",
                )
            entries = {k: TensorEntry.from_json(v) for k, v in data.pop("tensors").items()}
            quant = data["quant"]
            if "rptq" not in quant and {quant["scheme"], *quant.get("layers", {}).values()} & {*WITH_8_BITS}:
                # Engines from before RPTQ had options have rptq-w4a4's activations in 4 bits at every site.
                quant["rptq"] = {"eight_bits": []}
            found = cls.from_json(data).replace(tensors=entries)
            if odd := found.odd_fields() or [name for name, own in entries.items() if own.odd_fields()]:
                raise ValueError(f"values of another type: {', '.join(odd[:5])}")
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            if isinstance(error, EngineError):
                raise
            raise EngineError("manifest.json is damaged", seen=f"{path}: {error}", fix=REBUILD) from None

    def dump(self) -> str:
        """The text of manifest.json; the same manifest gives the same text."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"


def is_engine(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file()


def expect_engine(folder: Path) -> None:
    """Refuse what is no engine folder, by its path alone.

    Raises:
        NoSuchPathError: nothing is there, or a file, or a folder without a manifest.
    """
    if not folder.exists():
        raise NoSuchPathError("no such folder", seen=folder, fix="correct the path")
    if folder.is_file():
        own = folder.name == MANIFEST_FILE
        fix = f"give its folder, {folder.parent}" if own else "give an engine folder"
        raise NoSuchPathError("an engine is a folder, but this is a file", seen=folder, fix=fix)
    if not is_engine(folder):
        raise NoSuchPathError(
            "not an engine: no manifest.json", seen=folder, fix="make one with `ingot build`"
        )


def refuse_build_values(folder: Path, values: Mapping[str, object]) -> None:
    """Refuse values that only a build decides, for the engine in ``folder``; None: not given.

    Raises:
        ConfigError: it names the values, and the engine's own scheme.
        EngineError: the manifest cannot be read.
    """
    fixed = [name for name, value in values.items() if value is not None]
    if fixed:
        own = f", quantization {Manifest.read(folder).quant.label}" if "quant" in fixed else ""
        flags = " ".join(f"--{name.replace('_', '-')} …" for name in fixed)
        raise ConfigError(
            "these values are fixed when an engine is built",
            seen=fixed,
            allowed=f"the engine's own{own}",
            fix=f"leave them out, or build it again: `ingot build CHECKPOINT -o ENGINE {flags}`",
        )
