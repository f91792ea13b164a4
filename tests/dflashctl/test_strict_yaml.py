"""YAML is read as meant or refused with its line."""

from pathlib import Path

import pytest

from dflashctl.errors import ConfigurationError
from dflashctl.strict_yaml import load, load_text, parse_scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("true", True),
        ("False", False),
        ('"true"', "true"),
        ("null", None),
        ("~", None),
        ("", None),
        ("''", ""),
        ("0", 0),
        ("-7", -7),
        ("3072", 3072),
        ("'3072'", "3072"),
        ("3e-4", 3e-4),
        ("6E3", 6000.0),
        (".5", 0.5),
        ("1.50", 1.5),
        ("1:30", "1:30"),
        ("cuda:0", "cuda:0"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("0o17", "0o17"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("2026-01-02", "2026-01-02"),
        ("1.2.3", "1.2.3"),
        ("[cuda:0, cpu]", ["cuda:0", "cpu"]),
        ("[1, [2]]", [1, [2]]),
        ("{a: 1}", {"a": 1}),
        ("a # comment", "a"),
        ('"0200"', "0200"),
    ],
)
def test_a_value_is_read_as_meant(text: str, value: object) -> None:
    read = parse_scalar(text, "--set x")
    assert read == value
    assert type(read) is type(value)


def test_a_document_is_a_mapping_of_text() -> None:
    assert load_text("a: 1\non: {b: [yes]}\nprose: >\n  two\n  lines\n", "x.yaml") == {
        "a": 1,
        "on": {"b": ["yes"]},
        "prose": "two lines\n",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nid: 0200\n", "x.yaml:2: a number must not start with 0 (older YAML reads 0200 as octal), got 0200"),
        ("a: -08", "x.yaml:1: a number must not start with 0"),
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: key 'a' is already set in line 1"),
        ("h:\n  a: 1\n  a: 1\n", "x.yaml:3: key 'a' is already set in line 2"),
        ('a: 1\n"a": 2\n', "x.yaml:2: key 'a' is already set in line 1"),
        ("200: a", "x.yaml:1: a key must be text, got 200"),
        ("true: a", "x.yaml:1: a key must be text, got True"),
        ("? [a]\n: b", "x.yaml:1: a key must be text, got ['a']"),
        ("a: &x 1\nb: 2", "x.yaml:1: anchor 'x' is not supported"),
        ("a: *x", "x.yaml:1: alias 'x' is not supported"),
        ("a: &x [1]\nb: [*x, *x]", "x.yaml:1: anchor 'x' is not supported"),
        ("a: {b: 1}\nc:\n  <<: *a\n", "x.yaml:3: alias 'a' is not supported"),
        ("a: !!python/object/apply:os.system [ls]", "x.yaml:1: tag 'tag:yaml.org,2002:python/object/apply:os.system' is not"),
        ("a: !!str 5", "x.yaml:1: tag 'tag:yaml.org,2002:str' is not supported"),
        ("a: b: c", "x.yaml:1: mapping values are not allowed here"),
        ("a: [1, 2", "x.yaml:1: while parsing a flow sequence, expected ',' or ']'"),
        ("a: 1\n\tb: 2", "x.yaml:2: while scanning for the next token, found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2", "x.yaml:2: expected a single document in the stream, but found another document"),
        ("- a", "x.yaml: the top level must be a mapping (key: value), got ['a']"),
        ("just text", "x.yaml: the top level must be a mapping (key: value), got 'just text'"),
        ("# nothing\n", "x.yaml: the top level must be a mapping (key: value), got nothing"),
        ("a: 1\nb: \x07", "x.yaml:2: must be printable text, got '\\x07'"),
        ("a: 1e999", "x.yaml:1: '1e999' is too large for a number"),
        ("a: " + "[" * 5000, "x.yaml:1: is nested too deeply"),
        ('a: "\\U00110000"', "x.yaml:1: is not YAML that can be read: chr() arg not in range(0x110000)"),
    ],
)
def test_what_could_mean_something_else_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load_text(text, "x.yaml")
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_a_file_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: \xc3\xa9\n")
    assert load(path) == {"a": "é"}


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"a: 1\nb: \xff\n")
    long = tmp_path / "long.yaml"
    long.write_bytes(b"#" * (2 << 20))
    for path, says in [
        (tmp_path / "none.yaml", "x.yaml: cannot be read: No such file or directory"),
        (tmp_path, "x.yaml: cannot be read: Is a directory"),
        (bad, "x.yaml:2: must be UTF-8 text, got byte 0xff"),
        (long, "x.yaml: must be at most 1048576 bytes, got more"),
    ]:
        with pytest.raises(ConfigurationError) as error:
            load(path, "x.yaml")
        assert str(error.value) == says
