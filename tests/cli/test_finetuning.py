"""`finetune` from the command line: a model that other commands read."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from commands import run_command, run_in_two_processes
from safetensors.torch import load_file
from trainers import assert_close

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.sources.load_facts import load_facts
from attnbalance.errors import DataError
from attnbalance.finetuning.runs import load_run
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.models.hooked import HookedModel


def test_finetune_makes_a_model_that_curve_reads_on_held_out_facts(
    llama_folder: Path, tmp_path: Path, facts_file: Path
) -> None:
    run = tmp_path / "a run"
    options = ("--split", "whole", "--steps", 4, "--batch-size", 4, "--checkpoint-every", 2, "--lora-rank", 2)
    code, text = run_command("finetune", llama_folder, "--facts", facts_file, *options, "--out", run)
    assert code == 0, text
    assert "validation loss" in text
    assert "Facts: 4 train, 1 validation" in text
    assert "It was chosen by 1 fact, too few to tell checkpoints apart" in text
    assert "already finished" not in text
    _, text = run_command("finetune", llama_folder, "--facts", facts_file, *options, "--out", run)
    assert "already finished" in text
    models = (f"base={llama_folder}", f"finetuned={llama_folder}+{run}")
    command = next(line for line in text.splitlines() if line.startswith("Next: "))
    asked = ["--facts", f"{run}/heldout.jsonl", "--template", "qa", "--recall", "--out", f"{run}-compared"]
    assert shlex.split(command)[1:] == ["attnbalance", "curve", *models, *asked]
    code, text = run_command("curve", *models, "--facts", run / "heldout.jsonl", "--out", tmp_path / "out")
    assert code == 0, text


def test_whole_weights_and_their_base_are_compared_in_one_dtype(
    llama_folder: Path, tmp_path: Path, facts_file: Path
) -> None:
    options = ("--facts", facts_file, "--split", "whole", "--steps", 1, "--batch-size", 4)
    code, text = run_command("finetune", llama_folder, *options, "--out", tmp_path / "whole")
    assert code == 0, text
    assert text.rstrip().endswith(f"--out {tmp_path}/whole-compared --dtype float32")
    assert "too few to tell" not in text  # there is one checkpoint
    assert FinetuneSettings(lora_rank=2).compared_dtype is None
    assert FinetuneSettings(dtype="bfloat16").compared_dtype == "bfloat16"


def test_the_next_line_of_conflicts_reads_its_own_heldout_facts(llama_folder: Path, tmp_path: Path) -> None:
    file, run, names = tmp_path / "facts.jsonl", tmp_path / "run", ("Lyon", "Oslo", "Bonn", "Kyiv", "Rome", "Bern")
    rows = [{"subject": f"S{i}", "relation": "capital", "answers": [name]} for i, name in enumerate(names)]
    file.write_text("\n".join(map(json.dumps, rows)))
    options = ("--template", "context", "--split", "whole", "--heldout", 0.5, "--steps", 1, "--batch-size", 4)
    code, text = run_command("finetune", llama_folder, "--facts", f"swapped:{file}", *options, "--out", run)
    assert code == 0, text
    command = shlex.split(next(line for line in text.splitlines() if line.startswith("Next: ")))[2:]
    assert f"conflicts:{run}/heldout.jsonl" in command
    code, text = run_command(*command)
    assert code == 0, text


def test_mixed_precision_is_recorded_or_refused_by_name(llama_folder: Path, tmp_path: Path, facts_file: Path) -> None:
    command = ("finetune", llama_folder, "--facts", facts_file, "--split", "whole", "--steps", 1, "--batch-size", 4)
    code, text = run_command(*command, "--mixed-precision", "bf16", "--out", tmp_path / "run")
    assert code == 0, text
    assert json.loads((tmp_path / "run" / "attnbalance.json").read_text())["config"]["mixed_precision"] == "bf16"
    code, text = run_command(*command, "--mixed-precision", "fp16", "--out", tmp_path / "bad")
    assert (code, "`--mixed-precision` must be no or bf16, got 'fp16'" in text) == (2, True), text
    code, text = run_command(*command, "--out", tmp_path / "run")
    assert code == 2
    assert "mixed_precision" in text


def test_finetune_says_with_both_numbers_that_the_base_is_better_than_the_best_checkpoint(
    llama_folder: Path, tmp_path: Path, facts_file: Path
) -> None:
    options = ("--facts", facts_file, "--split", "whole", "--steps", 4, "--batch-size", 4, "--checkpoint-every", 2)
    for objective, unit in (("ce", "loss {:.3f} nats a token"), ("ce + row-anchor", "objective {:.3f}")):
        out = tmp_path / objective
        code, text = run_command("finetune", llama_folder, *options, "--objective", objective, "--lr", 10, "--out", out)
        assert code == 0, text
        run = load_run(out)
        best = run.validation_loss[run.best_step]
        assert run.base_loss is not None
        assert run.base_loss < best
        assert f"Best checkpoint: step {run.best_step}, validation {unit.format(best)}; it is " in text
        assert f"The base itself is better: validation {unit.format(run.base_loss)}; try a lower --lr." in text
    code, text = run_command("finetune", llama_folder, *options, "--out", tmp_path / "good")
    assert (code, "base itself" in text) == (0, False), text


def test_finetune_trains_the_parts_and_the_objective_that_are_named(
    llama_folder: Path, tmp_path: Path, facts_file: Path
) -> None:
    run, options = tmp_path / "run", ("--split", "whole", "--steps", 4, "--batch-size", 4, "--checkpoint-every", 2)
    aim = ("--train", "qk", "--objective", "ce + 0.3*row-anchor(statement)", "--curriculum", "popular-first")
    code, text = run_command("finetune", llama_folder, "--facts", facts_file, *options, *aim, "--out", run)
    assert code == 0, text
    assert " tensors (qk)." in text
    assert len(json.loads((run / "trajectory.json").read_text())["trajectory"]) == 2
    for wrong, expected in (
        (("--objective", "ce + magic"), "There are ce; kl(statement|question|few-shot|few-shot-statement|best)"),
        (("--objective", "floor(2)"), "SHARE between 0 and 1"),
        (("--train", "heads"), "no part 'heads'"),
        (("--curriculum", "hard"), "no curriculum 'hard'"),
        (("--objective", "ce + kl(statement)"), "other settings"),
    ):
        out = run if expected == "other settings" else tmp_path / "other"
        code, text = run_command("finetune", llama_folder, "--facts", facts_file, *options, *wrong, "--out", out)
        assert (code, text.startswith("error: "), expected in text) == (2, True, True), text
    assert not (tmp_path / "other").exists()


def test_finetune_trains_other_adapters_of_peft_on_the_layers_that_are_named(
    llama_folder: Path, tmp_path: Path, facts_file: Path
) -> None:
    run, options = tmp_path / "run", ("--split", "whole", "--steps", 2, "--batch-size", 4, "--train", "qk")
    fields = '{"peft_type": "OFT", "oft_block_size": 8}'
    code, text = run_command("finetune", llama_folder, "--facts", facts_file, *options, "--peft", fields, "--out", run)
    assert code == 0, text
    assert "weights of OFT adapters, which change 3,072 of 42,400 weights (7.25%) in 4 tensors (qk)." in text
    assert f"finetuned={llama_folder}+{run}" in text
    assert json.loads((run / "attnbalance.json").read_text())["config"]["peft"] == json.loads(fields)


def test_finetune_ranks_by_what_the_model_shows_and_drops_what_cannot_be_ranked(
    llama_folder: Path, tmp_path: Path
) -> None:
    facts = [(f"Subject {i}", "city", ("Paris", "Rome")[i % 2]) for i in range(20)] + [("Alone", "king", "Juan")]
    path = tmp_path / "facts.jsonl"
    lines = [json.dumps({"subject": s, "relation": r, "answers": [a]}) + "\n" for s, r, a in facts]
    path.write_text("".join(lines))
    options = ("--facts", path, "--template", "The {relation} of {subject} is", "--steps", 2, "--checkpoint-every", 2)
    ranked = ("--split", "top", "--rank-by", "salience", "--out", tmp_path / "out")
    code, text = run_command("finetune", llama_folder, *options, *ranked)
    assert code == 2
    assert "no other answer in their relation" in text
    code, text = run_command("finetune", llama_folder, *options, *ranked, "--skip-bad")
    assert code == 0, text
    assert json.loads((tmp_path / "out" / "attnbalance.json").read_text())["config"]["split"] == "top by salience"
    code, text = run_command(
        "finetune", llama_folder, *options, *ranked[:-2], "--skip-bad", "--share", 0.3, "--out", tmp_path / "part"
    )
    assert code == 0, text
    assert json.loads((tmp_path / "part" / "attnbalance.json").read_text())["config"]["split"] == "top 30% by salience"
    code, text = run_command(
        "finetune", llama_folder, *options, "--split", "whole", "--rank-by", "loss", "--out", tmp_path
    )
    assert code == 2
    assert "split whole does not rank facts" in text


def test_the_seed_draws_the_samples_that_rank_facts(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seeds = tmp_path / "facts.jsonl", list[int]()
    facts = ({"subject": f"Subject {i}", "relation": "city", "answers": ["Paris"]} for i in range(20))
    path.write_text("".join(json.dumps(fact) + "\n" for fact in facts))

    def rank(facts: FactSet, *_: object, seed: int, **__: object) -> dict[str, float]:
        seeds.append(seed)
        raise DataError("ranked")

    monkeypatch.setattr("attnbalance.readings.passes.check_passes", lambda *_: None)  # 96 positions are too few
    monkeypatch.setattr("attnbalance.finetuning.ranking.rank_facts", rank)
    options = ("--facts", path, "--split", "top", "--rank-by", "slick", "--seed", 5, "--out", tmp_path / "out")
    code, text = run_command("finetune", llama_folder, *options)
    assert (code, seeds) == (2, [5]), text


def test_finetune_names_the_questions_that_are_too_long_and_drops_them(gpt2_folder: Path, tmp_path: Path) -> None:
    facts = [(f"Subject {i}", "city", ("Paris", "Rome")[i % 2]) for i in range(20)]
    facts.insert(3, ("Long " * 60, "city", "Rome"))
    facts.insert(5, ("Fits alone", "city", "R" + "o" * 100))
    path, out = tmp_path / "facts.jsonl", tmp_path / "out"
    lines = [json.dumps({"subject": s, "relation": r, "answers": [a]}) + "\n" for s, r, a in facts]
    path.write_text("".join(lines))
    options = ("--facts", path, "--template", "The {relation} of {subject} is", "--steps", 2, "--checkpoint-every", 2)
    options += ("--split", "whole", "--out", out)
    code, text = run_command("finetune", gpt2_folder, *options)
    assert code == 2
    assert all(part in text for part in ("2 of 22 prompts", "96 positions", "row 4: ", "row 6: ", "--skip-bad")), text
    assert not out.exists()
    code, text = run_command("finetune", gpt2_folder, *options, "--skip-bad")
    assert code == 0, text
    assert "Dropped of 22 facts: 2 (prompts are longer than the model's 96 positions)." in text
    recorded = json.loads((out / "attnbalance.json").read_text())["dropped"]
    assert recorded == {"prompts are longer than the model's 96 positions": 2}


def test_two_processes_finetune_as_one_does(llama_folder: Path, tmp_path: Path, facts_file: Path) -> None:
    options = ("--split", "whole", "--steps", 4, "--batch-size", 4, "--checkpoint-every", 2)
    command = ("finetune", llama_folder, "--facts", facts_file, *options, "--out")
    code, text = run_command(*command, tmp_path / "one")
    assert code == 0, text
    run_in_two_processes("-m", "attnbalance.cli", *command, tmp_path / "two")
    one, two = load_run(tmp_path / "one"), load_run(tmp_path / "two")
    assert two.validation_loss == pytest.approx(one.validation_loss, rel=1e-5)  # sums in another order
    assert two.base_loss == pytest.approx(one.base_loss, rel=1e-5)
    weights = (load_file(run.path / "model.safetensors") for run in (one, two))
    assert_close(*weights, tolerance=1e-4)  # AdamW divides small gradients by their size
    assert not list(tmp_path.glob(".*"))


def test_finetune_replays_what_the_model_knows_of_other_facts(
    llama_folder: Path, tmp_path: Path, facts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second of 16 facts is known; a third of the training facts are replayed."""
    names = [f"Town {letter}" for letter in "ABCDEFGHIJKLMNOP"]
    others = tmp_path / "others{1}.jsonl"
    others.write_text("".join(json.dumps({"subject": n, "relation": "capital", "answers": [n]}) + "\n" for n in names))
    monkeypatch.setattr(
        "attnbalance.finetuning.replay.completions", lambda asked, *_: [i % 2 == 0 for i in range(len(asked))]
    )
    sizes = ("--split", "whole", "--heldout", 0, "--validation", 0, "--steps", 2, "--batch-size", 4)
    options = ("--facts", facts_file, *sizes, "--replay", others, "--out", tmp_path / "run")
    code, text = run_command("finetune", llama_folder, *options, "--replay-share", 0.3)
    assert code == 0, text
    run = load_run(tmp_path / "run")
    count = len(run.train)
    wanted = round(3 / 7 * count)
    assert f"Replay: the model knows 8 of 16 facts of {others}; {wanted} are added." in text
    assert [fact.subject for fact in run.replay] == [
        name for name in names[::2] if name in {f.subject for f in run.replay}
    ]
    assert len(run.replay) == wanted
    assert f"Facts: {count} train, 0 heldout, {wanted} replay, 0 left out; validated on the training facts." in text
    assert f"--facts {tmp_path / 'run' / 'train.jsonl'}" in text
    held = (*options[:-1], tmp_path / "held", "--replay-share", 0.3, "--objective", "2*ce + kl(question)", "--decay")
    asked = text
    code, text = run_command("finetune", llama_folder, *held)
    assert code == 0, text
    drawn = f"Replay: 30% of each batch are facts of {others}, drawn from 16, which are held to what the model says."
    assert drawn in text
    assert ("Asking" in asked, "Asking" in text) == (True, False)
    run = load_run(tmp_path / "held")
    assert [fact.subject for fact in run.replay] == names
    assert run.config["decay"] is True
    assert f"Facts: {count} train, 0 heldout, 16 replay, 0 left out; validated on the training facts." in text
    code, text = run_command("finetune", llama_folder, *options, "--replay-share", 1)
    assert (code, "share of replay must be above 0 and below 1, got 1.0" in text) == (2, True)


def test_finetune_replays_what_the_model_generates(
    llama_folder: Path, tmp_path: Path, facts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def generate(model: HookedModel, facts: FactSet, count: int, **settings: Any) -> FactSet:
        given.update(settings, facts=[fact.subject for fact in facts], count=count)
        return FactSet(tuple(Fact(f"Made {i}", "capital", ("up",)) for i in range(count)))

    monkeypatch.setattr("attnbalance.finetuning.replay.generated_facts", generate)
    sizes = ("--split", "whole", "--heldout", 0.3, "--validation", 0.2, "--steps", 2, "--batch-size", 4, "--seed", 3)
    options = ("--facts", facts_file, *sizes, "--replay", "generated", "--replay-share", 0.5, "--out", tmp_path / "run")
    code, text = run_command("finetune", llama_folder, *options)
    assert code == 0, text
    run = load_run(tmp_path / "run")
    assert [fact.subject for fact in run.replay] == [f"Made {i}" for i in range(len(run.train))]
    everything, tested = load_facts(str(facts_file)), {fact.subject for fact in run.heldout}
    assert tested
    assert sorted(given["facts"]) == sorted(fact.subject for fact in everything if fact.subject not in tested)
    assert (given["count"], given["seed"], given["template"], given["batch_size"]) == (len(run.train), 3, "qa", 4)
    assert f"Replay: {given['count']} facts that the model generated are added" in text
