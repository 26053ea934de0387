"""The sentences of a report: every combination of answers yields a true one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnbalance.comparison.sentences import (
    accuracy_sentence,
    curves_sentence,
    difference_sentence,
    headline,
    shown_layers,
)
from tests.fakes import a_comparison

N = 40
MOST = [i % 8 != 0 for i in range(N)]  # 7 of the 8 most popular questions, 35 of all
FEW = [i % 8 == 1 for i in range(N)]  # 1 of the 8 most popular questions, 5 of all
LESS = {"top": [0.1, 0.2, 0.6], "bottom": [0.1, 0.2, 0.3]}
MORE = {"top": [0.1, 0.2, 0.3], "bottom": [0.1, 0.2, 0.6]}
BOTH = {"top": [0.1, 0.2, 0.6], "bottom": [0.1, 0.4, 0.3]}
ALIKE = {"top": [0.1, 0.2, 0.3], "bottom": [0.1, 0.2, 0.3]}
APART = {"top": MOST, "bottom": FEW}
LEVEL = {"top": MOST, "bottom": MOST}


def test_lower_accuracy_with_lower_attention_is_said_in_one_sentence():
    text = headline(a_comparison(LESS, APART))
    assert text.startswith("top answers 87.5% of the most popular fifth of questions right against bottom's 12.5% (")
    assert "(top minus bottom: +75.0 points [+" in text
    assert "exact McNemar p = 0.031, n = 8), and bottom attends less to the subject" in text
    assert "layers: layer 2, 0.599 in top, 0.301 in bottom, top minus bottom: +0.299 [+0.2" in text
    assert text.endswith("(40 questions in all).")


def test_all_questions_that_say_the_opposite_of_the_most_popular_fifth_are_not_left_out():
    popular = [i < N // 5 for i in range(N)]
    correct = {"top": popular, "bottom": [not right for right in popular]}
    for pair, sign in ((("top", "bottom"), "-"), (("bottom", "top"), "+")):
        text = headline(a_comparison(LESS, correct, pair=pair))
        assert text.startswith(
            "top answers 100.0% of the most popular fifth of questions right against bottom's 0.0% ("
        )
        assert (
            f"; over all questions bottom answers more right than top ({' minus '.join(pair)}: {sign}60.0 points ["
            in text
        )
        assert text.endswith("p = 0.00018).")  # 32 against 8: 2 * sum(comb(40, k) for k in range(9)) / 2 ** 40


def test_the_order_of_the_pair_does_not_change_who_is_said_to_be_ahead():
    there, back = a_comparison(LESS, APART), a_comparison(LESS, APART, pair=("bottom", "top"))
    before, after = headline(there).split(" minus "), headline(back).split(" minus ")
    assert before[0].removesuffix("top") == after[0].removesuffix("bottom")
    assert before[1].split("n = ")[1].split(" layer 2")[0] == after[1].split("n = ")[1].split(" layer 2")[0]


def test_every_difference_is_that_of_the_pair_in_its_order():
    """The numbers of the first screen have it too; a word of the sentence says who is ahead."""
    there, back = headline(a_comparison(LESS, APART)), headline(a_comparison(LESS, APART, pair=("bottom", "top")))
    assert [part[:5] for part in there.split("top minus bottom: ")[1:]] == ["+75.0", "+0.29"]
    assert [part[:5] for part in back.split("bottom minus top: ")[1:]] == ["-75.0", "-0.29"]
    for text, wrong in ((there, "bottom minus"), (back, "top minus")):
        assert wrong not in text


def test_lower_accuracy_with_higher_attention_is_set_against_it():
    text = headline(a_comparison(MORE, APART))
    assert ", but bottom attends more to the subject than top at 1 of 3 layers" in text
    assert "layers: layer 2, 0.299 in top, 0.601 in bottom, top minus bottom: -0.301 [-0.3" in text


def test_lower_accuracy_with_attention_both_ways_names_both_layers():
    text = headline(a_comparison(BOTH, APART))
    assert (
        "while subject attention goes both ways: bottom attends less to the subject than top at 1 of 3 layers: layer 2"
        in text
    )
    assert ", but more at 1 of 3 layers: layer 1, 0.201 in top, 0.401 in bottom, top minus bottom: -0.200 [" in text


def test_lower_accuracy_without_a_difference_in_attention_says_so():
    text = headline(a_comparison(ALIKE, APART))
    assert ", but subject attention does not differ measurably" in text


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        (LESS, "although bottom attends less to the subject than top at 1 of 3 layers"),
        (MORE, "although bottom attends more to the subject than top at 1 of 3 layers"),
        (BOTH, "although bottom attends less to the subject than top at 1 of 3 layers"),
        (ALIKE, "and subject attention does not differ measurably at any layer"),
    ],
)
def test_without_a_difference_in_accuracy_none_is_claimed(attention, expected):
    text = headline(a_comparison(attention, LEVEL))
    assert text.startswith(
        "top and bottom do not differ measurably in accuracy on the most popular fifth of questions (87.5% and 87.5%,"
    )
    assert expected in text
    assert "theory" not in text


def test_five_questions_of_800_answered_differently_are_no_difference_in_accuracy():
    correct = {"top": [i < 5 for i in range(800)], "bottom": [False] * 800}
    made = a_comparison(LESS, correct, n=800, popular=False)
    paired = made.accuracy_difference("top", "bottom")
    assert paired is not None
    assert paired.interval.excludes_zero  # but 5 to none is as likely as 1 in 16
    text = headline(made)
    assert text.startswith("top and bottom do not differ measurably in accuracy on all questions (0.6% and 0.0%,")
    assert "exact McNemar p = 0.062, n = 800), although bottom attends less" in text
    assert "theory" not in text
    assert "], so there is no clear difference. top alone is right on 5" in accuracy_sentence(made)


@pytest.mark.parametrize("attention", [LESS, MORE, BOTH, ALIKE])
def test_without_recall_only_attention_is_told(attention):
    text = headline(a_comparison(attention))
    assert text.startswith("Over 40 questions, ")
    assert text.endswith("; accuracy was not measured.")
    assert "theory" not in text


def test_recall_of_one_model_of_the_pair_is_no_comparison():
    assert headline(a_comparison(LESS, {"top": MOST})).endswith("accuracy was not measured.")


def test_without_popularity_all_questions_are_compared():
    text = headline(a_comparison(LESS, APART, popular=False))
    assert text.startswith(
        "top answers 87.5% of all questions right against bottom's 12.5% (top minus bottom: +75.0 points"
    )
    assert "n = 40" in text


@pytest.mark.parametrize("popularity", [[1] * 40, [2] * 20 + [1] * 20, [9, 8, 7, *[2] * 20, *[1] * 17]])
def test_where_popularity_does_not_tell_the_popular_from_the_others_all_are_compared(popularity):
    """With 20 of 40 questions at the top, the most popular fifth is 8 of these, drawn at random; or 3 and 5 of them."""
    comparison = a_comparison(LESS, APART)
    measured = tuple(
        replace(of, recall=replace(of.recall, popularity=tuple(map(float, popularity))))
        for of in comparison.measured
        if of.recall
    )
    text = headline(replace(comparison, measured=measured))
    assert text.startswith(
        "top answers 87.5% of all questions right against bottom's 12.5% (top minus bottom: +75.0 points"
    )
    single = headline(replace(comparison, measured=measured[:1], pair=None))
    assert "of all questions right (40 questions in all)" in single


def test_one_label_is_told_by_itself():
    text = headline(a_comparison({"only": [0.1, 0.5]}, {"only": MOST}, pair=None))
    assert text.startswith("only attends most to the subject at layer 1 (0.")
    assert "and answers 87.5% [" in text
    assert "of the most popular fifth right (40 questions in all)." in text


def test_several_labels_without_a_pair_are_told_one_after_the_other():
    text = headline(a_comparison(LESS, pair=None))
    assert "top attends most to the subject at layer 2" in text
    assert "; bottom attends most" in text
    assert text.count("its accuracy was not measured") == 2


def test_models_outside_the_pair_are_told_by_themselves():
    two = headline(a_comparison(LESS, APART))
    text = headline(a_comparison(LESS | {"base": [0.1, 0.7, 0.3]}, APART | {"base": FEW}))
    assert text.startswith(two.removesuffix("."))
    assert "; base attends most to the subject at layer 1 (0." in text
    assert text.endswith("] of the most popular fifth right.")
    assert "and answers 12.5% [" in text


def test_one_subject_gives_no_claim_about_differences():
    made = a_comparison(
        LESS, {"top": [True] * 20 + [False] * 20, "bottom": [i % 2 == 0 for i in range(N)]}, subject="Ann"
    )
    text = headline(made)
    assert "too few or too unequal subjects: no interval" in text
    assert "too few or too unequal subjects give no interval for a difference in subject attention" in text
    assert "theory" not in text
    assert "although" not in text


def test_models_of_different_depth_are_not_subtracted():
    made = a_comparison({"top": [0.1, 0.2, 0.6], "bottom": [0.1, 0.2]}, APART)
    assert not made.comparable()
    text = headline(made)
    assert "top answers 87.5%" in text
    assert "has no difference by layer, because bottom has 2 layers of 2 heads and top has 3 layers of 2 heads" in text
    assert shown_layers(made) == {"top": 2, "bottom": 1}


def test_a_caveat_ends_the_sentence():
    plain = a_comparison(LESS, APART)
    assert headline(replace(plain, caveat="one seed")) == headline(plain).removesuffix(".") + "; one seed."


def test_many_differing_layers_are_named_in_runs_with_the_largest():
    made = a_comparison({"top": [0.3, 0.3, 0.6, 0.3, 0.1, 0.4], "bottom": [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]})
    assert "at 5 of 6 layers (layers 0 to 3 and 5), most at layer 2, " in difference_sentence(made)
    assert shown_layers(made) == {"top": 2, "bottom": 2}


def test_a_headline_is_one_sentence_and_claims_no_cause():
    for attention in (LESS, MORE, BOTH, ALIKE):
        for correct in (APART, LEVEL, None):
            text = headline(a_comparison(attention, correct))
            assert text.count(". ") == 0
            assert "cause" not in text


def test_smaller_sentences_hold_the_numbers_of_their_section():
    made = a_comparison(LESS, APART)
    assert curves_sentence(made).startswith("Subject attention is highest in top at layer 2 (0.")
    said = accuracy_sentence(made)
    assert "top 87.5% [" in said
    assert "top minus bottom: +75.0 points [" in said
    assert "top alone is right on 30, bottom alone on 0 (exact McNemar p = 1.9e-09)" in said  # 2 * 0.5 ** 30
    assert "], so the two differ. top alone" in said
    assert difference_sentence(replace(made, pair=None)) == ""


def test_two_models_that_answer_nothing_right_are_said_to():
    text = headline(a_comparison(LESS, {"top": [False] * N, "bottom": [False] * N}))
    assert text.startswith("neither top nor bottom answers any of the most popular fifth of questions right (n = 8)")


def test_models_that_split_the_prompts_differently_are_said_to():
    made = a_comparison({"top": [0.5, 0.5], "bottom": [0.3, 0.5]})
    for text in (headline(made), difference_sentence(made)):
        assert "different tokens" not in text
    sources = ({"tokens_sha256": "a", "subject_tokens": 3.0}, {"tokens_sha256": "b", "subject_tokens": 8.04})
    split = replace(
        made, measured=tuple(replace(m, source=source) for m, source in zip(made.measured, sources, strict=True))
    )
    note = "top and bottom split these prompts into different tokens (a subject into 3.0 and 8.0 on average)"
    for text in (headline(split), difference_sentence(split)):
        assert note in text
        assert text.endswith(".")


def test_the_layers_are_those_of_the_pair_whatever_the_first_model_has():
    made = a_comparison({"deep": [0.1], **LESS}, pair=("top", "bottom"))
    text = headline(made)
    assert "bottom attends less to the subject than top at 1 of 3 layers: layer 2, 0.601 in top" in text
