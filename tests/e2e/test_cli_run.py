"""``ingot run`` and ``ingot chat`` on a tiny engine: what they print where, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM, SamplingParams
from ingot.cli.options.sampling_flags import _HELP
from ingot.llm.conversation import Conversation
from tests.e2e.terminal import ingot, run_json
from tests.e2e.tiny import END_OF_TEXT, write_tiny
from tests.tiny_models import save_model, tiny_config

MAX_SEQ_LEN = 128


@pytest.fixture(scope="module")
def engine(tiny_engine: Path) -> Path:
    return tiny_engine


@pytest.fixture(scope="module")
def llm(engine: Path) -> LLM:
    return LLM(engine, device="cpu")


# --- run -------------------------------------------------------------------------------------------------


def test_run_prints_the_librarys_answer(engine: Path, llm: LLM) -> None:
    result = ingot("run", engine, "hello", "--raw", "--device", "cpu")
    assert result.stdout == f"{llm.generate('hello')[0].text}\n"
    assert "chat format" not in result.stderr
    assert "8 tokens in " in result.stderr
    assert "tokens/s" in result.stderr


def test_concurrent_streams_print_in_order(engine: Path, llm: LLM) -> None:
    prompts = ["one", "two", "three"]
    result = ingot("run", engine, *prompts, "--raw", "--ignore-eos", "--device", "cpu")
    outputs = llm.generate(prompts, llm.default_params.replace(ignore_eos=True))
    expected = [
        f"=== {i}/3: {p}\n{o.text}\n" for i, (p, o) in enumerate(zip(prompts, outputs, strict=True), 1)
    ]
    assert result.stdout == "".join(expected)
    assert "24 tokens in" in result.stderr


def test_an_answer_of_a_grammar(engine: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"const": 7}')
    for words, text in (
        (("--json-schema", schema), "7"),
        (("--regex", "ab{3}"), "abbb"),
        (("--choice", "été"), "été"),
    ):
        assert ingot("run", engine, "one", *words, "--device", "cpu").stdout == f"{text}\n"
    many = ingot("run", engine, "one", *("--choice", "no", "--choice", "yes"), "--device", "cpu")
    assert many.stdout in ("no\n", "yes\n")


def test_grammar_flags_that_cannot_be(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    for words, message in (
        (("--regex", "a", "--choice", "b"), "give one of"),
        (("--json-schema", tmp_path / "none.json"), "does not exist"),
        (("--json-schema", tmp_path / "bad.json"), "not JSON"),
        (("--regex", "(a"), "unclosed group"),
    ):
        result = ingot("run", engine, "one", *words, "--device", "cpu")
        assert result.exit_code == 2
        assert message in result.stderr


def test_several_answers_are_separated(engine: Path, llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=4, temperature=1.0, seed=3, n=2)
    words = ("--max-new-tokens", 4, "--temperature", 1, "--seed", 3, "-n", 2, "--raw")
    result = ingot("run", engine, "one", "two\nlines", *words, "--device", "cpu")
    outputs = llm.generate(["one", "two\nlines"], params)
    expected = "".join(
        f"=== {i}/2 answer {j}/2: {title}\n{answer.text}\n"
        for i, (title, output) in enumerate(zip(("one", "two lines"), outputs, strict=True), start=1)
        for j, answer in enumerate(output.answers, start=1)
    )
    assert result.stdout == expected


def test_json_has_all_fields(engine: Path, llm: LLM) -> None:
    lines = run_json(engine, "a", "bc", "--raw", "--logprobs", 2, "--max-new-tokens", 3, "--ignore-eos")
    outputs = llm.generate(["a", "bc"], SamplingParams(max_new_tokens=3, logprobs=2, ignore_eos=True))
    for line, prompt, output in zip(lines, ("a", "bc"), outputs, strict=True):
        assert list(line) == ["prompt", "prompt_token_ids", "answers", "timing"]
        assert (line["prompt"], line["prompt_token_ids"]) == (prompt, output.prompt_token_ids)
        (answer,) = line["answers"]
        assert (answer["text"], answer["token_ids"]) == (output.text, output.token_ids)
        assert (answer["finish_reason"], answer["stopped_by"]) == ("length", None)
        assert [step["token_id"] for step in answer["logprobs"]] == output.token_ids
        assert all(isinstance(step["text"], str) for step in answer["logprobs"])
        for step in answer["logprobs"]:
            assert [[type(v) for v in entry] for entry in step["top"]] == [[int, float, str]] * 2
        assert line["timing"]["output_tokens"] == 6


def test_stop_flags_may_be_repeated(engine: Path, llm: LLM) -> None:
    ids = llm.generate("hello", SamplingParams(max_new_tokens=8, ignore_eos=True))[0].token_ids
    words = ("--stop-token-id", 300, "--stop-token-id", ids[3], "--stop", "never", "--stop", "neither")
    (line,) = run_json(engine, "hello", "--raw", *words)
    assert line["answers"][0]["token_ids"] == ids[: ids.index(ids[3])]
    assert line["answers"][0]["stopped_by"] == ids[3]


def test_beams(engine: Path, llm: LLM) -> None:
    (line,) = run_json(engine, "hello", "--raw", "--num-beams", 3, "-n", 2, "--length-penalty", 0.5)
    params = llm.default_params.replace(num_beams=3, n=2, length_penalty=0.5)
    assert [a["token_ids"] for a in line["answers"]] == [
        a.token_ids for a in llm.generate("hello", params)[0].answers
    ]


def test_more_beams_than_fit_is_misuse_whichever_prompt_is_named(engine: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n")
    result = ingot("run", engine, "--file", prompts, "--num-beams", 5)
    assert result.exit_code == 2
    assert "prompt 1: more beams than the engine's batch size" in result.stderr


def test_token_ids(engine: Path) -> None:
    one, other = run_json(engine, "--ids", "104  105", "--ids", "7")
    assert (one["prompt"], one["prompt_token_ids"]) == (None, [104, 105])
    assert other["prompt_token_ids"] == [7]
    assert ingot("run", engine, "hi", "--ids", "1").exit_code == 2


def test_a_chat_model_gets_texts_as_messages_with_a_note(engine: Path, llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = f"{llm.chat(messages).text}\n"
    for words, stdin in ((("hi",), None), ((), "hi\n"), (("--file", "-"), "\nhi\n")):
        result = ingot("run", engine, *words, "--device", "cpu", stdin=stdin)
        assert result.stdout == answer
        assert (
            result.stderr.count("note: sent in the model's chat format; --raw sends the text as it is") == 1
        )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi"}\n')
    (line,) = run_json(engine, "--file", tmp_path / "rows.jsonl")
    assert (line["prompt"], line["messages"]) == (None, messages)
    assert line["prompt_token_ids"] == llm.chat_ids(messages)
    assert "chat format" not in ingot("run", engine, "--ids", "1", "--device", "cpu").stderr


def test_a_system_message_is_before_texts_and_conversations(engine: Path, llm: LLM, tmp_path: Path) -> None:
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "Be brief."}
    own = {"role": "developer", "content": "Be long."}
    rows = [{"prompt": "hi"}, {"messages": [user]}, {"messages": [own, user]}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run_json(engine, "--file", file, "--system", "Be brief.")
    assert [line["messages"] for line in found] == [[system, user], [system, user], [own, user]]
    assert found[0]["prompt_token_ids"] == llm.chat_ids([system, user])
    (empty,) = run_json(engine, "hi", "--system", "")
    assert empty["messages"] == [{"role": "system", "content": ""}, user]


def test_a_system_message_that_has_no_place_is_misuse(engine: Path, tmp_path: Path) -> None:
    plain = write_tiny(tmp_path / "plain")
    (plain / "generation_config.json").write_text("{}")
    for model, words in ((engine, ("hi", "--raw")), (engine, ("--ids", "1")), (plain, ("hi",))):
        result = ingot("run", model, *words, "--system", "x", "--device", "cpu")
        assert result.exit_code == 2
        assert "--system" in result.stderr


def test_a_model_without_a_chat_format_continues_texts(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "plain")
    (folder / "generation_config.json").write_text("{}")
    result = ingot("run", folder, "hi", "--max-new-tokens", 4, "--device", "cpu")
    assert result.stdout == f"{LLM(folder, device='cpu').generate('hi', max_new_tokens=4)[0].text}\n"
    assert "chat format" not in result.stderr


@pytest.mark.parametrize("stdin", ["", "\n", " \n\n"])
def test_a_prompt_that_is_empty_is_misuse(engine: Path, stdin: str) -> None:
    for words, message in (((), "stdin is empty"), (("--file", "-"), "no prompts")):
        result = ingot("run", engine, *words, stdin=stdin)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert "the prompt is empty" in ingot("run", engine, "one", "").stderr


@pytest.mark.parametrize("words", ["one 2", "1.5", "-", "", " "])
def test_ids_that_are_none(engine: Path, words: str) -> None:
    result = ingot("run", engine, f"--ids={words}")
    assert result.exit_code == 2
    assert "--ids takes token ids" in result.stderr


def test_stdin_is_one_prompt(engine: Path) -> None:
    (line,) = run_json(engine, "--raw", stdin="two\nlines é\n")
    assert line["prompt"] == "two\nlines é"
    assert "stdin is not UTF-8" in ingot("run", engine, stdin=b"\xff").stderr


def test_files_hold_a_prompt_a_line(engine: Path, llm: LLM, tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_bytes("\ufefffirst\r\n\n  second \n".encode())
    assert [line["prompt"] for line in run_json(engine, "--raw", "--file", text)] == ["first", "  second "]
    piped = run_json(engine, "--raw", "--file", "-", stdin="a\nb\n")
    assert [line["prompt"] for line in piped] == ["a", "b"]
    rows = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    values = [{"prompt": "x", "id": 7}, {"messages": messages}, {"prompt_token_ids": [9, 8]}]
    rows.write_text("".join(json.dumps(value) + "\n" for value in values))
    found = [line["prompt_token_ids"] for line in run_json(engine, "--raw", "--file", rows)]
    assert found == [[120], llm.chat_ids(messages), [9, 8]]


@pytest.mark.parametrize(
    "line", ["{", "7", "{}", '{"prompt": 1}', '{"prompt": "a", "messages": []}', '{"messages": "a"}']
)
def test_a_bad_line_is_named(engine: Path, tmp_path: Path, line: str) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "a"}\n\n' + line + "\n")
    result = ingot("run", engine, "--file", rows)
    assert result.exit_code == 2
    assert f"{rows}, line 3 is not a prompt" in result.stderr


def test_keys_that_are_not_read_are_named_and_sampling_values_refused(engine: Path, tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "a", "id": 7, "temprature": 1}\n')
    result = ingot("run", engine, "--file", rows, "--device", "cpu")
    assert result.exit_code == 0
    assert f"note: {rows}: ignored keys: id, temprature" in result.stderr
    rows.write_text('{"prompt": "a"}\n{"prompt": "a", "temperature": 1, "max_tokens": 3}\n')
    result = ingot("run", engine, "--file", rows, "--device", "cpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{rows}, line 2 sets sampling values" in result.stderr
    assert "--temperature, --max-new-tokens" in result.stderr


def test_the_prompt_that_does_not_fit_is_named(engine: Path) -> None:
    result = ingot("run", engine, "--raw", "fine", "x" * MAX_SEQ_LEN, "--device", "cpu")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: prompt 2: the prompt is too long\n  seen: 128 tokens")


def test_an_answer_cut_by_the_context_is_reported_with_numbers(engine: Path) -> None:
    words = ("--raw", "--max-new-tokens", 50, "--ignore-eos", "--device", "cpu")
    result = ingot("run", engine, "x" * 120, *words)
    notes = result.stderr.splitlines()
    assert (
        notes[0]
        == "note: the prompt's 120 tokens leave room for 8 new ones, not 50: the engine's limit is 128"
    )
    assert notes[1] == "(the answer was cut off; the engine's --max-seq-len sets the limit)"
    (line,) = run_json(engine, "x" * 120, *words[:-2])
    assert (len(line["answers"][0]["token_ids"]), line["answers"][0]["finish_reason"]) == (8, "length")
    several = ingot("run", engine, "fine", "x" * 120, "x" * 100, *words).stderr.splitlines()
    assert several[0].startswith("note: 2 of 3 prompts leave room for fewer than 50 new tokens, the longest ")
    assert several[1] == "(3 answers were cut off; --max-new-tokens sets the limit)"
    fits = ingot("run", engine, "x" * 120, "--raw", "--max-new-tokens", 8, "--ignore-eos", "--device", "cpu")
    assert "note: " not in fits.stderr


def test_files_that_are_not_there_or_empty(engine: Path, tmp_path: Path) -> None:
    missing = ingot("run", engine, "--file", tmp_path / "none.txt")
    assert (missing.exit_code, "cannot be read" in missing.stderr) == (2, True)
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "no prompts" in ingot("run", engine, "--file", tmp_path / "empty.txt").stderr
    assert ingot("run", engine, "a", "--file", "x").exit_code == 2


def test_flags_override_generation_config_and_only_when_given(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "sampling")
    generation = {"eos_token_id": END_OF_TEXT, "do_sample": True, "temperature": 5.0, "max_new_tokens": 12}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    direct = LLM(folder, device="cpu")
    greedy = direct.generate("hello", SamplingParams(max_new_tokens=12))[0].token_ids
    (line,) = run_json(folder, "hello", "--raw", "--temperature", "0")
    assert line["answers"][0]["token_ids"] == greedy
    sampled = run_json(folder, "hello", "--raw", "--seed", 1, "-n", 3)[0]["answers"]
    assert any(answer["token_ids"] != greedy for answer in sampled)


def test_every_sampling_value_has_a_flag_with_help() -> None:
    assert [*_HELP, "logit_bias", "grammar", "transcript"] == list(SamplingParams().to_json())


# --- chat ------------------------------------------------------------------------------------------------


def chat(engine: Path, *lines: str, words: tuple[object, ...] = ()) -> Any:
    return ingot("chat", engine, "--device", "cpu", *words, stdin="".join(f"{x}\n" for x in lines))


def test_chat_remembers(engine: Path, llm: LLM) -> None:
    talk = Conversation(llm, "Be nice.")
    answers = ["".join(p.text for p in talk.ask(text)) for text in ("hi", "two\nlines")]
    result = chat(engine, "hi", '"""two', 'lines"""', "", "/exit", "never", words=("--system", "Be nice."))
    assert result.exit_code == 0
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert "cut off; --max-new-tokens" in result.stderr


def test_quoted_text_is_not_a_command_and_odd_bytes_do_not_end_the_chat(engine: Path, llm: LLM) -> None:
    stdin = b'"""/clear\n"""\n"""one"""\n\xff\n'
    result = ingot("chat", engine, "--device", "cpu", "--max-new-tokens", 2, stdin=stdin)
    talk = Conversation(llm, params=SamplingParams(max_new_tokens=2))
    answers = ["".join(p.text for p in talk.ask(text)) for text in ("/clear\n", "one", "\ufffd")]
    assert result.exit_code == 0
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)


def test_chat_commands(engine: Path, llm: LLM) -> None:
    lines = ("hi", "/clear", "/system New.", "/system", "/wrong", "/help", "again")
    result = chat(engine, *lines, words=("--system", "Old."))
    talk = Conversation(llm, "New.")
    assert result.stdout.splitlines()[-1] == "".join(p.text for p in talk.ask("again")).splitlines()[-1]
    assert result.stderr.count("system: New.") == 2
    assert "no such command: /wrong" in result.stderr
    assert "/clear           forget" in result.stderr


def test_retry_answers_the_last_message_in_place_of_its_answer(engine: Path, llm: LLM) -> None:
    result = chat(engine, "/retry", "hi", "one", "/retry", "two")
    talk = Conversation(llm)
    answers = ["".join(p.text for p in talk.ask(text)) for text in ("hi", "one", "two")]
    answers.insert(2, answers[1])
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert "error: there is no message to answer again" in result.stderr
    assert result.exit_code == 1


def test_a_message_that_failed_is_the_one_to_retry(engine: Path, llm: LLM) -> None:
    result = chat(engine, "hi", "x" * 300, "/retry", "and", words=("--max-new-tokens", "2"))
    talk = Conversation(llm, params=SamplingParams(max_new_tokens=2))
    answers = ["".join(p.text for p in talk.ask(text)) for text in ("hi", "and")]
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert result.stderr.count("error: the prompt is too long") == 2


def test_set_changes_the_next_answers(engine: Path, llm: LLM) -> None:
    lines = (
        "/set max-new-tokens 3",
        "hi",
        "/set max_new_tokens",
        "/set",
        "/set max_new_tokens default",
        "hi",
    )
    result = chat(engine, *lines, words=("--ignore-eos",))
    params = llm.default_params.replace(ignore_eos=True)
    talk = Conversation(llm, params=params.replace(max_new_tokens=3))
    short = "".join(p.text for p in talk.ask("hi"))
    other = Conversation(llm, params=params)
    other.turns = talk.turns
    assert result.stdout == f"{short}\n" + "".join(p.text for p in other.ask("hi")) + "\n"
    assert result.stderr.count("max_new_tokens: 3") == 2
    assert "set: ignore_eos True, max_new_tokens 3" in result.stderr
    assert "max_new_tokens: the default" in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature hot", "temperature cannot be set to this"),
        ("/set temperature -1", "temperature is out of range"),
        ("/set ignore_eos maybe", "on or off"),
        ("/set n 2", "no such sampling value"),
        ("/set min_new_tokens 500", "min_new_tokens exceeds max_new_tokens"),
        ("/save", "/save needs a file name"),
        ("/save nothing.json", "nothing to save yet"),
    ],
)
def test_a_command_that_cannot_be_done_changes_nothing(
    engine: Path, llm: LLM, line: str, message: str
) -> None:
    result = chat(engine, line, "hi")
    assert message in result.stderr
    assert "--" not in result.stderr.split("fix:")[-1].splitlines()[0]
    assert result.stdout == "".join(p.text for p in Conversation(llm).ask("hi")) + "\n"
    assert result.exit_code == 1


def test_every_kind_of_value_can_be_set(engine: Path) -> None:
    lines = ("/set temperature 0.5", "/set top-k 5", "/set ignore_eos on", "/set stop the end", "/set")
    result = chat(engine, *lines, "/set stop_token_ids 7", "hi")
    assert "temperature 0.5, top_k 5, ignore_eos True, stop ('the end',)" in result.stderr
    assert result.exit_code == 0


def test_save_writes_the_messages(engine: Path, llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "talk é.json"
    (tmp_path / "other.json").write_text("mine")
    save = f"/save {file}"
    lines = ("hi", save, "two", save, f"/save {tmp_path / 'other.json'}", f"/save {tmp_path / 'no' / 'a'}")
    result = chat(engine, *lines, words=("--system", "Nice."))
    talk = Conversation(llm, "Nice.")
    for text in ("hi", "two"):
        list(talk.ask(text))
    assert json.loads(file.read_text(encoding="utf-8")) == talk.messages()
    assert "error: the file exists" in result.stderr
    assert "error: the conversation cannot be written" in result.stderr
    assert (tmp_path / "other.json").read_text() == "mine"


def test_an_error_ends_neither_chat_nor_memory(engine: Path, llm: LLM) -> None:
    result = chat(engine, "hi", "x" * 300, "and", words=("--max-new-tokens", "2"))
    talk = Conversation(llm, params=SamplingParams(max_new_tokens=2))
    answers = ["".join(p.text for p in talk.ask(text)) for text in ("hi", "and")]
    assert result.exit_code == 1  # a script should know
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert "error: the prompt is too long" in result.stderr


def test_dropped_turns_are_reported_once(engine: Path) -> None:
    result = chat(engine, "a" * 20, "b" * 20, "c" * 20, "d" * 20)
    assert result.exit_code == 0
    assert result.stderr.count("the oldest turns no longer fit") == 1


def test_an_engine_without_a_chat_format_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "plain")
    (folder / "generation_config.json").write_text("{}")
    result = chat(folder, "hi")
    assert result.exit_code == 1
    assert "no chat template" in result.stderr


def test_an_engine_without_a_tokenizer_advises_what_helps(tmp_path: Path) -> None:
    save_model(tiny_config("llama"), tmp_path / "plain")
    result = chat(tmp_path / "plain", "hi")
    assert result.exit_code == 1
    assert "no tokenizer" in result.stderr
    assert "--chat-template" not in result.stderr  # which gives the same error
