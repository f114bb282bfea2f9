"""A script as a student writes it: one file, pytorch-transformers' BERT on RTE, and three ways to average gradients.

    python benchmarks/student.py --sync all_reduce --world_size 4 --rank R --data_dir RTE --model_dir MODEL

It is compared with the project's own loop (`benchmarks/beside_student.py`), and uses nothing of it. Every example is
padded to --max_seq_length, and each tensor has its own barrier and collective.
"""

import argparse
import csv
import json
import os
import time

import torch
import torch.distributed as dist
from pytorch_transformers import BertForSequenceClassification, BertTokenizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

LABELS = {"entailment": 0, "not_entailment": 1}


def read_examples(path):
    """Sentence pairs and labels of a GLUE file."""
    with open(path, encoding="utf-8") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quotechar=None, quoting=csv.QUOTE_NONE))
    return [(row[1], row[2], LABELS[row[3]]) for row in rows[1:]]


def convert_examples_to_features(examples, tokenizer, max_seq_length):
    """[CLS] A [SEP] B [SEP], cut and padded to max_seq_length."""
    all_ids, all_masks, all_segments, all_labels = [], [], [], []
    for first, second, label in examples:
        tokens_a, tokens_b = tokenizer.tokenize(first), tokenizer.tokenize(second)
        while len(tokens_a) + len(tokens_b) > max_seq_length - 3:
            longer = tokens_a if len(tokens_a) > len(tokens_b) else tokens_b
            longer.pop()
        tokens = ["[CLS]", *tokens_a, "[SEP]", *tokens_b, "[SEP]"]
        segments = [0] * (len(tokens_a) + 2) + [1] * (len(tokens_b) + 1)
        ids = tokenizer.convert_tokens_to_ids(tokens)
        padding = [0] * (max_seq_length - len(ids))
        all_ids.append(ids + padding)
        all_masks.append([1] * len(ids) + padding)
        all_segments.append(segments + padding)
        all_labels.append(label)
    return TensorDataset(*(torch.tensor(values) for values in (all_ids, all_masks, all_segments, all_labels)))


def gather_scatter(model, world_size, rank):
    """Task 2(a): rank 0 gathers each gradient, averages it and scatters the average."""
    for parameter in model.parameters():
        dist.barrier()
        if rank == 0:
            gradients = [torch.zeros_like(parameter.grad) for _ in range(world_size)]
            dist.gather(parameter.grad, gradients, dst=0)
            mean = torch.stack(gradients).mean(dim=0)
            dist.scatter(parameter.grad, [mean] * world_size, src=0)
        else:
            dist.gather(parameter.grad, dst=0)
            dist.scatter(parameter.grad, src=0)


def all_reduce(model, world_size, rank):
    """Task 2(b): an all-reduce for each gradient."""
    for parameter in model.parameters():
        dist.barrier()
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= world_size


SYNCS = {"gather_scatter": gather_scatter, "all_reduce": all_reduce, "ddp": None}


def train(args, dataset, model):
    """Train for max_steps and return this rank's losses and seconds."""
    if args.order:  # the batches' examples, so that another program can take the same
        with open(args.order, encoding="utf-8") as file:
            batches = [batch[args.rank :: args.world_size] for batch in json.load(file)]
        loader = DataLoader(dataset, batch_sampler=batches)
    else:
        sampler = DistributedSampler(dataset, num_replicas=args.world_size, rank=args.rank, seed=args.seed)
        loader = DataLoader(dataset, sampler=sampler, batch_size=args.total_batch_size // args.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, eps=1e-8, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / args.max_steps))
    sync = SYNCS[args.sync]
    module = model if sync else DistributedDataParallel(model)
    model.train()
    losses, seconds = [], []
    started = time.time()
    while len(losses) < args.max_steps:
        for input_ids, attention_mask, token_type_ids, labels in loader:
            if len(losses) == args.max_steps:
                break
            outputs = module(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids, labels=labels)
            loss = outputs[0]
            loss.backward()
            if sync:
                sync(model, args.world_size, args.rank)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            losses.append(loss.item())
            now = time.time()
            seconds.append(now - started)
            started = now
            if args.rank == 0:
                print(f"iteration {len(losses)}: loss {losses[-1]:.6f}, {seconds[-1]:.2f} s", flush=True)
    return losses, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sync", choices=list(SYNCS), required=True)
    parser.add_argument("--master_ip", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=6585)
    parser.add_argument("--world_size", type=int, default=4)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--data_dir", required=True, help="folder with RTE's train.tsv")
    parser.add_argument("--model_dir", required=True, help="a folder for BertForSequenceClassification.from_pretrained")
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--total_batch_size", type=int, default=64)
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--order", help="JSON: the examples of each global batch (default: a DistributedSampler's)")
    parser.add_argument("--output", help="write this rank's losses and seconds there, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if args.master_ip == "127.0.0.1" else "eth0")
    meeting = f"tcp://{args.master_ip}:{args.master_port}"
    dist.init_process_group("gloo", init_method=meeting, world_size=args.world_size, rank=args.rank)
    tokenizer = BertTokenizer.from_pretrained(args.model_dir, do_lower_case=True)
    examples = read_examples(os.path.join(args.data_dir, "train.tsv"))
    dataset = convert_examples_to_features(examples, tokenizer, args.max_seq_length)
    model = BertForSequenceClassification.from_pretrained(args.model_dir)
    losses, seconds = train(args, dataset, model)
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump({"losses": losses, "seconds": seconds}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
