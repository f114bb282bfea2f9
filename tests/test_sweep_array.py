"""A sweep as an array job of SLURM: a task for each run that is missing, each on its own nodes and ranks."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from cos598d.commands.cli import main

GRID = ["--grid", "batch=4", "--grid", "setup=1x1,1x4,2x2"]
TRAIN = ["--", "train", "--task_name", "digits"]


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """printed(*words): the script that a sweep with these words prints, and what it says beside it."""
    monkeypatch.chdir(tmp_path)

    def _printed(*words, train=TRAIN):
        assert main(["sweep", *GRID, "--sbatch", *map(str, words), *train]) == 0, capsys.readouterr()
        return capsys.readouterr()

    return _printed


def test_it_asks_for_the_largest_shape_and_a_task_for_each_run(printed, tmp_path):
    words = ["--name", "mine", "--time", "60", "--parallel", 2, "--setup", "module load cuda", "--cpus_per_rank", 3]
    found = printed(*words)
    asked = re.findall(r"^#SBATCH --(.*)$", found.out, flags=re.MULTILINE)
    assert asked == [
        *("array=0-2%2", "job-name=cos598d", "nodes=2", "ntasks=8", "ntasks-per-node=4", "time=60", "signal=USR1@60"),
        *("cpus-per-task=3", "output=%x-%A_%a.out", "open-mode=append", "requeue"),
    ]
    assert "\nmodule load cuda\n" in found.out
    assert "an array job of 3 tasks, with its runs in runs/mine" in found.err
    state = json.loads((tmp_path / "runs" / "mine" / "sweep.json").read_text())
    assert state["axes"] == {"batch": ["4"], "setup": ["1x1", "1x4", "2x2"]}
    assert state["combinations"] == {}
    (tmp_path / "job.sh").write_text(found.out)
    assert subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=False).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", tmp_path / "job.sh"], check=False).returncode == 0


@pytest.mark.parametrize(
    ("task", "shape"),
    [
        (0, ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]),
        (1, ["--nodes=1", "--ntasks=4", "--ntasks-per-node=4"]),
        (2, ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]),
    ],
)
def test_each_task_starts_its_own_run_whatever_its_words_mean_to_the_shell(task, shape, printed, tmp_path):
    """Run by bash, with an srun that only tells its words."""
    name = "it's $(touch HERE) ;*"
    train = ["--", "train", "--task_name", "digits", "--cache_dir", name]
    (tmp_path / "job.sh").write_text(printed("--runs_dir", "a sweep", train=train).out)
    (tmp_path / "srun").write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    (tmp_path / "srun").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task)}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    words = json.loads(done.stdout)
    assert words[:8] == ["--kill-on-bad-exit=0", *shape, sys.executable, "-m", "cos598d", "train"]
    label = f"batch4-setup{('1x1', '1x4', '2x2')[task]}-seed42"
    assert words[words.index("--output_dir") + 1] == str(tmp_path / "a sweep" / label)
    assert words[words.index("--label") + 1] == label
    assert words[words.index("--cache_dir") + 1] == name
    assert words[-2:] == ["--resume", "auto"]
    assert not (tmp_path / "HERE").exists()


def test_outside_of_an_array_the_script_says_so(printed, tmp_path):
    (tmp_path / "job.sh").write_text(printed("--name", "mine").out)
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: this is an array job. Submit it with sbatch.\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--sbatch"], "--sbatch needs the folder of the sweep. Give --name or --runs_dir"),
        (["--time", "60"], "--time is only for --sbatch. Leave --time out, or add --sbatch."),
        (
            ["--setup", "2x2"],
            "--setup is only for --sbatch. Leave --setup out, or add --sbatch. For the axis setup, write --grid setup",
        ),
        (["--sbatch", "--name", "x", "--grid", "delay=1ms"], "--grid delay is for emulated hosts"),
        (["--sbatch", "--name", "x", "--launch", "env {command}"], "--launch and --sbatch exclude each other"),
        (["--sbatch", "--name", "x", "--time", "soon"], "--time soon is not valid. Give minutes"),
        (["--sbatch", "--name", "x", "--mem", "a b"], "--mem 'a b' is not valid. Leave out spaces"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *GRID, *words, *TRAIN]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert sentence in found.err
    assert len(found.err.splitlines()) == 1
    assert not list(tmp_path.glob("runs/x/*"))


def test_its_words_are_the_sweep_s_as_a_shell_reads_them(printed):
    text = printed("--name", "mine").out
    (line,) = [line for line in text.splitlines() if "batch4-setup1x4-seed42" in line]
    words = shlex.split(line)
    assert words[:2] == ["set", "--"]
    assert "--world_size" not in words
