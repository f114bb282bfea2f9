"""The title of every finding, why it matters, and the usual fix."""

from typing import NamedTuple


class Words(NamedTuple):
    """The text of a finding."""

    level: str
    title: str
    why: str
    mend: str


_F, _W, _N = "fault", "waste", "note"
WORDS = {
    "hang": Words(
        _F,
        "the ranks wait for one another forever",
        "A collective returns when all ranks of its group have called it, in one order. These calls can never meet.",
        "Let every rank make the same calls in the same order. Give all the same number of batches, and keep "
        "collectives out of branches that only some ranks go through.",
    ),
    "different_start": Words(
        _F,
        "the ranks start from different weights",
        "Averaged gradients move every replica alike, so replicas that start different stay different models.",
        "After the model is made, send rank 0's state to all: dist.broadcast(p.data, 0) for every parameter and "
        "buffer, or wrap it in DistributedDataParallel, which does it.",
    ),
    "same_batches": Words(
        _F,
        "all ranks train on the same batches",
        "Every rank computes the same gradient, so n ranks do the work of one, and an epoch is n times too long.",
        "Give each rank its own share: DataLoader(..., sampler=DistributedSampler(dataset)), with this rank's number.",
    ),
    "overlapping_batches": Words(
        _F,
        "the batches of different ranks overlap",
        "Samples that several ranks train on count several times, and other samples do not count.",
        "Cut each global batch into shares without a common sample, or use a DistributedSampler.",
    ),
    "all_data_everywhere": Words(
        _F,
        "every rank goes through all the data",
        "An epoch takes n times too many steps, and each sample is trained on n times in it.",
        "Give the loader sampler=DistributedSampler(dataset), and leave shuffle out of the loader.",
    ),
    "evaluation_leak": Words(
        _F,
        "ranks are evaluated on samples that other ranks train on",
        "The averaged model has been trained on them, so its evaluation is too good.",
        "Split the data once, in the same way on every rank, before the samplers: "
        "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)).",
    ),
    "never_averaged": Words(
        _F,
        "the gradients are never averaged",
        "Each weight is trained on one rank's share of the data, and what the other ranks compute for it is lost.",
        "After backward() and before step(): dist.all_reduce(p.grad) and p.grad /= world_size for every parameter.",
    ),
    "result_dropped": Words(
        _F,
        "gradients are sent, but their average is not applied",
        "The communication costs time, and each rank still trains on its own gradients.",
        "Put the result where the optimizer reads it: p.grad.copy_(result), or call the collective on p.grad itself.",
    ),
    "not_scattered": Words(
        _F,
        "the average stays on one rank",
        "Only that rank steps by the average; the others step by their own gradients, and the replicas drift apart.",
        "Send the average back before step(): dist.scatter or dist.broadcast from the rank that has it, into p.grad.",
    ),
    "zero_gradients": Words(
        _F,
        "all gradients are 0",
        "No step changes what the model computes: the loss does not depend on the weights, as a cross-entropy over one "
        "class does not.",
        "Check what the loss is computed from: the number of outputs, the labels, and whether it was detached.",
    ),
    "summed": Words(
        _F,
        "the gradients are summed, not averaged",
        "On n ranks every step is n times too large: with SGD the learning rate is multiplied by n, and clipping sets "
        "in sooner.",
        "Divide by the number of ranks after the all-reduce (p.grad /= world_size), or use ReduceOp.AVG if the backend "
        "has it.",
    ),
    "averaged_twice": Words(
        _F,
        "the gradients are divided by the number of ranks twice",
        "On n ranks every step is n times too small.",
        "Divide once: DistributedDataParallel and ReduceOp.AVG have divided already.",
    ),
    "wrong_factor": Words(
        _F,
        "the gradients are scaled by a wrong factor",
        "Every step is too large or too small by this factor on any data: the learning rate is multiplied by it, and "
        "clipping sets in sooner or later.",
        "Divide the sum over the ranks by their number, dist.get_world_size(), and by nothing else. Put a factor that "
        "you want into the loss or the learning rate.",
    ),
    "forgotten_micro_batches": Words(
        _F,
        "some backward passes' gradients are not averaged",
        "Gradients that are computed after the average stay on their own rank, so the replicas drift apart.",
        "Average after the last backward pass of a step: with DistributedDataParallel all except the last are under "
        "model.no_sync().",
    ),
    "modes_differ": Words(
        _F,
        "some ranks train in evaluation mode",
        "Dropout is off there, and batch norm uses its running statistics without updating them. So these ranks "
        "compute the gradients of another function.",
        "Call model.train() on every rank before training, and again after each evaluation.",
    ),
    "forgotten_tensors": Words(
        _F,
        "some tensors' gradients are not averaged",
        "These weights are trained on each rank's own data, and drift apart while all others stay equal.",
        "Average every parameter that has a gradient. Check the condition or the list that leaves these out.",
    ),
    "weights_averaged": Words(
        _F,
        "weights are averaged instead of gradients",
        "With an optimizer that keeps moments (momentum, Adam) this is another algorithm: each rank's moments come "
        "from its own gradients, and clipping uses its own norm.",
        "Average p.grad between backward() and step(), not p.data after step().",
    ),
    "clipped_before_average": Words(
        _F,
        "gradients are clipped before they are averaged",
        "Each rank scales its part by its own norm, so the applied gradient is no multiple of the global batch's.",
        "Move the clip after the average, just before step().",
    ),
    "clipped_by_part": Words(
        _F,
        "each rank clips by the norm of its own part of the gradients",
        "If weights are sharded, a rank has only the gradients of its shards. Their norm is smaller than the norm of "
        "all and differs between ranks, so the applied gradient is no multiple of one gradient.",
        "Sum the squared norms over the ranks first: torch.nn.utils.clip_grad_norm_ does it for fully_shard, "
        "model.clip_grad_norm_ for FullyShardedDataParallel.",
    ),
    "unequal_weights": Words(
        _F,
        "the ranks' gradients count unequally",
        "The applied gradient is not that of the global batch's mean loss: some ranks' samples weigh more.",
        "Weight each rank's loss by its share of the global batch, and average over all ranks equally.",
    ),
    "partial_average": Words(
        _F,
        "gradients are averaged over only some of the ranks",
        "The other ranks' gradients are lost, and replicas that are averaged separately drift apart.",
        "Call the collective on the group of all ranks that share the weights.",
    ),
    "unequal_micro_batches": Words(
        _F,
        "the micro-batches of a step count unequally",
        "The applied gradient is not the mean over the accumulated batch.",
        "Divide each micro-batch's loss by the number of micro-batches, or by its share of the samples.",
    ),
    "lost_micro_batches": Words(
        _F,
        "gradients of micro-batches are thrown away",
        "Their forward and backward passes are wasted, and the step uses a smaller batch.",
        "Call zero_grad() once after step(), not before every backward().",
    ),
    "stale_gradients": Words(
        _F,
        "old gradients are applied again",
        "The gradient of each step includes those of earlier steps: steps grow, and point in old directions.",
        "Call optimizer.zero_grad() after each step(), or before the first backward() of the next.",
    ),
    "different_gradients": Words(
        _F,
        "the ranks apply different gradients",
        "Replicas that step differently are no longer one model.",
        "Let every rank apply the same average. Do not change it on only one rank afterwards.",
    ),
    "weights_drift": Words(
        _F,
        "the weights drift apart",
        "At the end each rank has a different model, and only one of them is kept.",
        "Find what the ranks do differently: the gradients, the optimizers' settings, or a weight that one rank "
        "changes.",
    ),
    "old_weights": Words(
        _F,
        "the model gets the weights from before the step",
        "Each rank steps its part of the weights after it has sent it, so each gradient is of weights that are one "
        "step old.",
        "Gather the parts into the model after optimizer.step(), not before it.",
    ),
    "no_set_epoch": Words(
        _F,
        "the sampler draws the same order in every epoch",
        "DistributedSampler shuffles by its seed and epoch. Without set_epoch every epoch has the same batches, and "
        "each rank always gets the same share of the data.",
        "Call sampler.set_epoch(epoch) at the start of every epoch.",
    ),
    "same_dropout": Words(
        _N,
        "all ranks draw the same dropout masks",
        "The same units are dropped for every share of a batch, so the noise does not average out over the ranks.",
        "After the model is made, seed each rank differently: torch.manual_seed(seed + rank).",
    ),
    "batch_norm_apart": Words(
        _F,
        "batch norm's running statistics differ between ranks",
        "They come from each rank's own data, and the model that is evaluated or saved has those of only one rank.",
        "Use torch.nn.SyncBatchNorm, or broadcast the buffers from rank 0 before evaluating and saving.",
    ),
    "optimizers_differ": Words(
        _F,
        "the optimizers' settings differ between ranks",
        "The same gradient makes a different step on each rank, so the replicas drift apart.",
        "Compute the learning rate and its schedule from what all ranks share: the number of steps, not a rank's own "
        "data.",
    ),
    "optimizer_states_differ": Words(
        _F,
        "the optimizers' states differ between ranks",
        "The same gradient makes a different step on each rank, because momentum or Adam's moments differ.",
        "Load an optimizer's state on every rank, or on none; never step or reset the optimizer of only one rank.",
    ),
    "counted_twice": Words(
        _F,
        "examples that pad the ranks' shares are counted twice in a metric",
        "A DistributedSampler repeats examples until all ranks have the same number: the metric is not the test set's.",
        "Leave the repeated ones out before adding up: rank r has len(range(r, len(dataset), world_size)) of its own.",
    ),
    "unweighted_metric": Words(
        _F,
        "a metric is averaged without weights over unequal shares",
        "An example counts more on a rank that has fewer: the mean of the ranks' means is not the data set's mean.",
        "Add up sums and counts over the ranks, then divide.",
    ),
    "saved_at_once": Words(
        _F,
        "several ranks write the same file at once",
        "A file that two processes write at once may have parts of both, and then cannot be loaded.",
        "Save only on rank 0, and let the others wait in a barrier; or put the rank's number into the file's name.",
    ),
    "uneven_calls": Words(
        _F,
        "the ranks do not make the same calls",
        "Collectives are matched by their order: one that not all ranks call is matched with another one, or waits.",
        "Move the call out of the branch that only some ranks go through. All ranks of a group have to make it.",
    ),
    "uneven_steps": Words(
        _F,
        "ranks make different numbers of backward passes",
        "A rank without more batches makes no more calls: the others wait in their next collective call, or fail.",
        "Give every rank the same number of batches: drop_last=True, or a sampler that pads.",
    ),
    "every_micro_batch_travels": Words(
        _W,
        "every micro-batch is synchronized under accumulation",
        "Gradients need to be sent once per step. Sending before the last micro-batch is wasted time.",
        "Put all micro-batches except the last under model.no_sync() (forward and backward), or all-reduce after the "
        "last one.",
    ),
    "evaluation_repeated": Words(
        _W,
        "every rank evaluates the same samples",
        "n ranks take as long as one would.",
        "Give each rank its share of the samples and add up the counts, or evaluate only on rank 0.",
    ),
    "barrier_each_step": Words(
        _W,
        "there is a barrier in every step",
        "Collectives already wait for all ranks. A barrier adds its own delay, and prevents overlap.",
        "Move it out of the loop.",
    ),
    "padded_duplicates": Words(
        _N,
        "samples that pad the last batch are evaluated twice",
        "DistributedSampler repeats samples until all ranks have the same number. A metric that counts them is not the "
        "test set's.",
        "Drop the repeated ones when you combine the ranks' results.",
    ),
    "local_loss": Words(
        _N,
        "no loss is averaged over the ranks",
        "A printed loss is then of one rank's share of the batch, not of the global batch.",
        "Average a copy of it over the ranks for printing: mean = loss.detach().clone(), dist.all_reduce(mean), "
        "mean /= world_size.",
    ),
    "local_steps": Words(
        _N,
        "weights are averaged every few steps",
        "This is local SGD: between two averages the ranks step by their own gradients, by design.",
        "Nothing, if you want local SGD.",
    ),
}
