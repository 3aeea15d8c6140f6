"""What counts as an explanation, and whose divergences are asked: without a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.config.decoder_config import RopeConfig
from ingot.measure.align.diagnosis import stage_reader as read
from ingot.measure.align.diagnosis import variant_search as search
from ingot.measure.align.diagnosis.attention_variants import _scales, _windows
from ingot.measure.align.diagnosis.id_differences import explain_ids
from ingot.measure.align.diagnosis.layer_variants import _residuals
from ingot.measure.align.diagnosis.module_variants import embedding_variants, head_variants, norm_variants
from ingot.measure.align.diagnosis.rope_variants import _positions, rope_variants
from ingot.measure.align.diagnosis.stage_reader import all_positions
from ingot.measure.align.diagnosis.stage_spec import EmbeddingSpec, HeadSpec, Products, RopeSpec
from ingot.measure.align.diagnosis.variant import Claim, Variant
from ingot.measure.align.diagnosis.variant_search import best_number
from ingot.measure.align.first_divergence import Divergence, Finding
from ingot.reference.plain_layer import NormSpec

BEFORE, REACH = 4e-3, 4e-3


def divergence(stage: str, layer: int, step: int) -> Divergence:
    rows = torch.zeros(1, 2)
    return Divergence(stage, layer, step, torch.zeros(1, dtype=torch.int64), rows, rows, rows + 1, 1e-6)


def found_by(errors: dict[str, float], before: float = BEFORE) -> list[str]:
    """Culprits that are found where each variant leaves an error."""
    bench: Any = SimpleNamespace(before=before, reach=REACH, code=False, error=errors.__getitem__)
    variants = [
        Variant(name, name, Claim(name, name), Claim(name, name))  # type: ignore[arg-type]
        for name in errors
    ]
    return [finding.culprit for finding in search._rank(bench, variants)]


def test_a_variant_that_hardly_helps_is_no_explanation() -> None:
    """A difference near the floor is within reach of every small change."""
    assert found_by({"eps": 0.9 * BEFORE, "bias": 0.5 * BEFORE, "scale": BEFORE}) == []
    assert found_by({"eps": 0.9 * BEFORE, "bias": 0.2 * BEFORE}) == ["bias"]


def test_what_comes_near_is_not_listed_beside_what_reaches() -> None:
    assert found_by({"near": 0.05, "right": 1e-3}, before=1.0) == ["right"]
    assert found_by({"near": 0.05, "far": 0.2}, before=1.0) == ["near"]


def test_of_findings_that_are_alike_the_likelier_is_first() -> None:
    """It came first in the list; one that is farther than three times the best follows by its distance."""
    near = {"likely": 2.9e-3, "odd": 1e-3, "far": 3.5e-3, "farther": 3.2e-3}
    assert found_by(near, before=1.0) == ["likely", "odd", "farther", "far"]


@pytest.mark.parametrize("later", [("layers.1.mlp", 1, 0), ("layers.0.mlp", 0, 1)], ids=["layer", "step"])
def test_what_comes_later_does_not_explain_the_first(
    later: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding("norm_eps", 1.0, 0.0, "")
    first, known = divergence("layers.0.attention", 0, 0), divergence(*later)
    monkeypatch.setattr(search, "explain", lambda one, *_: [finding] if one is known else [])
    nothing: Any = None
    assert search.explain_first([first, known], nothing, nothing) is None
    assert search.explain_first([first, known, first], nothing, nothing) is None
    assert search.explain_first([known], nothing, nothing) == (known, [finding])


def test_modules_are_asked_first_then_the_layer_then_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm in the wrong place shows in a sum first."""
    names = ("layers.0.residual", "layers.0.post_norm", "layers.0.output", "layers.0")
    every = [divergence(name, 0, 0) for name in names]
    asked: list[str] = []
    monkeypatch.setattr(search, "explain", lambda one, *_: asked.append(one.stage) or [])
    nothing: Any = None
    assert search.explain_first(every, nothing, nothing) is None
    assert asked == ["layers.0.post_norm", "layers.0", "layers.0.residual", "layers.0.output"]


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_before_a_step_s_own_have_the_positions_before_it(rows: int) -> None:
    step = Divergence("layers.0", 0, 1, torch.tensor([rows - 1]), *[torch.zeros(rows, 2)] * 3, 1e-6)
    assert torch.equal(all_positions(step), torch.arange(rows))  # type: ignore[arg-type]
    late = Divergence("layers.0", 0, 1, torch.tensor([rows]), *[torch.zeros(rows, 2)] * 3, 1e-6)
    assert all_positions(late) is None


@pytest.mark.parametrize("window", [0, 300])
def test_windows_beside_the_config_s_are_tried_in_texts_of_any_length(window: int) -> None:
    spec: Any = SimpleNamespace(window=window, positions=torch.arange(1000))
    found = _windows(spec)
    assert window not in found
    assert not window or found[:3] == [0, 299, 301]
    assert {1, 2, 3, 255, 256, 257, 511, 512, 513} <= {*found}
    spec.positions = torch.arange(20)
    assert {*range(1, 20)} <= {*_windows(spec)}


@dataclass(frozen=True)
class Scaled:
    """What is scaled of an attention or of a layer's sums."""

    name: str = "it"
    head_dim: int = 16
    scale: float = 0.25
    qkv: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 64))
    logn_length: int = 0
    attention_residual: float = 1.0
    attention_branch: float = 1.0
    mlp_residual: float = 1.0
    mlp_branch: float = 1.0


@pytest.mark.parametrize("layer", [0, 4])
def test_the_usual_scales_of_attention_are_tried(layer: int) -> None:
    """None; twice; of the hidden size; by the layer's number, which counts from 1; of one side alone."""
    spec: Any = Scaled()
    tried = [one for one in _scales(spec, layer) if one.of_engine.culprit == "attention_scale"]
    usual = [1.0, 1 / 16, 1 / 8, 0.5, *([0.25 / 5] if layer else [])]
    assert sorted(one.spec.scale for one in tried) == pytest.approx(sorted(usual))
    lengths = [one.spec.logn_length for one in _scales(spec, layer) if one.of_engine.culprit == "logn"]
    assert sorted(lengths) == [2048, 8192, 32768]


def test_the_usual_factors_of_sums_are_tried() -> None:
    """Of 6 layers the fourth: by the depth of all sums, and by the layer's number."""
    spec, config = Scaled(), SimpleNamespace(num_layers=6)
    given: Any = spec
    tried = [one.spec for one in _residuals(given, config, 3)]  # type: ignore[arg-type]
    usual = [0.5, 2.0, 0.5**0.5, 2**0.5, 12**-0.5, 12**0.25, 1 / 4]
    for where in ("attention", "mlp"):
        other = "mlp" if where == "attention" else "attention"
        alone = [
            one for one in tried if getattr(one, f"{other}_branch") == getattr(one, f"{other}_residual") == 1
        ]
        branches = [
            getattr(one, f"{where}_branch") for one in alone if getattr(one, f"{where}_residual") == 1
        ]
        residuals = [
            getattr(one, f"{where}_residual") for one in alone if getattr(one, f"{where}_branch") == 1
        ]
        assert sorted(branches) == pytest.approx(sorted([0.0, *usual]))
        assert sorted(residuals) == pytest.approx(sorted([0.0, *usual]))
    both = [one.attention_branch for one in tried if one.attention_branch == one.mlp_branch != 1]
    assert sorted(both) == pytest.approx(sorted(usual))
    assert len(tried) == 2 * 16 + 7


def test_the_usual_scales_of_logits_and_of_embeddings_are_tried() -> None:
    """Of 16 channels."""
    config: Any = SimpleNamespace(hidden_size=16)
    heads = head_variants(HeadSpec("lm_head", torch.ones(5, 16), None), torch.zeros(5, 16), config)
    assert sorted(one.spec.scale for one in heads if one.of_engine.culprit == "logit_scale") == [
        1 / 16,
        1 / 4,
        4,
    ]
    embedding = EmbeddingSpec("embed_tokens", torch.ones(5, 16), torch.ones(9, 16), torch.arange(3))
    tried = list(embedding_variants(embedding))
    assert sorted(one.spec.scale for one in tried if one.of_engine.culprit == "embedding_scale") == [1 / 4, 4]
    shifts = [one.spec.shift for one in tried if one.of_engine.culprit == "positions_shifted"]
    assert sorted(shifts) == [-2, -1, 1, 2]
    assert [one.spec.places for one in tried if one.of_engine.culprit == "positions_missing"] == [None]


@pytest.mark.parametrize(("cached", "changes"), [(True, 5), (False, 2)])
def test_positions_that_are_off_are_tried(cached: bool, changes: int) -> None:
    """Of queries alone, and of the tokens behind a cache: by one, and counted from 0."""
    positions = torch.arange(10)
    rope = RopeSpec(torch.ones(2), positions, positions)
    tried = [
        (one.spec.query_positions.tolist(), one.spec.key_positions.tolist())
        for one in _positions_of(rope, 3 if cached else 10)
    ]
    before, new = [*range(7)], [7, 8, 9]
    wanted = [([at + by for at in range(10)], [*range(10)]) for by in (1, -1)]
    moved = [[*before, *(at + by for at in new)] for by in (1, -1, -7)]
    wanted += [(one, one) for one in moved] if cached else []
    assert sorted(tried) == sorted(wanted)
    assert len(tried) == changes


def _positions_of(rope: RopeSpec, new_tokens: int) -> list[Any]:
    @dataclass(frozen=True)
    class Attention:
        positions: torch.Tensor
        rope: RopeSpec

    spec: Any = Attention(rope.query_positions, rope)
    return [SimpleNamespace(spec=one.spec.rope) for one in _positions(spec, rope, new_tokens)]


@pytest.mark.parametrize("code", [True, False], ids=["engine", "checkpoint"])
def test_a_norm_s_one_is_lacking_or_extra(code: bool) -> None:
    """Where the variant weight + 1 fits the original it lacks one; where it fits the engine, that has it."""
    norm = NormSpec("n", torch.ones(2), None, 1e-6, "rms_norm")
    plus, minus = (one for one in norm_variants(norm) if one.of_engine.culprit == "norm_offset")
    texts = [(one.of_engine if code else one.of_original).text for one in (plus, minus)]
    lacks, extra = "the weight of n lacks the +1", "the weight of n has an extra +1"
    assert texts == ([extra, lacks] if code else [f"{lacks} that the original adds", extra])


@pytest.mark.parametrize("number", [1.0, 3.1, 3.3, 3.5, 70.0, 77.0, 84.0, 9500.0, 1e4])
def test_a_number_is_found_on_both_sides_of_the_grid_s_best_point(number: float) -> None:
    def make(value: float) -> Variant[Any]:
        return Variant(value, "", Claim("", ""), Claim("", ""))  # type: ignore[arg-type]

    found: Any = best_number(make, 1.0, 1e4, lambda value: abs(math.log(value / number)))
    assert found.spec == pytest.approx(number, rel=1e-5)


@pytest.mark.parametrize(("got", "says"), [([1, 7], "a token 1"), ([7, 7], "a second token 7"), ([7], "")])
def test_a_first_token_is_distinguished_from_a_second_one(got: list[int], says: str) -> None:
    rows = torch.arange(1)
    one = Divergence("prompt", None, 0, rows, rows, torch.tensor([7]), torch.tensor(got), 0.0)
    found = explain_ids(one)
    assert len(found) == bool(says)
    assert all(f"the prompt begins with {says} that the original" in finding.text for finding in found)


@pytest.mark.parametrize("code", [True, False], ids=["engine", "checkpoint"])
def test_a_lost_bias_explains_no_fault_of_the_engine_s_code(
    code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights give the original's output, so that none of them is missing."""
    right: Any = Variant("bias", "", Claim("qkv_bias", ""), Claim("qkv_bias", ""))  # type: ignore[arg-type]
    bench: Any = SimpleNamespace(before=1.0, reach=REACH, code=code, error=lambda _: 0.0)
    bench.spec = bench.inputs = bench.target = None
    bench.held_out = lambda: bench
    monkeypatch.setattr(search._Bench, "of", lambda *_: bench)
    monkeypatch.setattr(search, "_listed", lambda _: iter(()))
    monkeypatch.setattr(search, "_searched", lambda _: iter(()))
    monkeypatch.setattr(search, "solved_biases", lambda *_: iter([right]))
    nothing: Any = None
    config: Any = SimpleNamespace(rope_of=lambda _: None, replace=lambda **_: None)
    found = search.explain(divergence("layers.0.attention", 0, 0), nothing, config)
    assert [one.culprit for one in found] == ([] if code else ["qkv_bias"])


def test_a_solved_bias_is_judged_by_tokens_that_it_was_not_solved_from() -> None:
    """Both the difference before and the one after."""
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))
    spec = HeadSpec("lm_head", torch.eye(2), None)
    target, bias = x.clone(), torch.tensor([3.0, -1.0])
    target[3::4] += torch.tensor([[0.5, 0.0], [0.0, 0.25]])
    target[:3] += bias
    target[4:7] += bias
    nothing: Any = None
    given = dict.fromkeys(("divergence", "embedding", "config"), nothing)
    products = Products([])
    bench = search._Bench(
        **given, spec=spec, inputs=x, target=target, before=9.0, reach=1e-5, code=False, products=products
    )
    held = bench.held_out()
    size = float(target[[3, 7]].norm())
    assert held.before == pytest.approx(float((target - x)[[3, 7]].norm()) / size)
    right = HeadSpec("lm_head", torch.eye(2), bias)
    assert held.error(right) == pytest.approx(float((target - x - bias)[[3, 7]].norm()) / size)
    assert bench.error(right) == pytest.approx(float((target - x - bias).norm() / target.norm()))


@pytest.mark.parametrize("theta", [None, 1e4], ids=["without", "with"])
def test_positions_are_missing_where_the_other_side_has_them(theta: float | None) -> None:
    """A variant that turns what the config does not, and fits the original, says what the engine lacks; one
    that does not turn what the config does, what it has too many.
    """

    @dataclass(frozen=True)
    class Attention:
        positions: torch.Tensor
        rope: RopeSpec | None
        head_dim: int = 4

    positions = torch.arange(3)
    config: Any = SimpleNamespace(rope=None if theta is None else RopeConfig(4, theta))
    rope = None if theta is None else RopeSpec(torch.ones(2), positions, positions)
    spec: Any = Attention(positions, rope)
    names = {"rope_missing", "rope_extra"}
    found = [one for one in rope_variants(spec, config, 3) if {one.of_original.culprit} & names]
    assert found
    wanted = ("rope_missing", "rope_extra") if theta is None else ("rope_extra", "rope_missing")
    assert {(one.of_original.culprit, one.of_engine.culprit) for one in found} == {wanted}


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_the_head_is_run_again_with_its_softcap(cap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(5, 4), torch.randn(3, 4)
    monkeypatch.setattr(read, "linear_tensors", lambda model, name: (weight, None))
    model: Any = SimpleNamespace(embed_tokens=SimpleNamespace(weight=weight))
    config: Any = SimpleNamespace(logit_softcap=cap)
    rows = torch.zeros(3, 5)
    one = Divergence("logits", None, 0, torch.arange(3), x, rows, rows, 0.0)
    spec = read.read_stage(one, model, config)
    assert spec is not None
    logits = x @ weight.T
    torch.testing.assert_close(spec.run(x), cap * (logits / cap).tanh() if cap else logits)


def test_a_vocabulary_that_is_off_by_one_is_tried_both_ways() -> None:
    weight = torch.randn(5, 3)
    config: Any = SimpleNamespace(hidden_size=3)
    variants = head_variants(HeadSpec("lm_head", weight, None), torch.zeros(5, 3), config)
    down, up = (one.spec.weight for one in variants if one.of_original.culprit == "vocabulary_order")
    assert torch.equal(down[1:], weight[:-1])
    assert torch.equal(up[:-1], weight[1:])
