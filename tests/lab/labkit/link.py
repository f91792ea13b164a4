"""A TCP proxy in front of sshd whose cable a test can cut, pull out without a sound, or keep unplugged.

Threads: one accepts, two pump each connection; they end with their sockets. Tests call the verbs from their own thread.
"""

import contextlib
import socket
import struct
import threading
import time

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with zero seconds: close sends RST, as a crashed router would, and not the polite FIN."""


class Link:
    """The proxy. It forwards until told otherwise; `restore` heals everything for the next test."""

    def __init__(self, port: int, target_port: int) -> None:
        """Listen on 127.0.0.1:port and forward to 127.0.0.1:target_port."""
        self.port = port
        self.delay_s = 0.0
        """How long a new connection waits before its first byte is forwarded."""
        self.bytes_to_client = 0
        """Bytes that arrived at clients since `restore`."""
        self._target_port = target_port
        self._flowing = threading.Event()
        self._flowing.set()
        self._refusing = False
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        threading.Thread(target=self._accept, name="link-accept", daemon=True).start()

    def cut(self) -> int:
        """Break every open connection with RST on both sides and give their number; new ones are welcome."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                    end.shutdown(socket.SHUT_RD)  # Wakes the pump, which closes: closing here would not wake it.
        return len(pairs)

    def stall(self) -> None:
        """Forward nothing any more, in silence: connections stay open and look alive, as with a dead peer."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forward again, what was held back first."""
        self._flowing.set()

    def refuse(self) -> None:
        """Cut everything, and drop new connections at once until `restore`."""
        self._refusing = True
        self.cut()

    def num_connections(self) -> int:
        """Count the connections that are open now."""
        with self._lock:
            return len(self._pairs)

    def restore(self) -> None:
        """Cut what is open and be a good cable again."""
        self._refusing = False
        self.delay_s = 0.0
        self._flowing.set()
        self.cut()
        self.bytes_to_client = 0

    def close(self) -> None:
        """Stop for good."""
        self.restore()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # Closed.
            if self._refusing:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), name="link-serve", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self.delay_s:
            time.sleep(self.delay_s)
        try:
            server = socket.create_connection(("127.0.0.1", self._target_port), timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        with self._lock:
            self._pairs.append((client, server))
        back = threading.Thread(target=self._pump, args=(server, client, True), name="link-back", daemon=True)
        back.start()
        self._pump(client, server, False)
        back.join()
        with self._lock:
            self._pairs = [pair for pair in self._pairs if pair[0] is not client]
        client.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket, to_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flowing.wait()
                target.sendall(data)
                if to_client:
                    self.bytes_to_client += len(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
