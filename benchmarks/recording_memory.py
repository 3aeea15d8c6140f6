"""How much memory a long recording takes: the peak of processes that read it and transcribe it.

    python benchmarks/recording_memory.py models/pocket-whisper --json docs/results/recording_memory.json

The recording is two hours of noise in a file of each kind. "read" is ``read_audio`` alone, "transcribe" the
first clip of ``Transcriber``, whose features need all samples, "served" a server's limited process and its
own side of the pipe. The resident memory before it, of packages and the engine, is measured apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import av
import numpy as np

KINDS = {
    "wav": ("wav", "pcm_s16le"),
    "m4a": ("ipod", "aac"),
    "opus": ("ogg", "libopus"),
    "flac": ("flac", "flac"),
}
MB = 1_000_000
CHILD = """
import json, sys
def now(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) * 1024
path, what, model = sys.argv[1:]
import torch
torch.set_num_threads(1)
if what == "read":
    from ingot.audio.recording_samples import read_audio
    read_audio("examples/speech/talk.ogg")
    work = lambda: read_audio(path)
elif what == "transcribe":
    from ingot import Transcriber
    t = Transcriber(model, device="cpu")
    options = dict(language="en", temperatures=(0.0,), clip_timestamps=(0.0, 5.0))
    t("examples/speech/talk.ogg", **options)
    work = lambda: t(path, **options)
else:
    from ingot.audio.audio_worker import limits, question, samples_of
    from ingot.sandbox.limited_process import LimitedProcess
    process = LimitedProcess("ingot.audio.audio_worker", limits(3 * 3600.0))
    ask = lambda name: samples_of(process.ask_bytes(question(open(name, "rb").read(), 3 * 3600.0)))
    ask("examples/speech/talk.ogg")
    work = lambda: ask(path)
before = now("VmRSS")
kept = work()
print(json.dumps({"before": before, "peak": now("VmHWM")}))
if what == "served":
    print(json.dumps({"decoder": int(next(l for l in open(f"/proc/{process._running.process.pid}/status")
                                          if l.startswith("VmHWM")).split()[1]) * 1024}))
"""


def write(path: Path, container: str, codec: str, hours: float) -> None:
    """Noise at 16 kHz, made a minute at a time."""
    noise = (np.random.default_rng(1).normal(size=(1, 16_000 * 60)) * 3000).astype(np.int16)
    with av.open(str(path), "w", format=container) as file:
        sound: Any = file.add_stream(codec, rate=16_000, layout="mono")
        for minute in range(int(hours * 60)):
            frame = av.AudioFrame.from_ndarray(noise, format="s16", layout="mono")
            frame.sample_rate, frame.pts = 16_000, minute * noise.size
            file.mux(sound.encode(frame))
        file.mux(sound.encode(None))


def measured(path: Path, what: str, model: str) -> dict[str, float]:
    """MB (a million bytes) before, at the peak, and what the recording added."""
    words = [sys.executable, "-c", CHILD, str(path), what, model]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {name: value for line in lines for name, value in json.loads(line).items()}
    return {name: round(value / MB) for name, value in found.items()} | {
        "added": round((found["peak"] - found["before"]) / MB)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "hours": args.hours,
        "samples_mb": round(args.hours * 3600 * 16_000 * 4 / MB),
        "machine": platform.processor() or platform.machine(),
        "kinds": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds:
            path = Path(folder) / f"noise.{kind}"
            write(path, *KINDS[kind], args.hours)
            row = {what: measured(path, what, args.model) for what in ("read", "transcribe", "served")}
            record["kinds"][kind] = {"file_mb": round(path.stat().st_size / MB), **row}
            print(kind, record["kinds"][kind], flush=True)
            path.unlink()
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
