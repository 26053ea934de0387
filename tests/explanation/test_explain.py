"""`attnbalance explain` and `attnbalance salience`, end to end: planted changes are found, labels may be swapped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import GROUPED, count_texts, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, GraniteMoeConfig
from typer.testing import CliRunner

from attnbalance import Fact
from attnbalance.cli import app
from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.data.facts import FactSet
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import ModelError
from attnbalance.explanation import explain as module
from attnbalance.explanation.explain import explain as explain_models
from attnbalance.models.load import load_model
from attnbalance.readings.recall import Recall

runner = CliRunner()
FACTS = FactSet(
    tuple(
        Fact(f"Subject {i}", "city" if i % 2 else "sport", (("Paris", "London", "Rome", "Oslo")[i % 4],), 50.0 - i)
        for i in range(24)
    )
)
HOW = MeasureSettings(template="The {relation} of {subject} is", recall=True, batch_size=8)


def changed(folder: Path, out: Path, names: tuple[str, ...]) -> str:
    """A copy of a checkpoint with noise in the parameters whose name holds one of `names`, in every layer."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                parameter.add_(0.5 * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(out)
    tiny_tokenizer("bos").save_pretrained(out)
    return str(out)


def explained(before: str, after: str, out: Path) -> dict:
    explain_models(ModelSpec("before", before), ModelSpec("after", after), FACTS, HOW, out)
    return json.loads((out / "explain.json").read_text())


@pytest.mark.parametrize(
    ("names", "cause"),
    [(("q_proj", "k_proj"), "qk"), (("v_proj", "o_proj"), "ov+mlp"), (("mlp",), "ov+mlp")],
)
def test_a_planted_change_is_found_and_swapping_the_labels_turns_it_round(
    llama_folder: Path, tmp_path: Path, names: tuple[str, ...], cause: str
) -> None:
    other = changed(llama_folder, tmp_path / "other", names)
    there = explained(str(llama_folder), other, tmp_path / "there")["groups"]["all"]
    back = explained(other, str(llama_folder), tmp_path / "back")["groups"]["all"]
    assert abs(there["change"]["mean"]) > 0.01
    assert there["shares"][cause]["mean"] == pytest.approx(1, abs=1e-3)  # 95% is asked for; nothing else changed
    assert there["change"]["mean"] == pytest.approx(-back["change"]["mean"], abs=1e-5)
    assert there["shares"][cause]["mean"] == pytest.approx(back["shares"][cause]["mean"], abs=1e-3)


def test_questions_about_facts_that_a_model_was_trained_on_are_counted(llama_folder: Path, tmp_path: Path) -> None:
    other = changed(llama_folder, tmp_path / "other", ("mlp",))
    (tmp_path / "other" / "attnbalance.json").write_text(json.dumps({"kind": "finetune"}))
    (tmp_path / "other" / "train.jsonl").write_text(
        "".join(json.dumps(fact.as_dict()) + "\n" for fact in list(FACTS)[:5])
    )
    answer = explained(str(llama_folder), other, tmp_path / "out")["answer"]
    assert answer.endswith(" after was finetuned on the facts of 5 of these 24.")


def test_checkpoints_of_two_dtypes_are_said_to_be_of_two(llama_folder: Path, tmp_path: Path) -> None:
    other = changed(llama_folder, tmp_path / "other", ("mlp",))
    AutoModelForCausalLM.from_pretrained(other).bfloat16().save_pretrained(other)
    answer = explained(str(llama_folder), other, tmp_path / "out")["answer"]
    assert "before was read in float32 and after in bfloat16, so small differences may be rounding" in answer


def test_a_finished_folder_is_left_as_it_is_and_its_files_are_whole(llama_folder: Path, tmp_path: Path) -> None:
    other, out = changed(llama_folder, tmp_path / "other", ("q_proj",)), tmp_path / "out"
    explained(str(llama_folder), other, out)
    names = {path.name for path in out.iterdir()}
    assert {"report.html", "explain.json", "changes.parquet", "causes.png", "answers.jsonl", "curves.json"} <= names
    page = (out / "report.html").read_text()
    assert "after minus before: " in page
    assert "before minus after" not in page
    stamp = (out / "report.html").stat().st_mtime_ns
    explained(str(llama_folder), other, out)
    assert (out / "report.html").stat().st_mtime_ns == stamp
    assert not list(tmp_path.glob(".out*"))


def test_one_explanation_tokenizes_each_text_at_most_once_for_each_model(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = changed(llama_folder, tmp_path / "other", ("q_proj", "mlp"))
    counts = count_texts(monkeypatch)
    explained(str(llama_folder), other, tmp_path / "out")
    asked = [HOW.template.format(relation=fact.relation, subject=fact.subject) for fact in FACTS]
    answers = {f" {fact.answer}" for fact in FACTS}
    assert {counts[text] for text in asked} == {1}  # both models have the same tokenizer
    assert {counts[text] for text in answers} <= {1, 3}  # and again in each model's questions after another subject
    assert max(counts[text] for text in counts.keys() - answers) <= 2


def test_a_killed_run_goes_on_with_the_checks_that_it_had_made(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, asked = changed(llama_folder, tmp_path / "other", ("q_proj",)), []
    real = module.recall

    def counted(*arguments: object, **options: object) -> object:
        asked.append(1)
        if len(asked) == 6:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(module, "recall", counted)
    with pytest.raises(KeyboardInterrupt):
        explained(str(llama_folder), other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    first = len(asked)
    found = explained(str(llama_folder), other, tmp_path / "out")
    made = sum(len(checks) for checks in found["checks"].values())
    assert len(asked) - first == made - 5  # five answers were kept
    monkeypatch.undo()
    assert found["checks"] == explained(str(llama_folder), other, tmp_path / "whole")["checks"]


def test_checks_of_other_prompts_are_made_again(llama_folder: Path, tmp_path: Path) -> None:
    """A chat template that writes the date makes other prompts of the same facts on another day."""
    model = load_model(llama_folder)
    other = load_model(changed(llama_folder, tmp_path / "other", ("q_proj",)))
    today, tomorrow = (
        PromptSet.of(make_prompts(FACTS, f"{day}: the {{relation}} of {{subject}} is"), model.tokenizer)
        for day in ("Monday", "Tuesday")
    )

    def ask(prompts: PromptSet, folder: str) -> list[Recall]:
        return [answers for _, answers in module._ask(model, other, prompts, HOW, tmp_path / folder, None)]

    ask(today, "kept")
    assert ask(tomorrow, "kept") == ask(tomorrow, "fresh")


def test_checkpoints_of_another_shape_or_tokenizer_and_relations_of_one_answer_give_one_message(
    llama_folder: Path, gpt2_folder: Path, tmp_path: Path
) -> None:
    path, one = tmp_path / "facts.jsonl", tmp_path / "one.jsonl"
    path.write_text("".join(json.dumps(fact.as_dict()) + "\n" for fact in FACTS))
    one.write_text("".join(json.dumps(Fact(f"S{i}", "r", ("x",)).as_dict()) + "\n" for i in range(6)))
    other = tmp_path / "words"
    tiny_model("llama").save_pretrained(other)
    tiny_tokenizer("metaspace").save_pretrained(other)
    options = ("--template", HOW.template, "--out", str(tmp_path / "out"))
    for before, after, facts, message in (
        (llama_folder, gpt2_folder, path, "models of different shapes"),
        (llama_folder, other, path, "different tokenizers"),
        (llama_folder, llama_folder, path, "used for more than one model"),
        (f"a={llama_folder}", f"b={llama_folder}", one, "no other answer in their relation"),
    ):
        found = runner.invoke(app, ["explain", str(before), str(after), "--facts", str(facts), *options])
        assert found.exit_code == 2, found.output
        assert message in found.output.replace("\n", " ")
        assert not (tmp_path / "out").exists()


def test_models_of_the_same_weights_have_nothing_to_explain(llama_folder: Path, tmp_path: Path) -> None:
    specs = (ModelSpec(label, str(llama_folder)) for label in ("a", "b"))
    with pytest.raises(ModelError, match="the same weights"):
        explain_models(*specs, FACTS, HOW, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_an_adapter_is_explained_against_its_base_and_a_family_outside_without_edits(
    llama_folder: Path, lora_folder: Path, tmp_path: Path
) -> None:
    explain_models(
        ModelSpec("base", str(llama_folder)),
        ModelSpec("lora", str(llama_folder), str(lora_folder)),
        FACTS,
        HOW,
        tmp_path / "lora-out",
    )
    found = json.loads((tmp_path / "lora-out" / "explain.json").read_text())["groups"]["all"]["causes"]
    assert found["mlp"]["mean"] == found["rest"]["mean"] == 0  # the adapter is on q_proj and v_proj
    assert found["qk"]["mean"] != 0 != found["ov"]["mean"]
    bloom = tmp_path / "bloom"
    tiny_model("bloom").save_pretrained(bloom)
    tiny_tokenizer("bos").save_pretrained(bloom)
    other = changed(bloom, tmp_path / "other", ("mlp",))
    with pytest.warns(UserWarning, match="eager"):
        found = explained(str(bloom), other, tmp_path / "bloom-out")
    groups, missing = found["groups"], found["left_out"]
    assert missing.startswith(
        "Left out for before and after, whose family is outside transformers' attention interface"
    )
    assert found["answer"].endswith(missing)
    assert {check["kind"] for checks in found["checks"].values() for check in checks} == {"weights"}
    assert "rows" not in groups["all"]["causes"]
    assert groups["all"]["shares"]["ov+mlp"]["mean"] == pytest.approx(1, abs=1e-3)


def test_a_family_that_cannot_be_split_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure_all", lambda *_, **__: pytest.fail("measured"))
    settings = GROUPED | {"num_local_experts": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = GraniteMoeConfig(**settings, residual_multiplier=0.5)
    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        folders.append(str(tmp_path / str(seed)))
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[-1])
        tiny_tokenizer().save_pretrained(folders[-1])
    with pytest.raises(ModelError, match="cannot be taken apart into W_V and W_O"):
        explained(*folders, tmp_path / "out")
