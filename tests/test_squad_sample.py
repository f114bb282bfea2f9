"""The bundled SQuAD sample: always the same, as awkward as real text, and answered by its own grammar alone."""

import functools
import hashlib
import json
import re
import unicodedata
from collections import Counter

import pytest
from sample_grammar.facts import ASIDES, KINDS, TABLES, Kind, slots, with_pronoun

from cos598d.data.samples import squad_sample, write_squad_sample

PARTS = ("train", "dev")
SENTENCE = re.compile(r"\S.*?[.?]”?(?=\s+[A-ZÀ-Ž“]|$)", re.DOTALL)


def _paragraphs(part: str, version_2: bool = True) -> list[dict]:
    return [paragraph for article in squad_sample(part, version_2)["data"] for paragraph in article["paragraphs"]]


def _questions(part: str, version_2: bool = True) -> list[tuple[str, dict]]:
    return [(paragraph["context"], asked) for paragraph in _paragraphs(part, version_2) for asked in paragraph["qas"]]


def _answered() -> list[tuple[str, dict]]:
    return [told for part in PARTS for told in _questions(part) if not told[1]["is_impossible"]]


def _pattern(template: str, kind: Kind) -> re.Pattern:
    names = "|".join(re.escape(pattern).replace(r"\{\}", r"\S+") for pattern in kind.names)
    fields = re.escape(template.replace("[", "").replace("]", "")).replace(r"\{it\}", f"(?P<it>{names})")
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+?)", fields), re.IGNORECASE)


@functools.cache
def _readers() -> list[tuple[Kind, re.Pattern, re.Pattern]]:
    """How every sentence of the grammar reads with the subject's name, and with "it"."""
    return [
        (kind, _pattern(sentence, kind), _pattern(with_pronoun(sentence), kind))
        for kind in KINDS
        for sentence in kind.sentences
    ]


@functools.cache
def _known(type_: str) -> set[str]:
    return {filler.casefold() for filler in TABLES[type_]}


def _read(context: str) -> dict[tuple[str, str], tuple[str, int]]:
    """(subject, slot) -> (answer, start), from the text and the grammar; "it" is whom the sentence before names."""
    facts, subject = {}, None
    for sentence in SENTENCE.finditer(context):
        before, subject = subject, None
        for kind, named, pronoun in _readers():
            found = named.fullmatch(sentence[0]) or (before and pronoun.fullmatch(sentence[0]))
            if not found:
                continue
            told = found.groupdict()
            about = told.pop("it", before).casefold()
            plain = {slot: unicodedata.normalize("NFC", answer).casefold() for slot, answer in told.items()}
            if all(answer in _known(kind.types[slot]) for slot, answer in plain.items()):
                subject = about if found.re is named else None
                for slot, answer in told.items():
                    assert (about, slot) not in facts, "told twice"
                    facts[about, slot] = (answer, sentence.start() + found.start(slot))
                break
    return facts


@functools.cache
def _askers() -> list[tuple[str, re.Pattern]]:
    return [
        (slot, _pattern(template, kind))
        for kind in KINDS
        for slot, templates in kind.questions.items()
        for template in templates
    ]


def _fact(question: str) -> tuple[str, str]:
    """The subject and the slot that a question asks for."""
    readings = {(found["it"].casefold(), slot) for slot, asker in _askers() if (found := asker.fullmatch(question))}
    (reading,) = readings  # no other kind asks in these words
    return reading


def test_every_answer_stands_where_it_is_said_to_stand():
    for part in PARTS:
        for context, asked in _questions(part):
            for answer in asked["answers"]:
                assert answer["text"]
                assert context[answer["answer_start"] :][: len(answer["text"])] == answer["text"]
            assert asked["is_impossible"] == (not asked["answers"])
    assert {len(asked["answers"]) for _, asked in _questions("train", False)} == {1}
    assert {len(asked["answers"]) for _, asked in _questions("dev", False)} == {1, 2, 3}
    assert any(len({answer["text"] for answer in asked["answers"]}) > 1 for _, asked in _questions("dev"))


def test_version_1_is_version_2_without_the_impossible_questions():
    for part in PARTS:
        expected = squad_sample(part, True)
        for article in expected["data"]:
            for paragraph in article["paragraphs"]:
                paragraph["qas"] = [asked for asked in paragraph["qas"] if not asked.pop("is_impossible")]
        assert squad_sample(part, False) == expected | {"version": "1.1"}
        impossible = sum(asked["is_impossible"] for _, asked in _questions(part))
        assert impossible == pytest.approx(len(_questions(part, False)) / 2, rel=0.1)


def test_ids_are_unique_and_nothing_of_dev_stands_in_train():
    ids = [asked["id"] for part in PARTS for _, asked in _questions(part)]
    assert len(set(ids)) == len(ids)
    train, dev = (_paragraphs(part) for part in PARTS)
    assert not {told["context"] for told in train} & {told["context"] for told in dev}
    assert not {asked["question"] for _, asked in _questions("train")} & {
        asked["question"] for _, asked in _questions("dev")
    }
    subjects = [{_fact(asked["question"])[0] for _, asked in _questions(part)} for part in PARTS]
    assert not subjects[0] & subjects[1]


@pytest.mark.parametrize("part", PARTS)
def test_the_grammar_alone_answers_every_question_but_the_impossible(part):
    for paragraph in _paragraphs(part):
        facts = _read(paragraph["context"])
        for asked in paragraph["qas"]:
            subject, slot = _fact(asked["question"])
            if asked["is_impossible"]:
                # Not told of this subject, and plausible: told of another one.
                assert (subject, slot) not in facts, asked
                assert slot in {other for _, other in facts}, asked
            else:
                first = asked["answers"][0]
                assert facts[subject, slot] == (first["text"], first["answer_start"]), asked
                for answer in asked["answers"]:
                    assert first["text"] in answer["text"]


def test_the_question_alone_does_not_give_the_answer_away():
    for _, asked in _answered():
        for answer in asked["answers"]:
            assert answer["text"].casefold() not in asked["question"].casefold()


@pytest.mark.parametrize("part", PARTS)
def test_every_tenth_paragraph_needs_windows_and_is_asked_about_its_end(part):
    lengths = [len(paragraph["context"].split()) for paragraph in _paragraphs(part)]
    assert all(60 <= length <= 150 or 350 <= length <= 600 for length in lengths)
    long = [paragraph for paragraph in _paragraphs(part, False) if len(paragraph["context"].split()) >= 350]
    assert len(long) == len(lengths) // 10
    for paragraph in long:
        starts = [asked["answers"][0]["answer_start"] for asked in paragraph["qas"]]
        assert max(starts) > len(paragraph["context"]) * 2 / 3


def test_the_first_place_of_an_answers_words_is_often_the_wrong_one():
    first = [(context, asked["answers"][0]) for context, asked in _answered()]
    assert sum(context.count(answer["text"]) > 1 for context, answer in first) > 0.15 * len(first)
    assert sum(context.index(answer["text"]) < answer["answer_start"] for context, answer in first) > 0.05 * len(first)


def test_the_text_is_as_awkward_as_the_real_one():
    contexts = [paragraph["context"] for part in PARTS for paragraph in _paragraphs(part)]
    questions = [asked["question"] for _, asked in _answered()]
    answers = [answer["text"] for _, asked in _answered() for answer in asked["answers"]]
    for texts in (contexts, questions, answers):
        assert sum(not text.isascii() for text in texts) > 0.1 * len(texts)
        assert any(unicodedata.combining(character) for text in texts for character in text)
    for script in ("GREEK", "CYRILLIC", "CJK", "POUND", "EURO"):
        assert any(unicodedata.name(character).startswith(script) for text in answers for character in text), script
    for odd in ("  ", "\n", "–", "“", "’"):
        assert any(odd in text for text in contexts), odd
    assert not any(mark in text for text in contexts + questions for mark in "{}[]")
    assert max(len(text.split()) for text in answers) <= 8


def test_every_fact_has_several_wordings():
    for kind in KINDS:
        told = Counter(slot for sentence in kind.sentences for slot in slots(sentence))
        assert set(told) == set(kind.types)
        assert min(told.values()) >= 2
        assert min(len(templates) for templates in kind.questions.values()) >= 2
    assert {name for aside in ASIDES for name in slots(aside)} <= set(TABLES)


def test_the_sample_is_the_same_everywhere(tmp_path):
    folder = write_squad_sample(tmp_path)
    files = [folder / f"{part}-v{version}.json" for part in PARTS for version in ("1.1", "2.0")]
    assert sorted(folder.iterdir()) == sorted(files)
    assert json.loads(files[1].read_text(encoding="utf-8")) == squad_sample("train", True)
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    assert digest == "bcfb22b6858e7af6800ce4be7808dafbd03086f15277c777bd461c6c924fc568"
