"""hosts.yaml: what is read, what is defaulted, and every refusal."""

import sys
from pathlib import Path

import pytest

from dflashctl.errors import ConfigurationError
from dflashctl.hosts import Container, Host, Hosts, Idle, load_hosts, typed

SHIPPED = Path(__file__).parents[2]


def load(folder: Path, text: str) -> Hosts:
    (folder / "hosts.yaml").write_text(text)
    return load_hosts({}, folder)


def host(folder: Path, text: str) -> Host:
    return load(folder, f"hosts: {{box: {text}}}").get("box")


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        load(folder, text)
    assert error.value.exit_code == 3
    return str(error.value)


def test_the_shipped_file() -> None:
    hosts = load_hosts({}, SHIPPED)
    assert (hosts.path, hosts.default, list(hosts.hosts)) == (SHIPPED / "hosts.yaml", "local", ["local", "ct200"])
    assert hosts.get("local") == Host(
        name="local", transport="local", root=str(SHIPPED / ".dflash"), python=sys.executable, gpus=None, env={}, idle=Idle()
    )
    assert hosts.get("ct200") == Host(
        name="ct200",
        transport="ssh",
        ssh="pve",
        container=Container(kind="proxmox", id=200),
        root="/workspace",
        python="/usr/bin/python3",
        gpus=(0, 1, 2, 3, 4, 5, 6, 7),
        env={},
        idle=Idle(max_memory_mib=64, max_utilization_percent=5),
    )


def test_without_a_file_the_built_in_local_serves(tmp_path: Path) -> None:
    hosts = load_hosts({}, tmp_path)
    assert (hosts.path, hosts.default) == (None, "local")
    assert hosts.get("local").root == str(tmp_path / ".dflash")
    with pytest.raises(ConfigurationError, match=r"the built-in hosts \(no hosts.yaml was found\); hosts are local"):
        hosts.get("ct200")


def test_the_nearest_file_above_is_taken_and_roots_start_from_it(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "hosts.yaml").write_text("hosts: {far: {transport: local, root: data}}")
    assert load_hosts({}, below).get("far").root == str(tmp_path / "data")
    (tmp_path / "a" / "hosts.yaml").write_text("hosts: {near: {transport: local, root: .}}")
    assert load_hosts({}, below).get("near").root == str(tmp_path / "a")


def test_the_environment_names_another_file(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text("hosts: {a: {transport: local, root: /a}}")
    (tmp_path / "other.yaml").write_text("hosts: {b: {transport: local, root: /b}}")
    assert load_hosts({"DFLASHCTL_HOSTS": "other.yaml"}, tmp_path).default == "b"
    assert load_hosts({"DFLASHCTL_HOSTS": ""}, tmp_path).default == "a"
    with pytest.raises(ConfigurationError, match=r"none\.yaml: cannot be read: No such file"):
        load_hosts({"DFLASHCTL_HOSTS": "none.yaml"}, tmp_path)


def test_an_unknown_host_names_the_near_one(tmp_path: Path) -> None:
    hosts = load(tmp_path, "default: a\nhosts: {a: {transport: local, root: /a}, ct200: {ssh: pve, root: /b}}")
    with pytest.raises(ConfigurationError, match=r"host 'ct20' is not in hosts.yaml; did you mean 'ct200'\?"):
        hosts.get("ct20")
    with pytest.raises(ConfigurationError, match=r"host 'zz' is not in hosts\.yaml; hosts are a, ct200"):
        hosts.get("zz")


def test_absent_keys_have_defaults(tmp_path: Path) -> None:
    remote = host(tmp_path, "{ssh: me@box:2222, root: /srv}")
    assert (remote.transport, remote.ssh, remote.python) == ("ssh", "me@box:2222", "/usr/bin/python3")
    assert (remote.container, remote.gpus, remote.env, remote.idle) == (None, None, {}, Idle())


def test_a_container_of_this_machine_needs_an_absolute_root(tmp_path: Path) -> None:
    inside = host(tmp_path, "{transport: local, container: {kind: proxmox, id: 200}, root: /workspace}")
    assert (inside.transport, inside.python) == ("local", "/usr/bin/python3")
    text = "hosts: {box: {transport: local, container: {kind: proxmox, id: 200}, root: workspace}}"
    assert refusal(tmp_path, text) == "hosts.yaml: hosts.box.root must be an absolute path other than /, got 'workspace'"


def test_a_local_root_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert host(tmp_path, "{transport: local, root: ~/runs}").root == "/home/me/runs"
    text = "hosts: {box: {transport: local, root: '~'}}"
    assert refusal(tmp_path, text) == "hosts.yaml: hosts.box.root must be an absolute path other than /, got '~'"


def test_idle_and_env_are_read(tmp_path: Path) -> None:
    box = host(tmp_path, "{ssh: box, root: /srv, idle: {max_memory_mib: 1700}, env: {A: 'x y', B: \"4\", C: ''}, gpus: [3, 1]}")
    assert box.idle == Idle(max_memory_mib=1700, max_utilization_percent=5)
    assert box.env == {"A": "x y", "B": "4", "C": ""}
    assert box.gpus == (3, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("default: a", "hosts.yaml: hosts must name at least one host, got none"),
        ("hosts: {}", "hosts.yaml: hosts must name at least one host, got none"),
        ("hosts: [a]", "hosts.yaml: hosts must be a mapping, got ['a']"),
        ("host: {}", "hosts.yaml: unknown key 'host'; did you mean 'hosts'?"),
        ("hosts: {a b: {}}", "hosts.yaml: a host's name must be letters, digits, '.', '_' or '-', got 'a b'"),
        ("hosts: {a:b: {}}", "hosts.yaml: a host's name must be letters, digits, '.', '_' or '-', got 'a:b'"),
        (
            "default: b\nhosts: {a: {transport: local, root: /a}}",
            "hosts.yaml: default must be one of the hosts, got 'b'; hosts are a",
        ),
        (
            "hosts: {a: {transport: local, root: /a}, b: {transport: local, root: /b}}",
            "hosts.yaml: default must name one of a, b, got nothing",
        ),
        ("hosts:\n  a: {}\n  a: {}", "hosts.yaml:3: key 'a' is already set in line 2"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    assert refusal(tmp_path, text) == says


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("ssh: pve", ".root must be text, got None"),
        ("root: /srv", " needs 'ssh: ALIAS' or 'transport: local', got neither"),
        ("transport: ssh, root: /srv", ".ssh is required with transport ssh, got nothing"),
        ("transport: local, ssh: pve, root: /srv", ": transport local and ssh exclude each other; drop one"),
        ("transport: rsh, root: /srv", ".transport must be local or ssh, got 'rsh'"),
        (
            "ssh: -oProxyCommand=x, root: /s",
            ".ssh must be an alias of ~/.ssh/config or user@host[:port], got '-oProxyCommand=x'",
        ),
        ("ssh: a b, root: /srv", ".ssh must be an alias of ~/.ssh/config or user@host[:port], got 'a b'"),
        ("ssh: 5, root: /srv", '.ssh must be text, got 5; quote it: "5"'),
        ("ssh: pve, root: srv", ".root must be an absolute path other than /, got 'srv'"),
        ("ssh: pve, root: ~/srv", ".root must be an absolute path other than /, got '~/srv'"),
        ("ssh: pve, root: /", ".root must be an absolute path other than /, got '/'"),
        ("ssh: pve, root: '/srv/a:b'", ".root must be a path without ':', got '/srv/a:b'"),
        ("ssh: pve, root: /srv, python: python3", ".python must be an absolute path of an interpreter, got 'python3'"),
        ("ssh: pve, rot: /srv", ": unknown key 'rot'; did you mean 'root'?"),
        ("ssh: pve, root: /srv, container: {kind: lxd, id: 200}", ".container.kind must be proxmox, got 'lxd'"),
        ("ssh: pve, root: /srv, container: {id: 200}", ".container.kind must be proxmox, got None"),
        (
            "ssh: pve, root: /srv, container: {kind: proxmox, id: '200'}",
            ".container.id must be a whole number of 100 or more, got '200'",
        ),
        (
            "ssh: pve, root: /srv, container: {kind: proxmox, id: true}",
            ".container.id must be a whole number of 100 or more, got True",
        ),
        ("ssh: pve, root: /srv, container: {kind: proxmox}", ".container.id must be a whole number of 100 or more, got None"),
        ("ssh: pve, root: /srv, container: 200", ".container must be a mapping, got 200"),
        ("ssh: pve, root: /srv, gpus: 8", ".gpus must be a list of GPU indices, got 8"),
        ("ssh: pve, root: /srv, gpus: [0, -1]", ".gpus[1] must be a whole number of 0 or more, got -1"),
        ("ssh: pve, root: /srv, gpus: [0, 0]", ".gpus must name each GPU once, got [0, 0]"),
        ("ssh: pve, root: /srv, env: {A: 4}", '.env.A must be text, got 4; quote it: "4"'),
        ("ssh: pve, root: /srv, env: {A-B: x}", ".env: a name must be letters, digits and '_', got 'A-B'"),
        (
            "ssh: pve, root: /srv, env: {CUDA_VISIBLE_DEVICES: '0'}",
            ".env.CUDA_VISIBLE_DEVICES is set by launch from the GPUs it chose; use 'gpus' instead",
        ),
        ('ssh: pve, root: /srv, env: {A: "x\\0y"}', ".env.A must be text without control characters, got 'x\\x00y'"),
        ("ssh: pve, root: /srv, idle: {max_memory: 1}", ".idle: unknown key 'max_memory'; did you mean 'max_memory_mib'?"),
        (
            "ssh: pve, root: /srv, idle: {max_utilization_percent: 101}",
            ".idle.max_utilization_percent must be a whole number of 0..100, got 101",
        ),
        (
            "ssh: pve, root: /srv, idle: {max_memory_mib: 0.5}",
            ".idle.max_memory_mib must be a whole number of 0 or more, got 0.5",
        ),
    ],
)
def test_a_wrong_host_is_refused_by_key(tmp_path: Path, keys: str, says: str) -> None:
    assert refusal(tmp_path, f"hosts: {{ct200: {{{keys}}}}}") == f"hosts.yaml: hosts.ct200{says}"


def test_an_octal_looking_id_is_refused_with_its_line(tmp_path: Path) -> None:
    text = "hosts:\n  ct200:\n    container: {kind: proxmox, id: 0200}\n"
    assert refusal(tmp_path, text).startswith("hosts.yaml:3: a number must not start with 0 (older YAML reads 0200 as octal)")


@pytest.mark.parametrize(
    ("target", "command"), [("pve", "ssh pve"), ("root@box", "ssh root@box"), ("root@box:2222", "ssh -p 2222 root@box")]
)
def test_ssh_as_a_person_types_it(target: str, command: str) -> None:
    assert typed(target) == command
