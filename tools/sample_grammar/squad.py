"""The bundled SQuAD sample: paragraphs and questions in SQuAD's form, told by a seeded grammar of our own.

A paragraph tells of several subjects of one kind (bridges, choirs, newspapers), each with facts of its own, in
sentences that name the subject or follow one that does. So a year in the text is seldom the only one, and a question
is answered by finding the sentence about its subject and its fact. The train part has one answer a question; the dev
part has one to three, as if several people had been asked. An impossible question asks what the paragraph tells of
another subject only. Every tenth paragraph is longer than a window of 384 word pieces. No two subjects of the sample,
in either part, have the same name.
"""

import functools
import hashlib
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field

from sample_grammar.facts import (
    ASIDES,
    FIRST_SYLLABLES,
    KINDS,
    LAST_SYLLABLES,
    REGIONS,
    TABLES,
    Kind,
    slots,
    with_pronoun,
)
from sample_grammar.rte import Dice

SEED = 1606
ARTICLES = {"train": 16, "dev": 5}
PARAGRAPHS = {"train": 10, "dev": 8}  # of an article
LONG_EVERY = 10  # one paragraph in so many is long
WORDS, LONG_WORDS = range(60, 151), range(360, 601)
QUESTIONS, LONG_QUESTIONS, LATE_QUESTIONS = 4, 6, 2  # answerable ones; late: in the last third of a long paragraph
IMPOSSIBLE = 0.5  # impossible questions to one answerable
NEVER_NAMED = 0.3  # the fraction of impossible questions about a subject that the paragraph doesn't name
USED_AGAIN = 0.3  # the chance of a name, a year, ... to come from what the paragraph has told of something else
DECOMPOSED = 0.1  # the chance of an accent to be a mark of its own
PRONOUN = 0.4

Span = tuple[int, int]


@dataclass
class _Paragraph:
    """A paragraph while it is told: the spans stand where its text will be."""

    kind: Kind
    context: str = ""
    told: dict[tuple[str, str], list[Span]] = field(default_factory=dict)  # (subject, slot) -> the answer's spans
    used: dict[str, list[str]] = field(default_factory=dict)  # type -> fillers


def articles(part: str) -> dict:
    """SQuAD 2.0's JSON object of "train" or "dev", always the same."""
    return {
        "version": "v2.0",
        "data": [
            {
                "title": title,
                "paragraphs": [
                    {"context": context, "qas": [_question(*asked) for asked in qas]} for context, qas in paragraphs
                ],
            }
            for title, paragraphs in _parts()[part]
        ],
    }


def _question(key: str, text: str, answers: list) -> dict:
    told = [{"text": answer, "answer_start": start} for answer, start in answers]
    return {"id": key, "question": text, "answers": told, "is_impossible": not answers}


@functools.cache
def _parts() -> dict[str, list]:
    """part -> [(title, [(context, [(id, question, [(answer, start)])])])], the impossible questions included."""
    dice = Dice(SEED)
    titles = iter(dice.shuffled(REGIONS))
    names = iter(dice.shuffled([first + last for first in FIRST_SYLLABLES for last in LAST_SYLLABLES]))
    parts: dict[str, list] = {}
    for part, count in ARTICLES.items():
        parts[part] = []
        for article in range(count):
            places = range(article * PARAGRAPHS[part], (article + 1) * PARAGRAPHS[part])
            told = [_told(dice, names, place % LONG_EVERY == LONG_EVERY // 2, part == "dev") for place in places]
            parts[part].append((next(titles).replace(" ", "_"), told))
    return parts


def _told(dice: Dice, names: Iterator[str], long: bool, dev: bool) -> tuple[str, list]:
    """A paragraph's text and its questions, in some order."""
    kind = dice.pick(KINDS)
    subjects = [_name(dice, kind, names) for _ in range(dice.pick((7, 8, 9) if long else (2, 3)))]
    paragraph = _Paragraph(kind)
    while len(paragraph.context.split()) not in (LONG_WORDS if long else WORDS):
        paragraph = _paragraph(dice, kind, subjects, long)
    facts = dice.shuffled(list(paragraph.told))
    if long:  # first those that only a later window shows
        late = [fact for fact in facts if 3 * paragraph.told[fact][0][0] > 2 * len(paragraph.context)]
        facts = list(dict.fromkeys(late[:LATE_QUESTIONS] + facts))
    asked = [
        _asked(dice, kind, fact, _answers(dice, paragraph, fact, dev))
        for fact in facts[: LONG_QUESTIONS if long else QUESTIONS]
    ]
    for fact in _untold(dice, paragraph, subjects, names, int(IMPOSSIBLE * len(asked))):
        asked.append(_asked(dice, kind, fact, []))
    return paragraph.context, dice.shuffled(asked)


def _asked(dice: Dice, kind: Kind, fact: tuple[str, str], answers: list) -> tuple[str, str, list]:
    subject, slot = fact
    question = dice.pick(kind.questions[slot]).format(it=subject)
    return hashlib.sha256(question.encode()).hexdigest()[:24], question, answers


def _answers(dice: Dice, paragraph: _Paragraph, fact: tuple[str, str], dev: bool) -> list[tuple[str, int]]:
    """The answer itself; in the dev part as one to three people would give it, some with more words around it."""
    spans = paragraph.told[fact]
    more = dice.pick(range(3)) if dev else 0
    return [(paragraph.context[start:end], start) for start, end in spans[:1] + [dice.pick(spans) for _ in range(more)]]


def _untold(
    dice: Dice, paragraph: _Paragraph, subjects: list[str], names: Iterator[str], count: int
) -> list[tuple[str, str]]:
    """Facts that the paragraph tells of another subject only."""
    known = dice.shuffled(list(dict.fromkeys(slot for _, slot in paragraph.told)))
    missing = [(subject, slot) for slot in known for subject in subjects if (subject, slot) not in paragraph.told]
    facts = dice.draw(missing, sum(not dice.chance(NEVER_NAMED) for _ in range(count)))
    while len(facts) < count:
        facts.append((_name(dice, paragraph.kind, names), dice.pick(known)))
    return facts


def _name(dice: Dice, kind: Kind, names: Iterator[str]) -> str:
    return dice.pick(kind.names).format(next(names))


def _paragraph(dice: Dice, kind: Kind, subjects: list[str], long: bool) -> _Paragraph:
    """One telling, of whatever length it comes to."""
    paragraph = _Paragraph(kind)
    pieces = []  # sentences that stay together: the second says "it"
    for subject in subjects:
        sentences = _some_sentences(dice, kind, dice.pick((3, 4) if long or len(subjects) == 2 else (2, 3)))
        facts = _fillers(
            dice, paragraph, [(slot, kind.types[slot]) for sentence in sentences for slot in slots(sentence)]
        )
        named = False
        for sentence in sentences:
            if named and dice.chance(PRONOUN):
                pieces[-1].append((subject, with_pronoun(sentence), facts))
                named = False
            else:
                pieces.append([(subject, sentence.replace("{it}", subject), facts)])
                named = True
    if dice.chance(0.5):
        pieces = dice.shuffled(pieces)
    for aside in dice.draw(ASIDES, dice.pick((5, 6, 7) if long else (0, 1, 2))):
        facts = _fillers(dice, paragraph, [(name, name) for name in slots(aside)])
        pieces.insert(dice.pick(range(len(pieces) + 1)), [("", aside, facts)])
    odd_breaks = dice.chance(0.2)
    for subject, sentence, facts in [told for piece in pieces for told in piece]:
        if paragraph.context:
            paragraph.context += dice.pick((" ", "  ", "\n")) if odd_breaks else " "
        _tell(paragraph, subject, sentence, facts)
    return paragraph


def _some_sentences(dice: Dice, kind: Kind, count: int) -> list[str]:
    """Sentences that tell no fact twice."""
    chosen: list[str] = []
    for sentence in dice.shuffled(kind.sentences):
        if len(chosen) < count and not set(slots(sentence)) & {slot for other in chosen for slot in slots(other)}:
            chosen.append(sentence)
    return chosen


def _fillers(dice: Dice, paragraph: _Paragraph, wanted: list[tuple[str, str]]) -> dict[str, str]:
    """A filler for every (slot, type) of one subject, no two the same; some have been told of another subject."""
    facts: dict[str, str] = {}
    for slot, kind in wanted:
        used = [filler for filler in paragraph.used.get(kind, []) if filler not in facts.values()]
        if used and dice.chance(USED_AGAIN):
            facts[slot] = dice.pick(used)
            continue
        fresh = [filler for filler in TABLES[kind] if filler not in used and filler not in facts.values()]
        facts[slot] = dice.pick(fresh or TABLES[kind])
        if dice.chance(DECOMPOSED):
            facts[slot] = unicodedata.normalize("NFD", facts[slot])
    for slot, kind in wanted:
        paragraph.used.setdefault(kind, []).append(facts[slot])
    return facts


def _tell(paragraph: _Paragraph, subject: str, sentence: str, facts: dict[str, str]) -> None:
    """Append the sentence, and note where it answers what."""
    begin = len(paragraph.context)
    text, brackets, cores, wides = "", [], {}, {}
    for token in re.findall(r"[\[\]]|{\w+}|[^\[\]{}]+", sentence):
        if token == "[":
            brackets.append(len(text))
        elif token == "]":
            start = brackets.pop()
            wides |= {slot: (start, len(text)) for slot, core in cores.items() if core[0] >= start}
        elif token[0] == "{":
            filler = facts[token[1:-1]]
            cores[token[1:-1]] = (len(text), len(text) + len(filler))
            text += filler
        else:
            text += token
    paragraph.context += text[0].upper() + text[1:]
    for slot in cores if subject else ():
        spans = [cores[slot]] + ([wides[slot]] if slot in wides else [])
        paragraph.told[subject, slot] = [(begin + start, begin + end) for start, end in spans]
