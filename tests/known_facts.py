"""What is known of made facts, by hand: one of each category in one relation, two unknown ones in another."""

from __future__ import annotations

from attnbalance import Fact
from attnbalance.data.prompts import make_prompts
from attnbalance.readings.knowledge import Knowledge

FACTS = [
    *(Fact(f"Town {i}", "city|state", ("Oslo" if i < 3 else "Rome",), popularity=10.0 - i) for i in range(4)),
    Fact("Ann", "sport", ("golf",), popularity=2.0),
    Fact("Bo", "sport", ("polo",), popularity=1.0),
]


def made() -> Knowledge:
    right = {
        "statement": (True, True, False, False, False, False),
        "question": (True, False, False, False, False, False),
    }
    texts = {form: tuple("yes" if hit else "no" for hit in column) for form, column in right.items()}
    texts["few-shot"] = texts["question"]
    greedy, chance = (1.0, 0.3, 0.0, 0.0, 0.0, 0.0), (0.1, 0.0, 0.0, 0.0, 0.0, 0.0)
    sampled = (False, False, True, False, False, False)
    return Knowledge(make_prompts(FACTS), texts, right, greedy, sampled, chance)
