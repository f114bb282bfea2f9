"""What a run costs: forecast next to what ranks really send and hold, and tried by `auto`.
Imports the forecast and the trials, because two ranks' own counts are numbers that no command prints."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import world
from torch import nn
from worlds import these_ranks

from cos598d.comm.group import Ranks
from cos598d.comm.ledger import Ledger
from cos598d.config import RunConfig
from cos598d.cost import tune
from cos598d.cost.forecast import forecast, forecast_lines
from cos598d.errors import UsageError
from cos598d.inputs import find
from cos598d.memory import held
from cos598d.models.build import build_model
from cos598d.optimizers import make_optimizer
from cos598d.parallel import parallelize
from cos598d.records.conventions import GRADIENTS, PARAMETERS


def config(sync, **changes):
    values = {"sync": sync, "do_train": True, "model_name_or_path": "tiny", "max_seq_length": 32, "no_cuda": True}
    return RunConfig(**values | {"total_train_batch_size": 16, "max_train_examples": 96} | changes)


def second_step(sync, changes):
    """What each rank really sends in a step, in how many calls, and holds just before the optimizer's."""
    run = config(sync, **changes)
    inputs, size, rank = find(run), dist.get_world_size(), dist.get_rank()
    examples = inputs.task.load("train", inputs.source.encoder, 32, 96)
    task = inputs.task
    model = build_model(inputs.source, task.head, task.num_labels, None, 42)
    ledger = Ledger()
    make = partial(make_optimizer, model, run)
    wrapped, optimizer = parallelize(model, lambda _: make(), sync, ledger=ledger, **run.sync_options())
    with ledger:
        for iteration in (1, 2):
            ledger.begin(iteration)
            micro = [
                examples.collate(part) for part in torch.arange(rank, 16, size).chunk(run.gradient_accumulation_steps)
            ]
            for inputs in micro[:-1]:
                with wrapped.no_sync():
                    (wrapped(**inputs)[0]).backward()
            wrapped(**micro[-1])[0].backward()
            memory = held(wrapped)
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
        wrapped.settle()
    calls = [row for row in ledger.rows if row.iteration == 2 and row.purpose in (GRADIENTS, PARAMETERS)]
    return [sum(row.bytes_sent for row in calls), len(calls), memory]


FORECAST = ("all_reduce", "bucketed", "flat", "ring", "tree", "gather_scatter", "reduce_broadcast", "zero1")


@pytest.mark.parametrize("sync", FORECAST)
def test_a_forecast_is_what_the_ranks_send_and_hold(sync, ranks):
    said, found = forecast(config(sync), 2), ranks.run(second_step, sync, {})
    assert said.bytes_sent == [pytest.approx(sent, rel=0.01) for sent, _, _ in found]
    assert said.calls == pytest.approx(found[0][1], abs=2)
    counted = {name: max(memory[name] for *_, memory in found) for name in said.memory}
    assert sum(said.memory.values()) == pytest.approx(sum(counted.values()), rel=0.1)
    assert said.memory["parameters"] == pytest.approx(counted["parameters"], rel=0.01)


def test_a_forecast_counts_steps_as_the_run_does():
    found = forecast(config("ring", num_train_epochs=2), 4)
    assert (found.iterations, found.iterations_per_epoch) == (12, 6)
    lines = "\n".join(forecast_lines(config("ring"), 4, found))
    assert "iterations: 12, 6 per epoch; 16 examples per step, 4 on each rank" in lines
    assert f"sent per iteration: {found.bytes_sent[0]:,} bytes by each rank" in lines
    assert "nothing is started (--dry_run)" in lines


def test_a_forecast_says_what_it_does_not_know():
    with pytest.raises(UsageError, match="cannot try anything. Name a sync"):
        forecast(config("auto"), 2)
    with pytest.raises(UsageError, match="Add --do_train"):
        forecast(config("ring", do_train=False, do_eval=True), 2)
    found = forecast(config("bucketed", compress="fp16"), 2)
    assert not found.bytes_sent
    assert "not known, since how much --compress fp16 leaves" in "\n".join(forecast_lines(config("ring"), 2, found))
    assert forecast(config("none"), 1).bytes_sent == [0]


class Net(nn.Module):
    """An embedding, a layer that no example uses, a frozen one, and buffers."""

    def __init__(self):
        super().__init__()
        self.table, self.first = nn.Embedding(20_000, 16), nn.Linear(16, 64)
        self.norm, self.unused = nn.BatchNorm1d(64), nn.Linear(3, 3)
        self.frozen, self.last = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 2)

    def forward(self, words):
        hidden = torch.dropout(self.frozen(self.norm(self.first(self.table(words).mean(1)))), 0.1, self.training)
        return (self.last(hidden).square().mean(),)


def adamw(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1.0, weight_decay=0.1)


def choice_of(candidates=None, slow=()):
    """What `auto` chooses on these ranks for the net, and what it has changed. `slow`: syncs that sleep."""

    ranks = these_ranks()
    torch.manual_seed(7)
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    drawn = torch.get_rng_state()
    words = torch.randint(0, 20_000, (8, 5), generator=torch.Generator().manual_seed(ranks.rank))
    losses = [lambda model, part=part: model(part)[0] / 2 for part in words.chunk(2)]
    passes = []

    def counted(model):
        passes.append(type(model.sync).__name__)
        return losses[0](model)

    if candidates is not None:
        tune.CANDIDATES, tune.ON_ONE_HOST = tuple(candidates), ()
    for name in slow:
        kind = tune.get_sync(name)
        finish = kind.finish
        kind.finish = lambda self, finish=finish: (time.sleep(0.5), finish(self))[1]
    found = tune.choose(ranks, net, adamw, [counted, losses[1]], {"find_unused_parameters": True})
    same = all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    clean = all(p.grad is None for p in net.parameters()) and torch.equal(torch.get_rng_state(), drawn)
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules())
    return [found.as_record(), found.sentence, same, clean and not hooks, {name: passes.count(name) for name in passes}]


@pytest.fixture(scope="module")
def ranks():
    with world(2) as started:
        yield started


def test_auto_takes_the_fastest_that_it_has_tried_and_leaves_no_trace(ranks):
    (one, said, *clean, _), (other, *_) = ranks.run(choice_of)
    assert one == other
    assert clean == [True, True]
    tried, left_out = set(one["seconds"]), set(one["left_out"])
    assert tried | left_out == {*tune.CANDIDATES, *tune.ON_ONE_HOST}
    assert {"ddp", "bucketed", "flat", "sparse_rows"} <= tried
    assert one["sync"] == min(one["seconds"], key=one["seconds"].get)
    assert said.startswith(f"--sync auto: {one['sync']}, ")
    assert f"the fastest of {len(tried)} that were tried" in said


def test_auto_gives_up_a_candidate_that_is_much_slower_and_leaves_out_what_cannot_work(ranks):
    names = ["nonsense", "all_reduce", "gather_scatter"]
    (one, *_, passes), _ = ranks.run(partial(choice_of, names, ["gather_scatter"]))
    assert "unknown sync nonsense" in one["left_out"]["nonsense"]
    assert one["sync"] == "all_reduce"
    assert passes["AllReduce"] == tune.WARM_UP + tune.MOST
    assert passes["GatherScatter"] == 2
    assert one["seconds"]["gather_scatter"] > 0.5


def test_auto_has_nothing_to_try_for_one_rank_and_keeps_its_choice():
    alone = Ranks(0, 1, torch.device("cpu"), "gloo", ["host"])
    assert tune.choose(alone, Net(), adamw, [], {}).sync == "none"
    two = Ranks(0, 2, torch.device("cpu"), "gloo", ["host", "host"])
    kept = tune.choose(two, Net(), adamw, [], {}, before="ring")
    assert (kept.sync, kept.sentence) == ("ring", "--sync auto: ring, as in the run that is resumed")
