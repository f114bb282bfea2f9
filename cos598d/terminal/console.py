"""What a rank prints during training: a few lines and a progress bar; of ranks with one terminal only rank 0."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from cos598d.errors import WARNING
from cos598d.terminal.printable import printable
from cos598d.terminal.streams import OutputLost

FIRST_LOSSES = 5
SILENT_SECONDS = 5.0  # where there is no bar, an iteration that ends so long after the last line prints another


class Console:
    """One rank's output. `speaks` is False for ranks that leave the terminal to another."""

    def __init__(self, prefix: str, speaks: bool):
        self._prefix, self._speaks = prefix, speaks

    def say(self, line: str) -> None:
        """Print one line on standard output, above the progress bar where there is one."""
        if self._speaks:
            with contextlib.suppress(OutputLost):  # a run is worth more than what it prints
                tqdm.write(printable(f"{self._prefix}{line}"), file=sys.stdout)
                sys.stdout.flush()

    def say_last(self, line: str) -> None:
        """Print on standard error why the program ends, where this rank speaks."""
        if self._speaks:
            _to_standard_error(f"{self._prefix}{line}")

    def warn(self, line: str) -> None:
        """Print a warning on standard error, whether this rank prints its progress or not."""
        _to_standard_error(f"{WARNING}{line}")

    @contextlib.contextmanager
    def progress(
        self, steps: int, done: int = 0, every: int | None = None
    ) -> Iterator[Callable[[int, float, float, int], None]]:
        """A bar over `steps` iterations, of which some are `done`; call the result with the iteration, its loss,
        seconds and examples.

        The first five iterations are printed as lines, and then one of `every` so many. With None, and where standard
        error is not a terminal, there is no bar, but a line every few seconds, which shows the speed.
        """
        with tqdm(total=steps, initial=done, unit="it", disable=None if self._speaks else True, leave=False) as bar:
            spoke = time.monotonic()

            def update(step: int, loss: float, seconds: float, examples: int) -> None:
                nonlocal spoke
                now = time.monotonic()
                is_time = step % every == 0 if every else bar.disable and now - spoke >= SILENT_SECONDS
                if step <= done + FIRST_LOSSES or is_time:
                    spoke = now
                    self.say(f"iteration {step}: loss {loss:.6f} over {examples} examples, {seconds:.2f} s")
                bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
                bar.update()

            yield update

    def epoch(self, facts: dict[str, Any]) -> None:
        """Print one line for an epoch that has ended: its mean loss, then the evaluation's figures, and its speed."""
        speed = _speed(facts.get("training", {}))
        self.say(f"epoch {facts['epoch']}: {facts['iterations']} iterations, {_figures(facts)}{speed}")

    def evaluation(self, facts: dict[str, Any]) -> None:
        """Print one line for an evaluation within an epoch."""
        self.say(f"after iteration {facts['iteration']}: {_figures(facts)}")


def _to_standard_error(line: str) -> None:
    tqdm.write(printable(line), file=sys.stderr)
    sys.stderr.flush()


def _speed(training: dict[str, Any]) -> str:
    """How long an epoch was trained, and how fast: of images per second there are as many as of examples."""
    names = [name for name in ("images", "examples", "tokens") if training.get(f"{name}_per_second_wall") is not None]
    if not names:
        return ""
    rates = [
        f"{training[f'{name}_per_second_wall']:,.1f} {name}/s"
        for name in names
        if names[0] != "images" or name == "images"
    ]
    return f"; trained in {training['wall_seconds']:.1f} s, {', '.join(rates)}"


def _figures(facts: dict[str, Any]) -> str:
    shown = {k: v for k, v in facts.items() if isinstance(v, float)}
    seconds = shown.pop("seconds_evaluation", None)
    took = "" if seconds is None else f" (evaluated in {seconds:.1f} s)"
    return ", ".join(f"{name} {value:.4f}" for name, value in shown.items()) + took
