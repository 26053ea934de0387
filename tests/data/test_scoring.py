# ruff: noqa: RUF001 (letters of many scripts are the subject)
"""Scoring: whole words of the first line in many scripts, the paper's containment, and exact matches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbalance.data.scoring import CONTAINMENT, SCORINGS, WHOLE_WORDS, is_match
from attnbalance.data.squad import f1_score
from attnbalance.errors import DataError


@pytest.mark.parametrize(
    ("output", "answers", "expected"),
    [
        (" Paris\n", ["paris"], True),
        ("the city of PARIS, in France", ["Rome", " Paris "], True),  # any answer, anywhere in the output
        ("Apollo", ["pol"], True),  # the paper's rule knows no words
        ("A place.\nParis", ["Paris"], True),  # nor lines
        ("Pari", ["Paris"], False),
        ("-5", ["5"], True),
        ("o'neill", ["O’Neill"], False),  # it folds no quotes
        ("", ["Paris"], False),
        ("anything", ["", "  "], False),
        ("anything", [], False),
    ],
)
def test_containment_is_the_papers_rule(output: str, answers: list[str], expected: bool) -> None:
    assert is_match(output, answers, CONTAINMENT) is expected


@pytest.mark.parametrize(
    ("output", "answers", "expected"),
    [
        (" Paris\n", ["paris"], True),
        ("the city of PARIS, in France", ["Rome", " Paris "], True),
        ("It is (Paris).", ["Paris"], True),
        ("France's", ["France"], True),
        ("US-based", ["US"], True),
        ("The answer is U.S.", ["U.S."], True),
        ("C++ and Rust", ["C++"], True),
        ("New\u00a0 York", ["New York"], True),  # any white space
        ("\n\n Paris", ["Paris"], True),  # the first line that is not empty
        ("A place.\nParis", ["Paris"], False),  # what follows is another question, or a story
        ("Apollo", ["pol"], False),
        ("United States of America", ["IT", "Italy"], False),
        ("Jamerica", ["America", "CA"], False),
        ("Australia", ["US"], False),
        ("Parish", ["Paris"], False),
        ("1942", ["194"], False),
        ("Straße", ["strasse"], True),  # case folding
        ("٣٫١٤", ["3"], False),  # Arabic decimal and thousands marks are those of a number
        ("٣٫١٤", ["3.14"], True),
        ("۱۲٬۳۴۵ نفر", ["12"], False),
        ("۱۲٬۳۴۵ نفر", ["12345"], True),
        ("❤\ufe0f", ["❤"], True),  # a variation selector shows nothing
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467", ["\U0001f469"], False),  # joined signs are one
        ("\U0001f469!", ["\U0001f469"], True),
        ("S\u0303ao", ["S"], False),  # a mark belongs to its letter
        ("ＰＡＲＩＳ", ["Paris"], True),  # full width
        ("Zürich", ["Zu\u0308rich"], True),  # composed or not
        ("Москва, Россия", ["москва"], True),
        ("Московская область", ["Москов"], False),
        ("首都是北京。", ["北京"], True),  # no spaces between words
        ("東京です", ["東京"], True),
        ("서울은 수도이다", ["서울"], True),  # a particle behind the name
        ("กรุงเทพมหานคร", ["กรุงเทพ"], True),
        ("ไทย\u0e35", ["ไทย"], False),  # a vowel sign belongs to its letter
        ("العاصمة باريس هي", ["باريس"], True),
        ("it is a country in Europe", ["IT"], False),  # a code keeps its case
        ("IT", ["IT"], True),
        ("usa", ["USA"], True),
        (" Usa.", ["USA"], True),
        ("the usa", ["USA"], False),
        ("in the USA", ["usa", "USA"], True),
        (
            " a small town in the state of New York",
            ["India", "in", "IN"],
            False,
        ),  # codes are listed in small letters too
        ("a town, IN", ["India", "in"], True),
        ("It is RnB music.", ["rhythm and blues", "R&B", "RnB", "RNB"], True),
        ("It is rnb music.", ["rhythm and blues", "RnB", "RNB"], False),
        ("The answer is Jap.", ["Japan", "JAP", "Jap"], True),
        ("Can you say it?", ["Canada", "CAN", "Can"], False),
        ("I'm not sure", ["iodine", "I"], False),
        ("The symbol is I.", ["iodine", "I"], True),
        ("It is written in C++", ["carbon", "C"], False),
        ("F# minor", ["fluorine", "F"], False),
        (" C++", ["carbon", "C"], False),
        ("**C#**", ["C"], False),
        ("# C", ["C"], True),
        ("2 000 000 people", ["2 000"], False),
        ("2,000 people", ["2 000"], True),
        *(("In 1999 50 000 people lived there", [answer], True) for answer in ("50 000", "50,000", "50000")),
        *(("In 1999 2 000 000 people", [answer], True) for answer in ("2 000 000", "2,000,000", "2000000", "1999")),
        *(("In 1999 2 000 000 people", [answer], False) for answer in ("2 000", "2000", "2,000", "2 000 0")),
        ("No. 5 4 811 569", ["4 811"], False),
        ("No. 5 4 811 569", ["4,811,569"], True),
        ("On May 5 200,000 people marched", ["200,000"], True),
        ("On May 5 200,000 people marched", ["200000"], True),
        ("On May 5 200,000 people marched", ["5 200"], False),
        ("Apollo 11 363,300 km", ["363 300"], True),
        ("Boeing 747 408'520 kg", ["408,520"], True),
        ("30 150,000.50", ["150,000.50"], True),
        ("some 12 345,67 euros", ["12,345"], False),
        ("50 000 2 km away", ["50,000"], True),
        ("2 000 3 000", ["3 000"], True),
        ("the Boeing 747 200 3", ["Boeing 747 200"], True),
        ("some 2 000 people", ["2 000"], True),
        ("He's a singer", ["helium", "He"], False),
        ("K+ and Na+ ions", ["potassium", "K"], True),
        ("K+ and Na+ ions", ["sodium", "Na"], True),
        ("It is 'C'and not 'D'", ["carbon", "C"], True),
        ("“ca”", ["Canada", "ca"], True),
        ("\u200b\nParis", ["Paris"], True),
        ("\u00ad \u200b", ["Paris"], False),
        ("\ufe0f\nParis", ["Paris"], True),
        (
            "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
            ["🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"],
            True,
        ),
        (
            "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
            ["🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"],
            False,
        ),
        ("🇨🇦🇺🇸", ["Australia", "🇦🇺"], False),
        ("🇨🇦🇦🇺!", ["Australia", "🇦🇺"], True),
        ("ג'קסון", ["ג׳קסון"], True),
        ("צה״ל", ['צה"ל'], True),
        ("no records, but it can be found here", ["Canada", "can", "CAN"], False),
        ("no records, but it can be found here", ["Norway", "no"], False),
        ("Paris and London", ["Andorra", "AND"], False),
        ("Rio de Janeiro", ["Germany", "de", "DE"], False),
        ("fr", ["French", "fr", "fra"], True),  # as the whole line
        (" fra.", ["French", "fr", "fra"], True),
        ("No.", ["Norway", "no", "NO"], False),
        ("5 km", ["km", "kilometre"], True),  # the first answer is no spelling of another one
        ("No", ["no", "never"], True),
        ("$B$", ["B"], True),
        ("No, it is not", ["no"], True),  # the fact's only answer is the word itself
        ("rap music", ["hip hop", "rap"], True),
        ("In 1990", ["Indium", "In"], False),
        ("He was born here", ["Helium", "He"], False),
        ("He", ["Helium", "He"], True),
        ("The symbol is He.", ["He"], True),
        ("he", ["He"], False),
        ("I am not sure", ["Iodine", "I"], False),
        ("A city", ["A"], False),
        ("The answer is B.", ["B"], True),
        ("李", ["李"], True),
        ("他姓李名白", ["李"], True),
        ("I like r&b", ["R&B"], True),
        ("3.14 is pi", ["3"], False),  # the point and comma of a number end no word
        ("19,000 people", ["19"], False),
        ("in 1,999", ["999"], False),
        ("September 11,2001", ["2001"], True),  # a year after a comma, which no number has
        ("September 11,2001.", ["11"], True),
        ("the 4,1776", ["4,1776"], True),
        ("1,23 m", ["23"], False),  # a decimal comma
        ("0,1234", ["1234"], False),
        ("12,1999,5", ["1999"], False),
        ("11,20011", ["20011"], False),
        ("1,234,2001", ["1,234"], True),
        ("3, 14", ["3"], True),
        ("in 1999.", ["1999"], True),
        ("v2.x", ["2"], False),
        ("-5", ["5"], False),  # a number keeps its sign
        ("It is −5.", ["5"], False),
        ("It is −5.", ["-5"], True),
        ("x = -.5", ["5"], False),
        ("10-5", ["-5"], False),  # a hyphen of the line is no sign of the answer
        ("COVID-19", ["-19"], False),
        ("(030)-555", ["-555"], False),
        ("10-5", ["10-5"], True),
        ("10⁵", ["10"], False),
        ("10⁵", ["105"], False),
        ("10⁵", ["10^5"], True),
        ("10^5", ["10⁵"], True),
        ("10⁻⁵", ["10^-5"], True),
        ("10⁺⁵", ["10^5"], True),
        ("born in 1990¹", ["1990"], True),
        ("10^5", ["5"], False),
        ("10**5", ["10"], False),
        ("10**5", ["10^5"], True),
        ("10^{5}", ["10"], False),
        ("10^{-5}", ["10⁻⁵"], True),
        ("10^+5", ["10^5"], True),
        ("10^5.5", ["10^5"], False),
        ("9.8 m/s", ["9.8 m/s^2"], False),
        ("m^3", ["m^2"], False),
        ("m^2", ["m^2"], True),
        ("10^5,000", ["10^5"], False),
        ("2^10^2", ["2^10"], False),
        ("Einstein (**1879**–1955)", ["1879"], True),
        ("**5**-10 people", ["5"], True),
        ("5 km²", ["5"], True),
        ("on p.5", [".5"], False),
        ("It is...5", [".5"], False),
        ("气温是-5度", ["-5"], True),  # nothing separates words, so the hyphen is a sign
        ("气温是-5度", ["5"], False),
        ("3/14/1879", ["3/14"], False),
        ("1,234,567 people", ["1234567"], True),  # digits in groups of three are one number
        ("1 234 567 people", ["1234567"], True),
        ("1\u202f234\u00a0567 people", ["1,234,567"], True),
        ("1’234’567", ["1 234 567"], True),
        ("人口1 234 567人", ["1234567"], True),
        ("1,234.5 km", ["1234.5"], True),
        ("-1,234", ["-1234"], True),
        ("-1,234", ["1234"], False),
        ("in 2008 1,234 people", ["1234"], True),
        ("1 234 5678", ["1234"], False),  # no groups of three
        ("12 34", ["1234"], False),
        ("0 123", ["0123"], False),
        ("3.141 592", ["141592"], False),
        ("1 2 345", ["12345"], False),
        ("Boeing 747 400 seats", ["Boeing 747"], True),  # a space may as well separate two numbers
        ("100 200 300", ["200"], True),
        ("Paris.5", ["Paris"], True),  # punctuation ends a word
        ("Paris.The", ["Paris"], True),
        ("Paris5", ["Paris"], False),
        ("-5", ["-5"], True),
        ("from 1990-1995", ["1995"], True),  # a range
        ("COVID-19", ["19"], True),  # a hyphen inside a word
        ("(030)-555", ["555"], True),
        ("+5", ["5"], True),  # the same number
        (".5", ["5"], False),
        ("about .5 of them", [".5"], True),
        ("It is...5", ["5"], True),  # dots that say nothing about the number
        ("on p.5", ["5"], True),
        ("1/2", ["1"], False),
        ("1/2", ["2"], False),
        ("½", ["1/2"], True),
        ("1½", ["11/2"], False),
        ("1½", ["1 1/2"], True),
        ("10² km", ["102"], False),
        ("Paris¹", ["Paris"], True),
        ("anything", ["²"], False),  # nothing is left of it to find
        ("anything", ["\u200b"], False),
        ("Windows™ is", ["Windows"], True),
        ("Guinea‑Bissau", ["Guinea-Bissau"], True),
        ("Guinea–Bissau", ["Guinea-Bissau"], True),
        ("–5", ["5"], False),
        ("1990–1995", ["1995"], True),
        ("Xi`an", ["Xi'an"], True),
        ("Xi´an", ["Xi'an"], True),
        ("Par\u00adis and Pa\u200bris", ["Paris"], True),
        ("born 14.3.1879.", ["1879"], True),
        ("born 14.3.1879.", ["14.3.1879"], True),
        ("3.14", ["14"], False),
        ("3/14/1879", ["1879"], True),
        ("1990/91", ["1990"], True),
        ("12/1990", ["1990"], True),
        ("½", ["1"], False),
        ("½ cup", ["½"], True),
        ("AC/DC", ["AC"], True),
        ("o'neill", ["O’Neill"], True),  # quotes and apostrophes of any shape
        ("It is “Heroes”", ['"Heroes"'], True),
        ("«Heroes»", ['"Heroes"'], True),
        ("Hawaiʻi", ["Hawai'i"], True),
        ("Not Paris, but Lyon", ["Paris"], True),  # negation is not read
        ("I doubt that it is Paris", ["Paris"], True),
        ("The capital of France is:\n\n**Paris**", ["Paris"], True),  # the line after a colon belongs to it
        ("**Answer:**\nParis", ["Paris"], True),
        ("答案：\n北京", ["北京"], True),
        ("Paris:\nLyon", ["Paris"], True),
        ("Paris:\nLyon.\nNice", ["Nice"], False),
        ("```\nParis\n```", ["Paris"], True),  # lines of punctuation hold no answer
        ("---\n🇨🇦\nOttawa", ["Ottawa"], False),
        ("?!\n", ["?!"], True),
        ("$\nThe dollar sign", ["$"], True),
        ("———\nParis", ["Paris"], True),
        ("```text\nParis\n```", ["Paris"], True),
        ("\ufb2aלום", ["שלום"], True),
        ("الْقَاهِرَة", ["القاهرة"], True),  # points are mostly left out in writing
        ("בְּרֵאשִׁית", ["בראשית"], True),
        ("في عام ٢٠٢٠", ["2020"], True),
        ("in 2020", ["२०२०"], True),
        ("٢٠٢٠", ["20"], False),
        ("İSTANBUL", ["istanbul"], True),
        ("istanbul", ["İstanbul"], True),
        ("Zurich", ["Zürich"], False),  # accents, points and prefixes count
        ("U.S.", ["US"], False),
        ("בפריז", ["פריז"], False),
        ("", ["Paris"], False),
        ("anything", ["", "  "], False),
        ("anything", [], False),
    ],
)
def test_whole_words_of_the_first_line(output: str, answers: list[str], expected: bool) -> None:
    assert is_match(output, answers, WHOLE_WORDS) is expected
    assert is_match(output, answers) is expected


@given(st.text(alphabet="ab é.北\u0301", max_size=8), st.text(alphabet="ab é北5-./", min_size=1, max_size=3))
def test_whole_words_are_contained_and_an_answer_is_its_own(output: str, answer: str) -> None:
    if is_match(output, [answer]) and answer.islower():
        squeezed = " ".join(output.split())
        assert (
            is_match(squeezed, [" ".join(answer.split())], CONTAINMENT) or "\u0301" in output
        )  # composed with its letter
    assert is_match(answer, [answer]) == bool(answer.strip())
    assert is_match(f"x {answer} y", [answer]) == bool(answer.strip())


@given(st.integers(0, 9999), st.integers(0, 9999), st.sampled_from("-–−"))
def test_a_sign_belongs_to_a_number_only_where_no_word_is_before_it(first: int, second: int, sign: str) -> None:
    assert not is_match(f"from {first}{sign}{second}", [f"-{second}"])
    assert is_match(f"from {first}{sign}{second}", [f"{second}"])
    assert is_match(f"It is {sign}{second}.", [f"-{second}"])
    assert not is_match(f"It is {sign}{second}.", [f"{second}"])


@given(
    st.integers(1000, 10**12),
    st.integers(1000, 10**12),
    st.sampled_from(["", ",", "'", "’", " ", "\u00a0", "\u2009", "\u202f"]),
    st.sampled_from(["", ",", "'", "’", " ", "\u00a0", "\u2009", "\u202f"]),
)
def test_a_number_is_itself_however_its_digits_are_grouped(number: int, other: int, mark: str, another: str) -> None:
    output = f"It has {number:,} people".replace(",", mark)
    assert is_match(output, [f"{number:,}".replace(",", another)])
    assert is_match(output, [str(other)]) == (number == other)


def test_another_scoring_is_refused() -> None:
    with pytest.raises(DataError, match="scoring must be one of whole-words, containment, exact-match, got 'exact'"):
        is_match("a", ["a"], "exact")


@pytest.mark.parametrize("scoring", SCORINGS)
def test_accents_are_compared_however_they_were_typed(scoring: str) -> None:
    typed = ("Bogot\u00e1", "Bogota\u0301")
    assert all(is_match(output, [answer], scoring) for output in typed for answer in typed)
    assert not any(is_match("Bogota", [answer], scoring) for answer in typed)
    assert all(f1_score(output, [answer]) == 1.0 for output in typed for answer in typed)


def test_an_exact_match_is_the_first_line_alone() -> None:
    outputs = ["\n  Paris.\nIt is in France", "the paris", "It is Paris", "", "\u200b\nParis"]
    assert [is_match(output, ["Lyon", "Paris"], "exact-match") for output in outputs] == [
        True,
        True,
        False,
        False,
        True,
    ]
