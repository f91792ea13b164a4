"""SSH: the one file that imports fabric and paramiko, and the one map of their errors.

ssh_config is read by the OpenSSH client itself (`ssh -G`), because paramiko ignores Include and much of Match; the connection
is fabric's, so that ProxyJump chains are its work. What both leave out is done here: host keys are checked against known_hosts
always (fabric adds any key without a word), a dead peer is noticed (paramiko's keepalive waits for no reply), both outputs
are drained together (its 2 MiB window would stop the other side), and no wait is without an end.
"""

import contextlib
import logging
import queue
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from fabric import Config, Connection
from paramiko.hostkeys import HostKeyEntry, HostKeys, InvalidHostKey

from dflashctl.errors import HostError, RemoteTimeoutError
from dflashctl.hosts import typed
from dflashctl.remote import MOST_BYTES, Completed

CONNECT_S = 20.0
OPENING_S = 15.0
_SILENCE_S = 5.0
_DEAD_S = 15.0
_CHUNK = 1 << 16
_STDERR_KEPT = 1 << 20
# paramiko's thread logs a traceback for what it also raises; the sentence made of that is enough
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """What ssh_config says of one alias."""

    alias: str
    hostname: str
    user: str
    port: int
    keys: tuple[str, ...]
    only_keys: bool
    known_hosts: tuple[Path, ...]
    strict: str
    key_name: str
    hash_names: bool
    jumps: tuple[str, ...]
    proxy_command: str | None
    connect_s: float


def resolve(target: str, name: str) -> Destination:
    """Everything about `target` (alias or user@host[:port]); raises HostError."""
    try:
        return _destination(target, _ssh_g(target, name) if shutil.which("ssh") else _paramiko_config(target))
    except subprocess.TimeoutExpired:
        raise HostError(f"host {name}: ssh -G did not finish; does a Match exec in its configuration hang?") from None
    except (ValueError, OSError) as error:  # a port that is no number, a lone quote
        raise HostError(f"host {name}: its ssh configuration cannot be used: {error}") from None


def _destination(target: str, options: dict[str, list[str]]) -> Destination:
    one = {key: values[-1] for key, values in options.items()}
    hostname, port = one.get("hostname", target), int(one.get("port", "22"))
    timeout = one.get("connecttimeout", "none")
    jump, command = one.get("proxyjump", "none"), one.get("proxycommand", "none")
    files = shlex.split(f"{one.get('userknownhostsfile', '~/.ssh/known_hosts')} {one.get('globalknownhostsfile', '')}")
    return Destination(
        alias=target,
        hostname=hostname,
        user=one.get("user", "root"),
        port=port,
        keys=tuple(str(Path(key).expanduser()) for key in options.get("identityfile", []) if key != "none"),
        only_keys=one.get("identitiesonly") == "yes",
        known_hosts=tuple(Path(file).expanduser() for file in files if file != "none"),
        strict=one.get("stricthostkeychecking", "ask"),
        key_name=one.get("hostkeyalias") or (hostname if port == 22 else f"[{hostname}]:{port}"),
        hash_names=one.get("hashknownhosts") == "yes",
        jumps=() if jump == "none" else tuple(jump.split(",")),
        proxy_command=None if command == "none" else command,
        connect_s=CONNECT_S if timeout in ("none", "0") else float(timeout),
    )


def _ssh_g(target: str, name: str) -> dict[str, list[str]]:
    """`ssh -G`: Include, Match and defaults as the user's own ssh has them."""
    host, port = _split(target)
    argv = ["ssh", "-G", *(["-p", port] if port else []), "--", host]
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=30)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise HostError(f"host {name}: ssh cannot read its configuration: {said[-1] if said else 'ssh -G failed'}")
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key.lower(), []).append(value)
    return found


def _paramiko_config(target: str) -> dict[str, list[str]]:
    """The same from paramiko's reader, where there is no ssh client."""
    host, port = _split(target)
    user, _, hostname = host.rpartition("@")
    path = Path("~/.ssh/config").expanduser()
    config = paramiko.SSHConfig.from_path(str(path)) if path.is_file() else paramiko.SSHConfig()
    found: dict[str, list[str]] = {
        key: [str(v) for v in value] if isinstance(value, list) else [str(value)]
        for key, value in config.lookup(hostname).items()
    }
    given = {"user": user, "port": port}
    return found | {key: [value] for key, value in given.items() if value}


def _split(target: str) -> tuple[str, str]:
    """user@host:port -> (user@host, port); an IPv6 address stands in brackets."""
    host, colon, port = target.rpartition(":")
    if colon and port.isdigit() and not (host.count(":") and not host.endswith("]")):
        return host.replace("[", "").replace("]", ""), port
    return target, ""


class SshRemote:
    """One connection, opened at the first exchange and reused."""

    def __init__(self, target: str, name: str) -> None:
        """`target` as in hosts.yaml, `name` the host's name there."""
        self._name = name
        self._destination = resolve(target, name)
        self._connections: list[Connection] = []

    @property
    def user(self) -> str:
        """The user that ssh_config gives."""
        return self._destination.user

    def exchange(self, argv: Sequence[str], stdin: bytes, opening: bytes, timeout_s: float) -> Completed:
        """Run `argv` through the login shell there; see Remote.

        It happens in a thread: Ctrl-C in the middle of paramiko would leave its locks held, and closing would wait for them.
        """
        outcome: queue.SimpleQueue[Completed | BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put(self._exchange(argv, stdin, opening, timeout_s))
            except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
                outcome.put(error)

        threading.Thread(target=run, name="ssh-exchange", daemon=True).start()
        try:
            done = outcome.get()
        except KeyboardInterrupt:
            self._abandon()
            raise
        if isinstance(done, BaseException):
            raise done
        return done

    def _abandon(self) -> None:
        """Pull the plug: only the first connection has a socket of this machine, and all others go through it."""
        for connection in self._connections[:1]:
            if connection.transport:
                connection.transport.sock.close()
        self._connections.clear()

    def _exchange(self, argv: Sequence[str], stdin: bytes, opening: bytes, timeout_s: float) -> Completed:
        transport = self._transport()
        try:
            channel = transport.open_session(timeout=CONNECT_S)
            _within(CONNECT_S, lambda: channel.exec_command(shlex.join(argv)))
        except (paramiko.SSHException, OSError, EOFError) as error:
            how = "stopped answering" if "Timeout" in str(error) else "broke the connection"
            raise HostError(f"host {self._name} {how}: {error}") from error
        talk = _Talk(channel, transport, stdin, opening)
        try:
            return talk.run(self._name, timeout_s)
        finally:
            channel.close()

    def close(self) -> None:
        """Close the connection and the jumps under it."""
        for connection in reversed(self._connections):
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                connection.close()
        self._connections.clear()

    def _transport(self) -> paramiko.Transport:
        if not self._connections:
            gateway: Connection | str | None = self._destination.proxy_command and _expand(self._destination)
            for jump in self._destination.jumps:
                gateway = self._open(resolve(jump.removeprefix("ssh://"), self._name), gateway)
            self._open(self._destination, gateway)
        transport: paramiko.Transport | None = self._connections[-1].transport
        if transport is None or not transport.is_active():
            raise HostError(f"host {self._name}: the connection broke")
        return transport

    def _open(self, destination: Destination, gateway: Connection | str | None) -> Connection:
        _refuse_unchecked(destination, self._name)
        known = _known_keys(destination)
        for _ in range(2):
            try:
                return self._connect(destination, gateway, known)
            except paramiko.BadHostKeyException as error:
                if error.key not in known:
                    raise _explained(error, destination, self._name) from error
                known = [error.key]  # paramiko holds one key of a type, known_hosts may hold more
        raise HostError(f"host {self._name} shows another key each time")

    def _connect(
        self, destination: Destination, gateway: Connection | str | None, known: Sequence[paramiko.PKey]
    ) -> Connection:
        private = _private(destination)
        keys: dict[str, Any] = {"key_filename": private} if private else {}
        if destination.only_keys and (held := _held_by_agent(destination.keys)):
            keys = {"pkey": held}
        connection = Connection(
            destination.hostname,
            user=destination.user,
            port=destination.port,
            gateway=gateway or False,
            config=Config(lazy=True, ssh_config=paramiko.SSHConfig()),
            connect_timeout=int(destination.connect_s),
            connect_kwargs={
                "allow_agent": not destination.only_keys,
                "look_for_keys": False,
                "banner_timeout": CONNECT_S,
                **keys,
            },
        )
        _know_keys(connection.client, destination, known)
        self._connections.append(connection)
        try:
            connection.open()
        except paramiko.BadHostKeyException:
            self._connections.pop().close()
            raise
        except Exception as error:
            raise _explained(error, destination, self._name) from error
        return connection


def _private(destination: Destination) -> list[str]:
    """The key files that are there. An IdentityFile may also name a public key, whose private half the agent holds."""
    return [key for key in destination.keys if not key.endswith(".pub") and Path(key).is_file()]


def _held_by_agent(key_files: Sequence[str]) -> paramiko.PKey | None:
    """The agent's key whose public half lies beside one of the named files: IdentitiesOnly allows it, paramiko forgets it."""
    blobs = set()
    for file in key_files:
        with contextlib.suppress(OSError, IndexError):
            blobs.add(Path(file.removesuffix(".pub") + ".pub").read_text().split()[1])
    agent = paramiko.Agent()
    return next((key for key in agent.get_keys() if key.get_base64() in blobs), None)


def _expand(destination: Destination) -> str:
    command = destination.proxy_command or ""
    for token, value in (("%h", destination.hostname), ("%p", str(destination.port)), ("%r", destination.user), ("%%", "%")):
        command = command.replace(token, value)
    return command


def _within(seconds: float, act: Callable[[], None]) -> None:
    """`act`, which paramiko lets wait for ever; raises SSHException when it has not ended in time."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            act()
        except (paramiko.SSHException, OSError, EOFError) as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="ssh-exec", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise paramiko.SSHException(f"Timeout after {seconds:.0f} s")
    if raised:
        raise raised[0]


class _Talk:
    """One command's streams. The calling thread reads stdout; a thread each writes stdin and reads stderr."""

    def __init__(self, channel: paramiko.Channel, transport: paramiko.Transport, stdin: bytes, opening: bytes) -> None:
        self._channel = channel
        self._transport = transport
        self._stdin = stdin
        self._opening = opening
        self._stdout = bytearray()
        self._stderr = bytearray()
        self._writer: threading.Thread | None = None

    def run(self, name: str, timeout_s: float) -> Completed:
        start = time.monotonic()
        errors = threading.Thread(target=self._read_errors, name="ssh-stderr", daemon=True)
        errors.start()
        self._channel.settimeout(0.5)
        pulse = _Pulse(self._transport)
        while self._read_some(pulse):
            waited = time.monotonic() - start
            if self._writer is None and waited > OPENING_S:
                raise RemoteTimeoutError(f"host {name}: its shell did not come up within {OPENING_S:.0f} s")
            if waited > timeout_s:
                raise RemoteTimeoutError(f"host {name} did not answer within {timeout_s:.0f} s")
            if len(self._stdout) > MOST_BYTES:
                raise HostError(f"host {name} sent more than {MOST_BYTES >> 20} MiB, which is no answer")
            if pulse.is_lost():
                self._transport.close()
                raise HostError(f"host {name} stopped answering: nothing for {_DEAD_S:.0f} s, not even to a keepalive")
        errors.join(timeout=5)
        self._channel.status_event.wait(5)
        status = self._channel.exit_status if self._channel.status_event.is_set() else -1
        # paramiko says -1 for a signal and for a link that broke; only the first leaves the transport alive
        code = status if status >= 0 else (255 if self._transport.is_active() else None)
        return Completed(code, bytes(self._stdout), bytes(self._stderr))

    def _read_some(self, pulse: "_Pulse") -> bool:
        """Take in what there is; False at the end of stdout."""
        try:
            data = self._channel.recv(_CHUNK)
        except TimeoutError:
            pulse.beat()
            return True
        pulse.heard()
        self._stdout += data
        if self._writer is None and self._opening in self._stdout:
            self._writer = threading.Thread(target=self._write, name="ssh-stdin", daemon=True)
            self._writer.start()
        return bool(data)

    def _write(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.sendall(self._stdin)

    def _read_errors(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while data := self._channel.recv_stderr(_CHUNK):
                self._stderr += data
                del self._stderr[:-_STDERR_KEPT]


class _Pulse:
    """Asks a silent peer for a sign of life: a keepalive that wants a reply, sent by a thread that may hang on it."""

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport = transport
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None

    def heard(self) -> None:
        self._last = time.monotonic()

    def beat(self) -> None:
        if self._thread is None and time.monotonic() - self._last > _SILENCE_S:
            self._thread = threading.Thread(target=self._ask, name="ssh-pulse", daemon=True)
            self._thread.start()

    def _ask(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._transport.global_request("keepalive@openssh.com", wait=True)
            if self._transport.is_active():
                self.heard()
        self._thread = None

    def is_lost(self) -> bool:
        return time.monotonic() - self._last > _SILENCE_S + _DEAD_S


def _refuse_unchecked(destination: Destination, name: str) -> None:
    if destination.strict in ("no", "false", "off"):
        raise HostError(
            f"host {name}: ssh_config says StrictHostKeyChecking no for {destination.alias}; "
            "dflashctl does not talk to a host whose key nobody checks",
            hint="set it to accept-new, which takes the first key it sees and refuses a changed one",
        )


def _known_keys(destination: Destination) -> list[paramiko.PKey]:
    """Every key that known_hosts has for this host: during a change of keys it has two of one type."""
    return [key for path in destination.known_hosts for key in _keys_in(path, destination.key_name)]


def _know_keys(client: paramiko.SSHClient, destination: Destination, known: Sequence[paramiko.PKey]) -> None:
    """Give the client these keys under the name it looks up, the first of each type; paramiko then prefers their types."""
    looked_up = destination.hostname if destination.port == 22 else f"[{destination.hostname}]:{destination.port}"
    held = client.get_host_keys()
    for key in known:
        if looked_up not in held or key.get_name() not in held[looked_up]:
            held.add(looked_up, key.get_name(), key)
    client.set_missing_host_key_policy(_Policy(destination))


def _keys_in(path: Path, name: str) -> Iterator[paramiko.PKey]:
    """Keys that one known_hosts file has for a name. Lines that cannot be read, of other hosts mostly, are passed over."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if not line.strip() or line.lstrip().startswith(("#", "@cert-authority")):
            continue
        revoked = line.lstrip().startswith("@revoked")
        entry = None
        with contextlib.suppress(paramiko.SSHException, ValueError, InvalidHostKey):
            entry = HostKeyEntry.from_line(line.lstrip().removeprefix("@revoked").lstrip())
        if entry is None or entry.key is None or not _is_named(entry, name):
            continue
        if revoked:
            raise HostError(f"{path} says that this key of {name} is revoked: {entry.key.get_name()}")
        yield entry.key


def _is_named(entry: HostKeyEntry, name: str) -> bool:
    """Whether a line is about `name`, written out or hashed (HashKnownHosts)."""
    return any(n == name or (n.startswith("|1|") and HostKeys.hash_host(name, n) == n) for n in entry.hostnames or ())


class _UnknownKey(paramiko.SSHException):
    """The host showed a key that known_hosts does not have."""

    def __init__(self, key: paramiko.PKey) -> None:
        super().__init__("unknown host key")
        self.key = key


class _Policy(paramiko.MissingHostKeyPolicy):
    """accept-new writes a first key down; anything else refuses it."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        if self._destination.strict != "accept-new" or client.get_host_keys().lookup(hostname):
            raise _UnknownKey(key)
        name = self._destination.key_name
        path = self._destination.known_hosts[0]
        if path == Path("/dev/null"):
            raise _UnknownKey(key)  # accept-new without a memory would accept any key every time
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        line = HostKeyEntry([HostKeys.hash_host(name) if self._destination.hash_names else name], key).to_line()
        with path.open("a", encoding="ascii") as file:
            file.write(line or "")


def _explained(error: Exception, destination: Destination, name: str) -> HostError:
    """What fabric, paramiko and the socket raise, as one sentence."""
    place = f"host {name} ({destination.user}@{destination.hostname}:{destination.port})"
    files, ssh = ", ".join(str(path) for path in destination.known_hosts[:1]), typed(destination.alias)
    match error:
        case paramiko.BadHostKeyException():
            return HostError(
                f"{place}: its host key is not the one in known_hosts: somebody else answers, or the host was reinstalled",
                hint=f"if you know why: ssh-keygen -f {files} -R '{destination.key_name}', then {ssh} once",
            )
        case _UnknownKey():
            return HostError(
                f"{place}: its host key is unknown ({error.key.get_name()} SHA256:{_fingerprint(error.key)})",
                hint=f"compare it, then accept it once with: {ssh}",
            )
        case paramiko.PasswordRequiredException():
            return HostError(f"{place}: its key needs a passphrase", hint="ssh-add the key; dflashctl asks nothing")
        case paramiko.AuthenticationException():
            keys = ", ".join(_private(destination)) or "no key file"
            return HostError(f"{place}: access denied with {keys}", hint=f"see that this works: {ssh} true")
        case socket.gaierror():
            return HostError(f"{place}: no such name", hint=f"hosts.{name}.ssh must be an alias of ~/.ssh/config or user@host")
        case TimeoutError():
            return HostError(f"{place}: no answer within {destination.connect_s:.0f} s")
        case _:
            return HostError(f"{place}: {error or type(error).__name__}")


def _fingerprint(key: paramiko.PKey) -> str:
    return str(key.fingerprint).removeprefix("SHA256:")
