"""How stored outputs of the tutorials are made and compared, and what all stored notebooks keep to; no kernel runs."""

from __future__ import annotations

import base64
import io
import statistics

import nbformat
import numpy as np
import pytest
import run_tutorials
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image
from run_tutorials import (
    EXACT,
    MOST_BYTES,
    PORTABLE,
    TRAINED,
    TUTORIALS,
    as_stored,
    compared,
    differences,
    named,
    small_png,
    text_of,
    tolerance_of,
    without_paths,
)

NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))


def notebook(*outputs, **metadata):
    """A notebook of one cell with these outputs."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    cells = [new_code_cell("x", outputs=list(outputs), metadata=metadata)]
    return new_notebook(cells=cells, metadata={"kernelspec": kernel, "widgets": {"state": {}}})


def printed(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def shown(**data):
    return new_output("display_data", data={kind.replace("_", "/", 1): value for kind, value in data.items()})


def noise(size):
    """A PNG that compresses badly, in base64."""
    pixels = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def disagreements(stored, fresh, tolerance):
    """What the comparison says of two texts that a cell printed; empty if they agree."""
    return "".join(differences(compared(notebook(printed(stored)), notebook(printed(fresh))), tolerance))


class TestComparison:
    def test_equal_texts_agree_exactly(self):
        text = "layer 0: +0.08 [-0.04, +0.19]\nright: 50%"
        assert not disagreements(text, text, EXACT)

    @pytest.mark.parametrize(
        ("stored", "fresh"),
        [
            ("share 0.50 [0.41, 0.59]", "share 0.99 [0.90, 1.00]"),  # within 0.5
            ("kept 20% of 96 facts", "kept 69% of 96 facts"),  # within 50 points
            ("43 lost, 17 gained", "63 lost, 22 gained"),  # within half of the larger
            ("gain 0.1, p = 0.9", "gain 0.1, p = 1e-05"),
            ("  x   1", "x 1"),  # the width of gaps
        ],
    )
    def test_what_training_with_other_rounding_may_change_agrees(self, stored, fresh):
        assert not disagreements(stored, fresh, TRAINED)

    @pytest.mark.parametrize(
        ("stored", "fresh", "reason"),
        [
            ("share 0.20", "share 0.71", "0.20 was stored, 0.71 came"),
            ("kept 20%", "kept 71%", "20 was stored, 71 came"),
            ("44,800 statements", "20,000 statements", "44,800 was stored, 20,000 came"),
            ("change +0.3", "change -0.3", "+0.3 was stored, -0.3 came"),
            ("1e-3 nats", "1e0 nats", "1e-3 was stored, 1e0 came"),
            ("a 1\nb 2\nc 3", "a 1\nd 2\ne 3", "2 of 3 lines have other words"),
        ],
    )
    def test_more_than_the_tolerance_is_told_with_both_texts(self, stored, fresh, reason):
        told = disagreements(stored, fresh, TRAINED)
        assert told.startswith(f"cell 0: {reason}")
        assert told.endswith(f"--- stored\n{stored}\n--- fresh\n{fresh}")

    def test_an_exact_notebook_allows_the_last_digit_and_no_other_words(self):
        assert not disagreements("eta* = 2.71", "eta* = 2.72", EXACT)
        assert "2.74 came" in disagreements("eta* = 2.71", "eta* = 2.74", EXACT)
        assert "other words" in disagreements("holds: True", "holds: False", EXACT)

    def test_one_reworded_line_of_four_is_allowed_after_training_and_does_not_shift_the_pairs(self):
        assert not disagreements("a 1\nb 20\nc 300", "new line\na 1\nb 20\nc 300", TRAINED)

    def test_a_number_inside_a_name_is_a_word(self):
        assert "other words" in disagreements("L2N51 +0.1", "L2N52 +0.1", TRAINED)

    def test_theory_is_compared_exactly_and_training_is_not(self):
        assert tolerance_of("06_one_layer_theory.ipynb") == EXACT
        assert tolerance_of("02_two_checkpoints.ipynb") == TRAINED

    def test_a_notebook_without_stored_outputs_differs(self):
        cells = compared(notebook(), notebook(printed("mean 0.9")))
        assert "1 of 1 lines have other words" in "".join(differences(cells, TRAINED))

    def test_figures_and_warnings_are_not_compared(self):
        cell = notebook(printed("w", "stderr"), shown(image_png=noise(4), text_plain="<Figure>")).cells[0]
        assert text_of(cell) == ""


class TestStripping:
    def test_timings_and_widget_states_are_removed(self):
        stored = as_stored(notebook(execution={"iopub.execute_input": "2020-01-01"}, tags=["keep"]))
        assert stored.cells[0].metadata == {"tags": ["keep"]}
        assert set(stored.metadata) == {"kernelspec", "language_info"}

    def test_the_notebook_that_is_given_stays_as_it_is(self):
        given = notebook(printed("/tmp/tmpab12/x"), execution={})
        before = nbformat.from_dict(given)
        as_stored(given)
        assert given == before

    def test_pieces_of_printed_text_are_joined(self):
        outputs = printed("a\n"), printed("b\n"), printed("100%|####|\n", "stderr"), printed("c\n")
        [output] = as_stored(notebook(*outputs)).cells[0].outputs
        assert output.text == "a\nb\nc\n"

    def test_only_warnings_of_this_package_are_kept_of_stderr_without_their_folder(self):
        text = (
            "100%|####| 7/7 [00:01<00:00]\n"
            "/home/me/attnbalance/finetuning/loop.py:7: UserWarning: 12 are left out\n  warnings.warn(text)\n"
            "/opt/lib/other.py:1: FutureWarning: soon\n"
        )
        [output] = as_stored(notebook(printed(text, "stderr"))).cells[0].outputs
        assert output.text == "attnbalance/finetuning/loop.py:7: UserWarning: 12 are left out\n"

    def test_the_time_that_a_trainer_took_is_removed(self):
        text = "before\n{'train_runtime': '3.1', 'train_loss': '1.1'}\nafter\n"
        assert as_stored(notebook(printed(text))).cells[0].outputs[0].text == "before\nafter\n"

    def test_temporary_folders_get_one_name(self):
        assert without_paths("a=/tmp/tmpab12_x/FT-Top 'b'") == "a=/tmp/folder/FT-Top 'b'"

    def test_widgets_scripts_and_memory_addresses_are_not_stored(self):
        widget = new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {}, "text/plain": "w"})
        script = shown(text_html="<script>1</script>", text_plain="<html at 0x7f>")
        assert as_stored(notebook(widget, script)).cells[0].outputs == []

    def test_a_large_figure_loses_colours_and_a_small_one_stays_to_the_byte(self):
        small, large = noise(20), noise(200)
        assert len(base64.b64decode(large)) > MOST_BYTES
        assert small_png(small) == small
        image = base64.b64decode(small_png(large))
        assert len(image) <= MOST_BYTES
        assert Image.open(io.BytesIO(image)).size == (200, 200)

    def test_a_figure_that_stays_too_large_is_refused(self):
        with pytest.raises(ValueError, match="at most 100000 bytes"):
            small_png(noise(400))


class TestNames:
    def test_a_name_is_the_beginning_of_a_file_name(self):
        assert [path.name for path in named(["02"], write=False)] == ["02_two_checkpoints.ipynb"]

    def test_writing_everything_leaves_out_real_models(self):
        assert len(named([], write=False)) - len(named([], write=True)) == 2

    @pytest.mark.parametrize(("name", "write"), [("99", False), ("08", True)])
    def test_an_unknown_name_and_writing_a_real_model_are_refused(self, name, write):
        with pytest.raises(SystemExit, match=name):
            named([name], write)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of one notebook that printed 0.1, and a kernel that always prints 0.9."""
    nbformat.write(notebook(printed("mean 0.1")), tmp_path / "01_x.ipynb")
    monkeypatch.setattr(run_tutorials, "TUTORIALS", tmp_path)
    monkeypatch.setattr(run_tutorials, "executed", lambda given: as_stored(notebook(printed("mean 0.9"))))
    for name in ("TUTORIAL_SMALL", *PORTABLE):
        monkeypatch.setenv(name, "")  # main sets them
    return tmp_path


class TestMain:
    def test_a_difference_fails_and_names_the_notebook(self, folder):
        with pytest.raises(SystemExit, match=r"01_x.ipynb, cell 0: 0.1 was stored, 0.9 came"):
            run_tutorials.main([])

    def test_writing_stores_the_fresh_output_with_which_it_then_agrees(self, folder):
        run_tutorials.main(["--write", "01"])
        assert nbformat.read(folder / "01_x.ipynb", 4).cells[0].outputs[0].text == "mean 0.9"
        run_tutorials.main([])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestStoredNotebooks:
    def test_outputs_are_stored_as_writing_would_store_them(self, path):
        stored = nbformat.read(path, 4)
        assert as_stored(stored) == stored

    def test_outputs_are_complete_and_figures_small(self, path):
        cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        assert any(cell.outputs for cell in cells)
        images = [
            output.data["image/png"]
            for cell in cells
            for output in cell.outputs
            if "image/png" in output.get("data", {})
        ]
        assert images
        assert all(len(base64.b64decode(image)) <= MOST_BYTES for image in images)

    def test_cells_have_at_most_20_lines_and_a_median_of_8(self, path):
        lines = [len(cell.source.splitlines()) for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        assert max(lines) <= 20
        assert statistics.median(lines) <= 8

    def test_two_exercises_end_it(self, path):
        last = nbformat.read(path, 4).cells[-1].source
        assert "\n2. " in last.partition("## Exercises\n")[2]
