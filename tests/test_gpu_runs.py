"""What only a GPU can prove of whole programs (`make gpu`): one nccl rank, ranks that share a GPU over gloo, benches.

Nothing is fetched: models have random weights, data are bundled.
"""

import os
import shutil

import pytest
import torch
from gpu import NEEDS_GPU, RECORDS
from programs import TINY_TRAINING
from report_records import read

from cos598d.sync import SYNCS
from cos598d.sync.codecs import CODECS
from cos598d.terminal.program import own_python_path

pytestmark = NEEDS_GPU
IN_HOST_MEMORY = ("shared_memory", "shared_weights", "sparse_zero1")
ON_GPU = [name for name in SYNCS if name not in IN_HOST_MEMORY]
# Each rank goes its own way: its gradient is nobody else's.
UNAVERAGED = ("none", "local_sgd", "diloco")
SHARDED = ("zero1", "zero2", "zero3", "torch_fsdp")
STEPS = ("--max_steps", 5, "--check_replicas", 1)
# Two ranks over gloo, also where each has a GPU of its own.
TWO = ("--backend", "gloo", "--world_size", 2)
# Of float32 sums in another order, on another device, over a few steps of AdamW.
CLOSE = 1e-3
ON_CPU: list[float] = []


@pytest.fixture
def command(start):
    """Run `cos598d WORDS`, in a folder of the records under `name`; its words, which stay there too."""

    def run(name, words, seconds=240, exit_code=0):
        program = start(name, ["-m", "cos598d", *words], {"PYTHONPATH": own_python_path()}, is_fresh=True)
        try:
            assert program.wait(seconds) == exit_code, program.text
        finally:
            RECORDS.mkdir(parents=True, exist_ok=True)
            shutil.copy(program.path, RECORDS / f"{name}.txt")
        return program.text

    return run


@pytest.fixture
def trained(command):
    """Train the tiny model; the run's folder."""

    def run(name, *words):
        words = ["train", *TINY_TRAINING, *STEPS, *words, "--output_dir", RECORDS / name, "--overwrite_output_dir"]
        command(name, words)
        return RECORDS / name

    return run


@pytest.fixture
def on_cpu(trained):
    """The losses of one process on the CPU, trained once for all tests."""
    if not ON_CPU:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        ON_CPU.extend(losses_of(trained(f"one-cpu{worker}", "--no_cuda", "--sync", "none")))
    return ON_CPU


@pytest.fixture
def benched(command):
    """Measure candidates; the record."""

    def run(name, *words):
        shutil.rmtree(RECORDS / name, ignore_errors=True)
        command(name, ["bench", *words, "--output", RECORDS / name])
        return read(RECORDS / name / "bench.json")

    return run


def losses_of(folder):
    return read(folder / "summary.json")["losses"]


@pytest.mark.parametrize("sync", ["ddp", "bucketed", "sparse_rows", *SHARDED])
def test_one_rank_of_nccl_trains_like_the_cpu_and_its_bytes_are_assumed(sync, command, trained, on_cpu):
    folder = trained(f"one-nccl-{sync}", "--backend", "nccl", "--sync", sync, "--world_size", 1)
    assert losses_of(folder) == pytest.approx(on_cpu, rel=CLOSE)
    summary = read(folder / "summary.json")
    assert (summary["backend"], summary["device"], summary["bytes_are_assumed"]) == ("nccl", "cuda", True)
    text = command(f"compare-{sync}", ["compare", "--verbose", folder])
    assert "log (assumed)" in text


def test_nccl_refuses_two_ranks_on_one_gpu_and_takes_one_on_each(command, trained, benched, on_cpu):
    gpus = torch.cuda.device_count()
    words = ["train", *TINY_TRAINING, "--backend", "nccl", "--world_size", gpus + 1]
    text = command("nccl-too-many", words, exit_code=1)
    assert f"rank {gpus} has the same GPU as rank 0" in text
    assert "Traceback" not in text
    if gpus > 1:
        for sync in ON_GPU:
            if sync not in UNAVERAGED:
                folder = trained(f"nccl-{sync}", "--backend", "nccl", "--sync", sync, "--world_size", gpus)
                assert losses_of(folder) == pytest.approx(on_cpu, rel=CLOSE), sync
        words = ["--backend", "nccl", "--model", "bert-base", "--world_size", gpus, "--rounds", 6]
        record = benched("bench-nccl-all", *words, "--sync", ",".join(ON_GPU))
        assert record["gradient_norm"]["bucketed"] == pytest.approx(record["gradient_norm"]["ddp"], rel=CLOSE)


def test_every_sync_and_codec_averages_cuda_tensors_over_gloo_as_on_the_cpu(benched):
    codecs = [f"bucketed+{codec}" for codec in CODECS]
    names = [*ON_GPU, *codecs]
    words = ["--model", "tiny", *TWO[:3], 3, "--batch", 2, "--tokens", 16, "--rounds", 2, "--step"]
    words += ["--sync", ",".join(names)]
    gpu, cpu = benched("gloo-3", *words), benched("cpu-3", *words, "--no_cuda")
    assert (gpu["setting"]["device"], cpu["setting"]["device"]) == ("cuda", "cpu")
    for name in names:
        norms = gpu["gradient_norm"][name]
        if name not in codecs:
            assert norms == pytest.approx(cpu["gradient_norm"][name], rel=CLOSE), name
        if name not in UNAVERAGED:
            assert norms == pytest.approx([norms[0]] * 3, rel=1e-6), name
        if not name.startswith("ddp"):  # its buckets are torch's
            assert gpu["traffic"][name] == cpu["traffic"][name], name


@pytest.mark.parametrize("sync", ["all_reduce", "gather_scatter", "ring", "sparse_rows", "ddp", *SHARDED])
def test_ranks_that_share_a_gpu_over_gloo_train_as_one_process_on_the_cpu(sync, trained, on_cpu):
    folder = trained(f"gloo-{sync}", "--sync", sync, *TWO)
    assert losses_of(folder) == pytest.approx(on_cpu, rel=CLOSE)
    assert all(row["started"] >= 0 for row in read(folder / "communication.rank0.jsonl") if row["iteration"] > 0)
    for row in read(folder / "iterations.rank0.jsonl"):
        phases = sum(value for name, value in row.items() if name.startswith("seconds_"))
        assert 0 < phases <= row["seconds"] * 1.001 <= row["wall_seconds"] * 1.05


@pytest.mark.parametrize("sync", ["none", "bucketed", "zero2", "zero3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_on_the_gpu_ends_as_an_uninterrupted_one(sync, precision, trained):
    words = ["--sync", sync, *TWO[:3], 1 if sync == "none" else 2, "--precision", precision]
    words += ["--dropout", 0.1, "--max_steps", 6, "--save_steps", 3, "--keep", 2]
    whole = trained(f"whole-{sync}-{precision}", *words)
    resumed = shutil.copytree(whole, RECORDS / f"resumed-{sync}-{precision}", dirs_exist_ok=True)
    shutil.rmtree(resumed / "checkpoints" / "step-00000006", ignore_errors=True)
    (resumed / "summary.json").unlink()
    trained(resumed.name, *words, "--resume", "auto")
    assert "resumes after iteration 3" in (RECORDS / f"{resumed.name}.txt").read_text()
    assert losses_of(resumed)[-3:] == losses_of(whole)[-3:]


SCRIPT = """
import sys, torch, torch.distributed as dist, torch.distributed.nn
from torch import nn
import cos598d

backend, strategy = sys.argv[1:]
torch.cuda.set_device(0)
dist.init_process_group(backend)
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs, labels = torch.randn(512, 64), torch.randint(0, 10, (512,))
inputs, labels = inputs.cuda(), labels.cuda()
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
if strategy == "ddp":
    model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
else:
    model, optimizer = cos598d.parallelize(model, lambda params: torch.optim.SGD(params, lr=0.5), strategy)
for step in range(20):
    batch = torch.arange(64 * step, 64 * step + 64)[rank::ranks] % 512
    loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(inputs), labels)
if rank == 0:
    print(f"loss {loss:.4f}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 2), ("nccl", 1)])
def test_an_own_script_trains_on_the_gpu_with_every_function(backend, ranks, command, start, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    found = {}
    for strategy in ("ddp", "bucketed", "zero3"):
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks, path, backend, strategy]
        program = start(f"{backend}-{strategy}", words, {"PYTHONPATH": own_python_path()}, is_fresh=True)
        found[strategy] = program.wait(120), program.text.partition("loss ")[2][:6] or program.text[-3000:]
    assert set(found.values()) == {found["ddp"]}
    assert found["ddp"][0] == 0, found


def test_the_audit_finds_no_fault_in_a_right_script_on_the_gpu(command, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    text = command("audit", ["audit", "--output_dir", tmp_path / "audit", "--world_size", 2, path, "gloo", "ddp"])
    assert "No fault found" in text


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_on_the_gpu_follows_float32(precision, trained, on_cpu):
    folder = trained(f"gloo-{precision}", "--sync", "bucketed", *TWO, "--precision", precision)
    assert losses_of(folder) == pytest.approx(on_cpu, rel=0.05)


@pytest.mark.parametrize("sync", IN_HOST_MEMORY)
def test_a_sync_in_the_host_s_memory_is_refused(sync, command):
    words = ["train", *TINY_TRAINING, *STEPS, "--sync", sync, *TWO]
    text = command(f"refused-{sync}", words, exit_code=1)
    assert "needs tensors " in text
    assert " is on cuda" in text
