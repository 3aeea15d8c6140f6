"""Which host names a server answers to: the defense against DNS rebinding."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from ingot.errors import ConfigError

LOCAL = ("localhost", "127.0.0.1", "::1")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?")


@dataclass(frozen=True)
class HostRule:
    """The host names that a server at one listening address accepts.

    A web page may have its own name point to this machine (DNS rebinding): the browser then takes a local
    server for a part of that page, and sends the page's name as ``Host``.

    Attributes:
        names: always accepted.
        addresses: IP addresses are accepted, too: no page has one for its name.
        any_name: every other name is accepted.

        HostRule.of("127.0.0.1", ["chat.example.com"]).refusal("evil.example:8000", None)  # why, as text
    """

    names: frozenset[str]
    addresses: bool = False
    any_name: bool = False

    @classmethod
    def of(cls, address: str, allowed: Iterable[str] = ()) -> Self:
        """The rule for an IP address that a server listens on. On loopback: local and ``allowed`` names.
        Elsewhere: every name, or, if some are ``allowed``, those, local names and addresses.
        """
        own = {one.lower() for one in allowed}
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return cls(frozenset({*LOCAL, address, *own}))
        return cls(frozenset({*LOCAL, *own}), addresses=True, any_name=not own)

    def with_name(self, name: str) -> Self:
        """The rule with one more name."""
        return type(self)(self.names | {name.lower()}, self.addresses, self.any_name)

    def refusal(self, host: str | None, origin: str | None) -> str | None:
        """Why a request is refused; None where it is served.

        Args:
            host: the header; None is accepted, as browsers always send it.
            origin: the header, in which browsers name the requesting page. Its name must be the host's or one
                of ``names``, with any port.
        """
        name = None if host is None else name_of(host)
        is_taken = name in self.names or self.any_name or (self.addresses and _is_address(name or ""))
        if host is not None and (name is None or not is_taken):
            return f"this server does not answer to the name {host!r:.100}; `allowed_host` allows a name"
        if origin is None:
            return None
        try:
            page = (urlsplit(origin).hostname or "").removesuffix(".")  # empty: a page without one (``null``)
        except ValueError:
            page = ""
        if not page or (page != name and page not in self.names):
            return f"requests from the pages of {origin!r:.100} are refused; `allowed_host` allows a name"
        return None


def name_of(host: str) -> str | None:
    """The name in a ``Host`` header, without port and brackets; None where there is none."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018
    except ValueError:
        return None
    plain = parts.netloc == host and parts.username is None
    return (parts.hostname or "").removesuffix(".") or None if plain else None


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names of ``allowed_host``; raises ``ConfigError`` where one has a scheme, a port or a path."""
    for name in names:
        if not isinstance(name, str) or not (_NAME.fullmatch(name.lower()) or _is_address(name)):
            allowed = "a name or an address, such as chat.example.com"
            raise ConfigError(
                "not the name of a host", seen=f"{name!r:.100}", allowed=allowed, field="allowed_host"
            )
    return tuple(names)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
