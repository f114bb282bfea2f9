"""In which of many steps something is wrong, in words."""

from collections.abc import Mapping, Sequence

LEAST = 3  # of steps that must agree with a rule


def only_in(wrong: Sequence[bool], facts: Sequence[Mapping[str, bool]] = ()) -> str:
    """What the wrong steps have in common: "" if all are wrong, or nothing is known.

    facts: of each step, what may distinguish it, by its words. The first fact that holds in exactly the wrong steps is
    named. Else it is looked for a first wrong step after which all are, and for every second one.
    """
    if all(wrong) or not any(wrong):
        return ""
    for words in facts[0] if facts else ():
        if [each[words] for each in facts] == [*wrong]:
            return f" (wrong only in steps {words})"
    first = [*wrong].index(True)
    if all(wrong[first:]) and len(wrong) - first >= LEAST:
        return f" (right only for the first {first} step{'' if first == 1 else 's'})"
    is_second = [place % 2 == first % 2 for place in range(len(wrong))]
    if len(wrong) > LEAST and is_second == [*wrong]:
        return " (right only in every second step)"
    for words in facts[0] if facts else ():
        if all(each[words] for each, is_wrong in zip(facts, wrong, strict=True) if is_wrong):
            return f" (only in steps {words}, but not in all of these)"
    return ""
