"""The part of the matrix in which an evaluation adds up numbers over the ranks, and right scripts that look alike."""

from audit_scripts import IMPORTS, JOIN

SOURCE = (
    IMPORTS
    + """from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Unpadded(Sampler):
    def __init__(self, dataset, num_replicas, rank):
        self.num_replicas, self.rank, self.length = num_replicas, rank, len(dataset)

    def __iter__(self):
        return iter(range(self.rank, self.length, self.num_replicas))

    def __len__(self):
        return len(range(self.rank, self.length, self.num_replicas))

"""
    + JOIN
    + """data = TensorDataset(torch.randn(48, 8), torch.randint(0, 3, (48,)))
held = TensorDataset(torch.randn({count}, 8), torch.randint(0, 3, ({count},)))
model = DistributedDataParallel(nn.Linear(8, 3))
torch.manual_seed(100 + rank)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    right = []
    with torch.no_grad():
        for inputs, targets in DataLoader({loader}):
            right += (model(inputs).argmax(1) == targets).tolist()
    model.train()
    own = len(range(rank, len(held), ranks))
{metric}dist.destroy_process_group()
"""
)
PADDED = "held, batch_size=4, sampler=DistributedSampler(held, shuffle=False)"
UNPADDED = "held, batch_size=4, sampler=Unpadded(held, ranks, rank)"
SUMS = """    both = torch.tensor([float(sum(right)), len(right)])
    dist.all_reduce(both){mark}
    print(both[0] / both[1])
"""
OWN_SUMS = SUMS.replace("sum(right)", "sum(right[:own])").replace("len(right)", "len(right[:own])")
HITS = """    hits = torch.tensor(float(sum(right[:own])))
    dist.all_reduce(hits)
    print(hits / len(held))
"""
TWO_CALLS = """    hits, count = torch.tensor(sum(right)), torch.tensor(len(right))
    dist.all_reduce(hits)
    dist.all_reduce(count){mark}
"""
GATHERED = """    parts = [torch.zeros(len(right)) for _ in range(ranks)]
    dist.all_gather(parts, torch.tensor(right).float())
    print(torch.stack(parts, 1).flatten()[: len(held)].mean())
"""
# As torchmetrics: the states of all ranks are gathered, and added up on each.
STATES = """    states = [torch.zeros(2) for _ in range(ranks)]
    dist.all_gather(states, torch.tensor([float(sum(right)), len(right)]))
    print(sum(states))
"""
TAKEN_OFF = """    twice = len(right) - own
    both = torch.tensor([float(sum(right)), len(right), twice, sum(right[own:])])
    dist.all_reduce(both)
    print((both[0] - both[3]) / (both[1] - both[2]))
"""
SEEN = """    both = torch.tensor([float(sum(right[:own])), own, len(right)])
    dist.all_reduce(both)
    print(both[0] / both[1], both[2])
"""
ONES = HITS + "    dist.all_reduce(torch.ones(1))\n"
# Of one set the examples are counted, of the other the right ones.
TWO_SETS = """    seen = torch.tensor(len(right))
    dist.all_reduce(seen)
    right = []
    with torch.no_grad():
        for inputs, targets in DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False)):
            right += (model(inputs).argmax(1) == targets).tolist()
    hits = torch.tensor(sum(right) // 2)
    dist.all_reduce(hits)
"""
TIME = """    import time

    both = torch.tensor([time.perf_counter(), len(right)])
    dist.all_reduce(both)
"""
HERE, RIGHT = "  # here", "right"


def evaluated(loader, metric, count=33, mark=""):
    """The script whose evaluation draws `loader` of `count` samples and ends with `metric`."""
    return SOURCE.format(count=count, loader=loader, metric=metric.replace("{mark}", mark))


# By name a source, what the audit is to find, and the number of ranks.
EVALUATION = {
    "padded_sums": (evaluated(PADDED, SUMS, mark=HERE), "counted_twice", 2),
    "padded_sums_3": (evaluated(PADDED, SUMS, 34, mark=HERE), "counted_twice", 3),
    "padded_sums_in_two_calls": (evaluated(PADDED, TWO_CALLS, mark=HERE), "counted_twice", 2),
    "padded_sums_to_one_rank": (
        evaluated(PADDED, SUMS.replace("all_reduce(both)", "reduce(both, 0)"), mark=HERE),
        "counted_twice",
        2,
    ),
    # Right: nothing is filled up, what is filled up is left out, or weights are right.
    "divisible_sums": (evaluated(PADDED, SUMS, 32), RIGHT, 2),
    "padded_own_sums": (evaluated(PADDED, OWN_SUMS), RIGHT, 2),
    "padded_own_hits": (evaluated(PADDED, HITS), RIGHT, 2),
    "padded_own_and_seen": (evaluated(PADDED, SEEN), RIGHT, 2),
    "padded_ones": (evaluated(PADDED, ONES, 3), RIGHT, 4),
    "padded_and_another_set": (evaluated(PADDED, TWO_SETS), RIGHT, 2),
    "padded_gathered_and_cut": (evaluated(PADDED, GATHERED), RIGHT, 2),
    "padded_states": (evaluated(PADDED, STATES), RIGHT, 2),
    "padded_taken_off": (evaluated(PADDED, TAKEN_OFF), RIGHT, 2),
    "padded_examples_a_second": (evaluated(PADDED, TIME), RIGHT, 2),
    "dropped": (evaluated(PADDED.replace("False", "False, drop_last=True"), SUMS), RIGHT, 2),
    "unequal_sums": (evaluated(UNPADDED, SUMS), RIGHT, 2),
}
