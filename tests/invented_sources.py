"""Invented files in the form of PopQA, MMLU and the authors' world facts, for runs where the real ones are absent."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

ANSWERS = {
    "country": ["United States of America", "France", "Japan", "Brazil"],
    "sport": ["association football", "basketball", "baseball", "ice hockey"],
    "occupation": ["actor", "politician", "composer", "painter"],
    "capital": ["Bern", "Oslo", "Lima", "Rome"],
    "director": ["Ann Lee", "Bob Ray", "Cal Orr", "Dee Fox"],
}
QUESTIONS = {
    "country": "In what country is {}?",
    "sport": "What sport does {} play?",
    "occupation": "What is {}'s occupation?",
    "capital": "What is the capital of {}?",
    "director": "Who was the director of {}?",
}
FACTS = 160
"""Facts of each relation; half of them have its first answer."""


def popqa_table(folder: Path) -> Path:
    """A table with PopQA's columns."""
    generator = random.Random(0)
    path = folder / "popQA.tsv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter="\t")
        writer.writerow(["subj", "prop", "obj", "s_pop", "question", "possible_answers"])
        for relation, answers in ANSWERS.items():
            for i in range(FACTS):
                answer = answers[0] if i % 2 else generator.choice(answers[1:])
                name = f"the {relation} {i}"
                asked = QUESTIONS[relation].format(name)
                popularity = generator.randint(1, 10_000)
                writer.writerow([name, relation, answer, popularity, asked, json.dumps([answer])])
    return path


def world_facts(folder: Path) -> Path:
    """Knowledge conflicts with the authors' columns."""
    rows = [
        {
            "context": f"The land {i} has a new capital, and it is Lima.",
            "question": f"What is the capital of the land {i}?",
            "answer": "Lima",
            "memory_answer": "Oslo",
        }
        for i in range(40)
    ]
    path = folder / "world_facts.json"
    path.write_text(json.dumps(rows))
    return path


def choices(folder: Path) -> Path:
    """A file of MMLU: a question, four answers, and the letter of the right one."""
    path = folder / "prehistory_val.csv"
    with path.open("w", newline="") as stream:
        for i in range(40):
            csv.writer(stream).writerow([f"Which is the number {i}?", "iron", "stone", "clay", f"{i}", "ABCD"[i % 4]])
    return path
