"""The report page, read back with an HTML parser."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from attnbalance.comparison.page import write_report
from attnbalance.comparison.sentences import headline
from tests.fakes import TOKENS, a_comparison

EVIL = "</script><img src=x onerror=alert(1)>"
ATTENTION = {"top": [0.1, 0.2, 0.6], "bottom": [0.1, 0.2, 0.3]}
CORRECT = {"top": [i < 30 for i in range(40)], "bottom": [i < 10 for i in range(40)]}
VOID = {"meta", "br", "img", "link", "hr", "input", "wbr"}


class Page(HTMLParser):
    """What a browser would make of a page: its tags, tables and the text of elements with a class."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags, self.open, self.attributes, self.unclosed = [], [], [], []
        self.text: list[tuple[tuple[str, ...], str]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.table = ""
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        """Note a tag, its attributes and where tables begin."""
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))
        if tag == "table":
            self.table = dict(attrs).get("id") or ""
            self.tables[self.table] = []
        if tag == "tr":
            self.tables[self.table].append([])
        if tag in ("td", "th"):
            self.tables[self.table][-1].append("")
        if tag == "br" and any(name in ("td", "th") for name, _ in self.open):
            self.tables[self.table][-1][-1] += " "  # a new line

    def handle_startendtag(self, tag, attrs):
        """Note a tag without content."""
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        """Close the innermost element, or note that another one was to be closed."""
        if not self.open or self.open.pop()[0] != tag:
            self.unclosed.append(tag)

    def handle_data(self, data):
        """Note text with the elements around it."""
        self.text.append((tuple(f"{tag}.{attrs.get('class', '')}" for tag, attrs in self.open), data))
        if self.open and any(tag in ("td", "th") for tag, _ in self.open):
            self.tables[self.table][-1][-1] += data

    def of(self, kind: str) -> str:
        """The text inside elements of one kind, as "tag.class"."""
        return "".join(data for where, data in self.text if kind in where)

    @property
    def all_text(self) -> str:
        """All text but the style sheet."""
        return "".join(data for where, data in self.text if "style." not in where)


def _page(comparison, tmp_path, **options) -> Page:
    path = tmp_path / "report.html"
    write_report(comparison, path, **options)
    return Page(path.read_text(encoding="utf-8"))


def test_the_headline_comes_first_and_the_tags_are_balanced(tmp_path):
    made = a_comparison(ATTENTION, CORRECT)
    page = _page(made, tmp_path, title="My title")
    assert page.of("p.headline") == headline(made)
    assert page.of("title.") == page.of("h1.") == "My title"
    assert page.all_text.index(headline(made)) < page.all_text.index("What is measured")
    assert page.unclosed == []
    assert page.open == []


def test_three_numbers_say_what_is_seen_first(tmp_path):
    made = a_comparison(ATTENTION, CORRECT)
    text = re.sub(r"\s+", " ", _page(made, tmp_path).of("div.numbers"))
    change = made.difference("top", "bottom")
    assert text.startswith(
        f" {change.mean[2]:+.3f} [{change.low[2]:+.3f}, {change.high[2]:+.3f}]"
        "subject attention, top minus bottom, at layer 2, its largest clear difference"
    )
    # all of the most popular fifth, prompts 0 to 7, are right in both
    assert "+0.0 points [-32.4, +32.4]accuracy on the most popular fifth, top minus bottom" in text
    assert text.endswith(" 40questions about 40 subjects ")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (a_comparison({"top": [0.1, 0.5]}, pair=None), ["subject attention of top at layer 1, its highest"]),
        (
            a_comparison(ATTENTION, CORRECT, pair=None, popular=False),
            ["75.0%", "accuracy of top on all questions", "40questions about 40 subjects"],
        ),
        (a_comparison(ATTENTION, subject="Ann"), ["40questions about 1 subject", "+0.299subject attention"]),
    ],
)
def test_one_model_and_models_without_answers_have_the_numbers_that_there_are(made, said, tmp_path):
    text = _page(made, tmp_path).of("div.numbers")
    assert all(part in text for part in said)


def test_the_table_of_differences_holds_the_numbers_of_the_comparison(tmp_path):
    made = a_comparison(ATTENTION)
    curves, found = made.curves(), made.difference("top", "bottom")
    rows = _page(made, tmp_path).tables["differences"][1:]
    assert [int(row[0]) for row in rows] == [0, 1, 2]
    for i, (_, a, b, change, interval, differs) in enumerate(rows):
        assert float(a) == pytest.approx(curves["top"].mean[i], abs=5e-4)
        assert float(b) == pytest.approx(curves["bottom"].mean[i], abs=5e-4)
        assert float(change) == pytest.approx(found.mean[i], abs=5e-4)
        assert [float(x) for x in interval.strip("[]").split(",")] == pytest.approx(
            [found.low[i], found.high[i]], abs=5e-4
        )
        assert differs == ("yes" if i == 2 else "no clear difference")


def test_the_table_of_accuracies_holds_hand_counted_numbers(tmp_path):
    head, everything, *fifths, contained, exact, f1, shortcut = _page(
        a_comparison(ATTENTION, CORRECT), tmp_path
    ).tables["accuracy"]
    assert head == ["", "popularity", "top", "bottom", "top − bottom (points)", "p", "differs"]  # noqa: RUF001
    assert [cell.split("%")[0] for cell in everything[2:4]] == ["75.0", "25.0"]
    assert everything[4].startswith("+50.0 [")
    assert everything[5] == "1.9e-06"
    assert everything[6] == "yes"
    assert [row[6] for row in fifths] == ["no clear difference", "yes", "yes", "yes", "no clear difference"]
    assert [row[2].split("%")[0] for row in fifths] == ["100.0", "100.0", "100.0", "75.0", "0.0"]
    assert fifths[0][1] == "993 to 1,000"
    assert contained[0] == "all questions, by containment"
    assert exact[0] == "all questions, by exact match"
    assert contained[2:4] == exact[2:4] == everything[2:4]  # the fakes answer in whole words, and nothing else
    assert f1[0] == "all questions, F1"
    by_hand = [(1 + 3 * share) / 4 for share in (0.75, 0.25)]  # the fakes' F1 is 1 or a quarter
    assert [cell.split("%")[0] for cell in f1[2:4]] == [f"{100 * share:.1f}" for share in by_hand]
    assert [cell.split(" ")[0] for cell in shortcut[2:4]] == ["50.0%", "50.0%"]


def test_ties_across_fifths_are_counted_on_the_page(tmp_path):
    """Forty questions in fifths of eight: twelve of one popularity fill the second fifth and half of the third."""
    made = a_comparison(ATTENTION, CORRECT)
    popularity = tuple(map(float, (*range(100, 92, -1), *(50,) * 12, *range(20, 0, -1))))
    measured = tuple(replace(each, recall=replace(each.recall, popularity=popularity)) for each in made.measured)
    said = "questions have the popularity of others in another fifth; such ties are"
    assert f"12 {said}" in _page(replace(made, measured=measured), tmp_path).all_text
    assert said not in _page(made, tmp_path).all_text


def test_questions_without_a_shortcut_are_counted_and_left_out_of_its_rate(tmp_path):
    made = a_comparison(ATTENTION, CORRECT)
    recalls = [measured.recall for measured in made.measured]
    measured = tuple(
        replace(one, recall=replace(recall, shortcut=(True,) * 39 + (None,)))
        for one, recall in zip(made.measured, recalls, strict=True)
    )
    page = _page(replace(made, measured=measured), tmp_path)
    assert "It leaves out 1 question about relations without such an answer." in page.all_text
    assert [cell.split(" ")[0] for cell in page.tables["accuracy"][-1][2:4]] == ["100.0%", "100.0%"]
    nothing = tuple(replace(one, recall=replace(one.recall, shortcut=(None,) * 40)) for one in measured)
    page = _page(replace(made, measured=nothing), tmp_path)
    assert page.tables["accuracy"][-1][2:4] == ["none to count"] * 2


def test_the_rows_of_examples_stand_over_their_tokens(tmp_path):
    made = a_comparison(ATTENTION, CORRECT)
    page = _page(made, tmp_path)
    assert page.of("div.tokens") == "".join(TOKENS) * 6
    assert page.of("span.subject") == " Ann Lee" * 6
    titles = [value for tag, name, value in page.attributes if (tag, name) == ("span", "title")]
    shares = [float(title.rsplit(": ", 1)[1]) for title in titles[: len(TOKENS)]]
    assert shares == pytest.approx(made["top"].examples[0].weights[2], abs=5e-4)  # layer 2 differs most


def test_all_examples_that_were_kept_are_shown(tmp_path):
    made = a_comparison(ATTENTION, n=5)
    five = tuple(
        replace(one, examples=tuple(replace(one.examples[0], prompt_id=p.prompt_id) for p in made.prompts))
        for one in made.measured
    )
    assert _page(replace(made, measured=five), tmp_path).of("div.tokens") == "".join(TOKENS) * 10


def test_letters_that_the_font_lacks_are_text_and_give_no_warning(tmp_path):
    label = "\u6a21\u578b"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = _page(a_comparison({label: [0.1, 0.5], "b": [0.1, 0.2]}, pair=(label, "b")), tmp_path)
    assert page.of("text.").count(label) > 2


def test_the_page_is_self_contained_and_small(tmp_path):
    page = _page(a_comparison(ATTENTION, CORRECT), tmp_path)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    sources = [value for _, name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert all(value.startswith(("#", "data:")) for value in sources)
    assert page.tags.count("svg") == 4
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_every_reference_inside_the_figures_has_one_target(tmp_path):
    page = _page(a_comparison(ATTENTION, CORRECT), tmp_path)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    wanted = {value[1:] for _, name, value in page.attributes if name == "xlink:href" and value.startswith("#")}
    clipped = {match for _, _, value in page.attributes for match in re.findall(r"url\(#(\w+)\)", value)}
    assert wanted
    assert wanted | clipped <= set(ids)


def test_text_from_facts_tokens_labels_and_commands_is_escaped(tmp_path):
    attention = {EVIL: ATTENTION["top"], "$x$ & <b>": ATTENTION["bottom"]}
    made = a_comparison(
        attention,
        dict.fromkeys(attention, CORRECT["top"]),
        pair=(EVIL, "$x$ & <b>"),
        subject=EVIL + " {}",
        tokens=("<s>", EVIL, '"quoted"', "\n", "", " x", " y", " z"),
        source={"model": EVIL, EVIL: ["&", EVIL]},
        template=EVIL + "{question}",
    )
    page = _page(made, tmp_path, title=EVIL, command=EVIL)
    assert not {"script", "img", "b"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.unclosed == []
    assert page.of("title.") == page.of("pre.") == EVIL
    assert EVIL in page.of("div.tokens")
    assert page.of("strong.").count(EVIL) == 3
    assert page.tables["sources"][0][1:] == [EVIL, "$x$ & <b>"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (a_comparison(ATTENTION), "Accuracy was not measured"),
        (a_comparison(ATTENTION, CORRECT, popular=False), "Popularity is not known"),
        (a_comparison({"only": [0.1]}, {"only": CORRECT["top"]}, pair=None), "only attends most"),
        (a_comparison({"top": [0.1], "bottom": [0.2, 0.3]}, CORRECT), "has no difference by layer"),
        (a_comparison(ATTENTION, CORRECT, n=40, subject="Ann"), "no interval"),
        (a_comparison(ATTENTION, {"top": [True] * 40, "bottom": CORRECT["bottom"]}), "no wrong answers"),
        (a_comparison(ATTENTION, {"top": CORRECT["top"]}), "accuracy was not measured"),
    ],
)
def test_what_was_not_measured_is_said_and_the_rest_is_shown(made, said, tmp_path):
    page = _page(made, tmp_path)
    assert said in page.all_text
    assert "nan" not in page.all_text.lower().split()
    assert page.unclosed == []


@pytest.mark.parametrize("popular", [True, False])
def test_the_table_of_accuracy_has_a_column_of_popularity_only_where_it_is_known(popular, tmp_path):
    head, *rows = _page(a_comparison(ATTENTION, CORRECT, popular=popular), tmp_path).tables["accuracy"]
    assert head[:3] == (["", "popularity", "top"] if popular else ["", "top", "bottom"])
    assert {len(row) for row in rows} == {len(head)}
    overall = next(row for row in rows if row[0] == "all questions")
    assert overall[2 if popular else 1].startswith("75.0%")  # 30 of 40, counted by hand


def test_how_it_was_made_names_models_rows_seed_versions_and_command(tmp_path):
    page = _page(a_comparison(ATTENTION, CORRECT), tmp_path, command="attnbalance compare a b")
    assert page.of("pre.") == "attnbalance compare a b"
    assert page.tables["sources"] == [
        ["", "top", "bottom"],
        ["model", "models/top", "models/bottom"],
        ["run: seed", "0", "1"],
    ]
    for said in (
        "40 about 40 subjects",
        "7: subject not in question",
        "2,000 resamples",
        "largest t over layers",
        "none below 5 subjects",
        "McNemar",
        "p < 0.05",
        "torch",
    ):
        assert said in page.all_text


def test_a_models_training_is_told_in_words_without_hashes_versions_and_empty_rows(tmp_path):
    settings = {
        "learning_rate": 3e-4,
        "split": "top",
        "dtype": None,
        "model_files": "5f",
        "facts_sha256": {"train": "9a"},
    }
    record = {"kind": "finetune", "config": settings, "best_step": 40, "split": {"train": 900}, "learns_answers": True}
    record |= {
        "versions": {"torch": "2"},
        "files_sha256": {"a": "b"},
        "python": "3.11",
        "base_settings": {"d_model": 8},
    }
    page = _page(a_comparison(ATTENTION, CORRECT, source={"adapter": None, "made_by": record}), tmp_path)
    rows = page.tables["sources"]
    assert rows[0] == ["", "top", "bottom"]
    assert [row[:2] for row in rows[1:]] == [
        ["training: learning rate", "0.0003"],
        ["training: split: train", "900"],
        ["training: best step", "40"],
        ["training: learns answers", "true"],
    ]
    untrained = _page(a_comparison(ATTENTION, CORRECT, source={"made_by": None, "model": "m"}), tmp_path / "untrained")
    assert untrained.tables["sources"][1:] == [["model", "m", "m"]]


@pytest.mark.parametrize(("labels", "kind"), [("ab", "words"), ("abcd", "words many")])
def test_long_model_paths_may_break_after_each_folder_and_many_models_stand_below_their_key(labels, kind, tmp_path):
    path = "/home/somebody/experiments/outputs/finetuned-on-popular/checkpoint-600"
    made = a_comparison({label: [0.1] for label in labels}, pair=None, source={"model": path})
    page = _page(made, tmp_path)
    assert page.tables["sources"][1] == ["model", *[path] * len(labels)]
    assert page.tags.count("wbr") == 6 * len(labels)
    assert page.attributes[page.attributes.index(("table", "id", "sources")) - 1] == ("table", "class", kind)


def test_the_same_comparison_gives_the_same_page(tmp_path):
    for name in ("a.html", "b.html"):
        write_report(a_comparison(ATTENTION, CORRECT), tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_second_reading_has_its_own_curve_difference_table_and_heads(tmp_path):
    made = a_comparison(ATTENTION, CORRECT)
    measured = tuple(
        replace(one, readings=(one.reading(), replace(one.reading(), name="value salience (last)", unit="logits")))
        for one in made.measured
    )
    page = _page(replace(made, measured=measured), tmp_path)
    for said in (
        "Value salience by layer",
        "Where the two differ in value salience",
        "Value salience is highest in top at layer 2",
        "top has more value salience than bottom at 1 of 3 layers",
        "blue where top has more value salience, orange where bottom does",
    ):
        assert said in page.all_text
    assert page.tables["differences2"] == page.tables["differences"]
    assert page.tags.count("svg") == 7
    assert page.unclosed == []


def test_what_the_models_are_is_said_where_it_is_known(tmp_path):
    made = a_comparison(ATTENTION, CORRECT)
    assert "top was <b>trained</b>." in _page(made, tmp_path, about="top was <b>trained</b>.").all_text
    assert "<p></p>" not in (tmp_path / "report.html").read_text()
    assert "was <b>" not in _page(made, tmp_path).all_text


def test_a_reading_of_one_number_a_layer_has_no_head_map(tmp_path):
    made = a_comparison(ATTENTION, CORRECT)
    measured = tuple(
        replace(model, readings=(replace(model.reading(), values=model.reading().values.mean(2, keepdim=True)),))
        for model in made.measured
    )
    pages = [_page(replace(made, measured=models), tmp_path) for models in (made.measured, measured)]
    assert ["head by head" in page.all_text for page in pages] == [True, False]
    assert [page.tags.count("svg") for page in pages] == [4, 3]
