"""`examples/from_scratch.py`, which imports nothing of ours, trains as task 2(b) does: the same losses."""

import json
import os
import re
import runpy

import pytest
import torch
from programs import ROOT, Program, programs_end
from worlds import run_ranks

from cos598d.config import RunConfig
from cos598d.data.sampler import global_batches
from cos598d.models.build import build_model, find_model

STEPS, BATCH, RATE = 6, 10, 0.05
SCRIPT = ROOT / "examples" / "from_scratch.py"
WORDS = f"--model_name_or_path tiny --optimizer sgd --learning_rate {RATE} --lr_scheduler constant --max_steps {STEPS}"
# Torch's names of a layer's parts, and BERT's. Query, key and value are one matrix in torch.
PARTS = {
    "self_attn.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}
OUTSIDE = {
    "word": "bert.embeddings.word_embeddings",
    "position": "bert.embeddings.position_embeddings",
    "segment": "bert.embeddings.token_type_embeddings",
    "norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "classifier": "classifier",
}


def weights_for(names, bert):
    """BERT's weights under the names of the script's model."""
    found = {}
    for name in names:
        part, kind = name.rsplit(".", 1)
        if layer := re.match(r"encoder\.layers\.(\d+)\.(.+)", name):
            number, inner = layer.groups()
            ours = f"bert.encoder.layer.{number}"
            if inner.startswith("self_attn.in_proj_"):
                kind = inner.removeprefix("self_attn.in_proj_")
                matrices = [bert[f"{ours}.attention.self.{one}.{kind}"] for one in ("query", "key", "value")]
                found[name] = torch.cat(matrices)
            else:
                found[name] = bert[f"{ours}.{PARTS[inner.rsplit('.', 1)[0]]}.{kind}"]
        else:
            found[name] = bert[f"{OUTSIDE[part]}.{kind}"]
    return found


def losses_from_scratch(comm, sync, file):
    script = runpy.run_path(str(SCRIPT))
    weights, batches = torch.load(file, weights_only=True)
    model = script["Classifier"](len(weights["bert.embeddings.word_embeddings.weight"]))
    if comm.rank == 0:  # the script itself sends them to the others
        model.load_state_dict(weights_for(model.state_dict(), weights))
    return script["train"](model, sync, batches, RATE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The losses of task 2(b), and a file with its first weights and its global batches."""
    folder = tmp_path_factory.mktemp("task2b")
    words = f"--world_size 2 --total_train_batch_size {BATCH} --no_save_model --do_train --output_dir out {WORDS}"
    with programs_end():
        program = Program(folder, "run", [str(ROOT / "task2b/run_glue.py"), *words.split()])
        assert program.wait() == 0, program.text
    rows = [json.loads(line) for line in (folder / "out/iterations.rank0.jsonl").read_text().splitlines()]
    os.environ.pop("GLUE_DIR", None)  # the program did not get it: both read the bundled sample
    config = RunConfig(model_name_or_path="tiny")
    task = config.task()
    source = find_model("tiny")
    task.find(None)
    features = task.load("train", source.encoder, config.max_seq_length)
    model = build_model(source, task.head, task.num_labels, 0.0, config.seed)
    batches = []
    for _, batch in zip(range(STEPS), global_batches(len(features), BATCH, config.seed, 0)):
        made = features.collate(batch)
        batches.append([made[name] for name in ("input_ids", "attention_mask", "token_type_ids", "labels")])
    torch.save((model.state_dict(), batches), folder / "first.pt")
    return [row["loss"] for row in rows], folder / "first.pt"


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("sync", ["gather_scatter", "all_reduce", "bucketed"])
def test_losses_are_those_of_task_2b(trained, sync):
    expected, file = trained
    for ranks in (1, 3):  # 10 examples over 3 ranks: shares of 4, 3 and 3
        for losses in run_ranks(ranks, losses_from_scratch, sync, str(file)):
            assert losses == pytest.approx(expected, abs=2e-6)
    assert expected[-1] != pytest.approx(expected[0], abs=1e-3)


@pytest.mark.long
def test_script_starts_under_torchrun_and_imports_nothing_of_ours(start):
    assert "cos598d" not in SCRIPT.read_text(encoding="utf-8")
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 150
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT), "--steps", "2"]
    program = start("torchrun", run, is_fresh=True)
    assert program.wait() == 0, program.text
    assert "step 2: loss" in program.text
