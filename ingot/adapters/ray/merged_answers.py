"""One answer to ``/health``, ``/metrics``, ``/version`` and ``/v1/models`` from those of all replicas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response

from ingot.serve.api_errors import unavailable
from ingot.serve.http.http_bodies import json_answer

FACTS = ("/health", "/metrics", "/version", "/v1/models")


@dataclass(frozen=True)
class ReplicaAnswer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


def merged(path: str, found: Mapping[str, Mapping[str, ReplicaAnswer]]) -> Response:
    """The answer to ``GET path`` from those by model and replica: models are listed once, metrics get the
    label ``replica``. Raises ApiError (503) where there is no replica, or for ``/health`` no healthy one of a
    model.
    """
    good = {name: {r: one for r, one in some.items() if one.status == 200} for name, some in found.items()}
    lost = [name for name, some in good.items() if not some]
    if path == "/health" and lost:
        raise unavailable(f"no healthy replica: {', '.join(lost)}", "unhealthy")
    answers = dict(chain.from_iterable(some.items() for some in good.values()))
    if not answers:
        raise unavailable("no replica takes requests", "engine_dead")
    first = next(iter(answers.values()))
    if path == "/v1/models":
        data = {one["id"]: one for answer in answers.values() for one in json.loads(answer.body)["data"]}
        return json_answer({"object": "list", "data": list(data.values())})
    body = generate_latest(_Joined(answers)) if path == "/metrics" else first.body
    return Response(body, headers={"content-type": first.headers[b"content-type"].decode()})


def take_images(models: ReplicaAnswer) -> bool:
    """Whether one of a replica's models takes images, by its answer to ``/v1/models``."""
    if models.status != 200:
        return False
    return any("image" in one["input_modalities"] for one in json.loads(models.body)["data"])


class _Joined:
    """Metrics of several replicas as one registry."""

    def __init__(self, answers: Mapping[str, ReplicaAnswer]) -> None:
        self._answers = answers

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, answer in self._answers.items():
            for family in text_string_to_metric_families(answer.body.decode()):
                empty = Metric(family.name, family.documentation, family.type)
                kept = families.setdefault(family.name, empty)
                for sample in family.samples:
                    kept.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
        return families.values()
