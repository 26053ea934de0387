"""Tasks for lm-evaluation-harness: their prompts and scores are those of `recall`."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnbalance.data.facts import FactSet
from attnbalance.data.prompts import make_prompts
from attnbalance.data.scoring import CONTAINMENT, WHOLE_WORDS, is_match
from attnbalance.data.sources.load_facts import load_facts
from attnbalance.errors import DataError
from attnbalance.harness.tasks import FOLDER, METRICS, TASKS, entity_questions_docs, popqa_docs, score_answer
from attnbalance.models.load import load_model
from attnbalance.readings.recall import NEW_TOKENS, Recall, recall

PLACES = [f"{first}{second}" for first in ("Bi", "Ro", "Po", "Ne") for second in ("fe", "zi", "nu", "ta", "mi")]


def popqa_file(path: Path, answers: list[list[str]]) -> Path:
    """A file like PopQA's own, of 20 capitals with the answers given."""
    columns = ("subj", "prop", "obj", "s_pop", "question", "possible_answers")
    with path.open("w", newline="") as stream:
        table = csv.writer(stream, delimiter="\t")
        table.writerow(columns)
        for i, (place, accepted) in enumerate(zip(PLACES, answers, strict=True)):
            question = f"What is the capital of {place}?"
            table.writerow((place, "capital", accepted[0], 10 * i + 1, question, json.dumps(accepted)))
    return path


def task_file(name: str) -> dict[str, Any]:
    """A task's settings, with what it includes; functions are their names."""

    class Loader(yaml.SafeLoader):
        """Reads the harness's own tag as a text."""

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    own = yaml.load((FOLDER / f"{name}.yaml").read_text(), Loader)
    return yaml.load((FOLDER / own.pop("include")).read_text(), Loader) | own


def test_documents_are_the_prompts_of_recall_with_all_accepted_answers(tmp_path: Path) -> None:
    path = popqa_file(tmp_path / "popqa.tsv", [[f"New{place}", f"{place} City"] for place in PLACES])
    docs = popqa_docs(str(path), version=1.0, pretrained="gpt2")["test"]
    prompts = make_prompts(load_facts(f"popqa:{path}"), "qa")
    assert [(doc["prompt_id"], doc["prompt"]) for doc in docs] == [(p.prompt_id, p.text) for p in prompts]
    assert docs[0] == {
        "prompt_id": "capital/Bife",
        "prompt": "Question: What is the capital of Bife? Answer:",
        "subject": "Bife",
        "relation": "capital",
        "answers": ["NewBife", "Bife City"],
        "popularity": 1.0,
    }


def test_popqa_comes_from_the_hub_or_says_how_a_copy_is_named() -> None:
    with pytest.raises(
        DataError, match=r"cannot load akariasai/PopQA from the Hub .*: --metadata '\{\"popqa\": \"PATH\"\}'$"
    ):
        popqa_docs()


def test_documents_of_entity_questions_come_from_a_file_or_a_folder_and_need_one(tmp_path: Path) -> None:
    rows = [{"question": f"What is the capital of {place}?", "answers": [f"New{place}", place]} for place in PLACES]
    (tmp_path / "P36.dev.json").write_text(json.dumps(rows))
    for given in (tmp_path, tmp_path / "P36.dev.json"):
        docs = entity_questions_docs(entity_questions=str(given))["test"]
        assert [doc["prompt"] for doc in docs] == [f"Question: {row['question']} Answer:" for row in rows]
        assert [doc["answers"] for doc in docs] == [row["answers"] for row in rows]
    with pytest.raises(DataError, match="reads local files.*--metadata"):
        entity_questions_docs(popqa="popQA.tsv")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (" Paris, of course", (1, 1)),
        (" Parisian", (0, 1)),
        (" Lyon\nParis", (0, 1)),  # on the second line
        (" Lyon", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_an_answer_is_scored_by_the_first_line_and_by_containment(output: str, expected: tuple[int, int]) -> None:
    scores = score_answer({"answers": ["Lutetia", "Paris"]}, [output])
    assert scores == {"whole_words": expected[0], "containment": expected[1]}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_file_names_functions_and_metrics_that_there_are(name: str) -> None:
    task = task_file(name)
    assert (task["task"], task["custom_dataset"]) == (name, f"attnbalance.harness.tasks.{name}_docs")
    for function in (task["custom_dataset"], task["process_results"]):
        module, _, attribute = function.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute))
    assert [metric["metric"] for metric in task["metric_list"]] == list(METRICS)
    assert all(metric["higher_is_better"] and metric["aggregation"] == "mean" for metric in task["metric_list"])
    assert task["generation_kwargs"] == {"until": [], "do_sample": False, "max_gen_toks": NEW_TOKENS}


def answers_of_three_kinds(model: Path, path: Path) -> tuple[FactSet, list[tuple[int, int]]]:
    """Facts whose answers the model gives as a word, as part of a word, or not, in turn; and their two scores."""
    facts = load_facts(f"popqa:{popqa_file(path, [['nothing']] * len(PLACES))}")
    said = _recall(model, facts).outputs
    words = [max(output.split("\n")[0].split(), key=len).strip(".,!?\"'") for output in said]
    accepted = [[word, word[1:-1], "Zanzibar"][i % 3] for i, word in enumerate(words)]
    assert all(len(word) > 3 for word in words), words
    return load_facts(f"popqa:{popqa_file(path, [[answer] for answer in accepted])}"), [
        ((1, 1), (0, 1), (0, 0))[i % 3] for i in range(len(words))
    ]


def _recall(model: Path, facts: FactSet) -> Recall:
    return recall(load_model(str(model)), make_prompts(facts, "qa"), max_new_tokens=NEW_TOKENS)


@pytest.fixture
def harness() -> Any:
    """The harness; skips where it is not installed."""
    return pytest.importorskip("lm_eval", reason="needs attnbalance[lm-eval]")


def test_the_harness_gives_each_item_the_outputs_and_the_scores_of_recall(
    harness: Any, stories: Path, tmp_path: Path
) -> None:
    facts, expected = answers_of_three_kinds(stories, tmp_path / "popqa.tsv")
    manager = importlib.import_module("lm_eval.tasks").TaskManager
    ended = harness.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(stories), "dtype": "float32"},
        device="cpu",
        tasks=["popqa"],
        task_manager=manager(include_path=str(FOLDER), metadata={"popqa": str(tmp_path / "popqa.tsv")}),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(ended["samples"]["popqa"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(PLACES)
    outputs = [sample["filtered_resps"][0] for sample in samples]
    assert [(sample["whole_words"], sample["containment"]) for sample in samples] == expected
    for metric, scoring in METRICS.items():
        rescored = [is_match(output, fact.answers, scoring) for output, fact in zip(outputs, facts, strict=True)]
        assert [sample[metric] for sample in samples] == rescored
        assert ended["results"]["popqa"][f"{metric},none"] == sum(rescored) / len(rescored)
    own = _recall(stories, facts)
    assert [sample["arguments"][0][0] for sample in samples] == [prompt.text for prompt in make_prompts(facts, "qa")]
    assert outputs == list(own.outputs)
    assert tuple(map(tuple, zip(own.right[WHOLE_WORDS], own.right[CONTAINMENT], strict=True))) == tuple(expected)
