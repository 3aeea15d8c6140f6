"""The speech model that ships on a CPU: Ingot beside openai-whisper, with the same weights and threads.

Both transcribe the same recording greedily in English, in turn, in one process. A run is from samples to the
transcript; its seconds of wall and of CPU time are kept, and whether both found the same tokens. The least of
each side are compared, since whatever else runs on the machine only adds.

    pip install openai-whisper
    python benchmarks/whisper_beside_openai.py --json docs/results/whisper/pocket.openai.cpu.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot.audio.recording_samples import read_audio
from ingot.checkpoint.openai_whisper import names_of
from ingot.measure.side.machine import machine
from ingot.speech.transcriber import Transcriber

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "pocket-whisper"
TALK = ROOT / "examples" / "speech" / "talk.ogg"
_LIMITS = ("num_mel_bins", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers")
_TEXT_LIMITS = ("vocab_size", "max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers")


def openai_model(folder: Path) -> Any:
    """openai-whisper's model with the weights and the vocabulary of a Hugging Face folder, in fp32."""
    here = Path(__file__).parent.resolve()  # its whisper.py is another one
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    import tiktoken
    from whisper import decoding, transcribe
    from whisper.model import Linear, ModelDimensions, Whisper
    from whisper.tokenizer import Tokenizer

    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    held = json.loads((folder / "tokenizer.json").read_text())
    letters = {letter: byte for byte, letter in _letters().items()}
    ranks = {bytes(letters[letter] for letter in word): i for word, i in held["model"]["vocab"].items()}
    specials = {one["content"]: one["id"] for one in held["added_tokens"]}
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    encoding = tiktoken.Encoding("own", pat_str=words, mergeable_ranks=ranks, special_tokens=specials)

    class Own(Whisper):  # type: ignore[misc]
        is_multilingual, num_languages = True, 1

    @cache
    def own_tokenizer(
        multilingual: bool, *, num_languages: int = 1, language: str = "en", task: str = "transcribe"
    ) -> Any:
        return Tokenizer(encoding, num_languages=1, language=language, task=task)

    decoding.get_tokenizer = transcribe.__globals__["get_tokenizer"] = own_tokenizer
    model = Own(ModelDimensions(*(config[name] for name in (*_LIMITS, *_TEXT_LIMITS))))
    for half, blocks in (("encoder", model.encoder.blocks), ("decoder", model.decoder.blocks)):
        for block in blocks:  # the original's are always four times as wide
            sizes = config["d_model"], config[f"{half}_ffn_dim"]
            block.mlp = nn.Sequential(Linear(*sizes), nn.GELU(), Linear(*sizes[::-1]))
    theirs = {own: stored[name] for name, own in names_of(model.state_dict()).items()}
    model.load_state_dict({name: tensor.float() for name, tensor in theirs.items()})
    return model.eval()


def _letters() -> dict[int, str]:
    """The letter that stands for each byte in byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def timed(work: Callable[[], list[int]]) -> tuple[float, float, list[int]]:
    """Seconds of wall and of CPU time, and the tokens."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return time.perf_counter() - wall, time.process_time() - cpu, found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1000.0, help="of the recording")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    samples = read_audio(TALK)[: round(16000 * flags.seconds)]
    ours, theirs = Transcriber(MODEL, "cpu", compute_dtype="fp32"), openai_model(MODEL)

    def ingot() -> list[int]:
        return [i for one in ours(samples, language="en", temperatures=0.0).segments for i in one.tokens]

    def openai() -> list[int]:
        found = theirs.transcribe(samples, language="en", temperature=0.0, fp16=False)
        return [i for one in found["segments"] for i in one["tokens"]]

    sides: dict[str, Callable[[], list[int]]] = {"ingot": ingot, "openai-whisper": openai}
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    tokens = {name: timed(work)[2] for name, work in sides.items()}  # and warm
    for _ in range(flags.repeats):
        for name, work in sides.items():
            runs[name].append(timed(work)[:2])
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(torch.device("cpu")),
        "versions": {name: version(name) for name in ("torch", "openai-whisper")},
        "audio_seconds": len(samples) / 16000,
        "threads": flags.threads,
        "same_tokens": tokens["ingot"] == tokens["openai-whisper"],
        "tokens": len(tokens["ingot"]),
    }
    for name, found in runs.items():
        walls, cpus = zip(*found, strict=True)
        record[name] = {"seconds": min(walls), "median": statistics.median(walls), "cpu_seconds": min(cpus)}
        record[name]["runs"] = [[round(value, 4) for value in pair] for pair in found]
    for kind in ("seconds", "cpu_seconds"):
        record[f"ratio_{kind}"] = record["ingot"][kind] / record["openai-whisper"][kind]
    print(json.dumps(record, indent=1))
    if flags.json:
        flags.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
