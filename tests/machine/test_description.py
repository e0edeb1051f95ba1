"""The description of this machine."""

import json
import subprocess

from mlx_redrafter.machine.description import describe_gpu, describe_machine
from mlx_redrafter.machine.memory import get_memory_bytes


def test_the_machine_is_described():
    found = describe_machine()
    assert {"device", "chip", "platform", "cores", "memory_gb", "python", "mlx", "mlx-lm"} <= set(
        found
    )
    assert get_memory_bytes() > 1 << 28
    assert json.dumps(found)


def test_the_gpu_is_described(monkeypatch):
    said = {
        "ioreg": '+-o AGXAcceleratorG13X\n    {\n      "gpu-core-count" = 32\n    }\n',
        "sw_vers": "24G84\n",
    }

    def answer(command, **options):
        return subprocess.CompletedProcess(command, 0, stdout=said[command[0]])

    monkeypatch.setattr(subprocess, "run", answer)
    found = describe_gpu()
    assert (found["cores"], found["macos_build"]) == (32, "24G84")


def test_a_gpu_without_these_commands_is_described(monkeypatch):
    def answer(command, **options):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", answer)
    found = describe_gpu()
    assert found["cores"] is found["macos_build"] is None
