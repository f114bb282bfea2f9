"""From the outcomes of all claims to the causes, each once, with the claims that fail because of it."""

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
# Their tensors are harder to average: a mistake with plain gradients looks different there.
HARDER = (SHARES, "averages_any_tensors")
# as in training, ranks start with different weights and buffers, which `attach` may fail to change
AVERAGES = "averages_gradients"
IN_ONE_MEMORY = (
    "wrong only if autograd keeps the gradients of two parameters in one memory: writing into one's .grad changes the "
    "other's; give .grad a new tensor instead"
)


def causes_of(by_claim: Sequence[tuple[str, Sequence[ClaimOutcome]]], own_file: str) -> list[dict[str, Any]]:
    """Each `cause` as a phrase, and the names of the `claims` that fail because of it; the most frequent first."""
    causes: dict[Any, dict[str, Any]] = {}
    by_name = dict(by_claim)
    with_symptom = {claim for claim, outcomes in by_claim if any(each.symptom for each in outcomes)}
    start = next((each.cause for each in by_name.get(STARTS, ()) if each.cause), "")
    plain = [outcome for outcome in by_name.get(AVERAGES, ()) if outcome.status != PASSED]
    of_plain = _cause(plain, own_file) if plain else (None, "")
    vague: list[tuple[str, str]] = []  # claims whose numbers show nothing, each with a fallback phrase
    for claim, outcomes in by_claim:
        failed = [outcome for outcome in outcomes if outcome.status != PASSED]
        if not failed:
            continue
        key, words = _cause(failed, own_file)
        # Only if a claim on gradients that starts from equal weights was tested, and holds.
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
    # A fault in training, or without a known reason, is most likely the gradients' fault.
    of_gradients = next((causes[key] for key in causes if key[0] in ("symptom", "calls", "raised")), None)
    for claim, words in vague:
        if of_gradients is None:
            of_gradients = {"cause": words, "claims": []}
            ordered.append(of_gradients)
        of_gradients["claims"].append(claim)
    return ordered


def _cause(failed: Sequence[ClaimOutcome], own_file: str) -> tuple[Any, str]:
    """A key that is equal for equal causes (None if unknown), and the cause as a phrase."""
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
