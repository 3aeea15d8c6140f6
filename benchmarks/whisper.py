"""Whisper on real shapes with random weights: one window with 50 tokens, 64 windows at once, a decode step.

Windows are 30 seconds of noise, new ones in every run, since an encoder's output is kept. Every one takes
exactly 50 tokens behind the prompt of an English transcript without timestamps, under the transcript's rules
and with log-probabilities, as ``Transcriber`` asks. From raw samples on the host to ids on the host; "first"
is the same with one token. "limit" is what this card allows for all windows at once: the encoder's operations
at the rate of a product of 8192³, then for every token weights, keys and values once at the rate of the
fastest way to read, both measured in the same process. The JSON holds command, machine, spreads and the
seconds of every run. Part "trace" is one profiled run of all windows at once: how long the GPU was busy, and
with what.

    python benchmarks/whisper.py small --json /tmp/small.fp16.json
    python benchmarks/whisper.py tiny --dtype fp32 --against hf --json /tmp/tiny.fp32.json
    python benchmarks/whisper.py large-v3 --quant w8a16 --kv-dtype int8 --parts windows --json /tmp/large.json
    python benchmarks/whisper.py tiny base --dtype fp16 fp32 --parts window --json /tmp/folder

Hugging Face gets log-mel features that are ready on the device, and applies no rules. ``--small`` runs
narrow layers and few tokens anywhere: it tries the script, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ingot import LLM
from ingot.audio.log_mel import WINDOW, features_by
from ingot.config.decoder_config import DecoderConfig
from ingot.config.encoder_config import StackConfig
from ingot.config.runtime_config import RuntimeConfig
from ingot.config.sampling_params import SamplingParams
from ingot.layers.decoder import Decoder
from ingot.measure.bench.ceiling import Ceiling, measure_ceiling
from ingot.measure.side.machine import machine
from ingot.measure.side.step_work import Work, read_bytes
from ingot.measure.side.timed_run import spread
from ingot.models.speech_tokens import SpeechTokens
from ingot.speech.speech_options import TranscribeOptions
from ingot.speech.window_decoding import Vocabulary
from ingot.text.prompt import Input, Prompt

SHAPES = Path(__file__).parent / "shapes"
NAMES = sorted(file.stem.removeprefix("whisper-") for file in SHAPES.glob("whisper-*.json"))
PARTS = ("window", "windows", "step", "trace", "limit")
MOST_KERNELS = 40  # of a trace
TOKENS, AT_ONCE, GROUP = 50, 64, 8  # GROUP windows are read together
FEW = {"tokens": 4, "at_once": 3}  # of --small
NARROW = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_hidden_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    "d_model": 32,
}  # fmt: skip
Row = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """``tokens`` of every window, windows ``at_once``, timed runs."""

    tokens: int
    at_once: int
    repeats: int


class Ours:
    """An engine of a shape, and what asks it."""

    def __init__(
        self, shape: Path, given: argparse.Namespace, load: Load, batches: Sequence[int] = ()
    ) -> None:
        self.llm = LLM.from_config(
            shape,
            given.device,
            dtype=given.dtype,
            runtime=RuntimeConfig(kv_dtype=given.kv_dtype),
            max_batch_size=load.at_once,
            quant=given.quant,
        )
        config = self.llm.engine.manifest.model
        assert config.encoder is not None
        self.mels = config.encoder.features[0]
        tokens = SpeechTokens.of_vocabulary(config.vocab_size)
        self.frame = tokens.prompt("en", "transcribe", timestamps=False)
        vocabulary = Vocabulary.of(tokens, None, config.max_positions)
        self.rules = vocabulary.rules(TranscribeOptions(timestamps=False), framed=len(self.frame) - 1)
        self.llm.warm_up(batches or sorted({1, load.at_once}), kinds=["transcript"])

    @property
    def device(self) -> torch.device:
        return self.llm.engine.device

    def prompts(self, samples: torch.Tensor) -> list[Prompt]:
        """Of windows [N, samples], on the host."""
        features = features_by(self.device, samples, self.mels)
        return [Prompt([Input(one, os.urandom(16)), self.frame]) for one in features]

    def answer(self, prompts: list[Prompt], tokens: int) -> None:
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, logprobs=0, transcript=self.rules)
        found = self.llm.generate(prompts, params)
        assert all(len(one.token_ids) == tokens for one in found)

    def run(self, samples: torch.Tensor, tokens: int) -> None:
        """Windows [N, samples] to ids; each group is answered while the next is read."""
        groups = samples.split(GROUP)
        with ThreadPoolExecutor(len(groups)) as pool:
            asked = [pool.submit(self.answer, self.prompts(group), tokens) for group in groups]
        for one in asked:
            one.result()


class HuggingFace:
    """The class of the same shape, one batch at a time."""

    def __init__(self, shape: Path, ours: Ours, dtype: str) -> None:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        config = WhisperConfig.from_json_file(shape)
        wanted = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.dtype = wanted if ours.device.type == "cuda" else torch.float32
        with ours.device:
            self.model = WhisperForConditionalGeneration(config).eval().to(self.dtype)
        settings = self.model.generation_config
        for name in ("forced_decoder_ids", "suppress_tokens", "begin_suppress_tokens"):
            setattr(settings, name, None)
        self.ours = ours

    def ready(self, samples: torch.Tensor) -> torch.Tensor:
        """Features on the device."""
        return features_by(self.ours.device, samples, self.ours.mels).to(self.dtype)

    @torch.inference_mode()
    def run(self, features: torch.Tensor, tokens: int) -> None:
        ids = torch.tensor([self.ours.frame] * len(features), device=features.device)
        self.model.generate(
            features, decoder_input_ids=ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )


def noise(count: int, seed: int) -> torch.Tensor:
    """New windows."""
    return 0.1 * torch.randn(count, WINDOW, generator=torch.Generator().manual_seed(seed))


def seeds(count: int, repeats: int) -> list[int]:
    """Of the windows of ``figures``: with all tokens and with the first, in turn."""
    return [1000 * count + number for number in range(2 * (repeats + 1))]


def seconds(run: Callable[[Any, int], None], given: Any, tokens: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run(given, tokens)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def figures(
    run: Callable[[Any, int], None],
    ready: Callable[[torch.Tensor], Any],
    count: int,
    load: Load,
    device: torch.device,
) -> Row:
    """Windows ``count`` at once: seconds with all tokens and with the first, one run thrown away."""
    found: Row = {"windows": count, "tokens": load.tokens}
    for name, tokens in (("all", load.tokens), ("first", 1)):
        # All first: making noise takes a while, in which a GPU's clocks fall.
        drawn = [ready(noise(count, seed)) for seed in seeds(count, load.repeats)[name == "first" :: 2]]
        times = [seconds(run, given, tokens, device) for given in drawn]
        spent = spread(times[1:])
        assert spent is not None
        found[f"{name}_s"], found[f"{name}_seconds"] = spent, [round(one, 6) for one in times[1:]]
    found["windows_per_s"] = round(count / found["all_s"]["p50"], 2)
    found["rtfx"] = round(30 * found["windows_per_s"], 1)
    return found


def limit(ours: Ours, count: int, load: Load, ceiling: Ceiling | None = None) -> Row:
    """Seconds that windows ``count`` at once take at the least; see the module. The card's ``ceiling`` is
    measured unless it is given.
    """
    config, model = ours.llm.engine.manifest.model, ours.llm.engine.model
    assert config.encoder is not None
    ceiling = ceiling or measure_ceiling(ours.device, model.dtype)
    operations = count * encoder_operations(config)
    work = Work.of(config, read_bytes(decoder_alone(model)), ours.llm.executor.runner.caches[0].keys.dtype)
    context = config.encoder.max_positions + len(ours.frame) + load.tokens / 2
    step = work.decode_bytes(count, context)
    encode_s = operations / ceiling.matmul_tflop_s / 1e12
    decode_s = load.tokens * step / ceiling.read_gb_s / 1e9
    return {
        "ceiling": ceiling.to_json(), "encoder_tflop": round(operations / 1e12, 3),
        "step_gb": round(step / 1e9, 3), "encode_s": round(encode_s, 5), "decode_s": round(decode_s, 5),
        "windows_per_s": round(count / (encode_s + decode_s), 2),
    }  # fmt: skip


def encoder_operations(config: DecoderConfig) -> float:
    """Of one window: 2 per weight and row of every product, 4 per channel of a pair of positions; with each
    decoder layer's keys and values.
    """
    assert config.encoder is not None
    stack, rows = StackConfig.from_json(config.encoder.settings), config.encoder.max_positions
    size, (mels, _) = stack.hidden_size, config.encoder.features
    layer = 2 * rows * (4 * size**2 + 2 * size * stack.intermediate_size) + 4 * rows**2 * size
    convolutions = 2 * 3 * rows * size * (2 * mels + size)
    return convolutions + stack.num_layers * layer + config.num_layers * 4 * rows * size * config.kv_size


def decoder_alone(model: Decoder) -> Decoder:
    """The parts of a model that a decode step reads: no encoder, no keys and values of its outputs."""
    found = copy.copy(model)
    found._modules = {**model._modules, "encoder": None, "layers": torch.nn.ModuleList()}
    for layer in model.layers:
        alone = copy.copy(layer)
        crossed = copy.copy(layer.encoder_attn)
        crossed._modules = {**crossed._modules, "kv_proj": None}
        alone._modules = {**layer._modules, "encoder_attn": crossed}
        found.layers.append(alone)
    return found


def kernels(ours: Ours, count: int, load: Load) -> list[Row]:
    """Launches and µs of one decode step by kernel, the longest first: what all tokens take more than the
    first alone, of windows whose encoder outputs are kept.
    """
    prompts = ours.prompts(noise(count, seed=7))
    ours.answer(prompts, 1)
    many, one = (_kernel_times(lambda n=n: ours.answer(prompts, n)) for n in (load.tokens, 1))
    steps, rows = load.tokens - 1, []
    for name, (launches, us) in many.items():
        less = one.get(name, (0, 0.0))
        if launches > less[0]:
            launched = {"launches": (launches - less[0]) / steps, "us": round((us - less[1]) / steps, 3)}
            rows.append({"kernel": name[:120], **launched})
    return sorted(rows, key=lambda row: -row["us"])


def _kernel_times(run: Callable[[], None]) -> dict[str, tuple[int, float]]:
    """Launches and µs by kernel: those behind the end of the kernel before, for which one that starts early
    waits.
    """
    found: dict[str, list[float]] = defaultdict(list)
    until = 0.0
    for name, start, end in sorted(_device_spans(run), key=lambda span: span[2]):
        found[name].append(end - max(start, until))
        until = end
    return {name: (len(times), sum(times)) for name, times in found.items()}


def _device_spans(run: Callable[[], None]) -> list[tuple[str, float, float]]:
    """Kernels and copies of a run: name, start and end in µs."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def trace(ours: Ours, count: int, load: Load) -> Row:
    """One run of windows ``count`` at once, with all tokens and with the first: ms that the GPU was busy
    (kernels of several streams at a time count once), and launches and ms by kernel, the longest first.
    """
    found: Row = {}
    for name, tokens in (("all", load.tokens), ("first", 1)):
        samples = noise(count, seed=11 + tokens)
        start = time.perf_counter()
        spans = _device_spans(lambda s=samples, n=tokens: ours.run(s, n))
        found[name] = {"wall_ms": round(1e3 * (time.perf_counter() - start), 1), **busy(spans)}
    return found


def busy(spans: list[tuple[str, float, float]]) -> Row:
    """Of kernels and copies (name, start and end in µs): from the first to the last, the union, the longest
    gaps, and totals by name, in ms.
    """
    until = first = min((start for _, start, _ in spans), default=0.0)
    union, gaps, totals = 0.0, [], defaultdict(lambda: [0, 0.0])
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        if start > until:
            gaps.append(start - until)
        union += max(end - max(start, until), 0.0)
        until = max(until, end)
        totals[name][0] += 1
        totals[name][1] += end - start
    longest = sorted(totals.items(), key=lambda item: -item[1][1])[:MOST_KERNELS]
    return {
        "span_ms": round((until - first) / 1e3, 2),
        "busy_ms": round(union / 1e3, 2),
        "longest_gaps_ms": [round(gap / 1e3, 2) for gap in sorted(gaps)[-12:]],
        "kernels": [
            {"kernel": name[:120], "launches": launches, "ms": round(us / 1e3, 3)}
            for name, (launches, us) in longest
        ],
    }


def measured(given: argparse.Namespace, shape: Path) -> Row:
    """The record of one shape."""
    few = FEW if given.small else {"tokens": TOKENS, "at_once": AT_ONCE}
    load = Load(repeats=given.repeats, **few)
    ours = Ours(shape, given, load)
    gc.collect()
    gc.freeze()  # later collections skip what is loaded: 0.1 s
    record: Row = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(ours.device),
        "shape": given.shape,
        "dtype": given.dtype,
        "quant": given.quant,
        "kv_dtype": given.kv_dtype,
    }
    counts = {"window": 1, "windows": load.at_once}
    for part in (part for part in given.parts if part in counts):
        record[part] = figures(ours.run, lambda samples: samples, counts[part], load, ours.device)
    if "step" in given.parts and ours.device.type == "cuda":
        record["step"] = {str(count): kernels(ours, count, load) for count in counts.values()}
    if "limit" in given.parts and "windows" in record:
        record["limit"] = limit(ours, load.at_once, load)
        share = record["windows"]["windows_per_s"] / record["limit"]["windows_per_s"]
        record["limit"]["share"] = round(share, 4)
    if "trace" in given.parts and ours.device.type == "cuda":
        record["trace"] = trace(ours, load.at_once, load)
    if given.against == "hf":
        theirs = HuggingFace(shape, ours, given.dtype)
        record["hf"] = {
            part: figures(theirs.run, theirs.ready, counts[part], load, ours.device)
            for part in given.parts
            if part in counts
        }
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", choices=NAMES, nargs="+")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), nargs="+", default=["fp16"])
    parser.add_argument("--quant", nargs="+", default=["none"], help="as of `ingot build`")
    parser.add_argument("--kv-dtype", default="auto", help="of the KV cache")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    parser.add_argument("--against", choices=("hf",), default=None, help="measured beside it")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs, after one that is thrown away")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="narrow layers, few tokens: tries the script")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go; of several, a folder")
    given = parser.parse_args()
    several = list(itertools.product(given.shapes, given.dtype, given.quant))
    for shape, dtype, quant in several:
        marks = [word for word in (quant, given.kv_dtype) if word not in ("none", "auto")]
        name = ".".join([shape, dtype, *marks, "json"])
        file = given.json if len(several) == 1 else given.json / name
        one = argparse.Namespace(**{**vars(given), "shape": shape, "dtype": dtype, "quant": quant})
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            config = SHAPES / f"whisper-{shape}.json"
            record = measured(one, narrowed(config, Path(folder)) if given.small else config)
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        show(record)
        gc.unfreeze()
        gc.collect()  # the next model needs the room
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def show(record: Row) -> None:
    """A line of each part that was timed."""
    print(f"{record['shape']}, {record['dtype']}, quant {record['quant']}, cache {record['kv_dtype']}")
    for name, found in [("", record), *(("Hugging Face: ", record[key]) for key in ("hf",) if key in record)]:
        for part in (part for part in ("window", "windows") if part in found):
            row = found[part]
            all_s, first_s = row["all_s"]["p50"], row["first_s"]["p50"]
            rate = row["windows_per_s"]
            print(f"{name}{row['windows']} windows: {all_s:.4f} s, first {first_s:.4f}, {rate}/s")
    if "limit" in record:
        print(json.dumps(record["limit"]))


def narrowed(shape: Path, folder: Path) -> Path:
    """The same with two narrow layers."""
    config = json.loads(shape.read_text(encoding="utf-8")) | NARROW
    found = folder / "config.json"
    found.write_text(json.dumps(config), encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
