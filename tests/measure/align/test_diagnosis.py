"""Every planted bug is named first, by the first stage that can tell; a clean engine and an unknown bug are
not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot import LLM, SamplingParams
from ingot.config.runtime_config import RuntimeConfig
from ingot.measure.align.diagnosis import explain, explain_first
from ingot.measure.align.diagnosis.stage_reader import read_stage
from ingot.measure.align.diagnosis.stage_spec import run
from ingot.measure.align.diagnosis.variant_search import distance
from ingot.measure.align.first_divergence import Divergence, Finding
from tests.e2e.tiny import write_tiny
from tests.measure.align.planted import BUGS, plant
from tests.measure.align.planted_on_disk import ON_DISK, plant_on_disk
from tests.measure.align.traced import divergences
from tests.parity.test_huggingface import LLAMA3
from tests.tiny_models import random_ids, save_model, tiny_config

IDS = random_ids(24, seed=5)
LONG = SamplingParams(temperature=0.0, max_new_tokens=12)
CASES = [  # every bug in one of its kinds, in turn; `make test-all` plants it in the others
    pytest.param(name, kind, marks=() if kind == bug.kinds[turn % len(bug.kinds)] else pytest.mark.slow)
    for turn, (name, bug) in enumerate(BUGS.items())
    for kind in bug.kinds
]
# One permutation of rows with two names.
ALSO = {"rope_style": {"head_order"}}
DISK_NEEDS = {"head_untied": (("tie_word_embeddings", True),)}
DISK_CASES = [(name, kind) for name, (_, _, kinds) in ON_DISK.items() for kind in kinds]


Made = Callable[..., Path]


def load(folder: Path) -> LLM:
    return LLM(folder, "cpu", max_batch_size=2, runtime=RuntimeConfig(block_size=16))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Folder of a tiny checkpoint, one for each kind and set of changes."""

    made: dict[str, Path] = {}

    def make(kind: str, changes: tuple[tuple[str, Any], ...] = ()) -> Path:
        key = f"{kind} {changes}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            save_model(tiny_config(kind, **dict(changes)), made[key], seed=3)
        return made[key]

    return make


def named(clean: LLM, broken: LLM, steps: int = 1) -> list[Finding]:
    """What ``broken`` is found guilty of."""
    found = divergences(clean, broken, IDS, steps)
    explained = explain_first(found, broken.engine.model, broken.engine.manifest.model)
    return [] if explained is None else explained[1]


@pytest.mark.stays(
    "rope_twice-llama",
    "rope_scaling-qwen2",
    "gate_up_swapped-qwen2",
    "activation_near-gpt2",
    "norm_offset-llama",
    "mask_ahead-gpt2",
    "residual_missing-llama",
    "o_bias_missing-gpt2",
    "mlp_bias_missing_gated-llama",
    "down_conv_layout-gpt2",
    "head_order_blocks-llama",
    "logit_scale-llama",
)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_planted_bug_is_named_first(name: str, kind: str, checkpoint: Made) -> None:
    bug = BUGS[name]
    folder = checkpoint(kind, bug.config)
    clean, broken = load(folder), load(folder)
    plant(broken, name)
    findings = named(clean, broken, steps=3 if bug.decode else 1)
    assert findings, "nothing found"
    assert findings[0].culprit == bug.culprit, [f.text for f in findings]
    assert findings[0].after <= findings[0].before / 10
    wrong = {f.culprit for f in findings} - {bug.culprit} - ALSO.get(name, set())
    assert not wrong, [f.text for f in findings]


@pytest.mark.stays(
    "rope_base-llama",
    "rope_scaling-qwen2",
    "rope_style-llama",
    "gate_up_swapped-qwen2",
    "activation-gpt2",
    "norm_eps-llama",
    "norm_eps_layer-gpt2",
    "norm_offset-qwen2",
    "window-qwen2",
    "mlp_bias_doubled-gpt2",
    "o_transposed-llama",
    "head_untied-llama",
)
@pytest.mark.parametrize(("name", "kind"), DISK_CASES)
def test_a_bug_planted_on_disk_is_named_first(name: str, kind: str, checkpoint: Made, tmp_path: Path) -> None:
    folder = checkpoint(kind, DISK_NEEDS.get(name, ()))
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    plant_on_disk(copy, name)
    findings = named(load(folder), load(copy))
    assert findings, "nothing found"
    assert findings[0].culprit == ON_DISK[name][0], [f.text for f in findings]
    wrong = {f.culprit for f in findings} - {ON_DISK[name][0]} - ALSO.get(name, set())
    assert not wrong, [f.text for f in findings]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "mistral"])
def test_a_clean_engine_diverges_nowhere_and_its_stages_have_no_findings(kind: str, checkpoint: Made) -> None:
    clean = load(checkpoint(kind))
    assert not list(divergences(clean, clean, IDS, 2))
    for divergence in divergences(clean, clean, IDS, 2, least=-1.0):
        assert explain(divergence, clean.engine.model, clean.engine.manifest.model) == []


UNKNOWN = {
    "self_attn.qkv_proj.weight": 0.02,
    "self_attn.o_proj.weight": 0.02,
    "mlp.down_proj.weight": 0.3,
    "input_layernorm.weight": 0.1,
    "post_attention_layernorm.weight": 0.5,
}


@pytest.mark.stays(
    "mlp.down_proj.weight-llama", "post_attention_layernorm.weight-gpt2", "input_layernorm.weight-gpt2"
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_bug_that_is_no_variant_is_not_guessed(name: str, kind: str, checkpoint: Made) -> None:
    clean, broken = load(checkpoint(kind)), load(checkpoint(kind))
    weight = broken.engine.model.layers[1].get_parameter(name)
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    weight.add_(UNKNOWN[name] * noise)
    found = list(divergences(clean, broken, IDS))
    assert found
    for divergence in found:
        findings = explain(divergence, broken.engine.model, broken.engine.manifest.model)
        assert findings == [], (divergence.stage, [f.text for f in findings])


@pytest.mark.stays("gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_one_changed_weight_is_not_guessed(kind: str, checkpoint: Made) -> None:
    clean, broken = load(checkpoint(kind)), load(checkpoint(kind))
    broken.engine.model.layers[1].self_attn.qkv_proj.weight[3, 5] += 1.0
    assert list(divergences(clean, broken, IDS))
    assert named(clean, broken) == []


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-relu": ("gpt2", {"activation_function": "relu", "layer_norm_epsilon": 1e-3}),
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("qwen2", {"rope_parameters": YARN}),
    "window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}


@pytest.mark.parametrize("name", STAGES)
def test_the_specs_compute_what_the_modules_compute(name: str, checkpoint: Made) -> None:
    kind, changes = STAGES[name]
    llm = load(checkpoint(kind, tuple(changes.items())))
    assert_specs_equal(llm)


@pytest.mark.parametrize("length", [15, 24, 31])
def test_the_specs_compute_what_qwen_v1_computes(length: int, tmp_path: Path) -> None:
    """Past its training length: log-n queries and a rotary base that the prompt's length stretches, whichever
    length is reached by the tokens behind it.
    """
    folder = write_tiny(tmp_path / "qwen", seq_length=16, max_position_embeddings=64)
    assert_specs_equal(load(folder), IDS[:length] + IDS[: max(length - len(IDS), 0)])


def assert_specs_equal(llm: LLM, ids: list[int] = IDS) -> None:
    model, config = llm.engine.model, llm.engine.manifest.model
    every = list(divergences(llm, llm, ids, 3, least=-1.0))
    assert len(every) == 3 * (3 + 7 * config.num_layers)
    compared = 0
    for divergence in every:
        spec = read_stage(divergence, model, config)
        if spec is None:
            assert divergence.step > 0
            assert divergence.stage == f"layers.{divergence.layer}"
            continue
        output = run(spec, divergence.inputs)[-divergence.expected.shape[0] :]
        assert distance(output, divergence.expected) < 2e-6, divergence.stage
        compared += 1
    assert compared == len(every) - 2 * config.num_layers


def explained(llm: LLM, stage: str, expected: list[int], got: list[int]) -> list[Finding]:
    """What is found of ids that differ."""
    rows, ours = torch.arange(len(expected)), torch.tensor(got, dtype=torch.int64)
    divergence = Divergence(stage, None, 0, rows, rows, torch.tensor(expected), ours, 0.0)
    return explain(divergence, llm.engine.model, llm.engine.manifest.model)


@pytest.mark.parametrize(
    ("stage", "expected", "got", "culprit"),
    [
        ("prompt", [1, 7, 8], [7, 8], "bos_missing"),
        ("prompt", [7, 8], [1, 7, 8], "bos_extra"),
        ("ids", [1, 7, 8], [1, 1, 7, 8], "bos_extra"),
        ("ids", [1, 7, 8], [2, 7, 8], "bos_other"),
        ("prompt", [7, 8], [7, 8, 2], "eos_extra"),
        ("prompt", [7, 8, 2], [7, 8], "eos_missing"),
        ("prompt", [3, 4, 5, 7, 8], [7, 8], "prefix_missing"),
        ("prompt", [7, 8], [7, 8, 3, 4], "suffix_extra"),
        ("greedy", [5, 6, 2], [5, 6, 2, 9, 9, 4], "stop_ids"),
        ("greedy", [5, 6, 2, 9], [5, 6], "stop_ids"),
    ],
)
def test_ids_are_explained(
    stage: str, expected: list[int], got: list[int], culprit: str, checkpoint: Made
) -> None:
    (finding,) = explained(load(checkpoint("llama")), stage, expected, got)
    assert finding.culprit == culprit
    assert finding.after == 0.0 < finding.before <= 1.0


@pytest.mark.parametrize("stage", ["prompt", "ids", "greedy"])
def test_other_ids_are_not_guessed(stage: str, checkpoint: Made) -> None:
    llm = load(checkpoint("llama"))
    assert explained(llm, stage, [1, 2, 3], [1, 2, 3]) == []
    assert explained(llm, stage, [1, 2, 3, 4], [1, 9, 3, 5]) == []


def test_an_engine_without_its_stop_ids_runs_on(checkpoint: Made) -> None:
    llm = load(checkpoint("llama"))
    prompt = random_ids(6, seed=1)
    end = llm.generate([prompt], LONG)[0].token_ids[3]
    llm.executor.stop_ids = frozenset([end])
    llm.executor.selector.stop_ids = frozenset([end])
    stopped = list(llm.generate([prompt], LONG)[0].token_ids)
    plant(llm, "stop_ids")
    endless = list(llm.generate([prompt], LONG)[0].token_ids)
    assert len(stopped) < len(endless)
    (finding,) = explained(llm, "greedy", stopped, endless)
    assert finding.culprit == "stop_ids"
    assert str(end) in finding.text
