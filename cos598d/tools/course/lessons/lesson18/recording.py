"""A real recording: three processes of a small network under torch.profiler, of which one is slow in one layer.

    python -m cos598d.tools.course.lessons.lesson18.recording

records again, and replaces `recorded.json` next to this file. Only the events that the lesson's page names are kept.
"""

import json
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

RANKS, STEPS = 3, 6
SLOW_RANK, SLOW_LAYER, SLOW_SECONDS = 1, "mixer", 0.06
LAYERS = {"embedding": (512, 768), "mixer": (768, 768), "gate": (768, 768), "head": (768, 64)}
BUCKETS = {
    "head": "",
    "gate": "bucket 0",
    "mixer": "",
    "embedding": "bucket 1",
}  # which begins after a layer's backward
KEPT = ("name", "ph", "cat", "pid", "tid", "ts", "dur")


def recorded() -> list[dict[str, Any]]:
    """The recorded traces of all ranks."""
    return json.loads((files(__package__) / "recorded.json").read_text())


def record(rank: int, folder: str) -> None:
    """One rank's steps, whose trace it leaves in the folder."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    layers = {name: torch.nn.Linear(*shape) for name, shape in LAYERS.items()}
    optimizer = torch.optim.SGD([p for layer in layers.values() for p in layer.parameters()], lr=0.01)
    examples = torch.utils.data.TensorDataset(torch.randn(64 * STEPS, 512))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        batches = iter(torch.utils.data.DataLoader(examples, batch_size=64))
        for step in range(STEPS):
            with record_function(f"ProfilerStep#{step}"):
                value, inputs, outputs, calls = next(batches)[0], [], [], []
                with record_function("forward"):
                    for name, layer in layers.items():
                        with record_function(name):
                            inputs.append(value.detach().requires_grad_())
                            outputs.append(torch.tanh(layer(inputs[-1])))
                            value = outputs[-1]
                            time.sleep(SLOW_SECONDS if (rank, name) == (SLOW_RANK, SLOW_LAYER) else 0)
                with record_function("backward"):
                    gradient = value.detach()
                    for place, (name, layer) in reversed(list(enumerate(layers.items()))):
                        with record_function(f"backward of {name}"):
                            outputs[place].backward(gradient)
                            gradient = inputs[place].grad
                        if BUCKETS[name]:
                            with record_function(BUCKETS[name]):
                                calls.append(dist.all_reduce(layer.weight.grad, async_op=True))
                with record_function("wait for the calls"):
                    for call in calls:
                        call.wait()
                optimizer.step()
                optimizer.zero_grad()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
    dist.destroy_process_group()


def cut_down(trace: dict[str, Any]) -> dict[str, Any]:
    """What the lesson needs of a trace."""
    names = ("forward", "backward", "wait", "gloo:", "c10d:", "ProfilerStep", "enumerate", "Optimizer.step", "bucket")
    events = [
        {key: event[key] for key in KEPT}
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["name"].startswith((*names, *LAYERS))
    ]
    return {"distributedInfo": trace["distributedInfo"], "traceEvents": events}


if __name__ == "__main__":
    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory() as folder:
        start_processes(record, (folder,), nprocs=RANKS, start_method="spawn")
        traces = [cut_down(json.loads(Path(f"{folder}/rank{rank}.json").read_text())) for rank in range(RANKS)]
    rows = ",\n".join(json.dumps(trace) for trace in traces)
    Path(__file__).with_name("recorded.json").write_text(f"[{rows}]\n")
