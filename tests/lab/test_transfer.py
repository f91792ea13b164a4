"""push and pull through a link that breaks."""

import os

from labkit.laptop import point

PIECES = 80_000_000


def test_a_push_over_a_link_that_is_cut_arrives_whole(bench, lab, link, ct) -> None:
    point(bench, lab, alias="pve-link")
    bench("deploy")
    source = bench.folder / "model.bin"
    source.write_bytes(os.urandom(PIECES))
    process = bench.start("push", "ct200", "model.bin", "targets/model.bin", "--json")
    incoming = ct.workspace / "my runs/incoming"
    bench.until(lambda: any(path.stat().st_size for path in incoming.rglob("*") if path.is_file()))
    assert link.cut() == 1
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr + stdout
    assert (ct.workspace / "my runs/targets/model.bin").read_bytes() == source.read_bytes()


def test_a_pull_of_megabytes(far, lab, ct) -> None:
    far.trainer("import os; open('large', 'wb').write(os.urandom(40_000_000))")
    far("launch", "--tag", "quick", "--startup-seconds", "30")
    assert far("pull", "quick-1", "large").exit_code == 0
    assert (far.folder / "quick-1/large").read_bytes() == (ct.workspace / "my runs/runs/quick-1/large").read_bytes()
