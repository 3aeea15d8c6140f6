"""The pocket model under grammars: every answer follows its own, and no other answer changes."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ingot import LLM, Chat, Grammar, RuntimeConfig, SamplingParams
from ingot.errors import IngotError, RequestError
from ingot.llm.outputs import Answer
from ingot.runtime.sampling.grammar_masks import GrammarMasks
from ingot.text.grammar.grammar_compiler import Grammars
from ingot.text.parsing.tool_calls import ArgumentsDelta, CallStart, ToolCallParser
from tests.e2e.watch import check_idle, watch

POCKET = Path(__file__).resolve().parents[2] / "models" / "pocket-chat"
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["dog", "cat", None]}, "maxItems": 1},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},  # which answers would mostly be made of
}
PATTERN = r"(?:fox|狐狸) no\. [1-9]\d{1,3}(?: \w{2,5})?!"
CHOICES = ["a fox", "a fo", "狐狸", '"quoted" \\ text']
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": PERSON}},
    {"type": "function", "function": {"name": "sum", "parameters": {"type": "object", "maxProperties": 0}}},
]
GRAMMARS = {
    "json_schema": Grammar.json_schema(PERSON),
    "regex": Grammar.regex(PATTERN),
    "choice": Grammar.choice(CHOICES),
    "tool_calls": Grammar.tool_calls(TOOLS, parallel=False),
}
SAMPLED = SamplingParams(max_new_tokens=150, temperature=1.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(POCKET, "cpu", max_batch_size=8)


def check(kind: str, text: str | None) -> None:
    assert text is not None
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), PERSON)
    elif kind == "regex":
        assert re.fullmatch(PATTERN, text), text
    elif kind == "choice":
        assert text in CHOICES
    else:
        parser = ToolCallParser()
        deltas = [*parser.feed(text), *parser.flush()]
        assert isinstance(deltas[0], CallStart)
        assert all(isinstance(delta, ArgumentsDelta) for delta in deltas[1:])
        arguments = json.loads("".join(delta.text for delta in deltas[1:]))  # type: ignore[union-attr]
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}  # type: ignore[index]
        jsonschema.validate(arguments, schemas[deltas[0].name])


def check_all(kind: str, answers: list[Answer]) -> None:
    for answer in answers:
        assert answer.finish_reason == "stop"
        check(kind, answer.text)


@pytest.mark.stays("json_schema", "regex", "choice")
@pytest.mark.parametrize("kind", GRAMMARS)
def test_every_answer_follows_its_grammar(llm: LLM, kind: str) -> None:
    """Greedy, and drawn with several seeds; several answers to one prompt; as plain text, too."""
    params = [SAMPLED.replace(grammar=GRAMMARS[kind], seed=seed) for seed in range(2)]
    params += [params[0].replace(temperature=0.0), params[0].replace(n=2, top_k=50)]
    outputs = llm.generate([MESSAGES] * len(params), params)
    for output in outputs:
        check_all(kind, output.answers)
    if kind != "choice":
        assert len({answer.text for output in outputs for answer in output.answers}) > 2
    check_all(kind, llm.generate("The fox said: ", params[1])[0].answers)


def test_any_json_object(llm: LLM) -> None:
    """An answer cut by the length is the start of a text of the grammar; one that stops is complete."""
    params = SAMPLED.replace(grammar=Grammar.json_object(), n=3, seed=2, max_new_tokens=60)
    answers = llm.chat(MESSAGES, params).answers
    for answer in answers:
        assert answer.text is not None
        assert answer.text.startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)


@pytest.mark.stays("regex", "choice")
@pytest.mark.parametrize("kind", GRAMMARS)
def test_beams_follow_the_grammar(llm: LLM, kind: str) -> None:
    params = SamplingParams(max_new_tokens=100, num_beams=3, n=2, grammar=GRAMMARS[kind])
    check_all(kind, llm.chat(MESSAGES, params).answers)


def test_other_requests_do_not_change(llm: LLM) -> None:
    free = [SamplingParams(max_new_tokens=24, temperature=t, seed=5) for t in (0.0, 1.0)]
    alone = [llm.chat(MESSAGES, params).token_ids for params in free]
    held = [SAMPLED.replace(grammar=grammar, seed=1) for grammar in GRAMMARS.values()]
    apart = [llm.chat(MESSAGES, params).token_ids for params in held]
    together = llm.generate([MESSAGES] * 6, [free[0], *held, free[1]])
    assert [together[0].token_ids, together[5].token_ids] == alone
    assert [output.token_ids for output in together[1:5]] == apart


def test_a_preempted_request_resumes(llm: LLM) -> None:
    """A cache that is too small for the batch: some are computed again, with the same tokens."""
    params = [SAMPLED.replace(grammar=GRAMMARS["json_schema"], seed=seed) for seed in range(3)]
    config = RuntimeConfig(block_size=16, cache_tokens=128, prefix_reuse=False)
    tight = LLM(POCKET, "cpu", max_batch_size=4, max_seq_len=128, runtime=config)
    expected = [output.token_ids for output in llm.generate([MESSAGES] * 3, params)]
    assert [output.token_ids for output in tight.generate([MESSAGES] * 3, params)] == expected
    assert tight.executor.num_preemptions > 0


def test_run_ahead_gives_the_same_answers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and drawn, with every rule, several answers and log-probabilities; the others never wait."""
    ruled = SAMPLED.replace(max_new_tokens=24, repetition_penalty=1.3, logit_bias={5: 2.0}, min_new_tokens=4)
    free = [ruled.replace(seed=seed, temperature=0.7 * seed, logprobs=2) for seed in range(3)]
    held = [one.replace(grammar=GRAMMARS[kind]) for one, kind in zip(free, GRAMMARS, strict=False)]
    params = [*free, held[0], held[1].replace(n=2), held[2].replace(logprobs=None)]
    found = []
    for ahead in (False, True):
        monkeypatch.setattr(llm.executor, "run_ahead", ahead)
        with watch(llm) as steps:
            outputs = llm.generate([MESSAGES] * len(params), params)
        assert steps.ahead == (len(steps.steps) if ahead else 0)
        check_idle(llm)
        found.append([(answer.token_ids, answer.finish_reason) for o in outputs for answer in o.answers])
    assert found[0] == found[1]
    check("regex", outputs[4].answers[0].text)


def test_a_grammar_is_compiled_by_the_caller(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the thread that steps, nor again there once it is forgotten."""
    threads = []
    compile_ = Grammars._compile

    def watched(self: Grammars, grammar: Grammar, tried: int | None) -> Any:
        threads.append(threading.current_thread())
        self._compiled.clear()
        return compile_(self, grammar, tried)

    monkeypatch.setattr(Grammars, "_compile", watched)
    params = SAMPLED.replace(grammar=Grammar.choice(["a red fox", "a blue fox"]), seed=1, n=2)
    beams = params.replace(n=1, temperature=0.0, num_beams=2, grammar=Grammar.choice(["one fox", "two"]))
    outputs = llm.generate([MESSAGES] * 2, [params, beams])
    assert outputs[0].text in {"a red fox", "a blue fox"}
    assert outputs[1].text in {"one fox", "two"}
    assert threads == [threading.current_thread()] * 2


def test_a_text_that_must_end_ends_before_the_minimum(llm: LLM) -> None:
    output = llm.chat(MESSAGES, SAMPLED.replace(grammar=Grammar.regex("a{2}"), min_new_tokens=20, seed=1))
    assert output.text == "aa"
    assert output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("end", "reported"), [(True, "ended where its grammar cannot"), (False, "cannot follow")]
)
def test_a_mask_that_is_not_applied_is_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, end: bool, reported: str
) -> None:
    """The matcher reads what was drawn, and where it ended: no answer passes for one of its grammar."""
    monkeypatch.setattr(GrammarMasks, "place", lambda self, requests: [-1] * len(requests))
    token = llm.engine.manifest.stop_ids[0] if end else 300
    params = SamplingParams(max_new_tokens=4, grammar=GRAMMARS["choice"], logit_bias={token: 100.0})
    with pytest.raises(IngotError, match=reported):
        llm.chat(MESSAGES, params)
    check_idle(llm)


def test_streams_and_tasks(llm: LLM) -> None:
    params = SAMPLED.replace(grammar=GRAMMARS["json_schema"], seed=4)
    text = "".join(piece.text for piece in llm.stream(Chat(MESSAGES), params))
    check("json_schema", text)
    outputs = asyncio.run(llm.agenerate([MESSAGES], params))
    assert outputs[0].text == text == llm.chat(MESSAGES, params).text


def test_a_grammar_that_cannot_be_served_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 2: the grammar is refused.*look-ahead"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(grammar=Grammar.regex("(?=a)b"))])
    with pytest.raises(RequestError, match="needs an end token"):
        llm.chat(MESSAGES, ignore_eos=True, grammar=Grammar.regex("a"))
    assert not llm.executor.has_work


def test_an_engine_without_a_tokenizer_takes_no_grammar(checkpoint: Path) -> None:
    plain = LLM(checkpoint, "cpu", max_batch_size=2)
    with pytest.raises(RequestError, match="no tokenizer, so it takes no grammars"):
        plain.generate([1, 2, 3], stop_token_ids=[5], grammar=Grammar.regex("a"))


def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{{ messages[0].content }}"
        "{% if not enable_thinking %}<think></think>{% endif %}"
    )
    templated = LLM(POCKET, "cpu", max_batch_size=2, chat_template=str(template))
    tokenizer = templated.tokenizer
    assert tokenizer is not None
    chat = Chat(MESSAGES, TOOLS, {"enable_thinking": True})
    assert tokenizer.decode(templated.prompt_ids(chat)) == f"[add][sum]{MESSAGES[0]['content']}"
    assert templated.chat_ids(chat) == templated.prompt_ids(chat)
    assert templated.explain(chat).rendered_text == f"[add][sum]{MESSAGES[0]['content']}"
    assert tokenizer.decode(templated.prompt_ids(MESSAGES)).endswith("<think></think>")
    assert len(templated.generate([chat, MESSAGES], max_new_tokens=2)) == 2
    for odd, message in (
        ({"enable_thinkng": True}, "does not read these variables"),
        ({"tools": []}, "may not set"),
    ):
        with pytest.raises(RequestError, match=message):
            templated.prompt_ids(Chat(MESSAGES, template_kwargs=odd))
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        Chat(MESSAGES, [{"type": "retrieval"}])


def test_a_chat_format_without_a_template_takes_no_tools(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"no template variables; seen: \['tools'\]"):
        llm.generate(Chat(MESSAGES, TOOLS))


def test_explain_names_the_grammar(llm: LLM) -> None:
    found = llm.explain(MESSAGES, {"grammar": GRAMMARS["choice"]})
    assert any("grammar choice" in reported for reported in found.processors)
