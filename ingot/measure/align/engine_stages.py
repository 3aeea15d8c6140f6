"""An engine run step by step through its scheduler and paged cache, its stages written to a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.device import on_device
from ingot.layers.decoder import DecoderLayer
from ingot.llm import LLM
from ingot.measure.align.encoder_inputs import Given
from ingot.measure.align.stages.encoder_stages import EncoderStages
from ingot.measure.align.stages.stage_names import CONVS, OWN_NAMES
from ingot.measure.align.trace import TraceWriter
from ingot.proof.encoder_record import KEYS_VALUES, by_module, encoder_observed
from ingot.proof.encoder_replay import prepared
from ingot.runtime.scheduling.inputs import RequestInput
from ingot.runtime.scheduling.request import Request

_NAME = "align"
_OF_ENCODER = {
    **{
        name: name
        for name in (*CONVS, "encoder.vit.patch_embedding", "encoder.ln_vision", "encoder.projector")
    },
    "encoder.embed_positions": "encoder.embedding",
    "encoder.norm": "encoder.final_norm",
    "encoder.vit.embed_positions": "encoder.vit.embedding",
    "encoder.qformer.norm": "encoder.qformer.embedding",
}
_OF_LAYER = {
    "input_layernorm": "input_norm",
    "self_attn.o_proj/in": "attended",
    "self_attn.o_proj": "attention",
    "post_attention_layernorm/sum": "residual",
    "post_attention_layernorm": "post_norm",
    "mlp.down_proj/in": "inner",
    "mlp.down_proj": "mlp",
    "": "output",
}
_OF_POST_NORM = {
    "self_attn.o_proj/in": "attended",
    "self_attn.o_proj": "attention",
    "self_attn_norm/sum": "residual",
    "encoder_attn.o_proj/in": "cross_attended",
    "encoder_attn.o_proj": "cross_attention",
    "encoder_attn_norm/sum": "cross_residual",
    "encoder_attn_norm": "post_norm",
    "mlp.down_proj/in": "inner",
    "mlp.down_proj": "mlp",
    "mlp_norm/sum": "mlp_residual",
    "mlp_norm": "output",
}


class _Pieces:
    """Stages of one step; a prompt may run in several chunks."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[torch.Tensor]] = {}

    def add(self, stage: str, tensor: torch.Tensor) -> None:
        self._pieces.setdefault(stage, []).append(tensor.detach().to("cpu", copy=True))

    def flush(self, writer: TraceWriter, step: int) -> None:
        """Write the step's stages in the order in which they ran, and clear them."""
        for stage, pieces in self._pieces.items():
            writer.add(f"{step}/{stage}", torch.cat(pieces))
        self._pieces.clear()


def record_engine(
    llm: LLM,
    path: Path,
    ids: Sequence[int],
    steps: int,
    forced: Sequence[int] | None = None,
    *,
    as_served: bool = False,
    given: Given | None = None,
) -> list[int]:
    """Run the prompt and ``steps`` cached decode steps, module by module, and write every stage; the greedy
    choices after the prompt and each step.

    Args:
        forced: tokens to feed after the prompt; None: the greedy choices.
        as_served: run as requests do, with fused kernels and CUDA graphs; only the logits of each step's last
            token are written.
        given: the input of a model with an encoder.
    """
    executor = llm.executor
    checked, params = executor.admission.checked_ids(ids, room=0), SamplingParams(max_new_tokens=None)
    inputs = () if given is None else (_input(llm, given, ids),)
    request = executor.admission.request(_NAME, checked, params, 0, inputs)
    request.all_logits = not as_served
    writer = TraceWriter(path)
    try:
        if given is not None and not as_served:
            writer.add(f"0/{given.stage}", given.source.rows(prepared(given.source, llm)))
        executor.scheduler.add(request)
        choices = _steps(llm, request, writer, steps, forced, as_served=as_served)
    except BaseException:
        writer.abandon()
        raise
    finally:
        executor.scheduler.finish(request)
    dtype, model = str(llm.engine.dtype).removeprefix("torch."), llm.engine.manifest.model.architecture
    writer.metadata |= {"dtype": dtype, "names": OWN_NAMES, "model": model}
    writer.close()
    return choices


def _steps(
    llm: LLM,
    request: Request,
    writer: TraceWriter,
    steps: int,
    forced: Sequence[int] | None,
    *,
    as_served: bool,
) -> list[int]:
    pieces, choices, executor = _Pieces(), [], llm.executor
    modules = nullcontext() if as_served else _by_module(llm, pieces)
    encoding = _encoder(llm, pieces) if request.inputs and not as_served else nullcontext()
    with modules, encoding, on_device(llm.engine.device):
        for step in range(steps + 1):
            fed = request.tokens(request.num_computed, request.num_tokens)
            writer.add(f"{step}/input_ids", torch.tensor([*fed], dtype=torch.int64))
            logits = torch.empty(0)
            while request.num_uncomputed:
                batch = executor.scheduler.schedule()
                logits = executor.runner.run(batch)
                executor.scheduler.computed(batch)
                if len(logits):
                    pieces.add("logits", logits)
            choices.append(int(logits[-1].float().argmax()))
            pieces.flush(writer, step)
            request.output_ids.append(choices[-1] if forced is None or step == steps else forced[step])
    return choices


def _input(llm: LLM, given: Given, ids: Sequence[int]) -> RequestInput:
    rules, model = llm.executor.admission.inputs, llm.engine.manifest.model
    assert rules is not None
    assert model.encoder is not None
    place = list(ids).index(model.encoder.placeholder_id) if model.splices else 0
    return rules.read(given.features.float(), place)


def _encoder(llm: LLM, pieces: _Pieces) -> AbstractContextManager[None]:
    """The stages of the encoder, and each decoder layer's keys and values of its outputs."""
    stages = EncoderStages.of(llm.engine.manifest.model)
    assert stages is not None

    def see(name: str, rows: torch.Tensor) -> None:
        if name.endswith(KEYS_VALUES):
            for part, half in zip(("keys", "values"), rows.chunk(2, dim=-1), strict=True):
                pieces.add(f"{name.removesuffix(KEYS_VALUES)}.cross_{part}", half)
        stage = _encoder_stage(stages, name)
        if stage is not None:
            pieces.add(stage, rows)

    return encoder_observed(llm, see)


def _encoder_stage(stages: EncoderStages, name: str) -> str | None:
    layer = stages.layer_of(name)
    if layer is None:
        return _OF_ENCODER.get(name)
    inner = name.removeprefix(layer).removeprefix(".")
    if not stages.post_norm(layer):
        return f"{layer}.{_OF_LAYER[inner]}" if inner in _OF_LAYER else None
    if inner == "self_attn_norm":
        return f"{layer}.{'cross_norm' if stages.crosses(layer) else 'post_norm'}"
    return f"{layer}.{_OF_POST_NORM[inner]}" if inner in _OF_POST_NORM else None


@contextmanager
def _by_module(llm: LLM, pieces: _Pieces) -> Iterator[None]:
    """Every module is called, and each stage except the logits collected, while the block runs."""
    model, handles = llm.engine.model, []

    def keep(module: torch.nn.Module, stage: str, place: int | None = None) -> None:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            pieces.add(stage, output if place is None else output[place])

        handles.append(module.register_forward_hook(hook))

    def take(module: torch.nn.Module, stage: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda _, given: pieces.add(stage, given[0])))

    def embedded(module: torch.nn.Module, inputs: Any) -> None:
        pieces.add("embedding", inputs[1])

    handles.append(model.layers[0].register_forward_pre_hook(embedded))
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        keep(layer.input_layernorm, f"layers.{i}.input_norm", 0)
        take(layer.self_attn.o_proj, f"layers.{i}.attended")
        keep(layer.self_attn.o_proj, f"layers.{i}.attention")
        joined = "residual"
        if layer.encoder_attn is not None:
            keep(layer.encoder_attn_layernorm, f"layers.{i}.residual", 1)
            keep(layer.encoder_attn_layernorm, f"layers.{i}.cross_norm", 0)
            take(layer.encoder_attn.o_proj, f"layers.{i}.cross_attended")
            keep(layer.encoder_attn.o_proj, f"layers.{i}.cross_attention")
            joined = "cross_residual"
        keep(layer.post_attention_layernorm, f"layers.{i}.{joined}", 1)
        keep(layer.post_attention_layernorm, f"layers.{i}.post_norm", 0)
        take(layer.mlp.down_proj, f"layers.{i}.inner")
        keep(layer.mlp.down_proj, f"layers.{i}.mlp")
        keep(layer, f"layers.{i}.output", 1)
    keep(model.norm, "final_norm", 0)
    with by_module(llm, handles):
        yield
