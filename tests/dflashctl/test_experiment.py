"""Experiments as files: merging, overrides, origins and every refusal."""

from pathlib import Path

import pytest

from dflashctl.errors import ConfigurationError
from dflashctl.experiment import check_tag, describe, load_experiment

LADDER = Path(__file__).parents[2] / "experiments"

BASE = """
hypothesis: fixed shapes compile once
host: ct200
gpus: 8
expect: [no recompile]
trainer:
  target: {path: targets/qwen3-8b}
  data: {path: data/train}
  draft: {num_layers: 3, target_layer_ids: [1, 9, 17]}
  pipeline: {graphs: none}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "base.yaml").write_text(BASE)
    return folder


def write(folder: Path, tag: str, text: str) -> None:
    (folder / f"{tag}.yaml").write_text(text)


def refusal(tag: str, folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_experiment(tag, folder, overrides)
    assert error.value.exit_code == 3
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("tag", ["a", "0", "threadwarm", "a-b_c9", "x" * 64])
def test_a_valid_tag_is_itself(tag: str) -> None:
    assert check_tag(tag) == tag


@pytest.mark.parametrize(
    ("tag", "suggestion"),
    [
        ("Thread Warm", "try 'thread-warm'"),
        ("-x", "try 'x'"),
        ("a/../b", "try 'a-b'"),
        ("x" * 65, f"try '{'x' * 64}'"),
        ("a\n", "try 'a'"),
        ("é", "got 'é'"),
        ("", "got ''"),
    ],
)
def test_another_tag_is_refused_with_a_valid_form(tag: str, suggestion: str) -> None:
    with pytest.raises(ConfigurationError, match=r"a tag must match \[a-z0-9\]\[a-z0-9_-\]\{0,63\}, got") as error:
        check_tag(tag)
    assert suggestion in str(error.value)


def test_a_file_alone_is_read_with_defaults(folder: Path) -> None:
    experiment = load_experiment("base", folder)
    assert (experiment.hypothesis, experiment.parent, experiment.change) == ("fixed shapes compile once", None, "")
    assert (experiment.host, experiment.gpus, experiment.expect) == ("ct200", 8, ("no recompile",))
    assert experiment.config.draft.num_layers == 3
    assert experiment.config.batch.rows == 16
    assert "batch" not in experiment.trainer


def test_a_parent_is_merged_key_by_key_and_lists_are_replaced(folder: Path) -> None:
    write(folder, "child", "parent: base\nhypothesis: two taps do\ntrainer: {draft: {target_layer_ids: [1, 9]}, run:}\n")
    write(folder, "grandchild", "parent: child\ntrainer: {draft: {num_layers: 4}}\n")
    experiment = load_experiment("grandchild", folder)
    assert experiment.config.draft.target_layer_ids == [1, 9]
    assert experiment.config.draft.num_layers == 4
    assert experiment.config.target.path == "targets/qwen3-8b"
    assert experiment.origins["draft.target_layer_ids"] == "experiments/child.yaml"
    assert experiment.origins["draft.num_layers"] == "experiments/grandchild.yaml"
    assert experiment.origins["target.path"] == "experiments/base.yaml"


def test_a_child_runs_where_its_parent_ran_but_speaks_for_itself(folder: Path) -> None:
    write(folder, "child", "parent: base\n")
    child = load_experiment("child", folder)
    assert (child.host, child.gpus) == ("ct200", 8)
    assert (child.hypothesis, child.change, child.expect) == ("", "", ())
    write(folder, "elsewhere", "parent: base\nhost: local\ngpus: [3, 1]\n")
    elsewhere = load_experiment("elsewhere", folder)
    assert (elsewhere.host, elsewhere.gpus) == ("local", (3, 1))


def test_an_experiment_may_lie_in_any_file(folder: Path) -> None:
    write(folder, "child", "parent: base\n")
    assert load_experiment("other-tag", folder / "child.yaml").tag == "other-tag"


def test_overrides_win_in_order_and_are_read_as_yaml(folder: Path) -> None:
    experiment = load_experiment(
        "base",
        folder,
        [
            "run.steps=5",
            "run.steps=7",
            "optim.lr=3e-4",
            "pipeline.target_devices=[cuda:0, cuda:0]",
            "draft.target_layer_ids=null",
            "data.path=a=b",
        ],
    )
    assert experiment.config.run.steps == 7
    assert experiment.config.optim.lr == 3e-4
    assert experiment.config.pipeline.target_devices == ["cuda:0", "cuda:0"]
    assert experiment.config.draft.target_layer_ids is None
    assert experiment.config.data.path == "a=b"
    assert experiment.origins["run.steps"] == "--set"
    assert experiment.origins["draft.num_layers"] == "experiments/base.yaml"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("draft.block_size=1", "--set: draft.block_size must be 2..64, got 1"),
        ("draft.block_size=two", "--set: draft.block_size must be a whole number, got 'two'"),
        ("draft.blok_size=8", "--set: draft: unknown key 'blok_size'; did you mean 'block_size'?"),
        ("draf.block_size=8", "--set: trainer: unknown key 'draf'; did you mean 'draft'?"),
        ("block_size=8", "--set must be SECTION.KEY=VALUE, got 'block_size=8'; did you mean 'draft.block_size'?"),
        ("draft.block_size", "--set must be SECTION.KEY=VALUE, got 'draft.block_size'"),
        ("run.seed=0200", "--set run.seed: a number must not start with 0"),
        ("run.seed=[1", "--set run.seed: while parsing a flow sequence, expected ',' or ']'"),
        ("data.path=", "--set: data.path must be text, got None"),
        ("pipeline.target_devices=[cpu]", "experiments/base.yaml with --set: pipeline: target_devices and drafter"),
    ],
)
def test_a_wrong_override_is_refused(folder: Path, override: str, says: str) -> None:
    assert refusal("base", folder, override).startswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("parent: base\ntrainer: {draft: {block_size: 1}}", "draft.block_size must be 2..64, got 1"),
        ("parent: base\ntrainer: {draft: {blok_size: 8}}", "draft: unknown key 'blok_size'; did you mean 'block_size'?"),
        ("parent: base\ntrainer: {drafts: {}}", "trainer: unknown key 'drafts'; did you mean 'draft'?"),
        ("parent: base\ntrainer: {draft: 3}", "draft must be a mapping, got 3"),
        ("parent: base\ntrainer: [draft]", "trainer must be a mapping, got ['draft']"),
        ("parent: base\ntrainer: {optim: {lr: yes}}", "optim.lr must be a number, got 'yes'"),
        ("parent: base\ntrainer: {pipeline: {graphs: lazy}}", "pipeline.graphs: lazy crashes in cudagraph-trees"),
        ("parent: base\nexpects: []", "unknown key 'expects'; did you mean 'expect'?"),
        ("parent: base\nexpect: faster", "expect must be a list of text, got 'faster'"),
        ("parent: base\nexpect: [1]", 'expect[0] must be text, got 1; quote it: "1"'),
        ("parent: base\nhypothesis: 3", "hypothesis must be text, got 3"),
        ("parent: base\ngpus: true", "gpus must be a whole number of 1 or more, got True"),
        ("parent: base\ngpus: 0", "gpus must be a whole number of 1 or more, got 0"),
        ("parent: base\ngpus: []", "gpus must be a list of GPU indices or a count, got []"),
        ("parent: base\ngpus: [0, 0]", "gpus must name each GPU once, got [0, 0]"),
        ("parent: base\ngpus: [-1]", "gpus[0] must be a whole number of 0 or more, got -1"),
        ("parent: Base", "parent: a tag must match"),
        ("parent: bas", "parent 'bas': experiments/bas.yaml does not exist; did you mean 'base'?"),
        ("trainer: {target: {path: x}}", "data.path is required, got nothing"),
    ],
)
def test_a_wrong_file_is_refused_by_name(folder: Path, text: str, says: str) -> None:
    write(folder, "child", text)
    assert refusal("child", folder).startswith(f"experiments/child.yaml: {says}")


def test_a_wrong_value_of_a_parent_is_blamed_on_the_parent(folder: Path) -> None:
    write(folder, "bad", "parent: base\ntrainer: {draft: {block_size: 1}}\n")
    write(folder, "child", "parent: bad\ntrainer: {run: {steps: 5}}\n")
    assert refusal("child", folder) == "experiments/bad.yaml: draft.block_size must be 2..64, got 1"


def test_a_cycle_of_parents_is_refused(folder: Path) -> None:
    write(folder, "a", "parent: b\n")
    write(folder, "b", "parent: a\n")
    assert refusal("a", folder) == "experiments/b.yaml: parent must not lead back to itself, got a -> b -> a"
    write(folder, "self", "parent: self\n")
    assert refusal("self", folder) == "experiments/self.yaml: parent must not lead back to itself, got self -> self"


def test_a_missing_experiment_names_its_neighbours(folder: Path, tmp_path: Path) -> None:
    assert refusal("bse", folder) == "experiments/bse.yaml does not exist; did you mean 'base'?"
    assert refusal("zzz", folder) == "experiments/zzz.yaml does not exist; experiments there are base"
    assert refusal("x", tmp_path / "none").endswith("none/x.yaml does not exist; experiments there are none")


def test_describe_names_every_value_and_its_origin(folder: Path) -> None:
    write(folder, "child", "parent: base\nchange: fewer layers\ntrainer: {draft: {num_layers: 2}}\n")
    rows = {key: (value, origin) for key, value, origin in describe(load_experiment("child", folder, ["run.steps=9"]))}
    assert rows["change"] == ("fewer layers", "experiments/child.yaml")
    assert rows["hypothesis"] == ("", "default")
    assert rows["host"] == ("ct200", "experiments/base.yaml")
    assert rows["gpus"] == (8, "experiments/base.yaml")
    assert rows["draft.num_layers"] == (2, "experiments/child.yaml")
    assert rows["draft.target_layer_ids"] == ([1, 9, 17], "experiments/base.yaml")
    assert rows["run.steps"] == (9, "--set")
    assert rows["batch.rows"] == (16, "default")


@pytest.mark.parametrize(
    ("tag", "graphs", "parent"),
    [
        ("fixedshape", "none", None),
        ("cudagraph", "lazy", "fixedshape"),
        ("graphwarm", "mainwarm", "cudagraph"),
        ("threadwarm", "threadwarm", "graphwarm"),
    ],
)
def test_the_ladder_loads(tag: str, graphs: str, parent: str | None) -> None:
    experiment = load_experiment(tag, LADDER)
    assert (experiment.host, experiment.gpus, experiment.parent) == ("ct200", 8, parent)
    assert experiment.config.pipeline.graphs == graphs
    assert experiment.config.token_budget == 49152
    assert experiment.config.num_gpus == 8
    assert experiment.config.pipeline.allow_unsound == (graphs in ("lazy", "mainwarm"))
    assert experiment.hypothesis
    assert experiment.change
    assert experiment.expect


def test_quickstart_loads_and_asks_for_no_gpu() -> None:
    experiment = load_experiment("quickstart", LADDER)
    assert experiment.host == "local"
    assert not experiment.config.uses_cuda
