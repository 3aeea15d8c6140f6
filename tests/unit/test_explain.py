"""Explained requests: origins of values, the prompt and its tokens, stops, how a token is chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ingot.config.sampling_params import SamplingParams
from ingot.errors import RequestError
from ingot.llm.explanation import Explanation
from ingot.text.chat.chat_format import ChatML, Vicuna, VicunaV0
from ingot.text.tokenizer.token_text import byte_alphabet
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.unit.chat_cases import CHATML, INST, jinja, user
from tests.unit.explain_case import SAMPLED, differs, explained
from tests.unit.vocabularies import load

LLAMA_EOS, QWEN_EOS, QWEN_START, QWEN_END = 2, 151643, 151644, 151645


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


def origin(found: Explanation, name: str) -> tuple[Any, str, str | None]:
    value = found.value(name)
    return value.value, value.origin, value.note


# --- where values come from ------------------------------------------------------------------------------


def test_defaults_are_ingots() -> None:
    found = explained()
    assert {value.origin for value in found.sampling} == {"default"}
    assert SamplingParams(**{v.name: v.value for v in found.sampling}) == SamplingParams()


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_generation_config_gives_sampling_values(name: str) -> None:
    assert origin(explained(generation=SAMPLED), name) == (SAMPLED[name], "generation_config", None)


def test_what_do_sample_changes() -> None:
    found = explained(generation={"top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 7})
    assert origin(found, "top_p") == (1.0, "default", "generation_config says 0.9, but not do_sample: true")
    assert origin(found, "repetition_penalty") == (1.1, "generation_config", None)
    assert origin(found, "max_new_tokens") == (7, "generation_config", None)
    alone = origin(explained(generation={"do_sample": True}), "temperature")
    assert alone == (1.0, "generation_config", "do_sample is true and no temperature is given")


def test_refused_values_are_reported() -> None:
    found = explained(generation={"do_sample": True, "top_k": -2})
    assert origin(found, "top_k") == (0, "default", "generation_config says -2, which is out of range")
    assert differs(found, "top_k -2 as it is")


def test_the_request_overrides_generation_config() -> None:
    found = explained(params={"top_p": 0.5, "seed": 4}, generation=SAMPLED)
    assert origin(found, "top_p") == (0.5, "request", "generation_config says 0.9")
    assert origin(found, "seed") == (4, "request", None)
    assert origin(found, "top_k") == (20, "generation_config", None)


def test_values_without_effect_say_so() -> None:
    found = explained(params={"temperature": 0.0, "top_p": 0.5}, generation=SAMPLED)
    assert found.value("top_p").note == found.value("top_k").note == "no effect: temperature 0 is greedy"


def test_complete_params_override_generation_config() -> None:
    found = explained(params=SamplingParams(temperature=0.6), generation=SAMPLED)
    assert origin(found, "temperature")[1] == "request"
    note = "the request sets all values; generation_config says 20"
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


def test_the_windows_cut_is_reported(qwen1: Tokenizer) -> None:
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


def test_a_second_bos_is_noted(tmp_path: Path) -> None:
    tokenizer = load(llama3_folder(tmp_path))
    note = "the prompt begins with <|begin_of_text|> twice, as no text of the model's training did"

    def noted(*ids: int) -> bool:
        return note in explained(ids, tokenizer=tokenizer).notes

    assert noted(256, 256, 65)
    assert not noted(256, 65, 256)
    assert not noted(65, 65)
    assert explained((256, 256)).notes == ()  # without a tokenizer nothing says what 256 is
    once, twice = (jinja(start + LLAMA3, bos_token="<|begin_of_text|>") for start in ("", "{{ bos_token }}"))
    assert note not in explained(user("Hi"), tokenizer=tokenizer, chat=once).notes
    assert note in explained(user("Hi"), tokenizer=tokenizer, chat=twice).notes


def test_llama3_headers_and_end_of_turn(tmp_path: Path) -> None:
    tokenizer = load(llama3_folder(tmp_path))
    chat = jinja(LLAMA3, bos_token="<|begin_of_text|>")
    found = explained(user("Hi <|eot_id|>"), tokenizer=tokenizer, chat=chat, stops=(257, 260))
    assert found.rendered_text == found.prompt_text
    assert [t.id for t in found.tokens if t.special] == [256, 258, 259, 260, 258, 259]
    origins = [(s.text, s.origins) for s in found.stops]
    assert origins == [("<|end_of_text|>", ("tokenizer",)), ("<|eot_id|>", ("chat format",))]
    assert differs(found, "turns <|eot_id|> inside a message into a control token")
    assert differs(found, "second <|begin_of_text|>")


def test_template_of_qwen2(qwen2: Tokenizer) -> None:
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
    bias = {"logit_bias": {5: 1.0, 6: 2.0}}
    params = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "min_new_tokens": 3, **bias}
    found = explained(params=params, stops=(3, 8))
    assert [p.split(" ")[0] for p in found.processors] == [
        "logit_bias",
        "repetition_penalty",
        "presence_penalty",
        "min_new_tokens",
    ]
    assert "(3, 8)" in found.processors[-1]
    assert explained(params={"min_new_tokens": 3}).processors == ()  # nothing to ban


def test_choice_and_seed() -> None:
    assert explained().choice.startswith("greedy")
    drawn = explained(params={"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 7})
    assert drawn.choice == "sampled after temperature 0.5, then top_k 4, then top_p 0.9, then min_p 0.1"
    assert drawn.seed.startswith("7: ")
    assert "differ from call to call" in explained(params={"temperature": 0.5}).seed
    assert explained(params={"num_beams": 3}).choice.startswith("beam search with 3 beams")


def test_json_round_trip(qwen1: Tokenizer) -> None:
    found = explained(
        user("Hi \U00013080"), {"stop": ("a",)}, tokenizer=qwen1, chat=ChatML(), stops=(QWEN_EOS,)
    )
    again = Explanation.from_json(json.loads(json.dumps(found.to_json())))
    assert again.to_json() == found.to_json()
    assert again.tokens == found.tokens
    assert again.stops == found.stops
