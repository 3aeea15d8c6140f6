"""Percentiles, arrival times, loads, and the bytes and operations behind MBU and MFU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.config.build_config import BuildConfig
from ingot.config.quantization.quant_config import QuantConfig
from ingot.errors import ConfigError
from ingot.layers.decoder import Decoder
from ingot.measure.bench.ceiling import Ceiling, measure_ceiling
from ingot.measure.bench.latency import Latency, latency_entry
from ingot.measure.bench.sharegpt import sharegpt_load
from ingot.measure.bench.throughput import load_flops, throughput_entry
from ingot.measure.side.step_work import Work, causal_pairs, read_bytes
from ingot.measure.side.timed_run import Run, spread
from ingot.measure.side.token_load import Ask, PromptSource, TokenLoad, fixed, mixed, parse_batches
from ingot.models.model_registry import find_architecture

SHAPES = Path(__file__).parents[3] / "benchmarks" / "shapes"


def model_of(shape: str, build: BuildConfig) -> Decoder:
    """A shape without its weights."""
    hf = json.loads((SHAPES / f"{shape}.json").read_text())
    architecture = find_architecture(hf["architectures"])
    return architecture.empty_model(architecture.read_config(hf), build, QuantConfig())


# --- percentiles and arrivals ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_percentiles_are_numpys(count: int) -> None:
    draw = random.Random(count)
    values = [draw.random() for _ in range(count)]
    found = spread(values, 1e3)
    assert found is not None
    for percent in (50, 90, 99):
        assert found[f"p{percent}"] == pytest.approx(np.percentile(values, percent) * 1e3, abs=1e-6)
    assert (found["least"], found["most"]) == (round(min(values) * 1e3, 6), round(max(values) * 1e3, 6))
    assert spread([]) is None


def test_a_run_tells_first_token_and_time_per_token() -> None:
    run = Run.of(10.0, [[10.5, 11.0, 12.5], [11.0]], 12.6)
    assert run.seconds == pytest.approx(2.6)
    assert run.ttft_s == (0.5, 1.0)
    assert run.tpot_s == (1.0,)  # the second request has one token, and no time after it
    assert run.tokens == (3, 1)
    assert run.together_s == ()  # one has ended when the other begins


def test_a_run_tells_the_steps_in_which_all_decode() -> None:
    late, first = [4.0, 4.5, 6.0, 7.0], [1.0, 3.5, 4.25, 5.0, 5.5]
    assert Run.of(0.0, [late, first], 7.0).together_s == (0.75, 0.5)
    assert Run.of(0.0, [first], 7.0).together_s == (2.5, 0.75, 0.75, 0.5)


# --- loads -----------------------------------------------------------------------------------------------


def test_the_mixed_load_has_the_totals_of_the_anchors() -> None:
    load = mixed(256)
    assert (len(load.asks), load.prompt_tokens, load.new_tokens) == (256, 47_539, 53_807)
    assert mixed(10).asks == load.asks[:10]
    assert load.longest <= 2048
    assert load.to_json()["lengths"][0] == [load.asks[0].prompt_tokens, load.asks[0].new_tokens]


def test_prompts_are_new_at_every_call_and_the_same_in_every_run() -> None:
    asks = fixed(3, 50, 1).asks
    source, again = PromptSource(97), PromptSource(97)
    first, second = source.prompts(asks), source.prompts(asks)
    assert [len(p) for p in first] == [50] * 3
    assert all(0 <= i < 97 for p in first for i in p)
    assert len({tuple(p) for p in [*first, *second]}) == 6
    assert again.prompts(asks) == first


def test_batches_are_parsed() -> None:
    assert parse_batches("1, 8,32") == [1, 8, 32]
    for text in ("", "1,,2", "0", "-1", "1;2", "many", "1.5"):
        with pytest.raises(ConfigError, match="batch"):
            parse_batches(text)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_counts_start_at_one(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        fixed(*numbers)
    with pytest.raises(ConfigError, match="mixed must be at least 1"):
        mixed(0)
    with pytest.raises(ConfigError, match="repeats"):
        Latency(repeats=0)


def talk(question: str, answer: str, first: str = "human") -> dict[str, Any]:
    return {"conversations": [{"from": first, "value": question}, {"from": "gpt", "value": answer}]}


def words(text: str) -> list[int]:
    return list(range(len(text.split())))


def write(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "requests.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_sharegpt_takes_first_turns_that_pass_the_filters(tmp_path: Path) -> None:
    data = [
        talk("a " * 10, "b " * 20),
        talk("a " * 3, "b " * 20),  # prompt too short
        talk("a " * 10, "b " * 3),  # answer too short
        talk("a " * 1025, "b " * 20),  # prompt too long
        talk("a " * 1024, "b " * 1025),  # together too long
        talk("a " * 1024, "b " * 1024),
        talk("a " * 10, "b " * 20, first="gpt"),  # the answer comes first
        talk("a " * 10, "b " * 20, first="system"),
        {"conversations": [{"from": "human", "value": "a " * 9}]},  # no answer
        {"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": "b"}]},
        {"other": 1},
        "text",
        talk("a " * 4, "b " * 4, first="user"),
    ]
    load = sharegpt_load(write(tmp_path, data), words)
    left_out = {
        "with a turn under 4 tokens": 2,
        "with a prompt over 1024 tokens": 1,
        "over 2048 tokens in total": 1,
        "not starting with a human turn and an answer": 6,
    }
    assert load == TokenLoad("requests.json", (Ask(10, 20), Ask(1024, 1024), Ask(4, 4)), left_out)
    assert load.to_json()["left_out"] == left_out
    assert sharegpt_load(write(tmp_path, data), words, count=2).left_out["over 2048 tokens in total"] == 1
    assert sharegpt_load(write(tmp_path, data), words, count=1).asks == (Ask(10, 20),)
    assert sharegpt_load(write(tmp_path, data), words, longest=100).asks == (Ask(10, 20), Ask(4, 4))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ({"conversations": []}, "must be a list"),
        ([], "no usable conversation"),
        ([talk("a", "b"), 7], "1 with a turn under 4 tokens, 1 not starting with a human turn"),
    ],
)
def test_a_file_of_requests_that_cannot_be_used(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharegpt_load(write(tmp_path, value), words)
    with pytest.raises(ConfigError, match="cannot be read"):
        sharegpt_load(tmp_path / "absent.json", words)


# --- work ------------------------------------------------------------------------------------------------


def test_the_work_of_the_7b_is_that_of_its_shape() -> None:
    model = model_of("llama-7b", BuildConfig("fp16"))
    assert read_bytes(model) == 2 * (7_720_931_328 - 151936 * 4096)  # 14.2 GB: all but the embedding
    work = Work.of(model.config, read_bytes(model), torch.float16)
    assert work.kv_bytes == 2 * 32 * 4096 * 2  # 512 KiB a token
    assert work.decode_bytes(8, 576) == read_bytes(model) + 8 * 576 * 524_288
    assert work.linear_flops == 2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert work.head_flops == 2 * 4096 * 151936
    assert work.decode_flops(2, 100) == 2 * (work.linear_flops + work.head_flops + 100 * 4 * 32 * 4096)
    pairs = 2048 * 2049 // 2
    expected = 2048 * work.linear_flops + work.head_flops + pairs * 4 * 32 * 4096
    assert work.prefill_flops(1, 2048) == expected
    assert expected == pytest.approx(2.7626e13, rel=1e-4)  # 40.8 ms at 677 TFLOP/s


def test_a_tied_head_is_read_and_a_table_of_positions_is_not() -> None:
    model = model_of("gpt2-medium", BuildConfig("fp16", 1, 1024))
    model.lm_head.weight = model.embed_tokens.weight
    assert read_bytes(model) == 2 * (354_823_168 - 1024 * 1024)


def test_a_window_limits_what_is_seen() -> None:
    assert causal_pairs(5) == 15
    assert causal_pairs(5, window=2) == 1 + 2 + 2 + 2 + 2
    assert causal_pairs(2, window=4) == 3
    config = model_of("llama-7b", BuildConfig("fp16")).config.replace(sliding_window=64)
    work = Work.of(config, 0, torch.float16)
    assert work.decode_bytes(1, 1000) == work.decode_bytes(1, 64)


class StillSide:
    name, vocab_size, max_seq_len, max_batch_size = "still", 10, 4096, 64
    work = Work(weight_bytes=1000, kv_bytes=10, linear_flops=200, head_flops=50, pair_flops=4)


CEILING = Ceiling(read_gb_s=1e-6, matmul_tflop_s=1e-9, dtype="fp32", read_bytes=1, matmul_size=1)


def run_of(seconds: float, new: int, batch: int) -> Run:
    return Run(seconds, (seconds / 2,) * batch, (0.5,) * batch if new > 1 else (), (new,) * batch)


def test_latency_figures_are_those_of_their_definitions() -> None:
    wanted = Latency(batches=(2,), prompt_tokens=10, new_tokens=5, repeats=3)
    firsts = [run_of(s, 1, 2) for s in (1.0, 2.0, 3.0)]
    runs = [run_of(s, 5, 2) for s in (5.0, 8.0, 7.0)]  # steps of 1.0, 1.5 and 1.0 seconds
    entry = latency_entry(StillSide(), wanted, 2, firsts, runs, CEILING)  # type: ignore[arg-type]
    assert entry["decode_ms"]["p50"] == 1000
    assert entry["decode_ms"]["most"] == 1500
    assert entry["ttft_ms"]["p50"] == 2000
    assert entry["prompt_tokens_per_s"] == 2 * 10 / 2.0
    assert entry["output_tokens_per_s"] == round(2 * 5 / 7.0, 1)
    assert entry["requests_per_s"] == round(2 / 7.0, 3)
    assert entry["mbu"] == (1000 + 2 * 12.5 * 10) / 1.0 / 1000
    assert entry["mfu_decode"] == 2 * (250 + 12.5 * 4) / 1.0 / 1000
    assert entry["mfu_prefill"] == 2 * (10 * 200 + 50 + 55 * 4) / 2.0 / 1000
    assert len(entry["raw"]["all_new"]) == 3


def test_one_new_token_has_no_decode_step() -> None:
    wanted = Latency(batches=(1,), prompt_tokens=10, new_tokens=1, repeats=1)
    run = [run_of(2.0, 1, 1)]
    entry = latency_entry(StillSide(), wanted, 1, run, run, CEILING)  # type: ignore[arg-type]
    assert [entry[name] for name in ("decode_ms", "mbu", "mfu_decode")] == [None] * 3
    assert entry["streamed"]["tpot_ms"] is None


def test_throughput_figures_are_those_of_their_definitions() -> None:
    load = TokenLoad("two", (Ask(10, 1), Ask(20, 3)))
    runs = [Run(s, (0.1, 0.3), (0.2,), (1, 3)) for s in (2.0, 4.0, 4.0)]
    entry = throughput_entry(load, runs, StillSide.work, CEILING)
    assert entry["requests_per_s"] == 2 / 4.0
    assert entry["output_tokens_per_s"] == 4 / 4.0
    assert entry["prompt_tokens_per_s"] == 30 / 4.0
    assert entry["ttft_ms"]["p50"] == 200
    assert entry["tpot_ms"]["p99"] == 200
    flops = (10 * 200 + 50 + 55 * 4) + (20 * 200 + 50 + 210 * 4) + 2 * (250 + 21.5 * 4)
    assert load_flops(StillSide.work, load) == flops
    assert entry["mfu"] == round(flops / 4.0 / 1000, 4)


def test_the_ceiling_of_a_cpu_is_measured() -> None:
    ceiling = measure_ceiling(torch.device("cpu"), torch.float32, repeats=1)
    assert ceiling.dtype == "fp32"
    assert ceiling.read_gb_s > 0
    assert ceiling.matmul_tflop_s > 0
