"""Keys, server and client configuration of the lab's two sshds, and who may log in.

`pve` is the hypervisor, `jump` a second sshd which alone can resolve the hypervisor's inner name. Nothing of the user's own
~/.ssh is read: clients are given one config file with -F. The name of each alias says what is different about it.
"""

import random
import re
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from labkit.node import STATE
from labkit.requirements import find_program

INNER_NAME = "pve.lab.test"
"""The hypervisor's name in the node's own hosts file, so that only the jump host can reach it by that name."""
LABUSER = "labuser"
LABUSER_UID = 10999

SSHD_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {host_key}
AuthorizedKeysFile {authorized_keys}
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PrintMotd no
PrintLastLog no
MaxSessions 64
MaxStartups 100:30:200
LoginGraceTime 60
AcceptEnv LANG LC_*
LogLevel VERBOSE
Subsystem sftp internal-sftp
"""

CLIENT_CONFIG = """\
# The hypervisor as root, straight.
Host pve
  HostName 127.0.0.1
  Port {pve}
# The same machine, reached through the jump host by a name that only the jump host knows.
Host jump
  HostName 127.0.0.1
  Port {jump}
Host pve-jump
  HostName {inner_name}
  Port {pve}
  ProxyJump jump
# Through the proxy that tests cut and stall (fixture `link`).
Host pve-link
  HostName 127.0.0.1
  Port {link}
# Not root, and in need of sudo.
Host pve-user
  HostName 127.0.0.1
  Port {pve}
  User {labuser}
# A known_hosts file with another key for this host, and one that does not know it.
Host pve-wrong-key
  HostName 127.0.0.1
  Port {pve}
  UserKnownHostsFile {directory}/known_hosts_wrong
Host pve-unknown-key
  HostName 127.0.0.1
  Port {pve}
  UserKnownHostsFile {directory}/known_hosts_empty
# What users do to silence the question: must be refused, and must be honoured.
Host pve-unchecked
  HostName 127.0.0.1
  Port {pve}
  UserKnownHostsFile {directory}/known_hosts_wrong
  StrictHostKeyChecking no
Host pve-accept-new
  HostName 127.0.0.1
  Port {pve}
  UserKnownHostsFile {directory}/known_hosts_new
  StrictHostKeyChecking accept-new
Host *
  User root
  BatchMode yes
  IdentitiesOnly yes
  IdentityFile {directory}/id_ed25519
  UserKnownHostsFile {directory}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  ConnectTimeout 10
  LogLevel ERROR
"""


@dataclass(frozen=True)
class Ports:
    """Where the two sshds and the proxy listen on 127.0.0.1."""

    pve: int
    jump: int
    link: int


def free_ports() -> Ports:
    """Pick ports below the kernel's ephemeral range, so that no outgoing connection takes one meanwhile."""
    found: list[int] = []
    while len(found) < 3:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return Ports(*found)


def make_keys(directory: Path) -> None:
    """Make a client key, a host key for each sshd, and the key of nobody for the wrong known_hosts."""
    makers = [
        subprocess.Popen(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(directory / name)])
        for name in ("id_ed25519", "host_pve", "host_jump", "host_nobody")
    ]
    for maker in makers:
        maker.wait(timeout=20)
    (directory / "authorized_keys").write_text((directory / "id_ed25519.pub").read_text())


def write_client_files(directory: Path, ports: Ports) -> Path:
    """Write known_hosts files and the client config; gives the config, to be used with `ssh -F`."""
    places = {
        "host_pve": [f"[127.0.0.1]:{ports.pve}", f"[127.0.0.1]:{ports.link}", f"[{INNER_NAME}]:{ports.pve}"],
        "host_jump": [f"[127.0.0.1]:{ports.jump}"],
    }
    keys = {name: (directory / f"{name}.pub").read_text().split()[:2] for name in (*places, "host_nobody")}
    good = [" ".join([",".join(names), *keys[name]]) for name, names in places.items()]
    (directory / "known_hosts").write_text("\n".join(good) + "\n")
    (directory / "known_hosts_wrong").write_text(f"[127.0.0.1]:{ports.pve} {' '.join(keys['host_nobody'])}\n")
    (directory / "known_hosts_empty").write_text("")
    (directory / "known_hosts_new").write_text("")
    config = directory / "ssh_config"
    text = CLIENT_CONFIG.format(directory=directory, labuser=LABUSER, inner_name=INNER_NAME, **vars(ports))
    config.write_text(text)
    config.chmod(0o600)
    return config


def write_server_files(directory: Path, ports: Ports) -> list[list[str]]:
    """Write both server configs and give the commands that start them; paths in them are the node's."""
    seen = f"{STATE}/disk/ssh"
    commands = []
    for name, port in (("pve", ports.pve), ("jump", ports.jump)):
        config = SSHD_CONFIG.format(port=port, host_key=f"{seen}/host_{name}", authorized_keys=f"{seen}/authorized_keys")
        (directory / f"sshd_{name}").write_text(config)
        commands.append([find_program("sshd") or "sshd", "-D", "-e", "-f", f"{seen}/sshd_{name}"])
    return commands


def account_files() -> dict[str, tuple[int, str]]:
    """Give the node's own account files: the machine's users, root with an empty home, and `labuser` without rights."""
    passwd = re.sub(r"^root:.*$", f"root:x:0:0:root:{STATE}/home/root:/bin/bash", _etc("passwd"), flags=re.MULTILINE)
    if not re.search(r"^sshd:", passwd, re.MULTILINE):
        passwd += "sshd:x:10998:65534::/run/sshd:/usr/sbin/nologin\n"
    passwd += f"{LABUSER}:x:{LABUSER_UID}:{LABUSER_UID}::{STATE}/home/{LABUSER}:/bin/bash\n"
    shadow = re.sub(r"^root:[^:]*:", "root:*:", _etc("shadow"), flags=re.MULTILINE) + f"{LABUSER}:*:19000::::::\n"
    return {
        "/etc/passwd": (0o644, passwd),
        "/etc/group": (0o644, _etc("group") + f"{LABUSER}:x:{LABUSER_UID}:\n"),
        "/etc/shadow": (0o600, shadow),
        "/etc/subuid": (0o644, "root:100000:65536\n"),
        "/etc/subgid": (0o644, "root:100000:65536\n"),
        "/etc/hosts": (0o644, f"127.0.0.1 localhost pve {INNER_NAME}\n::1 localhost\n"),
        "/etc/hostname": (0o644, "pve\n"),
        "/etc/sudoers": (0o440, "root ALL=(ALL:ALL) ALL\n@includedir /etc/sudoers.d\n"),
        "/etc/bash.bashrc": (0o644, "# Read by bash before each ssh command; empty, whatever this machine's says.\n"),
        "/run/sshd/.keep": (0o644, ""),
    }


def _etc(name: str) -> str:
    text = Path("/etc", name).read_text()
    return text if text.endswith("\n") else text + "\n"
