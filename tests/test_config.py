"""The flags become one checked record, and nothing that was given is lost on the way."""

import pytest

from cos598d.commands.cli import main
from cos598d.commands.flags import Parser, given_flags, to_words
from cos598d.commands.run_flags import ALIASES, FREQUENT, add_run_options
from cos598d.config import RunConfig, config_from
from cos598d.errors import UsageError
from cos598d.terminal.fields import flags_of


def parse(*words):
    parser = Parser()
    add_run_options(parser)
    return given_flags(parser.parse_args(words), RunConfig)


COURSE = ["--per_device_train_batch_size", "64", "--per_device_eval_batch_size", "4", "--save_total_limit", "3"]
MEANT = [
    ([], {"do_train": True, "do_eval": True, "dropout": 0.0, "total_batch_size": 64}),
    (["--do_eval"], {"do_train": False}),
    (["--dropout", "model"], {"dropout": None}),
    (["--dropout", "0.1"], {"dropout": 0.1}),
    (["--per_gpu_train_batch_size", "4", "--gradient_accumulation_steps", "2"], {"total_batch_size": 24}),
    # The course's flags are other names of ours.
    (["--fp16"], {"precision": "fp16"}),
    (COURSE, {"per_gpu_train_batch_size": 64, "per_gpu_eval_batch_size": 4, "keep": 3}),
    (["--evaluate_during_training", "--logging_steps", "20"], {"eval_steps": 50, "log_every": 20}),
    # A model type has a default model.
    *(
        (words, {"model_name_or_path": model})
        for words, model in (
            (["--task_name", "ag_news", "--model_type", "bert"], "minilm"),
            (["--task_name", "ag_news", "--model_type", "distilbert"], "distilbert-base-uncased"),
            (["--model_type", "roberta"], "roberta-base"),
            (["--model_type", "distilbert", "--model_name_or_path", "tiny"], "tiny"),
            (["--task_name", "digits", "--model_type", "vit"], "vit-tiny"),
            (["--task_name", "digits", "--model_name_or_path", "vit-base"], "vit-base"),
        )
    ),
]


@pytest.mark.parametrize(("words", "meant"), MEANT)
def test_flags_have_their_meaning_and_defaults(words, meant):
    config = config_from(parse(*words))
    found = {name: getattr(config, name) for name in meant}
    assert {name: value(world_size=3) if callable(value) else value for name, value in found.items()} == meant


def test_help_shows_the_frequent_flags_and_help_all_shows_all(capsys):
    shown = {}
    for words in (["--help"], ["--help", "all"]):
        with pytest.raises(SystemExit):
            main(["train", *words])
        shown[len(words)] = capsys.readouterr().out
    assert len(shown[1].splitlines()) <= 100, "two screens"
    more = shown[2].count("\n  --") - shown[1].count("\n  --")
    assert f"`--help all` shows {more} more flags" in shown[1]
    assert [name for name in FREQUENT if f"  --{name}" not in shown[1] and f"  --no_{name}" not in shown[1]] == []
    every = (*flags_of(RunConfig), *ALIASES)
    assert [name for name in every if f"  --{name}" not in shown[2] and f"  --no_{name}" not in shown[2]] == []


def test_words_made_of_values_give_the_same_values_again():
    words = ["--dropout", "model", "--max_steps", "7", "--no_save_model", "--no_cuda", "--learning_rate", "3e-05"]
    assert parse(*to_words(parse(*words), RunConfig)) == parse(*words)


NO_HOST = r"Give (a (whole )?number|at most)"
LABEL = "Give a name of up to 100 letters"
REFUSED = [
    ({"max_steps": -2}, "-2 is not valid. Give 1 or more, or -1"),
    ({"num_train_epochs": float("inf")}, "inf is not valid. Give a number above 0"),
    ({"timeout": 0.0}, "Give a number above 0"),
    ({"seed": 1 << 63}, "Give a number of at least 0 and below 2.63"),
    ({"precision": "fp8"}, "fp8. Choose one of fp32, "),
    ({"weight_decay": float("nan")}, "Give a number of at least 0"),
    ({"momentum": 0.9}, ""),
    ({"momentum": 1.0, "optimizer": "sgd"}, "Give a number of at least 0 and below 1"),
    ({"adam_epsilon": 1e-6, "optimizer": "sgd"}, ""),
    # What no host can work with.
    ({"threads": 10**9}, NO_HOST),
    ({"total_train_batch_size": 2**62}, NO_HOST),
    # What is no folder's name.
    *(({"label": label}, LABEL) for label in ("../x", "", ".hidden", "--x", "a\x1b", "a" * 101)),
    # When a run is evaluated and saved, when it stops, and how it resumes.
    ({"eval_steps": 2, "do_eval": False}, "2 needs evaluations"),
    ({"resume": "auto"}, "auto looks in the run's folder. Give --output_dir."),
    ({"resume_anyway": True}, "has no effect without --resume. Leave it out, or add --resume."),
    ({"doc_stride": 64}, "is for squad, and the task is rte."),
    ({"save_steps": 5, "do_train": False}, "is for training. Leave it out, or add --do_train."),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=str)
def test_a_value_that_cannot_work_is_refused_with_its_flag(values, words):
    with pytest.raises(UsageError, match=rf"--{next(iter(values))} .*{words}"):
        RunConfig(**{"do_train": True, "do_eval": True, "sync": "all_reduce"} | values).check(world_size=2)


@pytest.mark.parametrize(("sync", "option", "value"), [("ring", "outer_momentum", 0.5), ("ddp", "sync_every", 5)])
def test_a_flag_that_the_sync_has_not_is_refused_with_those_that_have_it(sync, option, value):
    with pytest.raises(UsageError, match=rf"--{option} .*{sync}.* or choose one of .*diloco"):
        RunConfig(do_train=True, sync=sync, **{option: value}).check(world_size=2)
