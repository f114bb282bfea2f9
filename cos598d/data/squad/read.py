"""SQuAD's JSON files, of both versions: contexts and questions, with errors that name the position."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cos598d.errors import UserError
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_plain

_FORM = 'Give a file of the form {"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}'


class GoldAnswer(NamedTuple):
    """A gold answer, and the index of its first character in the context, from 0."""

    text: str
    start: int


class Question(NamedTuple):
    """One question. `context` is its index in `Squad.contexts`; impossible questions have no answers."""

    identity: str
    context: int
    text: str
    answers: tuple[GoldAnswer, ...]
    impossible: bool


@dataclass(frozen=True)
class Squad:
    """A file's contexts and questions, in its order, so that the questions on one context are adjacent."""

    name: str
    contexts: list[str]
    questions: list[Question]

    @property
    def has_impossible(self) -> bool:
        """Whether some questions have no answer in their contexts, as only in SQuAD 2.0."""
        return any(question.impossible for question in self.questions)


MOST_BYTES = 1 << 30  # SQuAD 2.0 has 42 million


def read_squad(file: Path) -> Squad:
    """Read a file of SQuAD 1.1 or 2.0. Raises UserError with the position of the first fault."""
    return parse_squad(read_json(file, "one of SQuAD's files"), str(file))


def read_json(file: Path, wanted: str) -> Any:
    """The JSON value in `file`. `wanted` is what it should be, for errors. Raises UserError."""
    try:
        return json.loads(read_plain(file, MOST_BYTES))
    except FileNotFoundError:
        raise UserError(f"There is no file {file}. Give {wanted}.") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Make it readable.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({' '.join(str(error).split())}). Give {wanted}, complete.") from error


def parse_squad(value: Any, name: str) -> Squad:
    """The contexts and questions of a SQuAD file's JSON `value`; `name` is for errors. Raises UserError."""
    contexts: list[str] = []
    questions: list[Question] = []
    seen: dict[str, str] = {}
    for place, paragraph in _paragraphs(value, name):
        context = _get(paragraph, "context", str, place, name)
        items = _get(paragraph, "qas", list, place, name)
        if items and not context.strip():
            raise UserError(f"{name}: {place} has an empty context and {len(items)} questions. Fix that paragraph.")
        contexts.append(context)
        for number, item in enumerate(items):
            where = f"{place}.qas[{number}]"
            question = _question(item, len(contexts) - 1, where, name)
            if question.identity in seen:
                raise UserError(
                    f"{name}: the id {printable(question.identity)!r} appears twice, at {seen[question.identity]} and "
                    f"{where}. Give every question its own id."
                )
            seen[question.identity] = where
            questions.append(question)
    if not questions:
        raise UserError(f"{name} has no question. {_FORM}.")
    return Squad(name, contexts, questions)


def _paragraphs(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    for number, article in enumerate(_get(value, "data", list, "the file", name)):
        where = f"data[{number}]"
        for inner, paragraph in enumerate(_get(article, "paragraphs", list, where, name)):
            yield f"{where}.paragraphs[{inner}]", paragraph


def _question(item: Any, context: int, where: str, name: str) -> Question:
    identity = _get(item, "id", str, where, name)
    text = _get(item, "question", str, where, name)
    impossible = "is_impossible" in item and _get(item, "is_impossible", bool, where, name)
    # Questions of the test sets have no answers.
    given = _get(item, "answers", list, where, name) if "answers" in item else []
    answers = []
    for number, answer in enumerate(given):
        place = f"{where}.answers[{number}]"
        answers.append(
            GoldAnswer(_get(answer, "text", str, place, name), _get(answer, "answer_start", int, place, name))
        )
    return Question(identity, context, text, () if impossible else tuple(answers), impossible)


_KINDS = {str: "text", list: "list", int: "whole number", bool: "true or false"}


def _get(holder: Any, key: str, kind: type, where: str, name: str) -> Any:
    found = holder.get(key) if isinstance(holder, dict) else None
    if type(found) is not kind:  # not isinstance: True would count as an int
        instead = f" but {_shown(found)}" if isinstance(holder, dict) and key in holder else ""
        raise UserError(f"{name} is not in SQuAD's form: {where} has no {_KINDS[kind]} {key!r}{instead}. {_FORM}.")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return printable(json.dumps(value), 60)
