"""The wired memory limit with several decoding threads."""

import threading

import mlx.core as mx
import pytest

from helpers.small import small_llama
from mlx_redrafter.machine.wired_limit import wired_limit


def test_last_of_two_threads_restores_the_limit(monkeypatch):
    """On a fake GPU whose limit is 7; the first thread fails while decoding."""
    limits = [7]
    recommended = 1 << 40
    inside = threading.Event()
    leave = threading.Event()

    def set_wired_limit(limit):
        limits.append(limit)
        return limits[-2]

    def decode():
        with wired_limit(small_llama()):
            inside.set()
            leave.wait(timeout=30)

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(
        mx, "device_info", lambda *args: {"max_recommended_working_set_size": recommended}
    )
    with pytest.raises(KeyError), wired_limit(small_llama()):
        other = threading.Thread(target=decode)
        other.start()
        assert inside.wait(timeout=30)
        assert limits == [7, recommended], "raised once"
        raise KeyError
    assert limits == [7, recommended], "the other thread is still decoding"
    leave.set()
    other.join()
    assert limits == [7, recommended, 7]
