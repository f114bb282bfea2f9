"""Compare Hugging Face's Trainer and Accelerate's loop with `train`: all in turn, on one order of examples.

    pip install --target PACKAGES --no-deps transformers accelerate
    GLUE_DIR=... python benchmarks/beside_trainer.py --packages PACKAGES --runs_dir runs/trainer [--repeats 3]

All train from the same weights on the same global batches of RTE, padded to each batch's longest example, with fused
AdamW, clipping and a rate that falls to 0. Trainer and Accelerate average by torch's DDP over gloo. Seconds per step
are rank 0's, medians without the first two. Whole seconds are from the command to the saved model. Ratios are taken
within a repeat. It exits with 1 if the losses show that they did not do the same work.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from beside_student import ROOT, SEED, environment, parsed, prepare, run_ours

from cos598d.data import get_task
from cos598d.models.build import find_model
from cos598d.records.conventions import WARM_UP
from cos598d.terminal.children import end_all

SAME = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}  # for losses of one training, after some steps with other rounding
RATE, CLIP = 5e-5, 1.0
THEIRS = ("trainer", "accelerate")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="the folder with transformers and accelerate")
    parser.add_argument("--runs_dir", type=Path, required=True, help="a new folder for the records")
    parser.add_argument("--sync", default="ddp,shared_weights", help="ours (default: ddp,shared_weights)")
    parser.add_argument("--theirs", default="trainer", help=f"some of {','.join(THEIRS)} (default: trainer)")
    parser.add_argument("--be_rank", nargs=4, metavar=("WHO", "DATA", "MODEL", "ORDER"), help=argparse.SUPPRESS)
    options = parsed(parser)
    if options.be_rank:
        be_rank(options, *options.be_rank)
        return 0
    options.runs_dir.mkdir(parents=True)
    files = prepare(options)
    everyone = [*options.theirs.split(","), *options.sync.split(",")]
    found: dict[str, list[tuple[float, float]]] = {who: [] for who in everyone}
    losses: dict[str, list[float]] = {}
    for repeat in range(options.repeats):
        for who in random.Random(repeat).sample(everyone, len(everyone)):
            folder = (options.runs_dir / f"repeat{repeat + 1}" / who).resolve()
            print(f"repeat {repeat + 1} of {options.repeats}: {who}", file=sys.stderr, flush=True)
            began = time.perf_counter()
            losses[who], seconds = (theirs if who in THEIRS else run_ours)(options, who, folder, *files)
            found[who].append((statistics.median(seconds[WARM_UP:]), time.perf_counter() - began))
    first = everyone[0]
    apart = {who: max(abs(a - b) for a, b in zip(losses[first], losses[who], strict=True)) for who in everyone}
    print(f"| | s per step | whole s | {first} / it, per step by repeat | whole | losses apart |")
    print("|---|---|---|---|---|---|")
    for who, pairs in found.items():
        step, whole = (statistics.fmean(values) for values in zip(*pairs))
        ratios = [[base[i] / own[i] for base, own in zip(found[first], pairs)] for i in (0, 1)]
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios[0])
        print(f"| {who} | {step:.3f} | {whole:.1f} | {each} | {statistics.fmean(ratios[1]):.2f} | {apart[who]:.1e} |")
    different = [who for who in everyone if not apart[who] <= SAME[options.precision]]
    if different:
        print(f"not the same work: the losses of {', '.join(different)} are not {first}'s.")
    return 1 if different else 0


def theirs(
    options: argparse.Namespace, who: str, folder: Path, data: Path, model: Path, order: Path
) -> tuple[list[float], list[float]]:
    """The same by Trainer or by Accelerate's loop, as ranks of this program."""
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(options.packages.resolve())])}
    common |= {"WORLD_SIZE": str(options.world_size), "LOCAL_WORLD_SIZE": str(options.world_size)}
    common |= {"OMP_NUM_THREADS": str(options.threads), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    started = []
    try:
        for rank in range(options.world_size):
            words = [*sys.argv, "--be_rank", who, data, model, order]
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "RUN_FOLDER": str(folder)}
            with (folder / f"rank{rank}.txt").open("w") as said:
                command = [sys.executable, *map(str, words)]
                started.append(subprocess.Popen(command, env=own, stdout=said, stderr=said))
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"a rank of {folder} failed; what it printed is there.")
    finally:
        end_all(started, 0.0)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(options.world_size)]
    losses = [statistics.fmean(of_ranks) for of_ranks in zip(*(rank["losses"] for rank in found), strict=True)]
    return losses, found[0]["seconds"]


def be_rank(options: argparse.Namespace, who: str, data: str, model_folder: str, order: str) -> None:
    """One rank of Trainer or Accelerate's loop. It writes its losses and seconds; rank 0 also writes the model."""
    from transformers import BertForSequenceClassification

    torch.set_num_threads(options.threads)
    folder, rank = Path(os.environ["RUN_FOLDER"]), os.environ["RANK"]
    model = BertForSequenceClassification.from_pretrained(
        model_folder, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    task = get_task("rte")
    task.find(str(data))
    examples = task.load("train", find_model(str(model_folder), do_lower_case=True).encoder, options.max_seq_length)
    # Accelerate gives rank r every n-th batch: its slice of each global batch, one after the other.
    places = [place for batch in json.loads(Path(order).read_text()) for place in batch]
    losses, moments = [], [time.perf_counter()]

    def step_ends(loss: float) -> None:
        losses.append(loss)
        moments.append(time.perf_counter())

    train = train_by_trainer if who == "trainer" else train_by_accelerate
    train(options, model.train(), places, examples.collate, folder, step_ends)
    seconds = [after - before for before, after in zip(moments, moments[1:])]
    (folder / f"rank{rank}.json").write_text(json.dumps({"losses": losses, "seconds": seconds}))


def train_by_trainer(
    options: argparse.Namespace, model: Any, places: list[int], collate: Any, folder: Path, step_ends: Any
) -> None:
    """Trainer with its defaults, without logs, evaluations and checkpoints; it takes the examples in their order."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses = []

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(places)

        def compute_loss(self, *arguments, **named):
            loss = super().compute_loss(*arguments, **named)
            losses.append(loss.item())
            return loss

    class Watch(TrainerCallback):
        def on_step_end(self, *_, **__):
            step_ends(losses[-1])

    arguments = TrainingArguments(
        output_dir=str(folder / "model"),
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
    trainer = InOrder(model, arguments, train_dataset=places, data_collator=collate, callbacks=[Watch()])
    trainer.train()
    trainer.save_model()


def train_by_accelerate(
    options: argparse.Namespace, model: Any, places: list[int], collate: Any, folder: Path, step_ends: Any
) -> None:
    """The loop of Accelerate's documentation."""
    from accelerate import Accelerator
    from transformers import get_linear_schedule_with_warmup

    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    own = options.total_batch_size // options.world_size
    loader = torch.utils.data.DataLoader(places, batch_size=own, collate_fn=collate)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, options.max_steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step_ends(loss.item())
    accelerator.save_model(model, folder / "model")


if __name__ == "__main__":
    sys.exit(main())
