"""The strategies' table with other people's engines in it, on SQuAD."""

import pytest
from programs import TINY
from test_engines import skip_unless_installed

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
ENGINES = {"deepspeed:zero_stage=3": "deepspeed", "horovod": "horovod", "fabric": "lightning", "torch_fsdp": "torch"}


def test_engines_stand_in_the_table_with_the_baseline_s_losses_and_scores(start, tmp_path):
    for package in ENGINES.values():
        skip_unless_installed(package)
    words = ["--task_name", "squad", "--version_2_with_negative", "--max_seq_length", "64", "--max_query_length", "16"]
    words += ["--world_size", "2", "--max_train_examples", "24", "--max_eval_examples", "8", "--epochs", "2"]
    words += ["--learning_rate", "1e-3", "--no_cuda", "--strategies", ",".join(["baseline", *ENGINES])]
    call = start("table", ["-m", "cos598d", "strategies", *TINY, *words, "--runs_dir", tmp_path / "table"])
    assert call.wait(280) == 0, call.text
    assert "not the same work" not in call.text
    lines = call.text[call.text.index("\nstrategy ") + 1 :].partition("\n\n")[0].splitlines()
    head, rows = lines[0].split(), [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == ["baseline", *(engine.replace(":", "-") for engine in ENGINES)]
    columns = {name: len(head) - place for place, name in enumerate(head)}  # from the end: names of columns have spaces
    for name in ("validation_loss", "f1"):
        values = [float(row[-columns[name]]) for row in rows]
        assert values == pytest.approx([values[0]] * len(rows), rel=1e-3), name
