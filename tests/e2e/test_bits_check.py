"""``verify --batch-invariant``: log-probabilities alone and together, to the bit."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot import LLM, build
from ingot.config.sampling_params import SamplingParams
from ingot.engine.proof_file import read_proof
from ingot.llm.outputs import Answer, Output
from ingot.proof import verify_engine
from ingot.proof.bits_check import BitsCheck, check_bits
from ingot.runtime.sampling.token_logprobs import TokenLogprobs
from ingot.text.prompt import Prompt
from tests.e2e.terminal import ingot
from tests.e2e.tiny import write_tiny

CASES = [("short", Prompt([[1, 2]])), ("long", Prompt([[3, 4, 5]]))]


def tokens(*steps: tuple[int, float]) -> list[TokenLogprobs]:
    """Steps with a chosen token and its log-probability, which a second token follows."""
    return [TokenLogprobs(token, value, ((token, value), (90, -7.0))) for token, value in steps]


class Scripted:
    """Answers alone, and others together."""

    def __init__(
        self, alone: list[TokenLogprobs], together: list[TokenLogprobs], device: str = "cpu"
    ) -> None:
        self.alone, self.together = alone, together
        self.crowds: list[int] = []
        manifest = SimpleNamespace(
            model=SimpleNamespace(vocab_size=97), build=SimpleNamespace(max_batch_size=8)
        )
        self.engine = SimpleNamespace(manifest=manifest, device=SimpleNamespace(type=device))

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams) -> list[Output]:
        many = [prompts] if isinstance(prompts, Prompt) else list(prompts)
        self.crowds.append(len(many))
        found = self.alone if len(many) == 1 else self.together
        return [
            Output([], [Answer("", [one.token_id for one in found], "length", None, found)]) for _ in many
        ]


def checked(alone: list[TokenLogprobs], together: list[TokenLogprobs]) -> BitsCheck:
    llm: Any = Scripted(alone, together)
    return check_bits(llm, CASES, new_tokens=2)


def test_equal_bits_pass() -> None:
    same = tokens((5, -0.25), (6, -1.5))
    assert checked(same, list(same)) == BitsCheck([], 4)


def test_the_last_bit_counts() -> None:
    found = checked(tokens((5, -0.25), (6, -1.5)), tokens((5, -0.25), (6, math.nextafter(-1.5, 0))))
    assert [name for name, _ in found.failures] == ["short", "long"]
    text = 'case "short", new token 2: the log-probability is -1.5 for 6 alone, -1.4999999999999998 for 6 '
    assert found.failures[0][1] == f"{text}among 2 requests"


def test_a_likely_token_that_was_not_chosen_counts() -> None:
    alone, together = tokens((5, -0.25)), [TokenLogprobs(5, -0.25, ((5, -0.25), (90, -7.5)))]
    assert "-7.0 for 90 alone, -7.5 for 90" in checked(alone, together).failures[0][1]


def test_another_token_counts() -> None:
    assert "-0.25 for 5 alone, -0.25 for 4" in checked(tokens((5, -0.25)), tokens((4, -0.25))).failures[0][1]


def test_a_gpu_has_a_crowd() -> None:
    same = tokens((5, -0.25))
    llm: Any = Scripted(same, same, device="cuda")
    assert check_bits(llm, CASES, new_tokens=1) == BitsCheck([], 8)
    assert llm.crowds == [1, 1, 8]


@pytest.mark.parametrize("flag", [(), ("--batch-invariant",)], ids=["as served", "batch invariant"])
def test_the_terminal_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: tuple[str, ...]
) -> None:
    reuse = []

    def noted(llm: LLM, *rest: Any) -> BitsCheck:
        reuse.append(llm.runtime.prefix_reuse)
        return check_bits(llm, *rest)

    monkeypatch.setattr(verify_engine, "check_bits", noted)
    engine = build(write_tiny(tmp_path / "tiny"), tmp_path / "engine", device="cpu", max_seq_len=24)
    reported = json.loads(ingot("verify", engine, "--device", "cpu", "--json", *flag).stdout)
    assert reported["verdict"] == "proven"
    proof = read_proof(engine)
    assert proof is not None
    assert reported["equal_bits"] == (sum(len(case.new_ids) for case in proof.claims.cases) if flag else None)
    assert reuse == [False] * len(flag), "a prompt from the cache would be computed once"
