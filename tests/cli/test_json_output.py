"""`--json`: standard output is one JSON object with what the files hold; what people read goes to standard error."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from small_demo import make_demo_small
from typer.testing import CliRunner

from attnbalance.cli import GROUPS, app
from attnbalance.cli.json_output import RESULTS, print_json, wants_json
from attnbalance.data.sources.load_facts import load_facts
from attnbalance.families import check_families
from attnbalance.families.check_families import FamilyOutcome
from attnbalance.files.work import HOLDER, LOCK

RUNNER = CliRunner()
PAGE = Path(__file__).parents[2] / "docs/how-to/scripts.md"
NAMES = [command.__name__.replace("_", "-") for commands in GROUPS.values() for command in commands]
WITHOUT_FOLDER = ("facts", "families", "tasks")
NO_RESULTS = {"config.json", "adapter_config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
NO_RESULTS |= {"objective_base.json", "instructions.json"}
"""Files of a model or of data, which are no results."""
RECIPE = "{steps: 5, batch_size: 8, layers: 1, d_model: 16, heads: 2, vocabulary: 400}"
STUDY = (
    f"worlds: {{tiny: {{facts: synthetic, subjects: 30, answers: 3, recipe: {RECIPE}}}}}\nsplits: [top]\n"
    "methods: {plain: {steps: 2, batch_size: 8}}"
)


@pytest.fixture
def commands(
    tmp_path: Path, long_llama_folder: Path, lora_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[object, ...]]:
    """A cheap form of every command, without --out."""
    make_demo_small(monkeypatch)
    facts, rows, study = tmp_path / "facts.jsonl", tmp_path / "rows.json", tmp_path / "study.yaml"
    asked = [
        {"subject": f"Town {i}", "relation": "country", "answers": [("Rome", "Oslo")[i % 2]], "popularity": i}
        for i in range(12)
    ]
    facts.write_text("".join(json.dumps(row) + "\n" for row in asked))
    named = ({"instruction": f"Name city {i}.", "input": "It lies in the north.", "output": "Oslo"} for i in range(8))
    rows.write_text(json.dumps(list(named)))
    study.write_text(STUDY)
    for step in (1, 2):
        shutil.copytree(lora_folder, tmp_path / "run" / f"checkpoint-{step}")
    model, both = f"a={long_llama_folder}", (f"a={long_llama_folder}", f"b={long_llama_folder}+{lora_folder}")
    about, trained = ("--facts", facts), ("--steps", 2, "--batch-size", 4, "--checkpoint-every", 2, "--lora-rank", 2)
    return {
        "demo": ("demo",),
        "facts": ("facts", facts),
        "families": ("families", "gpt2"),
        "tasks": ("tasks",),
        "knowledge": ("knowledge", *both, *about),
        "curve": ("curve", *both, *about, "--recall"),
        "trajectory": ("trajectory", tmp_path / "run", "--base", long_llama_folder, *about, "--recall"),
        "context": ("context", model, "--conflicts", f"swapped:{facts}"),
        "salience": ("salience", model, *about),
        "explain": ("explain", *both, *about),
        "finetune": ("finetune", long_llama_folder, *about, "--split", "whole", *trained),
        "instruct": ("instruct", long_llama_folder, "--data", rows, "--validation", 2, *trained),
        "context-critical": ("context-critical", long_llama_folder, "--data", rows),
        "scale-adapter": ("scale-adapter", lora_folder, 0.5),
        "study": ("study", study),
        "reproduce": ("reproduce", "goyal-prop1", "--scale", "tiny", "--seeds", 2, "--workers", 1),
    }


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    result = RUNNER.invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def only_object(text: str) -> dict[str, Any]:
    """The JSON object that a text is, on one line; raises for numbers that JSON does not have."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert text.endswith("\n")
    assert text.count("\n") == 1
    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_FOLDER])
def test_a_command_prints_one_object_with_what_its_files_hold(
    name: str, commands: dict[str, tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, said = run("--json", *commands[name], "--out", "out")
    assert code == 0, said
    printed, out = only_object(text), tmp_path / "out"
    assert list(printed) == ["command", "version", "out", "files", "results"]
    assert (printed["command"], printed["version"]) == (name, metadata.version("attnbalance"))
    assert printed["out"] == str(out.resolve())
    there = sorted(path.name for path in out.iterdir() if path.is_file())
    assert printed["files"] == there
    assert not {LOCK, HOLDER} & set(there)
    held = {file for file in there if file.endswith(".json")} - NO_RESULTS
    assert "attnbalance.json" in held
    assert printed["results"] == {Path(file).stem: json.loads((out / file).read_text()) for file in held}
    code, sentences, _ = run(*commands[name], "--out", "out")
    assert code == 0
    assert sentences.strip()
    assert said.endswith(sentences)  # all that is printed without --json, to the byte


@pytest.mark.parametrize("name", ["study", "reproduce"])
def test_results_of_fewer_fits_or_cells_than_were_asked_for_are_left_out(
    name: str, commands: dict[str, tuple[object, ...]], tmp_path: Path
) -> None:
    result, study = {"study": "study", "reproduce": "goyal-prop1"}[name], tmp_path / "study.yaml"
    for _ in range(2):  # the second time all is there already
        code, text, said = run("--json", *commands[name], "--out", tmp_path / "out")
        assert code == 0, said
        assert result in only_object(text)["results"]
    study.write_text(f"{STUDY}\nseeds: [0, 1]")
    more = commands[name] if name == "study" else ["3" if part == 2 else part for part in commands[name]]
    code, text, said = run("--json", *more, "--worker", "8/9", "--out", tmp_path / "out")
    assert code == 0, said
    assert list(only_object(text)["results"]) == ["attnbalance"]
    assert (tmp_path / "out" / f"{result}.json").is_file()
    code, text, said = run("--json", *more, "--out", tmp_path / "out")
    assert list(only_object(text)["results"]) == ["attnbalance", result]


def test_the_numbers_of_facts_are_counted_and_the_file_is_named(
    commands: dict[str, tuple[object, ...]], tmp_path: Path
) -> None:
    code, text, said = run("--json", *commands["facts"], "--out", tmp_path / "kept.jsonl")
    assert code == 0, said
    printed = only_object(text)
    assert (printed["command"], printed["out"]) == ("facts", str(tmp_path / "kept.jsonl"))
    assert printed["files"] == []
    assert len(load_facts(tmp_path / "kept.jsonl")) == printed["results"]["facts"]["facts"] == 12
    assert printed["results"]["facts"] == {
        "source": str(tmp_path / "facts.jsonl"),
        "facts": 12,
        "dropped": {},
        "relations": [
            {
                "relation": "country",
                "facts": 12,
                "answers": 2,
                "most_frequent": "Rome",
                "accepted": 0.5,
                "popularity": pytest.approx([1.1, 5.5, 9.9]),  # of 0 to 11, by linear interpolation
                "with_popularity": 12,
                "question": "What is the country of Town 0?",
                "statement": "The country of Town 0 is",
            }
        ],
    }
    _, sentences, _ = run(*commands["facts"])
    assert said.startswith(sentences)
    code, text, _ = run("--json", *commands["facts"])
    assert (code, only_object(text)["out"]) == (0, None)


def test_a_family_read_wrong_is_in_the_object_and_in_the_exit_code(
    commands: dict[str, tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text, said = run("--json", *commands["families"])
    results = only_object(text)["results"]["families"]
    assert (code, said) == (0, run(*commands["families"])[1])
    assert results["versions"]["transformers"] == metadata.version("transformers")
    ((family, kind),) = [(outcome["family"], outcome["kind"]) for outcome in results["outcomes"]]
    assert (family, kind) == ("gpt2", "exact")
    monkeypatch.setattr(
        check_families,
        "check_family",
        lambda name, crossed, dtype: FamilyOutcome(name, crossed, "WRONG", "rows are off"),
    )
    code, text, _ = run("--json", *commands["families"])
    assert code == 1
    wrong = {"family": "gpt2", "crossed": False, "kind": "WRONG", "detail": "rows are off"}
    assert only_object(text)["results"]["families"]["outcomes"] == [wrong]


def test_every_command_has_a_cheap_form_here_and_only_commands_have_results(
    commands: dict[str, tuple[object, ...]],
) -> None:
    assert sorted(commands) == sorted(NAMES)
    assert set(RESULTS) == set(NAMES) - {*WITHOUT_FOLDER, "context-critical", "scale-adapter", "reproduce"}


def test_the_page_names_the_results_of_every_command() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {
        command: set(re.findall(r"`(\w+)`", row[1])) for row in rows for command in re.findall(r"`([\w-]+)`", row[0])
    }
    for command, files in RESULTS.items():
        assert {Path(file).stem for file in files} == named[command] - {"attnbalance"}, command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing command."),
        (("curvature",), "No such command 'curvature'"),
        (("--jsom", "curve"), "No such option: --jsom"),
        (("curve", "a=b"), "Missing option"),
        (("demo", "--seed", -1), "Invalid value for '--seed'"),
        (("demo", "--limit", 3), "--relations and --limit choose among --facts"),
        (("facts", "nowhere.jsonl"), "no file at nowhere.jsonl"),
        (("facts", "a\udcff.jsonl"), "arguments must be UTF-8 text"),
        (("curve", "a=./nowhere", "--facts", "x" * 50_000 + ".jsonl", "--out", "out"), "characters)"),
    ],
)
def test_an_error_is_one_object_beside_the_message_and_code_2(
    arguments: tuple[object, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, said = run("--json", *arguments)
    printed = only_object(text)
    assert (code, list(printed)) == (2, ["error"])
    assert message in printed["error"]
    assert len(printed["error"]) < 2600  # as the message itself (see tests/cli/test_exits.py)
    plain = run(*arguments) if arguments else (2, "", said)
    assert plain == (2, "", said)  # the message of people is the same with --json
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_library_names_options_and_an_interrupt_says_how_to_go_on(
    commands: dict[str, tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.jsonl").write_text(
        json.dumps({"subject": "Oslo", "relation": "country", "answers": ["Norway"], "question": "Where is it?"}) + "\n"
    )
    code, text, said = run("--json", "facts", tmp_path / "bad.jsonl")
    assert code == 2
    assert "`--skip-bad`" in only_object(text)["error"]
    assert said == f"error: {only_object(text)['error']}\n"

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnbalance.data.sources.load_facts.load_facts", interrupt)
    code, text, _ = run("--json", *commands["facts"])
    assert (code, only_object(text)) == (2, {"error": "interrupted; run the same command again to go on"})


def test_an_error_of_ours_prints_no_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("attnbalance.demo.demo", lambda *_, **__: 1 / 0)
    result = RUNNER.invoke(app, ["--json", "demo", "--out", str(tmp_path)])
    assert (type(result.exception), result.stdout) == (ZeroDivisionError, "")


def test_what_libraries_and_other_processes_write_is_kept_off_standard_output(
    commands: dict[str, tuple[object, ...]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def noisy(*given: Any) -> object:
        print("of Python")
        os.write(1, b"of a library\n")
        subprocess.run(["echo", "of a process"], check=True)
        return load_facts(*given)

    monkeypatch.setattr("attnbalance.data.sources.load_facts.load_facts", noisy)
    code, text, said = run("--json", *commands["facts"])
    assert (code, only_object(text)["command"], said.startswith("of Python\n")) == (0, "facts", True)
    assert capfd.readouterr() == ("", "of a library\nof a process\n")
    os.write(1, b"afterwards\n")
    assert capfd.readouterr().out == "afterwards\n"


def test_numbers_that_are_not_finite_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"nan": math.nan, "deep": [{"inf": math.inf, "minus": [-math.inf, 1.5]}], "text": "NaN"}, "facts")
    assert only_object(capsys.readouterr().out) == {
        "nan": None,
        "deep": [{"inf": None, "minus": [None, 1.5]}],
        "text": "NaN",
    }


def test_of_several_processes_the_first_one_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    print_json({"a": 1}, "finetune")
    assert capsys.readouterr().out == ""
    print_json({"a": 1}, "facts")  # whose work is not shared
    assert capsys.readouterr().out == '{"a": 1}\n'
    monkeypatch.setenv("RANK", "0")
    print_json({"a": 1}, "finetune")
    assert capsys.readouterr().out == '{"a": 1}\n'


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--json", "curve"], True),
        (["--version", "--json"], True),
        (["curve", "--json"], False),
        (["curve", "--template", "--json"], False),
        ([], False),
    ],
)
def test_the_option_stands_before_the_command(arguments: list[str], wanted: bool) -> None:
    assert wants_json(arguments) == wanted


def test_the_option_after_the_command_is_refused() -> None:
    code, text, said = run("facts", "facts.jsonl", "--json")
    assert (code, text, "No such option: --json" in said) == (2, "", True)


def test_what_is_held_back_for_standard_output_does_not_reach_it() -> None:
    """Text that a library wrote to the old stream, and text in the buffer of the C library."""
    code = """
import ctypes, sys
from attnbalance.cli.json_output import _standard_output_as_error
old = sys.stdout
with _standard_output_as_error():
    old.write("early")
    ctypes.CDLL(None).printf(b"late")
print("{}")
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout == "{}\n"
    assert "early" in ended.stderr
    assert "late" in ended.stderr
