"""Whisper's published shapes on a CPU with random weights: Ingot in each scheme beside faster-whisper's int8.

Both sides hear windows of 30 seconds of noise, new ones in every run, as raw samples, and draw exactly 50
tokens of each behind the prompt of an English transcript, greedily. faster-whisper's side is its feature
extractor and its engine, CTranslate2; it runs where ``--beside`` names a folder of packages that holds
faster-whisper, and needs Transformers to convert the weights. Both sides take turns, ``--rounds`` times;
"all" is a run with every token, "first" one with a single token, which is the encoder and the prompt. Shapes
that a JSON file has from an earlier run stay in it.

    pip install --target /tmp/beside faster-whisper==1.2.1
    python benchmarks/whisper_cpu_race.py tiny base small --beside /tmp/beside --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.side_process import last_line
from benchmarks.whisper import NAMES, SHAPES, Load, Ours, noise
from ingot.measure.side.machine import machine
from ingot.models.speech_tokens import SpeechTokens

SCHEMES = ("none", "w8a16", "w8a8", "w4a16")
TOKENS = 50
Run = Callable[[torch.Tensor, int], None]


def ingot_side(given: argparse.Namespace) -> Run:
    options = argparse.Namespace(device="cpu", dtype="auto", kv_dtype="auto", quant=given.one)
    with_windows = Load(tokens=TOKENS, at_once=max(given.windows), repeats=1)
    return Ours(SHAPES / f"whisper-{given.shapes[0]}.json", options, with_windows).run


def faster_whisper_side(given: argparse.Namespace) -> Run:
    import ctranslate2
    from faster_whisper.feature_extractor import FeatureExtractor

    model = ctranslate2.models.Whisper(
        str(given.converted), "cpu", compute_type="int8", intra_threads=given.threads
    )
    config = json.loads((SHAPES / f"whisper-{given.shapes[0]}.json").read_text(encoding="utf-8"))
    features = FeatureExtractor(feature_size=config["num_mel_bins"])
    frame = SpeechTokens.of_vocabulary(config["vocab_size"]).prompt("en", "transcribe", timestamps=False)

    def run(samples: torch.Tensor, tokens: int) -> None:
        mels = torch.stack([torch.from_numpy(features(one.numpy())[:, :3000]) for one in samples])
        encoded = model.encode(ctranslate2.StorageView.from_array(mels.float().contiguous().numpy()))
        found = model.generate(
            encoded,
            [list(frame)] * len(samples),
            beam_size=1,
            max_length=max(2 * tokens, len(frame) - 1 + tokens),  # half of it at most is new
            suppress_blank=False,
            suppress_tokens=[config["eos_token_id"]],
            return_scores=True,
        )
        for one in found:
            assert len(one.sequences_ids[0]) == tokens, len(one.sequences_ids[0])

    return run


def convert(shape: str, folder: Path) -> None:
    """A random model of the shape as CTranslate2's int8 files."""
    import ctranslate2
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig.from_json_file(SHAPES / f"whisper-{shape}.json")
    with tempfile.TemporaryDirectory() as source:
        WhisperForConditionalGeneration(config).save_pretrained(source)
        ctranslate2.converters.TransformersConverter(source).convert(str(folder), quantization="int8")
    # CTranslate2 looks its special tokens up by their words; there is no tokenizer beside random weights.
    tokens = SpeechTokens.of_vocabulary(config.vocab_size)
    words = [f"w{token}" for token in range(config.vocab_size)]
    words[tokens.end], words[tokens.start] = "<|endoftext|>", "<|startoftranscript|>"
    words[tokens.no_timestamps], words[tokens.transcribe] = "<|notimestamps|>", "<|transcribe|>"
    words[tokens.no_speech] = "<|nospeech|>"
    (folder / "vocabulary.json").write_text(json.dumps(words), encoding="utf-8")


def timed(run: Run, windows: Sequence[int]) -> dict[str, dict[str, float]]:
    """Milliseconds by number of windows: the least of three runs with all tokens and with the first."""
    found: dict[str, dict[str, float]] = {}
    for count in windows:
        times: dict[str, list[float]] = {"all_ms": [], "first_ms": []}
        for turn in range(4):
            for name, tokens in (("all_ms", TOKENS), ("first_ms", 1)):
                samples = noise(count, seed=100 * count + 2 * turn + tokens % 2)
                start = time.perf_counter()
                run(samples, tokens)
                times[name].append(1e3 * (time.perf_counter() - start))
        found[str(count)] = {name: min(values[1:]) for name, values in times.items()}
        found[str(count)]["step_ms"] = (found[str(count)]["all_ms"] - found[str(count)]["first_ms"]) / (
            TOKENS - 1
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", choices=NAMES, nargs="+")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--beside", type=Path, help="a folder of packages with faster-whisper")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a side's own process
    parser.add_argument("--converted", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.one == "convert":
        convert(given.shapes[0], given.converted)
    elif given.one is not None:
        side = faster_whisper_side if given.one == "faster-whisper" else ingot_side
        print(json.dumps(timed(side(given), given.windows)))
    else:
        report({shape: race(shape, given) for shape in given.shapes}, given)


def race(shape: str, given: argparse.Namespace) -> dict[str, Any]:
    """Medians of the rounds, by side, number of windows and figure."""
    runs: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / "model"
        if given.beside:
            child(shape, "convert", converted, given)
        for _ in range(given.rounds):
            for side in (*(["faster-whisper"] if given.beside else []), *given.schemes):
                runs.setdefault(side, []).append(json.loads(child(shape, side, converted, given)))
    return {
        side.replace("-", "_"): {
            count: {name: round(statistics.median(run[count][name] for run in found), 2) for name in figures}
            for count, figures in found[0].items()
        }
        for side, found in runs.items()
    }


def child(shape: str, side: str, converted: Path, given: argparse.Namespace) -> str:
    """The last line that a process of this side prints; its memory and threads are its own."""
    words = [sys.executable, __file__, shape, "--one", side, "--converted", str(converted)]
    words += ["--threads", str(given.threads), "--windows", *map(str, given.windows)]
    if side not in ("convert", "faster-whisper"):
        return last_line(side, words)
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(given.beside)])
    return last_line(side, words, {"PYTHONPATH": path})


def report(found: dict[str, Any], given: argparse.Namespace) -> None:
    for shape, sides in found.items():
        for side, counts in sides.items():
            for count, figures in counts.items():
                words = "  ".join(f"{name} {value:9.2f}" for name, value in figures.items())
                print(f"{shape:<6} {side:<15} {count:>2} windows  {words}")
    if given.json:
        before = json.loads(given.json.read_text(encoding="utf-8")) if given.json.exists() else {}
        run = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": machine(torch.device("cpu")),
            "threads": given.threads,
            "rounds": given.rounds,
            "load_average": round(os.getloadavg()[1], 2),
        }
        result = {
            "tokens": TOKENS,
            "runs": before.get("runs", {}) | dict.fromkeys(found, run),
            "shapes": before.get("shapes", {}) | found,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
