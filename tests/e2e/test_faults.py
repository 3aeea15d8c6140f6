"""What goes wrong after an engine's hashes were compared fails ``verify`` in every scheme, rounded or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.llm.verify import verify
from tests.e2e.faults import FAULTS, SCHEMES, build_scheme, faulty

PLACES = {
    "SiLU x 1.01": "layers.0.mlp (activation)",
    "decode query x 1.1": "layers.0.self_attn (attention)",
    "down scales x 1.05": "layers.0.mlp.down_proj",
    "head rolled by a row": "lm_head",
    "head zeroed": "lm_head",
    "head negated": "lm_head",
    "output product zeroed": "layers.0.self_attn.o_proj",
    "rotary off by one": "layers.0.self_attn.qkv_proj (queries)",
}
ROUNDED = [name for name in SCHEMES if name not in ("dense", "w8a16", "w4a16")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """engine(scheme): one layer of the pocket model."""
    root, built = tmp_path_factory.mktemp("faults"), {}

    def of(scheme: str) -> Path:
        if scheme not in built:
            built[scheme] = build_scheme(scheme, root / scheme.replace(", ", "-"), "cpu", layers="0:1")
        return built[scheme]

    return of


@pytest.mark.parametrize("scheme", ROUNDED)
def test_a_sound_engine_is_proven_far_from_its_limits(engine: Callable[[str], Path], scheme: str) -> None:
    found = verify(engine(scheme), "cpu", note=False)
    assert found.verdict == "proven", found.failures
    assert found.num_steps > 16
    assert set(found.steps) >= {"stream", "attn_in", "query", "keys", "values", "attended", "inner", "logits"}
    assert 0 < max(found.steps.values()) < 0.5


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scheme", ROUNDED)
def test_a_fault_fails_where_it_is(engine: Callable[[str], Path], scheme: str, fault: str) -> None:
    with faulty(fault):
        found = verify(engine(scheme), "cpu", note=False)
    assert found.verdict == "failed"
    assert (found.failures[0].kind, found.failures[0].name) == ("step", PLACES[fault])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_gpu(tmp_path: Path, scheme: str) -> None:
    """Fused kernels and graphs, in the engine's 16 bits."""
    built = build_scheme(scheme, tmp_path / "engine", "cuda")
    sound = verify(built, "cuda", note=False)
    assert sound.verdict == "proven", sound.failures
    for fault in FAULTS:
        with faulty(fault):
            found = verify(built, "cuda", note=False)
        assert found.verdict == "failed", fault
        assert any(failure.kind == "step" for failure in found.failures), (fault, found.failures)
