"""Clients that people use, each as it comes, against a server of the pocket model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.clients.environments import ROOT, run
from tests.serve.client import Server, wait_for
from tests.serve.conftest import chat

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
TOKENIZER = ROOT / "tests" / "clients"


@pytest.fixture(scope="module")
def litellm(pocket_server: Server) -> Any:
    """What LiteLLM made of the server's answers."""
    place = f"http://127.0.0.1:{pocket_server.port}"
    out = run("litellm", "litellm", "python", HERE / "with_litellm.py", place, cwd=HERE)
    wait_for("the stream that it left to end", pocket_server.idle)
    return json.loads(out.splitlines()[-1])


def test_litellm_answers_streams_and_usage(pocket_server: Server, litellm: Any) -> None:
    ours = pocket_server.post("/v1/chat/completions", chat()).json
    assert litellm["whole"] == litellm["stream"] == ours["choices"][0]["message"]["content"]
    assert litellm["usage"] == [ours["usage"]["prompt_tokens"], ours["usage"]["completion_tokens"]]
    assert litellm["stream_usage"][-1] == litellm["usage"]


def test_litellm_n_logprobs_stop_and_completions(pocket_server: Server, litellm: Any) -> None:
    assert (litellm["n"], litellm["logprobs"]) == (2, [2])
    assert litellm["stop"] == litellm["whole"].partition("=")[0]
    body = {"model": "pocket", "prompt": "A fire broke out in a", "max_tokens": 8}
    assert litellm["text"] == pocket_server.post("/v1/completions", body).json["choices"][0]["text"]


def test_litellm_knows_the_errors(litellm: Any) -> None:
    assert litellm["no_model"] == "NotFoundError"
    assert litellm["too_long"] == "ContextWindowExceededError"


def test_lm_eval_scores_by_the_server(pocket_server: Server, url: str, tmp_path: Path) -> None:
    """Its accuracy is what the log-probabilities of the same texts say."""
    rows = [(i + 3, 2 * i + 5) for i in range(8)]
    data = [
        {"question": f"{a} + {b} =", "choices": [str(a + b), str(a + b + 11)], "answer": 0} for a, b in rows
    ]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    task = (HERE / "sums.yaml").read_text().replace("FOLDER", str(tmp_path))
    (tmp_path / "sums.yaml").write_text(task)
    model = f"model=pocket,base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=4"
    words = ("run", "--model", "local-completions", "--model_args", model, "--tasks", "ingot_sums")
    place = ("--include_path", tmp_path, "--output_path", tmp_path / "out")
    run("lmeval", "'lm-eval[api]'", "lm_eval", *words, *place, cwd=tmp_path)
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]["ingot_sums"]["acc,none"]
    assert found == pytest.approx(sum(_best(pocket_server, row) == 0 for row in data) / len(data))


def _best(server: Server, row: dict[str, Any]) -> int:
    """The choice whose tokens are the likeliest after the question."""
    start = server.post("/tokenize", {"prompt": row["question"]}).json["count"]
    sums = []
    for choice in row["choices"]:
        body = {"model": "pocket", "prompt": f"{row['question']} {choice}", "max_tokens": 1, "echo": True}
        logprobs = server.post("/v1/completions", {**body, "logprobs": 1}).json["choices"][0]["logprobs"]
        sums.append(sum(logprobs["token_logprobs"][start:-1]))
    return sums.index(max(sums))


def test_guidellm_measures_the_server(url: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"Story {i}: a fire broke out in a"} for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--backend", f"kind=openai_http,target={url},model=pocket,request_format=/v1/completions")
    load = ("--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12")
    data = ("--data", f"kind=json_file,path={tmp_path}/prompts.jsonl")
    out = ("--output", f"kind=json,path={tmp_path}/report.json", "--disable-console")
    run("guidellm", "guidellm", "guidellm", "run", *words, *load, *data, *out, cwd=tmp_path)
    (found,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0)


def test_vllm_bench_serve_measures_the_server(url: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"Story {i}: a fire broke out in a", "output_tokens": 16} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("bench", "serve", "--backend", "openai", "--base-url", url, "--model", "pocket")
    data = ("--dataset-name", "custom", "--dataset-path", tmp_path / "prompts.jsonl", "--num-prompts", 12)
    words_alone = Tokenizer(
        WordLevel({"Story": 0, "?": 1}, unk_token="?")
    )  # without one it asks for one token
    words_alone.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    # Without a tokenizer it asks for one token.
    size = ("--custom-output-len", 16, "--tokenizer", tmp_path)
    how = ("--skip-chat-template", "--ignore-eos", "--max-concurrency", 4)
    out = ("--save-result", "--result-dir", tmp_path, "--result-filename", "result.json")
    run("vllm", "vllm", "vllm", *words, *data, *size, *how, *out, cwd=tmp_path)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["completed"] == 12
    assert found["total_output_tokens"] == 12 * 16
