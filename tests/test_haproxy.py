"""A client that leaves is reported to the application at once."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from app.haproxy import PROGRAM

# What Serve's own configuration has, as far as it matters here.
CONFIG = """
global
    nbthread 1
defaults
    mode http
    option abortonclose
    option splice-request
    option splice-response
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend http
    bind 127.0.0.1:{front}
    default_backend application
backend application
    server replica 127.0.0.1:{back}
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def connected(port, within_s=20):
    deadline = time.monotonic() + within_s
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture
def front(tmp_path):
    """HAProxy's port, and the listening socket of the application behind it."""
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as backend:
        config = tmp_path / "haproxy.cfg"
        config.write_text(CONFIG.format(front=port, back=backend.getsockname()[1]))
        program = str(Path(sys.executable).with_name(PROGRAM))
        with subprocess.Popen([program, "-db", "-f", str(config)]) as process:
            try:
                yield port, backend
            finally:
                process.terminate()


def test_the_application_sees_that_the_client_left_before_the_answer(front):
    port, backend = front
    left_at_s = []

    def serve():
        connection, _ = backend.accept()
        with connection:
            received = b""
            while not received.endswith(b"body"):
                received += connection.recv(4096)
            arrived.set()
            connection.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            left_at_s.append(time.monotonic())

    arrived = threading.Event()
    server = threading.Thread(target=serve, daemon=True)
    server.start()
    client = connected(port)
    # In two pieces, as HTTP libraries send it: the second is what gets spliced.
    client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
    time.sleep(0.2)
    client.sendall(b"body")
    assert arrived.wait(10)
    time.sleep(0.2)
    client.close()
    closed_at_s = time.monotonic()
    server.join(12)
    assert left_at_s
    assert left_at_s[0] - closed_at_s < 1.0
