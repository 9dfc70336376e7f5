"""A port of our own for each launch, and who listens on it."""

import socket
from collections.abc import Iterable

import psutil


def fresh_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on, not even with SO_REUSEPORT."""
    while True:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if is_free(port, host) and not strangers(port, ()):
            return port


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether the port can be bound exclusively (connections in TIME_WAIT do not count)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def strangers(port: int, ours: Iterable[int]) -> list[int]:
    """Processes outside `ours` that listen on the port; 0 stands for one that we may not see."""
    own = set(ours)
    listeners = {
        connection.pid or 0
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
    }
    return sorted(listeners - own)
