"""A failure cut down to one layer, and its replay.

Owns the capture of one layer while an engine runs, what is expected of it, and how far outputs may be apart.
Knows no terminal; the file is ``repro_bundle``'s.

    bundle = capture_layer(llm, "Hello", layer=3, step=2)
    write_bundle(path, bundle); replay(read_bundle(path), torch.device("cpu")).agrees
"""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from ingot.config.build import NARROW_KV_DTYPES
from ingot.config.sampling import SamplingParams
from ingot.config.units import size_text
from ingot.device import dtype_name, on_device, parse_dtype
from ingot.engine.assemble import cast_weight
from ingot.engine.calibrate import Held
from ingot.engine.plan_file import machine_of, usable_plan
from ingot.engine.reference import Arithmetic, ReferenceRun, Span
from ingot.errors import EngineError, OutOfMemoryError, RequestError
from ingot.layers.context import BuildContext
from ingot.layers.decoder import DecoderLayer
from ingot.layers.invariance import make_batch_invariant
from ingot.layers.linear import any_rounded
from ingot.layers.rotary import RotaryTable
from ingot.llm.expected_trace import expected_output
from ingot.llm.llm import LLM
from ingot.llm.prompts import Messages, PromptLike
from ingot.llm.repro_bundle import BUNDLE_VERSION, Bundle, BundleFacts
from ingot.runtime.one_layer import LayerInputs, record_calls, run_layer
from ingot.version import VERSION

_NOISE_TIMES, _LEAST_ROUNDINGS = 4.0, 2.0  # the floor: so many times the noise, and roundings at least
_MOST_TABLE = 1 << 30  # bytes; a million positions take half
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class Replay:
    """A bundle's layer computed here.

    Attributes:
        against_expected, against_output: relative L2 of all tokens, to what was expected and to what the
            engine gave.
        recorded: relative L2 of what the engine gave to what was expected.
        floor, token_floor: the bundle's: up to which outputs count as equal, and each token of them.
        worst_position, worst: the token farthest from what was expected, and its relative L2.
        worst_repeat: relative L2 of the token farthest from what the engine gave.
        device, dtype: what it was computed on and in.
    """

    against_expected: float
    against_output: float
    recorded: float
    floor: float
    token_floor: float
    worst_position: int
    worst: float
    worst_repeat: float
    device: str
    dtype: str

    @property
    def agrees(self) -> bool:
        """Whether the layer gives here what was expected."""
        return self.against_expected <= self.floor and self.worst <= self.token_floor

    @property
    def proves(self) -> bool:
        """Whether the floor tells right from wrong: an output of zeros is 1 away from what was expected."""
        return self.floor < 1

    @property
    def repeats(self) -> bool:
        """Whether the layer gives here what the engine gave."""
        return self.against_output <= self.floor and self.worst_repeat <= self.token_floor


def capture_layer(
    llm: LLM, prompt: PromptLike | Messages, layer: int, step: int = 0, expected: Path | None = None
) -> Bundle:
    """Run a prompt greedily, and keep what one layer was given and gave.

    The engine runs module by module, as under a tap: CUDA graphs and fused kernels are off.

    Args:
        step: how many decode steps to go beyond the prompt; end tokens are passed over.
        expected: a trace with the output to expect; None: plain PyTorch in the next wider dtype.

    Raises:
        RequestError: no such layer or step, or other requests are running.
        CheckpointError: the trace lacks the layer, or is of other tokens.
    """
    ids = llm.prompt_ids(prompt)
    _check(llm, ids, layer, step)
    params = SamplingParams(max_new_tokens=step + 1, ignore_eos=True)
    module = llm.engine.model.layers[layer]
    assert isinstance(module, DecoderLayer)
    tokens = list(ids)
    with llm.tap(f"layers.{layer}") as seen, record_calls(module) as calls:
        try:
            tokens += llm.generate([ids], params)[0].token_ids
        except EngineError:  # logits that are no numbers are a failure to be kept
            if calls.num_tokens < len(ids) + step:
                raise
    inputs, output = calls.inputs(), seen[f"layers.{layer}"]
    return _bundle(llm, layer, step, inputs, output, tokens, expected)


def replay(bundle: Bundle, device: torch.device) -> Replay:
    """Compute a bundle's layer here, by the kernels or, on a CPU, their twins, in the bundle's dtype.

    Raises:
        EngineError: the weights are not those of such a layer.
        OutOfMemoryError: the device cannot hold it.
    """
    facts = bundle.facts
    dtype = parse_dtype(facts.dtype)
    try:
        with on_device(device):
            layer, rope = _layer(bundle, device, dtype)
            sizes = {"block_size": facts.block_size, "max_seq_len": facts.build.max_seq_len}
            places = {"device": device, "dtype": dtype, "kv_dtype": facts.kv_dtype}
            output = run_layer(layer, bundle.inputs, rope, **places, **sizes)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        seen = str(error).split(". ")[0]
        raise OutOfMemoryError(
            "the layer does not fit on the device", seen=seen, fix="--device cpu"
        ) from None
    apart = row_errors(output, bundle.expected)
    worst = int(apart.argmax())
    return Replay(
        against_expected=relative_l2(output, bundle.expected),
        against_output=relative_l2(output, bundle.output),
        recorded=facts.output_error,
        floor=facts.floor,
        token_floor=facts.token_floor,
        worst_position=worst,
        worst=float(apart[worst]),
        worst_repeat=float(row_errors(output, bundle.output).max()),
        device=str(device),
        dtype=facts.dtype,
    )


def relative_l2(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected| over all elements.

    Elements that are no number, or infinite, in both alike count as equal; in one alone, it is infinite.
    """
    return float(row_errors(found.reshape(1, -1), expected.reshape(1, -1))[0])


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """``relative_l2`` of each row [T]."""
    found, expected = found.double().cpu(), expected.double().cpu()
    alike = (found == expected) | (found.isnan() & expected.isnan())
    apart = torch.where(alike, 0.0, found - expected).norm(dim=-1)
    size = torch.where(expected.isfinite(), expected, 0.0).norm(dim=-1).clamp(min=1e-300)
    return (apart / size).nan_to_num(nan=math.inf, posinf=math.inf)


def _check(llm: LLM, ids: list[int], layer: int, step: int) -> None:
    last = llm.engine.manifest.model.num_layers - 1
    if not 0 <= layer <= last:
        raise RequestError("no such layer", seen=layer, allowed=f"0 to {last}", flag="--layer")
    room = llm.executor.max_seq_len - len(ids) - 1
    if step < 0 or (room >= 0 and step > room):
        raise RequestError(
            "no such step", seen=step, allowed=f"0 to {room}, by the engine's maximum length", flag="--step"
        )
    if llm.executor.has_work:
        raise RequestError(
            "other requests are running", fix="wait for them: the layer must see one request alone"
        )


def _bundle(
    llm: LLM,
    layer: int,
    step: int,
    inputs: LayerInputs,
    output: torch.Tensor,
    tokens: list[int],
    trace: Path | None,
) -> Bundle:
    module, engine = llm.engine.model.layers[layer], llm.engine
    assert isinstance(module, DecoderLayer)
    reference, noise, token_noise = _reference(llm, layer, inputs)
    source = f"plain PyTorch in {_WIDER[engine.dtype]}".replace("torch.", "")
    if trace is not None:
        reference, source = expected_output(trace, layer, inputs.counts, tokens), f"the trace {trace.name}"
    expected = reference.float()
    facts = BundleFacts(
        version=BUNDLE_VERSION,
        layer=layer,
        step=step,
        counts=inputs.counts,
        model=engine.manifest.model,
        build=engine.manifest.build,
        quant=engine.manifest.quant,
        plan=engine.plan.replace(measured={}),
        dtype=dtype_name(engine.dtype),
        block_size=llm.runtime.block_size,
        batch_invariant=llm.runtime.batch_invariant,
        kv_dtype=llm.runtime.kv_dtype,
        expected_from=source,
        noise=noise,
        token_noise=token_noise,
        floor=_floor(noise, engine.dtype),
        token_floor=_floor(token_noise, engine.dtype),
        output_error=relative_l2(output, expected),
        output_worst=float(row_errors(output, expected).max()),
        engine="",
        machine=asdict(machine_of(engine.device, engine.dtype)),
        platform=platform.platform(),
        ingot_version=VERSION,
        command="",
    )
    return Bundle(facts, _stored(module, engine.manifest.build.dtype), inputs, output, expected)


def _floor(noise: float, dtype: torch.dtype) -> float:
    """Relative L2 up to which outputs count as equal, for this noise of the plain computation."""
    least = _LEAST_ROUNDINGS * torch.finfo(dtype).eps
    return max(_NOISE_TIMES * noise, least) if math.isfinite(noise) else least


def _reference(llm: LLM, layer: int, inputs: LayerInputs) -> tuple[torch.Tensor, float, float]:
    """The layer in plain PyTorch, in the wider dtype; how far its own dtype is off, in all and at worst, and
    where activations are rounded to 8 bits what it costs that each token's closest call goes the other way.
    """
    dtype, kv_dtype = llm.engine.dtype, llm.runtime.kv_dtype
    span = Span(0, (0,) * len(inputs.positions), 0, int(inputs.rope_rows[0]))  # its ids are not read

    def plain(arithmetic: Arithmetic) -> torch.Tensor:
        weights = Held(llm.engine.model.get_parameter, torch.device("cpu"))
        run = ReferenceRun(llm.engine.model, weights, arithmetic, single=True, kv_dtype=kv_dtype)
        return run.layer(layer, inputs.hidden.to(arithmetic.dtype), [span], lambda name, output: None)

    with torch.inference_mode():
        wide = plain(Arithmetic(_WIDER[dtype]))
        others = [plain(Arithmetic(dtype))]
        if kv_dtype in NARROW_KV_DTYPES or any_rounded(llm.engine.model.layers[layer]):
            others.append(plain(Arithmetic(_WIDER[dtype], flips=True)))
        errors = [(relative_l2(own, wide), float(row_errors(own, wide).max())) for own in others]
        return wide, max(e for e, _ in errors), max(e for _, e in errors)


def _stored(module: DecoderLayer, dtype: str) -> dict[str, torch.Tensor]:
    """The layer's weights as the engine stores them: a CPU's widened ones are narrowed again, which loses
    nothing.
    """
    weights = {}
    for name, parameter in module.named_parameters():
        own = parameter.detach().to("cpu")
        narrow = own.to(parse_dtype(dtype)) if own.is_floating_point() else own
        weights[name] = narrow if torch.equal(narrow.to(own.dtype), own) else own.clone()
    return weights


def _layer(
    bundle: Bundle, device: torch.device, dtype: torch.dtype
) -> tuple[DecoderLayer, torch.Tensor | None]:
    """The layer and the rotary table on a device."""
    facts = bundle.facts
    plan, _ = usable_plan(facts.plan, device, dtype)
    try:
        with torch.device("meta"):
            ctx = BuildContext(facts.quant, plan, dtype).at(f"layers.{facts.layer}")
            layer = DecoderLayer(facts.model, ctx, facts.layer)
    except (RuntimeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise EngineError("the bundle's model has no such layer", seen=error, flag="--run") from error
    wanted = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in bundle.weights.items()}
    odd = sorted({name for name, _ in wanted.items() ^ found.items()})
    if odd:
        raise EngineError("the bundle's weights do not match its layer", seen=odd[:5], flag="--run")
    for name, tensor in bundle.weights.items():
        path, _, leaf = name.rpartition(".")
        own = tensor.to(device=device, copy=True)  # not the file's memory: alignment may order a sum
        own = cast_weight(name, own, layer.get_parameter(name).dtype)
        setattr(layer.get_submodule(path), leaf, nn.Parameter(own, requires_grad=False))
    if facts.batch_invariant:
        make_batch_invariant(layer)
    if facts.model.rope is None:
        return layer.eval(), None
    size = RotaryTable.table_bytes(facts.model.rope, facts.build.max_seq_len)
    if size > _MOST_TABLE:
        raise EngineError("the bundle's rotary table is too large", seen=size_text(size), flag="--run")
    table = RotaryTable(facts.model.rope, facts.build.max_seq_len).table
    rows = bundle.inputs.rope_rows
    if not 0 <= int(rows.min()) <= int(rows.max()) < table.shape[0]:
        raise EngineError(
            "the bundle's rotary rows are outside the table", seen=int(rows.max()), flag="--run"
        )
    return layer.eval(), table.to(device)
