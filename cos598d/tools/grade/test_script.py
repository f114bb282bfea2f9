"""What a training script must do: run to its end, and have no fault that its audit sees."""

import json
import subprocess
import sys

import pytest

SECONDS = 240


@pytest.fixture(scope="session")
def audited(request, tmp_path_factory):
    """`audited(n)`: the exit code of the script on n ranks, what it printed last, and the audit's verdict or None."""
    file, known = request.config.getoption("--file").resolve(), {}

    def audit(n):
        if n not in known:
            folder = tmp_path_factory.mktemp("audit")
            words = ["audit", "--world_size", str(n), "--output_dir", str(folder / "out"), "--timeout", str(SECONDS)]
            command = [sys.executable, "-m", "cos598d", *words, "--", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
            verdict = folder / "out" / "audit.json"
            facts = json.loads(verdict.read_text()) if verdict.exists() else None
            known[n] = done.returncode, done.stderr.splitlines()[-5:], facts
        return known[n]

    return audit


def test_runs(audited, n):
    """It ends with exit code 0."""
    code, said, _ = audited(n)
    assert not code, f"on {n} ranks the script ended with exit code {code}: {' / '.join(said)}"


def test_no_fault(audited, n):
    """Its audit finds no fault."""
    _, said, verdict = audited(n)
    assert verdict is not None, f"on {n} ranks the audit has no verdict: {' / '.join(said)}"
    for first in verdict["faults"]:
        words = f"{first['title']} [{first['name']}]: {' '.join(first['evidence'])} fix: {first['mend']}"
        pytest.fail(f"on {n} ranks: {words}", pytrace=False)


def test_is_judged(audited, n):
    """Its audit can tell whether the gradients are right."""
    verdict = audited(n)[2] or {"not_judged": ["there is no verdict"]}
    assert not verdict["not_judged"], f"on {n} ranks: {' '.join(verdict['not_judged'])}"
