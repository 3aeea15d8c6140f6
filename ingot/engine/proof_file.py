"""proof.json, which says what an engine must compute, and verify.json, the notes beside it.

The proof names its manifest by hash, not the other way round, so the manifest and the weights are the same
for the same inputs on any machine. The time is in verify.json, so the same build on the same machine gives
the same proof.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ingot.config.files.atomic_write import atomic_file
from ingot.config.files.json_text import load_json, parse_json, read_text
from ingot.config.json_config import JsonConfig
from ingot.engine.manifest import MANIFEST_FILE, NOTE_FILE, PROOF_FILE, REBUILD
from ingot.engine.sketch import Checksum
from ingot.engine.source_figures import SourceFigures
from ingot.errors import EngineError, IngotError

PROOF_VERSION = 2
SPLIT = "fp32, inputs of 23 bits"  # a floor
_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, KeyError, IngotError)
_MADE, _VERIFIED = "made", "verified"  # the parts of verify.json


@dataclass(frozen=True)
class Position(JsonConfig):
    """The logits after one token: the top ids and their logits, and log(sum(exp(logits)))."""

    top_ids: tuple[int, ...]
    top_logits: tuple[float, ...]
    log_sum: float


@dataclass(frozen=True)
class LogitsRow(JsonConfig):
    """All logits after token ``position`` of a prompt: checksum, and sha256 of them rounded to 1/64."""

    position: int
    checksum: Checksum
    digest: str


@dataclass(frozen=True)
class InputClaim(JsonConfig):
    """An input (golden_encoder.py) and what an encoder makes of it in fp32.

    Attributes:
        size: of its values, which follow from the name: samples of speech at 16 kHz, or a picture's height
            and width.
        features: checksum of its features, computed in fp64.
        floor: relative error of the features by rounding.
        modules: checksums by module of the encoder, and of each decoder layer's keys and values.
    """

    name: str
    size: tuple[int, ...]
    features: Checksum
    floor: float
    modules: dict[str, Checksum]


@dataclass(frozen=True)
class GoldenCase(JsonConfig):
    """A prompt and its results in fp32.

    Attributes:
        text: the text of ``prompt_ids`` (they are the beginning of its ids, where it is cut); None: ids
            alone. Placeholders of an input are not among them.
        new_ids: greedy continuation; ``steps`` are the logits that each was chosen from.
        rows: complete logits at some positions of the prompt, with placeholders counted.
        prompt, new: checksums by module of the prompt's tokens and of the new ones that were computed (all
            but the last).
        input: index in ``Claims.inputs``; None: there is none.
    """

    name: str
    text: str | None
    prompt_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    steps: tuple[Position, ...]
    rows: tuple[LogitsRow, ...]
    prompt: dict[str, Checksum]
    new: dict[str, Checksum]
    input: int | None = None


@dataclass(frozen=True)
class Floor(JsonConfig):
    """The noise floor: the measured distance between a dtype's arithmetic and a more exact one.

    Attributes:
        modules: relative L2 distance of each module's output.
        logits: the same of complete rows of logits.
        logprobs: largest difference of a top token's log-probability.
    """

    modules: dict[str, float]
    logits: float
    logprobs: float


@dataclass(frozen=True)
class Metric(JsonConfig):
    """A measured quality and its limit.

    Attributes:
        name: perplexity, perplexity_delta, kl_mean, rougeL, exact, …
        value: as measured, in ``unit``.
        limit: the worst allowed; None: the value is only recorded.
        data, data_sha256: name and hash of the data file; ``items``: how many of it counted.
        against: what was compared with, None for nothing; ``against_value`` is its own value.
        dtype, against_dtype: of the arithmetic of both.
        window: of running text, tokens per window and the stride.
    """

    name: str
    value: float
    limit: float | None
    better: Literal["lower", "higher"]
    data: str
    data_sha256: str
    against: str | None = None
    against_value: float | None = None
    unit: str = ""
    items: int | None = None
    dtype: str | None = None
    against_dtype: str | None = None
    window: tuple[int, ...] | None = None

    @property
    def met(self) -> bool | None:
        """Whether the value is within its limit; None where it has none."""
        if self.limit is None:
            return None
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit


@dataclass(frozen=True)
class Claims(JsonConfig):
    """A proof's claims: the same for the same engine, machine and number of threads.

    Attributes:
        manifest_sha256: of the engine's manifest.json.
        floors: by dtype of arithmetic; the engine's own, fp32 and, where a CPU may split inputs of products
            (quant/schemes/in_panels.py), ``SPLIT``.
        metrics: those of a build with ``prove``.
        inputs: the inputs of cases of a model with an encoder.
        source: how far the stored tensors are from the checkpoint's; None: of an older Ingot.
    """

    manifest_sha256: str
    cases: tuple[GoldenCase, ...]
    floors: dict[str, Floor]
    metrics: tuple[Metric, ...] = ()
    inputs: tuple[InputClaim, ...] = ()
    source: SourceFigures | None = None


@dataclass(frozen=True)
class ProofOrigin(JsonConfig):
    """Where a proof was made, and by what."""

    device: str
    threads: int
    dtype: str
    ingot: str
    torch: str


@dataclass(frozen=True)
class Proof(JsonConfig):
    """A proof.json; ``sha256`` is of ``made`` and ``claims``."""

    claims: Claims
    made: ProofOrigin
    sha256: str
    version: int = PROOF_VERSION

    @classmethod
    def of(cls, claims: Claims, made: ProofOrigin) -> Proof:
        return cls(claims, made, digest({"made": made.to_json(), "claims": claims.to_json()}))

    def dump(self) -> str:
        return _text(self.to_json())


@dataclass(frozen=True)
class When(JsonConfig):
    """In verify.json: when a proof was made (UTC, ISO 8601), and how long it took."""

    time: str
    seconds: float


@dataclass(frozen=True)
class Note(JsonConfig):
    """In verify.json: the result of the last ``verify``. ``host`` is a hash that tells machines apart."""

    passed: bool
    time: str
    host: str
    device: str
    proof_sha256: str
    failures: tuple[str, ...] = ()


def digest(data: dict[str, Any]) -> str:
    """sha256 of ``made`` and ``claims`` of a proof's JSON, without spaces."""
    return hashlib.sha256(_canonical({k: data[k] for k in ("made", "claims")}).encode()).hexdigest()


def _text(data: dict[str, Any]) -> str:
    """``claims`` in one line, the rest indented for people."""
    head = {k: data[k] for k in ("version", "sha256", "made")}
    text = json.dumps(head, indent=2, ensure_ascii=False)
    return text[:-2] + ',\n  "claims": ' + _canonical(data["claims"]) + "\n}\n"


def _canonical(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def manifest_hash(folder: Path) -> str:
    return hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()


def read_proof(folder: Path) -> Proof | None:
    """An engine's proof; None where it has none.

    Raises:
        EngineError: proof.json is damaged, of another version, or of another engine.
    """
    path = folder / PROOF_FILE
    if not path.is_file():
        return None
    try:
        text = read_text(path)
        data = parse_json(text)
        version, stated, own = data.get("version"), data.get("sha256"), digest(data)
        if version != PROOF_VERSION:
            raise ValueError(f"version {version}, not {PROOF_VERSION}")
        if stated != own or text != _text(data):
            raise ValueError("hash mismatch")
        proof = Proof.from_json(data)
        of_another = proof.claims.manifest_sha256 != manifest_hash(folder)
    except _UNREADABLE as error:
        raise EngineError(f"{PROOF_FILE} is damaged", seen=f"{path}: {error}", fix=REBUILD) from None
    if of_another:
        raise EngineError(
            f"{PROOF_FILE} belongs to a different {MANIFEST_FILE} (hash mismatch)",
            seen=path,
            fix=REBUILD,
        )
    return proof


def write_metrics(folder: Path, metrics: Sequence[Metric]) -> Proof:
    """Replace the metrics of an engine's proof; proof.json is written atomically.

    Raises:
        EngineError: the proof is damaged, or there is none.
        OSError: the folder cannot be written.
    """
    proof = read_proof(folder)
    if proof is None:
        raise EngineError("the engine has no proof to add metrics to", seen=folder)
    proof = Proof.of(proof.claims.replace(metrics=tuple(metrics)), proof.made)
    with atomic_file(folder / PROOF_FILE) as part:
        part.write_text(proof.dump(), encoding="utf-8")
    return proof


def write_note(folder: Path, note: Note) -> bool:
    """Leave a note in an engine; False: the folder cannot be written, which is no failure."""
    return _note_down(folder, _VERIFIED, note)


def read_note(folder: Path) -> Note | None:
    """The note of the last ``verify``; None: none can be read."""
    try:
        return Note.from_json(load_json(folder / NOTE_FILE)[_VERIFIED])
    except _UNREADABLE:
        return None


def write_when(folder: Path, seconds: float) -> bool:
    """Note that an engine's proof was made now; as ``write_note``."""
    return _note_down(folder, _MADE, When(datetime.now(UTC).isoformat(timespec="seconds"), seconds))


def read_when(folder: Path) -> When | None:
    """When an engine's proof was made; None: unknown."""
    try:
        return When.from_json(load_json(folder / NOTE_FILE)[_MADE])
    except _UNREADABLE:
        return None


def _note_down(folder: Path, name: str, note: JsonConfig) -> bool:
    """Replace one part of verify.json; the other stays."""
    try:
        notes = dict(load_json(folder / NOTE_FILE))
    except _UNREADABLE:
        notes = {}
    kept = {key: notes[key] for key in (_MADE, _VERIFIED) if key in notes} | {name: note.to_json()}
    text = json.dumps(kept, indent=2, ensure_ascii=False) + "\n"
    try:
        with atomic_file(folder / NOTE_FILE) as part:
            part.write_text(text, encoding="utf-8")
    except OSError:
        return False
    return True


def this_host() -> str:
    """Twelve hex digits that tell this machine from others."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def standing(folder: Path) -> str | None:
    """Why an engine is not to be trusted on this machine, in one line; None: it is proven."""
    try:
        proof = read_proof(folder)
    except EngineError as error:
        return f"{error.what} (run `ingot verify` for details)"
    if proof is None:
        return "the engine is unproven: it was built without golden cases"
    note = read_note(folder)
    if note is None or note.passed or note.host != this_host() or note.proof_sha256 != proof.sha256:
        return None
    first = "; ".join(note.failures[:1])
    return f"the engine failed its last `ingot verify` on this machine, {note.time}: {first}"
