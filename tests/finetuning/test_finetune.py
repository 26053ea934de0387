"""Finetuning: what is written, what is trained, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from short_runs import FACTS, SHORT, SPLIT, TINY, WORLD, short, without_record

from attnbalance.errors import DataError, ModelError, OutputError
from attnbalance.files.outputs import MARKER, read_json, write_json
from attnbalance.finetuning import finetune_model
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.pretrain import pretrain
from attnbalance.finetuning.runs import load_run
from attnbalance.finetuning.splits import split_facts
from attnbalance.models.load import load_model
from attnbalance.models.load_base import load_base


def test_a_finished_folder_is_returned_without_loading_torch(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short())
    code = f"""
import sys
from attnbalance.finetuning.pretrain import Recipe, pretrain
from attnbalance.finetuning.splits import split_facts
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.data.statements import World
from attnbalance.data.synthetic import synthetic_facts
facts = synthetic_facts(0, subjects=40, relations=2, answers=4)
recipe = Recipe(layers=1, d_model=16, heads=2, vocabulary=400, steps=7, batch_size=8)
pretrain(World(facts), {str(llama)!r}, recipe=recipe)
finetune({str(llama)!r}, split_facts(facts, "top"), {str(run.path)!r}, FinetuneSettings(**{SHORT!r}))
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_process_killed_at_the_very_end_left_is_cleared(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short())
    left = tmp_path / ".run.partial"
    left.mkdir()
    assert finetune(llama, SPLIT, tmp_path / "run", short()) == run
    assert not left.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "heldout.jsonl", "trajectory.json"])
def test_a_finished_run_of_which_a_file_was_changed_is_refused_by_its_name(name, llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short())
    content = (run.path / name).read_bytes()
    (run.path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(OutputError, match=f"{name} was changed; restore"):
        finetune(llama, SPLIT, tmp_path / "run", short())
    (run.path / name).unlink()
    with pytest.raises(OutputError, match=f"{name} is gone; restore"):
        finetune(llama, SPLIT, tmp_path / "run", short())
    (run.path / name).write_bytes(content)
    assert finetune(llama, SPLIT, tmp_path / "run", short()) == run


@pytest.mark.parametrize("changes", [{"best_step": 2}, {"validation_loss": [[4, 0.5]]}, {"shortcuts": {}}])
def test_a_run_whose_record_was_edited_is_refused(changes, llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short(steps=4))
    record = run.path / MARKER
    content = read_json(record)
    assert run.best_step == 4
    write_json(record, content | changes)
    for opened in (lambda: load_run(run.path), lambda: finetune(llama, SPLIT, run.path, short(steps=4))):
        with pytest.raises(OutputError, match=f"{record} was changed: .* or remove {run.path} and run"):
            opened()
    write_json(record, content)
    assert load_run(run.path) == run


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_run_whose_weights_were_changed_is_refused_where_it_is_read(lora_rank, llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=lora_rank))
    (run.path / "train.jsonl").unlink()  # a model that is passed on without its facts
    assert load_model(run.path).model is not None
    weights = next(run.path.glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(OutputError, match=f"{run.path} must hold .* but {weights.name} was changed; restore"):
        load_model(run.path)


def test_a_run_whose_settings_or_tokenizer_were_changed_is_refused_where_it_is_read(llama, tmp_path):
    full = finetune(llama, SPLIT, tmp_path / "full", short()).path
    lora = finetune(llama, SPLIT, tmp_path / "lora", short(lora_rank=2)).path
    (full / "README.md").write_text("A card of my own.")
    assert load_model(full).model is not None
    edits = (
        (full, "config.json", {"rms_norm_eps": 0.5}),
        (full, "generation_config.json", {"eos_token_id": [0, 1, 2]}),
        (full, "tokenizer_config.json", {"add_bos_token": True}),
        (lora, "adapter_config.json", {"lora_alpha": 400}),
    )
    for folder, name, changes in edits:
        before = (folder / name).read_bytes()
        write_json(folder / name, read_json(folder / name) | changes)
        with pytest.raises(OutputError, match=f"{folder} must hold .* but {name} was changed; restore"):
            load_model(llama, adapter=folder) if folder == lora else load_model(folder)
        (folder / name).write_bytes(before)


def test_what_a_model_is_read_without_may_change(llama, tmp_path):
    lora = finetune(llama, SPLIT, tmp_path / "lora", short(lora_rank=2))
    expected = load_model(lora.path)
    for folder in (lora.path, lora.checkpoints[4]):
        write_json(folder / "objective_base.json", {})
        for path in folder.glob("tokenizer*"):
            path.unlink()
    write_json(lora.path / "trajectory.json", {})
    moved = tmp_path / "moved"
    shutil.copytree(llama, moved)
    for folder in (lora.path, lora.checkpoints[4]):
        config = folder / "adapter_config.json"
        config.write_text(config.read_text().replace(str(llama), str(moved)))
        assert f'"{moved}"' in config.read_text()
        assert load_model(folder).name != expected.name
        config.write_text(config.read_text().replace('"r": 2', '"r": 3'))
        with pytest.raises(OutputError, match=r"adapter_config\.json was changed"):
            load_model(folder)


def test_a_changed_checkpoint_away_from_its_run_asks_to_remove_no_other_folder(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short())
    copy = Path(shutil.copytree(run.checkpoints[4], tmp_path / "a/b/copy"))
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    with pytest.raises(OutputError, match=f"but config.json was changed; restore them, or remove {copy}, or"):
        load_model(copy)
    for record in ("", "{}"):
        (copy / MARKER).write_text(record)
        with pytest.raises(OutputError, match=f"{copy} must hold .* but {MARKER} holds no record"):
            load_model(copy)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_checkpoint_that_was_changed_is_refused_where_it_is_read(lora_rank, llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short(lora_rank=lora_rank))
    folder = run.checkpoints[4]
    weights = next(folder.glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        OutputError, match=f"{folder} must hold .* but {weights.name} was changed; restore .* remove {run.path}, or"
    ):
        load_model(folder)
    weights.write_bytes(content)
    write_json(folder / MARKER, read_json(folder / MARKER) | {"base_fingerprint": None})
    with pytest.raises(OutputError, match=f"{folder / MARKER} was changed: its content must have SHA-256"):
        load_model(folder)
    assert load_model(run.checkpoints[6]).model is not None


def test_a_base_that_is_replaced_while_it_is_loaded_is_refused(llama, tmp_path, monkeypatch):
    base = without_record(llama, tmp_path / "base")

    def slow(path, *how):
        (base / "config.json").write_text((base / "config.json").read_text() + " ")
        return load_base(path, *how)

    monkeypatch.setattr(finetune_model, "load_base", slow)
    with pytest.raises(ModelError, match=f"the files of model {base} changed while it was loaded"):
        finetune(base, SPLIT, tmp_path / "run", short())
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_is_gone_is_named(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short())
    shutil.rmtree(run.checkpoints[4])
    again = load_run(run.path)
    with pytest.raises(OutputError, match="run must hold .* but checkpoints/step-000004 is gone; restore"):
        _ = again.checkpoints


def test_a_run_of_an_older_version_is_finished(llama, tmp_path):
    run = finetune(llama, SPLIT, tmp_path / "run", short())
    for folder in (run.path, run.checkpoints[4]):
        record = read_json(folder / MARKER)
        write_json(folder / MARKER, {name: record[name] for name in record if name not in ("sha256", "files_sha256")})
    assert finetune(llama, SPLIT, tmp_path / "run", short()) == run
    assert load_model(run.checkpoints[4]).model is not None
    record = read_json(run.path / MARKER)
    write_json(run.path / MARKER, record | {"versions": record["versions"] | {"attnbalance": "0.0.1"}})
    with pytest.warns(UserWarning, match=r"was trained by attnbalance 0\.0\.1, and is not trained again by"):
        assert finetune(llama, SPLIT, tmp_path / "run", short()).best_step == run.best_step


def test_a_folder_made_with_other_settings_is_refused(llama, tmp_path):
    finetune(llama, SPLIT, tmp_path / "run", short())
    with pytest.raises(OutputError, match="seed is 0 there, 1 here"):
        finetune(llama, SPLIT, tmp_path / "run", short(seed=1))
    with pytest.raises(OutputError, match="split is 'top' there, 'bottom' here"):
        finetune(llama, split_facts(FACTS, "bottom"), tmp_path / "run", short())
    with pytest.raises(OutputError, match="architecture is 'llama' there, 'gpt2' here"):
        pretrain(WORLD, llama, architecture="gpt2", recipe=TINY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "ce + kll"}, "There are ce; kl"),
        ({"train": "kq"}, "no part 'kq'"),
        ({"train": "qk@7"}, "layers 0 to 0"),
        ({"curriculum": "easy"}, "no curriculum 'easy'"),
        ({"objective": "ce + balance"}, "tokens of the relation in every prompt"),
        ({"gradient_rank": 0}, "`gradient_rank` must be a whole number >= 1, got 0"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_nothing(llama, tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        finetune(llama, SPLIT, tmp_path / "run", short(**changes))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"steps": 0}, DataError, "`steps` must be a whole number >= 1, got 0"),
        ({"learning_rate": 0.0}, DataError, "`learning_rate` must be a finite number > 0"),
        ({"batch_size": 8, "accumulate": 3}, DataError, "`batch_size` must be a multiple of `accumulate`, got 8 and 3"),
        ({"template": "{nothing}"}, DataError, "field {nothing}"),
    ],
)
def test_impossible_settings_are_refused(llama, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        finetune(llama, SPLIT, tmp_path / "run", short(**changes))


def test_models_that_cannot_be_finetuned_are_refused(llama, tmp_path):
    with pytest.raises(ModelError, match="no model folder at .*nowhere"):
        finetune(tmp_path / "nowhere", SPLIT, tmp_path / "run", short())
    run = finetune(llama, SPLIT, tmp_path / "adapter", short(lora_rank=2))
    with pytest.raises(ModelError, match="is an adapter; merge it"):
        finetune(run.path, SPLIT, tmp_path / "run", short())
