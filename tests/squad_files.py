"""Small SQuAD files for tests."""

import json

from cos598d.data.squad.read import parse_squad


def question(identity, text, answers=(), **more):
    """One entry of "qas"; `answers` are (text, answer_start)."""
    gold = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": identity, "question": text, "answers": gold, **more}


def squad_value(*paragraphs):
    """A file's JSON value; each paragraph is (context, [question, ...])."""
    return {
        "version": "1.1",
        "data": [{"title": "One", "paragraphs": [{"context": context, "qas": asked} for context, asked in paragraphs]}],
    }


def squad_of(*paragraphs):
    return parse_squad(squad_value(*paragraphs), "a test's file")


def write_squad(path, *paragraphs):
    path.write_text(json.dumps(squad_value(*paragraphs), ensure_ascii=False), encoding="utf-8")
    return path


def found_in(context, text, occurrence=0):
    """(text, the character where its given occurrence begins in the context)."""
    place = -1
    for _ in range(occurrence + 1):
        place = context.index(text, place + 1)
    return text, place
