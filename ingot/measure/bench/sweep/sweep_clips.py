"""The points of one precision of a speech model: clips, batch after batch.

Owns the order of measuring, and the memory that a side takes. Knows no files and no other precision.

    for update in clip_points("fp16", spec, (1, 2), TranscriptionBench(), check): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ingot.device import dtype_name, resolve_device
from ingot.measure.bench.ceiling import measure_ceiling
from ingot.measure.bench.doubts import doubts
from ingot.measure.bench.transcription_speed import TranscriptionBench, measure_transcribing, speech_tokens
from ingot.measure.side.machine import Memory, forget_peak, peak_bytes
from ingot.measure.side.side_spec import SideSpec
from ingot.measure.side.transcribers import (
    HuggingFaceSpeechSide,
    IngotSpeechSide,
    SpeechSide,
    open_speech_side,
)
from ingot.memory.memory_sizes import encoded_position_bytes, kv_bytes_per_token

Progress = dict[str, Any]


def clip_points(
    name: str,
    spec: SideSpec,
    batches: Sequence[int],
    shape: TranscriptionBench,
    check: Callable[[dict[str, Any]], None],
) -> Iterator[Progress]:
    """What becomes known, as of any line of a sweep: ``batch``, ``say``, ``point``.

    Args:
        check: gets the facts of what was loaded.

    Raises:
        IngotError: the model cannot be loaded, or takes no speech.
    """
    tokens, device = speech_tokens(spec), resolve_device(spec.device)
    yield {"batch": batches[0]}
    yield {"say": f"{name}: loading"}
    with open_speech_side(spec, batches[0]) as side:
        check(side.facts())
        yield {"say": f"{name}: the machine's ceiling"}
        ceiling = measure_ceiling(device, side.dtype).to_json()
        for batch in batches:
            yield {"batch": batch}
            yield {"say": f"{name}: batch {batch}"}
            side.resize(batch)
            forget_peak(device)
            side.warm_up()
            (entry,) = measure_transcribing(side, shape.replace(batches=(batch,)), tokens)
            known = {"dtype": dtype_name(side.dtype), "facts": _facts(side), "ceiling": ceiling}
            point = {"figures": entry, "memory": _memory(side, spec).to_json()}
            yield {"point": point | known | {"doubts": doubts([entry])}}


def _facts(side: SpeechSide) -> dict[str, Any]:
    peak = peak_bytes(side.device) if side.device.type == "cuda" else None
    return side.facts() | ({} if peak is None else {"peak_gpu_gb": round(peak / 1e9, 3)})


def _memory(side: SpeechSide, spec: SideSpec) -> Memory:
    """The caches of a class are computed: those of a batch of whole windows and longest texts."""
    peak = peak_bytes(side.device)
    if isinstance(side, IngotSpeechSide):
        held = side.llm.executor.runner.caches
        caches = [cache for one in held for cache in (one, one.encoded) if cache is not None]
        return Memory(_bytes(side.llm.engine.model), sum(cache.nbytes for cache in caches), peak)
    assert isinstance(side, HuggingFaceSpeechSide)
    config, dtype = spec.config(), side.dtype
    assert config.encoder is not None
    window = config.max_positions * kv_bytes_per_token(config, dtype)
    window += config.encoder.max_positions * encoded_position_bytes(config, dtype, dtype)
    return Memory(_bytes(side.model), side.batch * window, peak)


def _bytes(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())
