"""A bundle's layer as modules, and the same layer in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ingot.building.calibration.calibrate import Held
from ingot.config.build_config import NARROW_KV_DTYPES
from ingot.config.units import size_text
from ingot.device import parse_dtype
from ingot.engine.assembly import cast_weight
from ingot.engine.plan_file import usable_plan
from ingot.engine.reference_encoder import keep_for, own_stages
from ingot.engine.reference_run import Arithmetic, ReferenceRun, SequenceSpan
from ingot.engine.split_inputs import split_feed
from ingot.errors import EngineError
from ingot.layers.build_context import BuildContext
from ingot.layers.cpu_weights import settle_linear
from ingot.layers.decoder import Decoder, DecoderLayer
from ingot.layers.encoder_blocks.encoder import EncoderLayer
from ingot.layers.encoder_blocks.qformer import QFormerLayer
from ingot.layers.invariance import make_batch_invariant
from ingot.layers.linear import Linear, any_rounded, linears, narrower, stored_tensors
from ingot.layers.rotary import RotaryTable
from ingot.llm.llm import LLM
from ingot.models.minigpt4 import settings_of
from ingot.proof.repro_bundle import Bundle
from ingot.quant.schemes.in_panels import split_columns
from ingot.reference.plain_stage import Passage
from ingot.runtime.step.one_layer import LayerInputs, run_layer

AnyLayer = DecoderLayer | EncoderLayer | QFormerLayer
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
_MOST_TABLE = 1 << 30  # bytes; a million positions take half


def plain_outputs(llm: LLM, name: str, inputs: LayerInputs) -> list[torch.Tensor]:
    """A layer's hidden states in plain PyTorch: in the next wider dtype, in the engine's own, where something
    is rounded to 8 bits with each token's closest call the other way, and in fp32 where a CPU may split
    products' inputs with inputs so rounded.
    """
    module = llm.engine.model.get_submodule(name)
    dtype, kv_dtype = parse_dtype(llm.engine.dtypes.at(name)), llm.runtime.kv_dtype
    arithmetics = [Arithmetic(WIDER[dtype]), Arithmetic(dtype)]
    if kv_dtype in NARROW_KV_DTYPES or any_rounded(module):
        arithmetics.append(Arithmetic(WIDER[dtype], flips=True))
    with torch.inference_mode():
        found = [_plain(llm, name, inputs, arithmetic, kv_dtype) for arithmetic in arithmetics]
        columns = [split_columns(one.origin, one.in_features) for one in linears(module).values()]
        if dtype == torch.float32 and any(columns):
            found.append(_plain(llm, name, inputs, arithmetics[0], kv_dtype, split=True))
        return found


def _plain(
    llm: LLM, name: str, inputs: LayerInputs, arithmetic: Arithmetic, kv_dtype: str, *, split: bool = False
) -> torch.Tensor:
    module = llm.engine.model.get_submodule(name)
    weights = Held(_stored_tensor(llm.engine.model), torch.device("cpu"))
    feed = split_feed(llm.engine.model, weights) if split else None
    run = ReferenceRun(llm.engine.model, weights, arithmetic, single=True, feed=feed, kv_dtype=kv_dtype)
    hidden = inputs.hidden.to(arithmetic.dtype)
    if not isinstance(module, DecoderLayer):
        stage = next(one for one in own_stages(run, _unseen) if one.name == name)
        kept = hidden.new_empty(0) if inputs.encoded is None else inputs.encoded.to(arithmetic.dtype)
        return Passage(hidden, kept).after(stage).hidden
    index = list(llm.engine.model.layers).index(module)
    input_number = None if inputs.encoded is None else 0
    if inputs.encoded is not None:
        keep_for(run, 0, index, _unseen, inputs.encoded.to(arithmetic.dtype))
    ids = (0,) * len(inputs.positions)  # they are not read
    span = SequenceSpan(0, ids, 0, int(inputs.rope_rows[0]), input_number)
    return run.layer(index, hidden, [span], _unseen)


def _stored_tensor(model: Decoder) -> Callable[[str], torch.Tensor]:
    """Reads a tensor by name, also of a packed linear layer."""

    def read(name: str) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        return module.original()[leaf] if isinstance(module, Linear) else model.get_parameter(name)

    return read


def _unseen(name: str, output: torch.Tensor) -> None:
    return


def stored_weights(module: nn.Module, dtype: str) -> dict[str, torch.Tensor]:
    """The layer's weights as the engine stores them; a CPU's widened ones are narrowed without loss."""
    weights = {}
    for name, tensor in stored_tensors(module).items():
        own = tensor.detach().to("cpu")
        narrow = own.to(parse_dtype(dtype)) if own.is_floating_point() else own
        weights[name] = narrow if torch.equal(narrow.to(own.dtype), own) else own.clone()
    return weights


def built_layer(bundle: Bundle, device: torch.device, dtype: torch.dtype) -> AnyLayer:
    """The layer on a device, with the bundle's weights.

    Raises:
        EngineError: the weights are not those of such a layer.
    """
    facts = bundle.facts
    plan, _ = usable_plan(facts.plan, device, dtype)
    try:
        with torch.device("meta"):
            ctx = BuildContext(facts.quant, plan, dtype).at(facts.name)
            layer: AnyLayer
            if facts.of_decoder:
                layer = DecoderLayer(facts.model, ctx, facts.layer)
            elif facts.shape is not None and not facts.shape.post_norm:
                layer = EncoderLayer(facts.shape.stack, ctx)
            else:
                config = settings_of(facts.model).qformer
                assert config is not None, "no other encoder has layers with norms behind the sums"
                layer = QFormerLayer(config, ctx, facts.layer)
    except (RuntimeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise EngineError("the bundle's model has no such layer", seen=error, field="run") from error
    wanted = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in bundle.weights.items()}
    odd = sorted({name for name, _ in wanted.items() ^ found.items()})
    if odd:
        raise EngineError("the bundle's weights do not match its layer", seen=odd[:5], field="run")
    for name, tensor in bundle.weights.items():
        path, _, leaf = name.rpartition(".")
        own = tensor.to(device=device, copy=True)  # not the file's memory: alignment may order a sum
        module, at = layer.get_submodule(path), layer.get_parameter(name).dtype
        if device.type == "cpu" and isinstance(module, Linear) and module.scheme.dense and leaf == "weight":
            at = narrower(tensor.dtype, at)
        own = cast_weight(name, own, at)
        setattr(module, leaf, nn.Parameter(own, requires_grad=False))
    if device.type == "cpu":
        for linear in linears(layer).values():
            settle_linear(linear, dtype, packs=not facts.batch_invariant)
    if facts.batch_invariant:
        make_batch_invariant(layer)
    return layer.eval()


@torch.inference_mode()
def layer_output(bundle: Bundle, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A bundle's layer computed here: hidden states [T, hidden_size] in ``dtype``, on the CPU.

    Raises:
        EngineError: the weights are not those of such a layer; the rotary table is too large, or lacks rows
            that the layer reads.
    """
    facts, inputs, layer = bundle.facts, bundle.inputs, built_layer(bundle, device, dtype)
    if not isinstance(layer, DecoderLayer):
        hidden = inputs.hidden.to(device, dtype, copy=True)
        if isinstance(layer, EncoderLayer):
            own: torch.Tensor = layer(hidden)
            return own.cpu()
        assert inputs.encoded is not None or layer.encoder_attn is None
        seen = hidden if inputs.encoded is None else inputs.encoded.to(device, dtype, copy=True)
        return layer(hidden, seen, 1).cpu()
    table, length, rope = None, facts.build.max_seq_len, facts.model.rope_of(facts.layer)
    if rope is not None:
        size = RotaryTable.table_bytes(rope, length)
        if size > _MOST_TABLE:
            raise EngineError("the bundle's rotary table is too large", seen=size_text(size), field="run")
        table, rows = RotaryTable(rope, length).table.to(device), inputs.rope_rows
        if not 0 <= int(rows.min()) <= int(rows.max()) < table.shape[0]:
            what = "the bundle's rotary rows are outside the table"
            raise EngineError(what, seen=int(rows.max()), field="run")
    return run_layer(
        layer,
        inputs,
        table,
        block_size=facts.block_size,
        max_seq_len=length,
        device=device,
        dtype=dtype,
        kv_dtype=facts.kv_dtype,
    )
