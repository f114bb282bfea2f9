"""SQuAD 1.1 and 2.0, for the training loop."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cos598d.data.examples import spread
from cos598d.data.squad.options import SquadOptions
from cos598d.data.squad.read import Squad, parse_squad, read_squad
from cos598d.data.task import Scores, Task, check_file, digest_file, fetch_command
from cos598d.errors import UserError

if TYPE_CHECKING:
    from cos598d.data.text.encoder import TextEncoder
    from cos598d.data.text.features import Features

_FOLDER = "SQUAD_DIR"
_FLAGS = {"train": "train_file", "dev": "predict_file"}
# What a remark's second number counts, by the names of `windows.Finding`.
_CAUSES = {
    "MOVED": "are inside a word piece at their offset (the nearest place with the complete answer was taken)",
    "INSIDE_TOKEN": "begin or end inside a word piece (their tokens hold a little more)",
    "NO_WINDOW": "do not fit into a window (none of theirs has an answer)",
    "WRONG_OFFSET": "are not at their offset{skipped}",
    "NO_ANSWER": "are missing{skipped}",
}

Files = Mapping[str, Path] | None  # by part; None: the bundled sample


class SquadTask(Task):
    """Questions answered by a span of their context; in 2.0 also by "no answer"."""

    name = "squad"
    head = "question_answering"
    num_labels = 2
    evaluation_parts = ("dev",)
    # RoBERTa has no such head in pytorch-transformers; XLNet's and XLM's heads use beam search, and do not score every
    # token.
    model_types = ("bert", "distilbert")
    defaults = {"max_seq_length": 384, "total_train_batch_size": 16}
    options_kind = SquadOptions

    def __init__(self, options: SquadOptions):
        self.options = options
        self.version = "2.0" if options.version_2_with_negative else "1.1"
        self.metrics = ("f1", "exact" if options.version_2_with_negative else "exact_match")
        self._squads: dict[str, Squad] = {}  # by part
        self._chosen: dict[str, np.ndarray] = {}

    def locate(self, data_dir: str | None, environ: Mapping[str, str] = os.environ) -> tuple[Files, str]:
        """--train_file and --predict_file, each a path or a name in the folder; the folder is `data_dir` or SQUAD_DIR.

        In a folder, train-v1.1.json and dev-v1.1.json are used (v2.0 with --version_2_with_negative), or the only file
        whose name starts like that.
        """
        folder = data_dir or environ.get(_FOLDER)
        if folder and not Path(folder).is_dir():
            raise UserError(
                f"{folder} ({'--data_dir' if data_dir else _FOLDER}) is not a folder. {self._how_to_get()}."
            )
        files = {}
        for part, name in _FLAGS.items():
            given = getattr(self.options, name)
            if given:
                inside = Path(folder or ".") / given
                files[part] = Path(given) if Path(given).is_file() or not inside.is_file() else inside
            elif folder:
                files[part] = _only(Path(folder), f"{part}-v{self.version}")
        if not files:
            return None, f"the bundled sample of SQuAD {self.version}"
        return files, ", ".join(str(file) for file in files.values())

    def check(self, location: Files, parts: Sequence[str] | None = None) -> None:
        if location is None:
            return
        for part in _FLAGS if parts is None else parts:
            if part not in location:
                raise UserError(
                    f"No file to {'train' if part == 'train' else 'evaluate'} on. {self._how_to_get(part)}."
                )
            check_file(location[part], self._how_to_get(part))

    def load(
        self,
        part: str,
        location: Files,
        encoder: "TextEncoder",
        max_seq_length: int,
        overwrite_cache: bool = False,
        limit: int | None = None,
    ) -> "Features":
        from cos598d.data.squad.windows import WindowOptions, build_windows
        from cos598d.data.text.features import cached_features

        if part not in _FLAGS:
            raise ValueError(f"{self.name} has the parts {', '.join(_FLAGS)}, not {part!r}.")
        if location is None:
            from cos598d.data.samples import squad_sample

            value = squad_sample(part, self.options.version_2_with_negative)
            squad = parse_squad(value, f"the bundled sample's {part} part")
            digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()
        else:
            self.check(location, [part])
            digest, _ = digest_file(location[part])
            squad = read_squad(location[part])
        if squad.has_impossible and not self.options.version_2_with_negative:
            first = next(question for question in squad.questions if question.impossible)
            raise UserError(
                f"{squad.name} is SQuAD 2.0 (question {first.identity!r} has no answer). "
                "Add --version_2_with_negative, or give a file of 1.1."
            )
        chosen = spread(len(squad.questions), limit)
        options = WindowOptions(max_seq_length, self.options.max_query_length, self.options.doc_stride)

        def build() -> "Features":
            from tqdm import tqdm

            words = f"squad {part}: features"
            with tqdm(None, words, len(chosen), unit=" questions", delay=2, disable=None, leave=False) as bar:
                return build_windows(squad, chosen.tolist(), encoder, options, part == "train", bar.update)

        key = (self.name, part, digest, str(limit), *map(str, asdict(options).values()))
        features = cached_features(f"{self.name}-{part}", key, build, encoder, overwrite_cache)
        self._chosen[part] = chosen
        # Training needs only the counts, unless every question is to be named.
        if part != "train" or self.options.verbose_logging:
            self._squads[part] = squad
        return features

    def remarks(self, part: str, features: "Features") -> list[str]:
        from cos598d.data.squad.windows import AnswerStatus

        chosen = self._chosen[part]
        findings = features.extra["finding"]
        counts = np.bincount(findings, minlength=len(AnswerStatus))
        lines = [f"{part}: {len(chosen):,} questions in {len(features):,} windows"]
        if counts[AnswerStatus.IMPOSSIBLE]:
            lines[0] += f", {counts[AnswerStatus.IMPOSSIBLE]:,} without an answer"
        skipped = " (left out)" if part == "train" else ""
        for name, words in _CAUSES.items():
            if counts[AnswerStatus[name]]:
                lines.append(f"{part}: {counts[AnswerStatus[name]]:,} answers {words.format(skipped=skipped)}")
        if self.options.verbose_logging:
            for number in np.flatnonzero(findings >= AnswerStatus.MOVED):
                question = self._squads[part].questions[chosen[number]]
                answer = repr(question.answers[0].text) if question.answers else "none"
                words = AnswerStatus(findings[number]).name.lower().replace("_", " ")
                lines.append(f"{part}: question {question.identity}: {words}, answer {answer}")
        return lines

    def output_widths(self, features: "Features") -> tuple[int, ...]:
        longest = int(features.lengths.max())
        return longest, longest

    def score(self, part: str, outputs: np.ndarray, features: "Features") -> Scores:
        from cos598d.data.squad.predict import predict
        from cos598d.data.squad.score import score_version_1, score_version_2

        squad, chosen = self._squads[part], self._chosen[part]
        asked = [squad.questions[index] for index in chosen]
        options = self.options
        predicted = predict(squad, chosen.tolist(), features, outputs, options)
        files = {"predictions.json": predicted.texts, "nbest_predictions.json": predicted.nbest}
        if not options.version_2_with_negative:
            return Scores(score_version_1(asked, predicted.texts), files)
        files["null_odds.json"] = predicted.null_odds
        return Scores(score_version_2(asked, predicted.texts, predicted.null_odds), files)

    def _how_to_get(self, part: str = "") -> str:
        flags = f"--{_FLAGS[part]}" if part else " and ".join(f"--{flag}" for flag in _FLAGS.values())
        return (
            f"Name it with {flags}, or a folder that has {part or 'train'}-v{self.version}.json with --data_dir or "
            f"{_FOLDER}, or download it with {fetch_command(f'SQuAD{self.version}')}"
        )


def _only(folder: Path, begin: str) -> Path:
    """The folder's file BEGIN.json, or else the only one whose name starts with `begin`."""
    exact = folder / f"{begin}.json"
    others = [] if exact.is_file() else sorted(folder.glob(f"{begin}*.json"))
    return others[0] if len(others) == 1 else exact
