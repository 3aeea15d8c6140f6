"""An hour of speech from a file to text: with random weights, where the seconds go.

The recording is noise that swells at the rate of syllables, with a pause after every 5 to 12 seconds, in a
WAV of 16 bits at 16 kHz. Stretches between pauses are what a voice detector would find; each chunk of them
gets equally many tokens, 4 per second of the recording, greedy, under a transcript's rules. "read" is the
file to samples, "transcribe" samples to text.

    python benchmarks/hour_of_speech.py large-v3 --json /tmp/hour.json
    python benchmarks/hour_of_speech.py large-v3 large-v3-turbo --quant w8a8 --kv-dtype int8 --json /tmp/hour
    python benchmarks/hour_of_speech.py tiny --small --minutes 2 --device cpu --json /tmp/hour.json

``--sample`` adds where the engine's thread was, every 2 ms; ``--trace`` how long the GPU was busy. Without
the ``av`` package the file is read by ``wave``; the record says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import random
import shlex
import sys
import tempfile
import threading
import time
import traceback
import wave
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from whisper import NAMES, SHAPES, _device_spans, busy, narrowed  # noqa: E402

from ingot import LLM, Transcriber  # noqa: E402
from ingot.audio.log_mel import RATE  # noqa: E402
from ingot.config.runtime_config import RuntimeConfig  # noqa: E402
from ingot.measure.side.machine import machine  # noqa: E402
from ingot.measure.side.timed_run import spread  # noqa: E402
from ingot.speech.voice_activity import speech_chunks  # noqa: E402

PAUSE = 0.8  # seconds
TOKENS_PER_SECOND = 4
Row = dict[str, Any]
Spans = list[tuple[float, float]]


def stretches(seconds: float, seed: int = 0) -> Spans:
    """Between pauses."""
    drawn, found, at = random.Random(seed), [], 0.0
    while at < seconds:
        end = min(at + drawn.uniform(5, 12), seconds)
        found.append((at, end))
        at = end + PAUSE
    return found


def write(path: Path, spans: Spans, seconds: float) -> None:
    """The recording."""
    generator = np.random.default_rng(1)
    swell = np.sin(np.arange(60 * RATE) * (4 * math.pi / RATE)) ** 2
    samples = np.zeros(round(seconds * RATE), np.int16)
    for start, end in spans:
        first, last = round(start * RATE), round(end * RATE)
        noise = generator.normal(size=last - first) * swell[: last - first]
        samples[first:last] = (3000 * noise).astype(np.int16)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(samples.tobytes())


def read(path: Path) -> torch.Tensor:
    if importlib.util.find_spec("av") is not None:
        from ingot.audio.recording_samples import read_audio

        return read_audio(path)
    with wave.open(str(path)) as file:
        values = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return torch.from_numpy(values.astype(np.float32) / 32768)


class Sampler(threading.Thread):
    """Where a thread is, by the innermost functions of this package."""

    def __init__(self, name: str) -> None:
        super().__init__(daemon=True)
        self.wanted, self.found, self.over = name, Counter[str](), threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.002):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if self.wanted not in names.get(ident, ""):
                    continue
                stack = [one for one in traceback.extract_stack(frame) if "ingot" in one.filename]
                place = " < ".join(
                    f"{Path(one.filename).stem}.{one.name}:{one.lineno}" for one in stack[:-3:-1]
                )
                self.found[place] += 1


def timed(transcriber: Transcriber, path: Path, spans: Spans, options: Row) -> tuple[Row, Any]:
    """Seconds of one run's parts, and the transcript."""
    begun = time.perf_counter()
    samples = read(path)
    was_read = time.perf_counter()
    found = transcriber(samples, vad=lambda _: spans, chunked=True, **options)
    ended = time.perf_counter()
    seconds = len(samples) / RATE
    parts = {"read_s": was_read - begun, "transcribe_s": ended - was_read, "all_s": ended - begun}
    return {**parts, "rtfx": seconds / (ended - begun)}, found


def asked(transcriber: Transcriber, seconds: float, *, small: bool = False) -> tuple[Spans, int, Row]:
    """Of a recording: where it is not silent, in how many chunks, and how it is transcribed."""
    spans, tokens = stretches(seconds), transcriber.vocabulary.tokens
    chunks = len(speech_chunks(torch.zeros(round(seconds * RATE)), lambda _: spans))
    return spans, chunks, {
        "language": "en", "timestamps": False, "temperatures": (0.0,), "compression_ratio": None,
        "logprob": None, "no_speech": None,
        "max_new_tokens": 4 if small else round(TOKENS_PER_SECOND * seconds / chunks),
        "suppress": tuple(range(tokens.end, tokens.first_timestamp)),
    }  # fmt: skip


def measured(given: argparse.Namespace, shape: Path) -> Row:
    """The record of one shape."""
    llm = LLM.from_config(
        shape, given.device, dtype=given.dtype, quant=given.quant, max_batch_size=given.batch,
        runtime=RuntimeConfig(kv_dtype=given.kv_dtype),
    )  # fmt: skip
    transcriber = Transcriber.of_llm(llm)
    seconds = 60.0 * given.minutes
    spans, chunks, options = asked(transcriber, seconds, small=given.small)
    device = llm.engine.device
    record: Row = {
        "command": shlex.join(["python", *sys.argv]), "machine": machine(device), "shape": given.shape,
        "dtype": given.dtype, "quant": given.quant, "kv_dtype": given.kv_dtype, "batch": given.batch,
        "seconds": seconds, "read_by": "av" if importlib.util.find_spec("av") else "wave",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hour.wav"
        write(path, spans, seconds)
        record |= {"chunks": chunks, "tokens_per_chunk": options["max_new_tokens"]}
        llm.warm_up([*range(1, given.batch + 1, 8), given.batch], kinds=["transcript"])
        timed(transcriber, path, spans, options)
        runs = []
        for _ in range(given.repeats):
            row, found = timed(transcriber, path, spans, options)
            runs.append(row)
            print(json.dumps({name: round(value, 3) for name, value in row.items()}), flush=True)
        record["runs"] = {name: spread([run[name] for run in runs]) for name in runs[0]}
        record["tokens"] = sum(len(one.tokens) for one in found.segments)
        if given.sample:
            sampler = Sampler("ingot")
            sampler.start()
            timed(transcriber, path, spans, options)
            sampler.over.set()
            record["engine_thread"] = sampler.found.most_common(40)
        if given.trace and device.type == "cuda":
            record["trace"] = busy(_device_spans(lambda: timed(transcriber, path, spans, options)))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", choices=NAMES, nargs="+")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--quant", nargs="+", default=["none"])
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sample", action="store_true", help="also where the engine's thread is")
    parser.add_argument("--trace", action="store_true", help="also how long the GPU is busy")
    parser.add_argument("--small", action="store_true", help="narrow layers, few tokens: tries the script")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go; of several, a folder")
    given = parser.parse_args()
    several = list(itertools.product(given.shapes, given.quant))
    for shape, quant in several:
        one = argparse.Namespace(**{**vars(given), "shape": shape, "quant": quant})
        file = given.json if len(several) == 1 else given.json / f"hour.{shape}.{quant}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            config = SHAPES / f"whisper-{shape}.json"
            record = measured(one, narrowed(config, Path(folder)) if given.small else config)
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(
            shape,
            quant,
            json.dumps({k: v for k, v in record.items() if k not in ("machine", "command")})[:6000],
        )


if __name__ == "__main__":
    main()
