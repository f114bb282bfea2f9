"""The proof: our engines train as one process does; each known mistake fails its own claims, and the card names it."""

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
def test_mutant_fails_its_own_claims_alone_and_is_named(name):
    mutant = MUTANTS[name]
    found = prove(2, CASES, NONCE, SECONDS, observe_mutant, mutant.kind)
    wrong = [case for case, verdict in found.items() if verdict.status not in (KEPT, NOT_CLAIMED)]
    assert sorted(wrong) == sorted(mutant.fails), found
    assert mutant.says in found[mutant.fails[0]].says, found[mutant.fails[0]]


def test_on_one_rank_a_mutant_that_takes_several_is_no_mistake():
    found = prove(1, cases("gradients", "clipping"), NONCE, SECONDS, observe_mutant, MUTANTS["forgot to divide"].kind)
    assert [verdict.status for verdict in found.values()] == [KEPT, KEPT], found


def test_a_refusal_is_named_and_the_cases_after_it_are_tried():
    found = prove(2, cases("gradients", "clipping", "tied weights"), NONCE, SECONDS, observe_mutant, RefusesClipping)
    assert [verdict.status for verdict in found.values()] == [KEPT, REFUSED, KEPT], found
    assert found["clipping"].says == "this engine cannot clip: leave --max_grad_norm out."


def test_a_refusal_of_one_training_hides_no_mistake_in_another():
    found = prove(2, cases("same start", "steps"), NONCE, SECONDS, observe_mutant, WrongBeforeItRefuses)
    assert [verdict.status for verdict in found.values()] == [KEPT, WRONG], found
    assert found["steps"].says.startswith("SGD: the weight")


def test_a_refusal_in_the_middle_of_a_training_is_a_failure():
    found = prove(2, cases("same start", "gradients", "steps"), NONCE, SECONDS, observe_mutant, RefusesLate)
    assert [verdict.status for verdict in found.values()] == [KEPT, KEPT, FAILED], found
    assert "after its first step it refuses: this engine is tired" in found["steps"].says


def test_a_case_that_ends_the_world_is_named_and_the_cases_after_it_are_tried():
    found = prove(2, cases("gradients", "clipping", "tied weights"), NONCE, SECONDS, observe_mutant, BreaksOnOneRank)
    assert [verdict.status for verdict in found.values()] == [KEPT, FAILED, KEPT], found
    assert "a clip too far" in found["clipping"].says


@pytest.mark.long
def test_a_case_that_does_not_end_is_ended_and_the_cases_after_it_are_tried():
    found = prove(2, cases("clipping", "tied weights"), NONCE, 8, observe_mutant, WaitsForEver)
    assert [verdict.status for verdict in found.values()] == [DID_NOT_END, KEPT], found


def test_clipping_bites_and_overflow_overflows():
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


def test_card_and_exit_code(tmp_path, capsys):
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
def test_a_claim_is_kept_where_it_is_kept_on_every_number_of_ranks(other, monkeypatch, capsys):
    def on(size, tried, *_):
        return {case.name: CaseVerdict(KEPT if size == 1 else other, "so it is") for case in tried}

    monkeypatch.setattr(prove_command, "prove", on)
    assert main(["prove", "ddp", "--world_sizes", "1,2", "--cases", "gradients", "--short"]) == 1
    assert f"ddp: 0 of {int(other != NOT_CLAIMED)} tests passed" in capsys.readouterr().out


def test_a_refused_claim_is_not_a_kept_one():
    outcomes = [{"world_size": 2, "status": REFUSED, "largest": 0.0, "says": "no."}]
    result = {"engine": "x", "world_sizes": [2]}
    result["cases"] = [{"case": "bf16", "says": "under bf16", "status": REFUSED, "outcomes": outcomes}]
    assert "refused on 2 ranks: bf16 (under bf16)\n  no." in card.engine_card(result)
    assert "x: 0 of 1 tests passed; refused: bf16." in card.engine_card(result)


def test_a_refusal_that_cases_have_in_common_is_said_once():
    def case(name, *outcomes):
        found = [{"world_size": n, "status": s, "largest": 0.0, "says": w} for n, s, w in outcomes]
        return {"case": name, "says": f"what {name} is", "status": found[-1]["status"], "outcomes": found}

    def card_of(*cases):
        return card.engine_card({"engine": "x", "world_sizes": [1, 2, 4], "cases": list(cases)})

    alone = [(1, KEPT, ""), (2, REFUSED, "one process."), (4, REFUSED, "one process.")]
    everywhere = card_of(*(case(name, *alone) for name in "abc"))
    assert everywhere.count("one process.") == 1
    assert everywhere.endswith("refused on 2 and 4 ranks: all 3 cases\n  one process.")
    assert "x: 0 of 3 tests passed; refused: all 3 cases." in everywhere
    some = card_of(
        case("a", *alone), case("b", *alone), case("c", (1, KEPT, ""), (2, REFUSED, "another."), (4, KEPT, ""))
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
def test_words_that_cannot_work_are_refused_at_once(words, sentence, capsys):
    assert main(["prove", *words]) == 2
    assert sentence in capsys.readouterr().err
