"""Lesson 5: the sum of tensors of any length, by 2(n-1) messages from each rank to one neighbour."""

import pytest
import torch

from cos598d.tools.exam.explain import explain

LENGTHS, LONGEST, WHOLE = (12, 10, 1009, 7, 2, 1), 1009, 1200
LONGER = 2000  # than any tensor of the text
MESSAGES = ("send", "recv")
SUM = {
    "scaled": "rank {rank}'s result is the sum times {factor:.4g}: an all-reduce adds up, without a division",
    "twice": "rank {rank}'s result is the average over {n} ranks: an all-reduce is the sum, without a division",
    "local": "rank {rank} still has its own tensor: add what comes in to a view of `tensor`, in place",
}


def draw(seed, rank, length, dtype=torch.float32):
    """Between 0.5 and 1.5, with either sign; of float16 whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed + 1000 * rank + length)
    signs = torch.randint(0, 2, (length,), generator=generator) * 2 - 1
    if dtype == torch.float32:
        return (torch.rand(length, generator=generator) + 0.5) * signs
    return (torch.randint(1, 9, (length,), generator=generator) * signs).to(dtype)


def lengths_of(seed):
    """Of the tensors: those of the text, and a longer one that no file can know."""
    return (*LENGTHS, LONGER + seed % LONGER)


def all_reduces(comm, module, seed):
    """On a rank: the sums of all lengths; and the longest one halfway, when its second half of messages begins."""
    found, seen = {}, []
    for length in lengths_of(seed):
        tensor = draw(seed, comm.rank, length)
        begun = 0

        def look(when, op, part, tensor=tensor, length=length):
            nonlocal begun
            if when == "begin":
                if begun == 2 * (comm.world_size - 1) and length == LONGEST:
                    seen.append(tensor.clone())
                begun += 1

        comm.probe = look
        module.all_reduce(comm, tensor)
        found[f"a tensor of {length} elements"] = tensor
    half = draw(seed, comm.rank, 12, torch.float16)
    module.all_reduce(comm, half)
    return {"sums": found, "half": half, "halfway": seen}


@pytest.mark.parametrize("n", [3, 2, 4])
def test_sums(ranks, seed, n):
    """Afterwards the tensor is the sum over all ranks, on every rank: of 1 to 1009 elements, also of float16."""
    world = ranks(n, all_reduces, seed, only=MESSAGES)
    own = [
        {f"a tensor of {length} elements": draw(seed, rank, length) * n for length in lengths_of(seed)}
        for rank in range(n)
    ]
    longest = [draw(seed, rank, LONGEST) for rank in range(n)]
    name = f"a tensor of {LONGEST} elements"
    why = parts_in_words(longest, [v["sums"][name] for v in world.values], [v["halfway"] for v in world.values])
    if why:
        world.fail(why, detail=f"on {n} ranks, in {name}; expected the sum over all ranks in every part")
    wrong = explain([value["sums"] for value in world.values], own, words=SUM)  # the mean of n times each is the sum
    if wrong:
        world.fail(wrong[1], wrong[0], wrong[2])
    right = torch.stack([draw(seed, rank, 12, torch.float16) for rank in range(n)]).sum(dim=0)
    for rank, value in enumerate(world.values):
        words = (
            f"a tensor of float16 is not the sum on rank {rank}, although those of float32 are: receive into a tensor "
        )
        world.require(torch.equal(value["half"], right), f"{words}of the same dtype (torch.empty_like)", rank)


def parts_in_words(own, found, halfway):
    """Whose numbers the parts of a tensor hold where they are not the sum, and in which half that went wrong."""
    n = len(own)

    def held(tensor, part):
        middle = slice(part * LONGEST // n + n, (part + 1) * LONGEST // n - n)  # however a file cuts
        basis = torch.stack([each[middle] for each in own], dim=1).double()
        times = torch.linalg.lstsq(basis, tensor[middle].double().unsqueeze(1)).solution.flatten().round()
        return times.int().tolist() if (basis @ times - tensor[middle].double()).abs().max() < 1e-3 else None

    def halfway_of(seen):
        return [held(seen[0], part) for part in range(n)] if seen else []

    holds = [[held(tensor, part) for part in range(n)] for tensor in found]
    half = [halfway_of(seen) for seen in halfway]
    wrong = [(r, p, times) for r, parts in enumerate(holds) for p, times in enumerate(parts) if times != [1] * n]
    if not wrong or any(times is None for *_, times in wrong):
        return ""
    if all(times == [int(other == r) for other in range(n)] for r, _, times in wrong):
        return ""
    rank, part, times = wrong[-1]
    where = f"part {part} of rank {rank}'s tensor"
    if max(times) > 1:
        words = (
            f"{where} has rank {times.index(max(times))}'s numbers {max(times)} times: in the second half what comes "
        )
        return words + "in replaces what is there, and is not added"
    if all(parts.count([1] * n) == 1 for parts in holds):
        return f"each rank has the sum of only one part ({where} has none): the second half passes parts round"
    if {parts.index([1] * n) for parts in half if [1] * n in parts} == set(range(n)):
        words = f"{where} is not the sum, and the first half was right, which left each rank the sum of one part: "
        return words + "in the second half, which part goes out, and which comes in, at each step?"
    if sum(times) == 1:
        return f"{where} is rank {times.index(1)}'s own: in the first half what comes in is added to what is there"
    missing = " and ".join(str(r) for r, count in enumerate(times) if not count)
    return f"{where} lacks the numbers of rank {missing}: which part goes out, and which comes in, at each step?"


def one_all_reduce(comm, module, seed):
    tensor = draw(seed, comm.rank, WHOLE)
    module.all_reduce(comm, tensor)
    return tensor


@pytest.mark.parametrize("n", [3, 4])
def test_neighbours_only(ranks, seed, n):
    """Each rank sends 2(n-1) messages of S/n bytes, all of them to one rank, and receives as many from one."""
    world, size = ranks(n, one_all_reduce, seed, only=MESSAGES), WHOLE * 4
    right = 2 * (n - 1) * size // n
    for rank, trace in enumerate(world.traces):
        for op, verb, to in (("send", "sent", "to"), ("recv", "received", "from")):
            calls = [call for call in trace.calls if call.op == op]
            moved, peers = sum(call.bytes for call in calls), sorted({str(call.peer) for call in calls})
            why = "n-1 steps to collect, n-1 to pass round, one part in each"
            why = (
                "each half has n-1 steps, since a part needs no step to stay where it is"
                if len(calls) > 2 * (n - 1)
                else why
            )
            why = "the whole tensor is sent each time; cut it into n parts" if moved == len(calls) * size else why
            why = "the sum has to be made of messages" if not calls else why
            is_right = (len(calls), moved) == (2 * (n - 1), right)
            words = f"rank {rank} {verb} {len(calls)} messages of {moved} bytes in all on {n} ranks, expected 2(n-1) = "
            words += f"{2 * (n - 1)} messages and 2(n-1)/n S = {right} bytes: {why}"
            world.require(is_right, words, rank)
            words = f"rank {rank} {verb} messages {to} ranks {', '.join(peers)}, expected only one neighbour"
            world.require(len(peers) < 2, words, rank)
