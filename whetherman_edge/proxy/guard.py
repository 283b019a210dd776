"""Who may talk to the daemon: Host (DNS rebinding), Origin (browsers on foreign sites), and the API key.

A loopback port is reachable by every web page the user opens. A page cannot forge Host or Origin, so these two headers
are what keeps it out (field case S19); the key is for listeners that other machines can reach.
"""

from __future__ import annotations

import fnmatch
import hmac
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from whetherman_edge.errors import ConfigError

_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "localhost.localdomain"})
# A Host is a name and a port (RFC 9110 section 7.2). These would make a URL's other parts of it: of
# "evil.com:80@localhost" the parser takes "localhost" for the host.
_NOT_IN_HOST = frozenset("@/?#\\ \t")
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # compared with, never bound to


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is not served: the HTTP status and an OpenAI-shaped error's fields."""

    status: int
    reason: str
    message: str
    kind: str
    code: str


class Guard:
    """The three checks, in the order Host, Origin, key. Pure: headers in, Refusal or None out."""

    def __init__(
        self,
        *,
        host: str,
        api_key: str = "",
        allowed_hosts: tuple[str, ...] = (),
        allowed_origins: tuple[str, ...] = (),
    ) -> None:
        self._bound_host = host.strip("[]").lower()
        self._api_key = api_key.encode("utf-8")
        self._allowed_hosts = tuple(name.lower() for name in allowed_hosts)
        self._allowed_origins = tuple(origin.lower() for origin in allowed_origins)
        self._known_hosts: set[str] = set()

    def check(self, headers: Mapping[str, str], *, over_tcp: bool, needs_key: bool = True) -> Refusal | None:
        """Judge one request.

        ``headers``: by lower-case name. ``over_tcp``: a Unix socket has no Host to rebind, its file mode guards it.
        """
        host = headers.get("host")
        if over_tcp and host is not None and host not in self._known_hosts and not self._host_allowed(host):
            return Refusal(
                403,
                "Forbidden",
                f"Host {host[:100]!r} is not served here (protection against DNS rebinding); add it to allowed_hosts "
                "in the configuration or WHETHERMAN_ALLOWED_HOSTS if it is yours",
                "permission_error",
                "foreign_host",
            )
        origin = headers.get("origin")
        if origin is not None and not self.origin_allowed(origin):
            return Refusal(
                403,
                "Forbidden",
                f"Origin {origin[:100]!r} may not use this server; add it to allowed_origins in the configuration or "
                "WHETHERMAN_ALLOWED_ORIGINS if it is yours",
                "permission_error",
                "foreign_origin",
            )
        if self._api_key and needs_key and not self._key_given(headers):
            return Refusal(
                401,
                "Unauthorized",
                "expected the API key of this whetherman-edge in Authorization: Bearer or x-api-key",
                "authentication_error",
                "invalid_api_key",
            )
        return None

    def origin_allowed(self, origin: str) -> bool:
        """Loopback pages and configured globs; ``null`` (sandboxed frames of any site) only when configured."""
        text = origin.lower()
        if any(fnmatch.fnmatchcase(text, glob) for glob in self._allowed_origins):
            return True
        try:
            parts = urlsplit(text)
            name = parts.hostname or ""
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and _is_loopback(name)

    def _host_allowed(self, host: str) -> bool:
        if not _NOT_IN_HOST.isdisjoint(host):
            return False
        _, bracket, rest = host.partition("]")
        if bracket and rest and not rest.startswith(":"):  # urlsplit drops what stands behind an IPv6 literal
            return False
        try:
            name = (urlsplit("//" + host).hostname or "").rstrip(".")
        except ValueError:
            return False
        allowed = (
            _is_loopback(name)
            or name == self._bound_host
            or any(fnmatch.fnmatchcase(name, glob) for glob in self._allowed_hosts)
            # Bound to every address: an address literal cannot be a rebound name.
            or (self._bound_host in _WILDCARDS and _address(name) is not None)
        )
        if allowed and len(self._known_hosts) < 64:
            self._known_hosts.add(host)
        return allowed

    def _key_given(self, headers: Mapping[str, str]) -> bool:
        bearer = headers.get("authorization", "")
        scheme, _, token = bearer.partition(" ")
        given = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            given.append(token.strip())
        return any(hmac.compare_digest(key.encode("utf-8", "replace"), self._api_key) for key in given)


def check_bind(host: str, api_key: str) -> None:
    """Raise ConfigError when ``host`` can be reached by other machines and there is no key."""
    if api_key or _is_loopback(host.strip("[]").lower()):
        return
    raise ConfigError(
        f"host: {host!r} can be reached from other machines, so an API key is needed: set api_key in the configuration "
        "or WHETHERMAN_API_KEY, or listen on 127.0.0.1"
    )


def _is_loopback(name: str) -> bool:
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
