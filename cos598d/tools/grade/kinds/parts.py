"""Assignments of several parts, each of a kind of its own: a submission has the files of all of them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cos598d.errors import UserError
from cos598d.tools.grade.kinds.kind import AssignmentKind, all_alike, folder_with
from cos598d.tools.grade.scored import Judged
from cos598d.tools.grade.table import TomlTable


@dataclass(frozen=True)
class PartsKind(AssignmentKind):
    """The parts by name. Their tests are called `PART.TEST`."""

    parts: Mapping[str, AssignmentKind]

    file = ""  # a part without its file gets no points, and the others are judged

    @property
    def hides(self) -> tuple[Path, ...]:  # type: ignore[override]
        """What any part hides."""
        return tuple(dict.fromkeys(folder for kind in self.parts.values() for folder in kind.hides))

    @classmethod
    def read(cls, table: TomlTable) -> "PartsKind":
        """Parts are read one by one, by `read_assignment`."""
        raise NotImplementedError

    def claims(self) -> Mapping[str, float]:
        """All parts' claims."""
        return {
            f"{name}.{claim}": is_scored
            for name, kind in self.parts.items()
            for claim, is_scored in kind.claims().items()
        }

    def expected(self, claim: str) -> str:
        """What the part says."""
        name, _, own = claim.partition(".")
        return self.parts[name].expected(own)

    def given(self) -> str:
        """All that the parts give."""
        return "\n".join(kind.given() for kind in self.parts.values())

    def judge(self, folder: Path, claims: Sequence[str]) -> Iterator[Judged]:
        """One part after the other, each in a scratch folder of its own."""
        scratch = Path.cwd()
        for name, kind in self.parts.items():
            own = [claim.partition(".")[2] for claim in claims if claim.partition(".")[0] == name]
            place = scratch / f"part-{name}"
            place.mkdir(exist_ok=True)
            os.chdir(place)
            try:
                judged = kind.judge(folder_with(folder, kind.file), own) if own else iter(())
            except UserError as error:
                judged = all_alike(own, False, str(error))
            yield from (replace(each, name=f"{name}.{each.name}") for each in judged)
        os.chdir(scratch)

    def pictures(self, folder: Path) -> Iterator[tuple[str, str]]:
        """Those of all parts that have their file."""
        for kind in self.parts.values():
            try:
                yield from kind.pictures(folder_with(folder, kind.file))
            except UserError:
                continue
