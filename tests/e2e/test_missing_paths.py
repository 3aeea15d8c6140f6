"""A path that is not there is refused before PyTorch is imported: seconds earlier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import MAY_FORK

ROOT = Path(__file__).resolve().parents[2]
# In one process, in which PyTorch cannot be imported: every verb's exit code and message.
SCRIPT = f"""{MAY_FORK}
import contextlib, io, json, sys
sys.modules["torch"] = None
from typer.main import get_command
from ingot.cli.main import app
verbs, found = get_command(app), []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as text:
        try:
            verbs(words, prog_name="ingot")
        except SystemExit as end:
            found.append([end.code, text.getvalue()])
print(json.dumps(found))
"""
PATH = "./nowhere/engine"
VERBS = (
    "run {} Hello",
    "chat {}",
    "serve {}",
    "serve --name a --name b {here} {}",
    "verify {}",
    "verify {here} --source {}",
    "inspect {}",
    "explain {} --prompt Hello",
    "build {} -o out",
    "port {}",
    "tune {}",
    "diff {here} {}",
    "plan {}",
    "triton {} -o out",
    "bench latency {}",
    "bench throughput {}",
    "bench transcribe {}",
    "bench caption {}",
    "bench kernels {}",
    "profile {}",
    "sweep {} --out out --no-png",
    "eval summarize {} --data x.jsonl",
    "eval perplexity {} --data x.txt",
    "doctor {} --quant w8a8 --budget kl_mean=0.1 --data x.txt --out x.yaml",
    "align {} --reference r",
    "repro {} --layer 0 --prompt Hello",
)


IDS = ("run {} Hello", "serve {}", "build {} -o out", "bench latency {}")


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and stderr of each verb with a path, and of some with what could be an id."""
    here = tmp_path_factory.mktemp("here")
    (here / "manifest.json").write_text("{}")
    asked = [verb.format(PATH, here=here) for verb in VERBS] + [verb.format("NOPE") for verb in IDS]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([words.split() for words in asked])],
        cwd=here,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(here), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip([*VERBS, *(f"id: {verb}" for verb in IDS)], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("verb", VERBS)
def test_a_path_that_is_not_there_is_refused_without_pytorch(
    refusals: dict[str, tuple[int, str]], verb: str
) -> None:
    code, shown = refusals[verb]
    assert (code, "seen: nowhere/engine" in shown or f"seen: {PATH}" in shown) == (2, True), shown


@pytest.mark.parametrize("verb", IDS)
def test_an_id_that_is_nowhere_is_refused_without_pytorch(
    refusals: dict[str, tuple[int, str]], verb: str
) -> None:
    code, shown = refusals[f"id: {verb}"]
    assert (code, "NOPE is not in the local cache" in shown) == (1, True), shown
