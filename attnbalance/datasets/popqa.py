"""PopQA (Mallen et al. 2023): 14k questions on 16 relations, with the page views of their subjects as popularity."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from attnbalance.datasets.tables import Row, read_rows
from attnbalance.errors import DataError
from attnbalance.facts import Fact, FactSet

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
"""The one question form of each relation, from which PopQA's questions were made."""


def load_popqa(path: str | Path | None = None) -> FactSet:
    """PopQA's facts, from a .tsv, .jsonl, .csv or .parquet file, or, without a path, from the Hub (`akariasai/PopQA`).

    Rows without a subject are dropped and counted in `dropped`; rows of one (subject, relation) are merged into one
    fact with all answers. The popularity is the subject's (`s_pop`); the first answer is the Wikidata label (`obj`).
    """
    rows = _from_hub() if path is None else read_rows(path)
    name = "popqa" if path is None else f"popqa:{path}"
    missing = [column for column in COLUMNS if column not in rows[0]]
    if missing:
        raise DataError(
            f"{name} lacks PopQA's column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, rows[0]))}. "
            "A file of your own facts is given as its path, without 'popqa:'"
        )
    dropped: Counter[str] = Counter()
    facts: list[Fact] = []
    for number, row in enumerate(rows, 1):
        if not str(row["subj"] or "").strip():
            dropped["no subject"] += 1
        else:
            facts.append(_fact(row, f"{name}, row {number}"))
    merged = FactSet(tuple(facts), name).merged()
    dropped["merged into an earlier row of the same subject and relation"] = len(facts) - len(merged)
    return FactSet(merged.facts, name, dict(dropped))


def _from_hub() -> list[Row]:
    from datasets import load_dataset

    try:
        return list(load_dataset(HUB_ID, split="test"))  # pyright: ignore
    except Exception as error:  # the Hub client raises many kinds
        raise DataError(
            f"cannot load {HUB_ID} from the Hub ({type(error).__name__}: {error}); with a local copy, use popqa:PATH"
        ) from error


def _fact(row: Row, where: str) -> Fact:
    subject, relation, question = str(row["subj"]), str(row["prop"]), str(row["question"])
    form = QUESTIONS.get(relation)
    start = form.index("{subject}") if form and form.replace("{subject}", subject) == question else None
    aliases = row["possible_answers"]
    try:
        answers = json.loads(aliases) if isinstance(aliases, str) else list(aliases)  # pyright: ignore[reportArgumentType]
        popularity = float(row["s_pop"])  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: s_pop must be a number and possible_answers a JSON list, "
            f"got {row['s_pop']!r} and {str(aliases)[:80]!r}"
        ) from error
    unique = dict.fromkeys(str(answer) for answer in (row["obj"], *answers) if str(answer).strip())
    if not unique:
        raise DataError(f"{where}: no answer")
    return Fact(subject, relation, tuple(unique), popularity, question, start)
