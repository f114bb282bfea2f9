"""Compare Hugging Face's Trainer with `train`: both in turn, on one order of examples.

    pip install --target PACKAGES --no-deps transformers accelerate
    GLUE_DIR=... python benchmarks/beside_trainer.py --packages PACKAGES --runs_dir runs/trainer [--repeats 3]

All train from the same weights on the same global batches of RTE, padded to each batch's longest example, with fused
AdamW, clipping and a rate that falls to 0. Trainer averages by torch's DDP over gloo. Seconds per step are rank 0's,
medians without the first two. Whole seconds are from the command to the saved model. Ratios are taken within a repeat.
It exits with 1 if the losses show that they did not do the same work.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from beside_student import ROOT, SEED, environment, free_port, parsed, prepare, ranks_of, run_ours

from cos598d.data import get_task
from cos598d.models.build import find_model
from cos598d.records.conventions import WARM_UP

SAME = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}  # for losses of one training, after some steps with other rounding
RATE, CLIP = 5e-5, 1.0
TRAINER = "trainer"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="the folder with transformers and accelerate")
    parser.add_argument("--runs_dir", type=Path, required=True, help="a new folder for the records")
    parser.add_argument("--sync", default="ddp,shared_weights", help="ours (default: ddp,shared_weights)")
    parser.add_argument("--be_rank", nargs=3, metavar=("DATA", "MODEL", "ORDER"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parsed(parser)
    if options.be_rank:
        be_rank(options, *options.be_rank)
        return 0
    options.runs_dir.mkdir(parents=True)
    files = prepare(options)
    everyone = [TRAINER, *options.sync.split(",")]
    found: dict[str, list[tuple[float, float]]] = {who: [] for who in everyone}
    losses: dict[str, list[float]] = {}
    for repeat in range(options.repeats):
        for who in random.Random(repeat).sample(everyone, len(everyone)):
            folder = (options.runs_dir / f"repeat{repeat + 1}" / who).resolve()
            print(f"repeat {repeat + 1} of {options.repeats}: {who}", file=sys.stderr, flush=True)
            began = time.perf_counter()
            losses[who], seconds = (run_trainer if who == TRAINER else run_ours)(options, who, folder, *files)
            found[who].append((statistics.median(seconds[WARM_UP:]), time.perf_counter() - began))
    apart = {who: max(abs(a - b) for a, b in zip(losses[TRAINER], losses[who], strict=True)) for who in everyone}
    print("| | s per step | whole s | trainer / it, per step by repeat | whole | losses apart |")
    print("|---|---|---|---|---|---|")
    for who, pairs in found.items():
        step, whole = (statistics.fmean(values) for values in zip(*pairs))
        ratios = [[base[i] / own[i] for base, own in zip(found[TRAINER], pairs)] for i in (0, 1)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios[0])
        print(f"| {who} | {step:.3f} | {whole:.1f} | {each} | {statistics.fmean(ratios[1]):.2f} | {apart[who]:.1e} |")
    different = [who for who in everyone if not apart[who] <= SAME[options.precision]]
    if different:
        print(f"not the same work: the losses of {', '.join(different)} are not Trainer's.")
    return 1 if different else 0


def run_trainer(
    options: argparse.Namespace, _: str, folder: Path, data: Path, model: Path, order: Path
) -> tuple[list[float], list[float]]:
    """The same by Trainer, as ranks of this program."""
    folder.mkdir(parents=True)
    ranks = str(options.world_size)
    common = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(options.packages.resolve())])}
    common |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": str(options.threads)}
    common |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, *sys.argv, "--be_rank", data, model, order]
    own = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(options.world_size)]
    return ranks_of(folder, options.world_size, lambda _: words, own.__getitem__)


def be_rank(options: argparse.Namespace, data: str, model: str, order: str) -> None:
    """One rank of Trainer with its defaults, without logs, evaluations and checkpoints; the examples come in order."""
    from transformers import BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(options.threads)
    task = get_task("rte")
    task.find(str(data))
    examples = task.load("train", find_model(model, do_lower_case=True).encoder, options.max_seq_length)
    # Accelerate gives rank r every n-th batch: its slice of each global batch, one after the other.
    places = [place for batch in json.loads(Path(order).read_text()) for place in batch]
    losses, moments = [], [time.perf_counter()]

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(places)

        def compute_loss(self, *arguments, **named):
            loss = super().compute_loss(*arguments, **named)
            losses.append(loss.item())
            return loss

    class Watch(TrainerCallback):
        def on_step_end(self, *_, **__):
            moments.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=str(options.output.parent / "model"),
        per_device_train_batch_size=options.total_batch_size // options.world_size,
        max_steps=options.max_steps,
        learning_rate=RATE,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=False,  # otherwise it multiplies a mean over examples by the number of ranks
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=SEED,
    )
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    theirs = BertForSequenceClassification.from_pretrained(model, num_labels=2, **without).train()
    trainer = InOrder(theirs, arguments, train_dataset=places, data_collator=examples.collate, callbacks=[Watch()])
    trainer.train()
    trainer.save_model()
    seconds = [after - before for before, after in zip(moments, moments[1:])]
    options.output.write_text(json.dumps({"losses": losses, "seconds": seconds}))


if __name__ == "__main__":
    sys.exit(main())
