"""Anybody's predictions file scored by the official rules: `python -m cos598d score --task squad`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cos598d.data.squad.metrics import score_version_1, score_version_2
from cos598d.data.squad.read import Squad, read_json, read_squad
from cos598d.errors import UserError

_SHOWN = 3  # ids named in a remark


def score_file(data: Path, predictions: Path, null_odds: Path | None = None) -> tuple[dict[str, float], list[str]]:
    """The official scores of a predictions file, {question id: answer}, and remarks on what does not fit.

    `data` is a SQuAD file. If it has questions without an answer, 2.0's rules hold, else 1.1's. `null_odds`, {question
    id: number}, adds 2.0's best thresholds. Questions without a prediction count as wrong. Raises UserError where a
    file cannot be read or has another form, or where the predictions are for other questions altogether.
    """
    squad = read_squad(data)
    answers = _read(predictions, "an answer's text", lambda entry: isinstance(entry, str))
    known = {question.identity for question in squad.questions}
    missing = [identity for identity in known if identity not in answers]
    strange = [identity for identity in answers if identity not in known]
    if len(missing) == len(known):
        raise UserError(
            f"{predictions} answers none of the {len(known):,} questions of {data}: give the file that belongs to it."
        )
    remarks = []
    if missing:
        remarks.append(f"{len(missing):,} of {len(known):,} questions have no prediction and count as wrong: ")
        remarks[-1] += _name(squad, missing)
    if strange:
        remarks.append(f"{len(strange):,} predictions are for other questions and are left aside: {_list(strange)}")
    if not squad.has_impossible:
        if null_odds:
            raise UserError(f"{data} is of SQuAD 1.1, which has no null odds: leave --null_odds out.")
        return score_version_1(squad.questions, answers), remarks
    odds = None
    if null_odds:
        odds = _read(null_odds, "a number", _is_number)
        if without := [identity for identity in known if identity not in odds]:
            raise UserError(f"{null_odds} has no number for {len(without):,} questions, {_list(without)}: complete it.")
    return score_version_2(squad.questions, answers, odds), remarks


def _read(file: Path, words: str, fits: Callable[[Any], bool]) -> dict[str, Any]:
    """The file's entries by question id, each of which `fits` the form that `words` name."""
    value = read_json(file, f"a file that maps each question id to {words}")
    form = f'it should map each question id to {words}: {{"ID": ...}}'
    if not isinstance(value, dict):
        raise UserError(f"{file} holds a JSON {type(value).__name__}: {form}.")
    for identity, entry in value.items():
        if not fits(entry):
            raise UserError(f"{file}: the entry of {identity!r} is {json.dumps(entry)[:60]}, but {form}.")
    return value


def _is_number(entry: Any) -> bool:
    return type(entry) in (int, float) and abs(entry) <= sys.float_info.max  # not NaN, nor more than a float holds


def _name(squad: Squad, identities: list[str]) -> str:
    wanted = set(identities)
    return _list([question.identity for question in squad.questions if question.identity in wanted])


def _list(identities: list[str]) -> str:
    more = f" and {len(identities) - _SHOWN:,} more" if len(identities) > _SHOWN else ""
    return ", ".join(identities[:_SHOWN]) + more
