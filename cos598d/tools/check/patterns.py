"""In which of many steps something is wrong, in words."""

from collections.abc import Mapping, Sequence

LEAST = 3  # of steps that must agree with a rule


def only_in(wrong: Sequence[bool], facts: Sequence[Mapping[str, bool]] = ()) -> str:
    """What the wrong steps have in common: "" if all are wrong, or nothing is known.

    facts: of each step, what may distinguish it, by its words. The first fact that holds in exactly the wrong steps is
    named. Else it is looked for a first wrong step after which all are, and for a period.
    """
    if all(wrong) or not any(wrong):
        return ""
    for words in facts[0] if facts else ():
        if [each[words] for each in facts] == [*wrong]:
            return f" (wrong only in steps {words})"
    first = [*wrong].index(True)
    if all(wrong[first:]) and len(wrong) - first >= LEAST:
        return f" (right only for the first {first} step{'' if first == 1 else 's'})"
    for period in range(2, len(wrong) // 2 + 1):
        places = {place % period for place, is_wrong in enumerate(wrong) if is_wrong}
        if len(places) != 1:
            continue
        (start,) = places
        if all(wrong[place] for place in range(start, len(wrong), period)):
            return " (right only in every second step)" if period == 2 else f" (wrong only in every {period}th step)"
    for words in facts[0] if facts else ():
        if all(each[words] for each, is_wrong in zip(facts, wrong, strict=True) if is_wrong):
            return f" (only in steps {words}, but not in all of these)"
    return ""
