"""Compile every kernel as its launcher would launch it, for GPUs that are not there; print what each one
takes.

The launchers run on meta tensors, which hold no data: a launcher that looked at a tensor's contents would
fail here. What they launch is caught and compiled. One JSON list on the last line.

    python -m tests.kernels.compile_kernels 80 90
    python -m tests.kernels.compile_kernels 90 "token feed" "norms 4096 fp16"     # of these cases alone
    python -m tests.kernels.compile_kernels 90 "token feed" 86 "norms 4096 fp16"  # then others for sm_86
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ingot.kernels.product.packed.prompt_loop import packed_prompt_kernel
from ingot.kernels.tiles import int8_tiles, packed_tiles, product_tiles
from tests.kernels import compile_cases
from tests.kernels.compile_block_cases import BLOCK_CASES, BLOCK_OVERLAPPING
from tests.kernels.compile_cache_cases import CACHE_CASES, CACHE_OVERLAPPING
from tests.kernels.compile_fp8_cases import FP8_CASES, FP8_OVERLAPPING
from tests.kernels.compile_gemma2_cases import GEMMA2_CASES, GEMMA2_OVERLAPPING
from tests.kernels.compile_gptq_cases import GPTQ_CASES
from tests.kernels.compile_hopper_cases import HOPPER_CASES, WINDOW_CASES
from tests.kernels.compile_int4_cases import INT4_CASES
from tests.kernels.compile_int8_cases import INT8_CASES, INT8_OVERLAPPING
from tests.kernels.compile_packed_cases import PACKED_CASES, PACKED_OVERLAPPING

CASES = compile_cases.CASES | CACHE_CASES | BLOCK_CASES | GPTQ_CASES | INT4_CASES | INT8_CASES | PACKED_CASES
CASES |= GEMMA2_CASES
OVERLAPPING = compile_cases.OVERLAPPING | CACHE_OVERLAPPING | BLOCK_OVERLAPPING | INT8_OVERLAPPING
OVERLAPPING |= PACKED_OVERLAPPING | GEMMA2_OVERLAPPING | HOPPER_CASES | FP8_CASES | FP8_OVERLAPPING
OVERLAPPING |= WINDOW_CASES

COUNT_WAITS = {packed_prompt_kernel}  # to disassemble a kernel takes up to half a second
SMALL_SHARED = {86: 99 << 10, 89: 99 << 10}  # of GPUs whose launchers choose smaller tiles

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def caught_launches(call: Callable[[], Any]) -> list[tuple[JITFunction, list[Any], dict[str, Any]]]:
    """Run a launcher; return the kernels it launches instead of launching them."""
    caught: list[tuple[JITFunction, list[Any], dict[str, Any]]] = []

    def catch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(isinstance(size, int) and size > 0 for size in grid), grid
        caught.append((self, list(args), kwargs))

    launch = JITFunction.run
    JITFunction.run = catch
    try:
        call()
    finally:
        JITFunction.run = launch
    return caught


def source_of(
    kernel: JITFunction, args: list[Any], kwargs: dict[str, Any]
) -> tuple[ASTSource, dict[str, Any]]:
    """The specialised source and the launch options, as Triton's own launch would derive them."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    values.update({name: value for name, value in kwargs.items() if name in kernel.arg_names})
    assert sorted(values) == sorted(kernel.arg_names)
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def typed(path: tuple[int, ...], value: Any, constant: bool) -> Any:
        if constant or value is None or (isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            types = (typed((*path, place), item, False) for place, item in enumerate(value))
            return tuple(types)
        if isinstance(value, GluonDescriptor):
            return f"tensordesc<{POINTERS[value.base.dtype][1:]}{list(value.block_shape)},{value.layout!r}>"
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
        if isinstance(value, GluonDescriptor):
            tile = f"{POINTERS[value.base.dtype][1:]}{list(value.block_shape)}"
            return f"tensordesc<{tile},{value.layout!r}>"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        return "i32" if isinstance(value, int) else "fp32"

    for index, parameter in enumerate(kernel.params):
        signature[parameter.name] = typed((index,), values[parameter.name], parameter.is_constexpr)
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return source(kernel, signature, constants, attributes), options


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of spill a thread, if the toolchain's ``cuobjdump`` came with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spill_bytes": found["STACK"] + found["LOCAL"]}


def product_waits(cubin: bytes) -> int | None:
    """How often a warp group waits for its products, if the toolchain's ``nvdisasm`` came with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return text.count("WARPGROUP.DEPBAR")


def arithmetic(ptx: str) -> dict[str, int]:
    """How often each fp32 operation stands in a kernel."""
    found = re.findall(r"\b((?:add|sub|mul|fma|div|max|ex2|lg2|rcp)[\w.]*\.f32)\b", ptx)
    return dict(sorted(Counter(found).items()))


def products(ptx: str) -> dict[str, int]:
    """How often each tensor-core product stands in a kernel."""
    found = re.findall(r"\b((?:wgmma\.mma_async|mma)\.sync[\w.]*)", ptx)
    return dict(sorted(Counter(found).items()))


def moves(ptx: str) -> dict[str, int]:
    """How often values move: asynchronous copies by their bytes, shuffles, stores to shared memory."""
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], (0x[0-9a-f]+)", ptx)
    counts = Counter(f"copies of {int(size, 16)} bytes" for size in copies)
    counts["shuffles"] = len(re.findall(r"\bshfl\.sync", ptx))
    counts["shared stores"] = len(re.findall(r"\bst\.shared", ptx))
    return dict(sorted(counts.items()))


def products_across_lanes(ptx: str) -> int:
    """How often an unrounded product is added to another lane's: there lanes disagree in the last bit."""
    came: set[str] = set()
    count = 0
    for line in ptx.splitlines():
        if shuffle := re.match(r"\s*(?:@!?%p\d+\s+)?shfl\.sync\.\w+\.b32\s+(%\w+)", line):
            came.add(shuffle[1])
        elif (move := re.match(r"\s*mov\.b32\s+(%\w+), (%\w+);", line)) and move[2] in came:
            came.add(move[1])
        elif fused := re.match(r"\s*fma\.rn[.\w]*\.f32\s+%\w+, %\w+, %\w+, (%\w+);", line):
            count += fused[1] in came
    return count


def early_reads(ptx: str) -> int:
    """How many reads of memory stand before the wait for the kernel before."""
    before = ptx.partition("griddepcontrol.wait")[0]
    return len(re.findall(r"\b(?:ld\.global|cp\.async\.(?:c[ag]|bulk)|prefetch)", before))


def reductions(ttgir: str) -> list[str]:
    """How the tensors that are summed up lie in threads: what decides the order of their sums."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.MULTILINE))
    found = re.findall(r'"tt\.reduce"\(.*?\}\) : \(tensor<(\w+), (#\w+)>\)', ttgir, re.DOTALL)
    return sorted({f"{shape} {layouts.get(name, name)}" for shape, name in found})


def operand_runs(ttgir: str) -> list[int]:
    """How many neighbouring columns of a product's operand a thread holds: what decides which are summed in
    one instruction.
    """
    return sorted({int(size) for size in re.findall(r"kWidth = (\d+)", ttgir)})


def tiles_of(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Tiles of a launch, of which a product's loop has its own."""
    return kwargs["LOOP"]._asdict() if "LOOP" in kwargs else kwargs


def form_of(kernel: JITFunction, kwargs: dict[str, Any]) -> tuple[str, str | None, int]:
    """A launch's kernel, its loop and whether it starts early."""
    tiles = tiles_of(kwargs)
    loop = "gates" if tiles.get("GATED") else tiles.get("KIND")
    return kernel.__name__, loop, tiles.get("OVERLAP", 1)


def least_capability(case: str) -> int:
    """The oldest GPU that runs a case: e4m3 is converted from 8.9 on, launches overlap from 9.0 on."""
    if case in CASES:
        return 0
    return 89 if (case.startswith("fp8 cache") and not case.endswith("early")) or case in FP8_CASES else 90


def compiled(capabilities: list[int], cases: list[str]) -> Iterator[dict[str, Any]]:
    """What every launch of every case compiles to; of ``cases``, if there are some, each kernel once in each
    of its loops, and once more where it starts early.
    """
    every, met = CASES | OVERLAPPING, set()
    for case, call in ({case: every[case] for case in cases} or every).items():
        wanted = [one for one in capabilities if one >= least_capability(case)]
        for kernel, args, kwargs in caught_launches(call) if wanted else ():
            if cases and form_of(kernel, kwargs) in met:
                continue
            met.add(form_of(kernel, kwargs))
            for capability in wanted:
                source, options = source_of(kernel, args, kwargs)
                _, loop, overlap = form_of(kernel, kwargs)
                binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
                yield {
                    "case": case,
                    "kernel": kernel.__name__,
                    "loop": loop,
                    "sm": capability,
                    "shared": binary.metadata.shared,
                    "arithmetic": arithmetic(binary.asm["ptx"]),
                    "products": products(binary.asm["ptx"]),
                    "moves": moves(binary.asm["ptx"]),
                    "overlap": overlap,
                    "outputs": tiles_of(kwargs).get("BLOCK_N"),
                    "products_across_lanes": products_across_lanes(binary.asm["ptx"]),
                    "waits": binary.asm["ptx"].count("griddepcontrol.wait"),
                    "early_reads": early_reads(binary.asm["ptx"]),
                    "reductions": reductions(binary.asm["ttgir"]),
                    "operand_runs": operand_runs(binary.asm["ttgir"]),
                    "product_waits": product_waits(binary.asm["cubin"]) if kernel in COUNT_WAITS else None,
                    **resources(binary.asm["cubin"]),
                }


def limit_shared(size: int) -> None:
    """From now on launchers choose tiles for GPUs with so much shared memory per program, in bytes; without a
    GPU they choose those of an H200.
    """
    for module in (product_tiles, int8_tiles, packed_tiles):
        module.shared_bytes = lambda device: size  # type: ignore[attr-defined]


def requests(arguments: Sequence[str]) -> list[tuple[list[int], list[str]]]:
    """GPUs and the cases to compile for them, in order; no cases are all."""
    found: list[tuple[list[int], list[str]]] = []
    for argument in arguments:
        if argument.isdecimal():
            if not found or found[-1][1]:
                found.append(([], []))
            found[-1][0].append(int(argument))
        else:
            found[-1][1].append(argument)
    return found


def main() -> None:
    rows = []
    for capabilities, cases in requests(sys.argv[1:]):
        small = [SMALL_SHARED[capability] for capability in capabilities if capability in SMALL_SHARED]
        if small:
            limit_shared(min(small))
        for row in compiled(capabilities, cases):
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
