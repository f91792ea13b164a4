"""Fixtures of the test lab. `lab` is the one lab of the session, reset for each test; `ct` its container 200, running.

Where root, LXC or sshd are missing the tests skip and say what is missing; with CI set they fail instead, so that CI
cannot go green without them. `tests/lab/setup.sh` installs what is missing.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # importlib mode adds nothing to sys.path; labkit is the only package here.

from labkit.container import Container  # noqa: E402
from labkit.lab import Lab  # noqa: E402
from labkit.laptop import point  # noqa: E402
from labkit.link import Link  # noqa: E402
from labkit.requirements import require  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder `lab`, and let nothing in it hang for long."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.lab)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def labs() -> Iterator[list[Lab]]:
    """At most one: the lab of the session. Use `lab`, which brings it up and cleans up between tests."""
    require()
    current: list[Lab] = []
    yield current
    for lab in current:
        lab.close()


@pytest.fixture
def lab(labs: list[Lab]) -> Iterator[Lab]:
    """The lab without containers, with every default in place."""
    if not labs:
        labs.append(Lab())
    yield labs[0]
    try:
        labs[0].reset()
    except BaseException:  # what is left of it would fail every later test
        labs.pop().close()
        raise


@pytest.fixture
def ct(lab: Lab) -> Container:
    """Container 200: fresh, running, with this session's Python bound into it."""
    return lab.container_with_python(200)


@pytest.fixture
def far(bench, lab: Lab, ct: Container):
    """A laptop (tests/conftest.py) whose host ct200 is container 200."""
    point(bench, lab)
    return bench


@pytest.fixture
def link(lab: Lab) -> Link:
    """The proxy behind the alias `pve-link`."""
    return lab.link
