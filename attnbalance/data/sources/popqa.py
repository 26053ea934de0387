"""PopQA (Mallen et al. 2023): 14k questions on 16 relations, with the page views of their subjects as popularity."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.sources.own_facts import popularity_of, text_of
from attnbalance.data.sources.table_files import Record, parse_json, read_rows
from attnbalance.errors import DataError

HUB_ID = "akariasai/PopQA"
COLUMNS = ("subj", "prop", "obj", "s_pop", "question", "possible_answers")

QUESTIONS = {
    "author": "Who is the author of {subject}?",
    "capital": "What is the capital of {subject}?",
    "capital of": "What is {subject} the capital of?",
    "color": "What color is {subject}?",
    "composer": "Who was the composer of {subject}?",
    "country": "In what country is {subject}?",
    "director": "Who was the director of {subject}?",
    "father": "Who is the father of {subject}?",
    "genre": "What genre is {subject}?",
    "mother": "Who is the mother of {subject}?",
    "occupation": "What is {subject}'s occupation?",
    "place of birth": "In what city was {subject} born?",
    "producer": "Who was the producer of {subject}?",
    "religion": "What is the religion of {subject}?",
    "screenwriter": "Who was the screenwriter for {subject}?",
    "sport": "What sport does {subject} play?",
}
"""The form of each relation's questions in PopQA."""


def load_popqa(path: str | Path | None = None) -> FactSet:
    """PopQA's facts, from a file (see `read_rows`) or, without a path, from the Hub (`akariasai/PopQA`).

    Rows without a subject are dropped and counted in `dropped`; rows with the same subject and relation become one fact
    with all answers. The popularity is the subject's (`s_pop`); the first answer is the Wikidata label (`obj`).
    Raises `DataError`, naming the row, for a table without PopQA's columns and for relations that PopQA does not have.
    """
    rows = _from_hub() if path is None else read_rows(path)
    name = "popqa" if path is None else f"popqa:{path}"
    dropped: Counter[str] = Counter()
    facts: list[Fact] = []
    for number, row in enumerate(rows, 1):
        missing = [column for column in COLUMNS if column not in row]
        if missing:
            raise DataError(
                f"{name}, row {number} lacks PopQA's column {', '.join(map(repr, missing))}; "
                f"it has {', '.join(map(repr, row))}. "
                "A file of your own facts is given as its path, without 'popqa:'"
            )
        if not ("" if row["subj"] is None else str(row["subj"])).strip():
            dropped["no subject"] += 1
        else:
            facts.append(_fact(row, f"{name}, row {number}"))
    merged = FactSet(tuple(facts), name).merged()
    if len(merged) < len(facts):
        dropped["merged into an earlier row of the same subject and relation"] = len(facts) - len(merged)
    return FactSet(merged.facts, name, dict(dropped))


def _from_hub() -> list[Record]:
    from datasets import load_dataset

    try:
        return list(load_dataset(HUB_ID, split="test"))  # pyright: ignore
    except Exception as error:  # the Hub client raises many kinds
        raise DataError(
            f"cannot load {HUB_ID} from the Hub ({type(error).__name__}: {error}); with a local copy, use popqa:PATH"
        ) from error


def _fact(row: Record, where: str) -> Fact:
    listed = row["possible_answers"]
    try:
        subject, relation = (text_of(row[name], name).strip() for name in ("subj", "prop"))
        question = text_of(row["question"], "question").strip()
        if relation not in QUESTIONS:
            raise DataError(
                f"prop must be one of PopQA's relations ({', '.join(QUESTIONS)}), got {relation!r}; a file of your own "
                "facts has the columns subject, relation, answers and is given without 'popqa:'"
            )
        form = QUESTIONS[relation]
        start = form.index("{subject}") if form.replace("{subject}", subject) == question else None
        aliases = parse_json(listed) if isinstance(listed, str) else listed
        if not isinstance(aliases, list):
            raise DataError(f"possible_answers must be a JSON list, got {listed!r}")
        answers = (text_of(answer, "an answer").strip() for answer in (row["obj"], *aliases) if answer is not None)
        unique = dict.fromkeys(answer for answer in answers if answer)
        return Fact(subject, relation, tuple(unique), popularity_of(row["s_pop"]), question, start)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
