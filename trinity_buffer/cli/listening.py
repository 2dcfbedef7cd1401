"""Where a server of ours listens."""

from __future__ import annotations

import socket


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``port`` of ``host``; whoever knows of it may ask at once.

    Raises:
        OSError: it cannot, and what to do.
    """
    door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # For all that it accepts: an answer's second part waits 40 ms for a packet otherwise.
    door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        door.bind((host, port))
        door.listen()
    except (OSError, UnicodeError) as error:
        door.close()
        named = isinstance(error, UnicodeError | socket.gaierror)
        option, why = "--host" if named else "--port", getattr(error, "strerror", None) or error
        raise OSError(f"port {port} of {host}: {why}: choose another with {option}") from error
    return door
