"""Lesson 0: one step of training in one process, as task 1 makes it."""

from cos598d.tools.learn.lesson import Lesson

LESSON = Lesson(
    number=0,
    name="step",
    title="a step in one process",
    minutes=20,
    question="Before several ranks can agree with one process, the one process must be right. Write one step of "
    "training: loss, gradients, clipping, the optimizer.",
    contract={"step": "step(model, optimizer, batch, max_norm), which returns the loss as a float"},
    hints=(
        "model(**batch)[0] is the loss; loss.backward() adds its gradients to what is in .grad. Adds: so somebody has "
        "to empty .grad in every step, and optimizer.zero_grad() does.",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) scales the gradients down in place where their "
        "norm is larger. It has to see the gradients that the optimizer then uses.",
        "loss is a tensor that keeps all of forward in memory as long as you hold it. loss.item() is the number.",
    ),
    checks="lesson0",
    read="cos598d/train.py, where `step` is the same for any strategy, with gradients summed over micro-batches.",
    measure="python task1/run_glue.py --model_name_or_path tiny --max_steps 10",
    ranks=(1,),
)
