"""Captures one layer of a running engine as a bundle, and replays bundles."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ingot.config.sampling_params import SamplingParams
from ingot.device import dtype_name, on_device, parse_dtype
from ingot.engine.plan_file import machine_of
from ingot.engine.reference_encoder import named_stages, stage_names
from ingot.errors import EngineError, OutOfMemoryError, RequestError
from ingot.layers.decoder import DecoderLayer
from ingot.llm.llm import LLM
from ingot.llm.prompt_inputs import Input, Messages, Prompt, PromptLike
from ingot.llm.prompt_left_cut import read_prompt
from ingot.memory.memory_error import first_sentence, ran_out
from ingot.proof.encoder_record import KEYS_VALUES, encoder_observed
from ingot.proof.expected_trace import expected_output
from ingot.proof.repro_bundle import BUNDLE_VERSION, DECODER, Bundle, BundleFacts, layer_name
from ingot.proof.repro_layer import WIDER, layer_output, plain_outputs, stored_weights
from ingot.runtime.step.one_layer import LayerInputs, record_calls
from ingot.version import VERSION

_NOISE_TIMES, _LEAST_ROUNDINGS = 4.0, 2.0  # the floor: so many times the noise, and roundings at least

Observed = dict[str, torch.Tensor]  # what the places of an encoder gave


@dataclass(frozen=True)
class LayerReplay:
    """A bundle's layer computed here.

    Attributes:
        against_expected, against_output: relative L2 of all tokens, to what was expected and to what the
            engine gave.
        recorded: relative L2 of what the engine gave to what was expected.
        floor, token_floor: the bundle's limits for all tokens and for each.
        worst_position, worst: the token farthest from what was expected, and its relative L2.
        worst_repeat: relative L2 of the token farthest from what the engine gave.
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
        return self.against_expected <= self.floor and self.worst <= self.token_floor

    @property
    def proves(self) -> bool:
        """Whether the floor is below 1, the distance of an output of zeros."""
        return self.floor < 1

    @property
    def repeats(self) -> bool:
        return self.against_output <= self.floor and self.worst_repeat <= self.token_floor


def capture_layer(
    llm: LLM,
    prompt: PromptLike | Messages,
    layer: int,
    step: int = 0,
    expected: Path | None = None,
    *,
    half: str = DECODER,
) -> Bundle:
    """Run a prompt greedily, and keep what one layer was given and gave.

    The engine runs module by module, as under a tap: CUDA graphs and fused kernels are off.

    Args:
        prompt: of a speech model with the features of its recording; of pictures with at most one of them.
        step: how many decode steps to go beyond the prompt; end tokens are ignored.
        expected: a trace with the output to expect; None: plain PyTorch in the next wider dtype.
        half: ``decoder``, or a stack of the encoder, whose layers run once: ``encoder`` of a speech model,
            ``encoder.vit`` or ``encoder.qformer`` of a model of pictures.

    Raises:
        RequestError: no such layer or step, a recording is missing, or other requests are running.
        CheckpointError: the trace lacks the layer, or is of other tokens.
    """
    given = read_prompt(llm, prompt)
    ids = llm.prompt_ids(given)
    _check(llm, ids, half, layer, step)
    found = [part for part in given.parts if isinstance(part, Input)]
    if not llm.engine.manifest.model.modality.takes_text and not found:
        what = "this engine is of speech, and the prompt has no recording"
        raise RequestError(what, field="audio", fix="`audio=FILE`")
    if half != DECODER and len(found) != 1:
        what = "a layer of an encoder is extracted with one picture in the prompt"
        fix = "`image=FILE`, or `messages` with one"
        raise RequestError(what, seen=len(found), allowed=1, field="image", fix=fix)
    name = layer_name(half, layer)
    if half == DECODER:
        inputs, output, tokens = _of_decoder(llm, given, name, step)
    else:
        inputs, output = _of_encoder(llm, given, name)
        tokens = ids
    return _bundle(llm, name, step, inputs, output, tokens, expected)


def _of_decoder(
    llm: LLM, prompt: Prompt, name: str, step: int
) -> tuple[LayerInputs, torch.Tensor, list[int]]:
    """A layer's inputs and output, and the tokens that ran."""
    module = llm.engine.model.get_submodule(name)
    assert isinstance(module, DecoderLayer)
    tokens = llm.prompt_ids(prompt)
    count, params = len(tokens), SamplingParams(max_new_tokens=step + 1, ignore_eos=True)
    crosses = llm.engine.manifest.model.crosses
    encoding: AbstractContextManager[Observed] = _observed(llm) if crosses else nullcontext({})
    with encoding as observed, llm.tap(name) as seen, record_calls(module) as calls:
        try:
            tokens += llm.generate([prompt], params)[0].token_ids
        except EngineError:  # logits that are not finite are a failure to be kept
            if calls.num_tokens < count + step:
                raise
    inputs = calls.inputs()
    if crosses:
        inputs = replace(inputs, encoded=observed[f"{name}{KEYS_VALUES}/in"])
    return inputs, seen[name], tokens


def _of_encoder(llm: LLM, prompt: Prompt, name: str) -> tuple[LayerInputs, torch.Tensor]:
    """The same of an encoder's layer; its input is the output of the place before it."""
    stages = named_stages(llm.engine.manifest.model)
    place = next(i for i, stage in enumerate(stages) if stage.name == name)
    kept = next((one.name for one in stages[:place] if one.keeps), None)
    with _observed(llm) as observed:
        try:
            llm.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
        except EngineError:
            if name not in observed:
                raise
    inputs = LayerInputs.of_input(observed[stages[place - 1].name])
    crosses = any(part.startswith(f"{name}.encoder_attn.") for part in observed)
    return replace(inputs, encoded=observed[kept] if crosses and kept is not None else None), observed[name]


@contextmanager
def _observed(llm: LLM) -> Iterator[Observed]:
    """Outputs of the encoder's modules for one input, and the inputs of keys and values."""
    found: Observed = {}

    def see(name: str, rows: torch.Tensor) -> None:
        found[name] = rows.detach().to("cpu", copy=True)

    with encoder_observed(llm, see):
        yield found


def replay(bundle: Bundle, device: torch.device) -> LayerReplay:
    """Compute a bundle's layer here, by the kernels or, on a CPU, their references, in the bundle's dtype.

    Raises:
        EngineError: the weights are not those of such a layer.
        OutOfMemoryError: the device cannot hold it.
    """
    facts = bundle.facts
    try:
        with on_device(device):
            output = layer_output(bundle, device, parse_dtype(facts.dtype))
    except Exception as error:
        if not ran_out(error):
            raise
        what, fix = "the layer does not fit on the device", "`device=cpu`"
        raise OutOfMemoryError(what, seen=first_sentence(error), fix=fix) from None
    apart = row_errors(output, bundle.expected)
    worst = int(apart.argmax())
    return LayerReplay(
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

    Elements that are NaN or infinite alike in both count as equal; in one alone, it is infinite.
    """
    return float(row_errors(found.reshape(1, -1), expected.reshape(1, -1))[0])


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """``relative_l2`` of each row [T]."""
    found, expected = found.double().cpu(), expected.double().cpu()
    alike = (found == expected) | (found.isnan() & expected.isnan())
    apart = torch.where(alike, 0.0, found - expected).norm(dim=-1)
    size = torch.where(expected.isfinite(), expected, 0.0).norm(dim=-1).clamp(min=1e-300)
    return (apart / size).nan_to_num(nan=math.inf, posinf=math.inf)


def _check(llm: LLM, ids: list[int], half: str, layer: int, step: int) -> None:
    model = llm.engine.manifest.model
    counts = Counter(name.rpartition(".layers.")[0] for name in stage_names(model) if ".layers." in name)
    if half != DECODER and not counts:
        what = "this engine has no encoder whose layers can be extracted"
        raise RequestError(what, seen=model.modality.model, field="layer", fix="`layer=N`, of the decoder")
    if half != DECODER and half not in counts:
        named = [f"{stack}.N" for stack in counts]
        raise RequestError("no such part of the encoder", seen=half, allowed=named, field="layer")
    last = (model.num_layers if half == DECODER else counts[half]) - 1
    if not 0 <= layer <= last:
        named_so = "" if half == DECODER else f"{half}."
        raise RequestError(
            "no such layer",
            seen=f"{named_so}{layer}",
            allowed=f"{named_so}0 to {named_so}{last}",
            field="layer",
        )
    if half != DECODER and step:
        raise RequestError("a layer of an encoder runs once", seen=step, field="step", fix="leave out `step`")
    room = llm.executor.max_seq_len - len(ids) - 1
    if step < 0 or (room >= 0 and step > room):
        raise RequestError(
            "no such step", seen=step, allowed=f"0 to {room}, by the engine's maximum length", field="step"
        )
    if llm.executor.has_work:
        raise RequestError(
            "other requests are running", fix="wait for them: the layer must see one request alone"
        )


def _bundle(
    llm: LLM,
    name: str,
    step: int,
    inputs: LayerInputs,
    output: torch.Tensor,
    tokens: list[int],
    trace: Path | None,
) -> Bundle:
    engine = llm.engine
    before, _, index = name.rpartition(".")
    reference, *others = plain_outputs(llm, name, inputs)
    errors = [(relative_l2(own, reference), float(row_errors(own, reference).max())) for own in others]
    noise, token_noise = max(e for e, _ in errors), max(e for _, e in errors)
    dtype = parse_dtype(engine.dtypes.at(name))
    source = f"plain PyTorch in {WIDER[dtype]}".replace("torch.", "")
    if trace is not None:
        reference, source = expected_output(trace, name, inputs.counts, tokens), f"the trace {trace.name}"
    expected = reference.float()
    facts = BundleFacts(
        version=BUNDLE_VERSION,
        layer=int(index),
        step=step,
        counts=inputs.counts,
        model=engine.manifest.model,
        build=engine.manifest.build,
        quant=engine.manifest.quant,
        plan=engine.plan.replace(measured={}),
        dtype=dtype_name(dtype),
        block_size=llm.runtime.block_size,
        batch_invariant=llm.runtime.batch_invariant,
        kv_dtype=llm.runtime.kv_dtype,
        expected_from=source,
        noise=noise,
        token_noise=token_noise,
        floor=_floor(noise, dtype),
        token_floor=_floor(token_noise, dtype),
        output_error=relative_l2(output, expected),
        output_worst=float(row_errors(output, expected).max()),
        engine="",
        machine=asdict(machine_of(engine.device, engine.dtype)),
        platform=platform.platform(),
        ingot_version=VERSION,
        command="",
        half=before.removesuffix("layers").removesuffix(".") or DECODER,
        private=engine.manifest.model.modality.private,
    )
    weights = stored_weights(engine.model.get_submodule(name), engine.manifest.build.dtypes.at(name))
    return Bundle(facts, weights, inputs, output, expected)


def _floor(noise: float, dtype: torch.dtype) -> float:
    """Relative L2 up to which outputs count as equal, for this noise of the plain computation."""
    least = _LEAST_ROUNDINGS * torch.finfo(dtype).eps
    return max(_NOISE_TIMES * noise, least) if math.isfinite(noise) else least
