"""Requests to a model in Triton Inference Server, each over a gRPC stream of its own, all at once.

Runs in an environment with ``tritonclient[grpc]`` and needs nothing of Ingot. Prints what came as JSON: for
each request its text, the responses' times (``time.monotonic``) and tokens, how it ended, and when it was
cancelled.

    python triton_client.py '{"url": "localhost:8001", "model": "m", "requests": [{"text_input": "A"}]}'
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

EXTRAS = ("finish_reason", "num_input_tokens", "num_output_tokens")


def inputs(asked: dict[str, Any]) -> list[triton.InferInput]:
    """The tensors of a request: its text, that it streams, its sampling values, and all extra outputs."""
    values: dict[str, object] = {
        "text_input": asked["text_input"].encode(),
        "stream": asked.get("stream", True),
    }
    values["sampling_parameters"] = json.dumps(asked.get("values", {})).encode()
    values |= {f"return_{name}": True for name in (EXTRAS if asked.get("extras") else EXTRAS[2:])}
    found = []
    for name, value in values.items():
        is_text = isinstance(value, bytes)
        tensor = triton.InferInput(name, [1], "BYTES" if is_text else "BOOL")
        tensor.set_data_from_numpy(np.array([value], dtype=object if is_text else bool))
        found.append(tensor)
    return found


async def one_stream(
    client: triton.InferenceServerClient, model: str, asked: dict[str, Any]
) -> dict[str, Any]:
    """Send one request and read it to its end; ``cancel_after``: give it up after so many responses."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        await asyncio.sleep(asked.get("delay", 0.0))
        answer["asked"] = time.monotonic()
        yield {"model_name": model, "inputs": inputs(asked), "enable_empty_final_response": True}
        await ended.wait()

    ended = asyncio.Event()
    answer: dict[str, Any] = {"text": "", "times": [], "tokens": [], "finish_reason": None, "error": None}
    stream = client.stream_infer(requests())
    try:
        async for result, error in stream:
            if error is not None:
                answer["error"] = error.message()
                break
            answer["text"] += take(result, answer)
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
            if len(answer["times"]) == asked.get("cancel_after"):
                answer["cancelled"] = time.monotonic()
                stream.cancel()
                break
    except InferenceServerException as error:
        answer["error"] = error.message()
    ended.set()
    return answer


def take(result: triton.InferResult, answer: dict[str, Any]) -> str:
    """The text of a response; its time, tokens and finish reason go into ``answer``."""
    text = result.as_numpy("text_output")
    if text is None:
        return ""
    answer["times"].append(time.monotonic())
    answer["tokens"].append(int(result.as_numpy("num_output_tokens")[0]))
    for name in EXTRAS[:2]:
        extra = result.as_numpy(name)
        if extra is not None:
            answer[name] = extra[0].decode() if extra.dtype == object else int(extra[0])
    return str(text[0].decode())


async def main(spec: dict[str, Any]) -> list[dict[str, Any]]:
    async with triton.InferenceServerClient(spec["url"]) as client:
        streams = (one_stream(client, spec["model"], asked) for asked in spec["requests"])
        return await asyncio.gather(*streams)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.loads(sys.argv[1])))))
