"""Clients that have environments of their own, since they need other versions of what Ingot's tests need.

Owns where they are and how they are run. Knows no client.

    run("litellm", "litellm", "python", "tests/clients/with_litellm.py", url)
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("INGOT_CLIENTS", ROOT / ".clients"))
# No client may look for a model or a price list on the network.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def run(name: str, install: str, program: str, *words: object, cwd: Path, seconds: int = 400) -> str:
    """What a program of an environment writes to stdout; skips where there is no such environment."""
    file = FOLDER / name / "bin" / program
    if not file.exists():
        folder = shlex.quote(str(FOLDER / name))
        pytest.skip(f"no {file}: python -m venv {folder} && {folder}/bin/pip install {install}")
    return _output([str(file), *map(str, words)], {}, cwd, seconds)


def run_node(script: Path, *words: object, install: str, cwd: Path, seconds: int = 400) -> str:
    """``run`` of a script of Node.js, whose packages are in the environment ``node``."""
    folder, node = FOLDER / "node", shutil.which("node")
    if node is None or not (folder / "node_modules").is_dir():
        pytest.skip(f"no node, or no {folder}/node_modules: npm install --prefix {folder} {install}")
    return _output([node, str(script), *map(str, words)], {"INGOT_NODE": str(folder)}, cwd, seconds)


def _output(words: list[str], own: dict[str, str], cwd: Path, seconds: int) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COLUMNS")} | OFFLINE | own
    done = subprocess.run(
        words,
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
