"""Reproducing figures: cells run once, an interrupted run resumes, processes change no result, bad input is refused."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import invented_sources
import pytest

from attnbalance.errors import DataError, ModelError, OutputError
from attnbalance.files.work import locked
from attnbalance.papers import reproduce as reproduction
from attnbalance.papers.figure import Cell, Claim, Panel, PaperFigure, Series, by_seed
from attnbalance.papers.finetuned import LOSS
from attnbalance.papers.reproduce import figures, joined, reproduce
from attnbalance.papers.sources import Sources
from attnbalance.statistics.intervals import seed_interval

RUNS: list[str] = []


def run(settings: Mapping) -> dict[str, float]:
    if settings["facts"] == "absent":
        raise DataError("there are no such facts")
    RUNS.append(f"{settings['k']}-{settings['seed']}")
    return {"x": settings["k"] + 0.1 * settings["seed"]}


def figure(name: str, ks: tuple[int, ...]) -> PaperFigure:
    return PaperFigure(
        name,
        "Someone 2024",
        "<Figure 1>",
        "About $x$ & <b>.",
        lambda scale, seeds, sources: [
            Cell(f"cell-{k}-{s}", {"seed": s, "k": k, "facts": sources.facts if k == 9 else ""})
            for k in ks
            for s in seeds
        ],
        run,
        lambda results: [
            Panel("x", "k", "x", (Series("a", tuple(ks), tuple(seed_interval(values(results, k)) for k in ks)),))
        ],
        lambda results: [
            Claim("x is <above> 0", "x", values(results, ks[0]), place="<Figure 1>"),
            Claim("x is below 0", "minus x", tuple(-x for x in values(results, ks[0])), place="Section 2"),
            Claim("x is above 0.1", "x", values(results, 0), place="Section 2", least=0.1),
            Claim("x is large", "x", values(results, 0), least=100, level=True),
        ],
    )


def values(results, k: int) -> tuple[float, ...]:
    return by_seed(results, lambda result: result.values["x"], k=k)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    RUNS.clear()
    made = {
        made_up.name: made_up
        for made_up in (figure("first", (1, 0)), figure("second", (2, 1, 0)), figure("real", (9, 0)))
    }
    monkeypatch.setattr(reproduction, "figures", lambda: made)


def test_each_cell_runs_once_and_figures_share_what_they_have_in_common(tmp_path: Path) -> None:
    answer = reproduce(["first", "second"], tmp_path / "out", seeds=3, workers=1)
    assert sorted(RUNS) == sorted(f"{k}-{s}" for k in (0, 1, 2) for s in range(3))
    counts = "of 6 statements in the paper's setting 2 seen, 2 opposite, 0 absent, 2 cannot tell"
    assert answer.startswith(f"Someone 2024: {counts}.")
    content = json.loads((tmp_path / "out" / "first.json").read_text())
    assert [claim["verdict"] for claim in content["claims"]] == ["seen", "opposite", "cannot tell", "absent"]
    assert content["claims"][0]["by seed"] == pytest.approx([1.0, 1.1, 1.2])
    assert "seen         x is <above> 0 (<Figure 1>): x +1.1 [+0.852, +1.35]" in content["answer"]
    assert content["panels"][0]["series"][0]["y"][0]["mean"] == pytest.approx(1.1)
    assert content["versions"]["torch"]
    RUNS.clear()
    for path in (tmp_path / "out" / "cells").iterdir():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 10.0}))
    assert reproduce(["second", "first"], tmp_path / "out", seeds=3, workers=1) == answer
    assert RUNS == []
    assert json.loads((tmp_path / "out" / "first.json").read_text())["seconds"] == 60.0  # of its own six cells
    reproduce(["first"], tmp_path / "out", seeds=4, workers=1)
    assert sorted(RUNS) == ["0-3", "1-3"]  # a seed more is that seed's work


def test_a_folder_is_of_one_set_of_sources(tmp_path: Path) -> None:
    reproduce(["real"], tmp_path / "out", seeds=2, facts="mine")
    with pytest.raises(
        OutputError, match=r"out were run with `facts` mine, got other; leave it out, or name a new folder"
    ):
        reproduce(["first"], tmp_path / "out", seeds=2, facts="other")
    reproduce(["first"], tmp_path / "out", seeds=2, facts="./mine")
    assert "<h2" in (page := (tmp_path / "out" / "report.html").read_text())
    assert page.count('id="real"') == page.count('id="first"')


def test_workers_take_every_nth_cell_and_the_last_one_writes_the_figures(tmp_path: Path) -> None:
    whole = reproduce(["second"], tmp_path / "whole", seeds=3)
    RUNS.clear()
    first = reproduce(["second"], tmp_path / "out", seeds=3, worker="1/2")
    assert "5 of 9 cells are left to other workers" in first
    assert not list((tmp_path / "out").glob("second.*"))
    taken = set(RUNS)
    assert len(taken) == 4
    assert reproduce(["second"], tmp_path / "out", seeds=3, worker="0/2") == whole
    assert len(RUNS) == len(set(RUNS)) == 9
    assert (tmp_path / "out" / "second.json").exists()
    with pytest.raises(DataError, match="a worker as I/N"):
        reproduce(["second"], tmp_path / "out", seeds=3, worker="2/2")


def test_two_workers_are_at_work_in_one_folder_and_two_of_one_part_are_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    reproduce(["first"], out, seeds=2)
    with locked(out / "workers" / "0-of-2"):
        assert "cells are left" in reproduce(["second"], out, seeds=3, worker="1/2")
        with pytest.raises(OutputError, match="is at work on"):
            reproduce(["second"], out, seeds=3, worker="0/2")


def test_a_figure_that_cannot_be_run_hides_no_other_from_any_worker(tmp_path: Path) -> None:
    answers = [reproduce(["all"], tmp_path, seeds=2, facts="absent", worker=worker) for worker in ("0/2", "1/2", "0/2")]
    assert (tmp_path / "first.json").exists()
    assert (tmp_path / "second.json").exists()
    assert not (tmp_path / "real.json").exists()
    assert "not run: there are no such facts" in answers[-1]
    assert "left to other workers" not in answers[-1]


def language(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure of a language model beside another one."""

    def cells(scale: str, seeds, sources: Sources) -> list[Cell]:
        about = {"k": 2, "facts": "", "model": sources.model}
        return [Cell(f"cell-{sources.model}-{seed}", {"seed": seed, **about}) for seed in seeds]

    asked = replace(figure("language", (2,)), cells=cells, claims=lambda results: [], needs=("model",))
    monkeypatch.setattr(reproduction, "figures", lambda: {"first": figure("first", (1, 0)), "language": asked})


def test_a_figure_of_a_language_model_is_left_out_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    language(monkeypatch)
    needed = "a pretrained language model is needed (a folder, GGUF file or Hub id): pass `model`"
    with pytest.raises(DataError, match=re.escape(f"language: {needed}")):
        reproduce(["language"], tmp_path / "out", seeds=2)
    assert f"not run: {needed}" in reproduce(["all"], tmp_path / "out", seeds=2)
    assert sorted(RUNS) == ["0-0", "0-1", "1-0", "1-1"]
    assert needed not in reproduce(["all"], tmp_path / "out", seeds=2, model="some-model")
    assert {"2-0", "2-1"} < set(RUNS)


def test_the_model_of_the_folders_cells_is_taken_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    language(monkeypatch)
    reproduce(["language"], tmp_path, seeds=2, model="some-model")
    reproduce(["first"], tmp_path, seeds=2)
    page = (tmp_path / "report.html").read_text()
    assert 'id="language"' in page
    assert "<td>language model</td><td>some-model</td>" in page
    reproduce(["language"], tmp_path, seeds=3)
    assert (tmp_path / "cells" / "cell-some-model-2.json").exists()


def test_cells_trained_in_the_precisions_of_several_machines_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    language(monkeypatch)
    asked = reproduction.figures()["language"]

    def cells(scale: str, seeds, sources: Sources) -> list[Cell]:
        plain = [Cell(cell.name, {**cell.settings, "training": {}}) for cell in asked.cells(scale, seeds, sources)]
        named = {} if sources.mixed_precision is None else {"mixed_precision": sources.mixed_precision}
        return [Cell(cell.name, {**cell.settings, **named}) for cell in plain]

    trained = replace(asked, cells=cells, run=lambda settings: run(settings) | {LOSS: 1.0})
    monkeypatch.setattr(reproduction, "figures", lambda: {"language": trained})
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    reproduce(["language"], tmp_path / "out", seeds=2, model="some-model")
    assert not recwarn.list
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    with pytest.warns(UserWarning, match=r"cells were trained in different mixed precisions, .* \(2 bf16, 1 no\)"):
        reproduce(["language"], tmp_path / "out", seeds=3, model="some-model")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    reproduce(["language"], tmp_path / "named", seeds=2, model="some-model", mixed_precision="no")
    saved = [json.loads(path.read_text()) for path in (tmp_path / "named" / "cells").glob("*.json")]
    assert [cell["mixed_precision"] for cell in saved] == ["no", "no"]


def test_an_empty_source_is_not_taken_for_none(tmp_path: Path) -> None:
    for name in ("facts", "model", "instructions", "conflicts"):
        with pytest.raises(DataError, match=f"`{name}` must name something, got an empty text"):
            reproduce(["first"], tmp_path / "out", seeds=2, **{name: ""})


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reproduce(["second"], tmp_path / "whole", seeds=3, workers=1)
    RUNS.clear()
    real = reproduction.write_cell

    def stops(*about: Any) -> None:
        real(*about)
        if len(RUNS) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(reproduction, "write_cell", stops)
    with pytest.raises(KeyboardInterrupt):
        reproduce(["second"], tmp_path / "out", seeds=3, workers=1)
    monkeypatch.setattr(reproduction, "write_cell", real)
    assert reproduce(["second"], tmp_path / "out", seeds=3, workers=1) == whole
    assert len(RUNS) == len(set(RUNS)) == 9


@pytest.mark.parametrize("text", ["", '{"settings": {'])
def test_a_cell_that_cannot_be_read_is_run_again(tmp_path: Path, text: str) -> None:
    whole = reproduce(["first"], tmp_path / "out", seeds=2, workers=1)
    (tmp_path / "out/cells/cell-1-0.json").write_text(text)
    RUNS.clear()
    assert reproduce(["first"], tmp_path / "out", seeds=2, workers=1) == whole
    assert RUNS == ["1-0"]


def test_figures_of_which_none_could_be_run_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    reproduce(["real"], tmp_path / "out", seeds=2)
    shutil.rmtree(tmp_path / "out/cells")
    (tmp_path / "out/cells").write_text("in the way")
    with pytest.raises(OutputError, match="cannot write"):
        reproduce(["first", "second"], tmp_path / "out", seeds=2, workers=1)


@pytest.mark.parametrize(
    "change", [{"versions": None}, {"values": 3}, {"values_sha256": None}, {"seconds": "1"}, {"settings": []}]
)
def test_a_cell_that_was_changed_is_refused_by_the_name_of_its_file(tmp_path: Path, change: dict) -> None:
    reproduce(["first"], tmp_path / "out", seeds=2, workers=1)
    path = tmp_path / "out/cells/cell-1-0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(OutputError, match=f"{path} was changed: '{next(iter(change))}' must be .* remove {path} and"):
        reproduce(["first"], tmp_path / "out", seeds=2, workers=1)


@pytest.mark.parametrize("changed", [{"y": 1.0}, {}, {"x": "1"}, {"x": [1.0]}, {"x": 1.5}, {"x": math.nan}])
def test_a_cell_whose_values_were_changed_is_refused_by_the_name_of_its_file(tmp_path: Path, changed: dict) -> None:
    reproduce(["first"], tmp_path / "out", seeds=2, workers=1)
    path = tmp_path / "out/cells/cell-1-0.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"values": changed}))
    expected, got = content["values_sha256"], hashlib.sha256(json.dumps(changed).encode()).hexdigest()
    message = (
        f"{path} was changed: 'values' must have SHA-256 {expected}, got {got}; restore the file, or remove {path}"
    )
    with pytest.raises(OutputError, match=re.escape(message)):
        reproduce(["first"], tmp_path / "out", seeds=2, workers=1)
    path.write_text(json.dumps(content))  # on one line
    assert reproduce(["first"], tmp_path / "out", seeds=2, workers=1)


def test_the_page_holds_every_claim_and_escapes_what_it_is_told(tmp_path: Path) -> None:
    reproduce(["all"], tmp_path / "out", seeds=2, facts="absent", workers=1, command="attnbalance reproduce <all>")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "x is &lt;above&gt; 0" in page
    assert "Someone 2024, &lt;Figure 1&gt;.</strong> About $x$ &amp; &lt;b&gt;." in page
    assert "attnbalance reproduce &lt;all&gt;" in page
    assert "2 seen, 2 opposite, 0 absent, 2 cannot tell. Not run: real." in page
    assert "<td>Someone 2024</td><td>2</td><td>2</td><td>0</td><td>2</td><td>0</td><td>2</td>" in page
    assert page.count("<svg") == 2
    assert "Not run: there are no such facts" in page
    assert 'src="http' not in page
    assert 'href="http' not in page
    assert "<script" not in page


def test_figures_that_cannot_be_run_for_other_reasons_are_all_named() -> None:
    error, other = ModelError("no such model"), OutputError("disk full")
    assert joined({"first": error, "second": ModelError("no such model")}) is error
    assert str(joined({"first": error, "second": other})) == "first: no such model; second: disk full"


def test_a_figure_whose_facts_cannot_be_had_raises_alone_and_is_told_among_others(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such facts"):
        reproduce(["real"], tmp_path / "alone", seeds=2, facts="absent", workers=1)
    answer = reproduce(["real", "first"], tmp_path / "out", seeds=2, facts="absent", workers=1)
    assert "real (Someone 2024, <Figure 1>)\n  not run: there are no such facts" in answer
    assert not (tmp_path / "out" / "real.json").exists()


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["third"], {}, "no figure 'third'; choose from all, first, second, real"),
        ([], {}, "no figure"),
        (["all"], {"scale": "huge"}, "`scale` must be tiny, small or paper.*got 'huge', 5 and 1"),
        (["all"], {"seeds": 1}, "`seeds` at least 2.*got 'small', 1 and 1"),
        (["first"], {"workers": 0}, "`workers` at least 1; got 'small', 5 and 0"),
        (["first"], {"mixed_precision": "bf17"}, "`mixed_precision` must be no or bf16, got 'bf17'"),
    ],
)
def test_what_cannot_be_run_is_refused(names: list[str], options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        reproduce(names, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_scale_or_other_settings_is_refused(tmp_path: Path) -> None:
    reproduce(["first"], tmp_path, seeds=2)
    with pytest.raises(OutputError, match="scale is 'small' there, 'paper' here"):
        reproduce(["first"], tmp_path, seeds=2, scale="paper")
    for old, new in (('"k": 1', '"k": 5'), ('"attnbalance": "0', '"attnbalance": "9')):
        path = tmp_path / "cells" / "cell-1-0.json"
        before = path.read_text()
        path.write_text(before.replace(old, new))
        with pytest.raises(OutputError, match=r"1 files in .* another version \(first: cell-1-0.json\)"):
            reproduce(["first"], tmp_path, seeds=2)
        path.write_text(before)
    assert reproduce(["first"], tmp_path, seeds=2)


def test_a_folder_of_something_else_is_refused_before_its_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "x.json").write_text('{"settings": 3}')
    with pytest.raises(OutputError, match="holds other things .*; name a new or empty folder"):
        reproduce(["first"], tmp_path, seeds=2)
    assert (tmp_path / "cells" / "x.json").exists()


def test_facts_may_come_later(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such facts"):
        reproduce(["real"], tmp_path, seeds=2, facts="absent")
    reproduce(["first"], tmp_path, seeds=2, facts="wherever")
    assert "seen" in reproduce(["real"], tmp_path, seeds=2, facts="there")


def test_the_page_is_about_all_figures_of_the_folder_and_the_answer_about_those_asked_for(tmp_path: Path) -> None:
    reproduce(["first"], tmp_path, seeds=2)
    answer = reproduce(["second"], tmp_path, seeds=2)
    page = (tmp_path / "report.html").read_text()
    assert "of 6 statements" in page
    assert 'id="first"' in page
    assert 'id="second"' in page
    assert answer.startswith("Someone 2024: of 3 statements")
    assert "first" not in answer


def test_numbers_that_are_not_finite_are_an_error_that_names_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(figure("broken", (1,)), run=lambda settings: {"x": float("nan")})
    monkeypatch.setattr(reproduction, "figures", lambda: {"broken": broken})
    with pytest.raises(ModelError, match="cell-1-0 gave numbers that are not finite"):
        reproduce(["broken"], tmp_path, seeds=2)
    assert not list((tmp_path / "cells").glob("cell*"))


def test_an_error_of_ours_says_what_it_was_working_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(figure("broken", (1,)), run=lambda settings: 1 / 0)
    monkeypatch.setattr(reproduction, "figures", lambda: {"broken": broken})
    with pytest.raises(ZeroDivisionError) as caught:
        reproduce(["broken"], tmp_path, seeds=2)
    assert caught.value.__notes__ == ["while working on cell-1-0, for broken"]


FAST = ["ghosal-fig6", "--seeds", "2", "--workers", "2"]


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "attnbalance.cli", "reproduce", *options, "--out", str(out)]


def begun(out: Path) -> subprocess.Popen:
    """Two processes at work on Figure 6, after the first of its results."""
    process = subprocess.Popen(
        command(out, *FAST),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background jobs
    )
    while process.poll() is None and not list((out / "cells").glob("[!.]*.json")):
        time.sleep(0.05)
    return process


def left_behind(group: int) -> bool:
    """Whether any process of a session is left after ten seconds."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.usefixtures("real_figures")
def test_two_processes_killed_on_the_way_leave_none_behind_and_give_what_one_gives(tmp_path: Path) -> None:
    killed, cells = begun(tmp_path / "two"), tmp_path / "two" / "cells"
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not left_behind(killed.pid)  # the workers end with their parent
    assert 0 < len(list(cells.glob("[!.]*.json"))) < 8
    printed = subprocess.check_output(command(tmp_path / "two", *FAST), text=True)
    answer = reproduce(["ghosal-fig6"], tmp_path / "one", seeds=2)
    assert answer in printed
    first, second = (json.loads((tmp_path / name / "ghosal-fig6.json").read_text()) for name in ("one", "two"))
    assert all(saved.pop("seconds") > 0 for saved in (first, second))
    assert first == second


def test_control_c_ends_all_at_once_with_one_message_and_code_2(tmp_path: Path) -> None:
    running = begun(tmp_path / "out")
    os.killpg(running.pid, signal.SIGINT)
    said, _ = running.communicate(timeout=30)
    assert running.returncode == 2
    assert "interrupted" in said
    assert not left_behind(running.pid)


@pytest.fixture
def real_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduction, "figures", figures)


@pytest.mark.usefixtures("real_figures")
def test_every_figure_of_the_papers_is_known_by_a_name_of_its_own(llama_folder: Path) -> None:
    assert set(reproduction.figures()) >= {"ghosal-fig2a", "ghosal-fig2b", "ghosal-fig2c", "ghosal-fig6"}
    assert set(reproduction.figures()) >= {"xu-chen-fig2", "xu-chen-table3", "xu-chen-steps", "xu-chen-popqa"}
    assert set(reproduction.figures()) >= {"goyal-prop1", "goyal-thm1"}
    for paper_figure in reproduction.figures().values():
        for scale in reproduction.SCALES:
            cells = paper_figure.cells(
                scale,
                range(5),
                Sources("popqa", str(llama_folder), "rows.json", "conflicts.json", "questions.csv", "squad.json"),
            )
            assert len({cell.name for cell in cells}) == len(cells)
            assert {cell.settings["seed"] for cell in cells} == set(range(5))
            json.dumps([dict(cell.settings) for cell in cells])


@pytest.mark.usefixtures("real_figures")
def test_cells_name_as_sources_only_what_was_given(llama_folder: Path) -> None:
    """A folder takes its sources from its cells: a simulation's own settings must not stand under their names."""
    sources = Sources("popqa", str(llama_folder), "rows.json", "conflicts.json", "questions.csv", "squad.json")
    given = {field.name: getattr(sources, field.name) for field in fields(sources)}
    for paper_figure in reproduction.figures().values():
        for cell in paper_figure.cells("tiny", range(2), sources):
            named = {name: cell.settings[name] for name in given if name in cell.settings}
            assert named == {name: given[name] for name in named}, cell.name


@pytest.mark.usefixtures("real_figures")
def test_a_wrong_name_on_the_command_line_lists_the_figures_and_exits_with_2(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path / "out", "fig2"), capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "no figure 'fig2'; choose from all, ghosal-fig2a" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def tiny_sources(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """Real facts, conflicts, questions and a small trained model; invented ones where these are not beside the code."""
    try:
        paths = {name: request.getfixturevalue(name) for name in ("popqa", "stories", "world_facts", "mmlu")}
    except pytest.skip.Exception:
        files = {name: getattr(invented_sources, name)(tmp_path) for name in ("popqa_table", "world_facts", "choices")}
        model = request.getfixturevalue("long_llama_folder")
        named = (f"popqa:{files['popqa_table']}", model, files["world_facts"], files["choices"])
    else:
        questions = paths["mmlu"] / "val" / "prehistory_val.csv"
        named = (f"popqa:{paths['popqa']}", paths["stories"], paths["world_facts"], questions)
    return dict(zip(("facts", "model", "conflicts", "choices"), map(str, named), strict=True))


@pytest.mark.usefixtures("real_figures")
def test_all_figures_run_at_the_tiny_scale_and_none_of_their_numbers_counts(
    tmp_path: Path, tiny_sources: dict[str, str]
) -> None:
    """About two minutes: every cell of every figure."""
    rows = [
        {"instruction": f"Say word {i}.", "input": f"The word is cat {i}." if i % 2 else "", "output": f"cat {i}"}
        for i in range(100)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    asked = [
        {"question": f"Which word is {i}?", "answers": [{"text": f"cat {i}", "answer_start": 12}]} for i in range(50)
    ]
    squad = [
        {
            "title": "t",
            "paragraphs": [{"context": f"The word is {q['answers'][0]['text']}.", "qas": [q]} for q in asked],
        }
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"version": "1.1", "data": squad}))
    given: dict[str, Any] = {
        "scale": "tiny",
        "seeds": 2,
        "instructions": str(tmp_path / "rows.json"),
        "squad": str(tmp_path / "squad.json"),
        **tiny_sources,
    }
    answer = reproduce(["all"], tmp_path / "out", **given)
    assert "not run" not in answer
    page = (tmp_path / "out" / "report.html").read_text()
    for name in reproduction.figures():
        saved = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert saved["claims"]
        assert not any(claim["scored"] for claim in saved["claims"])
        assert f'<h2 id="{name}">' in page
        assert f'<a href="#{name}">' in page  # in the table of all figures and tables
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").glob("*.json")}
    assert "not run" not in reproduce(["all"], tmp_path / "out", **given)  # a rerun finds all cells
    assert "not run" not in reproduce(["all"], tmp_path / "out", scale="tiny", seeds=2)  # their sources, too
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").glob("*.json")} == cells
