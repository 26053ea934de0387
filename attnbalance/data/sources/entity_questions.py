"""EntityQuestions (Sciavolino et al. 2021): questions on 24 relations of Wikidata, mostly about rare entities."""

from __future__ import annotations

import re
from pathlib import Path

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.sources.own_facts import answers_of, text_of
from attnbalance.data.sources.table_files import Record, read_rows
from attnbalance.errors import DataError

RELATIONS = {
    "P17": ("country", "Which country is {subject} located in?"),
    "P19": ("place of birth", "Where was {subject} born?", "What is the birthplace of {subject}?"),
    "P20": ("place of death", "Where did {subject} die?"),
    "P26": ("spouse", "Who is {subject} married to?"),
    "P36": ("capital", "What is the capital of {subject}?"),
    "P40": ("child", "Who is {subject}'s child?"),
    "P50": ("author", "Who is the author of {subject}?"),
    "P69": ("place of education", "Where was {subject} educated?"),
    "P106": ("occupation", "What kind of work does {subject} do?"),
    "P112": ("founder", "Who founded {subject}?"),
    "P127": ("owner", "Who owns {subject}?"),
    "P131": ("location", "Where is {subject} located?"),
    "P136": ("type of music", "What type of music does {subject} play?"),
    "P159": ("headquarters", "Where is the headquarter of {subject}?", "Where is {subject} headquartered?"),
    "P170": ("creator", "Who was {subject} created by?", "Who is the creator of {subject}?"),
    "P175": ("performer", "Who performed {subject}?"),
    "P176": ("manufacturer", "Which company is {subject} produced by?"),
    "P264": ("music label", "What music label is {subject} represented by?"),
    "P276": ("location", "Where is {subject} located?"),
    "P407": ("language of the work", "Which language was {subject} written in?"),
    "P413": ("position in sport", "What position does {subject} play?"),
    "P495": ("country of origin", "Which country was {subject} created in?"),
    "P740": ("place of founding", "Where was {subject} founded?"),
    "P800": ("notable work", "What is {subject} famous for?"),
}
"""By property of Wikidata, the relation's name here and the forms of its questions.

P131 and P276 share one name, because nobody can tell their questions apart.
"""


def load_entity_questions(path: str | Path | None = None) -> FactSet:
    """EntityQuestions' facts, from one of its files (`P17.dev.json`) or from a folder of them (`dataset/dev`).

    A file is a JSON list of objects with `question` and `answers`; its name begins with the property. The subject is
    the part of the question that fills the slot in its relation's form of question. Questions with the same words about
    one subject become one fact with all answers. The files hold no popularity: join page views with `with_popularity`,
    or rank facts by the model's loss. Raises `DataError` for a path without such files, a property that is not in
    `RELATIONS`, and, naming the row, for another form of question.
    """
    if path is None:
        raise DataError("EntityQuestions come from files: entityquestions:FOLDER, such as entityquestions:dataset/dev")
    name = f"entityquestions:{path}"
    facts = [fact for file in _files(Path(path)) for fact in _facts(file)]
    merged = FactSet(tuple(facts), name).merged()
    repeated = len(facts) - len(merged)
    return FactSet(
        merged.facts, name, {"merged into an earlier row of the same question": repeated} if repeated else {}
    )


def _files(path: Path) -> list[Path]:
    """The files of a path, in the order of their properties' numbers."""
    if not path.is_dir():
        return [path]
    files = [file for file in path.iterdir() if re.match(r"P\d", file.name) and file.suffix == ".json"]
    if not files:
        inside = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
        hint = f"; it has the folders {', '.join(inside)}: choose one of them" if inside else ""
        raise DataError(f"{path} holds no file like P17.dev.json{hint}")
    return sorted(files, key=lambda file: (int(_property(file)[1:]), file.name))


def _property(file: Path) -> str:
    match = re.match(r"P\d+(?=[._])", file.name)
    if not match or match[0] not in RELATIONS:
        raise DataError(
            f"a file of EntityQuestions is named by its property, as in P17.dev.json; got {file.name}; "
            f"known are {', '.join(RELATIONS)}"
        )
    return match[0]


def _facts(file: Path) -> list[Fact]:
    relation, *forms = RELATIONS[_property(file)]
    facts = []
    for number, row in enumerate(read_rows(file), 1):
        try:
            facts.append(_fact(row, relation, forms))
        except DataError as error:
            raise DataError(f"{file}, row {number}: {error}") from error
    return facts


def _fact(row: Record, relation: str, forms: list[str]) -> Fact:
    missing = [column for column in ("question", "answers") if not row.get(column)]
    if missing:
        raise DataError(f"no {missing[0]!r}; a row of EntityQuestions has a question and answers")
    question = text_of(row["question"], "question").strip()
    for form in forms:
        before, after = form.split("{subject}")
        subject = question[len(before) : len(question) - len(after)]
        if question == f"{before}{subject}{after}" and subject.strip():
            lead = len(subject) - len(subject.lstrip())
            return Fact(
                subject.strip(),
                relation,
                answers_of(row["answers"]),
                question=question,
                subject_start=len(before) + lead,
            )
    raise DataError(f"expected a question of the form {' or '.join(map(repr, forms))}, got {question!r}")
