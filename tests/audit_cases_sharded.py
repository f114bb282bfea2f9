"""The part of the matrix in which weights, or what is remembered of them, are cut over the ranks: FSDP and ZeRO."""

CLIP = "    nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
STEP = "    optimizer.step()\n"
HERE = "    optimizer.step()  # here\n"
LOSS = "    loss = nn.functional.cross_entropy(model(data[batch]), labels[batch])\n    loss.backward()\n"
BACKWARD = "    loss.backward()"
ROOT = "fully_shard(model, mesh=mesh)\n"
UNIT = "fully_shard(model[2], mesh=mesh)\n"
ZERO = "    optimizer.zero_grad()\n"
CLIP_BY_HAND = """    norm = sum(p.grad.to_local().norm() ** 2 for p in model.parameters())
    for p in model.parameters():
        p.grad.mul_(min(1.0, 0.1 / float(norm) ** 0.5))
"""
NORM_OF_ALL = "    for p in model.parameters():\n"
MESH = 'mesh = init_device_mesh("cpu", (ranks,))\n'
MICRO = """    for place, part in enumerate(batch.split(4)):
        loss = nn.functional.cross_entropy(model(data[part]), labels[part]) / 2
        loss.backward()
"""
FLAT_AVERAGE = "    part.grad /= ranks\n"
OWNER_AVERAGE = "        p.grad /= ranks\n"
FSDP1_CLIP = "    model.clip_grad_norm_(0.1)\n"

# name of the case -> style, changes, the finding, and further words of the script
FAULTS = {
    "fsdp2_clip_by_part": ("fsdp2", [(CLIP, CLIP_BY_HAND), (STEP, HERE)], "clipped_by_part", ""),
    "fsdp2_sum": ("fsdp2", [(ROOT, ROOT + "for unit in (model[2], model):\n    unit.set_gradient_divide_factor(1.0)\n    unit.set_force_sum_reduction_for_comms(True)\n"), (BACKWARD, "    loss.backward()  # here")], "summed", ""),
    "fsdp2_divided_again": ("fsdp2", [(CLIP, "    for p in model.parameters():\n        p.grad /= ranks\n")], "averaged_twice", ""),
    "fsdp2_each_its_own_mesh": ("fsdp2", [(MESH, 'mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicas", "parts"))["parts"]\n'), (CLIP, ""), (STEP, HERE)], "never_averaged", ""),
    "fsdp2_root_forgotten": ("fsdp2", [(ROOT, ""), (CLIP, "")], "forgotten_tensors", ""),
    "fsdp2_stale": ("fsdp2", [(ZERO, ""), (STEP, HERE)], "stale_gradients", ""),
    "fsdp2_same_batches": ("fsdp2", [("[rank::ranks]", "[:8]"), (BACKWARD, "    loss.backward()  # here")], "same_batches", ""),
    "fsdp2_learning_rate": ("fsdp2", [("lr=0.01", "lr=0.01 * (1 + rank)"), (STEP, HERE)], "optimizers_differ", ""),
    "fsdp2_zeroed_each_micro_batch": ("fsdp2", [(ZERO, ""), (LOSS, "    for part in batch.split(4):\n        optimizer.zero_grad()\n        loss = nn.functional.cross_entropy(model(data[part]), labels[part]) / 2\n        loss.backward()  # here\n")], "lost_micro_batches", ""),
    "fsdp1_clip_by_part": ("fsdp1", [(FSDP1_CLIP, "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # here\n")], "clipped_by_part", ""),
    "fsdp1_clip_by_part_of_views": ("fsdp1", [('model, device_id=torch.device("cpu"))', 'model, device_id=torch.device("cpu"), use_orig_params=True)'), ('model[2], device_id=torch.device("cpu"))', 'model[2], device_id=torch.device("cpu"), use_orig_params=True)'), (FSDP1_CLIP, "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # here\n")], "clipped_by_part", ""),
    "flat_parts_sum": ("flat_parts", [(FLAT_AVERAGE, "")], "summed", ""),
    "flat_parts_clip_by_part": ("flat_parts", [(FLAT_AVERAGE, FLAT_AVERAGE + "    nn.utils.clip_grad_norm_([part], 0.01)  # here\n")], "clipped_by_part", ""),
    "flat_parts_clip_before": ("flat_parts", [("    gradients = torch.cat([p", "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # here\n    gradients = torch.cat([p")], "clipped_before_average", ""),
    "flat_parts_gathered_before_the_step": ("flat_parts", [("    optimizer.step()\n    dist.all_gather_into_tensor(flat, part.detach())\n", "    dist.all_gather_into_tensor(flat, part.detach())\n" + HERE)], "old_weights", ""),
    "owners_sum": ("owners", [(OWNER_AVERAGE, "")], "summed", ""),
    "owners_by_their_own": ("owners", [("        dist.reduce(p.grad, owner)\n        p.grad /= ranks\n", "        pass\n"), (STEP, HERE)], "never_averaged", ""),
    "owners_forget_some": ("owners", [("        dist.reduce(p.grad, owner)\n        p.grad /= ranks\n", "        if p.dim() > 1:\n            dist.reduce(p.grad, owner)  # here\n            p.grad /= ranks\n")], "forgotten_tensors", ""),
}  # fmt: skip

# name of the case -> style, changes, further words of the script
RIGHT = {
    "fsdp2": ("fsdp2", [], ""),
    "fsdp2_one_unit": ("fsdp2", [(UNIT, "")], ""),
    "fsdp2_kept_gathered": ("fsdp2", [(UNIT, "fully_shard(model[2], mesh=mesh, reshard_after_forward=False)\n")], ""),
    "fsdp2_no_clip": ("fsdp2", [(CLIP, "")], ""),
    "fsdp2_clip_by_hand": ("fsdp2", [(CLIP, CLIP_BY_HAND.replace(NORM_OF_ALL, "    dist.all_reduce(norm)\n" + NORM_OF_ALL))], ""),
    "fsdp2_accumulation": ("fsdp2", [(LOSS, MICRO)], ""),
    "fsdp2_accumulation_at_home": ("fsdp2", [(LOSS, MICRO.replace("        loss =", "        model.set_requires_gradient_sync(place == 1)\n        loss ="))], ""),
    "fsdp2_bf16": ("fsdp2", [(UNIT, UNIT.replace("mesh=mesh", "mesh=mesh, mp_policy=policy")), (ROOT, ROOT.replace("mesh=mesh", "mesh=mesh, mp_policy=policy")), (MESH, MESH + "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"), ("import fully_shard", "import MixedPrecisionPolicy, fully_shard")], ""),
    "fsdp2_checkpointed": ("fsdp2", [(UNIT, "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n\nmodel[2] = checkpoint_wrapper(model[2])\n" + UNIT)], ""),
    "fsdp2_replicated": ("fsdp2", [(MESH, 'mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicas", "parts"))\n')], ""),
    "fsdp1": ("fsdp1", [], ""),
    "fsdp1_views": ("fsdp1", [('model, device_id=torch.device("cpu"))', 'model, device_id=torch.device("cpu"), use_orig_params=True)'), ('model[2], device_id=torch.device("cpu"))', 'model[2], device_id=torch.device("cpu"), use_orig_params=True)')], ""),
    "fsdp1_accumulation": ("fsdp1", [(LOSS, MICRO)], ""),
    "tensor_parallel": ("fsdp2", [(UNIT + ROOT, 'parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})\n'), ("[rank::ranks]", ""), (CLIP, ""), ("from torch.distributed.fsdp import fully_shard", "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module")], ""),
    "owners": ("owners", [], ""),
    "owners_by_rates": ("owners", [("optimizer = torch.optim.Adam([p for p in owners if owners[p] == rank], lr=0.01)\n", "optimizer = torch.optim.SGD([p for p in owners if owners[p] == rank], lr=0.01 * (1 + rank))\n")], ""),
    "owners_by_groups": ("owners", [("optimizer = torch.optim.Adam([p for p in owners if owners[p] == rank], lr=0.01)\n", "mine = [p for p in owners if owners[p] == rank]\ngroups = [([p for p in mine if p.dim() > 1], 0.1), ([p for p in mine if p.dim() == 1], 0.0)]\noptimizer = torch.optim.AdamW([{'params': some, 'weight_decay': decay} for some, decay in groups if some], lr=0.01)\n")], ""),
    "flat_parts": ("flat_parts", [], ""),
    "flat_parts_divided_before": ("flat_parts", [(FLAT_AVERAGE, ""), ("dist.reduce_scatter_tensor(part.grad, gradients)", "dist.reduce_scatter_tensor(part.grad, gradients / ranks)")], ""),
}  # fmt: skip
# Ranks that share batches by design cannot be judged.
NOT_JUDGED = ("tensor_parallel",)
