"""`--config` repeats a run to the last bit, and accepts only values of flags from the file."""

import json
from dataclasses import asdict

import pytest
from programs import TINY_TRAINING

from cos598d.commands import cli
from cos598d.commands.flags import Parser, given_flags
from cos598d.commands.replay import repeated
from cos598d.commands.train import add_options
from cos598d.config import RunConfig, config_from
from cos598d.tools.report.equal import compare_equal  # compare --assert_equal, without a program

STEPS = ["--max_steps", 4, "--save_steps", 2]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The config.json of a run of 2 ranks that need not run: the flags of one as its record has them."""
    folder = tmp_path_factory.mktemp("recorded")
    values = {"sync": "bucketed", "seed": 7, "model_name_or_path": "tiny", "output_dir": "before", "resume": "auto"}
    file = folder / "config.json"
    file.write_text(json.dumps(asdict(config_from(values)) | {"world_size": 2}))
    return file


def test_a_run_of_two_ranks_is_repeated_to_the_last_bit(start, tmp_path):
    words = [*TINY_TRAINING, *STEPS, "--sync", "bucketed", "--dropout", "model", "--seed", 7, "--world_size", 2]
    assert start("first", ["-m", "cos598d", "train", *words, "--output_dir", "first"]).wait() == 0
    again = ["-m", "cos598d", "train", "--config", "first/config.json"]
    second = start("second", [*again, "--output_dir", "second"])
    assert second.wait() == 0
    assert second.text.splitlines()[0] == "repeats first/config.json"
    is_equal, sentence = compare_equal([tmp_path / "first", tmp_path / "second"])
    assert is_equal, sentence
    third = start("third", [*again, "--output_dir", "third", "--seed", 8, "--world_size", 1])
    assert third.wait() == 0
    assert third.text.splitlines()[0] == "repeats first/config.json"
    assert json.loads((tmp_path / "third" / "config.json").read_text())["world_size"] == 1
    assert not compare_equal([tmp_path / "first", tmp_path / "third"])[0]


def test_a_task_script_repeats_its_own_run_in_a_new_folder(run_here, tmp_path):
    words = [*TINY_TRAINING, *STEPS, "--output_dir", "first", "--monitor_interval", 0]
    assert run_here("task1/run_glue.py", words)[0] == 0
    code, said = run_here("task1/run_glue.py", ["--config", "first/config.json"])
    assert code == 0, said
    (second,) = (tmp_path / "runs").iterdir()
    is_equal, sentence = compare_equal([tmp_path / "first", second])
    assert is_equal, sentence


def values(options):
    parser = Parser()
    add_options(parser)
    found = parser.parse_args(list(map(str, options)))
    return repeated(found.config, given_flags(found, RunConfig))


def test_folders_are_not_repeated_and_flags_override_the_file(recorded):
    found = values(["--config", recorded, "--learning_rate", 1e-3, "--per_gpu_train_batch_size", 4])
    assert not {"output_dir", "resume", "total_train_batch_size"} & set(found)
    assert (found["seed"], found["learning_rate"], found["per_gpu_train_batch_size"]) == (7, 1e-3, 4)
    assert found["sync"] == "bucketed"


def changed(file, folder, change):
    """A copy of a config with other values, or with these bytes."""
    path, text = folder / "config.json", change
    if isinstance(change, dict):
        found = json.loads(file.read_text()) | change
        text = json.dumps({name: value for name, value in found.items() if value != "gone"}).encode()
    path.write_bytes(text)
    return path


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"colour": "red"}, "is no config: this version has no colour. Give the config.json of a run's folder."),
        ({"world_size": "gone"}, "is no config: it has no sync or no world_size. Give the config.json"),
        ({"seed": "7"}, "is no config: Expected `int`, got `str` - at `$.seed`"),
        ({"seed": 10**400}, "is not valid. Give a number of at least 0 and below 2^63."),
        ({"learning_rate": [1]}, "is no config: Expected `float`, got `array` - at `$.learning_rate`"),
        ({"learning_rate": -1}, "--learning_rate -1 is not valid. Give a number of at least 0."),
        ({"label": "\x1b[2J"}, "--label \\x1b[2J is not valid. Give a name"),
        ({"sync": "evil.py:Sync"}, "is of a run whose --sync is code in a file, evil.py:Sync. Add --sync"),
        ({"sync": "\x1b[2J.py"}, "code in a file, \\x1b[2J.py"),
        ({"world_size": 0}, "it has no sync or no world_size"),
        (b"", "is no config: Input data was truncated"),
        (b"\xff\xfe", "is no config: "),
        (b"[1]", "is no config: Expected `object`, got `array`"),
        (b'{"learning_rate": NaN}', "is no config: JSON is malformed"),
        (b"[" * 100_000, "is no config: "),
    ],
)
def test_a_value_that_is_no_flag_s_is_refused(recorded, tmp_path, monkeypatch, capsys, change, sentence):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--config", str(changed(recorded, tmp_path, change))]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"], "nothing was begun"


def test_code_that_a_config_names_runs_only_when_the_user_names_it(recorded, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text('open("ran", "w")\n')
    file = changed(recorded, tmp_path, {"sync": "evil.py:Mine"})
    words = ["train", "--config", str(file), "--dry_run"]
    assert cli.main(words) == 2
    assert not (tmp_path / "ran").exists()
    assert cli.main([*words, "--sync", "evil.py:Mine"]) == 2
    assert (tmp_path / "ran").exists()
    assert "evil.py has no class Mine" in capsys.readouterr().err
    assert values(["--config", file, "--sync", "ddp"])["sync"] == "ddp"
