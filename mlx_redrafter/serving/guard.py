"""Who may ask: names that a web page may have pointed at this machine, pages of others, and keys."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import Metrics
from .schemas import ApiError

HOST = re.compile(r"\[(?P<bracketed>[^\]]*)\](?::\d*)?|(?P<name>[^:]*)(?::\d*)?|(?P<bare>.*)", re.DOTALL)
"""A Host header: a name or an address, and perhaps a port; IPv6 without brackets has none."""


class Guard:
    """Middleware that refuses requests before they are read, and counts all replies.

    Args:
        app: what answers the others.
        key: that clients must send; None for none, and only requests to this machine's own names are answered.
        allowed_origins: pages that may ask besides the server's own; "*" for all.
        open_paths: need no key.
        known_paths: have a label of their own in the metrics, which is never taken from what a client sends.
        refuse: makes the reply to a request that is refused, of its path and the error.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        key: str | None,
        allowed_origins: Collection[str],
        open_paths: Collection[str],
        known_paths: Collection[str],
        refuse: Callable[[str, ApiError], Response],
    ) -> None:
        self._app, self._metrics, self._key, self._origins = app, metrics, key, allowed_origins
        self._open_paths, self._known_paths, self._refuse = open_paths, known_paths, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                label = path if path in self._known_paths else "other"
                self._metrics.requests.labels(label, str(message["status"])).inc()
            await send(message)

        app = self._app
        try:
            self._check(Headers(scope=scope), path)
        except ApiError as error:
            app = self._refuse(path, error)
        await app(scope, receive, count_and_send)

    def _check(self, headers: Headers, path: str) -> None:
        for origin in headers.getlist("origin"):
            if not ("*" in self._origins or origin in self._origins or is_own(origin, headers.get("host"))):
                raise ApiError(f"pages of the Origin {origin!r:.100} are not among --allowed-origins", 403)
        if self._key is None:
            for host in headers.getlist("host"):
                if not is_loopback(host):
                    expected = "without --api-key the Host must be localhost, 127.0.0.1 or [::1]"
                    raise ApiError(f"{expected}, got {host!r:.100}", 403)
        elif path not in self._open_paths:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            # Headers are read as Latin-1, and compare_digest takes no other strings than ASCII.
            if not hmac.compare_digest(given.encode("latin-1", "replace"), self._key.encode()):
                raise ApiError("expected the header Authorization: Bearer KEY with this server's key", 401)


def is_loopback(host: str) -> bool:
    """Whether a Host header names this machine as no other can: localhost, 127.0.0.0/8 or ::1, any port."""
    found = HOST.fullmatch(host.strip())
    name = next((each for each in found.groups() if each is not None), "") if found else ""
    try:
        return name.lower() == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def is_own(origin: str, host: str | None) -> bool:
    """Whether an Origin header is that of a page from this server, which was asked as `host`.

    Its scheme is not compared: a proxy may add TLS.
    """
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == str(host).lower()
    except ValueError:
        return False
