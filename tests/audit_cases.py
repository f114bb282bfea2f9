"""The matrix of the audit: changes that plant one fault each into a right script, and changes that keep it right."""

AVERAGE = """    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= ranks
"""
CLIP = "    nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
ZERO = "    optimizer.zero_grad()\n"
BROADCAST = "for p in model.parameters():\n    dist.broadcast(p.data, 0)\n"
STEP = "    optimizer.step()\n"
SHARE = "[rank::ranks]"
LOSS = "    loss = nn.functional.cross_entropy(model(data[batch]), labels[batch])\n    loss.backward()\n"
MODEL = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))"
WITH_DROPOUT = "nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))"
WITH_NORM = "nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))"
WRAP = "model = DistributedDataParallel(model)\n"
DDP_STEPS = """        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
SET_EPOCH = "    sampler.set_epoch(epoch)\n"
SAMPLER = "sampler=sampler"
DDP_SAMPLER = "sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=True)\n"
SKELETON_CLIP = "                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)\n"
SKELETON_AVERAGE = "                average(args, model)\n"
SCATTER_ROOT = "            dist.scatter(param.grad, [mean] * args.world_size)\n"
SCATTER_OTHERS = "            dist.gather(param.grad)\n            dist.scatter(param.grad)\n"
SKELETON_SAMPLER = "    sampler = DistributedSampler(dataset, args.world_size, args.local_rank)\n"
SKELETON_EPOCH = "        sampler.set_epoch(epoch)\n"
EVALUATE = "    if args.local_rank == 0:\n        model.eval()"

# Each rank ignores some examples, and divides by how many of all ranks are left.
OF_ALL_EXAMPLES = """    targets = torch.where(data[batch][:, 0] > rank - 0.5, labels[batch], -100)
    count = (targets != -100).sum()
    dist.all_reduce(count)
    loss = nn.functional.cross_entropy(model(data[batch]), targets, reduction="sum") / count
    loss.backward()
"""
# The weights are moved to where the loss is worse, for the gradient there, and back.
ASCENT = """    moves = [0.1 * p.grad for p in model.parameters()]
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves):
            p += move
    optimizer.zero_grad()
"""
DESCENT = """    with torch.no_grad():
        for p, move in zip(model.parameters(), moves):
            p -= move
"""

# Scripts whose weights are in shards.
HERE = "    optimizer.step()  # here\n"
BACKWARD = "    loss.backward()"
ROOT = "fully_shard(model, mesh=mesh)\n"
UNIT = "fully_shard(model[2], mesh=mesh)\n"
MESH = 'mesh = init_device_mesh("cpu", (ranks,))\n'
MICRO = """    for place, part in enumerate(batch.split(4)):
        loss = nn.functional.cross_entropy(model(data[part]), labels[part]) / 2
        loss.backward()
"""
OWNER_AVERAGE = "        p.grad /= ranks\n"

# name of the case -> style, changes, the finding, and further words of the script
FAULTS = {
    "sum": ("by_hand", [("        p.grad /= ranks\n", ""), ("dist.all_reduce(p.grad)", "dist.all_reduce(p.grad)  # here")], "summed", ""),
    "sum_clipped_later": ("by_hand", [("        p.grad /= ranks\n", "")], "summed", ""),
    "never": ("by_hand", [(AVERAGE, ""), (STEP, "    optimizer.step()  # here\n")], "never_averaged", ""),
    "forgotten": ("by_hand", [("        dist.all_reduce(p.grad)\n        p.grad /= ranks\n", "        if p.dim() > 1:\n            dist.all_reduce(p.grad)  # here\n            p.grad /= ranks\n")], "forgotten_tensors", ""),
    "dropped": ("by_hand", [("        dist.all_reduce(p.grad)\n        p.grad /= ranks\n", "        mean = p.grad / ranks\n        dist.all_reduce(mean)  # here\n")], "result_dropped", ""),
    "reduced_to_one": ("by_hand", [("        dist.all_reduce(p.grad)\n        p.grad /= ranks\n", "        dist.reduce(p.grad, 0)  # here\n        p.grad /= ranks if rank == 0 else 1\n")], "not_scattered", ""),
    "clip_before": ("by_hand", [(CLIP, ""), (AVERAGE, "    nn.utils.clip_grad_norm_(model.parameters(), 0.3)  # here\n" + AVERAGE)], "clipped_before_average", ""),
    "clip_before_does_nothing": ("by_hand", [(CLIP, ""), (AVERAGE, "    nn.utils.clip_grad_norm_(model.parameters(), 1000.0)  # here\n" + AVERAGE)], "clipped_before_average", ""),
    "clip_before_under_a_scaler": ("by_hand", [(CLIP, ""), (LOSS, LOSS.replace("loss.backward()", "scaler.scale(loss).backward()")), (AVERAGE, "    scaler.unscale_(optimizer)\n    nn.utils.clip_grad_norm_(model.parameters(), 0.3)  # here\n" + AVERAGE), (STEP, "    scaler.step(optimizer)\n    scaler.update()\n"), ("for step in", "scaler = torch.amp.GradScaler('cpu', init_scale=256.0)\nfor step in")], "clipped_before_average", ""),
    "clip_before_by_hand": ("by_hand", [(CLIP, ""), (AVERAGE, "    norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5\n    for p in model.parameters():\n        p.grad *= min(1.0, 0.3 / norm)\n" + AVERAGE)], "clipped_before_average", ""),
    "same_batches": ("by_hand", [(SHARE, "[:8]"), ("    loss.backward()", "    loss.backward()  # here")], "same_batches", ""),
    "different_start": ("by_hand", [(BROADCAST, ""), ("torch.manual_seed(1)\n", "torch.manual_seed(1)\n"), ("model = nn", "torch.manual_seed(rank)\nmodel = nn")], "different_start", ""),
    "stale": ("by_hand", [(ZERO, "")], "stale_gradients", ""),
    "weights": ("by_hand", [(AVERAGE, ""), (CLIP, ""), (STEP, "    optimizer.step()\n    for p in model.parameters():\n        dist.all_reduce(p.data)  # here\n        p.data /= ranks\n")], "weights_averaged", ""),
    "twice": ("by_hand", [("        p.grad /= ranks\n", "        p.grad /= ranks**2\n"), (CLIP, "")], "averaged_twice", ""),
    "loss_divided_and_averaged": ("by_hand", [("labels[batch])\n", "labels[batch]) / ranks\n"), ("dist.all_reduce(p.grad)", "dist.all_reduce(p.grad)")], "doubtful", ""),
    "backward_with_a_share_and_averaged": ("by_hand", [("loss.backward()", "loss.backward(gradient=torch.tensor(1 / ranks))"), ("dist.all_reduce(p.grad)", "dist.all_reduce(p.grad)")], "doubtful", ""),
    "examples_of_all_and_averaged": ("by_hand", [(LOSS, OF_ALL_EXAMPLES)], "averaged_twice", ""),
    "divided_by_another_number": ("by_hand", [("        p.grad /= ranks\n", "        p.grad /= 3\n"), ("dist.all_reduce(p.grad)", "dist.all_reduce(p.grad)  # here")], "wrong_factor", ""),
    "zeroed_each_micro_batch": ("by_hand", [(ZERO, ""), (LOSS, "    for part in batch.split(4):\n        optimizer.zero_grad()\n        loss = nn.functional.cross_entropy(model(data[part]), labels[part]) / 2\n        loss.backward()  # here\n")], "lost_micro_batches", ""),
    "one_rank_scales": ("by_hand", [(STEP, "    if rank == 1:\n        for p in model.parameters():\n            p.grad *= 0.5\n    optimizer.step()  # here\n")], "different_gradients", ""),
    "learning_rates": ("by_hand", [("lr=0.1", "lr=0.1 / (1 + rank)"), (STEP, "    optimizer.step()  # here\n")], "optimizers_differ", ""),
    "unequal_ranks": ("by_hand", [("        dist.all_reduce(p.grad)\n", "        p.grad *= 2 if rank else 1\n        dist.all_reduce(p.grad)\n"), (CLIP, "")], "unequal_weights", ""),
    "unequal_losses": ("by_hand", [("labels[batch])\n", "labels[batch]) * (1 + rank)\n"), ("    loss.backward()", "    loss.backward()  # here")], "unequal_weights", ""),
    "uneven_shares": ("by_hand", [(SHARE, "[rank * 5 : rank * 5 + 5 + rank]"), ("    loss.backward()", "    loss.backward()  # here")], "unequal_weights", ""),
    "unequal_micro_batches": ("by_hand", [(LOSS, "    for place, part in enumerate(batch.split(4)):\n        loss = nn.functional.cross_entropy(model(data[part]), labels[part]) / (1 + place)\n        loss.backward()  # here\n")], "lost_micro_batches", ""),
    "overlapping_shares": ("by_hand", [(SHARE, "[rank * 4 : rank * 4 + 8]"), ("    loss.backward()", "    loss.backward()  # here")], "overlapping_batches", ""),
    "dropout": ("by_hand", [(MODEL, WITH_DROPOUT), ("torch.manual_seed(100 + rank)", "torch.manual_seed(100)")], "same_dropout", ""),
    "batch_norm": ("by_hand", [(MODEL, WITH_NORM)], "batch_norm_apart", ""),
    "drift": ("by_hand", [(STEP, "    optimizer.step()\n    model[0].bias.data += 0.1 * rank\n")], "weights_drift", ""),
    "learning_rates_later": ("by_hand", [(STEP, "    optimizer.step()  # here\n    if step == 3 and rank:\n        optimizer.param_groups[0]['lr'] /= 2\n")], "optimizers_differ", ""),
    "learning_rates_for_a_while": ("by_hand", [(STEP, "    optimizer.step()  # here\n    optimizer.param_groups[0]['lr'] = 0.05 if rank and step == 3 else 0.1\n")], "optimizers_differ", ""),
    "resumed_from_other_weights": ("by_hand", [("for step in", "if rank:\n    model.load_state_dict({name: each * 0.9 for name, each in model.state_dict().items()})\nfor step in")], "different_start", ""),
    "accumulation_undivided": ("by_hand", [(LOSS, "    for part in batch.split(4):\n        loss = nn.functional.cross_entropy(model(data[part]), labels[part])\n        loss.backward()\n")], "micro_batches_summed", ""),
    "travels_each_micro_batch": ("by_hand", [(AVERAGE, ""), (LOSS, "    for part in batch.split(4):\n        before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]\n        loss = nn.functional.cross_entropy(model(data[part]), labels[part]) / 2\n        loss.backward()\n        for p, old in zip(model.parameters(), before):\n            new = p.grad - old\n            dist.all_reduce(new)  # here\n            p.grad.copy_(old + new / ranks)\n")], "every_micro_batch_travels", ""),
    "ddp_no_sampler": ("ddp", [(SET_EPOCH, ""), (SAMPLER, "shuffle=True"), (DDP_SAMPLER, ""), ("in loader:", "in loader:  # here")], "all_data_everywhere", ""),
    "ddp_same_order": ("ddp", [(SET_EPOCH, ""), (SAMPLER, "shuffle=False"), (DDP_SAMPLER, ""), ("in loader:", "in loader:  # here")], "same_batches", ""),
    "ddp_one_rank_for_all": ("ddp", [("rank=rank,", "rank=0,"), ("in loader:", "in loader:  # here")], "same_batches", ""),
    "ddp_no_set_epoch": ("ddp", [(SET_EPOCH, ""), ("in loader:", "in loader:  # here")], "no_set_epoch", ""),
    "ddp_bypassed": ("ddp", [("model(inputs)", "model.module(inputs)"), ("        optimizer.step()\n", "        optimizer.step()  # here\n")], "never_averaged", ""),
    "ddp_stale": ("ddp", [("        optimizer.zero_grad()\n", ""), ("        optimizer.step()\n", "        optimizer.step()  # here\n")], "stale_gradients", ""),
    "ddp_divided_again": ("ddp", [("        optimizer.step()\n", "        for p in model.parameters():\n            p.grad /= ranks\n        optimizer.step()\n")], "averaged_twice", ""),
    "ddp_never_in_sync": ("ddp", [(DDP_STEPS, DDP_STEPS.replace("        loss = nn.functional.cross_entropy(model(inputs), targets)\n        optimizer.zero_grad()\n        loss.backward()\n", "        optimizer.zero_grad()\n        with model.no_sync():\n            loss = nn.functional.cross_entropy(model(inputs), targets)\n            loss.backward()\n"))], "never_averaged", ""),
    "ddp_last_micro_batch_not_in_sync": ("ddp", [(DDP_STEPS, "        optimizer.zero_grad()\n        (nn.functional.cross_entropy(model(inputs[:4]), targets[:4]) / 2).backward()\n        with model.no_sync():\n            loss = nn.functional.cross_entropy(model(inputs[4:]), targets[4:]) / 2\n            loss.backward()\n        optimizer.step()\n")], "lost_micro_batches", ""),
    "ddp_every_micro_batch": ("ddp", [(DDP_STEPS, "        optimizer.zero_grad()\n        for part, wanted in zip(inputs.split(4), targets.split(4)):\n            loss = nn.functional.cross_entropy(model(part), wanted) / 2\n            loss.backward()  # here\n        optimizer.step()\n")], "every_micro_batch_travels", ""),
    "ddp_dropout": ("ddp", [(MODEL, WITH_DROPOUT), ("torch.manual_seed(100 + rank)", "torch.manual_seed(100)")], "same_dropout", ""),
    "ddp_learning_rate": ("ddp", [("lr=0.01", "lr=0.01 * (1 + rank)")], "optimizers_differ", ""),
    "skeleton_clip_before": ("skeleton", [(SKELETON_CLIP, ""), (SKELETON_AVERAGE, SKELETON_CLIP.rstrip() + "  # here\n" + SKELETON_AVERAGE)], "clipped_before_average", ""),
    "skeleton_not_scattered": ("skeleton", [(SCATTER_ROOT, "            param.grad.copy_(mean)\n"), (SCATTER_OTHERS, "            dist.gather(param.grad)\n")], "not_scattered", ""),
    "skeleton_sum": ("skeleton", [(".mean(0)", ".sum(0)")], "summed", ""),
    "skeleton_same_batches": ("skeleton", [(SKELETON_SAMPLER, "    torch.manual_seed(5)\n    sampler = RandomSampler(dataset)\n    state = torch.Generator().manual_seed(5)\n    sampler.generator = state\n    torch.manual_seed(5 + args.local_rank)\n"), (SKELETON_EPOCH, "")], "same_batches", ""),
    "skeleton_all_data": ("skeleton", [(SKELETON_SAMPLER, "    sampler = RandomSampler(dataset)\n"), (SKELETON_EPOCH, ""), ("enumerate(loader):", "enumerate(loader):  # here")], "all_data_everywhere", ""),
    "skeleton_no_set_epoch": ("skeleton", [(SKELETON_EPOCH, "")], "no_set_epoch", "--epochs 2"),
    "skeleton_forgotten": ("skeleton", [("        if param.grad is None:", "        if param.grad is None or param.dim() == 1:")], "forgotten_tensors", ""),
    "skeleton_schedule": ("skeleton", [("1 / (1 + step)", "1 / (1 + step * (1 + args.local_rank))")], "optimizers_differ", ""),
    "skeleton_evaluates_everywhere": ("skeleton", [(EVALUATE, "    if True:\n        model.eval()")], "evaluation_repeated", ""),
    # Weights, or the optimizer's states, in shards: FSDP and ZeRO.
    "fsdp2_sum": ("fsdp2", [(ROOT, ROOT + "for unit in (model[2], model):\n    unit.set_gradient_divide_factor(1.0)\n    unit.set_force_sum_reduction_for_comms(True)\n"), (BACKWARD, "    loss.backward()")], "doubtful", ""),
    "fsdp2_same_batches": ("fsdp2", [("[rank::ranks]", "[:8]"), (BACKWARD, "    loss.backward()  # here")], "same_batches", ""),
    "fsdp2_learning_rate": ("fsdp2", [("lr=0.01", "lr=0.01 * (1 + rank)"), (STEP, HERE)], "optimizers_differ", ""),
    "owners_sum": ("owners", [(OWNER_AVERAGE, "")], "summed", ""),
    "owners_by_their_own": ("owners", [("        dist.reduce(p.grad, owner)\n        p.grad /= ranks\n", "        pass\n"), (STEP, HERE)], "never_averaged", ""),
    "owners_forget_some": ("owners", [("        dist.reduce(p.grad, owner)\n        p.grad /= ranks\n", "        if p.dim() > 1:\n            dist.reduce(p.grad, owner)  # here\n            p.grad /= ranks\n")], "forgotten_tensors", ""),
    "skeleton_zeroed": ("skeleton", [("            loss.backward()\n", "            model.zero_grad()\n            loss.backward()  # here\n")], "lost_micro_batches", "--accumulation 2"),
}  # fmt: skip

EMBED = "model = nn.Sequential(nn.Embedding(20, 8{sparse}), nn.Flatten(), nn.Linear(32, 3))"

# name of the case -> style, changes, further words of the script
RIGHT = {
    "by_hand": ("by_hand", [], ""),
    "ddp": ("ddp", [], ""),
    "backward_with_a_share_and_summed": ("by_hand", [("loss.backward()", "loss.backward(torch.tensor(1 / ranks))"), ("        p.grad /= ranks\n", "")], ""),
    "gather_scatter": ("skeleton", [], ""),
    "skeleton_accumulation": ("skeleton", [], "--accumulation 2"),
    "skeleton_two_epochs": ("skeleton", [], "--epochs 2"),
    "adam": ("by_hand", [("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "torch.optim.Adam(model.parameters())")], ""),
    "fused_adamw": ("ddp", [("torch.optim.Adam(model.parameters(), lr=0.01)", "torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)")], ""),
    "reduce_broadcast": ("by_hand", [("        dist.all_reduce(p.grad)\n        p.grad /= ranks\n", "        dist.reduce(p.grad, 0)\n        if rank == 0:\n            p.grad /= ranks\n        dist.broadcast(p.grad, 0)\n")], ""),
    "flat": ("by_hand", [(AVERAGE, "    flat = torch.cat([p.grad.flatten() for p in model.parameters()])\n    dist.all_reduce(flat)\n    flat /= ranks\n    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):\n        p.grad.copy_(part.view_as(p))\n")], ""),
    "async": ("by_hand", [(AVERAGE, "    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]\n    for work, p in zip(works, model.parameters()):\n        work.wait()\n        p.grad /= ranks\n")], ""),
    "all_gather": ("by_hand", [("        dist.all_reduce(p.grad)\n        p.grad /= ranks\n", "        parts = [torch.empty_like(p.grad) for _ in range(ranks)]\n        dist.all_gather(parts, p.grad)\n        p.grad = torch.stack(parts).mean(0)\n")], ""),
    "functional": ("by_hand", [("        dist.all_reduce(p.grad)\n", "        p.grad = torch.distributed._functional_collectives.all_reduce(p.grad, 'sum', dist.group.WORLD) * 1\n"), ("import torch.distributed as dist\n", "import torch.distributed as dist\nimport torch.distributed._functional_collectives\n")], ""),
    "no_clip": ("by_hand", [(CLIP, "")], ""),
    "clip_by_hand_after": ("by_hand", [(CLIP, "    norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5\n    for p in model.parameters():\n        p.grad *= min(1.0, 0.3 / norm)\n")], ""),
    "clip_value_after": ("by_hand", [(CLIP, "    nn.utils.clip_grad_value_(model.parameters(), 0.01)\n")], ""),
    "sum_of_a_divided_loss": ("by_hand", [("labels[batch])\n", "labels[batch]) / ranks\n"), ("        p.grad /= ranks\n", "")], ""),
    "accumulation": ("by_hand", [(LOSS, "    for part in batch.split(4):\n        loss = nn.functional.cross_entropy(model(data[part]), labels[part]) / 2\n        loss.backward()\n")], ""),
    "shares_weighted_and_summed": ("by_hand", [(SHARE, "[rank * 5 : rank * 5 + 5 + rank]"), ("labels[batch])\n", "labels[batch]) * len(batch) / 11\n"), ("        p.grad /= ranks\n", "")], ""),
    "examples_of_all_and_summed": ("by_hand", [(LOSS, OF_ALL_EXAMPLES), ("        p.grad /= ranks\n", "")], ""),
    "sharpness_aware": ("by_hand", [(LOSS, LOSS + ASCENT + LOSS + DESCENT)], ""),
    "evaluation_mode_everywhere": ("by_hand", [(MODEL, WITH_DROPOUT), ("optimizer = torch", "model.eval()\noptimizer = torch"), ("torch.manual_seed(100 + rank)", "torch.manual_seed(100)")], ""),
    "gan": ("gan", [], ""),
    "uneven_and_weighted": ("by_hand", [(SHARE, "[rank * 5 : rank * 5 + 5 + rank]"), ("labels[batch])\n", "labels[batch]) * (5 + rank) / 11 * ranks\n")], ""),
    "post_accumulate_hooks": ("by_hand", [(AVERAGE, ""), ("optimizer = torch", "def average(p):\n    dist.all_reduce(p.grad)\n    p.grad /= ranks\n\n\nfor p in model.parameters():\n    p.register_post_accumulate_grad_hook(average)\noptimizer = torch")], ""),
    "tensor_hooks": ("by_hand", [(AVERAGE, ""), ("optimizer = torch", "def average(grad):\n    grad = grad / ranks\n    dist.all_reduce(grad)\n    return grad\n\n\nfor p in model.parameters():\n    p.register_hook(average)\noptimizer = torch")], ""),
    "frozen": ("by_hand", [("        dist.all_reduce(p.grad)\n        p.grad /= ranks\n", "        if p.grad is not None:\n            dist.all_reduce(p.grad)\n            p.grad /= ranks\n"), ("optimizer = torch", "model[0].bias.requires_grad_(False)\noptimizer = torch")], ""),
    "two_optimizers": ("by_hand", [("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "torch.optim.SGD(model[0].parameters(), lr=0.1)\nother = torch.optim.Adam(model[2].parameters())"), (ZERO, "    model.zero_grad()\n"), (STEP, "    optimizer.step()\n    other.step()\n")], ""),
    "local_sgd": ("by_hand", [(AVERAGE, ""), (CLIP, ""), (STEP, "    optimizer.step()\n    if step % 2:\n        for p in model.parameters():\n            dist.all_reduce(p.data)\n            p.data /= ranks\n")], ""),
    "bf16_autocast": ("by_hand", [("    loss = nn.functional.cross_entropy(model(data[batch]), labels[batch])\n", "    with torch.autocast('cpu', torch.bfloat16):\n        loss = nn.functional.cross_entropy(model(data[batch]), labels[batch])\n")], ""),
    "scaler": ("by_hand", [("optimizer = torch", "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\noptimizer = torch"), ("    loss.backward()\n", "    scaler.scale(loss).backward()\n"), (CLIP, "    scaler.unscale_(optimizer)\n" + CLIP), (STEP, "    scaler.step(optimizer)\n    scaler.update()\n")], ""),
    "lbfgs": ("by_hand", [("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "torch.optim.LBFGS(model.parameters(), max_iter=3)"), (ZERO + LOSS + AVERAGE + CLIP + STEP, "    def closure():\n        optimizer.zero_grad()\n        loss = nn.functional.cross_entropy(model(data[batch]), labels[batch])\n        loss.backward()\n        for p in model.parameters():\n            dist.all_reduce(p.grad)\n            p.grad /= ranks\n        dist.all_reduce(loss.detach())\n        return loss\n\n    optimizer.step(closure)\n")], ""),
    "compiled": ("by_hand", [("optimizer = torch", "model = torch.compile(model, backend='eager')\noptimizer = torch")], ""),
    "checkpointed": ("by_hand", [(MODEL, "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))"), ("model(data[batch])", "model[2](torch.utils.checkpoint.checkpoint(model[:2], data[batch].requires_grad_(), use_reentrant=True))"), ("import torch\nimport", "import torch\nimport torch.utils.checkpoint\nimport")], ""),
    "ddp_views": ("ddp", [(WRAP, "model = DistributedDataParallel(model, gradient_as_bucket_view=True)\n")], ""),
    "ddp_static": ("ddp", [(WRAP, "model = DistributedDataParallel(model, static_graph=True)\n")], ""),
    "ddp_unused": ("ddp", [(WRAP, "model.unused = nn.Linear(2, 2)\n" + WRAP.replace("(model)", "(model, find_unused_parameters=True)")), (MODEL, "Net(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))"), ("torch.manual_seed(1)\n", "torch.manual_seed(1)\n\n\nclass Net(nn.Sequential):\n    def forward(self, inputs):\n        return self[2](self[1](self[0](inputs)))\n\n\n")], ""),
    "ddp_tied": ("ddp", [(MODEL, "nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))\nmodel[2].weight = model[0].weight")], ""),
    "ddp_no_sync": ("ddp", [(DDP_STEPS, "        optimizer.zero_grad()\n        with model.no_sync():\n            (nn.functional.cross_entropy(model(inputs[:4]), targets[:4]) / 2).backward()\n        loss = nn.functional.cross_entropy(model(inputs[4:]), targets[4:]) / 2\n        loss.backward()\n        optimizer.step()\n")], ""),
    "ddp_fp16_hook": ("ddp", [(WRAP, WRAP + "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n\nmodel.register_comm_hook(None, default_hooks.fp16_compress_hook)\n")], ""),
    "ddp_batch_norm": ("ddp", [(MODEL, WITH_NORM)], ""),
    "ddp_dropout_by_rank": ("ddp", [(MODEL, WITH_DROPOUT)], ""),
    "ddp_workers": ("ddp", [(SAMPLER, "sampler=sampler, num_workers=1")], ""),
    "ddp_zero": ("ddp", [("torch.optim.Adam(model.parameters(), lr=0.01)", "ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)"), ("from torch import nn\n", "from torch import nn\nfrom torch.distributed.optim import ZeroRedundancyOptimizer\n")], ""),
    "ddp_accuracy_by_share": ("ddp", [("    mean = loss", "    model.eval()\n    with torch.no_grad():\n        for inputs, targets in DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=False)):\n            model(inputs)\n    model.train()\n    mean = loss")], ""),
    "norm_logged_by_a_clip": ("by_hand", [(CLIP, "    nn.utils.clip_grad_norm_(model.parameters(), float('inf'))\n")], ""),
    "ddp_look_at_a_batch": ("ddp", [("for epoch in range(3):\n" + SET_EPOCH, "next(iter(loader))\nfor epoch in range(1):\n")], ""),
    "ddp_evaluates_between": ("ddp", [(DDP_STEPS, DDP_STEPS + "        with torch.no_grad():\n            for inputs, targets in held_out:\n                model.module(inputs)\n"), ("optimizer = torch", "held_out = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))\noptimizer = torch")], ""),
    "resumed_on_all_ranks": ("by_hand", [("for step in", "optimizer.state = {p: {'momentum_buffer': torch.ones_like(p)} for p in model.parameters()}\nfor step in")], ""),
    "fsdp2": ("fsdp2", [], ""),
    "fsdp2_accumulation_at_home": ("fsdp2", [(LOSS, MICRO.replace("        loss =", "        model.set_requires_gradient_sync(place == 1)\n        loss ="))], ""),
    "fsdp2_bf16": ("fsdp2", [(UNIT, UNIT.replace("mesh=mesh", "mesh=mesh, mp_policy=policy")), (ROOT, ROOT.replace("mesh=mesh", "mesh=mesh, mp_policy=policy")), (MESH, MESH + "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"), ("import fully_shard", "import MixedPrecisionPolicy, fully_shard")], ""),
    "fsdp1": ("fsdp1", [], ""),
    "fsdp1_accumulation": ("fsdp1", [(LOSS, MICRO)], ""),
    "tensor_parallel": ("fsdp2", [(UNIT + ROOT, 'parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})\n'), ("[rank::ranks]", ""), (CLIP, ""), ("from torch.distributed.fsdp import fully_shard", "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module")], ""),
    "owners": ("owners", [], ""),
    "owners_by_rates": ("owners", [("optimizer = torch.optim.Adam([p for p in owners if owners[p] == rank], lr=0.01)\n", "optimizer = torch.optim.SGD([p for p in owners if owners[p] == rank], lr=0.01 * (1 + rank))\n")], ""),
    "owners_by_groups": ("owners", [("optimizer = torch.optim.Adam([p for p in owners if owners[p] == rank], lr=0.01)\n", "mine = [p for p in owners if owners[p] == rank]\ngroups = [([p for p in mine if p.dim() > 1], 0.1), ([p for p in mine if p.dim() == 1], 0.0)]\noptimizer = torch.optim.AdamW([{'params': some, 'weight_decay': decay} for some, decay in groups if some], lr=0.01)\n")], ""),
    "sparse": ("by_hand", [("torch.randn(120, 8)", "torch.randint(0, 20, (120, 4))"), ("model = " + MODEL, EMBED.format(sparse=", sparse=True")), (CLIP, ""), ("lr=0.1, momentum=0.9", "lr=0.1")], ""),
}  # fmt: skip
