"""Golden cases through an engine as it serves, judged by their noise floors.

A deviation may be FACTOR noise floors: this machine's rounding and the reference's are two draws of the same
noise (their difference is larger by sqrt(2)), eight projections estimate it to about a quarter, and a kernel
may round where the reference does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ingot.building.golden.golden_cases import row_checksum, row_digest
from ingot.building.golden.golden_encoder import GoldenInput, inputs_of
from ingot.building.golden.golden_prompts import with_input
from ingot.config.json_config import JsonConfig
from ingot.config.sampling_params import MAX_LOGPROBS, SamplingParams
from ingot.engine.proof_file import SPLIT, Claims, Floor, GoldenCase
from ingot.engine.sketch import OVERFLOW, Checksum, Sketch, deviation
from ingot.errors import EngineError, RequestError
from ingot.layers.linear import linears
from ingot.llm.llm import LLM
from ingot.llm.outputs import Answer
from ingot.proof.encoder_replay import encoder_deviations, features_deviations
from ingot.runtime.sampling.token_logprobs import TokenLogprobs
from ingot.text.prompt import Prompt

FACTOR = 5.0
_TAPPED = ("layers.*", "layers.*.self_attn", "layers.*.mlp", "norm")
_CROSS = "layers.*.encoder_attn"


@dataclass(frozen=True)
class Failure(JsonConfig):
    """What is wrong: its kind, its name, and a message."""

    kind: Literal[
        "file", "tensor", "engine", "tokenizer", "ids", "logits", "module", "step", "bits", "metric", "source"
    ]
    name: str
    message: str


@dataclass
class GoldenReplay:
    """The result of a replay.

    ``worst`` are the largest deviations in noise floors, ``limits`` what passes (of modules the strictest and
    the loosest), ``equal_rows`` the rows of logits that round to the same 1/64 everywhere, which are shown
    and not judged.
    """

    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    equal_rows: int = 0
    num_rows: int = 0
    first_bad_module: str | None = None

    def measure(self, what: str, error: float, floor: float) -> bool:
        """Keep a deviation; returns whether it is within the limit."""
        ratio = error / floor if max(error, floor) < OVERFLOW else math.inf
        self.worst[what] = max(self.worst.get(what, 0.0), ratio)
        return ratio <= FACTOR

    def fail(
        self, kind: Literal["engine", "tokenizer", "ids", "logits", "module"], name: str, message: str
    ) -> None:
        self.failures.append(Failure(kind, name, message))


def replay(llm: LLM, claims: Claims, report: Callable[[str], None]) -> GoldenReplay:
    """Run every case: ids and top tokens as concurrent requests, rows of logits, and module by module."""
    played = GoldenReplay()
    if not claims.cases:
        played.notes.append("max_seq_len is too small for a golden case: only hashes were compared")
        return played
    floor = _floor(llm, claims)
    model = llm.engine.manifest.model
    inputs = inputs_of(model, claims.inputs)
    features = [one.features.float() for one in inputs]
    played.limits = {
        "logprobs": FACTOR * floor.logprobs,
        "logits": FACTOR * floor.logits,
        "modules, least": FACTOR * min(floor.modules.values()),
        "modules, most": FACTOR * max(floor.modules.values()),
    }
    _tokenizer(llm, claims, played)
    report("golden cases")
    given = [(case.prompt_ids, None if case.input is None else features[case.input]) for case in claims.cases]
    prompts = [with_input(*one, splices=model.splices) for one in given]
    try:
        _answers(llm, claims, prompts, floor, played)
    except EngineError as error:  # logits that are not finite
        played.fail("engine", "logits", str(error))
    _rows(llm, claims, prompts, floor, played)
    report("modules")
    _features(llm, claims, inputs, played)
    _modules(llm, claims, prompts, features, floor, played)
    if model.encoder is not None and not claims.inputs:
        played.notes.append("the proof says nothing of the encoder; build the engine again for one that does")
    if played.failures and played.first_bad_module is None and played.failures[0].kind != "tokenizer":
        played.notes.append(
            "run module by module, every layer is right: the fault is in what runs instead of "
            "modules (CUDA graphs, fused kernels), in the head or in the sampler"
        )
    order = ("module", "engine", "logits", "ids", "tokenizer")
    played.failures.sort(key=lambda failure: order.index(failure.kind))
    return played


def _floor(llm: LLM, claims: Claims) -> Floor:
    """Of the arithmetic that the engine's products have here; a proof of an older Ingot knows none of split
    inputs.
    """
    split = any(linear.scheme.splits for linear in linears(llm.engine.model).values())
    own = claims.floors[str(llm.engine.dtypes)]
    return claims.floors.get(SPLIT, own) if split else own


def percent(share: float) -> str:
    """A limit with two significant digits, without an exponent above 100 %."""
    return f"{100 * share:.{'0f' if 0.1 <= share < 1e4 else '2g'}} %"


def _features(llm: LLM, claims: Claims, inputs: Sequence[GoldenInput], played: GoldenReplay) -> None:
    """Compares this machine's preparation of the inputs."""
    try:
        for one, (name, off, limit) in zip(
            inputs, features_deviations(llm, claims.inputs, inputs), strict=True
        ):
            what = one.features_name
            if not played.measure(what, off, limit):
                played.fail("module", what, f"{what} of {name} {_in_floors(off, limit)}")
    except RequestError as error:  # a package is missing
        played.notes.append(f"the inputs' preparation was not compared: {error.what}")


def _tokenizer(llm: LLM, claims: Claims, played: GoldenReplay) -> None:
    for case in claims.cases:
        if case.text is None or llm.tokenizer is None:
            continue
        ids = tuple(llm.tokenizer.encode(case.text))[: len(case.prompt_ids)]
        if ids != case.prompt_ids:
            where = first_difference(ids, case.prompt_ids)
            text = f'case "{case.name}": the tokenizer gives different ids from token {where} on'
            played.fail("tokenizer", case.name, text)


def _answers(llm: LLM, claims: Claims, prompts: list[Prompt], floor: Floor, played: GoldenReplay) -> None:
    """Greedy ids as they are served, and again with log-probabilities, which another GPU path gives."""
    count = max(len(case.new_ids) for case in claims.cases)
    params = SamplingParams(max_new_tokens=count, ignore_eos=True)
    if llm.engine.device.type == "cuda":
        for case, output in zip(claims.cases, llm.generate(prompts, params), strict=True):
            _ids(case, output.answers[0], floor, played)
    most = min(MAX_LOGPROBS, llm.engine.manifest.model.vocab_size)
    for case, output in zip(claims.cases, llm.generate(prompts, params.replace(logprobs=most)), strict=True):
        same = _ids(case, output.answers[0], floor, played)
        for step, found in list(enumerate(output.answers[0].logprobs or ()))[: same + 1]:
            if step < len(case.steps) and not _likeliest(case, step, found, floor, played):
                break  # what follows a wrong token is wrong too


def _ids(case: GoldenCase, answer: Answer, floor: Floor, played: GoldenReplay) -> int:
    """How many ids are the case's; another one is right where the margin is within the limit."""
    same = first_difference(tuple(answer.token_ids), case.new_ids)
    if same < len(case.new_ids):
        step, chosen = case.steps[same], answer.token_ids[same]
        logits = dict(zip(step.top_ids, step.top_logits, strict=True))
        margin = step.top_logits[0] - logits.get(chosen, step.top_logits[-1])
        where = f'case "{case.name}", new token {same + 1}: {chosen} instead of {step.top_ids[0]}'
        if margin <= 2 * FACTOR * floor.logprobs:
            text = f"{where}, a tie within the noise (margin {margin:.2g}); the rest was not compared"
            played.notes += [text] if text not in played.notes else []
        else:
            played.fail("ids", case.name, f"{where}, by a margin of {margin:.2g}")
    return same


def _likeliest(case: GoldenCase, step: int, found: TokenLogprobs, floor: Floor, played: GoldenReplay) -> bool:
    """Whether the top tokens' log-probabilities are within the limit; a missing one is below the others."""
    position, ours = case.steps[step], dict(found.top)
    for token, logit in zip(position.top_ids, position.top_logits, strict=True):
        expected, lowest = logit - position.log_sum, min(ours.values())
        error = abs(ours[token] - expected) if token in ours else max(expected - lowest, 0.0)
        if not played.measure("logprobs", error, floor.logprobs):
            text = f'case "{case.name}", new token {step + 1}: the log-probability of {token}'
            played.fail("logits", case.name, f"{text} {_in_floors(error, floor.logprobs)}")
            return False
    return True


def _rows(llm: LLM, claims: Claims, prompts: list[Prompt], floor: Floor, played: GoldenReplay) -> None:
    equal = total = 0
    for case, prompt in zip(claims.cases, prompts, strict=True):
        if not case.rows:
            continue
        logits = llm.logits(prompt)
        for row in case.rows:
            error = deviation(row_checksum(logits[row.position]), row.checksum)
            total += 1
            equal += row_digest(logits[row.position]) == row.digest
            if not played.measure("logits", error, floor.logits):
                text = f'case "{case.name}", prompt token {row.position + 1}: the row of logits'
                played.fail("logits", case.name, f"{text} {_in_floors(error, floor.logits)}")
                break
    played.equal_rows, played.num_rows = equal, total


def _modules(
    llm: LLM,
    claims: Claims,
    prompts: list[Prompt],
    features: Sequence[torch.Tensor],
    floor: Floor,
    played: GoldenReplay,
) -> None:
    """Checksums of every module's output; the first that is off fails."""
    first: tuple[int, str, str] | None = None
    order = {name: place for place, name in enumerate(floor.modules)}
    cases = zip(claims.cases, prompts, strict=True)
    of_cases = ((f'case "{c.name}"', *found) for c, prompt in cases for found in _deviations(llm, c, prompt))
    of_inputs = (
        (f'input "{one.name}"', name, "encoded", error)
        for one, given in zip(claims.inputs, features, strict=True)
        for name, error in encoder_deviations(llm, one, given)
    )
    for what, name, part, error in itertools.chain(of_inputs, of_cases):
        if played.measure("modules", error, floor.modules[name]):
            continue
        text = f"{name} {_in_floors(error, floor.modules[name])} ({what}, {part})"
        first = (order[name], name, text) if first is None or order[name] < first[0] else first
    if first is not None:
        played.first_bad_module = first[1]
        played.fail("module", first[1], f"the first module that is off: {first[2]}")


def _deviations(llm: LLM, case: GoldenCase, prompt: Prompt) -> Iterator[tuple[str, str, float]]:
    model = llm.engine.manifest.model
    crosses = case.input is not None and model.crosses
    params = SamplingParams(max_new_tokens=len(case.new_ids), ignore_eos=True)
    with llm.tap(*_TAPPED, *((_CROSS,) if crosses else ())) as seen:
        try:
            ids = tuple(llm.generate(prompt, params)[0].token_ids)
        except EngineError:  # the prompt ran; its checksums say where values stop being finite
            ids = ()
    same = first_difference(ids, case.new_ids)
    length = len(case.prompt_ids) + (0 if case.input is None else model.placeholders)
    for name, expected in case.prompt.items():
        yield name, "prompt tokens", deviation(_sketch(name, seen[name][:length]), expected)
        if name in case.new and same >= len(case.new_ids) - 1:
            yield name, "decoded tokens", deviation(_sketch(name, seen[name][length:]), case.new[name])


def _in_floors(error: float, floor: float) -> str:
    if floor >= OVERFLOW:
        return "overflows in this dtype, as it did when built; build it in bf16"
    if not error < OVERFLOW:
        return "is not finite"
    return f"is off by {error:.3g}, {error / floor:.3g} noise floors"


def _sketch(name: str, rows: torch.Tensor) -> Checksum:
    return Sketch(name).add(rows, first=0).checksum()


def first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """How many leading values of ``theirs`` are in ``ours`` at the same place."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
