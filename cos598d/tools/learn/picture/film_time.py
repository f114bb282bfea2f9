"""When what of a film is seen: its steps as CSS animations of one length that repeat together."""

REST, END = 0.9, 4.0  # seconds at the beginning and after each step; at the end
MOVE, QUICK = 1.5, 0.9  # seconds of a step's messages on their way; in a film of many steps
MANY = 8
INSTANT = 0.01  # percent


class Clock:
    """The moments of a film of so many `steps`: in step k the messages move, and then what they bring is there.

    `state`, `caption` and `move` name a class, which `style` then animates: what is held after a step (0: before the
    first), a step's words (0: before the first; steps + 1: at the end), and a step's messages.
    """

    def __init__(self, name: str, steps: int):
        self._name, self._steps = name, steps
        self._move = QUICK if steps > MANY else MOVE
        self.seconds = REST + steps * (self._move + REST) + END

    def state(self, step: int) -> str:
        return f"{self._name}-s{step}"

    def caption(self, place: int) -> str:
        return f"{self._name}-c{place}"

    def move(self, step: int) -> str:
        return f"{self._name}-m{step}"

    def style(self) -> str:
        """The animations of all classes; none for a reader who prefers reduced motion."""
        name, last = self._name, self._steps
        rules = []
        for step in range(last + 1):
            begin = self._arrives(step) if step else 0.0
            rules += self._seen(self.state(step), begin, self._arrives(step + 1) if step < last else None)
        for place in range(last + 2):
            begin = 0.0 if not place else self._leaves(place) if place <= last else self._arrives(last) + REST
            end = None if place > last else self._leaves(place + 1) if place < last else self._arrives(last) + REST
            rules += self._seen(self.caption(place), begin, end)
        for step in range(1, last + 1):
            rules += self._moving(self.move(step), self._leaves(step), self._arrives(step))
        rules.append(f".{name}:hover *{{animation-play-state:paused!important}}")
        return "\n@media (prefers-reduced-motion:no-preference){" + "\n".join(rules) + "}"

    def _leaves(self, step: int) -> float:
        """When a step's messages leave, in seconds."""
        return REST + (step - 1) * (self._move + REST)

    def _arrives(self, step: int) -> float:
        return self._leaves(step) + self._move

    def _percent(self, moment: float) -> float:
        return 100 * moment / self.seconds

    def _seen(self, word: str, begin: float, end: float | None) -> list[str]:
        """Seen from `begin` to `end` (None: to the film's end) and at no other time."""
        first, last = self._percent(begin), None if end is None else self._percent(end)
        frames = "0%{visibility:visible}" if not begin else f"0%{{visibility:hidden}}{first:.2f}%{{visibility:visible}}"
        frames += "100%{visibility:visible}" if last is None else f"{last:.2f}%,100%{{visibility:hidden}}"
        return [self._rule(word, frames, "step-end")]

    def _moving(self, word: str, begin: float, end: float) -> list[str]:
        """Seen between these moments, on its way by `--way`."""
        first, last = self._percent(begin), self._percent(end)
        frames = (
            f"0%,{first:.2f}%{{visibility:hidden;transform:none}}"
            f"{first + INSTANT:.2f}%{{visibility:visible;transform:none}}"
            f"{last - INSTANT:.2f}%{{visibility:visible;transform:translateY(var(--way))}}"
            f"{last:.2f}%,100%{{visibility:hidden;transform:translateY(var(--way))}}"
        )
        return [self._rule(word, frames, "ease-in-out")]

    def _rule(self, word: str, frames: str, pace: str) -> str:
        animation = f"animation:{word} {self.seconds:.1f}s {pace} infinite"
        return f"@keyframes {word}{{{frames}}}.{self._name} .{word}{{{animation}}}"
