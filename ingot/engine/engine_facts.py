"""Facts about an engine or a checkpoint, without reading weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ingot.checkpoint.checkpoint_reader import Checkpoint, open_checkpoint
from ingot.checkpoint.name_rules import Concat
from ingot.config.build_config import DEFAULT_MAX_BATCH_SIZE
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
from ingot.layers.decoder import Decoder
from ingot.layers.decoder_forward import Operations, fuses, product_chooser
from ingot.layers.forward_batch import LayerCache
from ingot.layers.products.chosen_kernels import PLAIN, describe_kernels
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
    """A proof in short; ``verified``: when ``ingot verify`` last ended on this machine; ``errors``: of the
    weights in fewer bits, as of ``SourceFigures``.
    """

    sha256: str
    made: ProofOrigin
    cases: dict[str, tuple[int, ...]]
    metrics: tuple[Metric, ...]
    verified: str | None
    when: str | None = None
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Description(JsonConfig):
    """Facts about a folder; for a checkpoint, those of the engine that ``build`` would make by default.

    Attributes:
        num_parameters: weights of the model, a tied head counted once, whatever their packing.
        bytes_on_disk: of all files in the folder.
        kv_bytes_per_token: bytes of KV cache per token in the build's ``kv_dtype``.
        input_bytes: bytes of the encoder cache for the longest input; 0 without an encoder.
        kernels: what computes the products of a GPU's steps, by kind of step (layers/products).
        tokenizer, chat_format: their names, or None.
        plan_unused: why this machine's first GPU, or its CPU, does not use the plan; None: it does.
        doubt: why the engine is not to be trusted on this machine; None: no reason is known.
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
        """As ``JsonConfig.to_json``; tensors come once, the manifest's fields beside the others."""
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
    if not is_engine(folder):
        with open_checkpoint(folder) as source:
            manifest, model, text = _as_built(source)
            facts = {
                name: TensorFact(str(info.dtype).removeprefix("torch."), tuple(info.shape))
                for name, info in source.tensors.items()
            }
            return _describe("checkpoint", folder, manifest, KernelPlan(), model, text, facts)
    manifest = Manifest.read(folder)
    text = read_engine_text(folder, manifest)
    plan = read_own_plan(folder, resolve_device("auto"))
    model = model_of(manifest, plan)
    facts = {n: TensorFact(e.dtype, e.shape, e.sha256) for n, e in manifest.tensors.items()}
    found = _describe("engine", folder, manifest, plan, model, text, facts)
    return found.replace(proof=_proof_fact(folder), doubt=standing(folder))


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


def _proof_fact(folder: Path) -> ProofFact | None:
    """An engine's proof in short; a damaged one is none, and ``doubt`` reports it."""
    try:
        proof = read_proof(folder)
    except EngineError:
        return None
    if proof is None:
        return None
    note, when = read_note(folder), read_when(folder)
    here = note is not None and note.host == this_host() and note.proof_sha256 == proof.sha256
    return ProofFact(
        proof.sha256,
        proof.made,
        {case.name: (len(case.prompt_ids), len(case.new_ids)) for case in proof.claims.cases},
        proof.claims.metrics,
        note.time if note is not None and here else None,
        None if when is None else when.time,
        {} if proof.claims.source is None else proof.claims.source.errors,
    )


def _describe(
    kind: Literal["engine", "checkpoint"],
    folder: Path,
    manifest: Manifest,
    plan: KernelPlan,
    model: Decoder,
    text: TextParts,
    tensors: dict[str, TensorFact],
) -> Description:
    config, dtype, device = manifest.model, parse_dtype(manifest.build.dtype), resolve_device("auto")
    cached, tokenizer = cache_dtype(dtype, manifest.build.kv_dtype), text.tokenizer
    why_unused = usable_plan(plan, device, dtype)[1]
    if why_unused is None and plan.gpu and device.type == "cpu":
        why_unused = "a CPU runs no kernels"
    kernels = PLAIN
    if fuses(model):
        shape = (1, config.num_kv_heads, RuntimeConfig().block_size, config.head_dim)
        cache = LayerCache.zeros(*shape, cached, torch.device("meta"))
        chooser = product_chooser(model, [cache])
        kernels = describe_kernels(config, lambda step: Operations(model, chooser, step).layers)
    files = [folder] if folder.is_file() else [file for file in folder.rglob("*") if file.is_file()]
    longest = 0 if config.encoder is None else config.encoder.max_positions
    return Description(
        path=str(folder),
        kind=kind,
        manifest=manifest,
        plan=plan,
        plan_unused=why_unused,
        num_parameters=_count(model),
        bytes_on_disk=sum(file.stat().st_size for file in files),
        kv_bytes_per_token=kv_bytes_per_token(config, cached),
        kernels=kernels,
        input_bytes=longest * encoded_position_bytes(config, dtype, cached),
        tokenizer=type(tokenizer).__name__.removesuffix("Tokenizer").lower() if tokenizer else None,
        vocabulary=tokenizer.vocab_size if tokenizer else None,
        chat_format=text.chat.name if text.chat else None,
        tensors=tensors,
    )


def _count(model: Decoder) -> int:
    """Logical weights, without a tied head and biases that the checkpoint lacks."""
    total, config = sum(math.prod(shape) for shape in logical_shapes(model).values()), model.config
    rules = architecture_named(config.architecture).weight_map(config, None).transforms()
    total -= sum(rule.gap[1] for rule in rules if isinstance(rule, Concat))
    return total - config.vocab_size * config.hidden_size if config.tie_word_embeddings else total
