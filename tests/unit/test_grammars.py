"""What grammars allow, token by token, in every kind of vocabulary; and what cannot be compiled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import regex
import tokenizers

from ingot import Grammar, SamplingParams
from ingot.errors import RequestError
from ingot.sandbox.limited_process import ProcessLimits
from ingot.text.grammar.grammar_compiler import GrammarMatcher, Grammars, mask_words, with_text_start
from ingot.text.tokenizer.detokenizer import IncrementalDetokenizer
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.unit.vocabularies import load, metaspace_folder

POCKET = Path(__file__).resolve().parents[2] / "models" / "pocket-chat"
PATTERN = '(?: sp|你好|été "x"|no[0-9]{2}|<\\|im_end\\|>|\n\n?)+'
PADDING = 5  # ids of the model that the tokenizer lacks


@pytest.fixture(scope="module")
def pocket() -> Tokenizer:
    return load(POCKET)


def words(folder: Path, texts: Sequence[str]) -> Tokenizer:
    """A byte-level tokenizer of these tokens, the last one special."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({t: i for i, t in enumerate(texts)}, texts[0]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([texts[-1]])
    backend.save(str(folder / "tokenizer.json"))
    return load(folder)


def allowed(matcher: GrammarMatcher, vocab_size: int, output_ids: Sequence[int]) -> set[int]:
    bits = np.full(mask_words(vocab_size), -1, np.int32)
    matcher.mask_into(bits, output_ids)
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
    assert not flags[vocab_size:].any()
    return set(np.flatnonzero(flags).tolist())


def by_first_byte(tokenizer: Tokenizer) -> dict[int, list[tuple[int, bytes]]]:
    """Tokens that are text, with their bytes."""
    found: dict[int, list[tuple[int, bytes]]] = {}
    for i in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(i)
        if data and not tokenizer.is_special(i):
            found.setdefault(data[0], []).append((i, data))
    return found


def expected(
    tokens: dict[int, list[tuple[int, bytes]]], pattern: str, text: bytes, ends: set[int], before: bytes
) -> set[int]:
    """The tokens after which the text can still become a match, by another library; and the end tokens."""
    found = regex.compile(regex.escape(before) + pattern.encode())
    heads = [byte for byte in tokens if found.fullmatch(text + bytes([byte]), partial=True)]
    offered = (token for byte in heads for token in tokens[byte])
    ids = {i for i, data in offered if found.fullmatch(text + data, partial=True)}
    return ids - ends | (ends if found.fullmatch(text) else set())


def check_masks(tokenizer: Tokenizer, context: Sequence[int] = (), *, before: bytes = b"") -> None:
    size = tokenizer.vocab_size + PADDING
    end = max(tokenizer.special_tokens.values())
    params = SamplingParams(grammar=Grammar.regex(PATTERN), stop_token_ids=[end])
    params = with_text_start(params, tokenizer, context)
    grammars = Grammars(tokenizer, size)
    grammars.prepare(params, frozenset())
    matcher = grammars.matcher(params, frozenset())
    tokens = by_first_byte(tokenizer)
    random = np.random.default_rng(1)
    ids: list[int] = []
    ended = 0
    for _ in range(14):
        text = b"".join(map(tokenizer.token_bytes, ids))
        found = allowed(matcher, size, ids)
        assert found == expected(tokens, PATTERN, text, {end}, before), text
        if end in found:
            detokenizer = IncrementalDetokenizer(tokenizer, context)
            assert regex.fullmatch(PATTERN, detokenizer.add(ids) + detokenizer.flush())
            ended += 1
        ids.append(int(random.choice(sorted(found - {end}))))
    assert ended


def test_masks_of_the_pocket_models_vocabulary(pocket: Tokenizer) -> None:
    check_masks(pocket)


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen1", "qwen2"))]
)
def test_masks_of_byte_level_vocabularies(name: str, request: pytest.FixtureRequest) -> None:
    check_masks(request.getfixturevalue(name))


def test_masks_of_sentencepiece(llama: Tokenizer) -> None:
    """At the start of a text the first space is not shown; in the middle it is."""
    check_masks(llama, before=b" ")
    check_masks(llama, [1], before=b" ")  # <s> is no text
    check_masks(llama, llama.encode("Say"))


def test_a_special_token_is_not_text(pocket: Tokenizer) -> None:
    """Its text can be spelled."""
    special = pocket.special_tokens["<|im_start|>"]
    params = SamplingParams(grammar=Grammar.choice(["<|im_start|>"]))
    found = allowed(Grammars(pocket, 3008).matcher(params, frozenset({2800})), 3008, [])
    assert special not in found
    assert {pocket.token_bytes(i) for i in found} >= {b"<"}


@pytest.fixture
def ab(tmp_path: Path) -> tuple[Tokenizer, Grammars]:
    tokenizer = words(tmp_path, ["a", "b", "ab", "c", "<e>"])
    return tokenizer, Grammars(tokenizer, 5)


A, B, AB, C, END = range(5)


def test_end_tokens_are_allowed_exactly_where_the_text_may_end(ab: tuple[Tokenizer, Grammars]) -> None:
    matcher = ab[1].matcher(SamplingParams(grammar=Grammar.regex("a(bc?)?")), frozenset({END}))
    assert allowed(matcher, 5, []) == {A, AB}
    assert allowed(matcher, 5, [A]) == {B, END}
    assert allowed(matcher, 5, [AB]) == {C, END}
    assert allowed(matcher, 5, [AB, C]) == {END}


def test_a_stop_token_is_an_end_token_and_no_text(ab: tuple[Tokenizer, Grammars]) -> None:
    params = SamplingParams(grammar=Grammar.regex("[abc]+"), stop_token_ids=[C], ignore_eos=True)
    matcher = ab[1].matcher(params, frozenset({END}))
    assert allowed(matcher, 5, []) == {A, B, AB}
    assert allowed(matcher, 5, [A]) == {A, B, AB, C}


def test_the_minimum_applies_while_the_text_can_go_on(ab: tuple[Tokenizer, Grammars]) -> None:
    params = SamplingParams(grammar=Grammar.regex("a?b?"), min_new_tokens=3)
    matcher = ab[1].matcher(params, frozenset({END}))
    assert allowed(matcher, 5, [A]) == {B}
    assert allowed(matcher, 5, [A, B]) == {END}


def test_state_depends_on_the_output_alone(pocket: Tokenizer) -> None:
    """Preemption, beams: the same matcher is asked about any outputs, in any order."""
    grammars = Grammars(pocket, 3008)
    params = SamplingParams(grammar=Grammar.json_object())
    ends = frozenset({2800})
    ids = pocket.encode('{"a": [1, "b"], "c": {}}')
    outputs = [ids[:7], ids[:8], ids[:3], [], ids[:5], [*ids[:5], *pocket.encode(" ")], ids]
    kept = grammars.matcher(params, ends)
    for output in outputs:
        fresh = grammars.matcher(params, ends)
        assert allowed(kept, 3008, output) == allowed(fresh, 3008, output)
    assert allowed(kept, 3008, ids) == {2800}


def test_a_vocabulary_that_cannot_write_the_text_is_an_error(ab: tuple[Tokenizer, Grammars]) -> None:
    ends = frozenset({END})
    with pytest.raises(RequestError, match=r"no token .* continues the grammar after 0 tokens"):
        ab[1].prepare(SamplingParams(grammar=Grammar.regex("d")), ends)
    params = SamplingParams(grammar=Grammar.regex("ad"))
    ab[1].prepare(params, ends)
    with pytest.raises(RequestError, match="continues the grammar after 1 tokens"):
        allowed(ab[1].matcher(params, ends), 5, [A])


def test_a_request_without_an_end_token_is_refused(ab: tuple[Tokenizer, Grammars]) -> None:
    params = SamplingParams(grammar=Grammar.regex("a"), ignore_eos=True)
    with pytest.raises(RequestError, match="needs an end token") as caught:
        ab[1].prepare(params, frozenset({END}))
    assert caught.value.field == "ignore_eos"


def test_tokenizers_that_grammars_cannot_use(tmp_path: Path) -> None:
    params = SamplingParams(grammar=Grammar.regex("a"))
    for tokenizer, message in ((None, "has no tokenizer"), (load(metaspace_folder(tmp_path)), "bytes")):
        with pytest.raises(RequestError, match=message):
            Grammars(tokenizer, 10).prepare(params, frozenset({1}))


NESTED = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {"type": "string"}}}}}
WIDE = {"type": "object", "properties": {f"field_{i}": {} for i in range(2100)}}  # too many may follow
SHARED = {"$defs": {"x": {"type": "foo"}}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}


@pytest.mark.parametrize(
    ("grammar", "messages"),
    [
        (Grammar.json_schema(NESTED), [r"\(properties.a.items\)", '"not"']),
        (Grammar.json_schema(SHARED), [r"\(\$defs.x\)", "foo"]),
        (Grammar.json_schema({"anyOf": [True, {"not": {}}]}), [r"\(anyOf\[1\]\)"]),
        (Grammar.json_schema({"$ref": "#/x"}), ["the schema itself", "/x"]),
        (Grammar.json_schema({"$ref": "https://example.com/x"}), ["fetch"]),
        (Grammar.json_schema({"$ref": "#"}), ["nothing can follow"]),
        (Grammar.json_schema(WIDE), ["Current row has"]),
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 1}), ["minimum"]),
        (Grammar.regex("(a"), ["unclosed group"]),
        (Grammar.regex("(?=a)b"), ["look-ahead"]),
        (Grammar.regex("(" * 1000 + ")" * 1000), ["nest"]),
        (
            Grammar.tool_calls([{"function": {"name": "f", "parameters": NESTED}}]),
            [r"\(f.properties.a.items\)"],
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_a_refusal_says_which_part(grammar: Grammar, messages: list[str], pocket: Tokenizer) -> None:
    with pytest.raises(RequestError) as caught:  # a slow machine has time to find the part
        Grammars(pocket, 3008, ProcessLimits(seconds=60)).prepare(
            SamplingParams(grammar=grammar), frozenset({2800})
        )
    for message in messages:
        assert regex.search(message, str(caught.value)), str(caught.value)


def test_compiling_has_limits(pocket: Tokenizer) -> None:
    """In a process of its own; the next grammar is served."""
    hard = SamplingParams(grammar=Grammar.choice([f"x{i}" for i in range(24_000)]))
    Grammars(pocket, 3008).prepare(hard, frozenset({2800}))
    grammars = Grammars(pocket, 3008, ProcessLimits(seconds=0.02))
    with pytest.raises(RequestError, match=r"the grammar needs more than 0.02 seconds.*simpler"):
        grammars.prepare(hard, frozenset({2800}))
    grammars.prepare(SamplingParams(grammar=Grammar.regex("a")), frozenset({2800}))


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_long_schema_of_optional_properties_can_be_written(pocket: Tokenizer, count: int) -> None:
    """Every property may follow every earlier one, after each byte between them."""
    fields = {f"a rather long name of a property, the {i}th": {"enum": ["one", "two"]} for i in range(count)}
    grammar = Grammar.json_schema({"type": "object", "properties": fields, "additionalProperties": False})
    grammars = Grammars(pocket, 3008)
    whole = json.dumps(dict.fromkeys([*fields][:: count // 3], "two"))
    assert accepts(grammars, pocket, grammar, whole)
    matcher = grammars.matcher(SamplingParams(grammar=grammar), frozenset({2800}))
    ids = pocket.encode(whole)
    for done in range(len(ids)):
        assert ids[done] in allowed(matcher, 3008, ids[:done])


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of single bytes, which say nothing of how a model would write the text."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [single[bytes([byte])] for byte in text.encode()]


def accepts(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    matcher = grammars.matcher(SamplingParams(grammar=grammar), frozenset({2800}))
    try:
        return 2800 in allowed(matcher, 3008, spelled(tokenizer, text))
    except RequestError as error:
        assert "cannot follow" in str(error)  # noqa: PT017
        return False


def cases() -> Iterator[tuple[Grammar, list[str], list[str]]]:
    odd = ['a"b\\c/\n', "é😀", "", "\x00\x7f\u2028", "a", "ab"]
    yield Grammar.choice(odd), odd, ["b", " a", "abc"]
    yield Grammar.regex("a/b"), ["a/b"], ["a", "a\\/b"]
    yield Grammar.regex(r"a\/b"), ["a/b"], []
    yield Grammar.regex("x\ny"), ["x\ny"], ["xy"]
    yield Grammar.regex(r"\\/"), ["\\/"], ["/"]
    yield (
        Grammar.json_object(),
        ["{}", '{ "a" : [1, {"b": null}] }'],
        ["[]", "1", "{} ", '{"a"}', '{"a":  1}'],
    )
    thought = Grammar.choice(["7"])
    yield (
        thought.replace(thinking="may"),
        ["7", "<think>\n7\n</think>\n\n7", "<think></think>7"],
        ["<think>7"],
    )
    yield thought.replace(thinking="must"), ["Hm.</think>7", "\n</think>\n\n7"], ["7", "Hm.</think>8"]


@pytest.mark.parametrize(("grammar", "yes", "no"), [*cases()])
def test_texts_of_a_grammar(grammar: Grammar, yes: list[str], no: list[str], pocket: Tokenizer) -> None:
    grammars = Grammars(pocket, 3008)
    assert [accepts(grammars, pocket, grammar, text) for text in yes] == [True] * len(yes)
    assert [accepts(grammars, pocket, grammar, text) for text in no] == [False] * len(no)


def call(name: str, arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_tool_calls_are_of_the_wire_format_and_the_tools_schemas(pocket: Tokenizer) -> None:
    number = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tools = [{"function": {"name": "add", "parameters": number}}, {"function": {"name": "stop"}}]
    grammars = Grammars(pocket, 3008)
    both, one = Grammar.tool_calls(tools), Grammar.tool_calls(tools, parallel=False)
    named = Grammar.tool_calls(tools, name="stop")
    add, stop = call("add", {"x": 3}), call("stop", {"y": [1]})
    for grammar, yes, no in (
        (both, [add, stop, f"{add}\n{stop}"], ["", "Hi", call("add", {"x": "3"}), call("sub", {}), add[:-1]]),
        (one, [add, stop], [f"{add}\n{stop}"]),
        (named, [stop], [add]),
    ):
        assert [accepts(grammars, pocket, grammar, text) for text in yes] == [True] * len(yes)
        assert [accepts(grammars, pocket, grammar, text) for text in no] == [False] * len(no)


def test_where_a_text_may_end(pocket: Tokenizer) -> None:
    params = SamplingParams(grammar=Grammar.regex("ab*"), stop_token_ids=(pocket.eos_id or 0,))
    matcher = Grammars(pocket, pocket.vocab_size).matcher(params, frozenset())
    first, second = pocket.encode("a"), pocket.encode("b")
    assert not matcher.may_end([])
    assert matcher.may_end(first)
    assert matcher.may_end([*first, *second])
    assert not matcher.may_end(second), "it starts over where earlier tokens changed"
