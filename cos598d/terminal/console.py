"""What a rank prints during training: a few lines and a progress bar. If ranks share a terminal, only rank 0 prints."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from cos598d.errors import WARNING
from cos598d.terminal.printable import printable
from cos598d.terminal.words import number_of

FIRST_LOSSES = 5
SILENT_SECONDS = 5.0  # without a bar, an iteration that ends this long after the last line prints another


class Console:
    """One rank's output. `speaks` is False for ranks that leave the terminal to another."""

    def __init__(self, prefix: str, speaks: bool):
        self._prefix, self._speaks = prefix, speaks

    def say(self, line: str) -> None:
        """Print one line on standard output, above the progress bar if there is one."""
        if self._speaks:
            with contextlib.suppress(OSError):  # a run is worth more than its output
                tqdm.write(printable(f"{self._prefix}{line}"), file=sys.stdout)
                sys.stdout.flush()

    def say_last(self, line: str) -> None:
        """Print on standard error why the program ends, if this rank prints."""
        if self._speaks:
            _to_standard_error(f"{self._prefix}{line}")

    def warn(self, line: str) -> None:
        """Print a warning on standard error, even if this rank does not print its progress."""
        _to_standard_error(f"{WARNING}{line}")

    @contextlib.contextmanager
    def progress(
        self, steps: int, done: int = 0, every: int | None = None
    ) -> Iterator[Callable[[int, float, float, int], None]]:
        """A bar over `steps` iterations, `done` of them done. Call it with iteration, loss, seconds and examples.

        The first five iterations are printed as lines, and then one of `every`. With None, and if standard error is not
        a terminal, a line with the speed is printed every few seconds instead of a bar.
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
        """Print one line for an epoch that has ended: its mean loss, the evaluation's metrics, and its speed."""
        speed = _speed(facts.get("training", {}))
        self.say(f"epoch {facts['epoch']}: {number_of(facts['iterations'], 'iteration')}, {_figures(facts)}{speed}")

    def evaluation(self, facts: dict[str, Any]) -> None:
        """Print one line for an evaluation within an epoch."""
        self.say(f"after iteration {facts['iteration']}: {_figures(facts)}")


def _to_standard_error(line: str) -> None:
    tqdm.write(printable(line), file=sys.stderr)
    sys.stderr.flush()


def _speed(training: dict[str, Any]) -> str:
    """An epoch's training time and speed."""
    rates = {name: training.get(f"{name}_per_second_wall") for name in ("images", "examples", "tokens")}
    if rates["images"] is not None:
        rates["examples"] = None  # each is one image
    shown = [f"{rate:,.1f} {name}/s" for name, rate in rates.items() if rate is not None]
    return f"; trained in {training['wall_seconds']:.1f} s, {', '.join(shown)}" if shown else ""


def _figures(facts: dict[str, Any]) -> str:
    shown = {k: v for k, v in facts.items() if isinstance(v, float)}
    seconds = shown.pop("seconds_evaluation", None)
    took = "" if seconds is None else f" (evaluated in {seconds:.1f} s)"
    return ", ".join(f"{name} {value:.4f}" for name, value in shown.items()) + took
