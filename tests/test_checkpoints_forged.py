"""A forged value, whose digest the manifest vouches for, is named with its file and field."""

import json
import re
import shutil

import pytest
import torch
from lives import live
from programs import TINY
from safetensors import safe_open
from safetensors.torch import save_file
from saved_states import COMM, SYNC, open_checkpoints, own_of, vouch
from worlds import run_ranks

from cos598d.checkpoints import Forms, find
from cos598d.errors import UserError
from cos598d.measure.record import RunRecord
from cos598d.records.kinds import fault
from cos598d.records.saved import facts_after, training_after
from cos598d.strategies import get_strategy
from cos598d.sync.options import SyncOptions

FORMS = Forms(training_after, facts_after)
NEWEST = "step-00000004"
TASK2B = "task2b/run_glue.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoints of a run of two ranks, after 2 and 4 steps."""
    folder = tmp_path_factory.mktemp("saved")
    values = {"sync": "local_sgd", "sync_every": 3, "max_steps": 4, "save_steps": 2, "do_eval": False}
    run_ranks(2, live, str(folder), values)
    return folder / "checkpoints"


@pytest.fixture
def folder(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run" / "checkpoints")
    return tmp_path / "run" / "checkpoints"


def forge(folder, name, place, value):
    """Put `value` at `place`, names with dots between, of a JSON file, and its digest into the manifest."""
    path = folder / NEWEST / name
    content = json.loads(path.read_text())
    *outer, last = place.split(".")
    inside = content
    for one in outer:
        inside = inside[int(one) if isinstance(inside, list) else one]
    if value == GONE:
        del inside[last]
    else:
        inside[int(last) if isinstance(inside, list) else last] = value
    path.write_text(json.dumps(content))
    vouch(folder / NEWEST, name)


GONE = "no longer there"
POSITION = "training.position"
RECORD = "training.record"
IN_TRAINING = [
    (POSITION, []),
    (f"{POSITION}.iteration", "4"),
    (f"{POSITION}.iteration", 10**6),
    (f"{POSITION}.stepped", -1),
    (f"{POSITION}.stepped", 5),
    (f"{POSITION}.evaluated", True),
    (f"{POSITION}.epoch_iterations", GONE),
    (f"{POSITION}.epoch_loss", "nan"),
    (f"{POSITION}.more", 1),
    ("training.early_stopping", None),
    ("training.early_stopping.metric", 3),
    ("training.early_stopping.best", "0.5"),
    ("training.early_stopping.best_iteration", 1.5),
    ("training.early_stopping.waited", GONE),
    ("training.facts", []),
    ("training.facts", GONE),
    ("scalars.loss_scale", "1"),
    ("scalars.loss_scale", 0),
    ("scalars.good_steps", -3),
    ("own_is_lost", 7),
    ("sync", []),
    ("iteration", 3.5),
]
IN_RANK = [
    (RECORD, GONE),
    (f"{RECORD}.iteration", 3),
    (f"{RECORD}.files", {"iterations.rank0.jsonl": -1}),
    (f"{RECORD}.sums", {"one": {}}),
    (f"{RECORD}.sums.1", [{}]),
    (f"{RECORD}.sums.1.1", {"seconds": 10**30}),
    (f"{RECORD}.row", []),
    (f"{RECORD}.row.epoch", GONE),
    (f"{RECORD}.row.counted_bytes_sent", "many"),
    (f"{RECORD}.ledger.by_purpose", {"gradients": [1, 2]}),
    (f"{RECORD}.ledger.entered", None),
    (f"{RECORD}.detail.calls", [0, 0]),
    (f"{RECORD}.detail", GONE),
    (f"{RECORD}.monitor", {}),
    ("strategy", 5),
]
OF_RANK_0 = [
    (f"{RECORD}.epochs", {}),
    (f"{RECORD}.epochs", [{"epoch": "first"}]),
    (f"{RECORD}.attempts", [{}]),
    (f"{RECORD}.attempts.0.to_iteration", "x"),
    (f"{RECORD}.departed", []),
    (f"{RECORD}.departed", {"../../../outside": {}}),
    (f"{RECORD}.departed", {"2/../../outside": {}}),
    (f"{RECORD}.departed", {"2": {}}),
    (f"{RECORD}.departed", {"1_0": {}}),
]


FORGED = [("training.json", *one) for one in IN_TRAINING] + [("rank0.json", *one) for one in OF_RANK_0]
FORGED += [(f"rank{rank}.json", *one) for rank in range(2) for one in IN_RANK]


@pytest.mark.parametrize(("name", "place", "value"), FORGED, ids=str)
def test_a_forged_value_is_named_and_the_checkpoint_before_is_taken(name, place, value, folder):
    forge(folder, name, place, value)
    found = find("auto", folder, COMM, FORMS)
    assert found.iteration == 2
    (remark,) = found.remarks
    assert remark.startswith(f"the checkpoint {folder / NEWEST} is damaged ({name}: ")
    said = re.sub(r"(?<!sums)\.(\d+)(?=\.|$)", r"[\1]", place)
    assert f"it has no {said}" in remark or f"its {said}" in remark
    assert " is expected)." in remark
    assert "\n" not in remark


def test_a_saved_checkpoint_has_the_expected_forms(saved):
    for place in (saved, saved / "step-00000002", saved / NEWEST):
        assert find(str(place), None, COMM, FORMS).remarks == []


def test_deeply_nested_values_are_damaged(folder):
    forge(folder, "training.json", "training.facts.data", json.loads("[" * 500 + "]" * 500))
    assert "training.json is nested more than 32 deep" in find("auto", folder, COMM, FORMS).remarks[0]


def test_no_name_in_a_checkpoint_leads_outside_the_run_s_folder(saved, tmp_path):
    """Files of departed ranks have the usual names, whatever a checkpoint calls them."""
    shutil.copytree(saved.parent, tmp_path / "run")
    outside = tmp_path / "outside.jsonl"
    outside.write_text("precious\n")
    positions = [
        json.loads((saved / NEWEST / f"rank{rank}.json").read_text())["training"]["record"] for rank in range(2)
    ]
    names = ["../../outside.jsonl", str(outside), "iterations.rank../../../outside.jsonl"]
    positions[0]["departed"] = {"5": {**positions[1], "files": dict.fromkeys(names, 3)}}
    assert fault({"record": positions[0]}, facts_after(4, 0)) is None
    with RunRecord(tmp_path / "run", 0, world_size=2, resume=positions) as record:
        record.position()
    assert outside.read_text() == "precious\n"
    assert not list(tmp_path.rglob("*rank5*"))


def test_all_ranks_end_with_exit_code_2_and_name_the_file_and_field(start_ranks, tmp_path):
    words = [*TINY, "--max_steps", "4", "--save_steps", "2", "--no_save_model", "--output_dir", "out"]
    for program in start_ranks(TASK2B, 2, words):
        assert program.wait() == 0, program.text
    folder = tmp_path / "out" / "checkpoints"
    words = [*words, "--resume", str(folder / NEWEST)]
    words[words.index("out")] = "again"
    forge(folder, "rank1.json", "strategy", {})
    for rank, program in enumerate(start_ranks(TASK2B, 2, words)):
        assert program.wait() == 2, program.text
        assert f"rank {rank}: " in program.text
        assert "step-00000004/rank1.json: the local state of rank 1 does not fit this run (" in program.text
        assert "Traceback" not in program.text
    shutil.rmtree(tmp_path / "again")
    forge(folder, "training.json", "training.position.stepped", "many")
    for program in start_ranks(TASK2B, 2, words):
        assert program.wait() == 2, program.text
        assert '(training.json: its training.position.stepped is "many", where a whole number from' in program.text
        assert "Traceback" not in program.text


OF_SYNCS = [
    ("local_sgd", "steps", "x"),
    ("local_sgd", "replicas_equal", 1),
    ("ddp", "steps_made", None),
    ("ddp", "arrival", [0.5]),
    ("ddp", "steps", GONE),
]


def refusals(comm):
    """What each of OF_SYNCS is answered by."""
    said = []
    for sync, place, value in OF_SYNCS:
        strategy = get_strategy(sync)(comm, True, SyncOptions(), "fp32")
        strategy.attach(torch.nn.Linear(2, 2), lambda named: torch.optim.SGD([p for _, p in named], lr=1.0))
        facts, tensors = strategy.own_state()
        strategy.load_own_state(facts, tensors)
        changed = {name: one for name, one in facts["sync"].items() if name != place}
        changed |= {} if value == GONE else {place: value}
        try:
            strategy.load_own_state(facts | {"sync": changed}, tensors)
        except UserError as error:
            said.append(str(error))
    return said


def test_a_sync_s_local_state_is_held_to_its_form():
    said, _ = run_ranks(2, refusals)
    assert len(said) == len(OF_SYNCS)
    for sentence, (_, place, _) in zip(said, OF_SYNCS):
        assert sentence.startswith("the local state of rank 0 does not fit this run (ValueError: it")
        assert f" {place}" in sentence


def test_iterations_that_were_not_evaluated_yet_belong_to_an_epoch():
    position = {"iteration": 4, "stepped": 4, "evaluated": 3, "epoch_iterations": 0, "epoch_loss": 0.0}
    early = {"metric": "acc", "best": None, "best_iteration": 0, "waited": 0}
    value = {"position": position, "early_stopping": early, "facts": {}}
    assert fault(value, training_after(4)).startswith("its position.epoch_iterations is 0, where a whole number of at")
    position["epoch_iterations"] = 1
    assert fault(value, training_after(4)) is None
    assert fault(value, training_after(5)).startswith("its position.iteration is 4, where 5 is expected")


def trained():
    """A strategy whose model has made a step."""
    strategy = get_strategy("none")(COMM, True, SyncOptions(), "fp32")
    model = torch.nn.BatchNorm1d(3)
    strategy.attach(model, lambda named: torch.optim.AdamW([p for _, p in named]))
    model(torch.randn(4, 3)).sum().backward()
    strategy.optimizer.step()
    return strategy, model


FORGED_TENSORS = [
    ("model/model.safetensors", "weight", lambda tensor: tensor.long(), "has the weights of weight as int64"),
    ("model/model.safetensors", "num_batches_tracked", lambda tensor: tensor.float(), "tracked as float32"),
    ("model/model.safetensors", "bias", lambda tensor: tensor[:2].clone(), "of bias in the shape (2,)"),
    ("optimizer.rank0.safetensors", "exp_avg/weight@0", lambda tensor: tensor.long(), "exp_avg of weight as int64"),
    ("optimizer.rank0.safetensors", "exp_avg_sq/bias@0", lambda tensor: tensor.half(), "exp_avg_sq of bias as float16"),
]


@pytest.mark.parametrize(("name", "key", "change", "words"), FORGED_TENSORS)
def test_a_tensor_of_another_dtype_or_shape_is_named_by_its_file(name, key, change, words, tmp_path):
    with open_checkpoints(tmp_path / "checkpoints", COMM) as checkpoints:
        checkpoints.save(trained()[0], 4, {}, lambda: own_of(COMM, 4))
        assert checkpoints.hear() == []
    place = tmp_path / "checkpoints" / NEWEST
    with safe_open(place / name, framework="pt") as file:
        tensors, metadata = {one: file.get_tensor(one) for one in file.keys()}, file.metadata()  # noqa: SIM118
    find(str(place), None, COMM).restore(trained()[0], COMM, SYNC)
    save_file(tensors | {key: change(tensors[key])}, place / name, metadata)
    vouch(place, name)
    found = find(str(place), None, COMM)
    with pytest.raises(UserError) as error:
        found.restore(trained()[0], COMM, SYNC)
    assert str(error.value).startswith(f"{place / name} has the ")
    assert words in str(error.value)
    if name.startswith("model"):
        with pytest.raises(UserError, match="does not fit this model") as error:
            found.load_model(trained()[1], COMM)
        assert str(error.value).startswith(f"{place / name} has the ")
