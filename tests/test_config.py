"""The flags become one checked record, and nothing that was given is lost on the way."""

from dataclasses import dataclass

import pytest

from cos598d.commands.cli import main
from cos598d.commands.flags import Parser, add_flags, given_flags
from cos598d.commands.flags import to_words as flag_words
from cos598d.commands.run_flags import ALIASES, FREQUENT, add_run_options, run_values, to_words
from cos598d.config import SYNC_FIELDS, RunConfig, config_from, folder_name
from cos598d.errors import UsageError
from cos598d.sync import KNOWN, get_sync
from cos598d.sync.options import takers
from cos598d.terminal.fields import Flag, check_flags, flag, flags_of
from cos598d.tools.audit.options import AuditFlags


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


def test_the_course_s_flags_are_other_names_of_ours():
    assert config_from(parse("--fp16")).precision == "fp16"
    words = ("--per_device_train_batch_size", "64", "--per_device_eval_batch_size", "4", "--save_total_limit", "3")
    config = config_from(parse(*words, "--evaluate_during_training", "--logging_steps", "20"))
    assert (config.per_gpu_train_batch_size, config.per_gpu_eval_batch_size, config.keep) == (64, 4, 3)
    assert (config.eval_steps, config.log_every) == (50, 20)
    assert {same for same, _ in ALIASES.values()} <= set(flags_of(RunConfig))


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


def test_a_batch_per_gpu_times_ranks_times_parts_is_the_global_batch():
    values = parse("--per_gpu_train_batch_size", "4", "--gradient_accumulation_steps", "2")
    assert config_from(values).total_batch_size(world_size=3) == 24


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ([], "minilm"),
        (["--task_name", "ag_news"], "minilm"),
        (["--task_name", "ag_news", "--model_type", "bert"], "minilm"),
        (["--task_name", "ag_news", "--model_type", "distilbert"], "distilbert-base-uncased"),
        (["--model_type", "roberta"], "roberta-base"),
        (["--model_type", "distilbert", "--model_name_or_path", "tiny"], "tiny"),
        (["--task_name", "digits"], "vit-tiny"),
        (["--task_name", "digits", "--model_type", "vit"], "vit-tiny"),
        (["--task_name", "digits", "--model_type", "vit", "--model_name_or_path", "vit-base"], "vit-base"),
    ],
)
def test_a_model_type_has_a_default_model(words, model):
    assert config_from(parse(*words)).model_name_or_path == model


def test_64_threads_are_accepted():
    RunConfig(threads=64).check(1)


def test_words_made_of_values_give_the_same_values_again():
    words = ["--dropout", "model", "--max_steps", "7", "--no_save_model", "--no_cuda", "--learning_rate", "3e-05"]
    assert parse(*to_words(parse(*words))) == parse(*words)


def test_every_field_of_a_run_is_a_flag_with_words_and_a_group():
    parser = Parser()
    add_run_options(parser)
    of_the_launch = {"world_size", "local_rank", "master_ip", "master_port", "silence_seconds"}
    actions = {action.dest: action for action in parser._actions}
    assert actions.keys() - of_the_launch - {"help"} == set(RunConfig.__dataclass_fields__)
    assert all(action.help for action in actions.values())
    assert "" not in {said.group for said in flags_of(RunConfig).values()}


@dataclass(frozen=True)
class OneMore(RunConfig):
    """A run with one more flag of each kind, each in one place."""

    stage: int = flag(1, "how much is sharded", group="engine", least=0, below=4)
    gather: str = flag("early", "when, one of {choices}", group="engine", choices=("early", "late"), is_local=True)
    prefetch: bool = flag(True, "fetch nothing ahead", group="engine")


def test_one_line_makes_a_flag_its_help_its_check_and_its_words():
    parser = Parser()
    add_flags(parser, OneMore, but=("gather",))
    text = " ".join(parser.format_help().split())
    assert "engine: --stage N how much is sharded (default: 1) --no_prefetch fetch nothing ahead" in text
    words = ["--stage", "3", "--no_prefetch"]
    values = given_flags(parser.parse_args(words), OneMore)
    assert values == {"stage": 3, "prefetch": False}
    assert flag_words(values, OneMore) == words
    check_flags(OneMore(**values))
    with pytest.raises(UsageError, match="^--stage 4 is not valid. Give 0, 1, 2 or 3.$"):
        check_flags(OneMore(stage=4))
    with pytest.raises(UsageError, match="^unknown --gather now. Choose one of early, late.$"):
        check_flags(OneMore(gather="now"))
    assert {"stage", "prefetch"} <= {name for name, said in flags_of(OneMore).items() if not said.is_local}


@pytest.mark.parametrize(
    ("range_", "right", "wrong", "words"),
    [
        ({"least": 1}, 1, 0, "--x 0 is not valid. Give a number of at least 1."),
        ({"above": 0}, 0.1, 0.0, "--x 0 is not valid. Give a number above 0."),
        ({"above": 0, "below": 9}, 0.1, 1e300, "--x 1e+300 is not valid. Give a number above 0 and below 9."),
        ({"least": 0, "below": 1}, 0.0, 1.0, "--x 1 is not valid. Give a number from 0 to below 1."),
        ({"least": 0, "below": 4, "kind": int}, 3, 4, "--x 4 is not valid. Give 0, 1, 2 or 3."),
        ({"least": 1, "below": 3, "kind": int}, 1, 0, "--x 0 is not valid. Give 1 or 2."),
        ({"least": 0, "below": 9, "kind": int}, 8, 9, "--x 9 is not valid. Give a whole number from 0 to 8."),
        ({}, -1.0, float("-inf"), "--x -inf is not valid. Give a number."),
        ({"least": 0}, 0.0, float("nan"), "--x nan is not valid. Give a number of at least 0."),
    ],
)
def test_a_number_outside_its_range_is_refused(range_, right, wrong, words):
    Flag("", **range_).check("x", right)
    Flag("", **range_).check("x", None)
    with pytest.raises(UsageError) as caught:
        Flag("", **range_).check("x", wrong)
    assert str(caught.value) == words


@pytest.mark.parametrize(("digits", "shown"), [(20, "1.00e+20"), (400, "1.00e+400"), (5000, "1.00e+5000")])
def test_a_whole_number_of_hundreds_of_digits_is_a_sentence(digits, shown):
    Flag("", least=0).check("x", (1 << 63) - 1)
    for sign in (1, -1):
        with pytest.raises(UsageError) as caught:
            Flag("", least=0).check("x", sign * 10**digits)
        assert (
            str(caught.value)
            == f"--x {'-' if sign < 0 else ''}{shown} is not valid. Give a whole number between -2^63 and 2^63."
        )


def test_ranks_may_differ_in_paths_but_not_in_what_they_compute():
    facts = RunConfig().facts()
    assert "data_dir" not in facts
    assert {"sync", "seed", "total_train_batch_size", "learning_rate", "max_steps"} <= facts.keys()
    assert {"optimizer", "momentum"} <= facts.keys()


NO_HOST = r"Give (a (whole )?number|at most)"
LABEL = "Give a name of up to 100 letters"
AT_LEAST_1 = "is not valid. Give a number of at least 1."
REFUSED = [
    ({"max_steps": -2}, ""),
    ({"total_train_batch_size": 0}, ""),
    ({"num_train_epochs": float("inf")}, ""),
    ({"timeout": 0.0}, ""),
    ({"seed": -1}, ""),
    ({"precision": "fp8"}, ""),
    ({"backend": "mpi"}, ""),
    ({"model_type": "gpt2"}, ""),
    ({"weight_decay": float("nan")}, ""),
    ({"monitor_interval": -1.0}, ""),
    ({"monitor_interval": float("inf")}, ""),
    ({"optimizer": "adam"}, ""),
    ({"momentum": 0.9}, ""),
    ({"momentum": 1.0, "optimizer": "sgd"}, ""),
    ({"momentum": float("nan"), "optimizer": "sgd"}, ""),
    ({"adam_epsilon": 1e-6, "optimizer": "sgd"}, ""),
    # What no host can work with.
    ({"threads": 10**9}, NO_HOST),
    ({"gradient_accumulation_steps": 2**62}, NO_HOST),
    ({"num_train_epochs": 1e300}, NO_HOST),
    ({"total_train_batch_size": 2**62}, NO_HOST),
    ({"per_gpu_train_batch_size": 2**62}, NO_HOST),
    # What is no folder's name.
    *(({"label": label}, LABEL) for label in ("../../../x", "/x", "", ".hidden", "--x", "a/b", "a\x1b", "a" * 101)),
    # When a run is evaluated and saved, when it stops, and how it resumes.
    ({"early_stopping": "0"}, "0 is not valid. Give a number of evaluations from 1"),
    ({"early_stopping": "x"}, "x is not valid. Give a number"),
    ({"early_stopping": "2:"}, "2: is not valid. Give a number"),
    (
        {"early_stopping": "2:f1"},
        "unknown metric 'f1'. Choose one of validation_loss, acc, precision_macro, recall_macro, f1_macro.",
    ),
    ({"early_stopping": "2", "do_eval": False}, "2 needs evaluations. Add --do_eval."),
    ({"eval_steps": 2, "do_eval": False}, "2 needs evaluations"),
    ({"eval_steps": 0}, f"0 {AT_LEAST_1}"),
    ({"log_every": 0}, f"0 {AT_LEAST_1}"),
    ({"lr_scheduler": "step"}, "step. Choose one of linear, constant, cosine."),
    ({"resume": "auto"}, "auto looks in the run's folder. Give --output_dir."),
    ({"resume_anyway": True}, "has no effect without --resume. Leave it out, or add --resume."),
    ({"save_steps": 5, "do_train": False}, "is for training. Leave it out, or add --do_train."),
    ({"max_seconds": 0.0}, "0 is not valid. Give a number above 0."),
    ({"keep": 0}, f"0 {AT_LEAST_1}"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=str)
def test_a_value_that_cannot_work_is_refused_with_its_flag(values, words):
    with pytest.raises(UsageError, match=rf"--{next(iter(values))} .*{words}"):
        RunConfig(**{"do_train": True, "do_eval": True, "sync": "all_reduce"} | values).check(world_size=2)


def test_a_folder_without_a_name_says_what_ran():
    config = RunConfig(label="task2b", sync="all_reduce", task_name="RTE")
    assert str(folder_name(config, 4, "now")) == "runs/task2b-rte-all_reduce-n4-now"
    assert str(folder_name(RunConfig(label="ddp", sync="ddp"), 1, "now")) == "runs/ddp-rte-n1-now"


def test_a_flag_without_a_group_is_among_the_command_s_own():
    parser = Parser()
    add_flags(parser, AuditFlags)
    assert not [line for line in parser.format_help().splitlines() if line.strip() == ":"]


def test_each_flag_of_a_sync_is_one_of_train_with_the_same_meaning_and_some_sync_takes_it():
    known = flags_of(RunConfig)
    assert [option for option in SYNC_FIELDS if not takers(option)] == []
    for name in KNOWN:
        for option, said in flags_of(get_sync(name).options_kind).items():
            assert known[option] == said, name


@pytest.mark.parametrize(("sync", "option", "value"), [("ring", "fragments", 4), ("ddp", "outer_learning_rate", 0.5)])
def test_a_flag_that_the_sync_has_not_is_refused_with_those_that_have_it(sync, option, value):
    with pytest.raises(UsageError, match=rf"--{option} .*{sync}.* or choose one of .*diloco"):
        RunConfig(do_train=True, sync=sync, **{option: value}).check(world_size=2)
