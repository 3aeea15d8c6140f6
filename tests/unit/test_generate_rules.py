"""Reported differences of Hugging Face's generate, checked against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from ingot.config.sampling_params import SamplingParams
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.tiny_models import make_model, tiny_config
from tests.unit.explain_case import SAMPLED, differs, explained


def test_a_plain_request_differs_in_nothing() -> None:
    generation = {"eos_token_id": [3], "max_new_tokens": 9}
    assert explained(generation=generation, stops=(3,)).differences == ()
    assert explained(generation=generation | SAMPLED, stops=(3,)).differences == ()


def test_the_reported_defaults_are_those_of_transformers() -> None:
    plain = transformers.GenerationConfig()
    defaults = plain._get_default_generation_params()
    assert (defaults["top_k"], defaults["max_length"]) == (50, 20)
    found = explained(params={"temperature": 0.5}, generation={"do_sample": True})
    assert differs(found, "top_k 50, its own default", "0 (all tokens)")
    assert differs(found, "stops after 20 new tokens, its own default; Ingot after 128")


def test_generate_behaves_as_reported() -> None:
    """The rules that are easiest to get wrong, as transformers runs them."""
    model, ids = make_model(tiny_config("llama")), torch.tensor([[1, 2, 3]])
    with pytest.warns(UserWarning, match="default `max_length`"):
        assert model.generate(ids).shape[1] == 3 + 20
    assert model.generate(ids, max_length=9).shape[1] == 9
    with pytest.raises(ValueError, match="max_length"):
        model.generate(ids, max_length=3)
    with pytest.raises(ValueError, match="temperature"):
        model.generate(ids, do_sample=True, temperature=0.0)
    with pytest.raises(ValueError, match="num_return_sequences"):
        model.generate(ids, num_return_sequences=2)


@pytest.mark.parametrize(
    ("generation", "params", "words"),
    [
        ({"do_sample": True}, {"temperature": 0.0}, ("raises ValueError", "temperature 0")),
        ({"do_sample": True}, SamplingParams(), ("samples at temperature 1",)),
        ({}, {"temperature": 0.7}, ("stays greedy", "do_sample=True")),
        ({"do_sample": True}, {"seed": 5}, ("no per-request seed",)),
        ({"max_length": 100}, {}, ("stops after 97 new tokens", "counts the prompt's 3")),
        ({"max_length": 3}, {}, ("raises ValueError", "max_length 3")),
        ({"max_new_tokens": 600}, {}, ("stops after 600", "512 tokens in total")),
        ({}, {"presence_penalty": 0.5}, ("no presence_penalty",)),
        ({"repetition_penalty": 1.3}, SamplingParams(), ("repetition_penalty 1.3", "Ingot uses 1")),
        ({"no_repeat_ngram_size": 3}, {}, ("applies no_repeat_ngram_size 3",)),
        ({"do_sample": True, "typical_p": 0.5}, {}, ("applies typical_p 0.5",)),
        ({}, {"n": 2}, ("raises ValueError", "one answer, not 2")),
        ({"do_sample": True, "eos_token_id": 3}, {"n": 2}, ("id 3", "first eos_token_id")),
        ({"do_sample": True, "pad_token_id": 0}, {"n": 2}, ("id 0 (pad_token_id)",)),
        ({"eos_token_id": 3}, {"stop_token_ids": (9,)}, ("does not stop at 3", "[9]", "overrides")),
        ({"eos_token_id": 9}, {"min_new_tokens": 2}, ("bans only", "bans 3 too")),
    ],
)
def test_differences(generation: dict[str, Any], params: Any, words: tuple[str, ...]) -> None:
    stops = (3, 9) if generation.get("eos_token_id") == 9 else (3,)
    found = explained(params=params, generation=generation, stops=stops)
    assert differs(found, *words), found.differences


@pytest.mark.parametrize(
    ("generation", "params"),
    [
        ({"typical_p": 0.5}, {}),  # greedy: no effect
        ({"length_penalty": 2.0}, {}),  # no beams
        ({"min_length": 0, "num_beams": 1, "bad_words_ids": None}, {}),
        ({"repetition_penalty": 1.3}, {}),  # both count prompt and answer
        ({"num_return_sequences": 1}, {"seed": 3}),  # nothing is drawn
    ],
)
def test_settings_without_effect_are_not_reported(generation: dict[str, Any], params: dict[str, Any]) -> None:
    generation = generation | {"eos_token_id": 3, "max_new_tokens": 9}
    assert explained(params=params, generation=generation, stops=(3,)).differences == ()


@pytest.mark.parametrize("value", ["x", [1], {}, -1, True, None])
@pytest.mark.parametrize("params", [{}, {"num_beams": 2, "temperature": 0.0, "n": 2}, SamplingParams(seed=1)])
def test_any_generation_config_is_explained(value: Any, params: Any) -> None:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "max_length")
    for sample in (True, False, value):
        generation = dict.fromkeys((*names, "min_length", "pad_token_id", "length_penalty"), value)
        found = explained(params=params, generation=generation | {"do_sample": sample})
        assert all(isinstance(line, str) and line for line in found.differences)


def test_published_generation_configs(llama: Tokenizer) -> None:
    """What Qwen2.5's and LLaMA-2's own files lead to."""
    qwen = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    qwen |= {"eos_token_id": [151645, 151643], "pad_token_id": 151643, "bos_token_id": 151643}
    found = explained(generation=qwen, stops=(151643, 151645))
    assert found.differences == ("stops after 20 new tokens, its own default; Ingot after 128",)
    llama2 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "eos_token_id": 2}
    found = explained("Hi", generation=llama2, tokenizer=llama, stops=(2,))
    assert found.differences == (
        "stops after 4094 new tokens: generation_config's max_length 4096 counts the prompt's 2 tokens; "
        "Ingot does not read it and stops after 128",
        "uses top_k 50, its own default; Ingot uses 0 (all tokens)",
    )
