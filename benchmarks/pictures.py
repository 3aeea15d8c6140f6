"""How fast a MiniGPT-4 of random weights sees: pictures a second of its encoder, a picture to the first
token, and 40 captions at once.

Features are normalized pixels of random values; decoding of files is not counted. A prompt has 105 tokens
before the picture and 36 behind it, about as the original's. "stages" are parts of the encoder by themselves;
"served" is the encoder as requests have it, by CUDA graphs, with the copy of the features. "beside" is the
time between two tokens of 16 streams of text: alone, beside four prompts of text a second, and beside four
pictures; "first_token" is what these visitors wait for theirs.

    python benchmarks/pictures.py --json docs/results/pictures_7b.json
    python benchmarks/pictures.py --parts beside
    python benchmarks/pictures.py --profile 64 --quant w8a8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot import LLM
from ingot.config.encoder_config import EncoderConfig
from ingot.layers.encoder_pass import EncoderPass
from ingot.llm.prompt_inputs import Input, Prompt
from ingot.measure.side.machine import machine
from ingot.runtime.scheduling.inputs import EncoderEntry, EncoderJob

SHAPE = Path(__file__).parent / "shapes/minigpt4-7b.json"
BEFORE, AFTER, CAPTIONS, WORDS, STREAMS = 105, 36, 40, 80, 16
Row = dict[str, Any]


def figures(seconds: list[float]) -> Row:
    """Median, p90, least and most, in ms."""
    ms = sorted(1e3 * s for s in seconds)
    at = lambda share: round(ms[min(int(share * len(ms)), len(ms) - 1)], 3)  # noqa: E731
    return {
        "ms": at(0.5),
        "p90": at(0.9),
        "least": round(ms[0], 3),
        "most": round(ms[-1], 3),
        "runs": len(ms),
    }


def timed(call: Callable[[], object], repeats: int) -> Row:
    """Of calls that end when the device is done."""
    seconds = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return figures(seconds[2:])


def pictures(encoder: EncoderConfig, count: int, seed: int) -> torch.Tensor:
    """[count, 3, side, side] of normal values, on the CPU."""
    return torch.randn(count, *encoder.features, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def of_encoder(llm: LLM, counts: list[int], repeats: int) -> list[Row]:
    """Features on the device to rows, and the parts."""
    model, rows = llm.engine.model, []
    encoder, config = model.encoder, model.config.encoder
    assert encoder is not None
    assert config is not None
    fused = EncoderPass(fused=True)
    for count in counts:
        pixels = pictures(config, count, 1).to(llm.engine.device, llm.engine.dtype)
        row = {"pictures": count} | timed(lambda pixels=pixels: model.encode(pixels, fused), repeats)
        row["per_second"] = round(1e3 * count / row["ms"], 1)
        seen = encoder.ln_vision(encoder.vit(pixels, fused))[0]
        asked = encoder.qformer(seen, count)
        row["stages"] = {
            "vit": timed(lambda pixels=pixels: encoder.vit(pixels, fused), repeats),
            "qformer": timed(lambda seen=seen, count=count: encoder.qformer(seen, count), repeats),
            "projector": timed(lambda asked=asked: encoder.projector(asked), repeats),
        }
        rows.append(row)
    return rows


def as_served(llm: LLM, counts: list[int], repeats: int) -> list[Row]:
    """The same as steps encode them."""
    config, encoding = llm.engine.manifest.model.encoder, llm.executor.runner.encoding
    rules = llm.executor.admission.inputs
    assert config is not None
    assert encoding is not None
    assert rules is not None
    rows, size = [], encoding.block_size
    for count in counts:
        blocks = -(-config.max_positions // size)
        jobs = []
        for number, pixels in enumerate(pictures(config, count, 3)):
            given = rules.read(pixels, 0)
            entry = EncoderEntry(given.digest, [number * blocks + b for b in range(blocks)], given.positions)
            jobs.append(EncoderJob(given, entry))
        row = {"pictures": count} | timed(lambda jobs=jobs: encoding.encode(jobs, fused=True), repeats)
        rows.append(row | {"per_second": round(1e3 * count / row["ms"], 1)})
    return rows


def beside(llm: LLM, seconds: float) -> Row:
    """Gaps between tokens of the streams, in three kinds of company."""
    return {kind: asyncio.run(_beside(llm, kind, seconds)) for kind in ("nothing", "texts", "pictures")}


async def _beside(llm: LLM, kind: str, seconds: float) -> Row:
    gaps: list[float] = []
    first: list[float] = []
    values: Any = {"temperature": 0.0, "ignore_eos": True}
    ends = time.perf_counter() + seconds
    vocab = llm.engine.manifest.model.vocab_size

    async def stream(number: int) -> None:
        ids = torch.randint(3, vocab, (64,), generator=torch.Generator().manual_seed(number)).tolist()
        last = None
        async for _ in llm.astream(ids, max_new_tokens=1900, **values):
            now = time.perf_counter()
            if last is not None and now > ends - seconds + 1:  # behind the streams' own prompts
                gaps.append(now - last)
            last = now
            if now > ends:
                return

    async def visit(number: int) -> None:
        (prompt,) = prompts(llm, 1, 5000 + number)
        if kind == "texts":
            before, _, after = prompt.parts
            drawn = torch.randint(3, vocab, (32,), generator=torch.Generator().manual_seed(number)).tolist()
            prompt = Prompt([[3 + number, *before], drawn, after])
        begun, waited = time.perf_counter(), None
        async for _ in llm.astream(prompt, max_new_tokens=16, **values):
            waited = waited or time.perf_counter() - begun
        first.append(waited or 0.0)

    streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
    visits = []
    await asyncio.sleep(0.5)
    while kind != "nothing" and time.perf_counter() < ends:
        visits.append(asyncio.create_task(visit(len(visits))))
        await asyncio.sleep(0.25)
    await asyncio.gather(*streams, *visits)
    found = sorted(1e3 * gap for gap in gaps)
    at = lambda share: round(found[min(int(share * len(found)), len(found) - 1)], 3)  # noqa: E731
    row = {"ms": at(0.5), "p90": at(0.9), "p99": at(0.99), "most": at(1.0), "gaps": len(found)}
    return row | ({"first_token": figures(first[2:])} if first[2:] else {})


@torch.inference_mode()
def profile(llm: LLM, count: int) -> None:
    """Kernels of one encoding, on the terminal."""
    config, encoder = llm.engine.model.config.encoder, llm.engine.model
    assert config is not None
    pixels = pictures(config, count, 1).to(llm.engine.device, llm.engine.dtype)
    fused = EncoderPass(fused=True)
    for _ in range(3):
        encoder.encode(pixels, fused)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        encoder.encode(pixels, fused)
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:24]:
        print(f"{event.self_device_time_total / 1e3:9.3f} ms {event.count:5d}x {event.key[:110]}")


def prompts(llm: LLM, count: int, seed: int) -> list[Prompt]:
    """Each about a picture of its own."""
    config = llm.engine.manifest.model
    assert config.encoder is not None
    ids = torch.randint(
        3, config.vocab_size, (BEFORE + AFTER,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    shown = pictures(config.encoder, count, seed)
    return [Prompt([ids[:BEFORE], Input(one), ids[BEFORE:]]) for one in shown]


def of_requests(llm: LLM, repeats: int) -> Row:
    """Requests through the engine: one to its first token, and captions together."""
    values: Any = {"temperature": 0.0, "ignore_eos": True}
    first, whole = [], []
    for number in range(repeats + 3):
        (prompt,) = prompts(llm, 1, 1000 + number)
        begun = time.perf_counter()
        llm.generate([prompt], max_new_tokens=1, **values)
        first.append(time.perf_counter() - begun)
    for number in range(4):
        together = prompts(llm, CAPTIONS, 2000 + number)
        begun = time.perf_counter()
        llm.generate(together, max_new_tokens=WORDS, **values)
        whole.append(time.perf_counter() - begun)
    return {"first_token": figures(first[3:]), f"captions_{CAPTIONS}x{WORDS}": figures(whole[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Path, default=SHAPE)
    parser.add_argument("--quant", nargs="+", default=["none"])
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", nargs="+", default=["encoder", "served", "requests", "beside"])
    parser.add_argument("--profile", type=int, metavar="N", help="the kernels of N pictures alone")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each company of streams")
    given = parser.parse_args()
    found: Row = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(torch.device("cuda")),
        "rows": [],
    }
    for quant in given.quant:
        with LLM.from_config(given.shape, "cuda", dtype=given.dtype, quant=quant, max_seq_len=2048) as llm:
            if given.profile:
                profile(llm, given.profile)
                continue
            llm.warm_up([1, STREAMS, CAPTIONS], ["greedy"])
            row: Row = {"quant": quant}
            if "encoder" in given.parts:
                row["encoder"] = of_encoder(llm, given.counts, given.repeats)
            if "served" in given.parts:
                row["served"] = as_served(llm, given.counts, given.repeats)
            row |= of_requests(llm, given.repeats) if "requests" in given.parts else {}
            row |= {"beside": beside(llm, given.seconds)} if "beside" in given.parts else {}
        found["rows"].append(row)
        print(json.dumps(row))
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
