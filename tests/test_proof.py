"""The proof: our engines train as one process does; each known mistake fails its own cases, and the card names it."""

import json

import pytest
from proof_mutants import (
    MUTANTS,
    BreaksOnOneRank,
    RefusesClipping,
    RefusesLate,
    WaitsForEver,
    WrongBeforeItRefuses,
)

from cos598d.commands import prove as prove_command
from cos598d.commands.cli import main
from cos598d.sync.options import DEFAULTS
from cos598d.tools.check import card
from cos598d.tools.check.proof.cases import CASES, CLIP, TOO_HIGH, reference
from cos598d.tools.check.proof.judge import CaseVerdict
from cos598d.tools.check.proof.observe import observe, observe_engine
from cos598d.tools.check.proof.prove import prove
from cos598d.tools.check.verdict import DID_NOT_END, FAILED, KEPT, NOT_CLAIMED, REFUSED, WRONG

NONCE, SECONDS = 598, 60
# Others have a word for what they do not claim.
UNCLAIMED = {
    "bucketed": ["memory"],
    **dict.fromkeys(("zero1", "sparse_zero1", "zero2", "shared_weights"), []),
    "zero3": ["used on one rank"],
}


def observe_mutant(comm, kind, names, nonce, seconds):
    """On a rank: what `observe_engine` does, for a class of the tests."""
    observe(comm, kind, DEFAULTS, names, nonce, seconds)


def cases(*names):
    return [case for case in CASES if case.name in names]


# On 3 ranks the shares differ in size. test_shard and test_state_moves have the other numbers of ranks.
@pytest.mark.long
@pytest.mark.parametrize(("name", "world_size"), [*((name, 3) for name in UNCLAIMED), ("zero3", 1)])
def test_engine_trains_as_one_process_does(name, world_size):
    found = prove(world_size, CASES, NONCE, SECONDS, observe_engine, name, {}, DEFAULTS)
    expected = {case.name: NOT_CLAIMED if case.name in UNCLAIMED[name] else KEPT for case in CASES}
    assert {case: verdict.status for case, verdict in found.items()} == expected, found


@pytest.mark.long(one_in=12)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails_only_its_own_cases_and_the_card_names_it(name):
    mutant = MUTANTS[name]
    found = prove(2, CASES, NONCE, SECONDS, observe_mutant, mutant.kind)
    wrong = [case for case, verdict in found.items() if verdict.status not in (KEPT, NOT_CLAIMED)]
    assert sorted(wrong) == sorted(mutant.fails), found
    assert mutant.says in found[mutant.fails[0]].says, found[mutant.fails[0]]


def test_mutant_that_needs_several_ranks_passes_on_one():
    found = prove(1, cases("gradients", "clipping"), NONCE, SECONDS, observe_mutant, MUTANTS["forgot to divide"].kind)
    assert [verdict.status for verdict in found.values()] == [KEPT, KEPT], found


@pytest.mark.parametrize(
    ("kind", "names", "statuses", "says"),
    [
        (RefusesClipping, ("gradients", "clipping", "tied weights"), [KEPT, REFUSED, KEPT], "this engine cannot clip"),
        (WrongBeforeItRefuses, ("same start", "steps"), [KEPT, WRONG], "SGD: the weight"),
        (RefusesLate, ("same start", "gradients", "steps"), [KEPT, KEPT, FAILED], "after its first step it refuses"),
        (BreaksOnOneRank, ("gradients", "clipping", "tied weights"), [KEPT, FAILED, KEPT], "a clip too far"),
        pytest.param(WaitsForEver, ("clipping", "tied weights"), [DID_NOT_END, KEPT], "", marks=pytest.mark.long),
    ],
)
def test_refusal_failure_or_hang_ends_only_its_case(kind, names, statuses, says):
    found = prove(2, cases(*names), NONCE, 8 if kind is WaitsForEver else SECONDS, observe_mutant, kind)
    assert [verdict.status for verdict in found.values()] == statuses, found
    (wrong,) = (verdict for verdict in found.values() if verdict.status != KEPT)
    assert says in wrong.says


def test_norms_of_the_cases_clip_and_overflow_as_meant():
    for case in CASES:
        for training in case.trainings:
            norms = reference(case, training, NONCE).norms
            if case.max_grad_norm == TOO_HIGH:
                assert max(norms) < TOO_HIGH / 4, (case.name, training.name, norms)
            elif case.max_grad_norm:
                assert min(norms) > 4 * CLIP, (case.name, training.name, norms)
            if case.overflows_in is not None:
                assert [norm < float("inf") for norm in norms] == [True, False, True]


@pytest.mark.long
def test_check_proves_a_strategy(capsys):
    words = ["--world_sizes", "1", "--seconds", "60", "--json", "-"]
    assert main(["check", "zero1", *words]) == 0
    (result,) = json.loads(capsys.readouterr().out)["engines"]
    assert [each["case"] for each in result["cases"]] == [case.name for case in CASES]
    assert main(["check", "zero1", *words, "--no_speed"]) == 2
    assert "--no_speed is only for gradient syncs, and zero1 is a strategy. Remove it." in capsys.readouterr().err


def test_prove_prints_a_card_and_exits_with_1_for_a_wrong_engine(tmp_path, capsys):
    file = tmp_path / "proof.json"
    words = ["prove", "none", "--world_sizes", "1,2", "--cases", "gradients,memory", "--json", str(file)]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert "WRONG on 2 ranks: gradients" in printed
    assert "none: 0 of 1 tests passed; wrong: gradients." in printed
    assert "(w0 - w1) / learning rate" in printed
    (result,) = json.loads(file.read_text())["engines"]
    assert [each["status"] for each in result["cases"][0]["outcomes"]] == [KEPT, WRONG]
    assert main(["prove", "ddp", "--world_sizes", "1", "--cases", "gradients", "--short"]) == 0
    assert "ddp: 1 of 1 tests passed." in capsys.readouterr().out


@pytest.mark.parametrize("other", [NOT_CLAIMED, REFUSED, WRONG, FAILED])
def test_case_passes_only_if_kept_on_every_number_of_ranks(other, monkeypatch, capsys):
    def on(size, tried, *_):
        return {case.name: CaseVerdict(KEPT if size == 1 else other, "so it is") for case in tried}

    monkeypatch.setattr(prove_command, "prove", on)
    assert main(["prove", "ddp", "--world_sizes", "1,2", "--cases", "gradients", "--short"]) == 1
    assert f"ddp: 0 of {int(other != NOT_CLAIMED)} tests passed" in capsys.readouterr().out


def test_card_counts_refusals_and_says_a_shared_one_once():
    def case(name, *outcomes):
        found = [{"world_size": n, "status": s, "largest": 0.0, "says": w} for n, s, w in outcomes]
        return {"case": name, "says": f"what {name} is", "status": found[-1]["status"], "outcomes": found}

    def card_of(*cases):
        return card.engine_card({"engine": "x", "world_sizes": [1, 2, 4], "cases": list(cases)})

    one = card_of(case("bf16", (1, KEPT, ""), (2, KEPT, ""), (4, REFUSED, "no.")))
    assert "refused on 4 ranks: bf16 (what bf16 is)\n  no." in one
    assert "x: 0 of 1 tests passed; refused: bf16." in one
    refused = [(1, KEPT, ""), (2, REFUSED, "one process."), (4, REFUSED, "one process.")]
    everywhere = card_of(*(case(name, *refused) for name in "abc"))
    assert everywhere.count("one process.") == 1
    assert everywhere.endswith("refused on 2 and 4 ranks: all 3 cases\n  one process.")
    assert "x: 0 of 3 tests passed; refused: all 3 cases." in everywhere
    some = card_of(
        case("a", *refused), case("b", *refused), case("c", (1, KEPT, ""), (2, REFUSED, "another."), (4, KEPT, ""))
    )
    assert "refused on 2 and 4 ranks: a, b\n  one process.\nrefused on 2 ranks: c (what c is)\n  another." in some


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["bucketed", "--cases", "bytes"], "--cases bytes: there is no such case. The cases are same start, gradients"),
        (["zero4"], "zero4"),
        (["zero1:compress=fp16"], "--compress has no effect with sync zero1"),
        (["zero1", "--seconds", "0"], "--seconds 0"),
        (["zero1", "--world_sizes", "0"], "--world_sizes 0"),
    ],
)
def test_flags_that_cannot_work_are_refused(words, sentence, capsys):
    assert main(["prove", *words]) == 2
    assert sentence in capsys.readouterr().err
