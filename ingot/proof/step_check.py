"""Judges steps as requests run them (fused kernels, CUDA graphs, prompts and decodes) place by place.

At each place of a layer the reference computes from the value that was recorded at the place before, keys and
values included. So no difference grows, and rounding to 8 or 4 bits hides nothing: a quantized value may
differ from the nearest one only where the exact value lies within the arithmetic's noise of the middle
between two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ingot.building.golden.golden_prompts import with_input
from ingot.config.sampling_params import SamplingParams
from ingot.engine.assembly import model_of
from ingot.engine.manifest import WEIGHTS_FILE
from ingot.engine.reference_run import Arithmetic, EngineTensors, ReferenceRun
from ingot.errors import EngineError
from ingot.layers.decoder import Decoder
from ingot.layers.step_record import StepRecord
from ingot.llm.llm import LLM
from ingot.proof.encoder_check import EncoderRun, check_encoder
from ingot.proof.step_judge import Judge
from ingot.proof.step_witness import StepWitness, TokenRows
from ingot.runtime.step.chosen_products import Forward
from ingot.text.prompt import Prompt

CROWDS = (20, 40, 100)  # requests in flight on a GPU, whose ways through a layer differ by rows
_CROWD_TOKENS = 3


@dataclass
class StepCheck:
    """The result of a check.

    Attributes:
        failures: (place, message), in the order of execution.
        worst: the largest deviation by kind of place, in parts of its limit.
        num_steps, num_tokens: that were recorded.
    """

    failures: list[tuple[str, str]] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0
    num_tokens: int = 0


@torch.inference_mode()
def check_steps(
    llm: LLM,
    folder: Path,
    prompts: Sequence[tuple[Sequence[int], torch.Tensor | None]],
    new_tokens: int,
) -> StepCheck:
    """Run prompts greedily, concurrently, one alone and (on a GPU) in crowds, and judge every step; the
    encoding of the last input is judged, too.

    Args:
        llm: of the engine in ``folder``, which has run nothing yet: graphs are captured with their records.
            Its encoder cache has room for all inputs.
        prompts: token ids, each with the features of an input or None.
    """
    splices = llm.engine.manifest.model.splices
    given = [with_input(ids, features, splices=splices) for ids, features in prompts]
    features = [one for _, one in prompts if one is not None]
    records = _recorded(llm, given, new_tokens)
    manifest, device = llm.engine.manifest, llm.engine.device
    model = model_of(manifest)
    weights = EngineTensors(folder / WEIGHTS_FILE, model, device)
    dtype = llm.engine.dtype
    arithmetic, judge = _judged(dtype, model)
    ids = [prompt for prompt, _ in prompts]
    rows = TokenRows(records, dtype, llm.executor.runner.block_size, ids)
    runs = []
    for alike in _ways(records):
        caches = llm.executor.runner.caches
        witness = StepWitness(rows, alike, llm.engine.model, judge, arithmetic.dtype, caches)
        runs.append((witness, ReferenceRun(model, weights, arithmetic, witness=witness)))
    hidden = [run.embed(witness.spans) for witness, run in runs]
    for index in range(manifest.model.num_layers):
        for place, (witness, run) in enumerate(runs):
            hidden[place] = run.layer(index, hidden[place], witness.spans, _unseen)
        weights.release()
    for states, (witness, run) in zip(hidden, runs, strict=True):
        run.logits(run.final_norm(states, _unseen)[witness.logits_rows])
    encoder_arithmetic, of_encoder = _judged(llm.engine.model.encoder_dtype, model)
    # What the decoder makes of the outputs has the decoder's noise.
    taking = of_encoder if llm.engine.dtypes.other is None else Judge(judge.unit, judge.eps)
    if features:  # last: it encodes anew, into the cache that the steps have read
        encoding = EncoderRun(model, weights, arithmetic, encoder_arithmetic)
        check_encoder(llm, encoding, features[-1], of_encoder, taking)
    encoded = taking.worst | of_encoder.worst
    worst = judge.worst | {f"encoder {kind}": ratio for kind, ratio in encoded.items()}
    beyond = dict.fromkeys([*of_encoder.failures(), *taking.failures()])
    failures = [*beyond, *judge.failures(), *rows.wrong_tokens]
    return StepCheck(failures, worst, len(records), rows.num_tokens)


def _unseen(name: str, output: torch.Tensor) -> None:
    return


def _judged(dtype: torch.dtype, model: Decoder) -> tuple[Arithmetic, Judge]:
    """The reference's arithmetic for one in ``dtype``, and the judge of what that gives."""
    narrow = dtype.itemsize == 2
    arithmetic = Arithmetic(torch.float32, dtype) if narrow else Arithmetic(torch.float64)
    return arithmetic, Judge(_unit(dtype, model), torch.finfo(dtype).eps)


def _unit(dtype: torch.dtype, model: Decoder) -> float:
    """The dtype's epsilon; in fp32 eps sqrt(K), the error of a sum of K terms."""
    eps = torch.finfo(dtype).eps
    if dtype.itemsize == 2:
        return eps
    return eps * math.sqrt(max(model.config.hidden_size, model.config.intermediate_size))


def _recorded(llm: LLM, prompts: list[Prompt], new_tokens: int) -> list[StepRecord]:
    """Records of every step of these prompts; up to the first logits that are not finite."""
    records: list[StepRecord] = []
    with suppress(EngineError), _observed(llm.executor.runner.forward, records):
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        llm.generate(prompts, params)
        few = params.replace(max_new_tokens=min(new_tokens, _CROWD_TOKENS))
        llm.generate(prompts[:1], few)
        if llm.engine.device.type == "cuda":
            lengths = [sum(len(p) for p in one.parts if isinstance(p, Sequence)) for one in prompts]
            shortest = prompts[lengths.index(min(lengths))]
            most = llm.engine.manifest.build.max_batch_size
            for crowd in dict.fromkeys(min(crowd, most) for crowd in CROWDS):
                llm.generate([shortest] * crowd, few)
    return records


@contextmanager
def _observed(forward: Forward, records: list[StepRecord]) -> Iterator[None]:
    forward.observer = records.append
    try:
        yield
    finally:
        forward.observer = None


def _ways(records: list[StepRecord]) -> list[list[int]]:
    """Indices of the records with the same places in the same form."""
    ways: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for index, record in enumerate(records):
        places = tuple(sorted((name, type(values[0]).__name__) for name, values in record.values.items()))
        ways.setdefault(places, []).append(index)
    return list(ways.values())
