"""Flags without effect are refused, and mistakes are reported before an engine is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ingot.building.builder import build
from ingot.config.build_config import BuildConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.measure.bench.ceiling import Ceiling
from tests.e2e.terminal import ingot

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine(tiny_engine: Path) -> Path:
    return tiny_engine


@pytest.mark.parametrize("words", [["-n", "2"], ["--num-beams", "2"], ["--logprobs", "3"]])
def test_a_chat_has_one_answer_and_shows_text(engine: Path, words: list[str]) -> None:
    result = ingot("chat", engine, *words, stdin="Hi\n")
    assert result.exit_code == 2
    assert "no such option" in result.stderr


def test_logprobs_need_json(engine: Path) -> None:
    result = ingot("run", engine, "Hi", "--logprobs", 3)
    assert result.exit_code == 2
    assert "--json" in result.stderr


def test_the_end_of_a_pipe_closes_a_block(engine: Path) -> None:
    result = ingot("chat", engine, "--max-new-tokens", 3, stdin='"""one\ntwo\n')
    assert result.exit_code == 0
    assert result.stdout.strip()


def test_recast_tensors_are_reported_in_one_line(tiny: Path, engine: Path, tmp_path: Path) -> None:
    options = {"max_seq_len": 128, "max_batch_size": 4, "device": "cpu", "proof": False}
    wide = build(tiny, tmp_path / "wide", dtype="fp32", **options)
    assert "17 tensors: F16 -> F32, values equal" in ingot("diff", engine, wide).stdout


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_batch_invariance_is_asked_for(
    engine: Path, verb: str, setups: list[tuple[BuildConfig, RuntimeConfig]]
) -> None:
    words = [verb, engine, *(["Hi"] if verb == "run" else []), "--max-new-tokens", 2, "--threads", 1]
    plain, invariant = (ingot(*words, *flag, stdin="Hi\n") for flag in ((), ("--batch-invariant",)))
    assert plain.exit_code == invariant.exit_code == 0
    assert plain.stdout == invariant.stdout
    assert [runtime.batch_invariant for _, runtime in setups] == [False, True]


@pytest.mark.parametrize(
    "words",
    [
        ["run", "Hi", "--max-new-tokens", 2],
        ["verify"],
        ["eval", "perplexity", "--data", "{text}", "--window", 16],
        ["bench", "latency", "--batch", 1, "--prompt-tokens", 4, "--new-tokens", 2, "--repeats", 1],
    ],
    ids=["run", "verify", "eval", "bench"],
)
def test_the_embedding_s_place_is_asked_for(
    engine: Path,
    words: list[object],
    setups: list[tuple[BuildConfig, RuntimeConfig]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ceiling = Ceiling(1.0, 1.0, "fp32", 1, 1)
    monkeypatch.setattr("ingot.measure.bench.bench_session.measure_ceiling", lambda *_: ceiling)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 4)
    place = 2 if words[0] in ("eval", "bench") else 1
    words = [text if word == "{text}" else word for word in words]
    words = [*words[:place], engine, *words[place:], "--device", "cpu"]
    results = [ingot(*words, "--embedding", where) for where in ("host", "device")]
    assert [result.exit_code for result in results] == [0, 0], [result.stderr for result in results]
    assert {runtime.embedding for _, runtime in setups} == {"host", "device"}


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("run", "no/such/engine", "Hi", "--top-p", "2"), "error: top_p is out of range\n"),
        (("run",), "error: missing argument 'ENGINE'\n  fix: see `ingot run --help`\n"),
        (("run", "--foo"), "error: no such option: --foo\n  fix: see `ingot run --help`\n"),
        (("rnu",), "error: no such command 'rnu'. Did you mean 'run'?\n  fix: see `ingot --help`\n"),
        (("--foo",), "error: no such option: --foo\n  fix: see `ingot --help`\n"),
        (("chat",), "error: give an engine, or --url for a server's\n"),
        (("transcribe", "a", "-", "b"), "error: FILE: - is stdin"),
        (("run", "a", "-n"), "error: option '-n' requires an argument\n  fix: see `ingot run --help`\n"),
        (("run", "a", "b", "--file", "c"), "error: give a prompt, --ids or a file, not several\n"),
        (("eval", "perplexity", "a", "--data", "b", "--window", "x"), "error: --window: Input should be a"),
        (("bench", "latency", "a", "--json-file", "-"), "error: --json-file: it takes a file; --json prints"),
    ],
)
def test_misuse_is_reported_like_every_other_error(words: tuple[str, ...], reported: str) -> None:
    result = ingot(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(reported)
    assert "╭" not in result.stderr


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("explain E Hello", "--prompt TEXT"),
        ("repro E Hello --layer 0", "--prompt TEXT"),
        ("align E Hello --reference R", "--prompt TEXT"),
        ("verify E checkpoint", "--source CHECKPOINT"),
        ("web http://127.0.0.1", "--url http://HOST:PORT"),
        ("chat E Hello", "`ingot run ENGINE PROMPT` answers one prompt; chat reads its messages from stdin"),
        ("run E --prompt Hello", "`ingot run ENGINE PROMPT`: prompts have no flag"),
        ("generate E Hello", "`ingot run`"),
        ("quantize checkpoint", "`ingot build`"),
        ("no'verb", "see `ingot --help`"),
        ("eval E", "`ingot eval VERB`, one of summarize, answers, perplexity, divergence, caption, wer"),
        ("inspect E Hello", "see `ingot inspect --help`"),
    ],
)
def test_a_word_that_is_not_taken_says_what_was_meant(words: str, fix: str) -> None:
    result = ingot(*words.split())
    assert (result.exit_code, result.stderr.splitlines()[1:]) == (2, [f"  fix: {fix}"])


@pytest.mark.parametrize("verb", [("bench", "latency", "a"), ("eval", "answers", "a", "--data", "b")])
@pytest.mark.parametrize("given", [("--json", "out.json"), ("--json", "-"), ("--json=out.json",)])
def test_json_that_is_given_a_file_says_which_flag_takes_one(
    verb: tuple[str, ...], given: tuple[str, ...]
) -> None:
    result = ingot(*verb, *given)
    assert result.exit_code == 2
    assert "  fix: --json prints JSON on stdout; --json-file FILE writes it to a file\n" in result.stderr


def panels(*verb: str) -> list[str]:
    """Titles of the groups of a verb's help, in order."""
    return re.findall(r"╭─ (.*?) ─", ingot(*verb, "--help").stdout)


@pytest.mark.parametrize(
    "verb",
    [
        ("build",),
        ("run",),
        ("chat",),
        ("transcribe",),
        ("eval", "answers"),
        ("eval", "wer"),
        ("bench", "latency"),
    ],
)
def test_help_groups_flags_and_ends_with_those_rarely_needed(verb: tuple[str, ...]) -> None:
    found = panels(*verb)
    assert found[:2] == ["Arguments", "Options"]
    rare = ["rarely" in title.lower() for title in found]
    assert any(rare)
    assert rare == sorted(rare)


def test_help_groups_verbs() -> None:
    assert panels() == ["Options", "Build", "Run", "Prove", "Measure"]
    shown = re.split(r"╭─ \w+ ─+╮", ingot("--help").stdout)[2:]
    assert [re.findall(r"^│ ([\w-]+) ", panel, re.MULTILINE) for panel in shown] == [
        ["plan", "merge-delta", "port", "build", "tune", "doctor"],
        ["run", "chat", "transcribe", "serve", "web", "triton", "explain"],
        ["inspect", "verify", "align", "diff", "repro"],
        ["eval", "bench", "sweep", "profile"],
    ]


def test_the_readme_lists_verbs_as_the_help_does() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \w* ?\| (`.*?`) \|", readme, re.MULTILINE)
    shown = re.findall(r"^│ ([a-z][a-z-]*) ", ingot("--help").stdout, re.MULTILINE)
    assert re.findall(r"[\w-]+", " ".join(rows)) == shown
