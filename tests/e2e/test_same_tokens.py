"""What docs/numerics.md promises of random requests that are batched, cut, preempted and reused at once.

In fp32 on a CPU: the same tokens in the default mode, logits within rounding, whatever the weights; with
``batch_invariant`` the same bits of logits, 8-bit caches included.
"""

from __future__ import annotations

import pytest
import torch

from ingot import SamplingParams
from tests.e2e.same_tokens import ALONE, LAYERED, SCHEMES, TIGHT, Make, compare, engines, requests
from tests.e2e.watch import Steps
from tests.tiny_models import random_ids

ROUNDING = 2e-5  # relative to the largest logit; a quantum of 8 bits that flips shows as 1e-3 and more
NARROW_CACHES = ("int8 cache", "fp8 cache")  # on dense weights
# A sum in another order may round an input to the next value of e4m3, 6 to 12 % away.
COARSE = ("w8a8-fp8",)
WEIGHT_ONLY = ("w8a16", "w4a16")  # as dense but for their weights, which the other mode has
ASKED = requests(16, seed=3)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return engines(tmp_path_factory.mktemp("same"))


def check_ways(steps: Steps) -> None:
    """Every way of running a request did happen."""
    assert steps.chunks > 5
    assert steps.preemptions > 3
    assert steps.largest_batch > 4
    assert sum(start > 0 for start in steps.first_starts.values()) > 3, "cached beginnings"


@pytest.mark.stays("dense", "w8a8, int8 cache", "rptq-w4a4")
@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(scheme, marks=pytest.mark.slow if scheme in WEIGHT_ONLY else ())
        for scheme in SCHEMES
        if scheme not in NARROW_CACHES + COARSE
    ],
)
def test_default_mode_gives_the_same_tokens(make: Make, scheme: str) -> None:
    differ, off, _, steps = compare(make, scheme, ASKED, batch_invariant=False)
    check_ways(steps)
    assert differ == 0
    assert off < ROUNDING


@pytest.mark.stays("dense", "w4a8", "fp8 cache")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_batch_invariant_mode_gives_the_same_bits(make: Make, scheme: str) -> None:
    differ, _, rows, steps = compare(make, scheme, ASKED, batch_invariant=True)
    check_ways(steps)
    assert (differ, rows) == (0, 0)


@pytest.mark.stays("dense-False")
@pytest.mark.grid(1)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("scheme", ["dense", "w8a8", "w4a8", "rptq-w4a4", "w8a8, int8 cache"])
def test_a_few_layers_per_step_change_nothing(make: Make, scheme: str, batch_invariant: bool) -> None:
    asked = requests(16, seed=3, most_new=40)  # long prompts wait for their turn: it takes long answers
    differ, off, rows, steps = compare(make, scheme, asked, batch_invariant=batch_invariant, way=LAYERED)
    assert steps.preemptions > 3
    assert steps.layered > 10
    assert differ == 0
    assert off < ROUNDING
    assert rows == 0 or not batch_invariant


@pytest.mark.stays("w8a8, int8 cache", "rptq-w4a4")
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "rptq-w4a4", "w8a8, int8 cache"])
def test_hidden_states_of_rounded_layers_have_the_same_bits(make: Make, scheme: str) -> None:
    """Whole, cut, and decoded: between exact products nothing is left that follows the shape of a step."""
    whole, cut = make(scheme, **ALONE), make(scheme, **TIGHT)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    for seed in range(3):
        ids, found = random_ids(50, seed=seed), []
        answer = whole.generate(ids, params)[0].token_ids
        for llm, prompt, values in (
            (whole, ids, params),
            (cut, ids, params),
            (whole, ids + answer[:-1], params.replace(max_new_tokens=1)),
        ):
            with llm.tap("norm") as seen:
                llm.generate(prompt, values)
            found.append(seen["norm"])
        assert found[0].shape[0] == 65
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
