"""Clients that have environments of their own, since they need other versions of what Ingot's tests need.

Owns where they are and how they are run. Knows no client.

    run("litellm", "litellm", "python", "tests/clients/with_litellm.py", url)
"""

from __future__ import annotations

import os
import shlex
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
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COLUMNS")} | OFFLINE
    done = subprocess.run(
        [str(file), *map(str, words)],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
