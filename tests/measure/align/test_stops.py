"""What ends an answer and what begins a prompt: mistakes in an engine's text side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot import build
from ingot.errors import CheckpointError
from ingot.llm import LLM
from ingot.measure.align.align_report import report_json, stops_text
from ingot.measure.align.align_session import Report, align
from ingot.measure.align.stage_verdict import GreedyRow
from ingot.measure.align.stop_ids_check import StopCheck, explain_stops
from ingot.measure.align.stop_sources import stop_ids_of_files
from ingot.measure.align.trace import run_steps, trace
from tests.e2e.terminal import ingot
from tests.measure.align.planted import plant
from tests.measure.align.spoken import BEGIN, END, TEMPLATE, TURN, edit, write_spoken
from tests.tiny_models import make_model, random_ids, tiny_config

SHORT = ("--device", "cpu", "--steps", "1")
IDS = [BEGIN, 5, 9]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA with a tokenizer of Hugging Face's."""
    return write_spoken(tmp_path_factory.mktemp("spoken") / "llama")


Build = Callable[..., Path]
Copied = Callable[..., Path]


@pytest.fixture
def engine_of(tmp_path: Path) -> Build:
    """engine_of(folder, [2]): an engine of a checkpoint, with these stop ids if any are given."""

    def make(folder: Path, stops: list[int] | None = None) -> Path:
        engine = build(folder, tmp_path / "engine", device="cpu", max_batch_size=2, proof=False)
        if stops is not None:
            edit(engine / "manifest.json", stop_ids=stops)
        return engine

    return make


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    """copied(folder, "generation_config.json", eos_token_id=7): a copy with keys changed in one file."""

    def make(folder: Path, name: str, **changes: Any) -> Path:
        copy = Path(shutil.copytree(folder, tmp_path / "copy"))
        edit(copy / name, **changes)
        return copy

    return make


@pytest.mark.parametrize(
    ("stops", "says"),
    [
        ([], "does not stop at 257 </s>, where the original's answers end: they go on after it"),
        ([46], "the engine stops at 46 'O'"),
        ([END, TURN], "where the original goes on: answers are cut off there"),
        ([BEGIN], "{257 </s>}, engine {256 <s>}"),
    ],
)
def test_stop_ids_of_an_engine(stops: list[int], says: str, llama: Path, engine_of: Build) -> None:
    result = ingot("align", engine_of(llama, stops), "--reference", llama, *SHORT)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "diverged at stop ids"
    assert "stop ids: differ (generate of Hugging Face's class)\n  expected 257 </s>\n" in result.stdout
    assert says in result.stdout
    assert "beyond" not in result.stdout, "every tensor is right, and no greedy id is a stop"


@pytest.mark.stays("named1-extra1")
@pytest.mark.parametrize(("named", "extra"), [(7, (7,)), ([END, 7], (7,)), ([], ())])
def test_another_generation_config(
    named: Any, extra: tuple[int, ...], llama: Path, copied: Copied, engine_of: Build
) -> None:
    wrong = copied(llama, "generation_config.json", eos_token_id=named)
    edit(wrong / "config.json", eos_token_id=None)
    edit(wrong / "tokenizer_config.json", eos_token=None)
    report = align(engine_of(wrong), llama, [IDS], steps=1, device="cpu")
    assert (report.first_stage, report.first) == ("stop ids", None)
    assert report.findings[0].culprit == "stop_ids"
    assert report.stops.expected == (END,)
    assert report.stops.extra == extra


def test_a_turns_end_that_is_lost(originals: dict[str, Path], engine_of: Build) -> None:
    engine = engine_of(originals["qwen"], [256, 257])
    result = ingot("align", engine, "--reference", originals["qwen"], *SHORT, "--prompt", "hello", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["first_stage"] == "stop ids"
    assert found["stop_ids"]["missing"] == [258]
    assert found["stop_ids"]["equal"] is False
    assert "does not stop at 258 <|im_end|>" in found["findings"][0]["text"]


def test_the_page_has_both_sets(originals: dict[str, Path], engine_of: Build, tmp_path: Path) -> None:
    engine, page = engine_of(originals["qwen"], [256]), tmp_path / "report.html"
    words = ("--reference", originals["qwen"], *SHORT, "--prompt", "hello", "--html", page)
    assert ingot("align", engine, *words).exit_code == 1
    assert "257 &lt;|im_start|&gt;, 258 &lt;|im_end|&gt;" in page.read_text()


@pytest.mark.parametrize(("side", "culprit"), [("engine", "bos_missing"), ("original", "bos_extra")])
def test_begin_of_text(side: str, culprit: str, llama: Path, copied: Copied, engine_of: Build) -> None:
    without = copied(llama, "tokenizer.json", post_processor=None)  # no <s> before a text
    engine = engine_of(without if side == "engine" else llama)
    original = llama if side == "engine" else without
    result = ingot("align", engine, "--reference", original, *SHORT, "--prompt", "Once upon", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["first_stage"] == "token ids"
    assert found["first"] is None
    assert found["findings"][0]["culprit"] == culprit
    assert found["stop_ids"]["equal"] is True


def test_a_cause_without_a_bad_tensor_is_printed(llama: Path, copied: Copied, engine_of: Build) -> None:
    without = copied(llama, "tokenizer.json", post_processor=None)
    result = ingot("align", engine_of(without), "--reference", llama, *SHORT, "--prompt", "Once upon")
    assert "cause: the prompt lacks the token 256 (bos)" in result.stdout
    assert result.stdout.splitlines()[-1] == "diverged at token ids"


def test_a_running_engine_that_forgot_them(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(LLM):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            plant(self, "stop_ids")

    monkeypatch.setattr("ingot.measure.align.align_session.LLM", Broken)
    report = align(llama, llama, [IDS], steps=0, device="cpu")
    assert report.first_stage == "stop ids"


@pytest.mark.slow
def test_ends_of_the_chat_format_are_no_mistake(llama: Path, copied: Copied) -> None:
    chat = copied(llama, "tokenizer_config.json", chat_template=TEMPLATE)
    report = align(chat, chat, [IDS], steps=0, device="cpu")
    assert report.stops.designed == (TURN,)
    assert report.aligned
    assert align(chat, llama, [IDS], steps=0, device="cpu").aligned, "a format that the user gave"
    edit(chat / "tokenizer_config.json", eos_token="<pad>")
    assert align(llama, chat, [IDS], steps=0, device="cpu").stops.designed == ()


def test_a_trace_with_stop_ids_and_without(originals: dict[str, Path], tmp_path: Path) -> None:
    model, llama = make_model(tiny_config("llama"), seed=1), originals["llama"]
    model.generation_config.eos_token_id = [5, 9]

    def traced(name: str, **notes: str) -> Path:
        with trace(model, tmp_path / name, **notes):
            run_steps(model, random_ids(6), 1)
        return tmp_path / name

    report = align(llama, traced("noted"), device="cpu")
    assert report.first_stage == "stop ids"
    assert report.stops.missing == (5, 9)
    assert align(llama, traced("told", stop_ids="[]"), device="cpu").aligned, "what is told counts"
    del model.generation_config
    result = ingot("align", llama, "--reference", traced("silent"), "--device", "cpu")
    assert "stop ids: not compared, the trace records none" in result.stdout
    assert result.exit_code == 0
    with pytest.raises(CheckpointError, match="stop ids"):
        align(llama, traced("odd", stop_ids="end"), device="cpu")


def test_the_files_say_what_generate_does(llama: Path, copied: Copied) -> None:
    """Our reading of the configs, for the classes that transformers lacks, against its own."""
    from transformers import AutoModelForCausalLM

    folder = copied(llama, "config.json", eos_token_id=[END, 5])
    path = folder / "generation_config.json"
    for reported in ({"eos_token_id": 7}, {"eos_token_id": [7, 8]}, {"bos_token_id": 1}, None):
        path.unlink(missing_ok=True)
        if reported is not None:
            path.write_text(json.dumps(reported))
        named = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
        theirs = () if named is None else tuple(named) if isinstance(named, list) else (named,)
        assert stop_ids_of_files(folder) == theirs


def test_names_of_ids() -> None:
    check = StopCheck((2,), (2, 46, 13), (13,), "x", {2: "</s>", 46: ".", 13: "\n"})
    assert check.named((2, 46, 13, 99)) == "2 </s>, 46 '.', 13 '\\n', 99"
    assert check.extra == (46,)


NAMED = {2: "</s>", 5: "<|end|>", 7: "x", 9: ""}


def check_of(
    expected: tuple[int, ...] | None, got: tuple[int, ...], designed: tuple[int, ...] = ()
) -> StopCheck:
    return StopCheck(expected, got, designed, "its files", NAMED)


def row(case: int, step: int, expected: int, got: int) -> GreedyRow:
    return GreedyRow(case, step, expected, got, 0.0, False)


@pytest.mark.parametrize(
    ("expected", "got", "designed", "missing", "extra", "equal", "text"),
    [
        (*((2, 5), (2, 5), (), (), ()), True, "stop ids: equal, 2 </s>, 5 <|end|> (its files)"),
        (
            *((2,), (2, 7), (7,), (), ()),
            True,
            "stop ids: equal, 2 </s> (its files); "
            "the engine also stops at 7 'x', as the checkpoint's other files say",
        ),
        (
            *((2, 5), (2, 7), (), (5,), (7,)),
            False,
            "stop ids: differ (its files)\n  expected 2 </s>, 5 <|end|>\n  got      2 </s>, 7 'x'",
        ),
        (
            *(None, (2, 9), (), (), ()),
            None,
            "stop ids: not compared, its files records none; the engine's: 2 </s>, 9",
        ),
        (*((), (), (), (), ()), True, "stop ids: equal, none (its files)"),
    ],
)
def test_what_is_said_of_both_sets(
    expected: tuple[int, ...] | None,
    got: tuple[int, ...],
    designed: tuple[int, ...],
    missing: tuple[int, ...],
    extra: tuple[int, ...],
    equal: bool | None,
    text: str,
) -> None:
    check = check_of(expected, got, designed)
    assert stops_text(check) == text
    report = Report("e", "r", "n", "fp32", "cpu", 0, [], [], [], check, None)
    reported = report_json(report)["stop_ids"]
    assert (reported["missing"], reported["extra"], reported["equal"]) == (missing, extra, equal)
    assert (reported["expected"], reported["got"], reported["designed"]) == (expected, got, designed)
    assert check.is_bad is (equal is False)
    assert report.aligned is (equal is not False)
    assert explain_stops(check, []) == [] or check.is_bad


def test_the_first_answer_that_shows_a_stop_is_named() -> None:
    """By its prompt and step, whichever side ends there first; the share is of all ids of both."""
    greedy = [row(0, 0, 4, 4), row(0, 1, 3, 8), row(1, 0, 5, 2), row(1, 1, 2, 7), row(2, 0, 2, 7)]
    (found,) = explain_stops(check_of((2, 4, 5), (4, 7)), greedy)
    assert (found.culprit, found.before, found.after) == ("stop_ids", 3 / 4, 0.0)
    assert "does not stop at 2 </s>, 5 <|end|>, where" in found.text
    assert "(so here: the original's answer ends at step 0 of prompt 2)" in found.text
    assert "stops at 7 'x', where the original goes on" in found.text
    assert "(so here: the engine's answer ends at step 1 of prompt 2)" in found.text
    assert "original {2 </s>, 4, 5 <|end|>}, engine {4, 7 'x'}" in found.text
    (silent,) = explain_stops(check_of((2,), ()), [row(0, 0, 4, 2)])
    assert (silent.before, "so here" in silent.text) == (1.0, False)


def test_at_most_eight_are_named() -> None:
    (found,) = explain_stops(check_of(tuple(range(10, 20)), ()), [])
    assert "10, 11, 12, 13, 14, 15, 16, 17, where" in found.text
