"""How long a core takes to read recordings: files of ten minutes to samples at 16 kHz.

Noise with the loudness of speech, in the formats that people have. "cpu_s_per_hour" is the least of several
runs, of the process's own time; "samples" hashes what was read, so that two commits can be compared.

    python benchmarks/reading_speed.py --json docs/results/reading_speed.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot.audio.recording_samples import read_samples
from ingot.measure.side.machine import machine

KINDS = {
    "wav, 16 kHz": ("wav", "pcm_s16le", 16_000, 1),
    "m4a, 44.1 kHz, two channels": ("ipod", "aac", 44_100, 2),
    "mp3, 44.1 kHz, two channels": ("mp3", "libmp3lame", 44_100, 2),
    "opus, 48 kHz": ("ogg", "libopus", 48_000, 1),
    "flac, 44.1 kHz, two channels": ("flac", "flac", 44_100, 2),
}
MINUTES = 10


def write(path: Path, container: str, codec: str, rate: int, channels: int, minutes: float) -> None:
    """A recording, ten seconds at a time."""
    generator = np.random.default_rng(1)
    layout = "mono" if channels == 1 else "stereo"
    with av.open(str(path), "w", format=container) as file:
        sound: Any = file.add_stream(codec, rate=rate, layout=layout)
        for part in range(round(6 * minutes)):
            noise = (generator.normal(size=(1, channels * 10 * rate)) * 3000).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(noise, format="s16", layout=layout)
            frame.sample_rate, frame.pts = rate, part * 10 * rate
            file.mux(sound.encode(frame))
        file.mux(sound.encode(None))


def measured(path: Path, repeats: int) -> dict[str, Any]:
    times, digest = [], ""
    for _ in range(repeats):
        begun = time.process_time()
        samples = read_samples(path)
        times.append((time.process_time() - begun) * 3600 * 16_000 / len(samples))
        digest = hashlib.sha1(samples.tobytes()).hexdigest()[:16]
    return {"cpu_s_per_hour": round(min(times), 2), "most": round(max(times), 2), "samples": digest}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "kinds": {}}
    record["machine"] = machine(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in KINDS.items():
            path = Path(folder) / "recording"
            write(path, *kind, given.minutes)
            row = {"format": name, **measured(path, given.repeats)}
            record["kinds"][name.partition(",")[0]] = row
            print(row, flush=True)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
