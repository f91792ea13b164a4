"""What stands between a host and the trainer: a Proxmox container behind `pct exec`, or nothing.

A kind of container is one `Gateway`: the words in front of a command, and what its refusals mean. Facts about `pct` are read in
its source (pve-container, src/PVE/CLI/pct.pm): its exit codes say nothing, so its messages are matched.
"""

from dataclasses import dataclass

from dflashctl.errors import ContainerError, ContainerStoppedError
from dflashctl.hosts import Container, Host

_PCT = "/usr/sbin/pct"  # /usr/sbin may be missing from the PATH of an ssh session


@dataclass(frozen=True, slots=True)
class Gateway:
    """A way into a container, for one user of the machine around it."""

    container: Container
    user: str

    def words(self) -> list[str]:
        """The words in front of a command; `--` keeps its options from being read as pct's."""
        return [*self.rights(), _PCT, "exec", str(self.container.id), "--"]

    def rights(self) -> list[str]:
        """The words in front of a command for the machine around the container, which takes root as pct does."""
        return [] if self.user == "root" else ["sudo", "-n"]

    def refusal(self, host: Host, said: str, facts: dict[str, str]) -> ContainerError | None:
        """The error that stderr `said` stands for, or None; `facts` is what `inquiry` found, empty if it was not asked."""
        number, name, machine = self.container.id, host.name, host.ssh or "this machine"
        if f"container '{number}' not running!" in said:
            return ContainerStoppedError(
                f"host {name}: container {number} is stopped", hint=f"on {machine}: pct start {number}"
            )
        if f"lxc/{number}.conf' does not exist" in said:
            return self._elsewhere(host, facts.get("node", ""))
        if facts.get("freezer"):
            return ContainerError(
                f"host {name}: container {number} is frozen ({facts['freezer']}): a backup in suspend mode, or lxc-freeze",
                hint=f"on {machine}: wait for the backup, or lxc-unfreeze -n {number}",
            )
        return self._no_right(host, said)

    def _elsewhere(self, host: Host, node: str) -> ContainerError:
        number = self.container.id
        if node:
            return ContainerError(
                f"host {host.name}: container {number} lives on another node of the cluster, {node}",
                hint=f"point hosts.{host.name}.ssh at {node}",
            )
        return ContainerError(
            f"host {host.name}: there is no container {number}",
            hint=f"pct list on {host.ssh} shows what there is; hosts.{host.name}.container.id names it",
        )

    def _no_right(self, host: Host, said: str) -> ContainerError | None:
        who = f"host {host.name}: user {self.user}"
        for text, problem in _NO_RIGHT.items():
            if text in said:
                return ContainerError(
                    f"{who} may not use pct: {problem}", hint=f"use root, or sudo without a password, on {host.ssh}"
                )
        if "pct" in said and ("not found" in said or "No such file" in said):
            return ContainerError(f"host {host.name}: there is no {_PCT}: {host.ssh} is not a Proxmox host")
        return None

    def inquiry(self) -> str:
        """A script for the machine around the container: `key=value` lines about where it is and whether it is frozen."""
        number = self.container.id
        return (
            f"for f in /etc/pve/nodes/*/lxc/{number}.conf; do\n"
            '  [ -e "$f" ] && f=${f#/etc/pve/nodes/} && echo "node=${f%%/*}"\n'
            "done\n"
            f"state=$(timeout 5 lxc-info -n {number} -s -H 2>/dev/null)\n"
            '[ "$state" = FROZEN ] && echo freezer=lxc-info says FROZEN\n'
            f"for f in /sys/fs/cgroup/lxc/{number}/cgroup.freeze /sys/fs/cgroup/freezer/lxc/{number}/freezer.state; do\n"
            '  [ -r "$f" ] && case $(cat "$f") in 1 | FROZEN | FREEZING) echo "freezer=$f" ;; esac\n'
            "done\n"
            ":"
        )


_NO_RIGHT = {
    "ipcc_send_rec": "it is not root",
    "please run as root": "it is not root",
    "must be root": "it is not root",
    "sudo: a password is required": "sudo asks for a password",
    "sudo: a terminal is required": "sudo asks for a password",
    "sudo: sorry, you must have a tty": "sudo wants a terminal (requiretty)",
    "is not in the sudoers file": "it is not in the sudoers file",
    "not allowed to execute": "sudo does not allow it",
    "sudo: command not found": "it is not root, and there is no sudo",
    "sudo: not found": "it is not root, and there is no sudo",
    "Permission denied": "permission denied",
}
"""What pct and sudo say to a user without the right, and what it means."""
