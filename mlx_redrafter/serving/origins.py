"""Whom a browser asks for: names that a web page may have pointed at this machine, and pages of others. Pure Python."""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

HOST = re.compile(r"\[(?P<bracketed>[^\]]*)\](?::\d*)?|(?P<name>[^:]*)(?::\d*)?|(?P<bare>.*)", re.DOTALL)
"""A Host header: a name or an address, and perhaps a port; IPv6 without brackets has none."""


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
