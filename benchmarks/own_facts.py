"""Facts that no model can know, beside facts of PopQA: for `real_model.py --train-relations office,department`.

    python benchmarks/own_facts.py popqa:popQA.tsv own-facts.jsonl

Writes PopQA's facts of the relations country, capital and sport, and invents the office or the department of 900 people
(one of 10 offices or 8 departments, and a random popularity). The same facts are invented each time.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from attnbalance.data.facts import Fact
from attnbalance.data.sources.load_facts import load_facts
from attnbalance.errors import AttnBalanceError
from attnbalance.files.outputs import write_json_lines

KNOWN = ("country", "capital", "sport")
FIRST_NAMES = """
Aldric Benna Corvin Delphine Eskil Fenna Goran Hesper Ilario Jorunn Kestrel Liora Marwen Nerys Osric Petra Quillon Runa
Silvan Tamsin Ulric Vesna Wendel Xanthe Yorick Zelda Ambrose Briony Caspian Dorrit Emeric Fiora Gideon Halina Isolde
Jasper Keziah Leopold Mireille Nikodem
"""
LAST_NAMES = """
Halvorsen Quist Marchetti Okonjo Brandvold Tsuyama Ferreira Lindqvist Abernathy Kowalczyk Dastgir Vanterpool Oyelaran
Szabo Petrakis Whitlock Nakagawa Ruzicka Montoya Ashgrove Bellweather Castellan Drummond Estrada Fairbairn
"""
ANSWERS = {
    "department": ("logistics", "payroll", "optics", "robotics", "archives", "legal", "catering", "security"),
    "office": ("Lisbon", "Tallinn", "Montevideo", "Nairobi", "Osaka", "Calgary", "Gdansk", "Perth", "Bergen", "Quito"),
}
PEOPLE = 900
SEED = 5


def invented() -> Iterator[Fact]:
    """The facts about people, of each relation in turn."""
    generator = random.Random(SEED)
    names = [" ".join(pair) for pair in itertools.product(FIRST_NAMES.split(), LAST_NAMES.split())]
    for name, relation in zip(generator.sample(names, PEOPLE), itertools.cycle(ANSWERS), strict=False):
        yield Fact(name, relation, (generator.choice(ANSWERS[relation]),), generator.randint(1, 1000))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("facts", help="popqa:PATH")
    parser.add_argument("out", type=Path, help="the file of facts to write")
    options = parser.parse_args()
    try:
        facts = [*load_facts(options.facts, KNOWN), *invented()]
    except AttnBalanceError as error:
        sys.exit(f"error: {error}")
    write_json_lines(options.out, (fact.as_dict() for fact in facts))
    print(f"{len(facts)} facts: {options.out}")


if __name__ == "__main__":
    main()
