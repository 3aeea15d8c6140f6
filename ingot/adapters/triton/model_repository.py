"""The model repository that Triton Inference Server reads: config.pbtxt, model.py and the engine."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ingot.adapters.triton.triton_settings import Settings
from ingot.adapters.triton.triton_tensors import INPUTS, OUTPUTS, Tensor
from ingot.errors import BuildError, RequestError

CONFIG, MODEL, COPY = "config.pbtxt", "model.py", "engine"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_HEAD = "# Written by `ingot triton`."
_MODEL = '''"""An Ingot engine in Triton Inference Server. config.pbtxt, has its settings."""

import os


class TritonPythonModel:
    def initialize(self, args):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before PyTorch is imported
        try:  # here, since Triton also imports this file just to complete a configuration
            from ingot.adapters.triton.backend import Backend
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error.name} is not installed for the Python of Triton's backend: "
                "run `pip install '.[serve]'` of Ingot's folder there, or add its folder to PYTHONPATH"
            ) from error
        self._backend = Backend(args)

    def execute(self, requests):
        self._backend.execute(requests)

    def is_ready(self):
        return self._backend.is_ready

    def finalize(self):
        self._backend.close()
'''


def write_model(
    repository: Path, name: str, settings: Settings, *, gpu: int | None, copy: bool, force: bool = False
) -> Path:
    """Write one model; it appears whole or not at all. Other models of the repository stay as they are.

    Args:
        name: by which clients ask for it.
        gpu: number of the GPU; None: a CPU.
        copy: copy the engine into the model, so that the repository can be moved; else config.pbtxt holds the
            engine's absolute path.
        force: replace a model that `ingot triton` wrote.

    Returns:
        The model's folder.

    Raises:
        RequestError: the name cannot be Triton's.
        BuildError: something is there already, or the folder cannot be written.
    """
    if not _NAME.fullmatch(name):
        allowed = "letters, digits, '_', '-' and '.'"
        raise RequestError("a model's name cannot be this", seen=name, allowed=allowed, field="name")
    engine = Path(settings.engine).resolve()
    placed = replace(settings, engine=COPY if copy else str(engine))
    try:
        with _replacing(repository / name, force) as folder:
            version = folder / "1"
            version.mkdir()
            if copy:
                shutil.copytree(engine, version / COPY)
            (version / MODEL).write_text(_MODEL, encoding="utf-8")
            (folder / CONFIG).write_text(config_text(name, placed, gpu), encoding="utf-8")
    except (OSError, shutil.Error) as error:
        raise BuildError("the model cannot be written", seen=error, fix="-o") from None
    return repository / name


def config_text(name: str, settings: Settings, gpu: int | None) -> str:
    kind = "kind: KIND_CPU" if gpu is None else f"kind: KIND_GPU gpus: [ {gpu} ]"
    parts = [
        f"{_HEAD} The tensors are those of Triton's vLLM backend.",
        f"name: {_quoted(name)}",
        'backend: "python"',
        "max_batch_size: 0  # requests share the engine's decode steps; Triton is not to batch them, too",
        "model_transaction_policy { decoupled: true }  # false: no streams, but `infer` works",
        *(_tensor("input", one) for one in INPUTS),
        *(_tensor("output", one) for one in OUTPUTS),
        f"instance_group [ {{ count: 1 {kind} }} ]  # each instance is an engine of its own",
        "\n# What the engine may take. A line that is commented out has the library's default.",
        *(
            f"{'# ' if value is None else ''}parameters {{ key: {_quoted(name)} "
            f"value {{ string_value: {_quoted(value or '')} }} }}"
            for name, value in settings.parameters().items()
        ),
    ]
    return "\n".join(parts) + "\n"


def _tensor(field: str, one: Tensor) -> str:
    optional = " optional: true" if one.optional else ""
    kind = f"TYPE_{one.kind}"
    return f"{field} [ {{ name: {_quoted(one.name)} data_type: {kind} dims: [ {one.size} ]{optional} }} ]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@contextmanager
def _replacing(target: Path, force: bool) -> Iterator[Path]:
    """An empty folder that becomes ``target`` at the end; on an error nothing stays of it."""
    config = target / CONFIG
    if target.exists():
        if not config.is_file() or not config.read_text(encoding="utf-8").startswith(_HEAD):
            fix = "choose another `name` or `output`; `force=True` does not replace it"
            raise BuildError("something else is there already", seen=target, fix=fix)
        if not force:
            fix = "`force=True` replaces it, or choose another `name`"
            raise BuildError("the model exists", seen=target, fix=fix)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder, old = (target.with_name(f".{target.name}-{os.getpid()}{end}") for end in ("", "-old"))
    try:
        folder.mkdir()
        yield folder
        if target.exists():
            target.rename(old)
        folder.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        for left in (folder, old):
            shutil.rmtree(left, ignore_errors=True)
