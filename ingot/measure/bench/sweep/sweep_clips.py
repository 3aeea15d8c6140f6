"""The points of one precision of a model that hears: clips, batch after batch.

Owns the order of measuring, and the memory that a listener takes. Knows no files and no other precision.

    for told in clip_points("fp16", spec, (1, 2), Transcribing(), check): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ingot.device import dtype_name, resolve_device
from ingot.measure.bench.ceiling import measure_ceiling
from ingot.measure.bench.doubts import doubts
from ingot.measure.bench.transcription_speed import Transcribing, measure_transcribing, speech_tokens
from ingot.measure.side.machine import Memory, forget_peak, peak_bytes
from ingot.measure.side.side_spec import SideSpec
from ingot.measure.side.transcribers import (
    ClassListener,
    IngotListener,
    Listener,
    open_listener,
)
from ingot.memory.memory_sizes import encoded_position_bytes, kv_bytes_per_token

Told = dict[str, Any]


def clip_points(
    name: str,
    spec: SideSpec,
    batches: Sequence[int],
    shape: Transcribing,
    check: Callable[[dict[str, Any]], None],
) -> Iterator[Told]:
    """What becomes known, as of any line of a sweep: ``batch``, ``say``, ``point``.

    Args:
        check: told the facts of what was loaded.

    Raises:
        IngotError: the model cannot be loaded, or takes no speech.
    """
    tokens, device = speech_tokens(spec), resolve_device(spec.device)
    yield {"batch": batches[0]}
    yield {"say": f"{name}: loading"}
    with open_listener(spec, batches[0]) as listener:
        check(listener.facts())
        yield {"say": f"{name}: the machine's ceiling"}
        ceiling = measure_ceiling(device, listener.dtype).to_json()
        for batch in batches:
            yield {"batch": batch}
            yield {"say": f"{name}: batch {batch}"}
            listener.resize(batch)
            forget_peak(device)
            listener.warm_up()
            (entry,) = measure_transcribing(listener, shape.replace(batches=(batch,)), tokens)
            known = {"dtype": dtype_name(listener.dtype), "facts": _facts(listener), "ceiling": ceiling}
            point = {"figures": entry, "memory": _memory(listener, spec).to_json()}
            yield {"point": point | known | {"doubts": doubts([entry])}}


def _facts(listener: Listener) -> dict[str, Any]:
    peak = peak_bytes(listener.device) if listener.device.type == "cuda" else None
    return listener.facts() | ({} if peak is None else {"peak_gpu_gb": round(peak / 1e9, 3)})


def _memory(listener: Listener, spec: SideSpec) -> Memory:
    """The caches of a class are computed: those of a batch of whole windows and longest texts."""
    peak = peak_bytes(listener.device)
    if isinstance(listener, IngotListener):
        held = listener.llm.executor.runner.caches
        caches = [cache for one in held for cache in (one, one.encoded) if cache is not None]
        return Memory(_bytes(listener.llm.engine.model), sum(cache.nbytes for cache in caches), peak)
    assert isinstance(listener, ClassListener)
    config, dtype = spec.config(), listener.dtype
    assert config.encoder is not None
    window = config.max_positions * kv_bytes_per_token(config, dtype)
    window += config.encoder.max_positions * encoded_position_bytes(config, dtype, dtype)
    return Memory(_bytes(listener.model), listener.batch * window, peak)


def _bytes(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())
