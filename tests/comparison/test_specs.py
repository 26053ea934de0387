"""Models by label, and how they are written on a command line."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from tiny import FACTS, tiny_model

from attnbalance import Fact, FactSet
from attnbalance.comparison.specs import MeasureSettings, ModelSpec, parse_spec, results_config
from attnbalance.errors import DataError, OutputError
from attnbalance.files.outputs import MARKER, write_json
from attnbalance.models.fingerprint import files_fingerprint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=some/model", ModelSpec("a", "some/model")),
        ("a=some/model+runs/lora", ModelSpec("a", "some/model", "runs/lora")),
        ("some/model", ModelSpec("model", "some/model")),
        ("some/model+runs/lora", ModelSpec("model+lora", "some/model", "runs/lora")),
        ("a=b=c", ModelSpec("a", "b=c")),
    ],
)
def test_a_model_is_named_by_label_path_and_adapter(text: str, expected: ModelSpec) -> None:
    assert parse_spec(text) == expected


@pytest.mark.parametrize("text", ["=x", "a=", "a=+lora", "a=model+", ""])
def test_half_a_model_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="expected LABEL=MODEL"):
        parse_spec(text)


def test_a_plus_belongs_to_a_folder_that_exists(tmp_path: Path) -> None:
    folder = tmp_path / "c++"
    folder.mkdir()
    assert parse_spec(f"a={folder}") == ModelSpec("a", str(folder))


def test_an_equals_sign_belongs_to_a_path_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lr=1e-4").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_spec("lr=1e-4") == ModelSpec("lr=1e-4", "lr=1e-4")
    assert parse_spec("a=lr=1e-4") == ModelSpec("a", "lr=1e-4")


def test_a_link_and_the_current_folder_have_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint-300").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "checkpoint-300")
    assert parse_spec(str(tmp_path / "latest")).label == "latest"
    monkeypatch.chdir(tmp_path / "checkpoint-300")
    assert parse_spec(".").label == "checkpoint-300"


def test_a_plus_in_a_home_folder_without_a_label_belongs_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c++" / "base").mkdir(parents=True)
    assert parse_spec("~/c++/base") == ModelSpec("base", f"{tmp_path}/c++/base")


def test_a_home_folder_is_found_behind_a_label(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_spec("a=~/model+~/adapter") == ModelSpec("a", f"{tmp_path}/model", f"{tmp_path}/adapter")


def test_the_config_of_results_changes_with_weights_facts_and_settings(llama_folder: Path) -> None:
    specs, facts = [ModelSpec("a", str(llama_folder))], FactSet(FACTS)
    config = results_config(specs, facts, MeasureSettings(), False)
    assert config == results_config(specs, facts, MeasureSettings(), False)
    assert config["reduce"] != results_config(specs, facts, MeasureSettings(reduce="sum"), False)["reduce"]
    assert config["facts_sha256"] != results_config(specs, FactSet(FACTS[1:]), MeasureSettings(), False)["facts_sha256"]
    assert config["readings"] != results_config(specs, facts, MeasureSettings(), False, ["attention"])["readings"]
    assert config["attnbalance_version"] == metadata.version("attnbalance")
    (llama_folder / "config.json").write_text((llama_folder / "config.json").read_text() + " ")
    assert config["files"] != results_config(specs, facts, MeasureSettings(), False)["files"]


@pytest.mark.parametrize("shortcuts", [None, {"country": "Peru"}, {"country": [3]}])
def test_recorded_shortcuts_that_were_changed_are_refused(tmp_path: Path, shortcuts: object) -> None:
    write_json(tmp_path / MARKER, {"kind": "finetune", "shortcuts": {"country": ["Peru"]}})
    assert ModelSpec("a", str(tmp_path)).run["shortcuts"] == {"country": ["Peru"]}
    write_json(tmp_path / MARKER, {"kind": "finetune", "shortcuts": shortcuts})
    with pytest.raises(OutputError, match=f"{tmp_path / MARKER} was changed: '(shortcuts|country)' must be"):
        _ = ModelSpec("a", str(tmp_path)).run


def test_the_config_of_results_changes_with_the_base_of_an_adapter_on_the_hub(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    names = {"base_model_name_or_path": str(llama_folder)}
    for file, text in (("snapshots/a/adapter_config.json", json.dumps(names)), ("refs/main", "a")):
        path = tmp_path / "models--owner--lora" / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    specs, facts = [ModelSpec("a", "owner/lora")], FactSet(FACTS)
    files = results_config(specs, facts, MeasureSettings(), False)["files"]
    assert files == [["a", files_fingerprint(llama_folder)]]
    (llama_folder / "config.json").write_text((llama_folder / "config.json").read_text() + " ")
    assert files != results_config(specs, facts, MeasureSettings(), False)["files"]


def test_shortcuts_that_a_run_recorded_are_part_of_what_results_depend_on(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    spec, facts = ModelSpec("a", str(tmp_path)), FactSet((Fact("France", "capital", ("Paris",)),))
    before = results_config([spec], facts, MeasureSettings(), False, ["subject attention"])
    write_json(tmp_path / MARKER, {"kind": "finetune", "shortcuts": {"capital": ["Rome"]}})
    after = results_config([spec], facts, MeasureSettings(), False, ["subject attention"])
    assert {name for name in after if after[name] != before[name]} == {"shortcuts"}
