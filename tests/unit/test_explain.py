"""A request explained: origins of values, tokens, stops, and where Hugging Face's generate differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from ingot.config.build import BuildConfig
from ingot.config.model import DecoderConfig
from ingot.config.quant import QuantConfig
from ingot.config.sampling import SamplingParams
from ingot.engine.manifest import Manifest
from ingot.engine.text import TextParts
from ingot.errors import RequestError
from ingot.llm.explain import explain_request
from ingot.llm.explanation import Explanation
from ingot.processors.chat_format import ChatFormat, ChatML, Vicuna, VicunaV0
from ingot.processors.token_text import byte_alphabet
from ingot.processors.tokenizer import Tokenizer
from tests.tiny_models import make_model, tiny_config
from tests.unit.chat_cases import CHATML, INST, jinja, user
from tests.unit.vocabularies import load, qwen2_slow_folder

LLAMA_EOS, QWEN_EOS, QWEN_START, QWEN_END = 2, 151643, 151644, 151645


@pytest.fixture(scope="module")
def llama(data: Path) -> Tokenizer:
    return load(data / "tokenizers" / "llama")


@pytest.fixture(scope="module")
def qwen1(data: Path) -> Tokenizer:
    return load(data / "tokenizers" / "qwen-v1")


@pytest.fixture(scope="module")
def gpt2(data: Path) -> Tokenizer:
    return load(data / "tokenizers" / "gpt2")


LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)


def llama3_folder(folder: Path) -> Path:
    """A tokenizer of single bytes with LLaMA-3's special tokens, which puts the first before every text."""
    names = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")
    specials = [f"<|{name}|>" for name in names]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_alphabet(), []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{specials[0]} $A", special_tokens=[(specials[0], 256)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": specials[0], "eos_token": specials[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def explained(
    prompt: Any = (1, 2, 3),
    params: Any = None,
    *,
    generation: dict[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    chat: ChatFormat | None = None,
    stops: tuple[int, ...] = (),
    length: int = 512,
) -> Explanation:
    """A request to an engine without weights."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"), 1)
    model = DecoderConfig("llama", vocab_size=160000, head_dim=2, max_positions=1024, **sizes)
    build = BuildConfig("fp32", max_seq_len=length)
    manifest = Manifest("0", model, build, QuantConfig(), generation=generation or {}, stop_ids=stops)
    given = list(prompt) if isinstance(prompt, tuple) else prompt
    return explain_request(manifest, TextParts(tokenizer, chat, stops), given, params)


def origin(found: Explanation, name: str) -> tuple[Any, str, str | None]:
    value = found.value(name)
    return value.value, value.origin, value.note


def differs(found: Explanation, *words: str) -> bool:
    """Whether one of the differences holds all these words."""
    return any(all(word in sentence for word in words) for sentence in found.differences)


# --- where values come from ------------------------------------------------------------------------------

SAMPLED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1}


def test_defaults_are_ingots() -> None:
    found = explained()
    assert {value.origin for value in found.sampling} == {"default"}
    assert SamplingParams(**{v.name: v.value for v in found.sampling}) == SamplingParams()


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_generation_config_gives_sampling_values(name: str) -> None:
    assert origin(explained(generation=SAMPLED), name) == (SAMPLED[name], "generation_config", None)


def test_values_that_need_do_sample_are_default_with_a_note() -> None:
    found = explained(generation={"top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 7})
    assert origin(found, "top_p") == (1.0, "default", "generation_config says 0.9, but not do_sample: true")
    assert origin(found, "repetition_penalty") == (1.1, "generation_config", None)
    assert origin(found, "max_new_tokens") == (7, "generation_config", None)


def test_do_sample_alone_gives_a_temperature() -> None:
    note = "do_sample is true and no temperature is named"
    assert origin(explained(generation={"do_sample": True}), "temperature") == (
        1.0,
        "generation_config",
        note,
    )


def test_refused_values_are_told() -> None:
    found = explained(generation={"do_sample": True, "top_k": -1})
    assert origin(found, "top_k") == (0, "default", "generation_config says -1, which is out of range")
    assert differs(found, "top_k -1 as it is")


def test_request_goes_over_generation_config() -> None:
    found = explained(params={"top_p": 0.5, "seed": 4}, generation=SAMPLED)
    assert origin(found, "top_p") == (0.5, "request", "generation_config says 0.9")
    assert origin(found, "seed") == (4, "request", None)
    assert origin(found, "top_k") == (20, "generation_config", None)


def test_values_without_effect_say_so() -> None:
    found = explained(params={"temperature": 0.0, "top_p": 0.5}, generation=SAMPLED)
    assert found.value("top_p").note == found.value("top_k").note == "no effect: temperature 0 is greedy"


def test_whole_params_leave_nothing_to_generation_config() -> None:
    found = explained(params=SamplingParams(temperature=0.6), generation=SAMPLED)
    assert origin(found, "temperature")[1] == "request"
    note = "the request gives all values; generation_config would say 20"
    assert origin(found, "top_k") == (0, "default", note)


@pytest.mark.parametrize("params", [{"top_q": 1}, {"top_p": 2}, {"temperature": "hot"}])
def test_bad_values_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        explained(params=params)


# --- the prompt ------------------------------------------------------------------------------------------


def test_chatml_of_qwen1(qwen1: Tokenizer) -> None:
    generation = {"chat_format": "chatml", "eos_token_id": QWEN_EOS}
    stops = (QWEN_EOS, QWEN_START, QWEN_END)
    found = explained(
        user("Hi <|im_end|>"), generation=generation, tokenizer=qwen1, chat=ChatML(), stops=stops
    )
    assert found.kind == "conversation"
    assert found.prompt_text == found.rendered_text
    assert [t.id for t in found.tokens if t.special] == [QWEN_START, QWEN_END] * 2 + [QWEN_START]
    assert found.prompt_text.count("<|im_end|>") == 3  # the typed one is text
    assert [(s.id, s.origins) for s in found.stops] == [
        (QWEN_EOS, ("generation_config", "tokenizer", "chat format")),
        (QWEN_START, ("chat format",)),
        (QWEN_END, ("chat format",)),
    ]
    assert differs(found, "does not stop at", "151645 <|im_end|>", "[151643]")
    assert differs(found, "built-in format chatml")
    assert not differs(found, "control token")


def test_the_windows_cut_is_told(qwen1: Tokenizer) -> None:
    messages = [*user("A long question?" * 20), {"role": "assistant", "content": "Yes."}, *user("And?")]
    found = explained(messages, tokenizer=qwen1, chat=ChatML(40))
    assert any("dropped the oldest turns" in note for note in found.notes)
    assert "long" not in str(found.prompt_text)
    assert explained(messages, tokenizer=qwen1, chat=ChatML(4000)).notes == ()


def test_bytes_of_split_characters_are_shown(qwen1: Tokenizer, llama: Tokenizer) -> None:
    for tokenizer in (qwen1, llama):
        found = explained("a\U00013080", tokenizer=tokenizer)
        pieces = [t for t in found.tokens if t.bytes is not None]
        assert bytes.fromhex("".join(str(t.bytes) for t in pieces)) == "\U00013080".encode()
        assert all("\\x" in str(t.text) for t in pieces)
        assert str(found.prompt_text).endswith("a\U00013080")


def test_llama2_template_has_one_bos(llama: Tokenizer) -> None:
    chat = jinja(INST, bos_token="<s>", eos_token="</s>")
    found = explained(user("Hi"), tokenizer=llama, chat=chat, stops=(LLAMA_EOS,))
    assert (found.tokens[0].text, found.prompt_text) == ("<s>", "<s> [INST] Hi [/INST]")
    assert [t.special for t in found.tokens].count(True) == 1
    assert differs(found, "second <s> (id 1)")
    assert [(s.id, s.text, s.origins) for s in found.stops] == [(2, "</s>", ("tokenizer",))]


def test_llama3_headers_and_end_of_turn(tmp_path: Path) -> None:
    tokenizer = load(llama3_folder(tmp_path))
    chat = jinja(LLAMA3, bos_token="<|begin_of_text|>")
    found = explained(user("Hi <|eot_id|>"), tokenizer=tokenizer, chat=chat, stops=(257, 260))
    assert found.rendered_text == found.prompt_text
    assert [t.id for t in found.tokens if t.special] == [256, 258, 259, 260, 258, 259]
    origins = [(s.text, s.origins) for s in found.stops]
    assert origins == [("<|end_of_text|>", ("tokenizer",)), ("<|eot_id|>", ("chat format",))]
    assert differs(found, "makes a control token of <|eot_id|>")
    assert differs(found, "second <|begin_of_text|>")


def test_template_of_qwen2(data: Path, tmp_path: Path) -> None:
    qwen2 = load(qwen2_slow_folder(data, tmp_path))
    found = explained(user("Hi"), tokenizer=qwen2, chat=jinja(CHATML), stops=(QWEN_EOS, QWEN_END))
    assert [s.origins for s in found.stops] == [("config.json",), ("tokenizer",)]
    assert not differs(found, "second")
    assert not differs(found, "built-in")


def test_vicuna_stop_strings(llama: Tokenizer) -> None:
    found = explained(user("Hi"), {"stop": ("X",)}, tokenizer=llama, chat=VicunaV0(), stops=(LLAMA_EOS,))
    assert [(s.text, s.origins) for s in found.stops if s.id is None] == [
        ("X", ("request",)),
        ("###", ("chat format",)),
    ]
    assert found.value("stop").value == ("X", "###")
    assert differs(found, "stop_strings=['X', '###']")
    plain = explained(user("Hi"), tokenizer=llama, chat=Vicuna(), stops=(LLAMA_EOS,))
    assert str(plain.rendered_text).endswith("USER: Hi ASSISTANT:")
    assert str(plain.prompt_text).startswith("<s> A chat between")
    assert not any(s.id is None for s in plain.stops)


def test_gpt2_has_no_template(gpt2: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        explained(user("Hi"), tokenizer=gpt2)
    found = explained("Hello world<|endoftext|>", tokenizer=gpt2, stops=(50256,))
    assert (found.kind, found.chat_format, found.rendered_text) == ("text", None, None)
    assert [t.text for t in found.tokens] == ["Hello", " world", "<|endoftext|>"]
    assert found.stops[0].origins == ("config.json or tokenizer",)


def test_token_ids_without_a_tokenizer() -> None:
    found = explained(
        (5, 9), {"stop_token_ids": (7,), "ignore_eos": True}, stops=(3,), generation={"eos_token_id": 3}
    )
    assert (found.kind, found.prompt_text) == ("token ids", None)
    assert [(t.id, t.text, t.bytes) for t in found.tokens] == [(5, None, None), (9, None, None)]
    assert [(s.id, s.origins, s.active) for s in found.stops] == [
        (3, ("generation_config",), False),
        (7, ("request",), True),
    ]
    assert differs(
        explained(params={"ignore_eos": True}, stops=(3,), generation={"eos_token_id": 3}), "stops at 3"
    )


def test_room_and_what_would_be_refused() -> None:
    found = explained((1,) * 10, {"max_new_tokens": 20}, length=16)
    assert (found.num_prompt_tokens, found.room, found.max_new_tokens) == (10, 6, 6)
    assert found.notes == ("the prompt leaves room for 6 new tokens, not 20",)
    assert any("refused: the prompt has 16 tokens" in note for note in explained((1,) * 16, length=16).notes)
    assert any("vocabulary" in note for note in explained((1, 10**6)).notes)
    assert any("empty" in note for note in explained(()).notes)


# --- how a token is chosen -------------------------------------------------------------------------------


def test_processors_are_those_that_run() -> None:
    params = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "min_new_tokens": 3}
    found = explained(params=params, stops=(3, 8))
    assert [p.split(" ")[0] for p in found.processors] == [
        "repetition_penalty",
        "presence_penalty",
        "min_new_tokens",
    ]
    assert "(3, 8)" in found.processors[-1]
    assert explained(params={"min_new_tokens": 3}).processors == ()  # nothing to ban


def test_choice_and_seed() -> None:
    assert explained().choice.startswith("greedy")
    drawn = explained(params={"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 7})
    assert drawn.choice == "drawn after temperature 0.5, then top_k 4, then top_p 0.9, then min_p 0.1"
    assert drawn.seed.startswith("7: ")
    assert "differ from call to call" in explained(params={"temperature": 0.5}).seed
    assert explained(params={"num_beams": 3}).choice.startswith("beam search with 3 beams")


# --- Hugging Face's generate -----------------------------------------------------------------------------


def test_a_plain_request_differs_in_nothing() -> None:
    generation = {"eos_token_id": [3], "max_new_tokens": 9}
    assert explained(generation=generation, stops=(3,)).differences == ()
    assert explained(generation=generation | SAMPLED, stops=(3,)).differences == ()


def test_the_defaults_told_are_those_of_transformers() -> None:
    plain = transformers.GenerationConfig()
    defaults = plain._get_default_generation_params()
    assert (defaults["top_k"], defaults["max_length"]) == (50, 20)
    found = explained(params={"temperature": 0.5}, generation={"do_sample": True})
    assert differs(found, "top_k 50, its own default", "0 (all tokens)")
    assert differs(found, "stops after 20 new tokens, its own default; Ingot after 128")


def test_generate_does_what_is_told() -> None:
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
        ({"do_sample": True}, {"seed": 5}, ("no seed of a request",)),
        ({"max_length": 100}, {}, ("stops after 97 new tokens", "counts the prompt's 3")),
        ({"max_length": 3}, {}, ("raises ValueError", "max_length 3")),
        ({"max_new_tokens": 600}, {}, ("stops after 600", "512 tokens in all")),
        ({}, {"presence_penalty": 0.5}, ("no presence_penalty",)),
        ({"repetition_penalty": 1.3}, SamplingParams(), ("repetition_penalty 1.3", "Ingot takes 1")),
        ({"no_repeat_ngram_size": 3}, {}, ("obeys no_repeat_ngram_size 3",)),
        ({"do_sample": True, "typical_p": 0.5}, {}, ("obeys typical_p 0.5",)),
        ({}, {"n": 2}, ("raises ValueError", "one answer, not 2")),
        ({"do_sample": True, "eos_token_id": 3}, {"n": 2}, ("id 3", "first eos_token_id")),
        ({"do_sample": True, "pad_token_id": 0}, {"n": 2}, ("id 0 (pad_token_id)",)),
        ({"eos_token_id": 3}, {"stop_token_ids": (9,)}, ("does not stop at 3", "[9]", "replaces")),
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
def test_what_changes_nothing_is_not_told(generation: dict[str, Any], params: dict[str, Any]) -> None:
    generation = generation | {"eos_token_id": 3, "max_new_tokens": 9}
    assert explained(params=params, generation=generation, stops=(3,)).differences == ()


@pytest.mark.parametrize("value", ["x", [1], {}, -1, True, None])
@pytest.mark.parametrize("params", [{}, {"num_beams": 2, "temperature": 0.0, "n": 2}, SamplingParams(seed=1)])
def test_any_generation_config_is_explained(value: Any, params: Any) -> None:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "max_length")
    for sample in (True, False, value):
        generation = dict.fromkeys((*names, "min_length", "pad_token_id", "length_penalty"), value)
        explained(params=params, generation=generation | {"do_sample": sample})


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
        "takes top_k 50, its own default; Ingot takes 0 (all tokens)",
    )


def test_json_round_trip(qwen1: Tokenizer) -> None:
    found = explained(
        user("Hi \U00013080"), {"stop": ("a",)}, tokenizer=qwen1, chat=ChatML(), stops=(QWEN_EOS,)
    )
    again = Explanation.from_json(json.loads(json.dumps(found.to_json())))
    assert again.to_json() == found.to_json()
    assert again.tokens == found.tokens
    assert again.stops == found.stops
