"""Speed of questions about pictures: the encoder, the first token, whole answers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from ingot.config.decoder_config import DecoderConfig
from ingot.config.json_config import JsonConfig
from ingot.config.modality import PICTURE
from ingot.config.sampling_params import SamplingParams
from ingot.device import on_device
from ingot.errors import ConfigError
from ingot.layers.encoder_pass import EncoderPass
from ingot.llm import LLM
from ingot.measure.bench.ceiling import Ceiling, measure_ceiling
from ingot.measure.bench.doubts import doubts
from ingot.measure.side.ingot_side import IngotSide
from ingot.measure.side.open_side import Say, silent
from ingot.measure.side.side_spec import HUGGINGFACE, SideSpec
from ingot.measure.side.timed_run import Run, median, spread
from ingot.measure.side.token_load import check_counts
from ingot.text.prompt import Input, Prompt

BEFORE = 105  # of the original's 141 tokens around a picture: system text and "###Human: <Img>"


@dataclass(frozen=True)
class CaptionBench(JsonConfig):
    """All pictures, for each batch size, ``repeats`` times.

    Attributes:
        batches: pictures that are answered at once; the others wait.
        prompt_tokens: around each picture.
    """

    verb: ClassVar[str] = "caption"
    method: ClassVar[str] = (
        "pixels of random values, decoding of files not counted; the text is the same in all prompts; "
        "greedy, a fixed number of tokens with the end token suppressed; the encoder from pixels on the "
        "device"
    )
    compared: ClassVar[tuple[str, ...]] = ("batch", "seconds", "ttft", "encoder")
    pictures: int = 40
    batches: tuple[int, ...] = (1, 40)
    prompt_tokens: int = 141
    new_tokens: int = 80
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(pictures=self.pictures, repeats=self.repeats, batch=min(self.batches))
        check_counts(prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens)

    def longest(self, config: DecoderConfig) -> int:
        """Tokens of a request."""
        assert config.encoder is not None
        return self.prompt_tokens + config.encoder.max_positions + self.new_tokens


def measure_captioning(
    side: IngotSide, wanted: CaptionBench, say: Say = silent, name: str = ""
) -> list[dict[str, Any]]:
    """One entry per batch size.

    ``seconds``: of all pictures, of each turn. ``pictures_per_s``, ``output_tokens_per_s``: of the median
    turn. ``ttft_ms``: from the call that brings a batch, of each request of each turn. ``encoder_ms``: of a
    batch's pictures through the encoder alone; ``encoder_pictures_per_s`` of the median. ``stages_ms``: its
    parts; each is waited for, so their sum is larger.
    """
    entries = []
    for batch in wanted.batches:
        say(f"{name}: batch {batch}, warming up")
        _turn(side, wanted, batch, seed=-1)
        turns = []
        for repeat in range(wanted.repeats):
            say(f"{name}: batch {batch}, run {repeat + 1} of {wanted.repeats}")
            turns.append(_turn(side, wanted, batch, seed=repeat))
        say(f"{name}: batch {batch}, the encoder")
        encoder = _encoder_figures(side.llm, min(batch, wanted.pictures), wanted)
        entries.append(_entry(batch, turns, wanted) | encoder)
    return entries


def measure_pictures(
    spec: SideSpec, wanted: CaptionBench, ceiling: Ceiling | None, say: Say = silent
) -> tuple[dict[str, Any], Ceiling]:
    """Open one side, warm it up and measure it, after the machine's ceiling if none is given."""
    say(f"loading {spec.title}")
    with IngotSide(spec) as side:
        longest = wanted.longest(side.llm.engine.manifest.model)
        if longest > side.max_seq_len:
            raise ConfigError(
                "prompt, picture and answer are longer than the engine's requests",
                seen=f"{longest} tokens",
                allowed=f"at most {side.max_seq_len}",
                field="prompt_tokens",
                fix="fewer `prompt_tokens` or `new_tokens`, or an engine with a larger `max_seq_len`",
            )
        most = min(max(wanted.batches), wanted.pictures)
        side.make_room(most, longest)
        if ceiling is None:
            say("the machine's ceiling")
            ceiling = measure_ceiling(side.device, side.dtype)
        say(f"warming up {spec.title}")
        side.warm_up(most)
        results = measure_captioning(side, wanted, say, spec.title)
        record = {"name": spec.title, "spec": spec.to_json(), "facts": side.facts(), "results": results}
    steady = [{name: entry[name] for name in ("batch", "seconds")} for entry in results]
    return record | {"doubts": doubts(steady)}, ceiling


def check_pictures(spec: SideSpec, config: DecoderConfig) -> None:
    """Refuse Hugging Face's class and models that take no pictures, before anything is loaded."""
    if spec.kind == HUGGINGFACE:
        what = "Hugging Face has no class of MiniGPT-4 to compare with"
        raise ConfigError(what, seen="hf", field="against", fix="`against=ENGINE`")
    if config.modality is not PICTURE:
        what = "bench caption needs a model of pictures"
        raise ConfigError(what, seen=config.modality.model, field="engine", fix="an engine of MiniGPT-4")


def _turn(side: IngotSide, wanted: CaptionBench, batch: int, seed: int) -> list[Run]:
    """All pictures once, a run per batch; each turn has new pictures, so that none is cached."""
    params = SamplingParams(max_new_tokens=wanted.new_tokens, ignore_eos=True)
    turn = []
    for first in range(0, wanted.pictures, batch):
        count = min(batch, wanted.pictures - first)
        prompts = _prompts(side.llm, wanted, count, (wanted.seed, seed, first, batch))
        arrivals: list[list[float]] = [[] for _ in prompts]
        begun = time.perf_counter()
        for position, piece in side.llm.stream_many(prompts, params):
            arrivals[position] += [time.perf_counter()] * len(piece.token_ids)
        turn.append(Run.of(begun, arrivals, time.perf_counter()))
    return turn


def _prompts(llm: LLM, wanted: CaptionBench, count: int, seed: Sequence[int]) -> list[Any]:
    config = llm.engine.manifest.model
    ids = torch.randint(
        3, config.vocab_size, (wanted.prompt_tokens,), generator=torch.Generator().manual_seed(wanted.seed)
    ).tolist()
    before = min(BEFORE, wanted.prompt_tokens - 1)
    parts = [part for part in (ids[:before], ids[before:]) if part]
    return [Prompt([*parts[:-1], Input(one), parts[-1]]) for one in _pictures(config, count, seed)]


def _pictures(config: DecoderConfig, count: int, seed: Sequence[int]) -> torch.Tensor:
    """[count, 3, side, side] of normal values, on the CPU."""
    assert config.encoder is not None
    generator = torch.Generator().manual_seed(hash(tuple(seed)) & (1 << 62) - 1)
    return torch.randn(count, *map(int, config.encoder.features), generator=generator)


def _entry(batch: int, turns: Sequence[list[Run]], wanted: CaptionBench) -> dict[str, Any]:
    seconds = [sum(run.seconds for run in turn) for turn in turns]
    middle, tokens = median(seconds), wanted.pictures * wanted.new_tokens
    first = [one for turn in turns for run in turn for one in run.ttft_s]
    return {
        "batch": batch,
        "seconds": spread(seconds),
        "pictures_per_s": round(wanted.pictures / middle, 3),
        "ttft_ms": spread(first, 1e3),
        "tokens": tokens,
        "output_tokens_per_s": round(tokens / middle, 1),
    }


@torch.inference_mode()
def _encoder_figures(llm: LLM, count: int, wanted: CaptionBench) -> dict[str, Any]:
    """The encoder's figures for ``count`` pictures at once, without any request."""
    device, model = llm.engine.device, llm.engine.model
    forward_pass = EncoderPass(fused=device.type == "cuda")
    with on_device(device):
        pixels = _pictures(model.config, count, (wanted.seed, 7)).to(device, model.encoder_dtype)
        encode = partial(model.encode, pixels, forward_pass)
        encode()
        whole = [_timed(encode, device) for _ in range(wanted.repeats)]
        assert isinstance(model.encoder, nn.Module)
        with _stages(model.encoder, device) as parts:
            for _ in range(wanted.repeats):
                encode()
    return {
        "encoder_ms": spread(whole, 1e3),
        "encoder_pictures_per_s": round(count / median(whole), 1),
        "stages_ms": {name: spread(times, 1e3) for name, times in parts.items()},
    }


def _timed(call: Any, device: torch.device) -> float:
    _wait(device)
    begun = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _stages(encoder: nn.Module, device: torch.device) -> Iterator[dict[str, list[float]]]:
    """Seconds of each of an encoder's parts, per call."""
    found: dict[str, list[float]] = defaultdict(list)
    begun: dict[str, float] = {}

    def before(name: str) -> None:
        _wait(device)
        begun[name] = time.perf_counter()

    def after(name: str) -> None:
        _wait(device)
        found[name].append(time.perf_counter() - begun[name])

    handles = []
    for name, part in encoder.named_children():
        handles.append(part.register_forward_pre_hook(lambda *_, name=name: before(name)))
        handles.append(part.register_forward_hook(lambda *_, name=name: after(name)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
