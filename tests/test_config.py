"""The flags become one checked record, and nothing that was given is lost on the way."""

import argparse

import pytest

from cos598d.commands.flags import Parser
from cos598d.commands.run_flags import GROUPS, add_run_options, run_values, to_words
from cos598d.config import RunConfig, config_from, folder_name
from cos598d.errors import UsageError


def parse(*words):
    parser = Parser()
    add_run_options(parser)
    return run_values(parser.parse_args(words))


def test_defaults_train_and_evaluate_without_dropout():
    config = config_from(parse())
    assert (config.do_train, config.do_eval, config.dropout, config.total_batch_size(4)) == (True, True, 0.0, 64)
    assert config_from(parse("--do_eval")).do_train is False


def test_the_models_own_dropout_is_not_the_default():
    assert config_from(parse("--dropout", "model")).dropout is None
    assert config_from(parse("--dropout", "0.1")).dropout == 0.1


def test_the_course_s_fp16_is_a_precision():
    assert config_from(parse("--fp16")).precision == "fp16"


def test_a_batch_per_gpu_times_ranks_times_parts_is_the_global_batch():
    values = parse("--per_gpu_train_batch_size", "4", "--gradient_accumulation_steps", "2")
    assert config_from(values).total_batch_size(world_size=3) == 24


def test_words_made_of_values_give_the_same_values_again():
    words = ["--dropout", "model", "--max_steps", "7", "--no_save_model", "--no_cuda", "--learning_rate", "3e-05"]
    assert parse(*to_words(parse(*words))) == parse(*words)


def test_every_flag_has_a_field_or_a_meaning_of_its_own():
    of_the_launch = {"world_size", "local_rank", "master_ip", "master_port", "secret", "silence_seconds"}
    translated = {"fp16", "no_save_model"}
    names = {name for options in GROUPS.values() for name, _, _ in options}
    assert names - of_the_launch - translated == set(RunConfig.__dataclass_fields__) - {"save_model"}


def test_ranks_may_differ_in_paths_but_not_in_what_they_compute():
    facts = RunConfig().facts()
    assert "data_dir" not in facts
    assert {"sync", "seed", "total_train_batch_size", "learning_rate", "max_steps"} <= facts.keys()
    assert {"optimizer", "momentum"} <= facts.keys()


@pytest.mark.parametrize(
    "values",
    [
        {"max_steps": -2},
        {"total_train_batch_size": 0},
        {"num_train_epochs": float("inf")},
        {"timeout": 0.0},
        {"seed": -1},
        {"precision": "fp8"},
        {"backend": "mpi"},
        {"model_type": "gpt2"},
        {"weight_decay": float("nan")},
        {"monitor_interval": -1.0},
        {"monitor_interval": float("inf")},
        {"optimizer": "adam"},
        {"momentum": 0.9},
        {"momentum": 1.0, "optimizer": "sgd"},
        {"momentum": float("nan"), "optimizer": "sgd"},
        {"adam_epsilon": 1e-6, "optimizer": "sgd"},
    ],
    ids=str,
)
def test_a_value_that_cannot_work_is_named_with_its_flag(values):
    with pytest.raises(UsageError, match=f"--{next(iter(values))} "):
        RunConfig(**values).check(world_size=2)


def test_a_folder_without_a_name_says_what_ran():
    config = RunConfig(label="task2b", sync="all_reduce", task_name="RTE")
    assert str(folder_name(config, 4, "now")) == "runs/task2b-rte-all_reduce-n4-now"
    assert str(folder_name(RunConfig(label="ddp", sync="ddp"), 1, "now")) == "runs/ddp-rte-n1-now"


def test_the_help_can_be_printed():
    parser = Parser()
    add_run_options(parser)
    assert isinstance(parser, argparse.ArgumentParser)
    assert "(default: 5e-05)" in " ".join(parser.format_help().split())
