"""``ingot sweep --requests``: which requests of a file are taken, that every side answers the same ones, and
that throughput and ratios follow from the seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from ingot.building.builder import build
from ingot.errors import ConfigError, IngotError
from ingot.measure.bench.request_file import read_requests, records_of
from ingot.measure.bench.sharegpt import RequestLimits, by_characters, limited_load
from ingot.measure.bench.sweep import sweep_session as sweeps
from ingot.measure.bench.sweep.request_load import RequestLoad, measure_requests, read_request_load
from ingot.measure.bench.sweep.sweep_line import (
    BEYOND_ENGINE,
    DOES_NOT_FIT,
    LineWanted,
    Progress,
    Quality,
    SweepLine,
    measure_line,
)
from ingot.measure.bench.sweep.sweep_record import record_of, with_ratios
from ingot.measure.bench.sweep.sweep_report import limits, panels, sweep_lines, sweep_table
from ingot.measure.bench.sweep.sweep_session import Sweep, run_sweep
from ingot.measure.bench.sweep.sweep_store import POINTS, read_points
from ingot.measure.side.open_side import Side, open_side
from ingot.measure.side.side_spec import HUGGINGFACE, SideSpec
from ingot.measure.side.timed_run import Run
from ingot.measure.side.token_load import Ask, TokenLoad
from tests.e2e.terminal import ingot
from tests.measure.bench.conftest import MADE_UP
from tests.measure.bench.test_sweep import FakeSide
from tests.support.shown_errors import raises_shown

POCKET = Path(__file__).resolve().parents[3] / "models" / "pocket-chat"
LIMITS = RequestLimits(max_prompt=24, max_new=6, sample=5, seed=1)
LENGTHS = ((9, 3), (20, 6), (4, 5), (16, 4), (7, 6), (12, 4))  # of the file below, in characters / 4


def talk(prompt: str, answer: str, first: str = "human") -> dict[str, Any]:
    return {"conversations": [{"from": first, "value": prompt}, {"from": "gpt", "value": answer}]}


def of_lengths(prompt: int, new: int) -> dict[str, Any]:
    """A conversation of so many tokens of four characters."""
    return talk("p" * 4 * prompt, "a" * 4 * new)


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Six requests within the limits, one with a long prompt, and one that an assistant begins."""
    path = tmp_path / "share.json"
    records = [*(of_lengths(*pair) for pair in LENGTHS), of_lengths(25, 4), talk("a" * 40, "b" * 40, "gpt")]
    path.write_text(json.dumps(records))
    return path


def spec_of(checkpoint: Path, **more: Any) -> SideSpec:
    return SideSpec(path=str(checkpoint), device="cpu", **more)


def load_of(path: Path, *sides: SideSpec, repeats: int = 1, limits: RequestLimits = LIMITS) -> RequestLoad:
    return read_request_load(path, sides, limits, repeats)


def written(tmp_path: Path, text: str, name: str = "requests.jsonl") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def taken(path: Path, limits: RequestLimits) -> tuple[TokenLoad, int]:
    return limited_load(path, read_requests(path), by_characters, limits)


# --- which requests --------------------------------------------------------------------------------------


def test_long_prompts_are_left_out_and_long_answers_cut(tmp_path: Path) -> None:
    pairs = [(10, 20), (11, 4), (10, 21), (3, 9), (4, 4)]
    path = written(tmp_path, json.dumps([*(of_lengths(*pair) for pair in pairs), {"other": 1}, "text"]))
    load, cut = taken(path, RequestLimits(max_prompt=10, max_new=20))
    assert sorted(load.asks, key=lambda ask: ask.prompt_tokens) == [Ask(4, 4), Ask(10, 20), Ask(10, 20)]
    assert cut == 1
    assert load.left_out == {
        "with a prompt over 10 tokens": 1,
        "with a turn under 4 tokens": 1,
        "not starting with a human turn and an answer": 2,
    }


def test_a_seed_draws_the_same_requests_and_another_seed_others(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps([of_lengths(n, 4) for n in range(4, 104)]))

    def drawn(seed: int, sample: int = 10) -> tuple[Ask, ...]:
        return taken(path, RequestLimits(sample=sample, seed=seed))[0].asks

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1) == drawn(1, 20)[:10]
    assert len(drawn(1)) == len(set(drawn(1))) == 10
    assert len(drawn(1, 1000)) == 100  # all that there are
    first_ten = {ask.prompt_tokens for ask in drawn(1)} & set(range(4, 14))
    assert len(first_ten) < 10


def test_lines_lists_and_given_lengths_are_the_same_requests(tmp_path: Path) -> None:
    pairs = [(9, 4), (20, 6)]
    records = [of_lengths(*pair) for pair in pairs]
    texts = {
        "a.json": json.dumps(records),
        "b.jsonl": "\n".join(map(json.dumps, records)) + "\n\n",
        "c.jsonl": "\ufeff" + json.dumps(records),
        "d.jsonl": "\n".join(json.dumps({"prompt_tokens": p, "new_tokens": n}) for p, n in pairs),
    }
    for name, text in texts.items():
        load, _ = taken(written(tmp_path, text, name), RequestLimits())
        assert sorted(load.asks, key=lambda ask: ask.prompt_tokens) == [Ask(*pair) for pair in pairs], name
    wrong = [
        {"prompt_tokens": 1, "new_tokens": 1},
        *({"prompt_tokens": 5, "new_tokens": n} for n in (0, True, "3")),
    ]
    load, _ = taken(written(tmp_path, json.dumps(wrong)), RequestLimits())
    assert load == TokenLoad("requests.jsonl", (Ask(1, 1),), {"without lengths of at least 1": 3})


def test_tokens_are_counted_by_the_first_tokenizer_of_the_sides(checkpoint: Path, tmp_path: Path) -> None:
    prompt, answer = "Which town did the ship leave first?", "It left Genoa, in the spring: ünïcödé."
    path = written(tmp_path, json.dumps([talk(prompt, answer)]))
    reference = Tokenizer(BPE())
    reference.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    reference.train_from_iterator([prompt, "It left the town"], trainer)
    with_one = tmp_path / "with a tokenizer"
    shutil.copytree(checkpoint, with_one)
    reference.save(str(with_one / "tokenizer.json"))
    sides = [spec_of(one) for one in (checkpoint, with_one, POCKET)]
    found = load_of(path, *sides, limits=RequestLimits(60, 60))
    count = [len(reference.encode(text).ids) for text in (prompt, answer)]
    assert found.load.asks == (Ask(*count),)
    assert count != [9, 10]
    assert (found.counted_by, found.vocab_size) == (str(with_one), 97)
    alone = load_of(path, sides[0], limits=RequestLimits(60, 60))
    assert alone.load.asks == (Ask(9, 10),)
    assert alone.counted_by == "characters / 4"


def test_a_file_without_requests_says_why(tmp_path: Path) -> None:
    long = json.dumps([of_lengths(30, 5), of_lengths(40, 5), of_lengths(2, 5)])
    good = json.dumps(of_lengths(5, 5))
    for name, text, message in (
        ("a.json", " \n", "cannot be read.*a.json: the file is empty"),
        ("a.jsonl", "", "the file is empty"),
        ("a.json", "[]", "no usable conversation"),
        ("a.json", "[]", "fix: a file of .*conversations"),
        ("a.jsonl", '{"a": 1}', "1 not starting with a human turn.*fix: a file of .*conversations"),
        ("a.json", long, "2 with a prompt over 24 tokens, 1 with a turn under 4 tokens.*larger --max-prompt"),
        ("a.json", f"[{good}, {good}, {{'no': 1}}]", "record 3: "),
        ("a.json", f"[{good}, {good}", "after record 2: "),
        ("a.json", f"[{good},", "record 2: "),
        ("a.json", good, "must be a list of conversations"),
        ("a.jsonl", f"{good}\n\n{good[:-1]}\n", "line 3 is not JSON"),
        ("a.jsonl", "[" * 5000, "record 1: "),
    ):
        with raises_shown(ConfigError, message):
            taken(written(tmp_path, text, name), LIMITS)
    (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
    with raises_shown(ConfigError, "not UTF-8"):
        records_of(tmp_path / "latin.json", (tmp_path / "latin.json").read_bytes())
    for values in ({"max_prompt": 0}, {"max_new": 0}, {"sample": 0}, {"seed": -1}):
        with pytest.raises(ConfigError):
            RequestLimits(**values)


def test_a_pipe_is_read_once(checkpoint: Path) -> None:
    data = json.dumps([of_lengths(5, 5)]).encode()
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    found = load_of(Path(f"/dev/fd/{read}"), spec_of(checkpoint))
    os.close(read)
    assert found.load.asks == (Ask(5, 5),)
    assert found.sha256 == hashlib.sha256(data).hexdigest()[:16]


def test_limits_beyond_a_side_are_refused(checkpoint: Path, requests: Path, tmp_path: Path) -> None:
    engine = build(
        checkpoint, tmp_path / "engine", max_batch_size=2, max_seq_len=32, device="cpu", proof=False
    )
    with raises_shown(ConfigError, "longer than the engine's max_seq_len.*33 tokens.*allowed: <= 32"):
        load_of(requests, spec_of(checkpoint), spec_of(engine), limits=RequestLimits(24, 9))
    load_of(requests, spec_of(engine), limits=RequestLimits(24, 8))
    for kind in ("ingot", HUGGINGFACE):
        with raises_shown(ConfigError, "longer than the model's context.*<= 128"):
            load_of(requests, spec_of(checkpoint, kind=kind), limits=RequestLimits(100, 29))


# --- the grid --------------------------------------------------------------------------------------------


def test_every_side_answers_the_same_requests_and_figures_follow_from_seconds(
    checkpoint: Path, requests: Path, tmp_path: Path
) -> None:
    engine = build(
        checkpoint,
        tmp_path / "engine",
        max_batch_size=3,
        max_seq_len=64,
        quant="w8a16",
        device="cpu",
        proof=False,
    )
    ours, theirs = spec_of(checkpoint), spec_of(engine)
    load = load_of(requests, ours, theirs, repeats=2)
    asked: dict[str, list[Any]] = {}

    def opener(spec: SideSpec) -> Side:
        side = open_side(spec)
        answer, name = side.answer, f"{spec.path} {spec.kind} {spec.quant}"

        def noted(asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
            asked.setdefault(name, []).append((tuple(asks), [list(prompt) for prompt in prompts]))
            return answer(asks, prompts)

        side.answer = noted  # type: ignore[method-assign]
        return side

    def measure(line: SweepLine, wanted: LineWanted, quality: Quality | None) -> Iterator[Progress]:
        return measure_line(line, wanted, quality, opener)

    sweep = Sweep(
        ours, ("fp32",), ("none", "w4a8"), batches=(2, 4), shape=load, against="hf", beside=(theirs,)
    )
    record = run_sweep(sweep, tmp_path / "out", measure=measure)
    assert [line["name"] for line in record["lines"]] == [
        "fp32",
        "fp32 w4a8",
        str(engine),
        "Hugging Face fp32",
    ]
    assert len(asked) == 4
    whole = [[entry for entry in calls if len(entry[0]) == 5] for calls in asked.values()]
    assert whole[0] == whole[1] == whole[3]  # asks and ids, run by run
    assert len(whole[0]) == 4
    assert whole[2] == whole[0][:2]  # the engine takes no batch of 4
    assert all(0 <= token < 97 for _, prompts in whole[0] for prompt in prompts for token in prompt)
    check_arithmetic(record, load.load.asks, "Hugging Face fp32")
    limit = {"batch": 4, "status": BEYOND_ENGINE, "reason": "built with a max_batch_size of 3"}
    assert [line["limit"] for line in record["lines"]] == [None, None, limit, None]
    assert f"{engine}: batch 4 is beyond the engine (built with" in limits(record)[0]
    assert record["lines"][2]["quant"] == "w8a16"
    preempted = [p["facts"].get("preemptions", 0) for line in record["lines"] for p in line["points"]]
    assert preempted == [0] * 7
    again = run_sweep(sweep, tmp_path / "out", measure=fails)
    assert again["lines"] == record["lines"]


def check_arithmetic(record: dict[str, Any], asks: Sequence[Ask], reference: str) -> None:
    """Rates and ratios, computed again from the record's seconds and the lengths."""
    prompts, answers = sum(a.prompt_tokens for a in asks), sum(a.new_tokens for a in asks)
    settings = record["settings"]
    assert (settings["requests"], settings["input_tokens"], settings["output_tokens"]) == (
        len(asks), prompts, answers,
    )  # fmt: skip
    theirs = {line["name"]: line for line in record["lines"]}[reference]
    rates = {point["batch"]: len(asks) / point["figures"]["seconds"]["p50"] for point in theirs["points"]}
    for point in (point for line in record["lines"] for point in line["points"]):
        figures = point["figures"]
        seconds = figures["seconds"]["p50"]
        assert figures["requests_per_s"] == pytest.approx(len(asks) / seconds, rel=1e-4, abs=1e-3)
        assert figures["input_tokens_per_s"] == pytest.approx(prompts / seconds, rel=1e-4, abs=0.1)
        assert figures["output_tokens_per_s"] == pytest.approx(answers / seconds, rel=1e-4, abs=0.1)
        assert point["ratio_to_hf"] == pytest.approx(len(asks) / seconds / rates[point["batch"]], abs=1e-4)


def fails(line: SweepLine, wanted: LineWanted, quality: Quality | None) -> Iterator[Progress]:
    raise AssertionError("everything is measured already")


class RaggedSide(FakeSide):
    """A made-up side that answers requests of different lengths, up to ``room`` at once."""

    def resize_for(self, batch: int, lengths: Sequence[int]) -> None:
        self.resize(batch)

    def answer(self, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
        arrivals = [[0.01 * (i + 1) / self.max_batch_size for i in range(a.new_tokens)] for a in asks]
        return Run.of(0.0, arrivals, 0.06 / self.max_batch_size)


def test_rows_up_to_the_end_of_memory_are_kept(checkpoint: Path, requests: Path, tmp_path: Path) -> None:
    load = load_of(requests, spec_of(checkpoint), limits=LIMITS)

    def measure(line: SweepLine, wanted: LineWanted, quality: Quality | None) -> Iterator[Progress]:
        room = 1 if line.spec.kind == HUGGINGFACE else 3
        return measure_line(line, wanted, quality, lambda spec: RaggedSide(spec, room))  # type: ignore[arg-type]

    sweep = Sweep(spec_of(checkpoint), ("fp32",), shape=load, against="hf")
    assert sweep.sizes == (1, 2, 4)  # no more than the five requests
    record = run_sweep(sweep, tmp_path / "out", measure=measure)
    ours, theirs = record["lines"]
    assert [(p["batch"], p["ratio_to_hf"]) for p in ours["points"]] == [(1, 1.0), (2, None)]
    assert [p["batch"] for p in theirs["points"]] == [1]
    assert [line["limit"]["batch"] for line in record["lines"]] == [4, 2]
    table = sweep_table(record)
    assert table.columns[2:9] == (
        "seconds", "req/s", "input tok/s", "output tok/s", "TTFT ms", "TPOT ms", "of HF",
    )  # fmt: skip
    assert [row[8] for row in table.rows] == ["1.00x", "-", "-", "1.00x", "-"]
    assert [row[-1] for row in table.rows].count(DOES_NOT_FIT) == 2
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert [panel.x_label for panel in panels(record)][1].startswith("ms per output token")
    shown = " ".join(sweep_lines(record))
    assert "5 requests of" in shown
    assert "tokens counted by characters / 4" in shown
    with raises_shown(ConfigError, "more requests than there are.*--sample"):
        Sweep(spec_of(checkpoint), batches=(6,), shape=load)


def test_ratios_are_of_the_first_class_of_hugging_face() -> None:
    def line(name: str, kind: str, **seconds: float) -> dict[str, Any]:
        points = [{"batch": int(b[1:]), "figures": {"seconds": {"p50": s}}} for b, s in seconds.items()]
        return {"name": name, "kind": kind, "points": points}

    lines = [
        line("a", "ingot", b1=2.0, b2=1.0),
        line("b", HUGGINGFACE, b1=6.0),
        line("c", HUGGINGFACE, b1=1.0),
    ]
    assert with_ratios(lines) == "b"
    assert [[p["ratio_to_hf"] for p in one["points"]] for one in lines] == [[3.0, None], [1.0], [6.0]]
    assert with_ratios(lines[:1]) is None
    assert lines[0]["points"][0]["ratio_to_hf"] is None


def test_other_requests_are_other_settings(checkpoint: Path, requests: Path, tmp_path: Path) -> None:
    first = load_of(requests, spec_of(checkpoint))
    measure = partial(measure_line, opener=RaggedSide)  # type: ignore[arg-type]
    run_sweep(Sweep(spec_of(checkpoint), batches=(1,), shape=first), tmp_path / "out", measure=measure)
    other = load_of(requests, spec_of(checkpoint), limits=LIMITS.replace(seed=2))
    with pytest.raises(ConfigError, match="seed 1, now 2"):
        run_sweep(Sweep(spec_of(checkpoint), batches=(1,), shape=other), tmp_path / "out", measure=measure)


def test_a_side_that_answers_less_than_it_was_asked_for_has_no_figures(
    checkpoint: Path, requests: Path
) -> None:
    class Short(RaggedSide):
        def answer(self, asks: Sequence[Ask], prompts: Sequence[list[int]]) -> Run:
            return super().answer([Ask(a.prompt_tokens, 1) for a in asks], prompts)

    load = load_of(requests, spec_of(checkpoint))
    with pytest.raises(IngotError, match="another number of tokens"):
        measure_requests(Short(spec_of(checkpoint)), load, 1, MADE_UP)  # type: ignore[arg-type]


def test_the_cache_holds_the_longest_requests_of_a_batch(checkpoint: Path) -> None:
    lengths = (70, 10, 128, 64, 65)  # blocks of 64 tokens: 2, 1, 2, 1, 2
    with open_side(spec_of(checkpoint, max_batch_size=1, max_seq_len=128)) as side:
        blocks = []
        for batch in (1, 3, 4, 9):
            side.resize_for(batch, lengths)
            blocks.append(side.llm.executor.blocks.num_blocks)
    assert blocks == [2, 6, 7, 8]


def test_a_scheme_that_needs_samples_is_built_for_its_line(
    checkpoint: Path, requests: Path, tmp_path: Path
) -> None:
    spec = spec_of(POCKET)
    load = load_of(requests, spec, limits=LIMITS.replace(sample=2))
    with raises_shown(ConfigError, "needs samples; seen: rptq-w8a8.*--calib FILE"):
        Sweep(spec, quants=("none", "rptq-w8a8"), shape=load)
    with raises_shown(ConfigError, "no scheme of this sweep uses samples"):
        Sweep(spec, quants=("w8a8",), shape=load, calib="text.txt")
    with raises_shown(ConfigError, "only checkpoints are quantized"):
        Sweep(spec.replace(kind=HUGGINGFACE), quants=("w8a8",), shape=load)
    lines = Sweep(spec, ("fp32",), ("w8a8", "rptq-w8a8"), shape=load, calib="text.txt").lines()
    assert [(line.name, line.calib) for line in lines] == [
        ("fp32 w8a8", None),
        ("fp32 rptq-w8a8", "text.txt"),
    ]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, IngotError])
def test_the_engine_of_a_calibrated_line_is_removed(
    error: type[BaseException] | None, requests: Path, tmp_path: Path
) -> None:
    spec, out = spec_of(POCKET), tmp_path / "out"
    built: list[Path] = []

    def measure(line: SweepLine, wanted: LineWanted, quality: Quality | None) -> Iterator[Progress]:
        assert wanted.folder is not None
        built.append(Path(wanted.folder) / "engine")
        built[0].mkdir()
        yield {"batch": 1}
        if error is not None:
            raise error("ended")

    load = load_of(requests, spec)
    sweep = Sweep(spec, ("fp32",), ("rptq-w8a8",), batches=(1,), shape=load, calib="text.txt")
    with pytest.raises(error or ConfigError, match="ended" if error else "no measured points"):
        run_sweep(sweep, out, measure=measure)
    assert built[0].parent.parent == out
    assert [path.name for path in out.iterdir()] == [POINTS]


@pytest.mark.slow
def test_rptq_of_a_checkpoint_is_measured(tmp_path: Path) -> None:
    text = written(tmp_path, "One ship left the harbour, and another came. " * 60, "text.txt")
    spec = spec_of(POCKET)
    lines = "\n".join(json.dumps({"prompt_tokens": n, "new_tokens": 3}) for n in (5, 9))
    load = load_of(written(tmp_path, lines), spec)
    sweep = Sweep(spec, ("fp32",), ("rptq-w8a8",), batches=(1, 2), shape=load, calib=str(text))
    (line,) = run_sweep(sweep, tmp_path / "out", measure=measure_line)["lines"]
    assert [point["facts"]["quantization"] for point in line["points"]] == ["rptq-w8a8"] * 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [POINTS]


# --- the terminal ----------------------------------------------------------------------------------------


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "run_sweep", partial(run_sweep, measure=measure_line))


SMALL = ("--max-prompt", 24, "--max-new", 6, "--sample", 3, "--repeats", 1, "--device", "cpu", "--no-png")


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_hugging_face_alone_and_random_weights(checkpoint: Path, requests: Path, tmp_path: Path) -> None:
    config = checkpoint / "config.json"
    for name, words, lines in (
        ("a", [f"hf:{checkpoint}"], [f"Hugging Face fp32, {checkpoint}"]),
        ("b", ["hf", "--random-weights", config], ["Hugging Face fp32"]),
        ("c", ["--random-weights", config, "--quant", "rptq-w4a8", "--against", "hf"],
         ["fp32 rptq-w4a8", "Hugging Face fp32"]),
    ):  # fmt: skip
        out = tmp_path / name
        shown = ingot("sweep", *words, "--requests", requests, "--batch", "1,2", *SMALL, "--out", out)
        assert shown.exit_code == 0, shown.stderr
        record = json.loads((out / "sweep.json").read_text())
        assert [line["name"] for line in record["lines"]] == lines
        assert record["ratio_of"] == lines[-1]
        asks = [Ask(*pair) for pair in read_lengths(requests, 3)]
        check_arithmetic(record, asks, lines[-1])
        assert record == record_of(read_points(out / POINTS))
        assert all(
            word in shown.stdout for word in ("input tok/s", "output tok/s", "req/s", "of HF", "1.00x")
        )
        assert "1 with a prompt over 24 tokens" in shown.stdout or "left out" not in shown.stdout


def read_lengths(path: Path, sample: int) -> list[tuple[int, int]]:
    """The first requests in the order that seed 0 draws, by Python's own shuffle."""
    import random

    records = json.loads(path.read_text())
    random.Random(0).shuffle(records)
    pairs = [[len(turn["value"]) // 4 for turn in r["conversations"]] for r in records
             if r["conversations"][0]["from"] == "human"]  # fmt: skip
    return [(p, n) for p, n in pairs if p <= 24 and min(p, n) >= 4][:sample]


def test_misuse_exits_with_2_and_says_what_to_do(checkpoint: Path, requests: Path, tmp_path: Path) -> None:
    end = ("--out", tmp_path / "out", "--no-png", "--device", "cpu")
    file = ("--requests", requests)
    for words, message in (
        ((checkpoint, *file, "--max-prompt", 100, "--max-new", 100), "longer than the model's context"),
        ((checkpoint, *file), "--max-prompt, --max-new"),  # 1024 of each
        ((checkpoint, *file, "--max-prompt", 3, "--max-new", 3), "with a prompt over 3 tokens"),
        ((checkpoint, *file, "--prompt-tokens", 8), "limit them by --max-prompt and --max-new"),
        ((checkpoint, "--max-new", 8), "it is about --requests"),
        ((checkpoint, *file, "--clips", 8), "this model takes text"),
        ((checkpoint, "--requests", tmp_path / "absent", "--max-prompt", 8, "--max-new", 8), "--requests"),
        ((checkpoint, *file, "--max-prompt", 0), "--max-prompt"),
        (("hf", *file), "hf:CHECKPOINT"),
        (("hf:", *file), "hf:CHECKPOINT"),
        ((f"hf:{checkpoint}", "--quant", "w8a16", "--batch", 1), "only checkpoints are quantized"),
        ((checkpoint, checkpoint, *file, "--max-prompt", 24, "--max-new", 8, "--batch", 1), "more than once"),
    ):
        result = ingot("sweep", *words, *end)
        assert result.exit_code == 2, (words, result.stdout)
        assert message in " ".join(result.stderr.replace("│", " ").split()), (words, result.stderr)
    assert not (tmp_path / "out" / POINTS).exists()
