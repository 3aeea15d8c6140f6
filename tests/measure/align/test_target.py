"""Which prompts and which originals go together with an engine, at each limit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.checkpoint.checkpoint_files import CONFIG
from ingot.config.build_config import BuildConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.errors import CheckpointError, RequestError
from ingot.measure.align import align_target as module
from ingot.measure.align.align_target import AlignCase, TextCheck, check_same_model, make_cases
from ingot.measure.align.original import Trace

LIMIT, VOCABULARY = 10, 50


@dataclass(frozen=True)
class Shape:
    """What is compared of a model."""

    architecture: str = "LlamaForCausalLM"
    vocab_size: int = VOCABULARY
    hidden_size: int = 32
    num_layers: int = 4
    splices: bool = False


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


class File:
    """A trace of three layers with 32 channels, whose prompt has five tokens."""

    num_layers, steps = 3, 4

    def __init__(self, **metadata: str) -> None:
        self.metadata, self.dtype, self.path = metadata, torch.float32, Path("x")

    def get(self, step: int, stage: str) -> torch.Tensor:
        assert (step, stage) == (0, "layers.0.attention")
        return torch.zeros(5, 32)

    def ids(self, step: int) -> list[int]:
        return [[1, 2, 3, 4, 5], [6]][step]


def traced(**metadata: str) -> Trace:
    source = Trace.__new__(Trace)
    source.file = File(**metadata)  # type: ignore[assignment]
    return source


@pytest.mark.parametrize(
    ("shape", "layers", "says"),
    [
        (Shape(num_layers=3), None, None),
        (Shape(num_layers=3), (0, 3), None),
        (Shape(num_layers=2), None, "layers 3"),
        (Shape(num_layers=3, hidden_size=5), None, "hidden size 32"),
        (Shape(num_layers=3), (1, 4), "leaves out the first ones"),
    ],
)
def test_a_trace_of_another_model_is_refused(
    shape: Shape, layers: tuple[int, int] | None, says: str | None
) -> None:
    engine: Any = Engine(model=shape, build=BuildConfig("fp32", max_seq_len=LIMIT, layers=layers))
    if says is None:
        check_same_model(engine, traced())
    else:
        with pytest.raises(CheckpointError, match=says):
            check_same_model(engine, traced())


def encoding(*ids: int) -> Any:
    return SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [*ids]), chat=None)


def test_a_trace_has_its_own_prompt_and_steps() -> None:
    """A prompt beside it, or noted in it, is checked; its own ids are run."""
    plain: Any = Engine()
    cases, steps = make_cases(plain, traced(), [], 1)
    assert (cases, steps) == ([AlignCase("the trace's prompt", [1, 2, 3, 4, 5])], 4)
    (case,), _ = make_cases(plain, traced(), [[7, 8]], 1)
    assert case == AlignCase(
        "7 8", [1, 2, 3, 4, 5], (TextCheck("token ids", [1, 2, 3, 4, 5], [7, 8], "the trace"),)
    )
    noted = traced(prompt="Hi")
    assert make_cases(plain, noted, [], 1)[0][0].checks == (), "nothing reads it"
    speaking: Any = Engine(text=encoding(1, 2, 3, 4, 5))
    (case,), _ = make_cases(speaking, noted, [], 1)
    assert (case.title, [check.is_bad for check in case.checks]) == ("Hi", [False])
    (case,), _ = make_cases(speaking, noted, [[9]], 1)
    assert (case.title, case.ids, case.checks[0].got) == ("9", [1, 2, 3, 4, 5], [9])
    with pytest.raises(RequestError, match="one prompt"):
        make_cases(plain, traced(), [[1], [2]], 1)


def test_a_trace_s_steps_have_to_fit() -> None:
    for limit, fits in ((9, True), (8, False)):
        engine: Any = Engine(build=BuildConfig("fp32", max_seq_len=limit))
        if fits:
            make_cases(engine, traced(), [], 0)
        else:
            with pytest.raises(RequestError, match="5 tokens and 4 steps"):
                make_cases(engine, traced(), [], 0)
