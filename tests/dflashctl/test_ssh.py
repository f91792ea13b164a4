"""A server that lets a user in and then never does what it is asked, spoken to in this process."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from dflashctl import ssh
from dflashctl.errors import HostError


class Deaf(paramiko.ServerInterface):
    """Takes any key and any session, and is silent about commands."""

    def __init__(self, released: threading.Event, hears_sessions: bool) -> None:
        self._released = released
        self._hears_sessions = hears_sessions

    def check_auth_publickey(self, username, key) -> int:
        return paramiko.common.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username) -> str:
        return "publickey"

    def check_channel_request(self, kind, chanid) -> int:
        if not self._hears_sessions:
            self._released.wait(60)
        return paramiko.common.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel, command) -> bool:
        self._released.wait(60)
        return True


@pytest.fixture(params=[True, False], ids=["command", "session"])
def destination(request, tmp_path: Path) -> Iterator[ssh.Destination]:
    key = paramiko.ECDSAKey.generate()
    key.write_private_key_file(str(tmp_path / "key"))
    released = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n")
    transports: list[paramiko.Transport] = []

    def serve() -> None:
        transports.append(paramiko.Transport(listener.accept()[0]))
        transports[0].add_server_key(key)
        transports[0].start_server(server=Deaf(released, request.param))

    threading.Thread(target=serve, daemon=True).start()
    yield ssh.Destination(
        alias="deaf",
        hostname="127.0.0.1",
        user="root",
        port=port,
        keys=(str(tmp_path / "key"),),
        only_keys=True,
        known_hosts=(tmp_path / "known_hosts",),
        strict="yes",
        key_name=f"[127.0.0.1]:{port}",
        hash_names=False,
        jumps=(),
        proxy_command=None,
        connect_s=10,
    )
    released.set()
    transports[0].close()
    listener.close()


def test_a_server_that_answers_no_request_is_given_up_in_time(monkeypatch, destination) -> None:
    monkeypatch.setattr(ssh, "resolve", lambda *_: destination)
    monkeypatch.setattr(ssh, "CONNECT_S", 3.0)
    remote = ssh.SshRemote("deaf", "box")
    with pytest.raises(HostError, match="host box stopped answering"):
        remote.exchange(["true"], b"", b"ready\n", 5)
    remote.close()
