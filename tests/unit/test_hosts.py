"""Which hosts and origins a server accepts, by the address that it listens on."""

from __future__ import annotations

import pytest

from ingot.config.allowed_hosts import HostRule, check_names
from ingot.config.server_config import ServeConfig
from ingot.errors import ConfigError

LOOPBACK = HostRule.of("127.0.0.1", ["Chat.example.com"])
OPEN = HostRule.of("0.0.0.0")
NAMED = HostRule.of("::", ["chat.example.com"])

LOCAL_HOSTS = ("localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:8000")
OTHER_HOSTS = (
    "evil.example",
    "notlocalhost",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.example",
)
BROKEN_HOSTS = ("", ":8000", "localhost:x", "evil@localhost", "localhost/a", "localhost#", "[::1", "a b")


@pytest.mark.parametrize("host", [*LOCAL_HOSTS, "chat.example.com", "chat.example.com.:443", None])
def test_loopback_takes_local_names_and_those_allowed(host: str | None) -> None:
    assert LOOPBACK.refusal(host, None) is None
    assert NAMED.refusal(host, None) is None


@pytest.mark.parametrize("host", [*OTHER_HOSTS, *BROKEN_HOSTS])
def test_other_names_are_refused(host: str) -> None:
    for rule in (LOOPBACK, NAMED):
        reported = rule.refusal(host, None)
        assert reported is not None
        assert "allowed_host" in reported


@pytest.mark.parametrize("host", ["192.168.1.5:8000", "[fe80::1]:8000", "127.0.0.2"])
def test_addresses_are_taken_beyond_loopback_alone(host: str) -> None:
    """No page has an address for its name; on loopback there is no other address than the own ones."""
    assert LOOPBACK.refusal(host, None) is not None
    assert NAMED.refusal(host, None) is OPEN.refusal(host, None) is None
    assert HostRule.of("127.0.0.2").refusal("127.0.0.2:80", None) is None


def test_every_name_is_taken_beyond_loopback_until_one_is_allowed() -> None:
    assert OPEN.refusal("evil.example", None) is None
    assert OPEN.refusal("evil.example", "http://evil.example") is None
    assert OPEN.refusal("a b", None) is None
    assert OPEN.refusal("gpu-box:8000", "http://evil.example") is not None


@pytest.mark.parametrize(
    ("origin", "served"),
    [
        ("http://localhost:7860", True),
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:7860", True),
        ("https://chat.example.com", True),
        ("http://evil.example", False),
        ("http://evil.example:8000", False),
        ("null", False),
        ("", False),
        ("file://", False),
        ("chrome-extension://abcdef", False),
        ("http://localhost.evil.example", False),
        ("http://localhost@evil.example", False),
        ("http://[", False),
    ],
)
def test_origins(origin: str, served: bool) -> None:
    assert (LOOPBACK.refusal("localhost:8000", origin) is None) is served


def test_one_more_name() -> None:
    shared = HostRule.of("127.0.0.1").with_name("Abc.gradio.live")
    assert shared.refusal("abc.gradio.live", "https://abc.gradio.live") is None
    assert shared.refusal("abd.gradio.live", None) is not None


@pytest.mark.parametrize("name", ["http://a", "a:80", "a/b", "*", "", "-a", "a b", "a" * 300])
def test_an_invalid_host_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_host"):
        check_names([name])


def test_names_of_a_server() -> None:
    config = ServeConfig(allowed_host=["a.example", "10.0.0.1", "::1", "my_box"])  # type: ignore[arg-type]
    assert config.allowed_host == ("a.example", "10.0.0.1", "::1", "my_box")
    with pytest.raises(ConfigError, match="not the name of a host"):
        ServeConfig(allowed_host=("a:1",))
