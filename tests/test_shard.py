"""Shards by hand: the same training as one process; ZeRO's at the textbook's bytes, in the memory of the formulas."""

import contextlib
import copy
import functools
import json
import os
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import run_ranks

from cos598d.comm.exchange import IN_FLIGHT
from cos598d.comm.ledger import Ledger, Row
from cos598d.records.conventions import GRADIENTS, PARAMETERS, WHOLE_WEIGHTS
from cos598d.strategies.parts.units import Unit, layers, owners
from cos598d.strategies.shared_weights import SharedWeights
from cos598d.strategies.sparse_zero1 import SparseZero1
from cos598d.strategies.zero1 import Zero1
from cos598d.strategies.zero2 import Zero2
from cos598d.strategies.zero3 import Zero3
from cos598d.sync.options import SyncOptions
from cos598d.tools.check.spawn import DIED, LATE, RETURNED, run_world
from cos598d.tools.check.toy import local_batch, toy_model

STAGES = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
SHARDED = {**STAGES, "shared_weights": SharedWeights, "sparse_zero1": SparseZero1}
WORDS, WIDTH, EXAMPLES = 29, 8, 3
SMALL_BUCKETS = SyncOptions(bucket_mb=600 / 2**20, first_bucket_mb=200 / 2**20)  # a word embedding is larger


class Layered(nn.Module):
    """Layers in a list, of which one is used twice; tied, frozen, unused and tiny weights."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(97, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.order = (0, 1, 2, 1)
        self.gain = nn.Parameter(torch.ones(1))  # one element: most ranks hold nothing of it
        self.output = nn.Linear(WIDTH, WORDS)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, ids, labels):
        state = self.embedding(ids).mean(dim=1) + self.positions(ids[:, 0])
        state = self.frozen(state) * self.scale
        for place in self.order:
            state = self.blocks[place](state) + state
        logits = self.output(state * self.gain)
        return nn.functional.cross_entropy(logits.float(), labels), logits


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, state):
        return torch.tanh(self.norm(self.linear(state)))


def layered(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Layered()


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    ids = torch.randint(0, WORDS, (EXAMPLES, 5), generator=generator)
    return {"ids": ids, "labels": torch.randint(0, WORDS, (EXAMPLES,), generator=generator)}


def sgd(named):
    return torch.optim.SGD(_groups(named), lr=0.5, momentum=0.9)


def adamw(named):
    return torch.optim.AdamW(_groups(named), lr=0.01, fused=True)


def _groups(named):
    decayed, plain = [], []
    for name, p in named:
        if p.requires_grad:
            (plain if name.endswith("bias") else decayed).append(p)
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def train_alone(model, make, ranks, steps, micros, max_norm, precision="fp32"):
    """One process on all ranks' examples: the norms."""
    optimizer, norms = make(model.named_parameters()), []
    for step in range(steps):
        for micro in range(micros):
            for rank in range(ranks):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                    loss = model(**batch(step, micro, rank))[0]
                (loss / (ranks * micros)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train_sharded(strategy, module, comm, steps, micros, max_norm, first=0):
    norms = []
    for step in range(first, first + steps):
        for micro in range(micros - 1):
            with strategy.no_sync():
                strategy.backward(module(**batch(step, micro, comm.rank))[0] / (comm.world_size * micros))
        strategy.backward(module(**batch(step, micros - 1, comm.rank))[0] / (comm.world_size * micros))
        strategy.finish()
        norms.append(strategy.clip(max_norm).item())
        assert strategy.step()
    return norms


def distance(model, other):
    """The largest difference of any weight, relative to the tensor's largest."""
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for (_, a), (_, b) in pairs)


def compare(comm, name, make, micros, precision="fp32", max_norm=0.3):
    """Three steps under the strategy and alone: how far the weights are apart, and the norms."""
    model, alone = layered(comm.rank), layered(0)  # rank 0's counts
    strategy = SHARDED[name](comm, True, SMALL_BUCKETS, precision)
    module = strategy.attach(model, make)
    norms = train_sharded(strategy, module, comm, 3, micros, max_norm)
    right = train_alone(alone, make, comm.world_size, 3, micros, max_norm, precision)
    strategy.settle()
    apart = distance(model, alone)
    strategy.detach()
    return apart, max(abs(a / b - 1) for a, b in zip(norms, right, strict=True)), min(right)


def compare_all(comm):
    found = {}
    for name in SHARDED:
        found[f"{name} sgd"] = compare(comm, name, sgd, 4)
        found[f"{name} adamw"] = compare(comm, name, adamw, 1 if comm.world_size == 4 else 4)
        if comm.world_size == 2:
            found[f"{name} bf16"] = compare(comm, name, sgd, 2, "bf16")
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_weights_and_norms_are_those_of_one_process_on_the_whole_batch(ranks):
    for found in run_ranks(ranks, compare_all):
        for kind, (apart, norm, least) in found.items():
            assert least > 0.3, "clipping does not bite"
            assert apart < (2e-2 if "bf16" in kind else 1e-5), kind
            assert norm < (2e-2 if "bf16" in kind else 1e-5), kind


def toy_steps(comm, name, steps):
    """On a rank: the toy of all corners, where only some ranks use a layer and a parameter is of another dtype."""
    model, alone = toy_model(comm.rank), toy_model(0)
    strategy = SHARDED[name](comm)
    module = strategy.attach(model, sgd)
    optimizer, ranks = sgd(alone.named_parameters()), comm.world_size
    for step in range(steps):
        uses = [rank != 0 or step == 1 for rank in range(ranks)]
        strategy.backward(module(**local_batch(comm.rank, step, uses[comm.rank]))[0] / ranks)
        strategy.finish()
        strategy.clip(0.0)
        strategy.step()
        for rank in range(ranks):
            (alone(**local_batch(rank, step, uses[rank]))[0] / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy.settle()
    never = torch.equal(model.never.weight, toy_model(0).never.weight)
    kept = [name for name, part, *_ in strategy._pieces if name.startswith("never") and strategy.optimizer.state[part]]
    apart = distance(model, alone)
    strategy.detach()
    return apart, never and not kept


def toy_under_all(comm):
    return {name: toy_steps(comm, name, 3) for name in SHARDED}


def test_unused_weights_stay_and_several_dtypes_and_a_layer_of_some_ranks_are_right():
    for found in run_ranks(2, toy_under_all):
        for name, (apart, never_stays) in found.items():
            assert apart < 1e-5, name
            assert never_stays, f"{name}: weight decay must not touch what no rank uses"


def tensor_bytes(elements, ranks, rank):
    """Bytes of a rank's part, and of the others', of float32."""
    own = 4 * (elements // ranks + (rank < elements % ranks))
    return own, 4 * elements - own


def books(comm, name):
    """On a rank: what two steps sent and received by purpose, and what is held between two steps."""
    model = layered()
    model.order = (0, 1, 2)
    strategy = STAGES[name](comm, True, SMALL_BUCKETS)
    module = strategy.attach(model, adamw)
    ledger = comm.ledger = Ledger()
    train_sharded(strategy, module, comm, 2, 1, 1.0)
    between = strategy.memory()
    state = sum(v.numel() for entry in strategy.optimizer.state.values() for v in entry.values() if v.dim())
    with strategy.whole():
        moved = {purpose: [0, 0] for purpose in (GRADIENTS, PARAMETERS, WHOLE_WEIGHTS)}
        for row in ledger.rows:
            if row.purpose in moved:
                moved[row.purpose][0] += row.bytes_sent
                moved[row.purpose][1] += row.bytes_received
        whole = strategy.memory()["parameters"]
    units = [[unit.name, unit.elements, len(unit.parameters)] for unit in strategy._gradients.units]
    strategy.detach()
    return {"units": units, "moved": moved, "between": between, "whole": whole, "state": state}


def all_books(comm):
    return {name: books(comm, name) for name in STAGES}


@pytest.fixture(scope="module")
def four_books():
    return run_ranks(4, all_books)


TRAINED = sum(p.numel() for p in Layered().parameters() if p.requires_grad)
FROZEN = 4 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("name", STAGES)
def test_every_rank_sends_what_the_formula_says(four_books, name):
    total = 0
    for rank, found in enumerate(four_books):
        parts = {word: tensor_bytes(elements, 4, rank) for word, elements, _ in found[name]["units"]}
        own, others = (sum(pair[place] for pair in parts.values()) for place in (0, 1))
        assert found[name]["moved"][GRADIENTS] == [2 * others, 2 * 3 * own]
        total += others
        if name == "zero3":
            # In each of two steps before forward and before backward; the model's own and what is looked up once.
            own_units = ("the model", "embedding", "positions")  # two of them a tensor of more than a bucket
            times = {word: 4 - 2 * word.startswith(own_units) - 4 * word.startswith("never") for word in parts}
        else:
            times = dict.fromkeys(parts, 2)
        weights = [sum(times[word] * parts[word][place] for word in parts) for place in (0, 1)]
        assert found[name]["moved"][PARAMETERS] == [3 * weights[0], weights[1]]
        whole = [sum(part[place] for part in parts.values()) for place in (0, 1)] if name == "zero3" else [0, 0]
        assert found[name]["moved"][WHOLE_WEIGHTS] == [3 * whole[0], whole[1]]
    assert total == 4 * 3 * TRAINED, "(n-1)/n S on the average of 4 ranks"


@pytest.mark.parametrize("name", STAGES)
def test_every_rank_keeps_what_the_formula_says(four_books, name):
    state = 0
    for rank, found in enumerate(four_books):
        own = sum(tensor_bytes(elements, 4, rank)[0] for _, elements, _ in found[name]["units"])
        # A bucket of one tensor, which backward makes, is let go.
        let_go = 4 * sum(elements for _, elements, tensors in found[name]["units"] if tensors == 1)
        between = found[name]["between"]
        placeholders = 4 * len([p for p in Layered().parameters() if p.requires_grad]) if name == "zero3" else 0
        assert between["parameters"] == FROZEN + placeholders + (own if name == "zero3" else 4 * TRAINED)
        assert between["gradients"] == (4 * TRAINED - let_go if name == "zero1" else 0)
        state += found[name]["state"]
        assert found[name]["whole"] >= 4 * TRAINED + FROZEN
    never = WIDTH * WIDTH + WIDTH
    assert state == 2 * (TRAINED - never), "two moments of every weight that was stepped, once among the ranks"


class Lines(list):
    def writelines(self, lines):
        self.extend(lines)


def test_what_is_waited_for_after_its_iterations_rows_were_written_is_added_to_them():
    """The weights of the last step arrive when the model is to be evaluated."""
    ledger = Ledger(Lines())
    ledger.begin(1, 0.0)
    row = Row(1, GRADIENTS, "reduce_scatter", "bucket 0", (4,), "float32", 16, 12, 12, 0.1, 3)
    ledger.enter(row)
    ledger.flush()
    ledger.enter(replace(row, purpose=PARAMETERS, op="all_gather"))
    for _ in range(2):
        assert ledger.totals_by_iteration()[1].bytes_sent == 24
        assert ledger.totals_by_iteration()[1].calls == 2
        ledger.flush()


def odd_steps(comm, name):
    """On a rank: fp16 that overflows on rank 1, an evaluation of one rank's own, a second backward, and errors."""
    found = {}
    model, alone = layered(), layered()
    strategy = SHARDED[name](comm, True, SMALL_BUCKETS, "fp16")
    strategy._scale.value = 8.0
    module = strategy.attach(model, adamw)
    with strategy.whole():
        before = {key: value.clone() for key, value in model.state_dict().items()}
    loss = module(**batch(0, 0, comm.rank))[0] / comm.world_size
    strategy.backward(loss * (float("inf") if comm.rank == 1 else 1.0))
    strategy.finish()
    strategy.clip(1.0)
    counted = strategy.step()
    with strategy.whole():
        same = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    found["overflow"] = [counted, strategy.loss_scale, same, len(strategy.optimizer.state)]
    strategy.detach()

    model = layered()
    strategy = SHARDED[name](comm, True, SMALL_BUCKETS)
    module = strategy.attach(model, sgd)
    train_sharded(strategy, module, comm, 1, 1, 0.3)
    with torch.no_grad():  # every rank once, with weights that are gathered layer by layer
        logits = module(**batch(5, 0, 0))[1]
    strategy.settle()
    if comm.rank == 1:  # one rank alone, twice
        model.eval()
        with torch.no_grad():
            again = [module(**batch(5, 0, 0))[1] for _ in range(2)][1]
        found["evaluation"] = torch.equal(logits, again)
        model.train()
    # A forward that fails on all ranks, and a backward that does: the step is dropped, and training goes on.
    for failing in (fail_in_forward, fail_in_backward):
        handle = failing(model.blocks[1])
        with contextlib.suppress(ZeroDivisionError):
            strategy.backward(module(**batch(9, 0, comm.rank))[0])
        handle.remove()
        strategy.forget_step()
    # Two backwards without no_sync, the second over what the first has left on its way.
    ranks = comm.world_size
    for micro in range(2):
        strategy.backward(module(**batch(1, micro, comm.rank))[0] / (2 * ranks))
    strategy.finish()
    strategy.clip(0.3)
    strategy.step()
    strategy.settle()
    optimizer = sgd(alone.named_parameters())
    for step, micros in ((0, 1), (1, 2)):
        for micro in range(micros):
            for rank in range(ranks):
                (alone(**batch(step, micro, rank))[0] / (micros * ranks)).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    found["going on"] = distance(model, alone)
    strategy.detach()
    # What is left is a plain model.
    found["plain"] = [
        model(**batch(0, 0, 0))[0].isfinite().item(),
        all(p.grad is None for p in model.parameters()),
        not any(p._post_accumulate_grad_hooks for p in model.parameters()),
        not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()),
    ]
    return found


def fail_in_forward(module):
    return module.register_forward_pre_hook(lambda *_: 1 / 0)


def fail_in_backward(module):
    return module.register_full_backward_hook(lambda *_: 1 / 0)


def odd_steps_under_all(comm):
    return {name: odd_steps(comm, name) for name in SHARDED}


@pytest.fixture(scope="module")
def odd():
    return run_ranks(2, odd_steps_under_all)


@pytest.mark.parametrize("name", SHARDED)
def test_a_step_that_overflows_on_one_rank_leaves_no_trace_on_any(odd, name):
    for found in odd:
        assert found[name]["overflow"] == [False, 4.0, True, 0]


@pytest.mark.parametrize("name", SHARDED)
def test_a_rank_may_evaluate_by_itself_once_the_model_is_settled(odd, name):
    assert odd[1][name]["evaluation"]


@pytest.mark.parametrize("name", SHARDED)
def test_training_goes_on_after_errors_and_a_second_backward_is_added_to_the_first(odd, name):
    assert max(found[name]["going on"] for found in odd) < 1e-5


@pytest.mark.parametrize("name", SHARDED)
def test_detached_it_is_a_plain_model_again(odd, name):
    assert all(all(found[name]["plain"]) for found in odd)


def die_in_step_2(comm, name):
    model = layered()
    strategy = SHARDED[name](comm, True, SMALL_BUCKETS)
    module = strategy.attach(model, sgd)
    train_sharded(strategy, module, comm, 1, 1, 0.3)
    if comm.rank == 1:
        os._exit(9)
    train_sharded(strategy, module, comm, 1, 1, 0.3, first=1)


@pytest.mark.parametrize("name", ["zero1", "zero3", "shared_weights"])
def test_a_rank_that_dies_ends_the_others(name):
    ends = run_world(2, die_in_step_2, name, seconds=90)
    assert ends[1].how == DIED
    assert ends[0].how != RETURNED
    assert ends[0].how != LATE, "it was left hanging"


def test_pieces_of_all_ranks_are_all_elements_once_and_layers_are_what_a_list_holds():
    model = layered()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for ranks in (1, 3, 1000):
        unit = Unit("all", named, ranks)
        counted = [(piece.name, piece.end - piece.begin) for rank in range(ranks) for piece in unit.pieces(rank)]
        for name, p in named:
            assert sum(elements for of, elements in counted if of == name) == p.numel()
    names = [name for name, _ in layers(model)]
    assert names == ["never", "embedding", "positions", "frozen", "blocks.0", "blocks.1", "blocks.2", "output"]
    owner = owners(model)
    assert owner[model.embedding.weight] == owner[model.gain] == "", "tied, and of no layer: the model's own"
    assert owner[model.output.bias] == "output"
    assert model.frozen.weight not in owner


class Nested(nn.Module):
    """Modules that are called by their members alone."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})])
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.head = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, state, which):
        return self.head(self.steps[0][which](state) * self.scales[0]).sum()


def test_what_is_never_called_itself_is_no_layer():
    model = Nested()
    assert [name for name, _ in layers(model)] == ["steps.0.a", "steps.0.b", "head.0", "head.1"]
    assert owners(model)[model.scales[0]] == ""
    assert [name for name, _ in layers(nn.Linear(2, 2))] == [""]


def use_other_halves(comm, name):
    """On a rank: two micro-batches, of which rank 1 uses one half of the model for the first and the other then."""
    torch.manual_seed(0)
    model = Nested().requires_grad_(False)
    for half in model.steps[0].values():
        half.requires_grad_(True)
    before = {key: p.clone() for key, p in model.named_parameters()}
    strategy = SHARDED[name](comm, True, SyncOptions(bucket_mb=16 / 2**20, first_bucket_mb=16 / 2**20))
    module = strategy.attach(model, lambda named: torch.optim.SGD([p for _, p in named], lr=1.0))
    for _ in range(2):
        for micro, which in enumerate("ab"):
            with strategy.no_sync() if micro == 0 else contextlib.nullcontext():
                loss = module(torch.ones(2), which) + (module(torch.ones(2), "ba"[micro]) if comm.rank == 0 else 0)
                strategy.backward(loss * 0.1)
        strategy.finish()
        strategy.clip(0.0)
        strategy.step()
    strategy.settle()
    moved = {key: (p - before[key]).abs().sum().item() for key, p in model.named_parameters()}
    strategy.detach()
    return moved


@pytest.mark.parametrize("name", ["zero1", "sparse_zero1", "zero2", "shared_weights"])
def test_ranks_may_use_other_weights_in_each_micro_batch(name):
    first, second = run_ranks(2, use_other_halves, name)
    assert first == second
    assert all((moved > 0) == ("steps" in key) for key, moved in first.items())


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_a_run_from_the_command_line_evaluates_and_saves_a_model_that_a_bare_bert_loads(start, tmp_path, name):
    words = ["-m", "cos598d", "train", "--sync", name, "--world_size", 2, "--model_name_or_path", "tiny"]
    words += ["--max_steps", 3, "--total_train_batch_size", 9, "--max_train_examples", 30, "--max_eval_examples", 12]
    words += ["--check_replicas", 2, "--learning_rate", 1e-3, "--output_dir", tmp_path / "run"]
    from pytorch_transformers import BertForSequenceClassification

    assert start("train", words).wait() == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "acc" in json.dumps(summary)
    model = BertForSequenceClassification.from_pretrained(str(tmp_path / "run" / "model"))
    assert all(p.isfinite().all() for p in model.parameters())
    rows = [json.loads(line) for line in (tmp_path / "run" / "communication.rank1.jsonl").read_text().splitlines()]
    size = 4 * sum(p.numel() for p in model.parameters())
    moved = sum(row["bytes_sent"] for row in rows if row["iteration"] == 2 and row["purpose"] == GRADIENTS)
    assert moved == pytest.approx(size / 2, rel=0.01)


def watch_memory(comm):
    """On a rank: what zero3 holds of sixteen equal layers, at most while it computes a step; checkpointed ones too."""
    torch.manual_seed(0)
    layers_alone = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    model, alone = CheckpointedEvery(layers_alone, 3), copy.deepcopy(layers_alone)
    strategy = Zero3(comm, False)
    module = strategy.attach(model, sgd)
    most = {"parameters": 0, "gradients": 0}

    def sample(*_):
        memory = strategy.memory()
        most.update({category: max(value, memory[category]) for category, value in most.items()})

    for layer in model.layers:
        layer.register_forward_pre_hook(sample)
        layer.register_full_backward_hook(sample)
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(comm.rank))
    for _ in range(2):
        strategy.backward(module(inputs).square().mean() / comm.world_size)
        strategy.finish()
        strategy.clip(0.0)
        strategy.step()
    strategy.settle()
    optimizer = sgd(alone.named_parameters())
    for _ in range(2):
        for rank in range(comm.world_size):
            inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(rank))
            (alone(inputs).square().mean() / comm.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [most, distance(model.layers, alone)]


class CheckpointedEvery(nn.Module):
    """Layers one after the other, of which every so-manieth is computed again in backward."""

    def __init__(self, layers_alone, every):
        super().__init__()
        self.layers, self.every = layers_alone, every

    def forward(self, state):
        for place, layer in enumerate(self.layers):
            again = functools.partial(checkpoint, use_reentrant=False) if place % self.every == 0 else _call
            state = torch.tanh(again(layer, state))
        return state


def _call(layer, state):
    return layer(state)


def test_zero3_holds_its_part_and_two_layers_and_takes_layers_that_are_computed_again():
    layer = 4 * 64 * 64
    for most, apart in run_ranks(2, watch_memory):
        assert most["parameters"] <= 16 * (layer / 2 + 4) + 2 * layer
        assert most["gradients"] <= 16 * layer / 2 + (IN_FLIGHT + 1) * layer
        assert apart < 1e-5
