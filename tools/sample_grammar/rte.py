"""The bundled sample: sentence pairs in RTE's form, told by a seeded grammar of our own.

Pairs come in fours. Two short reports A and B each have a statement, a and b, that only they support:

    A + a  entailment          A + b  not_entailment
    B + b  entailment          B + a  not_entailment

So every sentence stands under both labels equally often, and neither sentence alone says anything of the label.
In most fours A and B tell of different matters; in about every seventh they tell the same story with one fact changed,
which is hard to see for a small model. No sentence of the dev part occurs in the train part.
"""

import functools
import random
import re
import string
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

from sample_grammar.stories import STORIES, Story

TRAIN_PAIRS, DEV_PAIRS = 1280, 256
SEED = 598
SAME_STORY = 0.15  # the fraction of fours that differ in one fact only
MOST_ASIDES = 4  # sentences that follow a report's first; they make lengths vary as real text's do
ENTAILMENT, NOT_ENTAILMENT = "entailment", "not_entailment"

Pair = tuple[str, str, str]
Item = TypeVar("Item")


class Dice:
    """Random choices made of `random.random` alone, the one method whose numbers Python promises to keep."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def pick(self, items: Sequence[Item]) -> Item:
        return items[int(self._random.random() * len(items))]

    def draw(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` different items, as far as there are so many."""
        return self.shuffled(items)[:count]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        keys = [self._random.random() for _ in items]
        return [items[place] for place in sorted(range(len(items)), key=keys.__getitem__)]


def pairs(part: str) -> list[Pair]:
    """The pairs of "train" or "dev": (report, statement, "entailment" or "not_entailment"), always the same."""
    return list(_parts()[part])


@functools.cache
def vocabulary() -> list[str]:
    """An uncased BERT vocabulary of our own: special tokens, characters and their `##` forms, the sample's words."""
    words = set()
    for part in ("train", "dev"):
        for first, second, _ in pairs(part):
            plain = unicodedata.normalize("NFD", f"{first} {second}".lower())
            words.update(re.findall(r"[^\W_]+", "".join(c for c in plain if unicodedata.category(c) != "Mn")))
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    characters += sorted({c for word in words for c in word if ord(c) > 127})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{c}" for c in characters)]
    return list(dict.fromkeys([*pieces, *sorted(words)]))


@functools.cache
def _parts() -> dict[str, list[Pair]]:
    dice = Dice(SEED)
    told: list[Pair] = []
    seen: set[str] = set()
    while len(told) < TRAIN_PAIRS + DEV_PAIRS:
        four = _one_fact_apart(dice) if dice.chance(SAME_STORY) else _different_matters(dice)
        sentences = {sentence for pair in four for sentence in pair[:2]}
        if len(sentences) == 4 and not sentences & seen:
            seen |= sentences
            told += four
    return {"dev": dice.shuffled(told[:DEV_PAIRS]), "train": dice.shuffled(told[DEV_PAIRS:])}


def _different_matters(dice: Dice) -> list[Pair]:
    told = []
    for story in dice.draw(STORIES, 2):
        facts = _facts(dice, story)
        statement = dice.pick(dice.pick(list(story.hypotheses.values())))
        told.append((_report(dice, story, facts, _slots(statement)), _sentence(statement, facts)))
    return _four(*told)


def _one_fact_apart(dice: Dice) -> list[Pair]:
    story = dice.pick(STORIES)
    slot = dice.pick(list(story.hypotheses))
    statement = dice.pick(story.hypotheses[slot])
    facts = _facts(dice, story)
    others = [filler for filler in story.slots[slot] if filler not in facts.values()]
    changed = facts | {slot: dice.pick(others)}
    return _four(
        *((_report(dice, story, known, _slots(statement)), _sentence(statement, known)) for known in (facts, changed))
    )


def _four(first: tuple[str, str], second: tuple[str, str]) -> list[Pair]:
    (report_a, statement_a), (report_b, statement_b) = first, second
    return [
        (report_a, statement_a, ENTAILMENT),
        (report_b, statement_b, ENTAILMENT),
        (report_a, statement_b, NOT_ENTAILMENT),
        (report_b, statement_a, NOT_ENTAILMENT),
    ]


def _facts(dice: Dice, story: Story) -> dict[str, object]:
    """A filler for every slot; two slots never hold the same."""
    facts: dict[str, object] = {}
    for slot, table in story.slots.items():
        facts[slot] = dice.pick([filler for filler in table if filler not in facts.values()])
    return facts


def _report(dice: Dice, story: Story, facts: dict[str, object], needed: set[str]) -> str:
    """A first sentence that names the `needed` slots, and up to MOST_ASIDES others."""
    leads = [premise for premise in story.premises if needed <= _slots(premise)]
    asides = dice.draw(story.asides, dice.pick(range(MOST_ASIDES + 1)))
    return " ".join(_sentence(template, facts) for template in (dice.pick(leads), *asides))


def _sentence(template: str, facts: dict[str, object]) -> str:
    text = template.format(**facts)
    return text[0].upper() + text[1:]


def _slots(template: str) -> set[str]:
    return {field.split(".")[0] for _, field, _, _ in string.Formatter().parse(template) if field}
