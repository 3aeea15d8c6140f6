"""What is inside an engine or a checkpoint, without loading it.

Covers the collection of facts about a folder. Reads no weights and prints nothing.

    describe(Path("engine")).num_parameters
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.checkpoint.name_rules import Concat
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE
from ingot.config.decoder_config import DecoderConfig
from ingot.config.json_config import JsonConfig
from ingot.config.kernel_plan import KernelPlan
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.device import parse_dtype, resolve_device
from ingot.engine.assembly import Assembly, build_config, logical_shapes, make_manifest, model_of
from ingot.engine.engine_text import TextParts, read_engine_text, read_text_parts
from ingot.engine.manifest import Manifest, is_engine
from ingot.engine.plan_file import read_own_plan, usable_plan
from ingot.engine.proof_file import Metric, ProofOrigin, read_note, read_proof, read_when, standing, this_host
from ingot.errors import EngineError
from ingot.layers.chosen_kernels import PLAIN, describe_kernels
from ingot.layers.decoder import Decoder
from ingot.layers.forward_batch import LayerCache
from ingot.layers.product_choice import Ways, fuses
from ingot.memory.memory_sizes import cache_dtype, encoded_position_bytes, kv_bytes_per_token
from ingot.models.model_registry import architecture_named


@dataclass(frozen=True)
class TensorFact(JsonConfig):
    """A tensor: dtype, shape, and its sha256 where an engine recorded one."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str | None = None


@dataclass(frozen=True)
class ProofFact(JsonConfig):
    """A proof without its numbers. ``when`` it was made, if verify.json tells; ``verified`` is when ``ingot
    verify`` last ended on this machine, if it did.
    """

    sha256: str
    made: ProofOrigin
    cases: dict[str, tuple[int, ...]]
    metrics: tuple[Metric, ...]
    verified: str | None
    when: str | None = None


@dataclass(frozen=True)
class Description(JsonConfig):
    """Facts about a folder; for a checkpoint, those of the engine that ``build`` would make by default.

    Attributes:
        num_parameters: weights of the model, a tied head counted once, whatever their packing.
        bytes_on_disk: all files of the folder together.
        kv_bytes_per_token: bytes of KV cache that one token takes in the build's ``kv_dtype``.
        input_bytes: bytes of the encoder cache that the longest input takes; 0 without an encoder.
        kernels: what computes the products of a GPU's steps, by kind of step (layers/chosen_kernels.py).
        tokenizer: kind of tokenizer, None where there is none.
        chat_format: name of the chat format, None where there is none.
        plan_unused: why this machine's first GPU, or its CPU where there is none, does not use the plan; None
            where it does, and without one.
        generation: the checkpoint's generation_config.json.
        proof: of an engine: what proves it; None where nothing does.
        doubt: why the engine is not to be trusted on this machine; None where nothing speaks against it.
    """

    path: str
    kind: Literal["engine", "checkpoint"]
    manifest: Manifest
    plan: KernelPlan
    plan_unused: str | None
    num_parameters: int
    bytes_on_disk: int
    kv_bytes_per_token: int
    kernels: dict[str, str]
    tokenizer: str | None
    vocabulary: int | None
    chat_format: str | None
    tensors: dict[str, TensorFact]
    proof: ProofFact | None = None
    doubt: str | None = None
    input_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """See ``JsonConfig.to_json``; tensors come once, the manifest's fields beside the others."""
        own = super().to_json()
        inner = own.pop("manifest")
        inner.pop("tensors")
        tensors = own.pop("tensors")
        return {**own, **inner, "tensors": tensors}


def describe(folder: Path) -> Description:
    """Describe an engine folder or a checkpoint folder.

    Raises:
        EngineError, CheckpointError: the folder is neither, or damaged.
    """
    return _engine(folder) if is_engine(folder) else _checkpoint(folder)


def read_text_side(folder: Path) -> tuple[Manifest, TextParts]:
    """Manifest and text parts of an engine, or of the one that a checkpoint would become by default.

    Raises:
        EngineError, CheckpointError: the folder is neither, or damaged.
    """
    if is_engine(folder):
        manifest = Manifest.read(folder)
        return manifest, read_engine_text(folder, manifest)
    with open_checkpoint(folder) as source:
        manifest, _, text = _as_built(source)
        return manifest, text


def _as_built(source: Checkpoint) -> tuple[Manifest, Decoder, TextParts]:
    """The engine that ``build`` would make of a checkpoint by default."""
    config = build_config(source, "auto", DEFAULT_MAX_BATCH_SIZE, None, None)
    assembly, text = Assembly.of(source, config, QuantConfig()), read_text_parts(source)
    return make_manifest(assembly, source, text), assembly.model, text


def _engine(folder: Path) -> Description:
    manifest = Manifest.read(folder)
    text = read_engine_text(folder, manifest)
    plan = read_own_plan(folder, resolve_device("auto"))
    model = model_of(manifest, plan)
    facts = {n: TensorFact(e.dtype, e.shape, e.sha256) for n, e in manifest.tensors.items()}
    found = _describe("engine", folder, manifest, plan, model, text, facts)
    return found.replace(proof=_proof_fact(folder), doubt=standing(folder))


def _proof_fact(folder: Path) -> ProofFact | None:
    """An engine's proof in short; a damaged one is none, and ``doubt`` tells of it."""
    try:
        proof = read_proof(folder)
    except EngineError:
        return None
    if proof is None:
        return None
    note = read_note(folder)
    when = read_when(folder)
    here = note is not None and note.host == this_host() and note.proof_sha256 == proof.sha256
    cases: dict[str, tuple[int, ...]] = {
        case.name: (len(case.prompt_ids), len(case.new_ids)) for case in proof.claims.cases
    }
    return ProofFact(
        proof.sha256,
        proof.made,
        cases,
        proof.claims.metrics,
        note.time if note is not None and here else None,
        None if when is None else when.time,
    )


def _checkpoint(folder: Path) -> Description:
    with open_checkpoint(folder) as source:
        manifest, model, text = _as_built(source)
        facts = {
            name: TensorFact(str(info.dtype).removeprefix("torch."), tuple(info.shape))
            for name, info in source.tensors.items()
        }
        return _describe("checkpoint", folder, manifest, KernelPlan(), model, text, facts)


def _describe(
    kind: Literal["engine", "checkpoint"],
    folder: Path,
    manifest: Manifest,
    plan: KernelPlan,
    model: Decoder,
    text: TextParts,
    tensors: dict[str, TensorFact],
) -> Description:
    dtype = parse_dtype(manifest.build.dtype)
    return Description(
        path=str(folder),
        kind=kind,
        manifest=manifest,
        plan=plan,
        plan_unused=_why_unused(plan, dtype),
        num_parameters=_count(model),
        bytes_on_disk=_bytes_on_disk(folder),
        kv_bytes_per_token=kv_bytes_per_token(manifest.model, cache_dtype(dtype, manifest.build.kv_dtype)),
        kernels=_kernels(model, manifest, dtype),
        input_bytes=_input_bytes(manifest.model, dtype, cache_dtype(dtype, manifest.build.kv_dtype)),
        tokenizer=type(text.tokenizer).__name__.removesuffix("Tokenizer").lower() if text.tokenizer else None,
        vocabulary=text.tokenizer.vocab_size if text.tokenizer else None,
        chat_format=text.chat.name if text.chat else None,
        tensors=tensors,
    )


def _bytes_on_disk(place: Path) -> int:
    """Of a folder's files, or of a checkpoint that is one file."""
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _kernels(model: Decoder, manifest: Manifest, dtype: torch.dtype) -> dict[str, str]:
    if not fuses(model):
        return PLAIN
    config = manifest.model
    shape = (1, config.num_kv_heads, RuntimeConfig().block_size, config.head_dim)
    kept = cache_dtype(dtype, manifest.build.kv_dtype)
    return describe_kernels(model, Ways(model, [LayerCache.zeros(*shape, kept, torch.device("meta"))]))


def _input_bytes(config: DecoderConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    if config.encoder is None:
        return 0
    return config.encoder.max_positions * encoded_position_bytes(config, dtype, kv_dtype)


def _why_unused(plan: KernelPlan, dtype: torch.dtype) -> str | None:
    device = resolve_device("auto")
    why_not = usable_plan(plan, device, dtype)[1]
    return "a CPU runs no kernels" if why_not is None and plan.gpu and device.type == "cpu" else why_not


def _count(model: Decoder) -> int:
    """Logical weights of a model; a tied head is the embedding again, and a bias that the checkpoint lacks is
    zeros that a joined product needs.
    """
    total, config = sum(math.prod(shape) for shape in logical_shapes(model).values()), model.config
    rules = architecture_named(config.architecture).weight_map(config, None).transforms()
    total -= sum(rule.gap[1] for rule in rules if isinstance(rule, Concat))
    return total - config.vocab_size * config.hidden_size if config.tie_word_embeddings else total
