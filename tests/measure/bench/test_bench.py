"""``ingot bench`` from end to end on tiny models: what it prints, what it records, what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM
from ingot.building.builder import build
from ingot.errors import CheckpointError, ConfigError, DeviceError
from ingot.measure.bench import bench_session as session
from ingot.measure.bench.bench_report import headline, tables
from ingot.measure.bench.latency import Latency
from ingot.measure.bench.throughput import Throughput
from ingot.measure.side.class_side import HuggingFaceSide
from ingot.measure.side.open_side import open_side
from ingot.measure.side.side_spec import SideSpec, named_apart
from ingot.measure.side.text_table import Table, number, percent, plain, score
from ingot.measure.side.token_load import Ask, PromptSource, fixed
from tests.e2e.terminal import ingot
from tests.tiny_models import save_model, tiny_config

POCKET = Path(__file__).parents[3] / "models" / "pocket-chat"
SMALL = ("--prompt-tokens", 8, "--new-tokens", 4, "--repeats", 2, "--device", "cpu")


@pytest.fixture(scope="module")
def config(checkpoint: Path) -> Path:
    return checkpoint / "config.json"


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("engine") / "tiny"
    return build(checkpoint, target, max_batch_size=4, max_seq_len=64, device="cpu")


def bench_json(*words: object) -> dict[str, Any]:
    result = ingot("bench", *words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# --- records ---------------------------------------------------------------------------------------------


def test_the_record_of_a_latency(engine: Path) -> None:
    record = bench_json("latency", engine, "--batch", "1,3", *SMALL)
    assert (record["schema"], record["verb"]) == (1, "latency")
    assert record["command"].split()[0] == "ingot"
    where = {"cpu", "cpu_cores", "ram_gb", "numa_nodes", "os", "python", "torch", "triton", "ingot", "commit"}
    assert where <= set(record["machine"])
    assert record["ceiling"]["dtype"] == "fp32"
    assert record["wanted"] == {"batches": [1, 3], "prompt_tokens": 8, "new_tokens": 4, "repeats": 2}
    assert "greedy" in record["method"]
    (side,) = record["sides"]
    assert side["spec"]["path"] == str(engine)
    facts = side["facts"]
    assert min(facts["load_s"], facts["warm_up_s"]) > 0
    assert facts["max_batch_size"] == 4
    for entry, batch in zip(side["results"], (1, 3), strict=True):
        assert entry["batch"] == batch
        assert {"p50", "p90"} <= set(entry["decode_ms"])
        assert entry["mbu"] is not None
        runs = entry["raw"]["all_new"]
        assert [run["tokens"] for run in runs] == [[4] * batch] * 2
        assert all(len(run["ttft_s"]) == len(run["tpot_s"]) == batch for run in runs)
        assert [run["tokens"] for run in entry["raw"]["one_new"]] == [[1] * batch] * 2
    assert record["ratios"] == []


def test_the_record_of_a_throughput(config: Path) -> None:
    record = bench_json("throughput", "--random-weights", config, "--fixed", 9, *SMALL)
    load = record["wanted"]["load"]
    assert (load["requests"], load["prompt_tokens"], load["new_tokens"]) == (9, 72, 36)
    (result,) = record["sides"][0]["results"]
    assert result["output_tokens_per_s"] > 0
    assert [run["tokens"] for run in result["raw"]] == [[4] * 9] * 2
    assert record["sides"][0]["facts"]["max_batch_size"] == 256


def test_the_pocket_model_on_a_file_of_conversations(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "What is 12 + 30?"}, {"from": "gpt", "value": "12 + 30 is 42."}]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"conversations": turns}] * 3))
    words = ("--requests", path, "--limit", 2, "--repeats", 1, "--max-batch-size", 4, "--device", "cpu")
    record = bench_json("throughput", POCKET, *words)
    tokenizer = LLM(POCKET, device="cpu").tokenizer
    lengths = [len(tokenizer.encode(turn["value"])) for turn in turns]
    assert record["wanted"]["load"]["lengths"] == [lengths] * 2
    assert record["sides"][0]["results"][0]["raw"][0]["tokens"] == [lengths[1]] * 2


def test_hugging_face_on_the_same_weights(checkpoint: Path) -> None:
    record = bench_json("latency", checkpoint, "--against", "hf", "--batch", "1,2", *SMALL)
    ours, theirs = record["sides"]
    assert (ours["name"], theirs["name"]) == ("ingot", "huggingface")
    assert theirs["facts"]["class"] == "LlamaForCausalLM"
    assert [run["tokens"] for run in theirs["results"][1]["raw"]["all_new"]] == [[4, 4]] * 2
    ratio = record["ratios"][1]
    assert list(ratio) == ["batch", "ttft", "decode", "output_tokens_per_s"]
    assert ratio["batch"] == 2
    a, b = (side["results"][1] for side in record["sides"])
    for name in ("decode", "ttft"):
        times = [side[f"{name}_ms"]["p50"] for side in (b, a)]
        assert ratio[name] == pytest.approx(times[0] / times[1], abs=1e-3)
    rates = [side["output_tokens_per_s"] for side in (a, b)]
    assert ratio["output_tokens_per_s"] == pytest.approx(rates[0] / rates[1], abs=1e-3)


def test_hugging_face_pads_a_mixed_load(config: Path) -> None:
    side = HuggingFaceSide(SideSpec(kind="hf", random_weights=str(config), device="cpu", max_batch_size=2))
    asks = [Ask(3, 2), Ask(9, 5), Ask(4, 1)]
    run = side.answer(asks, PromptSource(97).prompts(asks))
    assert run.tokens == (2, 5, 1)
    assert len(run.tpot_s) == 2
    assert run.ttft_s[2] > run.ttft_s[1] == run.ttft_s[0]  # the third waits for the batch before it
    assert side.work.weight_bytes == sum(p.nbytes for p in side.model.parameters()) - 97 * 32 * 4


def test_hugging_face_and_ingot_need_the_same_bytes(checkpoint: Path) -> None:
    spec = SideSpec(path=str(checkpoint), device="cpu", max_batch_size=2)
    assert open_side(spec).work == open_side(spec.replace(kind="hf")).work


def test_an_engine_against_its_checkpoint_and_hugging_face_on_another(engine: Path, checkpoint: Path) -> None:
    record = bench_json("throughput", engine, "--fixed", 3, "--against", checkpoint, *SMALL)
    assert [side["name"] for side in record["sides"]] == ["tiny", checkpoint.name]
    titles = [table.title for table in tables(record)]
    assert [title.split(": ")[0] for title in titles[:2]] == ["tiny", checkpoint.name]
    assert titles[2] == f"speedup of tiny over {checkpoint.name}"
    assert [side["spec"]["path"] for side in record["sides"]] == [str(engine), str(checkpoint)]
    assert set(record["ratios"][0]) == {"output_tokens_per_s", "ttft", "tpot"}
    record = bench_json("latency", engine, "--batch", 1, "--against", f"hf:{checkpoint}", *SMALL)
    assert record["sides"][1]["name"] == "huggingface"


def test_two_engines_are_distinguished() -> None:
    def names(a: str, b: str, **other: Any) -> tuple[str, ...]:
        sides = named_apart(SideSpec(path=a), SideSpec(path=b, **other))
        return tuple(side.title for side in sides)

    assert names("engines/new/", "org/old") == ("new", "old")
    assert names("a/engine", "b/engine") == ("a/engine", "b/engine")
    assert names("a/engine", "a/engine") == ("a/engine, first", "a/engine, second")
    assert names("engine", "checkpoint", kind="hf") == ("ingot", "hf")


def test_two_sides_run_in_processes_of_their_own(config: Path) -> None:
    spec = SideSpec(random_weights=str(config), device="cpu", max_batch_size=2)
    wanted = Latency(batches=(2,), prompt_tokens=4, new_tokens=2, repeats=1)
    reported: list[str] = []
    side, ceiling = session._measure_apart(spec, wanted, None, reported.append)
    assert side["results"][0]["batch"] == 2
    assert ceiling.read_gb_s > 0
    assert reported == ["ingot in a process of its own"]


@pytest.mark.slow  # a process; that an error crosses to this one: test_sweep.py
def test_an_error_of_the_other_process_arrives() -> None:
    spec = SideSpec(random_weights="absent", device="cpu", max_batch_size=2)
    wanted = Latency(batches=(2,), prompt_tokens=4, new_tokens=2, repeats=1)
    with pytest.raises(CheckpointError, match="no such config"):
        session._measure_apart(spec, wanted, None, lambda reported: None)


# --- what is printed -------------------------------------------------------------------------------------


def test_tables_are_aligned_text_when_piped_and_json_goes_to_a_file(engine: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    result = ingot("bench", "latency", engine, "--batch", "1,4", *SMALL, "--repeats", 1, "--json-file", path)
    assert result.exit_code == 0
    assert all(line.startswith("warning: ") for line in result.stderr.splitlines())  # of a busy machine
    lines = result.stdout.splitlines()
    assert "torch " in lines[0]
    assert lines[1].startswith("ceiling: reads ")
    assert lines[2].startswith("ingot: fp32, loaded in ")
    start = lines.index("ingot: latency, 8 prompt tokens, 4 new, 1 repeat")
    assert lines[start + 1].split()[:3] == ["batch", "TTFT", "ms"]
    assert [line.split()[0] for line in lines[start + 2 :]] == ["1", "4"]
    assert len({len(line) for line in lines[start + 1 :]}) == 1
    record = json.loads(path.read_text())
    assert "\n".join(headline(record)) in result.stdout
    assert plain(tables(record)[0]) in result.stdout


def test_a_throughput_beside_another_side_is_three_tables(config: Path) -> None:
    words = ("throughput", "--random-weights", config, "--fixed", 3, "--against", "hf", *SMALL)
    shown = ingot("bench", *words).stdout
    titles = ("ingot: throughput, 3 requests, 24 prompt tokens, 12 new", "huggingface: throughput")
    assert all(title in shown for title in (*titles, "speedup of ingot over huggingface"))


def test_the_batch_invariant_mode_is_reported(config: Path) -> None:
    words = ("--random-weights", config, "--against", "hf", "--batch-invariant", *SMALL)
    record = bench_json("latency", "--batch", 2, *words)
    ours, theirs = record["sides"]
    assert (ours["spec"]["batch_invariant"], theirs["spec"]["batch_invariant"]) == (True, False)
    assert ours["facts"]["runtime"]["batch_invariant"] is True
    titles = [table.title.split(":")[0] for table in tables(record)]
    assert titles[:2] == ["ingot, batch invariant", "huggingface"]
    shown = ingot("bench", "throughput", "--fixed", 2, *words).stdout
    assert "ingot, batch invariant: throughput, 2 requests" in shown


def test_kernels_are_reported_with_their_ceiling() -> None:
    times = {"p50": 2.5, "p90": 2.75, "p99": 3, "least": 2, "most": 3}
    entry = {"op": "rms_norm + residual", "shape": "4096", "rows": 8, "cached": True, "us": times,
             "gb_s": 1234.5, "tflop_s": 0.0, "bound": "read", "share_of_ceiling": None,
             "torch_us": times, "torch_ratio": 1.0, "note": "one"}  # fmt: skip
    record = {"verb": "kernels", "sides": [{"name": "ingot", "results": [entry]}], "ratios": []}
    (table,) = tables(record)
    assert table.rows[0] == (
        "rms_norm + residual (cached)", "4096", "8", "2.50", "2.75", "1,234", "-", "-", "2.50",
        "1.00x", "one",
    )  # fmt: skip


def test_numbers_are_short() -> None:
    assert [number(v) for v in (None, 0.0123, 3.8765, 47.46, 123.45, 6199.6)] == [
        "-", "0.012", "3.88", "47.46", "123.5", "6,200",
    ]  # fmt: skip
    assert [score(v) for v in (None, 0.0, 1.234e-7, 0.0123, 3.8765, 47.46, 123.45, 6199.6)] == [
        "-", "0.0000", "1.23e-07", "0.0123", "3.877", "47.46", "123.5", "6,200",
    ]  # fmt: skip
    assert [percent(v) for v in (None, 0.8712)] == ["-", "87.1 %"]
    assert plain(Table("t", ("a", "b"), (("long name", "1"), ("x", "22")))) == (
        "t\na           b\nlong name   1\nx          22"
    )


def test_fp16_on_a_cpu_is_said_to_be_slow(config: Path) -> None:
    words = ("throughput", "--random-weights", config, "--fixed", 0, *SMALL, "--dtype")  # ends at once
    notes = {
        dtype: "note: fp16 on a CPU" in ingot("bench", *words, dtype).stderr for dtype in ("fp16", "fp32")
    }
    assert notes == {"fp16": True, "fp32": False}


# --- what is refused -------------------------------------------------------------------------------------


def test_misuse_exits_with_2(config: Path, engine: Path) -> None:
    for words in (
        ("latency",),
        ("latency", engine, "--random-weights", config),
        ("throughput", engine, "--fixed", 2, "--mixed", 2),
        ("throughput", engine, "--limit", 2),
        ("latency", engine, "--batch"),
        ("nonsense", engine),
    ):
        assert ingot("bench", *words).exit_code == 2, words
    result = ingot("bench", "kernels", "--random-weights", config, "--device", "cpu")
    assert result.exit_code == 2
    assert "kernels are measured on a GPU" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("latency", "{engine}", "--batch", "1,x"), "batch sizes must be positive integers"),
        (("latency", "{engine}", "--batch", "1,5"), "the batch is larger than the engine's max_batch_size"),
        (("latency", "{engine}", "--new-tokens", "0"), "new-tokens must be at least 1"),
        (("latency", "{engine}", "--repeats", "0"), "repeats must be at least 1"),
        (("latency", "{engine}", "--batch", "1", "--prompt-tokens", "64"), "longer than the engine's limit"),
        (("latency", "{engine}", "--max-seq-len", "65"), "built for a smaller max_seq_len"),
        (("latency", "{engine}", "--max-batch-size", "8"), "built for a smaller max_batch_size"),
        (("latency", "{config}x", "--batch", "1"), "neither an existing folder nor"),
        (("latency", "--random-weights", "{config}x"), "no such config"),
        (("throughput", "{engine}"), "longer than the engine's limit"),
        (("throughput", "{engine}", "--mixed", "0"), "mixed must be at least 1"),
        (("throughput", "{engine}", "--fixed", "1", "--repeats", "0"), "repeats must be at least 1"),
        (("throughput", "{engine}", "--requests", "{config}"), "needs a tokenizer"),
        (("throughput", "{pocket}", "--requests", "{config}"), "must be a list of conversations"),
        (("latency", "{engine}", "--batch", "1", "--against", "hf"), "reads a checkpoint, not an engine"),
    ],
)
def test_bad_input_is_an_error_with_a_fix(
    words: tuple[str, ...], message: str, engine: Path, config: Path
) -> None:
    filled = [w.format(engine=engine, config=config, pocket=POCKET) for w in words]
    defaults = [] if "--new-tokens" in filled or "throughput" in filled else ["--new-tokens", "2"]
    if "--prompt-tokens" not in filled and "latency" in filled:
        defaults += ["--prompt-tokens", "4"]
    result = ingot("bench", *filled, *defaults, "--device", "cpu")
    assert result.exit_code == 2, result.stdout
    assert message in result.stderr
    assert result.stdout == ""


def test_a_place_that_cannot_be_written_is_known_before_anything_is_measured(
    engine: Path, tmp_path: Path
) -> None:
    result = ingot("bench", "latency", engine, "--batch", "1", "--json-file", tmp_path)
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_conversations_beyond_an_engines_limit_are_left_out(tmp_path: Path) -> None:
    short, long = ({"from": "human", "value": text} for text in ("What is 12 + 30?", "What is 1? " * 30))
    answer = {"from": "gpt", "value": "12 + 30 is 42."}
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"conversations": [turn, answer]} for turn in (long, short)]))
    engine = build(POCKET, tmp_path / "engine", max_batch_size=2, max_seq_len=48, device="cpu")
    result = ingot("bench", "throughput", engine, "--requests", path, "--repeats", 1, "--device", "cpu")
    assert "talks.json: 1 used, left out: 1 over 48 tokens in total" in result.stdout


def test_a_missing_transformers_is_said_before_anything_is_measured(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec = SideSpec(random_weights=str(config), device="cpu")
    wanted = Latency(batches=(1,), prompt_tokens=4, new_tokens=1, repeats=1)
    reported: list[str] = []
    with pytest.raises(DeviceError, match="pip install transformers"):
        session.bench(spec, wanted, spec.replace(kind="hf"), say=reported.append)
    assert reported == []


def test_the_library_refuses_too(engine: Path) -> None:
    spec = SideSpec(path=str(engine), device="cpu")
    with pytest.raises(ConfigError, match="larger than the engine's"):
        session.bench(spec, Latency(batches=(8,), prompt_tokens=4, new_tokens=1))
    with pytest.raises(ConfigError, match="longer than the engine's limit"):
        session.bench(spec, Throughput(fixed(1, 64, 1)))
    with pytest.raises(DeviceError, match="measured on a GPU"):
        session.bench_kernels(spec, session.Kernels())


@pytest.mark.gpu
def test_two_sides_on_a_gpu_each_have_its_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    save_model(tiny_config("llama", **sizes), tmp_path)
    words = ("--batch", "1,9", "--prompt-tokens", 8, "--new-tokens", 4, "--repeats", 2, "--dtype", "fp16")
    record = bench_json("latency", tmp_path, "--against", "hf", *words)
    assert record["machine"]["gpu"]
    assert record["ceiling"]["dtype"] == "fp16"
    assert all(side["facts"]["peak_gpu_gb"] > 0 for side in record["sides"])
    assert [run["tokens"] for run in record["sides"][0]["results"][1]["raw"]["all_new"]] == [[4] * 9] * 2


# --- interrupted -----------------------------------------------------------------------------------------


def interrupt_at(monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    """A Ctrl-C while the batch size of this turn is measured, counted over both sides from 1."""
    made, entry_of = [], session.measure_latency.__globals__["latency_entry"]

    def interrupted(*args: Any) -> Any:
        made.append(args[2])
        if len(made) == turn:
            raise KeyboardInterrupt
        return entry_of(*args)

    monkeypatch.setattr("ingot.measure.bench.latency.latency_entry", interrupted)


def test_a_ctrl_c_keeps_the_batch_sizes_that_were_measured(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, 3)
    file = tmp_path / "bench.json"
    done = ingot("bench", "latency", engine, "--batch", "1,2,3", *SMALL, "--json-file", file)
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (130, "interrupted")
    assert "\ninterrupted: the figures are of what was finished\n" in done.stdout
    rows = done.stdout.partition("\nbatch ")[2].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["1", "2"]
    record = json.loads(file.read_text())
    assert record["interrupted"] is True
    assert [entry["batch"] for entry in record["sides"][0]["results"]] == [1, 2]


def test_a_ctrl_c_before_the_first_batch_size_writes_nothing(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, 1)
    file = tmp_path / "bench.json"
    done = ingot("bench", "latency", engine, "--batch", "1,2", *SMALL, "--json-file", file)
    assert (done.exit_code, done.stdout, file.exists()) == (130, "", False)


@pytest.mark.parametrize(("turn", "finished"), [(2, [[1]]), (3, [[1, 2]]), (4, [[1, 2], [1]])])
def test_a_ctrl_c_beside_another_side(
    engine: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, turn: int, finished: list[list[int]]
) -> None:
    interrupt_at(monkeypatch, turn)
    against = ("--against", checkpoint)
    done = ingot("bench", "latency", engine, *against, "--batch", "1,2", *SMALL, "--json")
    record = json.loads(done.stdout)
    assert done.exit_code == 130
    assert [[entry["batch"] for entry in side["results"]] for side in record["sides"]] == finished
    assert [ratio["batch"] for ratio in record["ratios"]] == ([1] if len(finished) == 2 else [])


def test_a_measurement_in_a_pipe_shows_where_it_is(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.cli.measure.bench.PIPED_SECONDS", 0.0)
    done = ingot("bench", "latency", engine, "--batch", "1", *SMALL)
    assert "ingot: batch 1, run 1 of 2\ningot: batch 1, run 2 of 2\n" in done.stderr
    assert "run 1" not in done.stdout
    monkeypatch.setattr("ingot.cli.measure.bench.PIPED_SECONDS", 1000.0)
    assert "run 1" not in ingot("bench", "latency", engine, "--batch", "1", *SMALL).stderr
