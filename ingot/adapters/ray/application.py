"""What ``serve run`` builds: a front and one deployment for each engine.

Covers the deployments' defaults, which the YAML's ``deployments`` override by name. Reads INGOT_API_KEY, as
the command line does.

    import_path: ingot.adapters.ray.application:build
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from ingot.adapters.ray.front import MOST_OPEN, Front
from ingot.adapters.ray.ray_settings import EngineArgs, RayArgs
from ingot.adapters.ray.replica import EngineReplica
from ingot.adapters.ray.router import PrefixRouter

FRONT = "front"
_ONGOING = 64  # per replica; beyond it requests wait where they can still go elsewhere
_QUEUED = 256  # per front
_HEALTH_SECONDS = 2.0


def build(args: dict[str, Any]) -> serve.Application:
    """The application of a YAML file's ``args``, the fields of ``RayArgs``.

    Raises:
        ConfigError: a value is unknown or out of range.
    """
    found = RayArgs.from_json(args)
    engines = [_engine(found, engine) for engine in found.engines]
    front = serve.deployment(serve.ingress()(Front)).options(
        name=FRONT, max_ongoing_requests=MOST_OPEN, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(found, os.environ.get("INGOT_API_KEY"), *engines)


def _engine(args: RayArgs, engine: EngineArgs) -> serve.Application:
    router = RequestRouterConfig(
        request_router_class=PrefixRouter, request_router_kwargs={"most_ahead": args.most_ahead}
    )
    deployment = serve.deployment(EngineReplica).options(
        name=engine.shown,
        max_ongoing_requests=_ONGOING,
        max_queued_requests=_QUEUED,
        health_check_period_s=_HEALTH_SECONDS,
        request_router_config=router,
    )
    return deployment.bind(engine.shown, engine, args.serve_config(), FRONT)
