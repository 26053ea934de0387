"""Questions about training facts are counted, few subjects are called few, and unlike dtypes are named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import FACTS, tiny_tokenizer

from attnbalance import FactSet, make_prompts
from attnbalance.comparison.caveats import caveats, few_subjects, seen_in_training, unlike_dtypes, unlike_tokens
from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.data.facts import Fact
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import Split
from attnbalance.models.fingerprint import files_fingerprint


def a_run(folder: Path, facts: tuple[Fact, ...], kind: str = "finetune") -> Path:
    folder.mkdir()
    (folder / "attnbalance.json").write_text(json.dumps({"kind": kind}))
    (folder / "train.jsonl").write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in facts))
    return folder


def test_training_facts_among_the_questions_are_counted_by_model(tmp_path: Path) -> None:
    other = Fact(FACTS[0].subject, "another relation", ("x",))
    few, one = a_run(tmp_path / "few", (*FACTS[1:4], other)), a_run(tmp_path / "one", (FACTS[0],))
    none, notes = a_run(tmp_path / "none", (other,)), a_run(tmp_path / "notes", FACTS, kind="mine")
    specs = [ModelSpec("few", "base", str(few)), ModelSpec("none", str(none)), ModelSpec("notes", str(notes))]
    prompts = make_prompts(FactSet(FACTS))
    assert seen_in_training([ModelSpec("base", "base"), *specs], prompts) == (
        "few was finetuned on the facts of 3 of these 9"
    )
    assert seen_in_training([*specs, ModelSpec("one", str(one))], prompts) == (
        "few was finetuned on the facts of 3 of these 9 and one was finetuned on the facts of 1 of these 9"
    )
    assert seen_in_training(specs[1:], prompts) == ""


def test_a_checkpoint_is_of_the_run_above_it_and_replayed_facts_count(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", FACTS[:2])
    (run / "replay.jsonl").write_text(json.dumps(FACTS[5].as_dict()) + "\n")
    checkpoint = run / "checkpoints" / "checkpoint-10"
    checkpoint.mkdir(parents=True)
    prompts = make_prompts(FactSet(FACTS))
    assert "the facts of 3 of these 9" in seen_in_training([ModelSpec("step 10", str(checkpoint))], prompts)


def test_a_checkpoint_away_from_its_run_is_known_by_its_link_or_named(llama_folder: Path, tmp_path: Path) -> None:
    split = Split("mine", FactSet(FACTS[:4]), FactSet(FACTS[4:5]), FactSet(FACTS[7:8]), 0, FactSet(FACTS[5:7]))
    settings = FinetuneSettings(steps=2, batch_size=4, checkpoint_every=1)
    run = finetune(llama_folder, split, tmp_path / "run", settings)
    checkpoint, link, copy = run.checkpoints[1], tmp_path / "link", tmp_path / "copy"
    link.symlink_to(checkpoint)
    shutil.copytree(checkpoint, copy)
    moved = tmp_path / "moved"
    moved.symlink_to(run.path)
    unfinished = tmp_path / ".work"
    shutil.copytree(checkpoint, unfinished / "checkpoint-1")
    (unfinished / "checkpoint-1" / "attnbalance.json").unlink()
    record = {"kind": "unfinished finetune", "config": dict(run.config)}
    (unfinished / "attnbalance.json").write_text(json.dumps(record))
    prompts = make_prompts(FactSet(FACTS))
    seen = "it was finetuned on the facts of 6 of these 9"
    missing = "training facts of it were not found, so the questions may be about them"
    for model in (run.path, checkpoint, link, moved, moved / "checkpoints" / checkpoint.name):
        assert seen_in_training([ModelSpec("it", str(model))], prompts) == seen
    for model in (copy, unfinished / "checkpoint-1"):
        assert seen_in_training([ModelSpec("it", str(model))], prompts) == missing
    assert seen_in_training([ModelSpec("it", str(copy), str(run.path))], prompts) == seen
    scaled = a_run(tmp_path / "scaled", (), kind="scaled adapter")
    marker = {"kind": "scaled adapter", "config": {"adapter": str(tmp_path / "gone"), "factor": 0.7}}
    (scaled / "attnbalance.json").write_text(json.dumps(marker))
    assert seen_in_training([ModelSpec("it", "base", str(scaled))], prompts) == missing
    (run.path / "heldout.jsonl").unlink()
    assert seen_in_training([ModelSpec("it", str(link))], prompts) == seen
    (run.path / "replay.jsonl").unlink()
    expected = f"it was finetuned on the facts of 4 of these 9; {missing}"
    assert seen_in_training([ModelSpec("it", str(link))], prompts) == expected


def test_a_run_that_began_from_one_that_is_gone_is_named_and_other_models_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, first = make_prompts(FactSet(FACTS)), a_run(tmp_path / "first", FACTS[:2])
    second = a_run(tmp_path / "second", FACTS[1:4])
    missing = "training facts of it were not found, so the questions may be about them"
    for base, said in ((str(first), ""), (str(tmp_path / "gone"), f"; {missing}"), ("owner/name", ""), ("gone", "")):
        (second / "attnbalance.json").write_text(json.dumps({"kind": "finetune", "base": base}))
        seen = 3 + (base == str(first))
        expected = f"it was finetuned on the facts of {seen} of these 9{said}"
        assert seen_in_training([ModelSpec("it", str(second))], prompts) == expected
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(second)
    for model in ("gpt2", "owner/name", "../other"):
        assert seen_in_training([ModelSpec("it", model)], prompts) == ""
    assert "3 of these 9" in seen_in_training([ModelSpec("it", ".")], prompts)


def test_a_run_made_anew_in_the_place_of_another_is_not_the_base_that_was(llama_folder: Path, tmp_path: Path) -> None:
    """A run records the fingerprint of its base, and a scaled adapter that of its source."""
    first = a_run(tmp_path / "first", FACTS[:2])
    shutil.copy(llama_folder / "config.json", first / "config.json")
    was = files_fingerprint(first)
    second, scaled = a_run(tmp_path / "second", FACTS[3:4]), a_run(tmp_path / "scaled", ())
    run = {"kind": "finetune", "base": str(first), "config": {"model_files": was}}
    (second / "attnbalance.json").write_text(json.dumps(run))
    marker = {"kind": "scaled adapter", "config": {"adapter": str(first), "adapter_files": was, "factor": 0.7}}
    (scaled / "attnbalance.json").write_text(json.dumps(marker))
    prompts = make_prompts(FactSet(FACTS))
    missing = "training facts of it were not found, so the questions may be about them"
    assert "the facts of 3 of these 9" in seen_in_training([ModelSpec("it", str(second))], prompts)
    assert "the facts of 2 of these 9" in seen_in_training([ModelSpec("it", "base", str(scaled))], prompts)
    (first / "config.json").write_text(json.dumps({"anew": True}))
    (first / "train.jsonl").write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in FACTS[4:]))
    expected = f"it was finetuned on the facts of 1 of these 9; {missing}"
    assert seen_in_training([ModelSpec("it", str(second))], prompts) == expected
    assert seen_in_training([ModelSpec("it", "base", str(scaled))], prompts) == missing


def test_a_run_inside_another_runs_folder_is_a_run_of_its_own(tmp_path: Path) -> None:
    outer = a_run(tmp_path / "outer", FACTS[:4])
    inner, merged = a_run(outer / "next", FACTS[4:5]), outer / "merged"
    merged.mkdir()
    prompts = make_prompts(FactSet(FACTS))
    assert "the facts of 1 of these 9" in seen_in_training([ModelSpec("it", str(inner))], prompts)
    assert "the facts of 4 of these 9" in seen_in_training([ModelSpec("it", str(merged))], prompts)
    deeper = merged / "best"
    deeper.mkdir()
    assert "the facts of 4 of these 9" in seen_in_training([ModelSpec("it", str(deeper))], prompts)
    copy = outer / "mine"  # of another run's checkpoint, and models of ours that stand alone
    copy.mkdir()
    for kind in ("finetune checkpoint", "scaled adapter", "pretrain"):
        marker = {"kind": kind, "config": {"adapter": "owner/name"}}
        (copy / "attnbalance.json").write_text(json.dumps(marker))
        assert seen_in_training([ModelSpec("it", str(copy))], prompts) == ""


def test_a_model_that_learned_from_instructions_is_named_unless_contexts_give_the_answers(tmp_path: Path) -> None:
    tuned, prompts = a_run(tmp_path / "tuned", ()), make_prompts(FactSet(FACTS))
    (tuned / "train.jsonl").unlink()
    record = {"kind": "finetune", "config": {"facts_sha256": {}, "instructions_sha256": "1a"}}
    (tuned / "attnbalance.json").write_text(json.dumps(record))
    after = a_run(tmp_path / "after", FACTS[:2])
    (after / "attnbalance.json").write_text(json.dumps({"kind": "finetune", "base": str(tuned)}))
    words = "tuned learned from instructions, which may answer these questions"
    assert seen_in_training([ModelSpec("tuned", str(tuned)), ModelSpec("base", "base")], prompts) == words
    seen = "after was finetuned on the facts of 2 of these 9; after learned from instructions, which may answer these"
    assert seen_in_training([ModelSpec("after", str(after))], prompts) == f"{seen} questions"
    in_context = [replace(prompt, spans={**prompt.spans, "context": (0, 1)}) for prompt in prompts]
    assert seen_in_training([ModelSpec("tuned", str(tuned))], in_context) == ""


def test_an_adapter_on_a_run_was_trained_on_the_runs_facts(tmp_path: Path) -> None:
    """One of the user's own, named by its folder, so that its base is the one that it names."""
    run, mine, other = a_run(tmp_path / "run", FACTS[:2]), tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir()
    (mine / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(run)}))
    prompts = make_prompts(FactSet(FACTS))
    assert "facts of 2 of these 9" in seen_in_training([ModelSpec("it", str(mine))], prompts)
    assert "facts of 2 of these 9" in seen_in_training([ModelSpec("it", str(run), str(mine))], prompts)
    assert seen_in_training([ModelSpec("it", str(other), str(mine))], prompts) == ""


def test_a_run_without_facts_misses_none(tmp_path: Path) -> None:
    prompts, hashes = make_prompts(FactSet(FACTS)), {"train": FactSet(()).sha256, "validation": "abc"}
    for number, config in enumerate(({"facts_sha256": hashes}, {"instructions": "abc"}, {"facts_sha256": None}, None)):
        run = a_run(tmp_path / str(number), ())
        (run / "train.jsonl").unlink()
        (run / "attnbalance.json").write_text(json.dumps({"kind": "finetune", "config": config}))
        assert seen_in_training([ModelSpec("it", str(run))], prompts) == ""


def test_a_scaled_adapter_was_trained_on_the_facts_of_the_adapter_that_it_was_scaled_from(tmp_path: Path) -> None:
    run, scaled = a_run(tmp_path / "run", FACTS[:2]), a_run(tmp_path / "scaled", (), kind="scaled adapter")
    marker = {"kind": "scaled adapter", "config": {"adapter": str(run), "factor": 0.7}}
    (scaled / "attnbalance.json").write_text(json.dumps(marker))
    prompts = make_prompts(FactSet(FACTS))
    specs = [ModelSpec("scaled", "base", str(scaled))]
    assert seen_in_training(specs, prompts) == "scaled was finetuned on the facts of 2 of these 9"


@pytest.mark.parametrize("record", [{}, {"config": None}, {"config": {"adapter": 3}}])
def test_a_scaled_adapter_whose_record_names_no_source_is_named(tmp_path: Path, record: dict[str, object]) -> None:
    half = a_run(tmp_path / "half", ())
    (half / "attnbalance.json").write_text(json.dumps({"kind": "scaled adapter", **record}))
    words = seen_in_training([ModelSpec("half", "base", str(half))], make_prompts(FactSet(FACTS)))
    assert words == "training facts of half were not found, so the questions may be about them"


def test_facts_of_the_runs_that_a_run_began_from_count(tmp_path: Path) -> None:
    """A LoRA run, scaled twice, on a run over all weights: 2 and 3 facts, one of them in both."""
    first, second = a_run(tmp_path / "first", FACTS[:2]), a_run(tmp_path / "second", FACTS[1:4])
    (second / "attnbalance.json").write_text(json.dumps({"kind": "finetune", "base": str(first)}))
    scaled = second
    for name in ("once", "twice"):
        marker = {"kind": "scaled adapter", "config": {"adapter": str(scaled), "factor": 0.7}}
        scaled = a_run(tmp_path / name, ())
        (scaled / "attnbalance.json").write_text(json.dumps(marker))
    prompts = make_prompts(FactSet(FACTS))
    for spec in (ModelSpec("tuned", str(first), str(second)), ModelSpec("tuned", "base", str(scaled))):
        assert seen_in_training([spec], prompts) == "tuned was finetuned on the facts of 4 of these 9"
    for base in (None, 3):
        (second / "attnbalance.json").write_text(json.dumps({"kind": "finetune", "base": base}))
        assert "facts of 3 of these 9" in seen_in_training([ModelSpec("tuned", str(second))], prompts)
    itself = a_run(tmp_path / "itself", FACTS[:1])
    (itself / "attnbalance.json").write_text(json.dumps({"kind": "finetune", "base": str(itself)}))
    assert "facts of 1 of these 9" in seen_in_training([ModelSpec("tuned", str(itself))], prompts)


def test_training_facts_are_known_by_subject_and_relation_alone(tmp_path: Path) -> None:
    """What a run was trained on need not be a fact or a conflict by today's rules; accents may be typed otherwise."""
    run = a_run(tmp_path / "run", ())
    row = {"subject": "Jose\u0301", "relation": "pe\u0300re", "answers": [], "context": "", "memory_answers": []}
    (run / "train.jsonl").write_text(json.dumps(row) + "\n")
    prompts = make_prompts(FactSet((Fact("José", "père", ("Luis",)),)))
    assert seen_in_training([ModelSpec("run", str(run))], prompts) == "run was finetuned on the facts of 1 of these 1"


def test_fewer_than_20_subjects_are_called_too_few() -> None:
    many = FactSet(tuple(Fact(f"subject {i}", relation, ("x",)) for i in range(20) for relation in ("r", "s")))
    assert few_subjects(make_prompts(many)) == ""
    assert few_subjects(make_prompts(many)[2:]) == "19 subjects are too few to trust the intervals"
    assert few_subjects(make_prompts(many)[:2]) == "1 subject is too few to trust the intervals"


def test_both_caveats_are_joined(tmp_path: Path) -> None:
    run, prompts = a_run(tmp_path / "run", FACTS[:2]), make_prompts(FactSet(FACTS))
    few = few_subjects(prompts)
    assert few
    assert caveats([ModelSpec("run", "base", str(run))], prompts, {"run": "float32"}) == (
        f"run was finetuned on the facts of 2 of these 9; {few}"
    )
    assert caveats([ModelSpec("base", "base")], prompts, {"base": "float32"}) == few


def test_models_of_two_dtypes_are_named() -> None:
    assert unlike_dtypes({"a": "float32", "b": "float32"}) == unlike_dtypes({"a": "bfloat16"}) == ""
    assert unlike_dtypes({"a": "bfloat16", "b": "float32", "c": "bfloat16"}).startswith(
        "a was read in bfloat16, b in float32 and c in bfloat16, so small differences may be rounding"
    )
    prompts = make_prompts(FactSet(FACTS))
    said = caveats([ModelSpec("a", "a"), ModelSpec("b", "b")], prompts, {"a": "bfloat16", "b": "float32"})
    assert said == f"{few_subjects(prompts)}; {unlike_dtypes({'a': 'bfloat16', 'b': 'float32'})}"


def test_models_whose_tokenizers_split_the_prompts_differently_are_named(llama_folder: Path, tmp_path: Path) -> None:
    alike, other = (Path(shutil.copytree(llama_folder, tmp_path / name)) for name in ("alike", "other"))
    tiny_tokenizer("plain").save_pretrained(other)  # without the first token of the base's
    specs = [ModelSpec("base", str(llama_folder)), ModelSpec("alike", str(alike)), ModelSpec("other", str(other))]
    prompts = make_prompts(FactSet(FACTS))
    assert unlike_tokens(specs[:2], prompts, MeasureSettings()) == ""
    assert unlike_tokens(specs, prompts, MeasureSettings()) == (
        "other splits these prompts into different tokens than base, which changes answers"
    )
    assert unlike_tokens([*specs[::-1]], prompts, MeasureSettings()).startswith("alike and base split these prompts")
    assert unlike_tokens(specs, prompts, MeasureSettings(tokenizer=str(llama_folder))) == ""
