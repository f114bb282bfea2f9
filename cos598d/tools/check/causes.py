"""From what became of every claim to the causes, each once, with the claims that fail for it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cos598d.tools.check import card
from cos598d.tools.check.diagnosis import UNKNOWN, Symptom, sentence
from cos598d.tools.check.judge import ClaimOutcome
from cos598d.tools.check.notes import SAME_CALLS
from cos598d.tools.check.verdict import PASSED

TRAINS = "trains_like_one_process"
STARTS, SHARES = "starts_from_rank_0", "averages_gradients_that_share_memory"
# Of tensors that are harder to average: what is wrong with plain gradients looks otherwise in them.
HARDER = (SHARES, "averages_any_tensors")
AVERAGES = "averages_gradients"  # as in training, ranks start from other weights and buffers, which `attach` may leave
IN_ONE_MEMORY = (
    "wrong only if autograd keeps the gradients of two parameters in one memory: writing into one's .grad changes the "
    "other's; give .grad a new tensor instead"
)


def causes_of(by_claim: Sequence[tuple[str, Sequence[ClaimOutcome]]], own_file: str) -> list[dict[str, Any]]:
    """`cause` in words and the names of the `claims` that fail for it; first what most claims fail for."""
    causes: dict[Any, dict[str, Any]] = {}
    by_name = dict(by_claim)
    with_symptom = {claim for claim, outcomes in by_claim if any(each.symptom for each in outcomes)}
    start = next((each.cause for each in by_name.get(STARTS, ()) if each.cause), "")
    plain = [outcome for outcome in by_name.get(AVERAGES, ()) if outcome.status != PASSED]
    of_plain = _cause(plain, own_file) if plain else (None, "")
    vague: list[tuple[str, str]] = []  # claims whose numbers say nothing, and what to say if nothing else does
    for claim, outcomes in by_claim:
        failed = [outcome for outcome in outcomes if outcome.status != PASSED]
        if not failed:
            continue
        key, words = _cause(failed, own_file)
        # Only where a claim on gradients that starts from equal weights was tried, and holds.
        if start and SHARES in by_name and with_symptom <= {AVERAGES} and claim in (AVERAGES, TRAINS):
            key, words = ("told", start), start
        elif with_symptom == {SHARES} == {claim} and AVERAGES in by_name:
            key, words = ("told", IN_ONE_MEMORY), IN_ONE_MEMORY
        elif claim in HARDER and key and key[0] == "symptom" and of_plain[0] and of_plain[0][0] == "symptom":
            key, words = of_plain
        # Replicas that drift apart in training stop it with a sentence.
        if key is None or (key[0], key[2:3]) == ("raised", ("UserError",)) and claim == TRAINS and causes:
            vague.append((claim, words))
            continue
        causes.setdefault(key, {"cause": words, "claims": []})["claims"].append(claim)
    ordered = sorted(causes.values(), key=lambda cause: -len(cause["claims"]))
    # What is wrong in training, or for no known reason, is most likely what is wrong with the gradients.
    of_gradients = next((causes[key] for key in causes if key[0] in ("symptom", "calls", "raised")), None)
    for claim, words in vague:
        if of_gradients is None:
            of_gradients = {"cause": words, "claims": []}
            ordered.append(of_gradients)
        of_gradients["claims"].append(claim)
    return ordered


def _cause(failed: Sequence[ClaimOutcome], own_file: str) -> tuple[Any, str]:
    """A key that is equal for the same cause (None for one unknown), and the cause in words."""
    told = next((outcome for outcome in failed if outcome.cause), None)
    symptoms = [outcome.symptom for outcome in failed if outcome.symptom and outcome.symptom.kind != UNKNOWN]
    if told:
        return ("calls",) if SAME_CALLS in told.cause else ("told", told.cause), told.cause
    bad = next((outcome for outcome in failed if outcome.reports and outcome.reports[0]["kind"] != "claim"), None)
    if bad:
        report = bad.reports[0]
        key = ("raised", report["kind"], report["type"], report.get("file"), report.get("line"))
        return key, card.report(report, own_file, with_rank=False)
    if symptoms:
        kind = Counter(symptom.kind for symptom in symptoms).most_common(1)[0][0]
        alike = [symptom for symptom in symptoms if symptom.kind == kind]
        bare = [Symptom(symptom.kind, symptom.world_size, symptom.numbers) for symptom in alike]
        return ("symptom", kind, sentence(bare) if kind == "scaled" else ""), sentence(alike)
    return None, failed[0].reports[0]["message"] if failed[0].reports else failed[0].status
