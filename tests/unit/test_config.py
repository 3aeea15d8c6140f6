"""Configs travel as JSON and refuse what is unknown; every sampling value refuses what is out of range."""

from __future__ import annotations

import dataclasses
import json
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from ingot.config.encoder_config import EncoderConfig, StackConfig
from ingot.config.grammar_spec import Grammar
from ingot.config.json_config import JsonConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import MAX_LOGPROBS, VALUE_NAMES, SamplingParams
from ingot.errors import ConfigError, RequestError


@dataclass(frozen=True)
class Inner(JsonConfig):
    size: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer(JsonConfig):
    inner: Inner
    maybe: Inner | None = None
    several: tuple[Inner, ...] = ()
    named: dict[str, Inner] = field(default_factory=dict)
    ratio: float = 0.5


NESTED = Outer(Inner(1, ("a", "b")), Inner(2), (Inner(3), Inner(4, ("c",))), {"x": Inner(5)}, 0.25)
EVERY_FIELD = SamplingParams(
    max_new_tokens=None,
    min_new_tokens=2,
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    seed=-(2**63),
    stop=("END", "\n\n"),
    stop_token_ids=(5, 0),
    ignore_eos=True,
    logprobs=5,
    n=3,
    num_beams=1,
    length_penalty=0.8,
    early_stopping=True,
    logit_bias={5: -100.0, 0: 1.5},
    grammar=Grammar.json_schema({"type": "object", "title": "é"}),
)


RUNTIME = RuntimeConfig(cache_tokens=4096, fused_decode=False, batch_invariant=True)


@pytest.mark.parametrize("config", [SamplingParams(), EVERY_FIELD, NESTED, Outer(Inner(1)), RUNTIME])
def test_json_round_trip(config: JsonConfig) -> None:
    text = json.dumps(config.to_json(), allow_nan=False)
    again = type(config).from_json(json.loads(text))
    assert again == config
    assert json.dumps(again.to_json()) == text


def test_the_round_trip_test_sets_every_sampling_field() -> None:
    plain = SamplingParams()
    same = {name for name in VALUE_NAMES if getattr(plain, name) == getattr(EVERY_FIELD, name)}
    assert same == {"num_beams"}
    assert EVERY_FIELD.grammar != plain.grammar
    assert EVERY_FIELD.logit_bias != plain.logit_bias


def test_configs_are_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cls", "data", "named"),
    [
        (SamplingParams, {"temprature": 1}, "temprature"),
        (SamplingParams, {"top_k": 1, "beams": 2, "z": 0}, "beams"),
        (Outer, {"inner": {"size": 1, "colour": 2}}, "colour"),
        (Outer, {"inner": {"size": 1}, "several": [{"size": 1, "shape": 2}]}, "shape"),
        (Outer, {"inner": {"size": 1}, "named": {"k": {"size": 1, "depth": 2}}}, "depth"),
        (Outer, {"inner": {"size": 1}, "maybe": {"length": 2}}, "length"),
        (Outer, {}, "inner"),
        (Outer, {"inner": {}}, "size"),
        (Outer, {"inner": 5}, "Inner"),
        (Outer, {"inner": {"size": 1}, "maybe": [1]}, "Inner"),
        (SamplingParams, [1, 2], "SamplingParams"),
        (SamplingParams, "top_k", "SamplingParams"),
        (SamplingParams, None, "SamplingParams"),
    ],
)
def test_unknown_and_missing_fields_are_named(cls: type[JsonConfig], data: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        cls.from_json(data)


def test_keys_of_mixed_types_are_refused_alike() -> None:
    with pytest.raises(ConfigError, match="x"):
        SamplingParams.from_json({1: 2, "x": 3})  # type: ignore[dict-item]


def test_replace_is_checked() -> None:
    assert SamplingParams().replace(top_k=4).top_k == 4
    with pytest.raises(RequestError, match="top_k"):
        SamplingParams().replace(top_k=-2)


INTEGERS = {
    "max_new_tokens": (1, None),
    "min_new_tokens": (0, None),
    "top_k": (-1, None),  # -1 is 0
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "n": (1, 128),
    "num_beams": (1, 64),
}
NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-9, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "length_penalty": (-10.0, 10.0),
}
OPTIONAL = {"max_new_tokens", "seed", "logprobs"}
BOOLEANS = ("ignore_eos", "early_stopping")
LISTS = ("stop", "stop_token_ids")


def refused() -> list[tuple[str, Any]]:
    cases: list[tuple[str, Any]] = []
    for name, (low, high) in INTEGERS.items():
        cases += [(name, bad) for bad in (low - 1, True, "3", 1.0, float("nan"), [1])]
        cases += [] if high is None else [(name, high + 1)]
        cases += [] if name in OPTIONAL else [(name, None)]
    for name, (lowest, highest) in NUMBERS.items():
        below = 0.0 if lowest == 1e-9 else lowest - 0.01
        values = (below, highest + 0.01, True, "0.5", None, [0.5], 10**400, -(10**400))
        cases += [(name, bad) for bad in (*values, float("nan"), float("inf"), -float("inf"))]
    cases += [(name, bad) for name in BOOLEANS for bad in (None, 0, 1, "false", "never")]
    cases += [(name, bad) for name in LISTS for bad in (0, False, {}, {"a": 1}, b"ab", [None], [[1]], 3.5)]
    cases += [("stop", [""]), ("stop", ""), ("stop", [5]), ("stop", ["a", ""])]
    cases += [("stop_token_ids", [-1]), ("stop_token_ids", ["5"]), ("stop_token_ids", [True])]
    numbers = (None, True, "1", [1.0], float("nan"), float("inf"), 10**400)
    ids = (-1, "-1", 1.0, True, None, "", "a", "٣", "+1", "1.0", "9" * 30)
    cases += [
        ("logit_bias", bad) for bad in (3, "5", [[5, 1.0]], {5: 1, "5": 2}, dict.fromkeys(range(1025), 1))
    ]
    cases += [("logit_bias", {5: bad}) for bad in numbers] + [("logit_bias", {bad: 1.0}) for bad in ids]
    return [*cases, ("stop_token_ids", [1.0]), ("stop_token_ids", "5"), ("stop_token_ids", 5)]


@pytest.mark.parametrize(("name", "value"), refused(), ids=lambda v: repr(v)[:24])
def test_a_refused_value_names_its_field(name: str, value: Any) -> None:
    for make in (lambda: SamplingParams(**{name: value}), lambda: SamplingParams.from_json({name: value})):
        with pytest.raises(RequestError) as caught:
            make()
        assert caught.value.fix == name
        assert isinstance(caught.value, ValueError)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(("name", "limits"), [*INTEGERS.items(), *NUMBERS.items()])
def test_limits_themselves_are_accepted(name: str, limits: tuple[Any, Any]) -> None:
    for value in limits:
        if value is not None:
            expected = 0 if (name, value) == ("top_k", -1) else value
            assert getattr(SamplingParams(**{name: value}), name) == expected
    if name in OPTIONAL:
        assert getattr(SamplingParams(**{name: None}), name) is None


def test_a_bias_as_a_caller_or_json_has_it() -> None:
    given: dict[Any, Any] = {"7": 1, 3: -2.5}
    params = SamplingParams(logit_bias=given)
    given[4] = 0.0
    assert params.logit_bias == {7: 1.0, 3: -2.5}
    assert [type(key) for key in params.logit_bias] == [int, int]
    assert SamplingParams(logit_bias=None).logit_bias == {}  # type: ignore[arg-type]
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(1024), 1e300)).logit_bias) == 1024
    assert hash(params) == hash(SamplingParams())
    assert params != SamplingParams()


def test_no_field_goes_unchecked() -> None:
    checked = {*INTEGERS, *NUMBERS, *BOOLEANS, *LISTS}
    assert checked == set(VALUE_NAMES)


def test_logits_processors_are_functions_that_no_json_names() -> None:
    params = SamplingParams(logits_processors=[len])  # type: ignore[arg-type]
    assert params.logits_processors == params.replace(top_k=3).logits_processors == (len,)
    assert "logits_processors" not in params.to_json()
    for odd in ([3], "f", None, len):
        with pytest.raises(RequestError, match="logits_processors"):
            SamplingParams(logits_processors=odd)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="logits_processors"):
        SamplingParams.from_json({"logits_processors": []})


def test_numbers_become_floats_and_lists_tuples() -> None:
    params = SamplingParams.from_json({"temperature": 1, "stop": "END", "stop_token_ids": [3, 4]})
    assert isinstance(params.temperature, float)
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams.from_json({"stop": None, "stop_token_ids": None}) == SamplingParams()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens"),
        ({"num_beams": 2, "temperature": 0.5}, "temperature"),
        ({"num_beams": 2, "n": 3}, "n"),
    ],
)
def test_values_that_exclude_each_other(values: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert caught.value.fix == named


def test_end_ids() -> None:
    eos = frozenset({1, 2})
    assert SamplingParams(stop_token_ids=(7,)).end_ids(eos) == {1, 2, 7}
    assert SamplingParams(stop_token_ids=(7, 1), ignore_eos=True).end_ids(eos) == {1, 7}
    assert SamplingParams(ignore_eos=True).end_ids(eos) == frozenset()


def test_max_tokens_is_max_new_tokens() -> None:
    params = SamplingParams(max_tokens=5)
    assert params == SamplingParams(max_new_tokens=5)
    assert params.max_tokens == 5
    assert params.replace(max_tokens=3).max_new_tokens == 3
    assert params.replace(max_new_tokens=9).max_tokens == 9
    assert "max_tokens" not in params.to_json()
    for wrong in (
        lambda: SamplingParams(max_tokens=5, max_new_tokens=6),
        lambda: SamplingParams(max_tokens=0),
    ):
        with pytest.raises(RequestError, match="max_new_tokens"):
            wrong()


def test_a_misspelt_sampling_value_is_refused_with_the_right_name() -> None:
    with pytest.raises(RequestError, match=r"seen: temprature.*did you mean temperature\?"):
        SamplingParams().replace(temprature=1)
    with pytest.raises(RequestError, match="give only one"):
        SamplingParams().replace(max_tokens=1, max_new_tokens=2)


@pytest.mark.parametrize(
    ("name", "most"), [("top_k", 2**63 - 1), ("min_new_tokens", 2**31 - 1), ("stop_token_ids", 2**63 - 1)]
)
def test_what_a_steps_tensors_cannot_hold_is_refused(name: str, most: int) -> None:
    """It would end every request of the step."""
    for value in (most, most + 1):
        values: dict[str, Any] = {name: [value] if name == "stop_token_ids" else value}
        if value == most:
            SamplingParams(max_new_tokens=None).replace(**values)
        else:
            with pytest.raises(RequestError, match=name.removesuffix("_token_ids")):
                SamplingParams(max_new_tokens=None).replace(**values)


@pytest.mark.parametrize(
    ("name", "value"), [("intermediate_size", True), ("num_heads", [2]), ("mlp_bias", 1), ("norm_eps", "x")]
)
def test_types_of_an_encoder_s_settings(name: str, value: object) -> None:
    good: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 2}
    StackConfig.from_json(good)
    with pytest.raises(ConfigError, match=rf"values of another type; seen: \['{name}'\]"):
        StackConfig.from_json(good | {name: value})


@pytest.mark.parametrize("size", [-1, 2**63])
def test_sizes_of_an_input(size: int) -> None:
    good: dict[str, Any] = {
        "hidden_size": 8,
        "max_positions": 4,
        "activation_values": 1,
        "modality": "speech",
    }
    EncoderConfig.from_json(good | {"features": [80, 0]})
    with pytest.raises(ConfigError, match="features, the shape of an input, are out of range"):
        EncoderConfig.from_json(good | {"features": [80, size]})
