"""A second witness of every kernel of a walk: its twin, with the very operands that the kernel had.

Where activations are rounded to 8 bits, one last bit of 16 moves a whole model's logarithms, so that two
right ways through it may end apart. Here each kernel of a real step is held to its own twin instead: exact
where sums are of whole numbers, within two last places of the dtype where they are of floats, and numbers of
8 bits the same but for ties, which go to the neighbour. Attention is held to fp64 (attention_witness.py): its
numbers are exactly those of its output. Owns the copies, the comparison and its bounds; knows no walk.

    with Witness(torch.float16, products, attention) as witness:
        llm.generate(...)
    assert witness.faults() == []
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from ingot.kernels.attention.attention_arguments import AttentionOutput
from ingot.kernels.rows.int8_rows import Int8Rows, Int8Sums
from ingot.kernels.weight.stored_weight import StoredWeight
from tests.parity.attention_witness import ATTENTION, AttentionWitness

# Two last places of a number, of its own size and of its row's largest; of fp32 the error of a long sum.
REACH = {torch.float32: 2.0**-17, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
# Of sums in fp32 by a weight of few bits: its numbers are multiplied with an excess of up to 1024, which is
# taken off.
LIFTED = 2.0**-13
# How rare a tie is, of numbers of 8 bits: sums of floats in another order differ by 2^-21, or one of so many
# steps between the dtype's neighbours (in fp32 between those of 8 bits, 2^-7 of a row's largest).
TIES = {torch.float32: 2.0**-12, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-11}


@contextmanager
def interpreted(wanted: Callable[[], bool]) -> Iterator[None]:
    """On the CPU ops launch their kernels, which Triton interprets, while ``wanted()``; else twins run."""
    changed = [
        (module, module.runs_on_gpu)
        for name, module in list(sys.modules.items())
        if name.startswith("ingot.kernels.")
        and name != "ingot.kernels.kernel_checks"
        and hasattr(module, "runs_on_gpu")
    ]
    for module, original in changed:
        choose = lambda x, original=original: wanted() if x.device.type == "cpu" else original(x)  # noqa: E731
        module.runs_on_gpu = choose
    try:
        yield
    finally:
        for module, original in changed:
            module.runs_on_gpu = original


def ops_of(module: ModuleType) -> list[str]:
    """The names by which a module calls ops that choose between a kernel and its twin."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value)
        and (getattr(value, "__module__", None) or "").startswith("ingot.kernels.")
        and hasattr(sys.modules[value.__module__], "runs_on_gpu")
        and "runs_on_gpu" in getattr(getattr(value, "__code__", None), "co_names", ())
    ]


class Witness:
    """While it is entered, ops that the ``modules`` call run again by their twins, on the CPU.

    Args:
        dtype: of the model's activations.
        modules: those whose calls are watched.
    """

    def __init__(self, dtype: torch.dtype, *modules: ModuleType) -> None:
        self.dtype = dtype
        self.modules = modules
        self.calls: Counter[str] = Counter()
        self.by_reference = False  # what interpreted() asks for
        self._few_bits = False  # the weight of the call that is judged
        self._wrong: list[str] = []
        self._numbers: dict[str, list[int]] = {}  # of an op: how many there are, how many differ
        self._attention = {op: AttentionWitness(op, dtype) for op in ATTENTION}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Witness:
        for module in self.modules:
            for name in ops_of(module):
                original = getattr(module, name)
                self._undo.append(functools.partial(setattr, module, name, original))
                setattr(module, name, functools.partial(self._call, name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def faults(self) -> list[str]:
        """What differs by more than it may; [] if nothing does."""
        many = [
            f"{op}: {moved} of {total} numbers differ, more than ties"
            for op, (total, moved) in self._numbers.items()
            if moved > max(TIES[self.dtype] * total, 1)
        ]
        return self._wrong + many + [f for seen in self._attention.values() for f in seen.faults()]

    def moved(self) -> dict[str, float]:
        """Of each op that gives numbers of 8 bits the share that differs."""
        return {op: moved / max(total, 1) for op, (total, moved) in self._numbers.items()}

    def _call(self, op: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        before, copies = _on_cpu(given, {}), _on_cpu(given, {})
        result = original(*args, **kwargs)
        if op in ATTENTION:
            self.calls[op] += 1
            self._attended(op, original, args, kwargs, before, result)
            return result
        self.by_reference = True
        expected = original(*copies[0], **copies[1])
        self.by_reference = False
        self.calls[op] += 1
        self._few_bits = any(isinstance(one, StoredWeight) and one.bits < 16 for one in args)
        for (name, a), (_, b) in zip(_tensors(result, "result"), _tensors(expected, "result"), strict=True):
            self._compare(op, name, a.detach().cpu(), b, None)
        written = zip(
            _tensors(given, "given"), _tensors(copies, "given"), _tensors(before, "given"), strict=True
        )
        for (name, a), (_, b), (_, old) in written:
            a = a.detach().cpu()
            if not (torch.equal(a, old) and torch.equal(b, old)):
                self._compare(op, name, a, b, old)
        return result

    def _attended(
        self,
        op: str,
        original: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        before: Any,
        result: torch.Tensor,
    ) -> None:
        """Judge an attention's call; what it is given to read is as it was."""
        output: AttentionOutput = kwargs["output"]
        given = (args, {name: value for name, value in kwargs.items() if name != "output"})
        kept = (before[0], {name: value for name, value in before[1].items() if name != "output"})
        if not isinstance(output.scales, torch.Tensor):  # steps, which are read
            given, kept = (given, output.scales), (kept, before[1]["output"].scales)
        for (name, a), (_, old) in zip(_tensors(given, "given"), _tensors(kept, "given"), strict=True):
            if not torch.equal(a.detach().cpu(), old):
                self._wrong.append(f"{op} {name} {tuple(a.shape)}: written to")
        wide = original(*args, **kwargs | {"output": AttentionOutput(steady=output.steady)})
        scales = _on_cpu(output.scales, {})
        self._attention[op].see(before[0], wide.cpu(), result.detach().cpu(), scales)

    def _compare(
        self, op: str, name: str, a: torch.Tensor, b: torch.Tensor, old: torch.Tensor | None
    ) -> None:
        where = f"{op} {name} {tuple(a.shape)} {a.dtype}"
        if a.shape != b.shape or a.dtype != b.dtype:
            self._wrong.append(f"{where}: the twin has {tuple(b.shape)} {b.dtype}")
        elif a.dtype == torch.int8:
            away = (a.int() - b.int()).abs()
            written = torch.ones_like(a, dtype=torch.bool) if old is None else (a != old) | (b != old)
            count = self._numbers.setdefault(op, [0, 0])
            count[0] += int(written.sum())
            count[1] += int((away > 0).sum())
            if away.numel() and int(away.max()) > 1:
                self._wrong.append(f"{where}: numbers are {int(away.max())} apart")
        elif not a.is_floating_point():
            if not torch.equal(a, b):
                self._wrong.append(f"{where}: {int((a != b).sum())} whole numbers differ")
        elif a.numel():
            # Scales are of magnitudes that were rounded to the dtype before.
            reach = REACH[self.dtype if "scales" in name else a.dtype]
            reach = max(reach, LIFTED) if self._few_bits else reach
            self._compare_floats(where, name, a.double(), b.double(), reach)

    def _compare_floats(self, where: str, name: str, a: torch.Tensor, b: torch.Tensor, reach: float) -> None:
        most = b.abs().amax(dim=-1, keepdim=True)
        over = (a - b).abs() - reach * (b.abs() + (0 if "scales" in name else most))
        if not bool((over <= 0).all()):  # so that NaN fails
            at = int(over.nan_to_num(nan=torch.inf).flatten().argmax())
            values = float(a.flatten()[at]), float(b.flatten()[at])
            self._wrong.append(f"{where}: {values[0]} where the twin has {values[1]}")


def _on_cpu(value: Any, known: dict[int, torch.Tensor]) -> Any:
    """Copies of all tensors; what was one tensor stays one."""
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            known[id(value)] = value.detach().cpu().clone()
        return known[id(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return dataclasses.replace(value, **{f.name: _on_cpu(getattr(value, f.name), known) for f in fields})
    if isinstance(value, (list, tuple)):
        make = getattr(value, "_make", type(value))  # of a named tuple
        return make(_on_cpu(part, known) for part in value)
    if isinstance(value, dict):
        return {name: _on_cpu(part, known) for name, part in value.items()}
    return value


def _tensors(value: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    """All tensors; sums in parts as the whole, since parts are each way's own."""
    if isinstance(value, Int8Sums):
        whole = value.parts.sum(dim=0, dtype=torch.int32)
        return [(f"{name} sums", whole), *_tensors((value.row_scales, value.weight_scales), f"{name} scales")]
    if isinstance(value, torch.Tensor):
        parts = value.dim() == 3 and value.dtype == torch.float32 and name == "result"
        return [(f"{name} parts", value.sum(dim=0))] if parts else [(name, value)]
    if isinstance(value, Int8Rows):
        return [(f"{name} values", value.values), (f"{name} scales", value.scales)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [pair for f in fields for pair in _tensors(getattr(value, f.name), f"{name} {f.name}")]
    if isinstance(value, dict):
        return [pair for key, part in value.items() for pair in _tensors(part, f"{name} {key}")]
    if isinstance(value, (list, tuple)):
        return [pair for part in value for pair in _tensors(part, name)]
    return []
