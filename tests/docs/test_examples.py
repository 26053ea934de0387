"""Every public name has an example in the reference, beside its entry, and the examples run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from doc_pages import DOCS, blocks
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import attnbalance
from attnbalance.models.load import load_model

PAGES = sorted(page for page in (DOCS / "api").glob("*.md") if page.stem not in ("index", "errors", "theory"))
"""Errors have examples on the page of errors; the theory's are doctests."""

ENTRY = re.compile(r"^\.\. auto(?:class|function):: (\w+)$", re.MULTILINE)
SUBJECTS = ("Onda", "Pira", "Quell", "Rumo", "Sarn", "Tolva", "Ulm", "Vard")
STUDY = """
worlds: {own: {model: base, facts: facts.jsonl}}
seeds: [0]
splits: [top]
methods: {plain: {}}
defaults: {steps: 1, batch_size: 2}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, long_llama_folder: Path) -> Path:
    """What the examples find: two models of one shape, an adapter, facts, instructions, a study."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(long_llama_folder, folder / "base")
    shutil.copytree(long_llama_folder, folder / "tuned")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    model.save_pretrained(folder / "tuned")
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "base"), LoraConfig(r=2, target_modules=["q_proj"])
    ).save_pretrained(folder / "lora")
    for step in (1, 2):
        shutil.copytree(folder / "tuned", folder / "steps" / f"checkpoint-{step}")
    facts = [
        {"subject": name, "relation": relation, "answers": [f"{answer} {'ABCD'[i % 4]}"], "popularity": 40 * i + 10}
        for relation, answer in (("capital", "Port"), ("river", "Lake"))
        for i, name in enumerate(SUBJECTS)
    ]
    rows = [
        {"instruction": f"Say word {i}.", "input": f"The word is cat {i}." if i % 2 else "", "output": f"cat {i}"}
        for i in range(12)
    ]
    (folder / "facts.jsonl").write_text("\n".join(map(json.dumps, facts)))
    (folder / "known.jsonl").write_text("\n".join(map(json.dumps, _completed(folder / "base"))))
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "study.yaml").write_text(STUDY)
    (folder / "prehistory_test.csv").write_text("Which came first?,iron,bronze,stone,gold,C\nWho?,he,she,we,they,A\n")
    return folder


def _completed(model: Path) -> list[dict[str, object]]:
    """Facts that a random model completes: what it says to questions about other subjects."""
    hooked = load_model(model)
    facts = [attnbalance.Fact(f"Town {letter}", "mayor", ("nobody",)) for letter in "KLMNOPQRSTUV"]
    said = attnbalance.recall(hooked, attnbalance.make_prompts(facts), max_new_tokens=1).outputs
    return [
        {"subject": fact.subject, "relation": fact.relation, "answers": [output.strip() or "nobody"]}
        for fact, output in zip(facts, said, strict=True)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_of_a_section_is_in_its_example(page: Path) -> None:
    for section in page.read_text().split("\n## ")[1:]:
        entries = ENTRY.findall(section)
        code = "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
        assert [name for name in entries if not re.search(rf"\bab\.{name}\b", code)] == [], section.splitlines()[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_in_their_order(
    page: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")
    names = {"ab": attnbalance}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
