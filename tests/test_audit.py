"""The audit's manners: the script stays as it is, bad input is a sentence, and what came until an end is judged."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from audit_cases import AVERAGE, FAULTS
from audit_scripts import BY_HAND, with_changes
from audits import audit
from programs import ROOT, Program, free_port

from cos598d.audit.book import read_book
from cos598d.audit.exchange import Counter, read_books
from cos598d.audit.judge import judge
from cos598d.audit.judge.causes import CONSEQUENCES
from cos598d.audit.judge.fit import BY_MICRO, BY_RANK, INDISTINCT, MEAN, OWN, STALE, UNKNOWN, fit
from cos598d.audit.judge.words import WORDS
from cos598d.audit.sketch import SIZE, Sketcher, from_text, to_text
from cos598d.audit.starter import filled
from cos598d.audit.watch.loss import weight_of
from cos598d.audit.watch.traffic import moved
from cos598d.commands.cli import main
from cos598d.errors import UserError

RIGHT = BY_HAND.lstrip()
NEVER = with_changes("by_hand", [(AVERAGE, "")])


def test_a_sketch_is_linear_and_draws_from_no_state_of_the_script():
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    sketch = Sketcher()
    one, other = (torch.arange(70_000.0).sin().reshape(7, -1) * scale for scale in (1, 3))
    combined = sketch(2 * one - other.cos())
    assert np.allclose(combined, 2 * sketch(one) - sketch(other.cos()), rtol=0, atol=1e-2)
    assert np.linalg.norm(combined) > 100
    sparse = torch.sparse_coo_tensor([[1, 3]], [2.0, 5.0], (9,))
    assert np.array_equal(sketch(sparse), sketch(sparse.to_dense()))
    assert np.array_equal(from_text(to_text(sketch(sparse))), sketch(sparse))
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_fit_names_how_gradients_were_combined():
    rng = np.random.default_rng(0)
    local = rng.normal(size=(3, 2, SIZE))  # three ranks, two micro-batches
    by_rank, before = local.sum(1), rng.normal(size=SIZE)

    def kind(applied, old=None, of=local):
        return fit(applied, of, old, 1, 1e-3, 10.0)

    assert (kind(by_rank.mean(0)).kind, kind(by_rank.sum(0)).kind) == (MEAN, MEAN)
    assert kind(by_rank.sum(0)).factor == pytest.approx(3)
    assert kind(by_rank[1]).kind == OWN
    clipped = kind(by_rank.T @ np.array([0.1, 0.2, 0.3]))
    assert (clipped.kind, clipped.factors) == (BY_RANK, pytest.approx((0.3, 0.6, 0.9)))
    assert kind(local[:, 1].mean(0)).kind == BY_MICRO
    assert kind(local[:, 1].mean(0)).factors == pytest.approx((0, 1), abs=1e-6)
    assert kind(local[1, 1]).lost == (0,)
    assert (kind(by_rank.mean(0) + before, before).kind, kind(by_rank.mean(0) + before).kind) == (STALE, UNKNOWN)
    assert kind(by_rank[0], of=np.stack([local[0]] * 3)).kind == INDISTINCT


def test_how_much_a_loss_weighs_is_read_from_its_graph():
    inputs, wanted = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 1, 2, 3, 0, 1])
    loss = torch.nn.functional.cross_entropy
    assert weight_of(loss(inputs, wanted)) == 1
    assert weight_of(loss(inputs, wanted) / 4) == pytest.approx(1 / 4)
    assert weight_of((loss(inputs, wanted) + inputs.square().mean()) / 2 * 3) == pytest.approx(3)
    assert weight_of(loss(inputs, wanted, reduction="sum")) is None
    assert weight_of(inputs.exp().logsumexp((0, 1))) is None
    assert weight_of(None) is None


def test_bytes_are_gloos_by_formula():
    assert moved("all_reduce", 100, 4, 1, 0) == (150, 150)
    assert moved("all_gather", 100, 4, 1, 0) == (300, 300)
    assert (moved("gather", 100, 4, 0, 0), moved("gather", 100, 4, 2, 0)) == ((0, 300), (100, 0))
    assert (moved("scatter", 100, 4, 0, 0), moved("scatter", 100, 4, 2, 0)) == ((300, 0), (0, 100))
    assert (moved("broadcast", 100, 4, 1, 1), moved("barrier", 4, 4, 0, 0)) == ((200, 0), (0, 0))
    assert (moved("send", 100, 2, 0, 0), moved("recv", 100, 2, 0, 0)) == ((100, 0), (0, 100))


def test_placeholders_are_filled_in_and_other_braces_stay():
    assert filled(["--rank={rank}/{world_size}", "{x}"], {"rank": 2, "world_size": 4}) == ["--rank=2/4", "{x}"]


def test_a_right_script_and_its_record(start, tmp_path, capsys):
    printed = '    print(rank, step, f"{loss.item():.9f}", torch.rand(1).item(), flush=True)\n'
    source = with_changes("by_hand", [("    optimizer.step()\n", "    optimizer.step()\n" + printed)])
    codes, text, verdict = audit(start, tmp_path, source)
    assert codes == [0, 0], text
    assert (verdict["faults"], verdict["wastes"]) == ([], [])
    assert [note["name"] for note in verdict["notes"]] == ["local_loss"]
    assert (verdict["seen"]["judged"], verdict["seen"]["steps"]) == (3, 5)
    assert "No fault found; gradients judged in 3 of 5 steps" in text
    assert "Gradients travelled while nothing was computed for" in text
    # The same numbers as without the audit, random ones too.
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    plain = [start(f"plain{r}", [tmp_path / "train.py"], port | {"RANK": str(r), "WORLD_SIZE": "2"}) for r in range(2)]
    assert [program.wait() for program in plain] == [0, 0]
    assert [line for line in text.splitlines() if line[:2] == "0 "] == plain[0].text.splitlines()
    # The ledger by its formulas: 4 tensors of (8 x 16 + 16 + 16 x 3 + 3) numbers, in 5 steps; and the record.
    summary = json.loads((tmp_path / "audit" / "summary.json").read_text())
    assert summary["payload_bytes_per_iteration"] == 4 * 195
    assert (summary["calls_per_iteration"], summary["sync"], summary["iterations"]) == (4, "all_reduce", 5)
    assert main(["compare", str(tmp_path / "audit")]) == 0
    assert "all_reduce" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "audit"), "-o", str(tmp_path / "page.md")]) == 0


def test_a_fault_again_from_its_folder_strict_and_with_books_gone(start, tmp_path, capsys):
    codes, text, verdict = audit(start, tmp_path, NEVER, flags=["--strict"])
    assert codes == [3, 0], text
    (fault_found,) = verdict["faults"]
    assert fault_found["name"] == "never_averaged"
    assert fault_found["consequences"] == ["optimizer_states_differ", "weights_drift"]
    folder = tmp_path / "audit"
    assert main(["audit", str(folder)]) == 0
    assert "never averaged" in capsys.readouterr().out
    assert main(["audit", "--strict", str(folder)]) == 3
    (folder / "books" / "rank1.json").unlink()
    assert main(["audit", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "Rank 1 left no book" in out
    assert "one rank alone" in out


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda book: b"{", "is not JSON"),
        (lambda book: b"\x80\x04N.", "no UTF-8"),
        (lambda book: json.dumps(book | {"rank": 0}).encode(), "rank 0 of 2"),
        (lambda book: json.dumps(book | {"steps": "many"}).encode(), "its steps is"),
        (lambda book: json.dumps(book | {"start": {"weights": {"a": "AAAA"}}}).encode(), "a sketch of 32 numbers"),
        (lambda book: json.dumps(book | {"run": "another"}).encode(), "another run"),
        (lambda book: json.dumps(book | {"seconds": 1e999}).encode(), "JSON"),
    ],
)
def test_a_forged_or_damaged_book_is_refused_in_a_sentence(damage, says, start, tmp_path, finished):
    for rank, book in enumerate(finished):
        (tmp_path / "books").mkdir(exist_ok=True)
        data = json.dumps(book).encode() if rank == 0 else damage(book)
        (tmp_path / "books" / f"rank{rank}.json").write_bytes(data)
    books, remarks = read_books(tmp_path)
    assert [book["rank"] for book in books] == [0]
    (said,) = remarks
    assert says in said
    assert "\n" not in said
    assert judge(books, remarks).seen.ranks == 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The books of a right script of two ranks."""
    folder = tmp_path_factory.mktemp("finished")

    def begin(name, words, environ=None, is_fresh=False):
        return Program(folder, name, [str(word) for word in words], environ, is_fresh)

    codes, text, _ = audit(begin, folder, RIGHT)
    assert codes == [0, 0], text
    return [json.loads((folder / "audit" / "books" / f"rank{rank}.json").read_text()) for rank in range(2)]


class Store(dict):
    """What a store of torch's does, as far as it is asked."""

    def set(self, name, value):
        self[name] = value if isinstance(value, bytes) else value.encode()

    def get(self, name):
        return self[name]

    def check(self, names):
        return all(name in self for name in names)


def test_between_hosts_a_book_travels_through_the_store(finished):
    store = Store()
    sender, receiver = Counter(store, 1), Counter(store, 0)
    assert receiver.receive(1) is None
    text = json.dumps(finished[1]) * 20
    sender.send(text)
    assert receiver.receive(1) == text.encode()
    assert len(store) > 2
    for name, value in (
        ("0", b"x"),
        ("", b"{}"),
        ("", b'{"pieces": 9999999, "bytes": 1, "sha256": ""}'),
        ("", b"\xff"),
    ):
        forged = Store(store)
        forged[f"cos598d_audit/book/1{'/' if name else ''}{name}"] = value
        with pytest.raises(UserError, match="did not come whole"):
            Counter(forged, 0).receive(1)


def test_every_finding_and_every_planted_fault_has_its_words():
    assert {name for _, _, name, _ in FAULTS.values()} <= WORDS.keys()
    assert {*CONSEQUENCES, *(effect for effects in CONSEQUENCES.values() for effect in effects)} <= WORDS.keys()
    assert len(FAULTS) >= 20


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "needs a script"),
        (["nowhere.py"], "does not exist"),
        (["prose.py"], "is no Python"),
        (["binary.py"], "is no Python"),
        (["--steps", "0", "right.py"], "--steps 0"),
        (["--output_dir", "right.py", "right.py"], "is a file"),
        (["--master_port", "99", "right.py"], "add --world_size"),
        (["empty"], "no books of an audit"),
    ],
)
def test_bad_words_are_a_sentence(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prose.py").write_text("this is no Python\n")
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\x00\x01")
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "empty").mkdir()
    assert main(["audit", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_the_starter_starts_the_ranks_and_judges(start, tmp_path):
    (tmp_path / "train.py").write_text(NEVER)
    words = ["audit", "--world_size", "2", "--output_dir", tmp_path / "audit", "--", tmp_path / "train.py", "{rank}"]
    program = start("starter", ["-m", "cos598d", *words])
    assert program.wait() == 0, program.text
    assert "the gradients are never averaged" in program.text
    assert read_book(tmp_path / "audit" / "books" / "rank1.json", 1)["rank"] == 1


def test_a_verdict_is_data(finished):
    found = judge(finished).to_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["seen"]["judged"], found["seen"]["world_size"]) == (3, 2)


def test_judging_again_loads_no_torch():
    code = "import sys, cos598d.commands.audit; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"
