"""Where figures have facts and models from, and what they record of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbalance.errors import DataError, ModelError
from attnbalance.papers.sources import Sources, facts_of, model_of


def test_a_local_file_of_facts_is_recorded_and_refused_once_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text(json.dumps({"subject": "Oslo", "relation": "country", "answers": ["Norway"]}))
    settings = Sources(str(path)).of_facts()
    assert [fact.subject for fact in facts_of(settings)] == ["Oslo"]
    path.write_text(path.read_text().replace("Oslo", "Rome"))
    assert Sources(str(path)).of_facts() != settings
    with pytest.raises(DataError, match=r"facts.jsonl was changed or moved since the cells were listed"):
        facts_of(settings)
    path.unlink()
    with pytest.raises(DataError, match=r"facts.jsonl was changed or moved since"):
        facts_of(settings)
    assert Sources("popqa").of_facts() == {"facts": "popqa"}


def test_a_model_is_recorded_with_its_files_and_refused_once_they_changed(llama_folder: Path) -> None:
    settings = Sources(model=str(llama_folder)).of_model()
    assert model_of(settings) == str(llama_folder)
    config = llama_folder / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(ModelError, match="llama changed since the cells were listed"):
        model_of(settings)
    with pytest.raises(ModelError, match="no model was given"):
        Sources().of_model()
