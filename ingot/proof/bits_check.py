"""Whether ``batch_invariant`` keeps its promise here: golden cases alone and together, to the bit.

found = check_bits(llm, [("short", prompt)], new_tokens=16)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ingot.config.sampling_params import MAX_LOGPROBS, SamplingParams
from ingot.llm.llm import LLM
from ingot.llm.outputs import Answer
from ingot.text.prompt import Prompt

_CROWD = 40  # requests in flight on a GPU, whose ways through a layer differ by rows


@dataclass
class BitsCheck:
    """The result: (case, message) of each case that differs, and the number of tokens compared."""

    failures: list[tuple[str, str]] = field(default_factory=list)
    num_tokens: int = 0


def check_bits(llm: LLM, cases: Sequence[tuple[str, Prompt]], new_tokens: int) -> BitsCheck:
    """Run each case alone, then all at once, and compare every new token and the log-probabilities of the
    likeliest ids. One limit for all: equal.

    Args:
        llm: batch invariant, without prefix reuse, so that prompts are computed each time.
        cases: names and prompts.
    """
    most = min(MAX_LOGPROBS, llm.engine.manifest.model.vocab_size)
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=most)
    alone = [llm.generate(prompt, params)[0].answers[0] for _, prompt in cases]
    crowd = min(_CROWD, llm.engine.manifest.build.max_batch_size) if llm.engine.device.type == "cuda" else 0
    copies = max(1, crowd // max(1, len(cases)))
    together = llm.generate([prompt for _, prompt in cases] * copies, params)
    found = BitsCheck()
    for place, output in enumerate(together):
        (name, _), expected = cases[place % len(cases)], alone[place % len(cases)]
        answer = output.answers[0]
        found.num_tokens += len(answer.token_ids)
        difference = _difference(expected, answer, len(together))
        if difference is not None and all(name != known for known, _ in found.failures):
            found.failures.append((name, f'case "{name}", {difference}'))
    return found


def _difference(alone: Answer, together: Answer, crowd: int) -> str | None:
    """The first token at which two answers differ in any bit."""
    assert alone.logprobs is not None
    assert together.logprobs is not None
    for step, (own, other) in enumerate(zip(alone.logprobs, together.logprobs, strict=True), start=1):
        pairs = zip(
            ((own.token_id, own.logprob), *own.top),
            ((other.token_id, other.logprob), *other.top),
            strict=True,
        )
        for (token, value), (token_there, value_there) in pairs:
            if (token, value) != (token_there, value_there):
                there = f"{value_there!r} for {token_there} among {crowd} requests"
                return f"new token {step}: the log-probability is {value!r} for {token} alone, {there}"
    return None
