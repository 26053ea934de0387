"""One fit: the answers that it is taught, and the variant that is chosen."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from attnbalance.data.facts import Fact, FactSet
from attnbalance.data.synthetic import synthetic_facts
from attnbalance.errors import OutputError
from attnbalance.files.outputs import HASH, read_json, write_saved
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.replay import SHARE
from attnbalance.finetuning.runs import load_run
from attnbalance.finetuning.splits import Split
from attnbalance.models.hooked import HookedModel
from attnbalance.studies.run_fit import RESULT
from attnbalance.studies.study import study


def test_a_method_may_be_trained_on_shuffled_answers_and_on_those_of_the_base(
    config: Path, done: Path, tmp_path: Path
) -> None:
    out, more = tmp_path / "out", tmp_path / "more.yaml"
    shutil.copytree(done, out)
    labels = "methods:\n  shuffled: {labels: shuffled}\n  of-base: {labels: base}"
    more.write_text(
        config.read_text().replace("methods:", labels).replace("[0, 1]", "[0]").replace("[top, bottom]", "[top]")
    )
    study(more, out)
    run = out / "fits/tiny/seed-0/top"
    facts = {name: load_run(run / name / "run-0").train for name in ("plain", "shuffled", "of-base")}
    subjects = {name: [(fact.subject, fact.relation) for fact in taught] for name, taught in facts.items()}
    assert subjects["plain"] == subjects["shuffled"]
    assert [fact.answers for fact in facts["plain"]] != [fact.answers for fact in facts["shuffled"]]
    said = json.loads((out / "bases/tiny-0-statement.json").read_text())
    outputs = dict(zip(said["prompt_ids"], said["outputs"], strict=True))
    for fact in facts["of-base"]:
        assert outputs[f"{fact.relation}/{fact.subject}"].strip().startswith(fact.answer)
    result = json.loads((run / "shuffled" / RESULT).read_text())
    assert result["settings"]["facts_sha256"]["train"] != facts["plain"].sha256
    assert len(result["prompt_ids"]) == len(load_run(run / "plain" / "run-0").heldout)


def test_a_method_may_replay_what_the_base_knows_of_the_world_or_generates(
    config: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, more, given = tmp_path / "out", tmp_path / "more.yaml", list[tuple[Any, ...]]()
    shutil.copytree(done, out)
    methods = (
        "methods:\n  held: {replay: known, replay_share: 0.5, objective: ce + kl(question)}\n"
        "  known: {replay: known, replay_share: 0.5}\n  own: {replay: generated, template: plain}"
    )
    more.write_text(
        config.read_text().replace("methods:", methods).replace("[0, 1]", "[0]").replace("[top, bottom]", "[top]")
    )
    made = FactSet((Fact("Made", "hometown", ("up",)),))

    def replay(model: HookedModel, split: Split, facts: FactSet | None, share: float, **settings: Any) -> Any:
        own = (settings[name] for name in ("objective", "template", "seed"))
        given.append((facts and len(facts), model.name, share, *own))
        held = share if parse_objective(settings["objective"]).keeps_answers else None
        return dataclasses.replace(split, replay=made, replay_share=held), "Replay."

    monkeypatch.setattr("attnbalance.studies.run_fit.replay", replay)
    table = study(more, out)
    base = str(out / "bases" / "tiny-0")
    world = synthetic_facts(0, subjects=30, answers=3)
    assert given == [
        (len(world), base, 0.5, "ce + kl(question)", "qa", 0),
        (len(world), base, 0.5, "ce", "qa", 0),
        (None, base, SHARE, "ce", "plain", 0),
    ]
    held = json.loads((out / "fits/tiny/seed-0/top/held" / RESULT).read_text())
    assert (held["replayed"], held["replay_wanted"]) == (1, 0)  # however few, they are a share of each batch
    for name in ("known", "own"):
        folder = out / "fits/tiny/seed-0/top" / name
        assert list(load_run(folder / "run-0").replay) == list(made)
        fit = json.loads((folder / RESULT).read_text())
        new = len(load_run(folder / "run-0").train)
        wanted = {"known": new, "own": 3 * new}[name]  # half of all, and the default of three quarters
        assert (fit["replayed"], fit["replay_wanted"]) == (1, wanted)
        assert table.count("replays fewer facts") == 2  # of no method that replays nothing
        assert f"{name} on top (tiny) replays fewer facts than its share asks for: 1 of {wanted}." in table


def test_a_base_stored_in_bfloat16_is_compared_in_the_dtype_of_the_fits(
    long_llama_folder: Path, tmp_path: Path
) -> None:
    """Fits that hardly learn anything: whatever else they are apart from the base is its dtype's rounding."""
    base, config, out = tmp_path / "base", tmp_path / "study.yaml", tmp_path / "out"
    shutil.copytree(long_llama_folder, base)
    AutoModelForCausalLM.from_pretrained(base).bfloat16().save_pretrained(base)
    little = "steps: 1, learning_rate: 1.0e-12"
    config.write_text(
        f"worlds: {{tiny: {{facts: synthetic, subjects: 30, answers: 3, model: {base}}}}}\nsplits: [top]\n"
        f"methods:\n  plain: {{{little}}}\n"
    )
    study(config, out)
    fit = json.loads((out / "fits/tiny/seed-0/top/plain" / RESULT).read_text())
    assert (fit["dtype"], fit["drift"]) == ("float32", pytest.approx(0, abs=1e-9))  # in bfloat16 over 1e-6
    with_adapter = config.read_text() + f"  lora: {{lora_rank: 2, {little}}}\n"
    config.write_text(with_adapter)
    study(config, out)
    fit = json.loads((out / "fits/tiny/seed-0/top/lora" / RESULT).read_text())
    assert fit["dtype"] == "float32"
    assert fit["drift"] == pytest.approx(0, abs=1e-9)


def test_a_method_that_changes_the_dtype_of_a_study_is_refused_before_anything_is_trained(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = tmp_path / "study.yaml", tmp_path / "out"
    world = f"worlds: {{tiny: {{facts: synthetic, subjects: 30, answers: 3, model: {llama_folder}}}}}"
    adapter = f"{world}\nsplits: [top]\nmethods:\n  lora: {{lora_rank: 2, steps: 1}}\n"
    config.write_text(adapter)
    with pytest.warns(UserWarning, match="no method is called plain"):
        study(config, out)
    monkeypatch.setattr("attnbalance.studies.run_fit.finetune", lambda *_, **__: pytest.fail("trained"))
    config.write_text(f"{adapter}  plain: {{steps: 1}}\n")
    with pytest.raises(OutputError, match=r"1 of 1 fits in .* were measured in another dtype than float32"):
        study(config, out)
    config.write_text(adapter)
    path = out / "fits/tiny/seed-0/top/lora" / RESULT
    saved = read_json(path)
    write_saved(path, {name: saved[name] for name in saved if name not in ("dtype", HASH)})
    with (
        pytest.warns(UserWarning, match="no method is called plain"),
        pytest.raises(OutputError, match="than the base has, in which .* or by an earlier version"),
    ):
        study(config, out)


def test_a_grid_is_chosen_on_validation_facts_alone(done: Path) -> None:
    for path in done.glob("fits/tiny/*/*/plain"):
        losses = {}
        for run in sorted(path.glob("run-*")):
            marker = json.loads((run / "attnbalance.json").read_text())
            losses[marker["config"]["learning_rate"]] = min(loss for _, loss in marker["validation_loss"])
        assert len(losses) == 2
        chosen = json.loads((path / RESULT).read_text())["settings"]["learning_rate"]
        assert chosen == min(losses, key=lambda rate: losses[rate])
