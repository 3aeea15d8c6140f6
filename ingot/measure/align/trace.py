"""Activations of any PyTorch model as one safetensors file.

It imports torch and the standard library only: copy this file alone into the environment that still runs the
model.

    with trace(model, "out.safetensors", names=["*.mlp", "*norm*"]):
        model(ids)                  # step 0, the prompt; further calls are steps 1, 2 ...
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import functools
import importlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

FORMAT = "ingot-trace-1"
STREAM_READERS = ("*norm*", "*ln_*")  # they read the residual stream, which no module returns
# The last product of attention and of an MLP; its input is a place inside them.
PRODUCTS = ("*attn.o_proj", "*mlp.down_proj", "*.c_proj", "*attn.out_proj", "*.fc2")
_MOST_HEADER = 100_000_000  # bytes; the safetensors library takes no more
_CHUNK = 1 << 24  # bytes; ctypes counts in 32 bits
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_HELP = """
Record what every module of a PyTorch model computes, as one safetensors file that
`ingot align ENGINE --reference FILE` compares an engine with.

This file needs torch and nothing else. Copy it beside a model that only runs under an old
library, and either wrap your own calls:

    from trace import trace
    with trace(model, "out.safetensors"):
        model(ids)                 # ids [1, T]: step 0, the prompt
        model(next_id, ...)        # steps 1, 2 ... : one cached token each

or let it do the calls, greedily and with the model's cache where it has one:

    python trace.py --model mypackage.loading:make --ids "1 15 27" --steps 4 -o out.safetensors

where make() returns the nn.Module. `python trace.py --list out.safetensors` prints what a
trace holds. Keys are STEP/MODULE (the module's first output tensor), STEP/MODULE/in (the input
of modules that read the residual stream, and of the last products of attention and MLP),
STEP/input_ids and STEP/logits.
"""


class TraceWriter:
    """Writes tensors to one safetensors file as they come; one tensor is in memory at a time.

    Data goes to ``path + ".part"``; ``close`` puts the header before it and the file in place.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.metadata: dict[str, str] = {"format": FORMAT}
        self._part = open(self.path + ".part", "wb")  # noqa: SIM115
        self._entries: list[tuple[str, str, list[int], int, int, int]] = []
        self._end = 0

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Append a tensor of any strided layout, on any device."""
        if tensor.dtype not in _NAMES:
            raise TypeError(f"a trace cannot hold {tensor.dtype} ({key})")
        data = tensor.detach().to("cpu").contiguous()
        size = data.numel() * data.element_size()
        for start in range(0, size, _CHUNK):
            self._part.write(ctypes.string_at(data.data_ptr() + start, min(_CHUNK, size - start)))
        entry = (key, _NAMES[data.dtype], list(data.shape), self._end, size, data.element_size())
        self._entries.append(entry)
        self._end += size

    def close(self) -> None:
        """Put the file together: widest dtypes first, so that every tensor is aligned."""
        self._part.close()
        order = sorted(self._entries, key=lambda entry: -entry[5])
        header: dict[str, Any] = {"__metadata__": self.metadata}
        end = 0
        for key, dtype, shape, _, size, _ in order:
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode("utf-8")
        text += b" " * (-len(text) % 8)
        whole = self.path + ".whole"
        with open(self.path + ".part", "rb") as data, open(whole, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for _, _, _, start, size, _ in order:
                data.seek(start)
                while size:
                    piece = data.read(min(size, _CHUNK))
                    out.write(piece)
                    size -= len(piece)
        os.replace(whole, self.path)
        os.remove(self.path + ".part")

    def abandon(self) -> None:
        """Discard what was written; an older file stays."""
        self._part.close()
        os.remove(self.path + ".part")


class _Recorder:
    """State of one trace's hooks: the step, the order of calls, the writer."""

    def __init__(self, writer: TraceWriter) -> None:
        self.writer = writer
        self.step = -1
        self.order: dict[str, list[str]] = {}

    def begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.step += 1
        self.order[str(self.step)] = []
        ids = kwargs.get("input_ids")
        if ids is None:
            ids = next((a for a in args if isinstance(a, torch.Tensor) and not a.is_floating_point()), None)
        if ids is not None:
            self.writer.add(f"{self.step}/input_ids", ids.to(torch.int64))

    def end(self, output: Any) -> None:
        logits = getattr(output, "logits", None)
        logits = first_tensor(output) if logits is None else logits
        if logits is not None:
            self.writer.add(f"{self.step}/logits", logits)

    def read(self, name: str, module: torch.nn.Module, inputs: Any) -> None:
        """Called before other hooks may change the input."""
        tensor = first_tensor(inputs)
        if self.step >= 0 and tensor is not None:
            self.writer.add(self._key(name) + "/in", tensor)

    def record(self, name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if self.step < 0 or tensor is None:
            return
        self.writer.add(self._key(name), tensor)
        self.order[str(self.step)].append(name)

    def _key(self, name: str) -> str:
        seen = self.order[str(self.step)].count(name)
        return f"{self.step}/{name}" + (f"#{seen}" if seen else "")


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor in a value: itself, or in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return next((t for t in map(first_tensor, value) if t is not None), None)
    return None


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def trace(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    names: Sequence[str] = ("*",),
    inputs: Sequence[str] = STREAM_READERS + PRODUCTS,
    **notes: str,
) -> Iterator[None]:
    """Record the modules' outputs while the block runs; each call of ``model`` is a step.

    Args:
        model: any module; its outputs do not change.
        path: the file; it appears when the block ends without error.
        names: shell patterns of module names to record (``*`` matches dots).
        inputs: patterns of those whose first input is recorded too.
        notes: texts for the file's metadata, such as ``prompt``; ``stop_ids="[2, 5]"`` end its answers if its
            ``generation_config`` does not say so.
    """
    chosen = {name: module for name, module in model.named_modules() if name and _is_any(name, names)}
    if not chosen:
        raise ValueError(f"no module matches {list(names)}")
    writer = TraceWriter(path)
    recorder = _Recorder(writer)
    handles = []
    for name, module in chosen.items():
        handles.append(module.register_forward_hook(functools.partial(recorder.record, name)))
        if _is_any(name, inputs):
            handles.append(module.register_forward_pre_hook(functools.partial(recorder.read, name)))
    restore = _count_calls(model, recorder)
    try:
        yield
        writer.metadata.update(notes, **_describe(model, chosen, recorder))
        writer.metadata.update({key: notes[key] for key in ("stop_ids",) if key in notes})
    except BaseException:
        writer.abandon()
        raise
    else:
        writer.close()
    finally:
        restore()
        for handle in handles:
            handle.remove()


def _count_calls(model: torch.nn.Module, recorder: _Recorder) -> Any:
    """Wrap ``model.forward`` (hooks of old versions do not see keywords); returns what undoes it."""
    before = model.__dict__.get("forward")
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        recorder.begin(args, kwargs)
        output = inner(*args, **kwargs)
        recorder.end(output)
        return output

    model.__dict__["forward"] = forward

    def restore() -> None:
        del model.__dict__["forward"]
        if before is not None:
            model.__dict__["forward"] = before

    return restore


def _describe(model: Any, chosen: dict[str, Any], recorder: _Recorder) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    library = sys.modules.get("transformers")
    if library is not None:
        versions["transformers"] = str(library.__version__)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    stops = _stop_ids(model)
    return {
        **({} if stops is None else {"stop_ids": json.dumps(stops)}),
        "model": type(model).__name__,
        "dtype": str(dtype).replace("torch.", ""),
        "steps": str(recorder.step),
        "modules": json.dumps({name: type(module).__name__ for name, module in chosen.items()}),
        "order": json.dumps(recorder.order),
        "versions": json.dumps(versions),
    }


def _stop_ids(model: Any) -> list[int] | None:
    """The ids that end ``generate`` of a Hugging Face class; None of another model."""
    config = getattr(model, "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    listed = list(named) if isinstance(named, (list, tuple)) else [] if named is None else [named]
    return listed if config is not None and all(isinstance(i, int) for i in listed) else None


@torch.no_grad()
def run_steps(model: Any, ids: Sequence[int], steps: int, forced: Sequence[int] | None = None) -> list[int]:
    """The ``steps + 1`` greedy choices after the prompt and each step, with the model's cache if it takes
    one; ``forced`` tokens are fed, or (None) the greedy choices.
    """
    taken = inspect.signature(model.forward).parameters
    cached = "past_key_values" in taken and "use_cache" in taken
    device = next(model.parameters()).device
    options: dict[str, Any] = {"use_cache": True} if cached else {}
    fed = list(ids)
    choices: list[int] = []
    for step in range(steps + 1):
        output = model(torch.tensor([fed], device=device), **options)
        logits = getattr(output, "logits", None)
        logits = first_tensor(output) if logits is None else logits
        if logits is None:
            raise TypeError("the model returns no tensor")
        choices.append(int(logits[0, -1].argmax()))
        token = choices[-1] if forced is None else [*forced, 0][step]
        past = getattr(output, "past_key_values", None) if cached else None
        if past is None:
            fed = [*fed, token]
        else:
            fed, options["past_key_values"] = [token], past
    return choices


def read_header(path: str) -> dict[str, Any]:
    """The header of a safetensors file: keys, shapes, dtypes and ``__metadata__``."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MOST_HEADER:
            raise ValueError("no header of a safetensors file")
        header: dict[str, Any] = json.loads(file.read(size))
    return header


def _print_list(path: str) -> None:
    try:
        header = read_header(path)
        metadata = header.pop("__metadata__", {})
        lines = [f"{name}: {metadata.get(name)}" for name in ("model", "dtype", "steps", "versions")]
        for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            lines.append(f"{key}  {entry['dtype']} {'x'.join(map(str, entry['shape']))}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SystemExit(f"{path} cannot be read as a trace: {error}") from None
    for line in lines:  # no control characters of a file reach the terminal
        print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


def _make(text: str) -> Any:
    """``package.module:function`` → what the function returns."""
    module, _, function = text.partition(":")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 done, 2 misused."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("trace", description=_HELP, formatter_class=form)
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="a function that returns the model")
    parser.add_argument("--ids", help="token ids of the prompt, with spaces between")
    parser.add_argument("--steps", type=int, default=4, help="cached decode steps after it (4)")
    parser.add_argument("--names", nargs="+", default=["*"], help="patterns of module names (all)")
    parser.add_argument("-o", "--out", help="the file to write")
    parser.add_argument("--list", metavar="FILE", help="print what a trace holds")
    given = parser.parse_args(argv)
    if given.list:
        _print_list(given.list)
        return 0
    if not (given.model and given.ids and given.out):
        parser.error("give --model, --ids and --out, or --list FILE")
    model = _make(given.model).eval()
    ids = [int(word) for word in given.ids.split()]
    with trace(model, given.out, given.names):
        run_steps(model, ids, given.steps)
    print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
