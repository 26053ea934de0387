"""PopQA's directors: labels, exact match against greedy generation, panels, claims and refused sources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from attnbalance.data.bpe_tokenizer import train_tokenizer
from attnbalance.errors import DataError
from attnbalance.papers.directors import PHRASES, POPQA, SHARES, _encoded, _exact, _films, _gpt2
from attnbalance.papers.figure import CellResult
from attnbalance.papers.small_gpt2 import IGNORED
from attnbalance.papers.sources import Sources

TINY = {"films": 40, "vocabulary": 300, "layers": 1, "d_model": 16, "heads": 2, "batch": 16, "steps": 2}
TINY |= {"rate": 1e-3, "finetuning_steps": 1, "finetuning_rate": 1e-3}
TEXTS = [("Alba was made by Bo Li", "Bo Li"), ("The Long Film was made by Cy", "Cy")]


@pytest.fixture
def facts(tmp_path: Path) -> str:
    rows = [{"subject": f"Film {i}", "relation": "director", "answers": [f"Name {i % 7}"]} for i in range(45)]
    path = tmp_path / "films.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_labels_are_the_tokens_of_the_answer_and_the_end() -> None:
    tokenizer = train_tokenizer([text for text, _ in TEXTS], 300)
    ids, labels = _encoded(TEXTS, tokenizer)
    for row, (text, answer) in zip(labels, TEXTS, strict=True):
        labelled = [token for token in row.tolist() if token != IGNORED]
        assert tokenizer.decode(labelled) == f" {answer}</s>"
        assert text.endswith(answer)
    whole = _encoded(TEXTS, tokenizer, whole=True)[1]
    assert int((whole[0] != IGNORED).sum()) == len(tokenizer(TEXTS[0][0])["input_ids"])  # all but <s>, and the end
    assert torch.equal(ids[labels != IGNORED], labels[labels != IGNORED])


def test_exact_match_is_what_greedy_generation_gives() -> None:
    tokenizer = train_tokenizer([text for text, _ in TEXTS], 300)
    ids, labels = _encoded(TEXTS, tokenizer)
    torch.manual_seed(0)
    model: GPT2LMHeadModel = _gpt2(tokenizer, 32, {"seed": 0, "layers": 1, "d_model": 16, "heads": 2})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = set()
    for _ in range(60):
        exact = _exact(model, ids, labels)
        for i, (text, answer) in enumerate(TEXTS):
            prompt = torch.tensor([tokenizer(text.removesuffix(f" {answer}"))["input_ids"]])
            made = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
            assert bool(exact[i]) == tokenizer.decode(made).startswith(f" {answer}</s>")
            seen.add(bool(exact[i]))
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen == {False, True}


def test_cells_become_panels_and_claims_with_one_value_a_seed(facts: str) -> None:
    cells = POPQA.cells("small", range(2), Sources(facts))
    results = [CellResult(cell.settings, POPQA.run({**cell.settings, **TINY})) for cell in cells]
    assert all(result.values["share"] == list(SHARES) for result in results)
    for panel in POPQA.panels(results):
        assert all(len(series.x) == len(series.y) for series in panel.series)
    assert all(len(claim.values) == 2 for claim in POPQA.claims(results))
    assert not any(claim.scored for claim in POPQA.claims(results))  # a GPT-2 of one layer is not the paper's


def test_too_few_films_and_too_many_phrasings_cannot_be() -> None:
    assert len(set(PHRASES)) == 10
    assert max(cell.settings["multiplicity"] for cell in POPQA.cells("paper", [0], Sources())) <= len(PHRASES)


def test_a_source_with_too_few_films_is_refused(facts: str) -> None:
    with pytest.raises(DataError, match="at least 250 films with a director, .* has 45"):
        POPQA.run(POPQA.cells("small", [0], Sources(facts))[0].settings)


def test_a_file_that_changed_since_the_cells_were_listed_is_refused(facts: str, tmp_path: Path) -> None:
    table = tmp_path / "films.tsv"
    table.write_bytes(Path(facts.removeprefix("popqa:")).read_bytes())
    settings = dict(POPQA.cells("small", [0], Sources(f"popqa:{table}"))[0].settings)
    table.write_bytes(table.read_bytes() + b"\n")
    with pytest.raises(DataError, match="films.tsv was changed or moved since the cells were listed"):
        _films(settings)
