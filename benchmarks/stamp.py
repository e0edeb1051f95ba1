"""What a result depends on beside the models: the machine, its power source, the versions, the day."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

from mlx_redrafter import __version__
from mlx_redrafter.planning.machine import describe_machine


def stamp() -> dict[str, Any]:
    """Device, system, versions and time; on a Mac also the GPU's cores and where its power comes from."""
    found = describe_machine() | {"mlx_redrafter": __version__, "when": datetime.now(UTC).isoformat(timespec="seconds")}
    if sys.platform == "darwin":
        found |= {
            "gpu_cores": gpu_cores(said("system_profiler", "SPDisplaysDataType", "-json")),
            "power": power(said("pmset", "-g", "batt")),
        }
    return found


def said(*command: str) -> str:
    """What a command of the system prints; nothing when it cannot be asked."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def gpu_cores(text: str) -> int | None:
    """The cores of the GPU, from the JSON of `system_profiler SPDisplaysDataType`; None when it does not tell."""
    try:
        displays = json.loads(text)["SPDisplaysDataType"]
        return next(int(each["sppci_cores"]) for each in displays if "sppci_cores" in each)
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def power(text: str) -> str | None:
    """ "AC Power" or "Battery Power", from what `pmset -g batt` prints; None when it does not tell."""
    quoted = text.partition("'")[2].partition("'")[0]
    return quoted or None
