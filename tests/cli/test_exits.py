"""The command line's doors: whatever comes in, there is one short message, exit code 2, and nothing is written."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import run_command
from tiny import FACTS
from typer.testing import CliRunner

from attnbalance.cli import app
from attnbalance.cli.exits import show_warning
from attnbalance.files.work import locked, work_of

runner = CliRunner()
DIGITS, LONG = "9" * 5000, "x" * 100_000
LONGEST = 2600
"""A message of at most 2,000 characters, and typer's usage and frame around it."""


@pytest.fixture
def folder(tmp_path: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model, facts, a study and a link that leads to itself."""
    facts = [{"subject": f"Ann {i}", "relation": "city", "answers": [("Rome", "Oslo")[i % 2]]} for i in range(12)]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    (tmp_path / "alpaca.json").write_text(
        json.dumps([{"instruction": "Name a city.", "input": "", "output": "Oslo"}] * 8)
    )
    (tmp_path / "study.yaml").write_text("worlds: {a: {facts: synthetic}}\nmethods: {b: {}}")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


MODELS = {
    "curve": ("a=llama",),
    "salience": ("a=llama",),
    "explain": ("a=llama", "b=llama"),
    "finetune": ("llama", "--split", "whole"),
}
COMMANDS = {name: (name, *models, "--facts", "facts.jsonl") for name, models in MODELS.items()}
COMMANDS |= {"demo": ("demo",), "study": ("study", "study.yaml"), "reproduce": ("reproduce", "all")}
COMMANDS |= {
    "trajectory": ("trajectory", "llama", "--facts", "facts.jsonl"),
    "knowledge": ("knowledge", "a=llama", "--facts", "facts.jsonl"),
    "context": ("context", "a=llama", "--conflicts", "swapped:facts.jsonl"),
    "scale-adapter": ("scale-adapter", "llama", "0.5"),
    "instruct": ("instruct", "llama", "--data", "alpaca.json"),
    "context-critical": ("context-critical", "llama", "--data", "alpaca.json"),
}


def refused(folder: Path, *arguments: object) -> str:
    """What a command says that must be refused, on one line and without the frame."""
    before = sorted(folder.rglob("*"))
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert len(result.output) < LONGEST
    assert sorted(folder.rglob("*")) == before
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("seed", ["-1", str(2**32), DIGITS])
@pytest.mark.parametrize("command", ["curve", "salience", "explain", "finetune", "demo"])
def test_a_seed_outside_its_range_is_refused_by_every_command(command: str, seed: str, folder: Path) -> None:
    assert "'--seed'" in refused(folder, *COMMANDS[command], "--seed", seed, "--out", "out")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_links_to_itself_or_lies_with_nobody_is_refused_by_every_command(
    command: str, folder: Path
) -> None:
    for out in ("loop", "loop/out", "~nobody-of-this-name/out"):
        assert "cannot follow output" in refused(folder, *COMMANDS[command], "--out", out)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_without_a_name_is_refused_by_every_command(command: str, folder: Path) -> None:
    assert "`--out` must name a folder, got ''" in refused(folder, *COMMANDS[command], "--out", "")


@pytest.mark.parametrize("command", ["curve", "salience", "explain", "finetune"])
def test_the_current_folder_is_not_filled(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = folder / "empty"
    inside.mkdir()
    monkeypatch.chdir(inside)
    given = [str(folder / part) if part in ("llama", "facts.jsonl") else part for part in COMMANDS[command]]
    given = [part.replace("=llama", f"={folder / 'llama'}") for part in given]
    assert "is the current folder; name a folder in it" in refused(folder, *given, "--out", ".")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lr", "inf"), "`--lr` must be a finite number > 0"),
        (("--lr", "nan"), "`--lr` must be a finite number > 0"),
        (("--weight-decay", "inf"), "`--weight-decay` must be a finite number >= 0"),
        (("--weight-decay", "nan"), "--weight-decay"),
        (("--lora-rank", "2", "--lora-alpha", "inf"), "`--lora-alpha` must be a finite number > 0"),
        (("--lora-rank", "2", "--lora-alpha", "nan"), "`--lora-alpha` must be a finite number > 0"),
        (("--lora-rank", "2", "--lora-alpha", "0"), "`--lora-alpha` must be a finite number > 0"),
        (("--lora-alpha", "3"), "`--lora-alpha` scales LoRA adapters; give `--lora-rank` as well"),
        (("--peft", "{OFT}"), "--peft must be a JSON object, got '{OFT}'"),
        (("--peft", "[1]"), "--peft must be a JSON object, got '[1]'"),
        (("--peft", '{"r": 2, "r": 4}'), """--peft must be a JSON object, got '{"r": 2, "r": 4}': 'r' occurs twice"""),
        (("--peft", '{"peft_type": "OFFT"}'), "peft has no type 'OFFT'"),
        (("--peft", '{"peft_type": "OFT"}', "--lora-rank", "2"), "leave `--lora-rank` and `--lora-alpha` out"),
        (("--lora-rank", "1000000000"), "`--lora-rank` must be at most 65536"),
        (("--steps", str(10**13)), "`--steps` must be at most 1,000,000,000"),
        (("--train", f"q@{DIGITS}"), "expected a layer (4)"),
        (("--train", f"q@{DIGITS}.1"), "expected a layer (4)"),
        (("--train", f"q@0-{DIGITS}"), "expected a layer (4)"),
        (("--train", "q@4"), "layer 4 (in 'q@4'): the model has layers 0 to 1"),
        (("--train", "q@1.4"), "head 4 (in 'q@1.4'): layer 1 has heads 0 to 3"),
        (("--train", ""), "no part ''"),
        (("--dtype", ""), "`--dtype` must be float32"),
        (("--objective", "ce+" * 20_000), "an objective may have 2,000 characters"),
        (("--share", "nan"), "shares between 0 and 1"),
        (("--template", "\udcff {subject}"), "arguments must be UTF-8 text"),
        (("--relations", LONG), "no facts of relation 'xxx"),
        (("--limit", DIGITS), "--limit"),
        (("--split", LONG), "no split 'xxx"),
        (("--rank-by", LONG), "--rank-by must be one of"),
    ],
)
def test_options_of_finetune_that_nothing_could_be_trained_with_are_refused(
    options: tuple[str, ...], message: str, folder: Path
) -> None:
    assert message in refused(folder, *COMMANDS["finetune"], "--out", "out", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--device", ""), "cannot put the model on device ''"), (("--tokenizer", ""), "cannot load a tokenizer from")],
)
@pytest.mark.parametrize("command", ["curve", "salience", "explain"])
def test_an_empty_option_is_not_taken_for_none(
    command: str, options: tuple[str, str], message: str, folder: Path
) -> None:
    assert message in refused(folder, *COMMANDS[command], "--out", "out", *options)


@pytest.mark.parametrize(
    "arguments",
    [
        (LONG,),
        (f"--{LONG}",),
        ("curve", f"--{LONG}"),
        ("curve", f"a={LONG}", "--facts", "facts.jsonl", "--out", "out"),
        ("curve", "a=~nobody-of-this-name/x", "--facts", "facts.jsonl", "--out", "out"),
        ("curve", "a=b\udcff", "--facts", "facts.jsonl", "--out", "out"),
        ("curve", f"a=llama+{LONG}", "--facts", "facts.jsonl", "--out", "out"),
        ("curve", "a=llama", "--facts", f"{LONG}.jsonl", "--out", "out"),
        ("curve", "a=llama", "--facts", "facts.jsonl", "--out", LONG),
        ("curve", "a=llama", "--facts", "facts.jsonl", "--out", "out", "--device", LONG),
        ("finetune", "~nobody-of-this-name/x", "--facts", "facts.jsonl", "--split", "whole", "--out", "out"),
        ("study", LONG, "--out", "out"),
        ("study", "study.yaml", "--out", "out", "--worker", f"{DIGITS}/3"),
        ("reproduce", LONG, "--out", "out"),
        ("reproduce", "all", "--out", "out", "--seeds", str(10**12)),
    ],
    ids=lambda arguments: " ".join(argument[:20] for argument in arguments),
)
def test_a_message_stays_short_however_long_the_argument(arguments: tuple[str, ...], folder: Path) -> None:
    refused(folder, *arguments)


@pytest.mark.parametrize(
    "arguments", [("study", "/dev/zero"), ("demo", "--seed", "-1"), ("demo", "--facts", "facts.jsonl\udcff")]
)
def test_the_program_itself_ends_with_code_2_and_no_traceback(arguments: tuple[str, ...], folder: Path) -> None:
    command = [sys.executable, "-c", "from attnbalance.cli import main; main()", *arguments, "--out", "out"]
    ended = subprocess.run(command, capture_output=True, timeout=300)
    assert ended.returncode == 2, ended.stderr
    assert b"Traceback" not in ended.stderr
    assert not (folder / "out").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("redirected", ["> /dev/full", ">&-"])
@pytest.mark.parametrize("options", ["", "--json"])
@pytest.mark.parametrize("name", ["facts.jsonl", "none.jsonl"])
def test_standard_output_that_is_full_or_closed_gives_no_traceback(
    name: str, options: str, redirected: str, folder: Path
) -> None:
    (folder / "facts.jsonl").write_text(json.dumps(FACTS[0].as_dict()) + "\n")
    command = f"{sys.executable} -m attnbalance.cli {options} facts {folder / name} {redirected}"
    ended = subprocess.run(command, shell=True, capture_output=True, timeout=300)
    assert b"Traceback" not in ended.stderr
    quiet = (name, options, redirected) == ("facts.jsonl", "", ">&-")  # what nobody reads is not missed
    assert ended.returncode == (0 if quiet else 2), ended.stderr


def bad_rows(path: Path, **change: object) -> Path:
    path.write_text(json.dumps(FACTS[0].as_dict() | change) + "\n")
    return path


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"popularty": 1}, ["popularty", "popularity"]),
        ({"popularity": "many"}, ["'many'", "number"]),
        ({"answers": []}, ["answers"]),
        ({"question": "Where is it?"}, ["Zürich", "0 times", "--skip-bad"]),
        ({"question": "Is Zürich Zürich?"}, ["Zürich", "2 times", "--skip-bad"]),
        ({"question": "Where, " + "oh where, " * 90 + "is Zürich?"}, ["positions", "--skip-bad"]),
    ],
)
def test_bad_facts_give_one_message_and_code_2(
    llama_folder: Path, tmp_path: Path, change: dict[str, object], expected: list[str]
) -> None:
    path = bad_rows(tmp_path / "facts.jsonl", **({"subject_start": None} | change))
    out = tmp_path / "out"
    code, text = run_command("curve", f"a={llama_folder}", "--facts", path, "--out", out)
    assert code == 2
    assert text.startswith("error: ")
    assert all(part in text for part in expected), text
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--facts", "nowhere.jsonl"], "no file at nowhere.jsonl"),
        (["--facts", "facts.docx"], "must end in .json, .jsonl"),
        (["--relations", "colour"], "no facts of relation 'colour'"),
        (["--template", "{name}?"], "{name}"),
        (["--template", "Hello"], "must name the subject once"),
        (["--reduce", "mean"], "--reduce must be one of max, max-of-mean, sum, got 'mean'"),
        (["--dtype", "int7"], "`--dtype` must be float32"),
        (["--chat"], "has no chat template"),
        (["--tokenizer", "./nowhere"], "cannot load a tokenizer from ./nowhere"),
    ],
)
def test_bad_options_give_one_message_and_code_2(
    llama_folder: Path, facts_file: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    given = ["--facts", facts_file, *arguments] if "--facts" not in arguments else arguments
    code, text = run_command("curve", f"a={llama_folder}", *given, "--out", tmp_path / "out")
    assert code == 2
    assert text.startswith("error: ")
    assert expected in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["a=./nowhere", "a=", "=x"])
def test_a_model_that_is_not_there_gives_one_message_and_code_2(facts_file: Path, tmp_path: Path, model: str) -> None:
    code, text = run_command("curve", model, "--facts", facts_file, "--out", tmp_path / "out")
    assert code == 2
    assert text.startswith("error: ")


def test_a_folder_that_cannot_be_written_gives_code_2(llama_folder: Path, facts_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, text = run_command("curve", f"a={llama_folder}", "--facts", facts_file, "--out", tmp_path / "file" / "out")
    assert code == 2
    assert str(tmp_path / "file") in text


def test_a_full_disk_gives_code_2_and_nothing_half_written(
    llama_folder: Path, facts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("attnbalance.comparison.compare.write_report", full)
    code, text = run_command("curve", f"a={llama_folder}", "--facts", facts_file, "--out", tmp_path / "out")
    assert code == 2
    assert "No space left on device; make room and run the same command again to" in text
    assert not (tmp_path / "out").exists()


LIMITED = """
import resource, sys
from attnbalance.cli import main
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
main()
"""


@pytest.mark.parametrize("file", ["model", "optimizer"])
def test_a_limit_of_file_sizes_gives_one_message_and_code_2(
    llama_folder: Path, facts_file: Path, tmp_path: Path, file: str
) -> None:
    size = (llama_folder / "model.safetensors").stat().st_size  # the optimizer's state is twice as large
    limit, out = size - 1 if file == "model" else size + 2000, tmp_path / "out"
    options = ("--split", "whole", "--steps", 2, "--batch-size", 4, "--checkpoint-every", 2, "--out", out)
    command = ["finetune", llama_folder, "--facts", facts_file, *options]
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, (limit, *command))], capture_output=True, text=True
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("error: cannot write ") == 1
    assert "room and run the same command again to" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [path.name for path in tmp_path.glob("*out*")] == []


def test_a_command_on_a_folder_at_which_another_is_at_work_names_it(
    llama_folder: Path, facts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ("curve", f"a={llama_folder}", "--facts", facts_file, "--out", out)
    with locked(work_of(out)):
        code, text = run_command(*command)
    assert code == 2
    assert text.startswith(f"error: process {os.getpid()} on {socket.gethostname()} is at work on {work_of(out)}")
    code, text = run_command(*command)
    assert code == 0, text


def test_files_whose_names_look_like_ours_are_refused_or_left_alone(
    llama_folder: Path, facts_file: Path, tmp_path: Path
) -> None:
    out, precious = tmp_path / "out", [tmp_path / f".out.{end}" / "precious" for end in ("tmp", "old", "partial")]
    for path in precious:
        path.parent.mkdir()
        path.touch()
    command = ("curve", f"a={llama_folder}", "--facts", facts_file, "--out", out)
    code, text = run_command(*command)
    assert code == 2
    assert f"{tmp_path}/.out.partial is in the way" in text
    assert all(path.exists() for path in precious)
    precious.pop().parent.rename(tmp_path / "moved")
    code, text = run_command(*command)
    assert code == 0, text
    assert all(path.exists() for path in precious)


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("attnbalance.demo.demo", lambda *_, **__: 1 / 0)
    assert isinstance(runner.invoke(app, ["demo", "--out", str(tmp_path)]).exception, ZeroDivisionError)


def test_control_c_gives_one_message_and_code_2(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from attnbalance.cli import main; main()", "demo", "--out", str(out)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background jobs
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "attnbalance.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "error: interrupted; run the same command again to go on" in message
    assert "Traceback" not in message


def test_a_warning_is_one_line_without_the_source_and_developers_warnings_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_warning(UserWarning("the base completes 0%"), UserWarning, "loop.py", 104)
    show_warning(FutureWarning("renamed in v6"), FutureWarning, "utils.py", 1)
    assert capsys.readouterr().err == "warning: the base completes 0%\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_processes_the_first_one_prints(
    facts_file: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("attnbalance.comparison.compare.compare", lambda *_, **__: "the answer")
    code, text = run_command("curve", "a=absent", "--facts", facts_file, "--out", facts_file.parent / "out")
    assert code == 0, text
    assert ("the answer" in text) == (rank == "0")
    assert "facts of" in run_command("facts", facts_file)[1]  # each process its own
    code, text = run_command("curve", "a=absent", "--facts", "absent.jsonl", "--out", "out")
    assert (code, "absent.jsonl" in text) == (2, True)  # an error is of the process that it ends
