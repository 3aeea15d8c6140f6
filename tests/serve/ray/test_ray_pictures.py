"""Pictures behind Ray Serve reach a replica's engine as they reach a server's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recipes.vision.draw import draw, png
from recipes.vision.scenes import held_out_scene
from tests.serve.client import Reply
from tests.serve.ray.served import RayServer, ray_served
from tests.vision.conftest import COLOUR, POCKET, image, url_of

pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt '.[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayServer]:
    engine = {"path": str(POCKET), "name": "vision", "unproven": True, "threads": 1, "max_batch_size": 4}
    application = {
        "name": "ingot",
        "route_prefix": "/",
        "import_path": "ingot.adapters.ray.application:build",
        "args": {"engines": [engine]},
        "deployments": [{"name": "vision", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}}],
    }
    with ray_served({"applications": [application]}, tmp_path_factory.mktemp("ray")) as found:
        yield found


def ask(server: RayServer, url: str, more: str = "") -> Reply:
    content = [image(url), {"type": "text", "text": COLOUR}]
    body = {"model": "vision", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return server.post("/v1/chat/completions", {**body, "temperature": 0, "unread": more})


def test_pictures(server: RayServer) -> None:
    (scene,) = draw([held_out_scene(1)])
    for more in ("", "y" * (12 << 20)):
        reply = ask(server, url_of(png(scene)), more)
        assert reply.json["choices"][0]["message"]["content"].strip() == "orange"
    refused = ask(server, "https://example.com/cat.png")
    assert refused.status == 400
    assert "nothing is fetched" in refused.error["message"]
