"""The description of this machine."""

import json

from mlx_redrafter.machine.description import describe_machine
from mlx_redrafter.machine.memory import get_memory_bytes


def test_the_machine_is_described():
    found = describe_machine()
    assert {"device", "chip", "platform", "cores", "memory_gb", "python", "mlx", "mlx-lm"} <= set(
        found
    )
    assert get_memory_bytes() > 1 << 28
    assert json.dumps(found)
