"""`--sync auto`: known costs lead to the right choice, every rank makes it, and nothing else changes."""

from dataclasses import replace

import pytest
import torch
from report_records import read
from torch import nn
from worlds import run_ranks

from cos598d.config import RunConfig, config_from, recorded
from cos598d.cost import choice as choosing
from cos598d.cost import probe as probing
from cos598d.cost.choice import Choice, candidates, choose, predict
from cos598d.cost.compute import Computed, time_compute
from cos598d.cost.forecast import forecast
from cos598d.cost.model import Compute
from cos598d.cost.probe import Probe, measure
from cos598d.data import get_task
from cos598d.errors import UsageError
from cos598d.models.build import build_model, find_model
from cos598d.records.run import read_summary
from cos598d.sync import SYNCS
from cos598d.tools.report.load import load_run

ONE_HOST, FOUR_HOSTS = [[0, 1, 2, 3]], [[0], [1], [2], [3]]
DIGITS = ["--task_name", "digits", "--max_train_examples", 60, "--max_eval_examples", 30]
DIGITS += ["--total_train_batch_size", 20]
LOOPBACK = Probe(0.0, None, 1e-4, 4e-10, 1e-10, 1.0)
SLOW = replace(LOOPBACK, rate=1e8)


class Words(nn.Module):
    """A large embedding, and layers enough for several buckets."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20_000, 128)
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(40)))


def computed_by(model, touched=0.2, backward=0.2, step=0.05):
    names = [name for name, _ in model.named_parameters()][::-1]
    arrivals = {name: backward * (place + 1) / len(names) for place, name in enumerate(names)}
    return Computed(Compute(0.1, backward, step, arrivals), step, names, touched)


def predicted(hosts=FOUR_HOSTS, probe=SLOW, touched=0.2, step=0.05):
    """Seconds by candidate, the fastest first."""
    model, config = Words(), RunConfig()
    names, _ = candidates(config, hosts, shares_memory=True)
    found, unsaid = predict(names, config, model, False, hosts, computed_by(model, touched, step=step), probe, 2.0)
    assert not unsaid
    return dict(sorted(found.items(), key=lambda one: one[1]))


def test_unused_rows_decide_on_a_slow_link():
    few, all_of_them = predicted(touched=0.1), predicted(touched=1.0)
    assert set(list(few)[:2]) == {"sparse_rows", "sparse_zero1"}
    assert few["bucketed"] == all_of_them["bucketed"]
    assert all_of_them["sparse_rows"] >= all_of_them["bucketed"] * 0.999


def test_shared_weights_are_fastest_on_one_host_with_a_slow_step():
    found = predicted(ONE_HOST, LOOPBACK)
    assert next(iter(found)) == "shared_weights"
    assert found["shared_weights"] < found["shared_memory"] < found["all_reduce"]
    assert found["hierarchical"] == pytest.approx(found["shared_memory"])  # which it is, on one host


def test_syncs_in_shared_memory_are_last_if_memory_is_slow():
    found = predicted(ONE_HOST, replace(LOOPBACK, memory_seconds_per_byte=1e-7, processor_seconds_per_byte=1e-12))
    assert set(list(found)[-3:]) == {"shared_weights", "shared_memory", "hierarchical"}


def test_a_delay_makes_many_calls_slow_and_single_messages_fast():
    near, far = predicted(probe=replace(SLOW, rate=1e9)), predicted(probe=replace(SLOW, rate=1e9, delay=0.01))
    assert far["all_reduce"] - near["all_reduce"] > 5
    assert far["ring"] - near["ring"] < 0.2
    assert far["ring"] < far["flat"] < far["all_reduce"]


def test_a_slow_optimizer_favours_strategies_that_divide_its_step():
    plain, dear = predicted(probe=LOOPBACK, step=0.0), predicted(probe=LOOPBACK, step=4.0)
    assert plain["bucketed"] + 4 == pytest.approx(dear["bucketed"])
    assert dear["zero1"] - plain["zero1"] == pytest.approx(1.0)


def test_weights_gathered_during_forward_cost_what_forward_does_not_hide():
    sent = 2 * 0.75 * 4 * sum(p.numel() for p in Words().parameters()) * 8 / SLOW.rate
    found = predicted(touched=1.0)
    # Forward takes 0.1 s, backward 0.2: the gradients' half begins in backward, the weights' with forward.
    assert sent < found["zero1"] < found["bucketed"] < sent + 0.5
    # Every rank sends the rows that it looks up to every other: of few rows that is less, of all of them more.
    assert predicted(touched=0.1)["sparse_zero1"] < found["zero1"] < found["sparse_zero1"]


def test_bytes_to_all_others_at_once_cost_the_measured_spread():
    plain, spread = predicted(touched=1.0), predicted(touched=1.0, probe=replace(SLOW, spread=1.5))
    sent = 2 * 0.75 * 4 * sum(p.numel() for p in Words().parameters()) * 8 / SLOW.rate
    assert spread["zero1"] - plain["zero1"] == pytest.approx(0.5 * sent, rel=0.02)
    assert {name: spread[name] for name in SYNCS if name in plain} == {n: plain[n] for n in SYNCS if n in plain}


def test_candidates_that_are_left_out_have_a_reason():
    names, left_out = candidates(RunConfig(), FOUR_HOSTS, shares_memory=True)
    assert {"ddp", "bucketed", "ring", "sparse_rows", "hierarchical", "zero1", "zero3"} <= set(names)
    assert left_out["local_sgd"] == "not exact"
    assert left_out["shared_memory"] == left_out["shared_weights"] == "for one host only"
    assert left_out["deepspeed"] == left_out["dp"] == "another library's engine"
    assert "none" not in {*names, *left_out}
    names, left_out = candidates(RunConfig(), ONE_HOST, shares_memory=False)
    assert left_out["shared_weights"] == left_out["hierarchical"] == "memory cannot be shared here"
    assert "zero1" in names


def test_the_sentence_names_the_choice_and_the_two_runners_up():
    choice = Choice("ring", "4 ranks on 4 hosts", {"ring": 1.0, "flat": 1.25, "ddp": 1.5, "tree": 3.0}, {}, {})
    assert choice.sentence.startswith("--sync auto: ring, 1 s per iteration")
    assert "flat 1.25 s, ddp 1.5 s (4 ranks on 4 hosts)" in choice.sentence
    assert "tree" not in choice.sentence
    assert replace(choice, predicted={}, why="for a reason").sentence == "--sync auto: ring, for a reason"


def small_model_and_examples():
    config = config_from({"task_name": "digits", "max_train_examples": 60, "total_train_batch_size": 20})
    task = get_task("digits", config)
    source = find_model("vit-tiny", task.image_form)
    task.find(None)
    examples = task.load("train", source.encoder, config.max_seq_length, 60)
    return config, build_model(source, task.head, task.num_labels, 0.1, 42), examples


def _timed_ranks(comm):
    config, model, examples = small_model_and_examples()
    model.register_buffer("seen", torch.zeros(1))
    model.register_forward_pre_hook(lambda module, _: module.seen.add_(1) and None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(7 + comm.rank)
    expected = torch.rand(3)
    torch.manual_seed(7 + comm.rank)
    computed = time_compute(config, comm, model, examples)
    assert torch.equal(torch.rand(3), expected), "random numbers were drawn"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert set(computed.arrival) == {name for name, _ in model.named_parameters()}
    assert all(0 <= moment <= computed.compute.backward for moment in computed.compute.arrivals.values())
    probe = measure(comm, [[0, 1]], 1.0)
    assert probe.rate is None
    assert probe.spread == 1.0
    assert probe.delay == 0.0
    assert min(probe.step_seconds, probe.processor_seconds_per_byte, probe.memory_seconds_per_byte) > 0
    return [computed.compute.seconds, computed.touched, vars(probe)]


def _spread_where_each_exchange_takes_longer(comm):
    """On a rank: the spread, if each exchange takes twice as long as the last; and the bytes and ranks of each."""
    exchanges = []

    def swapped(_, size, to, of):
        exchanges.append([size, list(to), list(of)])
        return 2.0 ** len(exchanges), 0.0

    probing._swapped = swapped
    *_, spread = probing._bytes(comm)
    return spread, exchanges


def test_the_spread_is_measured_with_all_others_at_once():
    for rank, (spread, exchanges) in enumerate(run_ranks(3, _spread_where_each_exchange_takes_longer)):
        others = [other for other in range(3) if other != rank]
        neighbours = [[size, [(rank + 1) % 3], [(rank - 1) % 3]] for size in (1 << 16, 1 << 18)]
        assert exchanges == [*neighbours, [1 << 17, others, others]]
        assert spread == 2
    for rank, (spread, exchanges) in enumerate(run_ranks(2, _spread_where_each_exchange_takes_longer)):
        assert exchanges == [[size, [1 - rank], [1 - rank]] for size in (1 << 16, 1 << 18)]
        assert spread == 1


def test_timing_changes_nothing_and_all_ranks_have_the_same_numbers():
    first, second = run_ranks(2, _timed_ranks)
    assert first == second


def _embedding_ranks(comm):
    from cos598d.cost.compute import _look_up, _touched

    embedding = nn.Embedding(10, 4)
    rows = torch.zeros(10, dtype=torch.uint8)
    _look_up(rows, embedding, (torch.tensor([[comm.rank, 5]]),), {})
    _look_up(rows, embedding, (), {"input": torch.tensor([7])})
    return [_touched(comm, {embedding.weight: rows}), _touched(comm, {})]


def test_the_rows_of_all_ranks_are_counted_once():
    assert run_ranks(3, _embedding_ranks) == [[0.5, 1.0]] * 3


def _choosing_ranks(comm, by_rank, before):
    """`by_rank`: the seconds per byte of memory that each rank has measured."""
    config, model, examples = small_model_and_examples()
    choosing.time_compute = lambda *_: computed_by(model)
    choosing.measure = lambda *_: replace(LOOPBACK, memory_seconds_per_byte=by_rank[comm.rank])
    choice = choose(config, comm, model, examples, False, before)
    return [choice.sync, choice.why, dict(choice.predicted)]


def test_rank_0_decides_for_all():
    for by_rank in ([1e-12, 1.0], [1.0, 1e-12]):
        first, second = run_ranks(2, _choosing_ranks, by_rank, None)
        assert first == second
        assert (first[0] in ("shared_weights", "shared_memory")) == (by_rank[0] < 1)


def test_a_resumed_run_keeps_its_choice_if_its_options_allow_it():
    options = recorded(RunConfig().sync_options())
    same = run_ranks(2, _choosing_ranks, [1.0, 1.0], {"sync": "tree", **options})
    assert same == [["tree", "as in the run that is resumed", {}]] * 2
    for other in ({"sync": "local_sgd", **options}, {"sync": "tree", **options, "bucket_mb": 1.0}, {"sync": ["x"]}):
        assert run_ranks(2, _choosing_ranks, [1.0, 1.0], other)[0][2]


def words(*more):
    return ["-m", "cos598d", "train", *DIGITS, "--sync", "auto", "--max_steps", 2, "--no_cuda", *more]


def test_a_run_prints_and_records_its_choice_and_has_that_sync_s_losses(start, tmp_path):
    program = start("auto", words("--world_size", 2, "--output_dir", "auto", "--save_steps", 2))
    assert program.wait() == 0, program.text
    said = [line for line in program.text.splitlines() if "--sync auto: " in line]
    assert len(said) == 1
    summary = read_summary(tmp_path / "auto")
    chosen = summary["auto"]
    assert summary["sync"] == chosen["sync"] == next(iter(chosen["predicted"]))
    assert f"--sync auto: {chosen['sync']}, " in said[0]
    assert list(chosen["predicted"].values()) == sorted(chosen["predicted"].values())
    assert read(tmp_path / "auto" / "config.json")["sync"] == "auto"
    assert load_run(tmp_path / "auto")["sync"] == chosen["sync"], "its two files are of one run"
    named = [word if word != "auto" else chosen["sync"] for word in words("--world_size", 2, "--output_dir", "named")]
    program = start("named", named)
    assert program.wait() == 0, program.text
    assert read_summary(tmp_path / "named")["losses"] == summary["losses"]
    assert "auto" not in read_summary(tmp_path / "named")
    further = [word if word != 2 else 3 for word in words("--output_dir", "on", "--resume", "auto")]
    program = start("on", [*further, "--world_size", 2, "--resume", "auto/checkpoints", "--resume_anyway"])
    assert program.wait() == 0, program.text
    assert f"--sync auto: {chosen['sync']}, as in the run that is resumed" in program.text


def test_a_single_rank_has_nothing_to_average(run_here):
    code, said = run_here("cos598d/__main__.py", words("--output_dir", "out")[2:])
    assert code == 0, said
    assert "--sync auto: none, since a single rank has nothing to average" in said


@pytest.mark.parametrize("flags", [{"compress": "bf16"}, {"bucket_mb": 5.0}, {"sync_every": 2}])
def test_a_sync_s_flag_is_refused(flags):
    with pytest.raises(
        UsageError, match=f"--{next(iter(flags))} cannot be combined with --sync auto, which uses the defaults"
    ):
        RunConfig(sync="auto", **flags).check(2)


def test_a_dry_run_cannot_choose():
    with pytest.raises(UsageError, match="--dry_run starts no ranks, so --sync auto cannot measure"):
        forecast(config_from({"task_name": "digits", "sync": "auto"}), 2)
