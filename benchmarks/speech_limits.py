"""What 64 windows of several Whispers take beside what the card allows, and an hour of speech: in one record.

As `whisper.py SHAPE --parts windows limit` and `hour_of_speech.py` measure them. A process per shape loads,
compiles and captures beside the others; then each measures alone, in turn, so that all shapes take little
longer than one.

    python benchmarks/speech_limits.py large-v3 small --hour large-v3 --json /tmp/limits.json
    python benchmarks/speech_limits.py tiny base --hour tiny --small --json /tmp/limits.json
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import whisper  # noqa: E402
from hour_of_speech import asked, stretches, timed, write  # noqa: E402

from ingot import Transcriber  # noqa: E402
from ingot.layers.encoder_blocks.encoder import EncoderLayer  # noqa: E402
from ingot.layers.products import layer_products  # noqa: E402
from ingot.measure.bench.ceiling import Ceiling  # noqa: E402
from ingot.measure.side.machine import machine  # noqa: E402
from ingot.measure.side.timed_run import spread  # noqa: E402
from ingot.runtime.encoding.encoder_graphs import EncoderGraphs  # noqa: E402

Row = dict[str, Any]
WAIT = 0.02  # seconds
_TAKES, _ADDS = layer_products.takes_up, EncoderLayer.adds_in_place


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(WAIT)


def one_shape(given: argparse.Namespace, folder: Path) -> None:
    """Load a shape, wait for its turn, and write what it takes."""
    (name,) = given.shapes
    few = whisper.FEW if given.small else {"tokens": whisper.TOKENS, "at_once": whisper.AT_ONCE}
    load = whisper.Load(repeats=given.repeats, **few)
    whisper.noise = functools.cache(whisper.noise)
    shape = whisper.SHAPES / f"whisper-{name}.json"
    batches = [*range(8, load.at_once, 8), load.at_once]
    ours = whisper.Ours(whisper.narrowed(shape, folder) if given.small else shape, given, load, batches)
    transcriber = Transcriber.of_llm(ours.llm)
    for seed in whisper.seeds(load.at_once, load.repeats):
        whisper.noise(load.at_once, seed)
    if given.apart:
        switch(ours, apart=True)
    ours.run(whisper.noise(load.at_once, 1), load.tokens)  # captures what else there is
    hour = folder / "hour.wav"
    spans, chunks, asking = asked(transcriber, 60.0 * given.minutes, small=given.small)
    if name in given.hour:
        wait_for(hour)
        timed(transcriber, hour, spans, asking)
    gc.collect()
    gc.freeze()
    (folder / f"{name}.ready").touch()
    wait_for(folder / f"{name}.go")
    record: Row = {"machine": machine(ours.device), "dtype": given.dtype, "quant": given.quant}

    def measured() -> Row:
        return whisper.figures(ours.run, lambda samples: samples, load.at_once, load, ours.device)

    if given.apart:
        record["apart"] = measured()
        switch(ours, apart=False)
        ours.run(whisper.noise(load.at_once, 1), 1)
        gc.collect()
        gc.freeze()  # as before: a collection takes as long as some steps
    record["windows"] = measured()
    _keep(folder, name, record)
    known = folder / "ceiling.json"
    ceiling = Ceiling(**json.loads(known.read_text(encoding="utf-8"))) if known.exists() else None
    record["limit"] = whisper.limit(ours, load.at_once, load, ceiling)
    known.write_text(json.dumps(record["limit"]["ceiling"]), encoding="utf-8")
    for part in ("apart", "windows"):
        if part in record:
            share = record[part]["windows_per_s"] / record["limit"]["windows_per_s"]
            record[part]["share_of_limit"] = round(share, 4)
    _keep(folder, name, record)
    if name in given.hour:
        runs = [timed(transcriber, hour, spans, asking)[0] for _ in range(given.hours)]
        spent = {key: spread([run[key] for run in runs]) for key in runs[0]}
        record["hour"] = {"chunks": chunks, "tokens_per_chunk": asking["max_new_tokens"], **spent}
        _keep(folder, name, record)


def switch(ours: whisper.Ours, *, apart: bool) -> None:
    """Have the encoder's products end in GELU and residual sums, or leave these to other kernels."""
    if apart:
        layer_products.takes_up = lambda x, weight: False
        EncoderLayer.adds_in_place = lambda self, forward_pass: False
    else:
        layer_products.takes_up, EncoderLayer.adds_in_place = _TAKES, _ADDS
    encoding = ours.llm.executor.runner.encoding
    if encoding._graphs is not None:
        config = ours.llm.engine.manifest.model
        sizes = (ours.llm.engine.model.encoder.longest, config.encoder.max_positions, whisper.GROUP)
        encoding._graphs = None  # its memory goes first
        gc.unfreeze()
        gc.collect()
        encoding._graphs = EncoderGraphs(encoding._keep, *sizes, ours.device)


def _keep(folder: Path, name: str, record: Row) -> None:
    """Replace a shape's record at once, as its reader may come at any time."""
    part = folder / f"{name}.part"
    part.write_text(json.dumps(record), encoding="utf-8")
    part.rename(folder / f"{name}.json")


def options(given: argparse.Namespace, folder: Path) -> list[str]:
    """Of a shape's own process."""
    named = ("minutes", "dtype", "quant", "kv_dtype", "repeats", "hours", "device", "json")
    values = [(f"--{name.replace('_', '-')}", str(getattr(given, name))) for name in named]
    found = [word for pair in values for word in pair] + ["--folder", str(folder)]
    found += ["--hour", *given.hour] if given.hour else []
    return found + ["--small"] * given.small + ["--apart"] * given.apart


def all_shapes(given: argparse.Namespace, folder: Path) -> Row:
    """The record of all shapes, measured one after another."""
    seconds = 60.0 * given.minutes
    started: dict[str, subprocess.Popen[bytes]] = {}
    for name in given.shapes:
        started[name] = subprocess.Popen([sys.executable, __file__, name, *options(given, folder)])
    if given.hour:  # read by the shapes' processes
        write(folder / "part.wav", stretches(seconds), seconds)
        (folder / "part.wav").rename(folder / "hour.wav")
    for name, process in started.items():
        while not (folder / f"{name}.ready").exists() and process.poll() is None:
            time.sleep(WAIT)
    found: Row = {"command": shlex.join(["python", *sys.argv]), "shapes": {}}
    for name, process in started.items():
        (folder / f"{name}.go").touch()
        process.wait()
        record = folder / f"{name}.json"
        found["shapes"][name] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else None
        print(name, json.dumps(found["shapes"][name]), flush=True)
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", choices=whisper.NAMES, nargs="+")
    parser.add_argument("--hour", choices=whisper.NAMES, nargs="*", default=[], help="also an hour of speech")
    parser.add_argument("--minutes", type=float, default=60, help="of the hour")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hours", type=int, default=2, help="timed runs of the hour")
    parser.add_argument(
        "--apart", action="store_true", help="also with GELU and residual sums as kernels of their own"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="narrow layers, few tokens: tries the script")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a shape's own process
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    if given.folder is not None:
        one_shape(given, given.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = all_shapes(given, Path(folder))
    sys.exit(any(record is None for record in found["shapes"].values()))


if __name__ == "__main__":
    main()
