"""The part of the matrix with other styles: communication hooks, EMA, a teacher, synchronized batch norm."""

from audit_cases import AVERAGE
from audit_scripts import IMPORTS, JOIN

BEGIN = (
    "import copy\n\n"
    + IMPORTS
    + "from torch.nn.parallel import DistributedDataParallel\n"
    + JOIN
    + """data, labels = torch.randn(160, 8), torch.randint(0, 3, (160,))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, labels = data[rank::ranks].split(8), labels[rank::ranks].split(8)
"""
)
END = "dist.destroy_process_group()\n"
DDP = "wrapped = DistributedDataParallel(model)\n"
LOOP = """for inputs, targets in zip(data[:5], labels):
    optimizer.zero_grad()
    nn.functional.cross_entropy({model}(inputs), targets).backward()
{rest}    optimizer.step()
"""
COMM_HOOK = """

def hook(state, bucket):
    future = dist.all_reduce(bucket.buffer(){before}, async_op=True).get_future()
    return future.then(lambda each: each.value()[0]{after})


wrapped.register_comm_hook(None, hook)
"""
EMA = (
    LOOP.format(model="wrapped", rest="")
    + """    with torch.no_grad():
        for old, new in zip(ema.parameters(), model.parameters()):
            old.lerp_(new, 0.1)
"""
)
TEACHER = """teacher = copy.deepcopy(model).requires_grad_(False)
student = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
for inputs, targets in zip(data[:5], labels):
    with torch.no_grad():
        wanted = teacher(inputs).softmax(1)
    optimizer.zero_grad()
    made = student(inputs)
    loss = nn.functional.cross_entropy(made, targets)
    (loss + nn.functional.kl_div(made.log_softmax(1), wanted, reduction="batchmean")).backward()
    for p in {averaged}.parameters():
        dist.all_reduce(p.grad)
        p.grad /= ranks
    optimizer.step()
"""
BATCH_NORM = """

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SyncNorm(nn.Module):
    def forward(self, inputs):
        mean = Sum.apply(inputs.mean(0)) / ranks
        variance = Sum.apply((inputs - mean).square().mean(0)) / ranks
        return (inputs - mean) / (variance + 1e-5).sqrt()


model.insert(1, SyncNorm())
"""
# On 2 ranks each sends to the other.
SWAP = """    for p in model.parameters():
        other = torch.empty_like(p.grad)
        calls = [dist.P2POp(dist.isend, p.grad.clone(), 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        for each in dist.batch_isend_irecv(calls):
            each.wait()
        {into}
"""
SCALES = (
    """scaler = torch.amp.GradScaler("cpu", init_scale={scale})
for inputs, targets in zip(data[:5], labels):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
"""
    + AVERAGE
    + """    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
"""
)
# Another model runs without values, to find its shapes.
SHAPES = """with {place}:
    trial = nn.Linear(8, 3)
    steps = torch.optim.SGD(trial.parameters(), lr=0.1)
    with torch.no_grad():
        trial(torch.empty(8, 8))
    nn.functional.cross_entropy(trial(torch.empty(8, 8)), torch.empty(8, dtype=torch.long)).backward()
    nn.utils.clip_grad_norm_(trial.parameters(), 1.0)
    steps.step()
"""
FAKE = "from torch._subclasses.fake_tensor import FakeTensorMode\n" + SHAPES.format(place="FakeTensorMode()")
RIGHT = "right"


def script(*parts):
    return "".join((BEGIN, *parts, END))


# By name a source, what the audit is to find, and the number of ranks.
STYLES = {
    "comm_hook": (script(DDP, COMM_HOOK.format(before=".div_(ranks)", after=""), LOOP.format(model="wrapped", rest="")), RIGHT, 2),
    "comm_hook_divides_twice": (script(DDP, COMM_HOOK.format(before=".div_(ranks)", after=" / ranks"), LOOP.format(model="wrapped", rest="")), "averaged_twice", 2),
    "shapes_on_meta": (script(SHAPES.format(place='torch.device("meta")'), DDP, LOOP.format(model="wrapped", rest="")), RIGHT, 2),
    "shapes_of_fake_tensors": (script(FAKE, DDP, LOOP.format(model="wrapped", rest="")), RIGHT, 2),
    "ema": (script("ema = copy.deepcopy(model)\n", DDP, EMA), RIGHT, 2),
    "ema_is_trained": (script("ema = copy.deepcopy(model)\n", DDP, EMA.replace("        for old", "        for p in model.parameters():\n            p += 0.01 * rank\n        for old")), "weights_drift", 2),
    "teacher": (script(TEACHER.format(averaged="student")), RIGHT, 2),
    "teacher_is_averaged": (script(TEACHER.format(averaged="student[2]")), "forgotten_tensors", 2),
    "batch_norm_by_hand": (script(BATCH_NORM, LOOP.format(model="model", rest=AVERAGE)), RIGHT, 2),
    "swap": (script(LOOP.format(model="model", rest=SWAP.format(into="p.grad.add_(other).div_(2)"))), RIGHT, 2),
    "swap_for_good": (script(LOOP.format(model="model", rest=SWAP.format(into="p.grad.copy_(other)"))), "partial_average", 2),
    "scales": (script(SCALES.format(scale="256.0")), RIGHT, 2),
    "scales_of_their_own": (script(SCALES.format(scale="256.0 * (1 + rank)")), "wrong_factor,unequal_weights", 2),
}  # fmt: skip
