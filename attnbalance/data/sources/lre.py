"""The relations of Hernandez et al. 2024, "Linearity of Relation Decoding", each with its own sentences."""

from __future__ import annotations

from pathlib import Path

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.sources.own_facts import text_of
from attnbalance.data.sources.table_files import LONGEST, parse_json
from attnbalance.errors import DataError

SUBJECT = "{}"
"""Stands in the place of the subject in their templates."""


def load_lre(path: str | Path | None = None) -> FactSet:
    """The facts of a file of one relation, or of all such files in a folder and the folders in it.

    A file is a JSON object with `name`, `prompt_templates`, `prompt_templates_zs` and `samples`, each of which has a
    `subject` and an `object`. A fact's statement is the first of the `prompt_templates`; its question is the first
    question among the templates for zero shots, without the beginning of an answer that follows it, and is made from
    the relation's name if there is none. Samples with the same subject become one fact with all answers. The files
    hold no popularity. Raises `DataError`, naming the file and the sample, for what has another form.
    """
    if path is None:
        raise DataError("the relations come from files: lre:FOLDER, such as lre:data/factual")
    path = Path(path)
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} holds no .json file")
    name = f"lre:{path}"
    facts = [fact for file in files for fact in _facts(file)]
    merged = FactSet(tuple(facts), name).merged()
    repeated = len(facts) - len(merged)
    return FactSet(
        merged.facts, name, {"merged into an earlier sample of the same subject": repeated} if repeated else {}
    )


def _facts(file: Path) -> list[Fact]:
    try:
        if not file.is_file():
            raise DataError("expected a regular file")
        relation = parse_json(file.read_text(encoding="utf-8-sig"))
        if not isinstance(relation, dict):
            raise DataError("expected a JSON object")
        name = text_of(relation.get("name"), "name").strip()
        statement = _templates(relation, "prompt_templates")[0].replace(SUBJECT, "{subject}").strip()
        zero_shot = _templates(relation, "prompt_templates_zs")
        parts = [text.partition("?") for text in zero_shot]
        questions = [f"{asked.strip()}?" for asked, mark, _ in parts if mark and SUBJECT in asked]
        samples = relation.get("samples")
        if not isinstance(samples, list) or not samples:
            raise DataError("samples must be a list of objects with subject and object")
    except (DataError, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a relation of this form: {error}") from error
    question = next(iter(questions), None)
    facts = []
    for number, sample in enumerate(samples, 1):
        try:
            facts.append(_fact(sample, name, statement, question))
        except DataError as error:
            raise DataError(f"{file}, sample {number}: {error}") from error
    return facts


def _templates(relation: dict, key: str) -> list[str]:
    """The templates of a kind, at least one, each with the subject once."""
    texts = relation.get(key)
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t.count(SUBJECT) == 1 for t in texts):
        raise DataError(f"{key} must be a list of texts that hold {SUBJECT} once, got {texts!r}")
    return texts


def _fact(sample: object, relation: str, statement: str, question: str | None) -> Fact:
    if not isinstance(sample, dict) or not {"subject", "object"} <= set(sample):
        raise DataError(f"expected an object with subject and object, got {sample!r}")
    if sum(len(str(value)) for value in sample.values()) > LONGEST:
        raise DataError(f"a sample must have at most {LONGEST:,} characters")
    subject, answer = (text_of(sample[key], key).strip() for key in ("subject", "object"))
    asked = question and question.replace(SUBJECT, subject)
    start = question.index(SUBJECT) if question else None
    return Fact(subject, relation, (answer,), question=asked, subject_start=start, statement=statement)
