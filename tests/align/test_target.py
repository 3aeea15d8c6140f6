"""Which prompts and which originals go together with an engine, at each limit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.align import target as module
from ingot.align.target import Target, check_same_model, make_cases
from ingot.checkpoint.layout import CONFIG
from ingot.config.build import BuildConfig
from ingot.config.quant import QuantConfig
from ingot.errors import CheckpointError, RequestError

LIMIT, VOCABULARY = 10, 50


@dataclass(frozen=True)
class Shape:
    """What is compared of a model."""

    kind: str = "text"
    architecture: str = "LlamaForCausalLM"
    vocab_size: int = VOCABULARY
    hidden_size: int = 32
    num_layers: int = 4


@dataclass(frozen=True)
class Engine:
    """A target without a tokenizer."""

    model: Shape = field(default_factory=Shape)
    build: BuildConfig = field(default_factory=lambda: BuildConfig("fp32", max_seq_len=LIMIT))
    quant: QuantConfig = field(default_factory=QuantConfig)
    text: Any = field(default_factory=lambda: SimpleNamespace(tokenizer=None))


@pytest.mark.parametrize(("length", "steps"), [(LIMIT, 0), (LIMIT - 3, 3), (1, LIMIT - 1)])
def test_a_prompt_and_its_steps_may_fill_the_engine(length: int, steps: int) -> None:
    nothing: Any = None
    engine: Any = Engine()
    ids = [VOCABULARY - 1, *[0] * (length - 1)]
    cases, found = make_cases(engine, nothing, [ids, ids[:1]], steps)
    assert ([case.ids for case in cases], found) == ([ids, ids[:1]], steps)
    with pytest.raises(RequestError, match=f"{length + 1} tokens and {steps} steps.*at most {LIMIT} with"):
        make_cases(engine, nothing, [ids[:1], [*ids, 0]], steps)
    with pytest.raises(RequestError, match=f"{length} tokens and {steps + 1} steps"):
        make_cases(engine, nothing, [ids], steps + 1)


@pytest.mark.parametrize("odd", [VOCABULARY, -1])
def test_an_unknown_id_is_refused(odd: int) -> None:
    nothing: Any = None
    engine: Any = Engine()
    with pytest.raises(RequestError, match=rf"\[{odd}\].*0 to {VOCABULARY - 1}"):
        make_cases(engine, nothing, [[1, odd]], 0)
    with pytest.raises(RequestError, match="at least 1 token"):
        make_cases(engine, nothing, [[]], 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"num_layers": 5}, "layers 5"),
        ({"hidden_size": 33}, "hidden size 33"),
        ({"vocab_size": 51}, "vocabulary 51"),
        ({"architecture": "Other"}, "architecture Other"),
    ],
)
@pytest.mark.parametrize("layers", [None, (0, 3), (1, 3), (2, 4), (1, 9)])
def test_another_model_is_refused_by_what_differs(
    changes: dict[str, Any], says: str | None, layers: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine with some of the original's layers, too, and of a range beyond its end."""
    kept = {None: 4, (0, 3): 3, (1, 3): 2, (2, 4): 2, (1, 9): 3}[layers]
    engine: Any = replace(
        Engine(model=Shape(num_layers=kept)), build=BuildConfig("fp32", max_seq_len=LIMIT, layers=layers)
    )
    other = replace(Shape(), **changes)
    if says == "layers 5" and layers is not None:  # the layers that are kept decide
        says = "layers 4" if layers == (1, 9) else None
    read: list[Path] = []
    monkeypatch.setattr(module, "read_json", lambda path: read.append(path))
    monkeypatch.setattr(module, "decoder_config", lambda _: other)
    source: Any = SimpleNamespace(path=Path("original"))
    if says is None:
        check_same_model(engine, source)
    else:
        with pytest.raises(CheckpointError, match=f"different model.*{says}"):
            check_same_model(engine, source)
    assert read == [Path("original") / CONFIG]


def test_weights_are_of_the_build_s_dtype() -> None:
    import torch

    nothing: Any = None
    shape: Any = Shape()
    one = Target("e", nothing, shape, BuildConfig(dtype="bf16"), torch.float32)
    assert (one.weights, one.compute) == (torch.bfloat16, torch.float32)
