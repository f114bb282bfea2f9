"""What a rank prints where nobody watches a bar: its first iterations, then a line every few seconds."""

import time

from cos598d.terminal import console


def test_without_a_terminal_a_line_comes_every_few_seconds_and_from_no_silent_rank(monkeypatch, capsys):
    clock = iter([100.0, *(100.0 + number for number in range(1, 21))])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with console.Console("", speaks=True).progress(20) as progress:
        for step in range(1, 21):
            progress(step, 0.5, 1.0, 8)
    lines = capsys.readouterr().out.splitlines()
    # Five, and then one whenever five seconds have passed.
    assert [int(line.split()[1][:-1]) for line in lines] == [1, 2, 3, 4, 5, 10, 15, 20]
    monkeypatch.undo()
    with console.Console("", speaks=False).progress(3) as progress:
        for step in range(1, 4):
            progress(step, 0.5, 1.0, 8)
    assert capsys.readouterr().out == ""
