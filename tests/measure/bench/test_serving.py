"""``ingot bench serving`` against a server that streams at a known pace, and that fails as it is told to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import ConfigError, RequestError
from ingot.measure.bench.serving.server_target import ServerPrompt, ServerTarget
from ingot.measure.bench.serving.serving_bench import ServingBench, bench_serving
from ingot.measure.bench.serving.serving_load import FilePrompts, Point, RandomPrompts, arrivals
from ingot.measure.bench.serving.serving_report import serving_panels
from ingot.measure.side.token_load import Ask
from tests.e2e.terminal import ingot
from tests.measure.bench.stub_server import Stub, running
from tests.support.shown_errors import raises_shown

AT_ONCE = Point(rate=float("inf"))
SHORT = ("--prompt-tokens", 8, "--new-tokens", 6, "--requests", 4)


def measured(stub: Stub, point: Point = AT_ONCE, count: int = 4, tokens: int = 6, **values: Any) -> Any:
    """The record of one point."""
    endpoint = values.pop("endpoint", "completions")
    prompts = values.pop("prompts", None) or RandomPrompts(Ask(8, tokens), chat=endpoint == "chat")
    with running(stub) as url:
        target = ServerTarget(url, endpoint=endpoint, **values)
        return bench_serving(ServingBench(target, prompts, (point,), count))


# --- times -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_times_are_those_of_the_server(endpoint: str) -> None:
    """No request can seem faster than the server was; how much slower depends on the machine."""
    stub = Stub(first_s=0.05, gap_s=0.02, role_at_once=True)
    (entry,) = measured(stub, count=3, endpoint=endpoint)["results"]
    for raw in entry["raw"]:
        assert raw["ttft_s"] >= 0.05
        assert len(raw["itl_s"]) == 5
        assert raw["e2e_s"] == pytest.approx(raw["ttft_s"] + sum(raw["itl_s"]), abs=0.5)
        assert raw["e2e_s"] >= 0.05 + 5 * 0.02
    tpots = [(raw["e2e_s"] - raw["ttft_s"]) / 5 for raw in entry["raw"]]
    assert entry["tpot_ms"]["mean"] == pytest.approx(1e3 * sum(tpots) / 3, abs=0.01)
    assert (entry["completed"], entry["output_tokens"], entry["prompt_tokens"]) == (3, 18, 24)
    assert entry["output_tokens_per_s"] == pytest.approx(18 / entry["seconds"], rel=1e-3)


def test_tokens_that_share_a_chunk_are_counted_by_usage() -> None:
    record = measured(Stub(tokens_per_chunk=3))
    (entry,) = record["results"]
    assert [raw["tokens"] for raw in entry["raw"]] == [6] * 4
    assert entry["tokens_per_chunk"] == 3
    assert all(len(raw["itl_s"]) == 1 for raw in entry["raw"])
    assert any("a chunk holds 3.0 tokens" in doubt for doubt in record["doubts"])


def test_without_usage_chunks_are_counted_and_the_report_says_so() -> None:
    record = measured(Stub(usage=False))
    (entry,) = record["results"]
    assert (entry["output_tokens"], entry["prompt_tokens"], entry["counted"]) == (24, None, 4)
    assert any("4 answers came without usage" in doubt for doubt in record["doubts"])


def test_answers_that_end_early_are_reported() -> None:
    record = measured(Stub(most_tokens=4))
    assert record["results"][0]["short"] == 4
    assert any("4 answers have other numbers of tokens" in doubt for doubt in record["doubts"])


@pytest.mark.slow
def test_a_process_of_its_own_sees_the_pace_within_five_percent() -> None:
    """The median gap of 16 streams, whose stub is in another process."""
    script = Path(__file__).parents[3] / "benchmarks" / "client_overhead.py"
    words = [sys.executable, script, "--streams", "16", "--tokens", "60", "--gap-ms", "20", "--rounds", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    (record,) = json.loads(done.stdout)["rounds"]
    assert record["itl_ms"]["mean"] == pytest.approx(record["stub_itl_ms"]["mean"], rel=0.05)
    assert record["delay_ms"]["least"] > 0  # a clock that both processes share


# --- load ------------------------------------------------------------------------------------------------


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    stub = Stub(first_s=0.05)
    (entry,) = measured(stub, Point(concurrency=2), count=6)["results"]
    events = sorted(
        event for raw in entry["raw"] for event in ((raw["sent_s"], 1), (raw["sent_s"] + raw["e2e_s"], -1))
    )
    under_way, most = 0, 0
    for _, change in events:
        under_way += change
        most = max(most, under_way)
    assert most == 2
    assert entry["seconds"] >= 3 * 0.05


@pytest.mark.slow
def test_an_open_loop_does_not_wait_for_answers() -> None:
    (entry,) = measured(Stub(first_s=1.0), Point(rate=40.0), count=8, tokens=2)["results"]
    raws = entry["raw"]
    assert raws[-1]["sent_s"] >= 8 / 40
    for raw, due in zip(raws, arrivals(8, 40.0, seed=0), strict=True):
        assert raw["sent_s"] - raw["late_s"] == pytest.approx(due, abs=1e-3)
    assert max(raw["sent_s"] for raw in raws) < min(raw["sent_s"] + raw["e2e_s"] for raw in raws)


def test_prompts_are_new_in_every_process_but_for_a_shared_prefix() -> None:
    stub = Stub()
    prompts = RandomPrompts(Ask(8, 2), chat=False, shared_prefix=5)
    measured(stub, count=3, tokens=2, prompts=prompts)
    sent = [body["prompt"] for body in stub.bodies]
    assert {len(prompt) for prompt in sent} == {13}
    assert len({tuple(prompt[:5]) for prompt in sent}) == 1
    assert len({tuple(prompt[5:]) for prompt in sent}) == 4
    one, other = (RandomPrompts(Ask(8, 2), chat=False).take(1) for _ in range(2))
    assert one != other


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_what_a_request_asks_for(endpoint: str) -> None:
    stub = Stub()
    measured(stub, endpoint=endpoint)
    body = stub.bodies[-1]
    assert (body["max_tokens"], body["temperature"], body["stream"], body["ignore_eos"]) == (6, 0, True, True)
    assert body["stream_options"] == {"include_usage": True}
    if endpoint == "chat":
        (message,) = body["messages"]
        assert (message["role"], len(message["content"].split())) == ("user", 8)
    else:
        assert len(body["prompt"]) == 8
        assert all(0 <= token < 1000 for token in body["prompt"])


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    talk = {"messages": [{"role": "user", "content": "hello\u2028there"}]}
    lines = [
        json.dumps({"prompt": "two words", "output_tokens": 3}),
        "",
        json.dumps(talk, ensure_ascii=False),
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    stub = Stub()
    record = measured(stub, count=3, endpoint="chat", prompts=FilePrompts(path, 5))
    assert [body["max_tokens"] for body in stub.bodies] == [3, 5, 3, 5]
    assert stub.bodies[1]["messages"] == talk["messages"]
    assert any("2 prompts for 4 requests: prompts repeat" in doubt for doubt in record["doubts"])


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": ""}', '{"prompt": "a", "output_tokens": 0}', '{"messages": []}']
)
def test_a_line_that_is_no_prompt_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ConfigError, match="line 2 is not a prompt"):
        FilePrompts(path, 5)


def test_content_that_an_endpoint_does_not_take() -> None:
    with pytest.raises(ConfigError, match="messages need a chat"):
        ServerTarget("http://x").body("m", ServerPrompt([{"role": "user", "content": "a"}], 1))
    with pytest.raises(ConfigError, match="a chat takes no token ids"):
        ServerTarget("http://x", endpoint="chat").body("m", ServerPrompt([1, 2], 1))


# --- failures --------------------------------------------------------------------------------------------

SOME = {
    429: ("HTTP 429", "told to answer 429"),
    500: ("HTTP 500", "told to answer 500"),
    "whole": ("not a stream", "application/json"),
    "cut": ("broken stream", ""),
    "error": ("error in the stream", "out of blocks"),
    "json": ("not JSON", "{]"),
    "empty": ("no tokens", "without any"),
    "hang": ("timeout", "not done after 1 s"),
}


@pytest.mark.stays("429", "whole", "json", "hang")
@pytest.mark.parametrize("fault", SOME, ids=str)
def test_failed_requests_are_counted_by_kind_and_reported(fault: int | str) -> None:
    kind, reported = SOME[fault]
    stub = Stub(fault=fault, faulty=lambda number: number == 2)
    record = measured(stub, Point(concurrency=1), timeout_s=1 if fault == "hang" else 3)
    (entry,) = record["results"]
    assert (entry["completed"], entry["errors"]) == (3, {kind: 1})
    assert entry["raw"][1]["error"] == kind
    assert reported in entry["told"][kind]
    assert any(f"1 of 4 requests failed, {kind}" in doubt for doubt in record["doubts"])
    assert entry["output_tokens"] == 18


REFUSED = {
    401: (ConfigError, "refuses the API key"),
    404: (ConfigError, "does not know the path or the model"),
    400: (RequestError, "--no-ignore-eos"),
    429: (RequestError, "wait until the server is idle"),
    "whole": (RequestError, "a server that streams"),
    "cut": (RequestError, "broken stream"),
}


@pytest.mark.parametrize("fault", REFUSED, ids=str)
def test_a_first_request_that_fails_ends_the_measurement(fault: int | str) -> None:
    kind, reported = REFUSED[fault]
    with raises_shown(kind, reported):
        measured(Stub(fault=fault))


@pytest.mark.parametrize(
    ("stub", "asked", "reported"),
    [
        (Stub(models=("a", "b")), {"model": "c"}, "no such model; seen: c; allowed: a, b"),
        (Stub(models=("a", "b")), {}, "several models; allowed: a, b"),
        (Stub(models=None), {}, "lists no models"),
        (Stub(key="right"), {}, "refuses the API key; seen: HTTP 401: Incorrect API key"),
        (Stub(key="right"), {"api_key": "wrong"}, "another --api-key"),
    ],
)
def test_a_model_or_key_that_the_server_does_not_take(
    stub: Stub, asked: dict[str, str], reported: str
) -> None:
    with raises_shown(ConfigError, reported):
        measured(stub, **asked)


def test_a_server_without_a_list_is_taken_at_its_word() -> None:
    stub = Stub(models=None, key="right")
    stub.models = ()
    record = measured(stub, model="mine", api_key="right")
    assert record["server"]["model"] == {"id": "mine"}
    assert stub.bodies[0]["model"] == "mine"
    assert "right" not in json.dumps(record)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:b@c"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        ServerTarget(url)


# --- terminal --------------------------------------------------------------------------------------------


def test_the_verb_shows_tables_and_writes_record_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "r.json", tmp_path / "r.png"
    with running(Stub(key="sk-1")) as url:
        words = ("bench", "serving", "--url", f"{url}/v1/", "--rate", "50,inf", *SHORT, "--api-key", "sk-1")
        words = (*words, "--json-file", files[0], "--png", files[1], "--goodput", "ttft:9000")
        monkeypatch.setattr(sys, "argv", ["ingot", *map(str, words)])
        result = ingot(*words)
    assert result.exit_code == 0, result.stderr
    record = json.loads(files[0].read_text())
    assert "sk-1" not in files[0].read_text() + result.output
    assert [entry["rate"] for entry in record["results"]] == [50.0, "inf"]
    assert {"machine", "command", "method", "wanted", "server", "results", "doubts"} <= set(record)
    lines = result.stdout.splitlines()
    assert lines[0] == f"stub at {url}, completions"
    (heads,) = [line.split() for line in lines if line.startswith("load") and "TTFT" in line]
    assert heads.count("p99") == 4
    assert [line.split()[0] for line in lines if line.startswith("50/s")] == ["50/s"] * 2
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert [panel.y_label for panel in serving_panels(record)] == ["TTFT, ms", "TPOT, ms"]


def test_a_load_of_which_nothing_succeeds_exits_with_1() -> None:
    with running(Stub(fault=503, faulty=lambda number: number > 0)) as url:
        result = ingot("bench", "serving", "--url", url, *SHORT, "--concurrency", 2)
    assert result.exit_code == 1
    assert "4 of 4 requests failed, HTTP 503: told to answer 503" in result.stderr


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--url", "http://127.0.0.1:1"), "no server answers"),
        (("--url", "http://127.0.0.1:1"), "fix: start it (ingot serve ENGINE), or correct --url"),
        (("--rate", "0"), "not a list of rates"),
        (("--rate", "nan"), "not a list of rates"),
        (("--concurrency", "1.5"), "concurrencies must be positive integers"),
        (("--rate", "1", "--concurrency", "1"), "mutually exclusive"),
        (("--goodput", "itl:5"), "not a limit"),
        (("--goodput", "ttft:"), "not a limit"),
        (("--endpoint", "embeddings"), "unknown endpoint"),
        (("--load", "other"), "fixed or mixed"),
        (("--requests", "0"), "requests must be at least 1"),
        (("--dataset", "none.jsonl"), "cannot be read"),
    ],
)
def test_misuse_exits_with_2(words: tuple[str, ...], reported: str) -> None:
    given = words if "--url" in words else ("--url", "http://127.0.0.1:1", *words)
    result = ingot("bench", "serving", *given)
    assert result.exit_code == 2
    assert reported in " ".join(result.stderr.split())


def test_importing_ingot_imports_no_http_client() -> None:
    code = "import sys, ingot, ingot.cli.main; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
