"""The delayed network link between ranks, and the comparison of drafted and plain times over it."""

import socket
import threading

import pytest

from benchmarks.ranks import DelayedLink, add_speeds


def test_a_wire_forwards_all_bytes_in_order():
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = DelayedLink(server.getsockname()[1])
        link.milliseconds = 1.0

        def echo():
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(1000):
                    connection.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        with socket.create_connection(("127.0.0.1", link.port)) as client:
            client.settimeout(120)
            sent = bytes(range(256)) * 50
            got = b""
            for start in range(0, len(sent), 100):
                client.sendall(sent[start : start + 100])
            while len(got) < len(sent):
                got += client.recv(1 << 16)
    assert got == sent


def test_rounds_hide_network_delay():
    """Four messages per forward: 10 ms per plain step, 15 ms per round of 3 tokens."""
    records = [
        {"delay, ms": delay, "plan": plan, "ms/round": ms + 4 * delay, "tokens/round": made}
        for delay in (0.0, 1.0, 5.0)
        for plan, ms, made in (("plain", 10.0, 1.0), ("1 x 3", 15.0, 3.0))
    ]
    found = [each for each in add_speeds(records) if each["plan"] == "1 x 3"]
    speeds = [each["x plain"] for each in found]
    assert [each["messages"] for each in found] == pytest.approx([4.0] * 3)
    assert speeds == pytest.approx([3 * 10 / 15, 3 * 14 / 19, 3 * 30 / 35])
    assert [each["expected"] for each in found] == pytest.approx(speeds)
