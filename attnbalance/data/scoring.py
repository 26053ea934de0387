"""Scoring: whether an output contains an accepted answer, as whole words of its first line or anywhere, or is one."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from attnbalance.arguments import expects
from attnbalance.data.lines import JOINER, first_line, visible
from attnbalance.data.squad import exact_match
from attnbalance.errors import DataError

WHOLE_WORDS, CONTAINMENT, EXACT_MATCH = SCORINGS = ("whole-words", "containment", "exact-match")
"""Ways to score an output; the first is the default."""

WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI", "LAO", "KHMER", "MYANMAR")
"""First words of the Unicode names of letters that are written without spaces between words (in Korean, particles)."""

CODE_LENGTH = 3
"""Longest answer in capitals that is a code ("US", "IT", "CAN"). A code matches only in capitals."""

PLAIN = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛ʼʻ`´׳", "'"),  # noqa: RUF001
        **dict.fromkeys("“”„‟«»״", '"'),
        **dict.fromkeys("−‐‑–", "-"),  # noqa: RUF001
        "⁄": "/",  # noqa: RUF001
        "٫": ".",  # noqa: RUF001
        "٬": ",",
    }
)
"""Typographic quotes, apostrophes, hyphens, minus signs and Arabic marks within numbers, and the plain characters that
they are compared as."""

NO_END = re.compile(r"\+\+|#|'(?:m|s|t|d|re|ve|ll)\b")
"""What belongs to the letter before it, as in "C++", "F#" and "I'm", but not in "K+"."""

FLAGS = "".join(map(chr, range(0x1F1E6, 0x1F200)))
"""The letters of which pairs are flags."""

OPTIONAL = re.compile("[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c7\u064b-\u0652\u0670\u0640]")
"""Points of Hebrew and Arabic, which are mostly left out in writing, and the stroke that lengthens Arabic words."""

APPENDED = re.compile("[™℠®©¹²³⁰-⁹]+")
"""Signs and raised digits that follow a word without belonging to it."""
EXPONENT = re.compile("(?<=[0-9])(?<![0-9]{4})⁺?(⁻?[¹²³⁰-⁹]+)")
"""A raised number after a number of up to three digits; after a longer one, such as a year, it is a footnote."""
POWER = re.compile(r"(?<=\d)(?<![0-9]{4})(?:\^\{?\+?(-?\d+)\}?|\*\*(\d+))")
"""An exponent as it is typed: "10^5", "10^{-5}", "10**5". The asterisks of "**1879**-1955" are bold type."""
FRACTION = re.compile(r"(\d)([¼-¾⅐-⅞])")
"""A digit before a fraction of one character."""
DATE = re.compile(r"(?<![\d.])(\d{1,4})\.(\d{1,2})\.(\d{1,4})(?!\.?\d)")
"""A date with points, whose parts are numbers of their own."""

YEAR = r"(?<!\b0),[12]\d{3}(?![.,]?\d)"
"""A comma and a year, as in "September 11,2001", but not in "0,1234"."""
NUMBER = re.compile(
    r"(?:(?<![\w.)])-)?(?:(?<![\d/])\d{1,3}/\d{1,3}(?![\d/])|"
    rf"(?:(?<![\w.])\.)?\d+(?:(?!{YEAR})[.,]\d+)*(?:\^[+-]?\d+(?:[.,]\d+)*)*)"
)
"""A number, which an answer matches whole: "-5", ".5", "3.14", "19,000", "1/2", "10^5". The hyphen of "1990-1995" or
"COVID-19" is not a sign, the slashes of "3/14/1879" or "1990/91" are not fraction lines, and a comma before a year ends
a number."""
GROUPED = re.compile(
    "|".join(
        rf"(?<!\d)(?<!\d[{before}])[1-9]\d{{0,2}}(?:{mark}\d{{3}}(?!\d))++(?!{after})"
        for mark, before, after in (
            (" ", "./,'", r"[,']\d{3}(?!\d)| \d{4}"),
            (",", "./,", r",\d"),
            ("'", "./'", r"'\d"),
        )
    )
)
"""A number whose digits stand in groups of three: "1,234", "1 234 567". A space may also separate numbers: "1999 2 000"
is 1999 and 2 000, and "5 200,000" is 5 and 200,000."""


def check_scoring(scoring: str) -> None:
    """Raise `DataError` for a scoring that is not one of `SCORINGS`."""
    if scoring not in SCORINGS:
        raise DataError(f"scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")


@expects(output=str, answers=[str])
def is_match(output: str, answers: Sequence[str], scoring: str = WHOLE_WORDS) -> bool:
    """Whether an output contains one of the answers; empty answers never match.

    "whole-words": the output's first line (see `first_line`) contains an answer as whole words, ignoring case. A word
    is a run of letters, digits and marks (Unicode). Punctuation ends a word: "Paris.5" contains Paris (SQuAD's rule
    would remove the point and read one word). A number keeps its minus sign, decimal point, commas, fraction line and
    exponent, so that 10 is not found in "-10", ".10", "10/8" or "10⁵", nor -5 in "10-5". A year after a comma is a
    number of its own ("September 11,2001"). Digits in groups of three are one number: "1,234" and "1 234" equal 1234.
    As a space may also separate two numbers, "1 234" contains 1 and 234 as well. Digits of other scripts equal 0 to 9,
    and curly quotes and apostrophes equal plain ones. The points of Hebrew and Arabic are ignored; accents, full stops
    ("U.S.", "St.") and prefixes are not. Chinese, Japanese, Korean, Thai, Lao, Khmer and Burmese do not separate words,
    so they match anywhere. What the line says about the answer is ignored: "Not Paris, but Lyon" contains Paris.

    Short answers are often common words in another case, so their case counts. Codes of up to three capitals ("US",
    "IT", "CAN") match only in capitals; otherwise every "it" would be Italy. If a code of three capitals is the whole
    line, it also matches in small letters ("usa"). An answer in small letters counts as such a code if it is not the
    first answer and is either two letters beside a longer answer ("in" beside "India") or three beside the same
    capitals ("can" beside "CAN"). If it is the whole line, it also matches as it is written. Other spellings of such
    capitals ("RnB" beside "RNB") match only as they are written. Three kinds match only as they are written and only
    before signs or the line's end: single capitals ("I"), two letters that begin with a capital ("He", "In"), and three
    such letters beside the same capitals ("Can" beside "CAN"). "C++", "F#" and "I'm" are words of their own. Raised
    digits after a word are taken for footnotes.

    "containment": the output contains an answer anywhere, both lower-cased and stripped (Ghosal et al. 2024, B.2), with
    accents composed (NFC). The paper's text says that both are normalised; its code lower-cases only the output. Short
    answers match inside longer words ("pol" in "Apollo", "it" in "United").

    "exact-match": the output's first line is an answer, by SQuAD's rule (see `squad.exact_match`): ignoring
    case, ASCII punctuation and English articles. SQuAD compares the whole output, but a base model goes on after it.

    Raises `DataError` for another scoring.

    >>> is_match("Paris, the capital of France", ["Paris"]), is_match("Parisian", ["Paris"])
    (True, False)
    >>> is_match("Parisian", ["Paris"], "containment")
    True
    """
    check_scoring(scoring)
    if scoring == CONTAINMENT:
        given, *names = (unicodedata.normalize("NFC", text).lower().strip() for text in (output, *answers))
        return any(name in given for name in names if name)
    line = first_line(output)
    if scoring == EXACT_MATCH:
        return exact_match(line, answers)
    wanted = [answer.strip() for answer in answers if answer.strip()]
    return any(_holds(line, answer, wanted) for answer in wanted)


def naming(texts: Iterable[str], names: Sequence[str]) -> list[bool]:
    """Whether each text holds one of the names as whole words, spelled as `is_match` allows, but in any case.

    Raises `DataError` for a name without a letter or digit.

    >>> naming(["In PARIS.", "Parisian"], ["Paris"])
    [True, False]
    """
    wanted = list(dict.fromkeys(map(_folded, names)))
    if not all(wanted):
        raise DataError(f"names must hold letters or digits, got {names[list(map(_folded, names)).index('')]!r}")
    return [any(_names(name, text, ungrouped) for name in wanted) for text, ungrouped in map(_both_ways, texts)]


@lru_cache(maxsize=2**16)
def folded(text: str) -> str:
    """One form of the spellings that `is_match` equates, in any case: of accents, quotes, digits and their groups.

    >>> folded("Saint\u2013Denis  1,000")
    'saint-denis 1000'
    """
    return _ungrouped(_folded(text))


def _folded(text: str) -> str:
    return _normalised(text, keep_case=False)


def _both_ways(text: str) -> tuple[str, str]:
    """A text as it is compared, and with numbers of grouped digits as one run."""
    folded = _folded(text)
    return folded, _ungrouped(folded)


def _names(name: str, text: str, ungrouped: str) -> bool:
    plain = _ungrouped(name)
    return (name in text and _contains(text, name, False)) or (
        plain in ungrouped and _contains(ungrouped, plain, False)
    )


def _holds(line: str, written: str, answers: Sequence[str]) -> bool:
    answer = _as_code(written, answers)
    bare = _bare(visible(line).translate(PLAIN))
    if written.isalpha() and bare == written:
        return True
    code = answer.isupper() and (len(answer) < CODE_LENGTH or (len(answer) == CODE_LENGTH and answer.isalpha()))
    cased = not code and _has_twin(answer, answers)
    symbol = answer.isalpha() and ((len(answer) == 1 and code) or ((len(answer) == 2 or cased) and answer.istitle()))
    if code and len(answer) == CODE_LENGTH and bare.upper() == answer:
        return True
    given, wanted = (_normalised(text, code or cased or symbol) for text in (line, answer))
    if GROUPED.search(wanted):  # "2 000" would be found in "2 000 000"
        given = GROUPED.sub(lambda number: number[0] if number[0] in wanted else _digits(number), given)
    return _contains(given, wanted, symbol) or _contains(_ungrouped(given), _ungrouped(wanted), symbol)


def _bare(line: str) -> str:
    """The line without signs around it; empty if the first sign after it belongs to its last letter ("C++")."""
    signs = f"{string.punctuation}{string.whitespace}"
    start = line.lstrip(signs)
    bare = start.rstrip(signs)
    return "" if NO_END.match(start, len(bare)) else bare


def _as_code(answer: str, answers: Sequence[str]) -> str:
    """An answer of few letters as the code that it spells, if it is no first answer and the others show that."""
    if answer == answers[0] or not (answer.isalpha() and answer.islower()):
        return answer
    short = len(answer) == 2 and any(len(other) > 2 for other in answers)
    return answer.upper() if short or _has_twin(answer, answers) else answer


def _has_twin(answer: str, answers: Sequence[str]) -> bool:
    """Whether an answer of three letters, which is not the first, is also there in capitals."""
    return len(answer) == CODE_LENGTH and answer.isalpha() and answer != answers[0] and answer.upper() in answers


def _contains(given: str, wanted: str, symbol: bool) -> bool:
    """Whether `wanted` occurs between ends of words, where its numbers are numbers of `given` as well.

    A symbol must stand before punctuation, another sign or the end (see `NO_END`).
    """
    numbers, own = _numbers(given), _numbers(wanted)
    for start in _starts(given, wanted) if wanted else ():
        end = start + len(wanted)
        touched = [(a - start, b - start) for a, b in numbers if a < end and b > start]
        is_word = touched == own and _ends_word(given, start) and _ends_word(given, end)
        apart = end == len(given) or (unicodedata.category(given[end])[0] in "PS" and not NO_END.match(given, end))
        if is_word and (not symbol or apart):
            return True
    return False


def _starts(text: str, part: str) -> Iterator[int]:
    start = text.find(part)
    while start >= 0:
        yield start
        start = text.find(part, start + 1)


def _ends_word(text: str, index: int) -> bool:
    """Whether a word can end or begin before the character at `index`."""
    if index in (0, len(text)):
        return True
    before, after = text[index - 1], text[index]
    if JOINER in (before, after):
        return False  # joined signs are one
    if before in FLAGS and after in FLAGS:
        return len(text[:index]) % 2 == len(text[:index].rstrip(FLAGS)) % 2  # two letters are one flag
    if unicodedata.category(after)[0] == "M":
        return False  # a mark belongs to the letter before it
    if not (_in_word(before) and _in_word(after)):
        return True
    return _runs_on(before) or _runs_on(after)


def _numbers(text: str) -> list[tuple[int, int]]:
    """Where each number starts and ends. A hyphen after a letter that separates no words is a sign."""
    apart = "".join(" " if _runs_on(character) else character for character in text)
    return [number.span() for number in NUMBER.finditer(apart)]


def _ungrouped(text: str) -> str:
    """The text with numbers of grouped digits as one run of digits."""
    return GROUPED.sub(_digits, text)


def _digits(number: re.Match[str]) -> str:
    return re.sub(r"\D", "", number[0])


def _in_word(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN"


def _runs_on(character: str) -> bool:
    return unicodedata.name(character, "").startswith(WITHOUT_SPACES)


def _normalised(text: str, keep_case: bool) -> str:
    composed = OPTIONAL.sub("", unicodedata.normalize("NFKC", _without_marks(text))).translate(PLAIN)
    plain = "".join(str(unicodedata.decimal(character, character)) for character in composed)
    folded = plain if keep_case else unicodedata.normalize("NFKC", plain.replace("İ", "i").casefold())
    return " ".join(folded.split())


def _without_marks(text: str) -> str:
    """The text without invisible characters; "Paris¹", "1½" and "14.3.1879" become separate words."""
    shown = visible(text.translate(PLAIN))
    powers = EXPONENT.sub(lambda raised: "^" + unicodedata.normalize("NFKC", raised[1]).translate(PLAIN), shown)
    plain = POWER.sub(lambda typed: f"^{typed[1] or typed[2]}", APPENDED.sub(" ", powers))
    return DATE.sub(r"\1 \2 \3", FRACTION.sub(r"\1 \2", plain))
