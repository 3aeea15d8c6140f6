"""``/v1/embeddings``."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np

from ingot.serve.api_errors import bad_request
from ingot.serve.engine_calls.answering import Job
from ingot.serve.json_parts import LazyList
from ingot.serve.request_schemas import EmbeddingRequest, prompts_of
from ingot.serve.served_model import ServedModel

MAX_INPUTS = 2048
MAX_TOKENS = 300_000  # of all inputs together


class EmbeddingCall:
    """Inputs whose vectors are wanted; raises ApiError where a value cannot be served. At most as many as the
    engine's batch holds are in flight at once, so that a long list takes no other client's place in the
    queue.
    """

    def __init__(self, model: ServedModel, body: EmbeddingRequest) -> None:
        self._model = model
        self._inputs = prompts_of(body.input, "input")
        self._pooling = body.pooling or "mean"
        self._salt = body.cache_salt or ""
        self._as_base64 = body.encoding_format == "base64"
        if len(self._inputs) > MAX_INPUTS:
            raise bad_request(
                f"input has {len(self._inputs)} entries; at most {MAX_INPUTS} are taken", "input"
            )
        width = model.side.manifest.model.hidden_size
        if body.dimensions not in (None, width):
            text = f"dimensions: this model's vectors have {width}, and cutting them would lose their meaning"
            raise bad_request(f"{text}; leave it out", "dimensions")

    async def answer(self) -> dict[str, Any]:
        """The vectors in the order of the inputs; raises ApiError."""
        engine = self._model.engine
        together = min(len(self._inputs), engine.limits.max_batch_size)
        with engine.places(together):
            jobs = await self._model.in_thread(self._jobs)
            vectors: list[bytes] = []
            for start in range(0, len(jobs), together):
                group = jobs[start : start + together]
                with engine.answering(group, None, by_piece=False) as found:
                    await found.finish()
                vectors += [found.vectors[position] for position in range(len(group))]
            data = await self._model.in_thread(self._data, vectors)
        tokens = sum(len(job.ids) for job in jobs)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        rows = LazyList(lambda: data)
        return {"object": "list", "data": rows, "model": self._model.name, "usage": usage}

    def _jobs(self) -> list[Job]:
        jobs, room = [], MAX_TOKENS
        for position, given in enumerate(self._inputs):
            field = "input" if len(self._inputs) == 1 else f"input[{position}]"
            if not given:  # a tokenizer that begins texts by itself would hide it
                raise bad_request(f"{field} is empty", field)
            ids = self._model.prompt_ids(given, field=field)
            self._model.check_ids(ids, 0, field)
            room -= len(ids)
            if room < 0:
                raise bad_request(f"input has more than {MAX_TOKENS} tokens; send it in parts", "input")
            jobs.append(Job(ids, None, pooling=self._pooling, salt=self._salt))
        return jobs

    def _data(self, vectors: list[bytes]) -> list[dict[str, Any]]:
        """Entries with their vectors as JSON already: Python's floats would take ten times the room."""

        def encode(vector: bytes) -> bytes:
            if self._as_base64:
                return b'"' + base64.b64encode(vector) + b'"'
            return msgspec.json.encode(np.frombuffer(vector, "<f4").tolist())

        return [
            {"object": "embedding", "index": index, "embedding": msgspec.Raw(text)}
            for index, text in enumerate(map(encode, vectors))
        ]
