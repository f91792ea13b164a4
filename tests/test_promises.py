"""What the README and the list of field reports promise is held by tests that exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize("document", [TESTS.parent / "README.md", TESTS / "field_reports.md"], ids=lambda path: path.name)
def test_each_test_that_is_named_exists(document: Path) -> None:
    named = re.findall(r"\| ([\w/]+\.py)::(test_\w+) \|", document.read_text())
    assert len(named) > 20
    for file, test in named:
        assert re.search(rf"^def {test}\(", (TESTS / file).read_text(), re.MULTILINE), f"{document.name}: {file}::{test}"


def test_each_field_report_has_a_test_or_a_reason() -> None:
    rows = [line.split(" | ") for line in (TESTS / "field_reports.md").read_text().splitlines() if line.startswith("| ")]
    for row in rows[1:]:
        assert len(row) == 3, row
        assert "::test_" in row[2] or row[2].startswith("- "), row
