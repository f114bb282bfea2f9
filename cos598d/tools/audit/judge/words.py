"""The title of every finding, why it matters, and the usual fix."""

from typing import NamedTuple


class Words(NamedTuple):
    """The text of a finding."""

    title: str
    why: str
    mend: str
    level: str = "fault"


WORDS = {
    "hang": Words(
        "the ranks wait for one another forever",
        "A collective returns when all ranks of its group have called it, in one order. These calls can never meet.",
        "Let every rank make the same calls in the same order. Give all the same number of batches, and keep "
        "collectives out of branches that only some ranks go through.",
    ),
    "different_start": Words(
        "the ranks start from different weights",
        "Averaged gradients move every replica alike, so replicas that start different stay different models.",
        "After the model is made, send rank 0's state to all: dist.broadcast(p.data, 0) for every parameter and "
        "buffer, or wrap it in DistributedDataParallel, which does it.",
    ),
    "same_batches": Words(
        "all ranks train on the same batches",
        "Every rank computes the same gradient, so n ranks do the work of one, and an epoch is n times too long.",
        "Give each rank its own share: DataLoader(..., sampler=DistributedSampler(dataset)), with this rank's number.",
    ),
    "overlapping_batches": Words(
        "the batches of different ranks overlap",
        "Samples that several ranks train on count several times, and other samples do not count.",
        "Cut each global batch into shares without a common sample, or use a DistributedSampler.",
    ),
    "all_data_everywhere": Words(
        "every rank goes through all the data",
        "An epoch takes n times too many steps, and each sample is trained on n times in it.",
        "Give the loader sampler=DistributedSampler(dataset), and leave shuffle out of the loader.",
    ),
    "shares_drawn_apart": Words(
        "each rank shuffles the data by itself before it takes its share",
        "The shares overlap: some samples are trained on by several ranks, and others by none.",
        "Shuffle with one seed on every rank, before the data is cut: random.Random(0).shuffle(files).",
    ),
    "sharded_twice": Words(
        "the data is cut over the ranks twice",
        "Each rank's share is cut again, so most samples are never drawn.",
        "Cut once: give the loader the rank's Subset without a DistributedSampler, or the sampler the whole data.",
    ),
    "repeated_by_workers": Words(
        "each worker of a loader reads all of a rank's samples",
        "A rank draws each sample once for each worker, so an epoch is that many times too long.",
        "Divide the stream in __iter__ by worker as well as by rank: torch.utils.data.get_worker_info().",
    ),
    "evaluation_leak": Words(
        "ranks are evaluated on samples that other ranks train on",
        "The averaged model has been trained on them, so its evaluation is too good.",
        "Split the data once, in the same way on every rank, before the samplers: "
        "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)).",
    ),
    "never_averaged": Words(
        "the gradients are never averaged",
        "Each weight is trained on one rank's share of the data, and what the other ranks compute for it is lost.",
        "After backward() and before step(): dist.all_reduce(p.grad) and p.grad /= world_size for every parameter.",
    ),
    "result_dropped": Words(
        "gradients are sent, but their average is not applied",
        "The communication costs time, and each rank still trains on its own gradients.",
        "Put the result where the optimizer reads it: p.grad.copy_(result), or call the collective on p.grad itself.",
    ),
    "not_scattered": Words(
        "the average stays on one rank",
        "Only that rank steps by the average; the others step by their own gradients, and the replicas drift apart.",
        "Send the average back before step(): dist.scatter or dist.broadcast from the rank that has it, into p.grad.",
    ),
    "zero_gradients": Words(
        "all gradients are 0",
        "No step changes what the model computes: the loss does not depend on the weights, as a cross-entropy over one "
        "class does not.",
        "Check what the loss is computed from: the number of outputs, the labels, and whether it was detached.",
    ),
    "summed": Words(
        "the gradients are summed, not averaged",
        "On n ranks every step is n times too large: with SGD the learning rate is multiplied by n, and clipping sets "
        "in sooner.",
        "Divide by the number of ranks after the all-reduce (p.grad /= world_size), or use ReduceOp.AVG if the backend "
        "has it.",
    ),
    "averaged_twice": Words(
        "the gradients are divided by the number of ranks twice",
        "On n ranks every step is n times too small.",
        "Divide once: DistributedDataParallel and ReduceOp.AVG have divided already.",
    ),
    "wrong_factor": Words(
        "the gradients are scaled by a wrong factor",
        "Every step is too large or too small by this factor on any data: the learning rate is multiplied by it, and "
        "clipping sets in sooner or later.",
        "Divide the sum over the ranks by their number, dist.get_world_size(), and by nothing else. Put a factor that "
        "you want into the loss or the learning rate.",
    ),
    "forgotten_tensors": Words(
        "some tensors' gradients are not averaged",
        "These weights are trained on each rank's own data, and drift apart while all others stay equal.",
        "Average every parameter that has a gradient. Check the condition or the list that leaves these out.",
    ),
    "weights_averaged": Words(
        "weights are averaged instead of gradients",
        "With an optimizer that keeps moments (momentum, Adam) this is another algorithm: each rank's moments come "
        "from its own gradients, and clipping uses its own norm.",
        "Average p.grad between backward() and step(), not p.data after step().",
    ),
    "clipped_before_average": Words(
        "gradients are clipped before they are averaged",
        "Each rank scales its part by its own norm, so the applied gradient is no multiple of the global batch's.",
        "Move the clip after the average, just before step().",
    ),
    "unequal_weights": Words(
        "the ranks' gradients count unequally",
        "The applied gradient is not that of the global batch's mean loss: some ranks' samples weigh more.",
        "Weight each rank's loss by its share of the global batch, and average over all ranks equally.",
    ),
    "partial_average": Words(
        "gradients are averaged over only some of the ranks",
        "The other ranks' gradients are lost, and replicas that are averaged separately drift apart.",
        "Call the collective on the group of all ranks that share the weights.",
    ),
    "lost_micro_batches": Words(
        "the micro-batches of a step count unequally, or not at all",
        "The applied gradient is not the mean over the accumulated batch, and some of the work may be lost.",
        "Call zero_grad() once after step(). Divide each micro-batch's loss by their number, or weight it by its share "
        "of the samples. Average after the last backward pass: with DDP all others are under model.no_sync().",
    ),
    "micro_batches_summed": Words(
        "the gradients of a step's micro-batches are added, not averaged",
        "With k micro-batches a step is k times too large: the learning rate is multiplied by k, and clipping sets in "
        "sooner.",
        "Divide each micro-batch's loss by their number: (loss / accumulation_steps).backward().",
    ),
    "leftover_micro_batches": Words(
        "an epoch's leftover micro-batches are added to the next epoch's first step",
        "That step has more micro-batches than the others, and its loss is divided by too small a number.",
        "Step after the last batch of an epoch too, with its loss divided by what is left; or drop what is left, and "
        "call zero_grad() when an epoch begins.",
    ),
    "clipped_by_micro_batch": Words(
        "gradients are clipped after each micro-batch",
        "What earlier micro-batches left is scaled down again each time, so the last ones count more, and the norm is "
        "not that of the whole gradient.",
        "Clip once, after the last backward pass of a step and just before step().",
    ),
    "loss_times_ranks": Words(
        "the loss is multiplied by the number of ranks, and the gradients are averaged",
        "Every step is as large as if the gradients were summed: with SGD the learning rate is multiplied by n.",
        "Take the factor out of the loss. It is right only where each rank's loss is over what it has gathered from "
        "all ranks without a gradient.",
    ),
    "scale_left_in": Words(
        "the gradient scaler's factor is still in what is applied",
        "Each step is as many times too large as the scaler's factor.",
        "Call scaler.unscale_(optimizer) after the average is in p.grad, or leave it to scaler.step(optimizer).",
    ),
    "never_waited": Words(
        "an asynchronous call is never waited for",
        "The optimizer steps while the gradients are still on their way: what it reads is sometimes the average, and "
        "sometimes not.",
        "Keep what the call returns, and call work.wait() on it before step().",
    ),
    "stale_gradients": Words(
        "old gradients are applied again",
        "The gradient of each step includes those of earlier steps: steps grow, and point in old directions.",
        "Call optimizer.zero_grad() after each step(), or before the first backward() of the next.",
    ),
    "different_gradients": Words(
        "the ranks apply different gradients",
        "Replicas that step differently are no longer one model.",
        "Let every rank apply the same average. Do not change it on only one rank afterwards.",
    ),
    "weights_drift": Words(
        "the weights drift apart",
        "At the end each rank has a different model, and only one of them is kept.",
        "Find what the ranks do differently: the gradients, the optimizers' settings, or a weight that one rank "
        "changes.",
    ),
    "no_set_epoch": Words(
        "the sampler draws the same order in every epoch",
        "DistributedSampler shuffles by its seed and epoch. Without set_epoch every epoch has the same batches, and "
        "each rank always gets the same share of the data.",
        "Call sampler.set_epoch(epoch) at the start of every epoch.",
    ),
    "same_dropout": Words(
        "all ranks draw the same dropout masks",
        "The same units are dropped for every share of a batch, so the noise does not average out over the ranks.",
        "After the model is made, seed each rank differently: torch.manual_seed(seed + rank).",
        level="note",
    ),
    "batch_norm_apart": Words(
        "batch norm's running statistics differ between ranks",
        "They come from each rank's own data, and the model that is evaluated or saved has those of only one rank.",
        "Use torch.nn.SyncBatchNorm, or broadcast the buffers from rank 0 before evaluating and saving.",
    ),
    "optimizers_differ": Words(
        "the optimizers' settings differ between ranks",
        "The same gradient makes a different step on each rank, so the replicas drift apart.",
        "Compute the learning rate and its schedule from what all ranks share: the number of steps, not a rank's own "
        "data.",
    ),
    "counted_twice": Words(
        "examples that pad the ranks' shares are counted twice in a metric",
        "A DistributedSampler repeats examples until all ranks have the same number: the metric is not the test set's.",
        "Leave the repeated ones out before adding up: rank r has len(range(r, len(dataset), world_size)) of its own.",
    ),
    "saved_at_once": Words(
        "several ranks write the same file at once",
        "A file that two processes write at once may have parts of both, and then cannot be loaded.",
        "Save only on rank 0, and let the others wait in a barrier; or put the rank's number into the file's name.",
    ),
    "uneven_sizes": Words(
        "ranks give parts of different sizes to an all-gather",
        "gloo and nccl gather equal parts only: the call fails, or mixes up what follows.",
        "Fill the parts up to one size, gather, and cut off what was filled; or gather the sizes first.",
    ),
    "uneven_calls": Words(
        "the ranks do not make the same calls",
        "Collectives are matched by their order: one that not all ranks call is matched with another one, or waits.",
        "Move the call out of the branch that only some ranks go through. All ranks of a group have to make it.",
    ),
    "skipped_by_one": Words(
        "a rank skips a step that the others make",
        "It makes no calls in that step. The others' calls meet its next ones, or wait.",
        "Decide together: all-reduce a flag (dist.ReduceOp.MAX), and skip on every rank or on none.",
    ),
    "uneven_steps": Words(
        "ranks make different numbers of backward passes",
        "A rank without more batches makes no more calls: the others wait in their next collective call, or fail.",
        "Give every rank the same number of batches: drop_last=True, or a sampler that pads.",
    ),
    "every_micro_batch_travels": Words(
        "every micro-batch is synchronized under accumulation",
        "Gradients need to be sent once per step. Sending before the last micro-batch is wasted time.",
        "Put all micro-batches except the last under model.no_sync() (forward and backward), or all-reduce after the "
        "last one.",
        level="waste",
    ),
    "evaluation_repeated": Words(
        "every rank evaluates the same samples",
        "n ranks take as long as one would.",
        "Give each rank its share of the samples and add up the counts, or evaluate only on rank 0.",
        level="waste",
    ),
    "local_steps": Words(
        "weights are averaged every few steps",
        "This is local SGD: between two averages the ranks step by their own gradients, by design.",
        "Nothing, if you want local SGD.",
        level="note",
    ),
}
