"""Facts as tasks of lm-evaluation-harness, asked and scored as by `recall`; the YAML files here name its functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbalance.data.prompts import make_prompts
from attnbalance.data.scoring import CONTAINMENT, WHOLE_WORDS, is_match
from attnbalance.data.sources.load_facts import load_facts
from attnbalance.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

FOLDER = Path(__file__).parent
"""What `lm_eval --include_path` takes."""
TASKS = ("entity_questions", "popqa")
METRICS = {"whole_words": WHOLE_WORDS, "containment": CONTAINMENT}
"""The scoring behind each metric of the tasks."""
TEMPLATE = "qa"


def popqa_docs(popqa: str | None = None, **_: object) -> dict[str, Dataset]:
    """PopQA as documents of the task.

    popqa: a local copy of PopQA, from lm-evaluation-harness's --metadata; None: `akariasai/PopQA` from the Hub. The
        harness hands all other metadata, and the model's arguments, to this function as well.

    Raises `DataError` for facts that cannot be loaded or asked.
    """
    if popqa is not None:
        return _docs(f"popqa:{popqa}")
    try:
        return _docs("popqa")
    except DataError as error:
        raise DataError(f'{error}; in lm_eval: --metadata \'{{"popqa": "PATH"}}\'') from error


def entity_questions_docs(entity_questions: str | None = None, **_: object) -> dict[str, Dataset]:
    """EntityQuestions as documents of the task.

    entity_questions: one of its files, or a folder of them, from lm-evaluation-harness's --metadata.

    Raises `DataError` without it, and for facts that cannot be loaded or asked.
    """
    if entity_questions is None:
        raise DataError(
            "the task entity_questions reads local files; name them: "
            '--metadata \'{"entity_questions": "entityquestions/dataset/dev"}\''
        )
    return _docs(f"entityquestions:{entity_questions}")


def score_answer(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """1 or 0 for each of `METRICS`: whether the generated text is right (see `is_match`)."""
    (output,) = results
    return {metric: float(is_match(output, doc["answers"], scoring)) for metric, scoring in METRICS.items()}


def _docs(source: str) -> dict[str, Dataset]:
    """The only split, with a prompt for each fact of a source."""
    from datasets import Dataset

    rows = [
        {
            "prompt_id": prompt.prompt_id,
            "prompt": prompt.text,
            "subject": prompt.fact.subject,
            "relation": prompt.fact.relation,
            "answers": list(prompt.fact.answers),
            "popularity": prompt.fact.popularity,
        }
        for prompt in make_prompts(load_facts(source), TEMPLATE)
    ]
    return {"test": Dataset.from_list(rows)}
