"""What ``serve run`` builds: a front and one deployment for each engine."""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from ingot.adapters.ray.front import MOST_OPEN, Front
from ingot.adapters.ray.ray_settings import RayArgs
from ingot.adapters.ray.replica import EngineReplica
from ingot.adapters.ray.router import PrefixRouter

FRONT = "front"
_ONGOING = 64  # per replica; beyond it requests wait where they can still go elsewhere
_QUEUED = 256  # per front
_HEALTH_SECONDS = 2.0


def build(args: dict[str, Any]) -> serve.Application:
    """The application of a YAML file's ``args``, the fields of ``RayArgs``, and INGOT_API_KEY; raises
    ConfigError where a value is unknown or out of range.
    """
    found = RayArgs.from_json(args)
    engines = []
    for engine in found.engines:
        router = RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"most_ahead": found.most_ahead}
        )
        deployment = serve.deployment(EngineReplica).options(
            name=engine.shown,
            max_ongoing_requests=_ONGOING,
            max_queued_requests=_QUEUED,
            health_check_period_s=_HEALTH_SECONDS,
            request_router_config=router,
        )
        engines.append(deployment.bind(engine.shown, engine, found.serve_config(), FRONT))
    front = serve.deployment(serve.ingress()(Front)).options(
        name=FRONT, max_ongoing_requests=MOST_OPEN, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(found, os.environ.get("INGOT_API_KEY"), *engines)
