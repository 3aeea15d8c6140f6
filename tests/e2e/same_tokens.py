"""Random requests run alone and in every other way at once, in every scheme; prints differences.

python -m tests.e2e.same_tokens 300 --json docs/results/same_tokens.json
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ingot import LLM, SamplingParams, build
from ingot.config.quantization.quant_config import QuantConfig
from ingot.config.runtime_config import RuntimeConfig
from tests.e2e.turns import turns
from tests.e2e.watch import Steps, check_idle, watch
from tests.tiny_models import random_ids, save_model, tiny_config

SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
SCHEMES: dict[str, tuple[QuantConfig | None, str]] = {  # how layers are stored, and the cache
    "dense": (None, "model"),
    "w8a16": (QuantConfig("w8a16"), "model"),
    "w4a16": (QuantConfig("w4a16", 64), "model"),
    "w8a8": (QuantConfig("w8a8"), "model"),
    "w4a8": (QuantConfig("w4a8", 64), "model"),
    "rptq-w4a4": (QuantConfig("rptq-w4a4", 32), "model"),
    "w8a8, int8 cache": (QuantConfig("w8a8"), "int8"),
    "int8 cache": (None, "int8"),
    "fp8 cache": (None, "fp8"),
    "w8a8-fp8": (QuantConfig("w8a8-fp8"), "model"),
}
# Steps hold few tokens and the cache few blocks: requests are batched, cut, preempted and reused at once.
TIGHT = {"block_size": 4, "cache_tokens": 100, "token_budget": 20}
# And prompts of more than six tokens are computed a few layers per step beside decodes.
LAYERED = TIGHT | {"prompt_chunk": 3, "long_prompt": 6, "prompt_share": 0.1}
ALONE = {"block_size": 16, "cache_tokens": 2048, "prefix_reuse": False}
Asked = list[tuple[list[int], SamplingParams]]
Rows = dict[tuple[int | None, int], torch.Tensor]  # by seed and number of tokens
Make = Callable[..., LLM]


def requests(count: int, seed: int, most_new: int = 16) -> Asked:
    """Prompts of 1 to 48 tokens, some with a common beginning; every third draws."""
    rng, begin, found = random.Random(seed), random_ids(24, seed=seed), []
    for i in range(count):
        own = random_ids(rng.randint(1, 24), seed=1000 * seed + i)
        values = SamplingParams(
            max_new_tokens=rng.randint(1, most_new), ignore_eos=True, seed=i, temperature=float(i % 3 == 2)
        )
        found.append((begin[: rng.choice((0, 0, 5, 24))] + own, values))
    return found


def engines(root: Path) -> Make:
    """make(scheme, batch_invariant=…, token_budget=…): an LLM of a tiny LLaMA in fp32 on the CPU."""
    save_model(tiny_config("llama", **SIZES), root / "checkpoint", seed=1)
    samples = root / "ids.jsonl"
    samples.write_text("".join(json.dumps({"token_ids": random_ids(60, seed=n)}) + "\n" for n in range(12)))

    @functools.cache
    def folder(quant: QuantConfig) -> Path:
        target = root / quant.scheme
        calib = samples if quant.scheme.startswith("rptq") else None
        return build(
            root / "checkpoint", target, quant=quant, calib=calib, dtype="fp32", device="cpu", proof=False
        )

    def make(scheme: str, **runtime: Any) -> LLM:
        quant, kv_dtype = SCHEMES[scheme]
        config = RuntimeConfig(kv_dtype=kv_dtype, **runtime)
        path = root / "checkpoint" if quant is None else folder(quant)
        return LLM(path, "cpu", max_batch_size=8, max_seq_len=96, runtime=config)

    return make


def run(llm: LLM, asked: Sequence[tuple[list[int], SamplingParams]]) -> tuple[list[list[int]], Rows]:
    """Answer requests together: their tokens, and the logits that each was chosen from."""
    rows: Rows = {}
    runner, own = llm.executor.runner, llm.executor.runner.run

    def recorded(step: Any) -> torch.Tensor:
        logits = own(step)
        sampling = [item.request for item in step.requests if item.samples]
        for row, request in zip(logits, sampling, strict=True):
            rows[request.params.seed, request.num_tokens] = row.clone()
        return logits

    runner.run = recorded  # type: ignore[method-assign]
    try:
        outputs = llm.generate([prompt for prompt, _ in asked], [values for _, values in asked])
    finally:
        runner.run = own  # type: ignore[method-assign]
    check_idle(llm)
    return [output.token_ids for output in outputs], rows


def alone(llm: LLM, asked: Asked) -> tuple[list[list[int]], Rows]:
    """Each request alone, its prompt in one piece."""
    found: list[list[int]] = []
    rows: Rows = {}
    for one in asked:
        (tokens,), own = run(llm, [one])
        found.append(tokens)
        rows |= own
    return found, rows


def compare(
    make: Make, scheme: str, asked: Asked, *, batch_invariant: bool, way: dict[str, Any] = TIGHT
) -> tuple[int, float, int, Steps]:
    """Requests whose tokens differ, the largest difference of logits relative to the largest logit (of
    requests that did not take another turn), how many rows differ in any bit, and the steps.
    """
    expected, rows = alone(make(scheme, batch_invariant=batch_invariant, **ALONE), asked)
    with turns():
        tight = make(scheme, batch_invariant=batch_invariant, **way)
    with watch(tight) as steps:
        found, mixed = run(tight, asked)
    same = {v.seed for (_, v), a, b in zip(asked, found, expected, strict=True) if a == b}
    keys = [key for key in rows if key[0] in same]
    top = max(float(rows[key].abs().max()) for key in keys)
    off = max(float((rows[key] - mixed[key]).abs().max()) for key in keys) / top
    return len(asked) - len(same), off, sum(not torch.equal(rows[k], mixed[k]) for k in keys), steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("requests", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    asked, found = requests(args.requests, args.seed), {}
    with tempfile.TemporaryDirectory() as folder:
        make = engines(Path(folder))
        for scheme in SCHEMES:
            for mode, invariant, way in (
                ("default", False, TIGHT),
                ("batch invariant", True, TIGHT),
                ("layers, default", False, LAYERED),
                ("layers, batch invariant", True, LAYERED),
            ):
                differ, off, rows, steps = compare(make, scheme, asked, batch_invariant=invariant, way=way)
                found[f"{scheme}, {mode}"] = {"requests": len(asked), "differ": differ, "logits_off": off}
                found[f"{scheme}, {mode}"] |= {"rows_off": rows, "preemptions": steps.preemptions}
                print(f"{scheme:<17} {mode:<23} {differ:4} differ  logits {off:.1e}  rows {rows}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
