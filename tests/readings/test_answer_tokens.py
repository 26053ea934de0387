"""Answer tokens worked out by hand, with a tokenizer in which every word is one token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_prompts, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attnbalance import Fact, Prompt
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import BadRowsError
from attnbalance.readings.answer_tokens import make_answer_tokens

WORDS = "<unk> </s> : France Italy Spain India city king Paris Rome Madrid New York Delhi Juan"
ID = {word: i for i, word in enumerate(WORDS.split())}


def words(**special: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(ID, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


def prompts(*facts: tuple[str, ...], relation: str = "city") -> tuple[Prompt, ...]:
    """Prompts "relation subject :", one for each (subject, answer, further accepted answers ...)."""
    return make_prompts([Fact(subject, relation, answers) for subject, *answers in facts], "{relation} {subject} :")


def ids(text: str) -> tuple[int, ...]:
    return tuple(ID[word] for word in text.split())


def test_each_answer_is_set_against_all_others_of_its_relation_each_once() -> None:
    found = make_answer_tokens(
        (
            *prompts(("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("India", "Rome")),
            *prompts(("Spain", "Juan"), ("Italy", "Paris"), relation="king"),
        ),
        words(eos_token="</s>"),
    )
    assert found.candidates == {"city": ids("Paris Rome Madrid"), "king": ids("Juan Paris")}
    assert found.answer == (0, 1, 2, 1, 0, 1)
    assert found.others == ((1, 2), (0, 2), (0, 1), (0, 2), (1,), (0,))
    assert found.tokens == ids("Paris Rome Madrid Rome Juan Paris")
    assert found.ambiguous == 0
    assert [one.ids for one in found.encodings[:2]] == [ids("city France :"), ids("city Italy :")]


def test_among_other_prompts_each_answer_is_set_against_theirs_alone() -> None:
    read = (("Spain", "Madrid"), ("India", "Delhi"), ("Italy", "Rome"))
    others = prompts(("France", "Paris"), ("Italy", "Rome"))
    both = (*prompts(*read), *prompts(("Spain", "Juan"), ("India", "Delhi"), relation="king"))
    among = make_answer_tokens(both, words(eos_token="</s>"), among=others)
    rivals = [{among.candidates[p.fact.relation][k] for k in among.others[i]} for i, p in enumerate(both)]
    cities = set(ids("Paris Rome"))
    assert rivals == [cities, cities, set(ids("Paris")), set(ids("Delhi")), set(ids("Juan"))]  # kings: one another
    assert among.tokens == ids("Madrid Delhi Rome Juan Delhi")
    assert list(among.compared) == [*both, *others]
    for i, prompt in enumerate(both[:3]):  # each alone, as together
        alone = make_answer_tokens([prompt], words(eos_token="</s>"), among=others)
        assert {alone.candidates["city"][k] for k in alone.others[0]} == rivals[i]
        assert (alone.tokens, alone.encodings[0].ids) == (among.tokens[i : i + 1], among.encodings[i].ids)


def test_among_other_prompts_each_is_compared_behind_what_it_shares_with_them() -> None:
    read, others = prompts(("Spain", "New York"), ("France", "Paris")), prompts(("Italy", "New Delhi"))
    among = make_answer_tokens(read, words(eos_token="</s>"), among=others)
    assert among.tokens == ids("York Paris")
    assert [encoding.ids for encoding in among.encodings] == [ids("city Spain : New"), ids("city France :")]
    assert [among.candidates["city"][k] for others in among.others for k in others] == [*ids("Delhi New")]
    assert among.ambiguous == 0
    others = prompts(("Italy", "New Delhi"), ("India", "Delhi"))
    assert make_answer_tokens(read, words(eos_token="</s>"), among=others).ambiguous == 1  # "New" is Italy's too
    accepting = prompts(("Spain", "Madrid", "Paris", "Rome"))
    with pytest.raises(BadRowsError, match="every compared answer of relation 'city' is accepted for 'Spain'\ncompare"):
        make_answer_tokens(accepting, words(eos_token="</s>"), among=prompts(("France", "Paris"), ("Italy", "Rome")))
    with pytest.raises(BadRowsError, match="(?s)1 of 2 facts .*relation 'city' has the one answer 'Paris'"):
        make_answer_tokens(read, words(eos_token="</s>"), among=prompts(("Italy", "Paris")))
    with pytest.raises(BadRowsError, match="(?s)1 of 1 facts .*'New' is how other answers begin"):
        make_answer_tokens(read[:1], words(), among=prompts(("Italy", "New")))


def test_answers_that_a_fact_accepts_as_well_are_no_others() -> None:
    facts = (("France", "Paris", "Rome", "Lutetia"), ("Italy", "Rome"), ("Spain", "Madrid"))
    assert make_answer_tokens(prompts(*facts), words()).others == ((2,), (2,), (0, 1))


def test_one_answer_spelled_in_two_ways_is_no_rival_of_itself() -> None:
    facts = [Fact(f"Town {i}", "capital", (answer,)) for i, answer in enumerate(("Paris", "paris", "Rome"))]
    found = make_answer_tokens(make_prompts(facts), tiny_tokenizer("bos"))
    rome = found.answer[2]
    assert found.others[0] == found.others[1] == (rome,)
    assert found.others[2] == tuple(k for k in range(len(found.candidates["capital"])) if k != rome)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("Paris", "Lutetia"), ("Rome", "Lutetia")),  # a further answer of both
        (("Paris", "Lutetia"), ("Rome", "LUTETIA")),  # in another case
        (("Paris", "rome"), ("Rome",)),
        (("Paris", "Straße"), ("Rome", "Paris", "STRASSE")),
    ],
)
def test_facts_that_share_an_accepted_answer_in_any_case_are_no_rivals(
    first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    facts = (("France", *first), ("Italy", *second), ("Spain", "Madrid", "Juan"), ("India", "Delhi"))
    found = make_answer_tokens(prompts(*facts), words())
    assert found.others == ((2, 3), (2, 3), (0, 1, 3), (0, 1, 2))
    assert found.ambiguous == 0


def test_a_token_that_another_answer_shares_is_counted_as_ambiguous() -> None:
    facts = (("France", "New York"), ("India", "New Delhi"), ("Spain", "Madrid"))
    found = make_answer_tokens(prompts(*facts), words())
    assert found.candidates == {"city": ids("New Madrid")}
    assert (found.answer, found.others, found.ambiguous) == ((0, 0, 1), ((1,), (1,), (0,)), 2)
    accepting = (("France", "New York", "New Delhi"), *facts[1:])  # cannot mistake one for the other
    assert make_answer_tokens(prompts(*accepting), words()).ambiguous == 0


def test_a_fact_of_two_answers_hides_no_rivals_of_others() -> None:
    """Fay is a poet and a lawyer. Dan is a poet alone, so "Madrid" (poet) stays wrong for Ann (lawyer, "Paris")."""
    facts = (("Ann", "Paris"), ("Bob", "Paris"), ("Dan", "Madrid"), ("Eve", "Rome"), ("Fay", "Madrid", "Paris"))
    tokens = make_answer_tokens(prompts(*facts), words())
    assert tokens.candidates == {"city": ids("Paris Madrid Rome")}
    assert tokens.others == ((1, 2), (1, 2), (0, 2), (0, 1), (2,))
    assert tokens.ambiguous == 0


def test_a_wrong_answer_that_begins_like_another_right_one_is_left_out_and_counted() -> None:
    """France's answer has a second name, "New York", which India gives; Spain's "New Delhi" begins alike."""
    facts = (("France", "Paris", "New York"), ("India", "New York"), ("Spain", "New Delhi"), ("Italy", "Rome"))
    tokens = make_answer_tokens(prompts(*facts), words())
    assert tokens.candidates == {"city": ids("Paris New Rome")}
    assert (tokens.others, tokens.ambiguous) == (((2,), (2,), (0, 2), (0, 1)), 3)
    with pytest.raises(BadRowsError, match="every answer of relation 'city' begins like one that is accepted for"):
        make_answer_tokens(prompts(*facts[:3]), words())


def test_tokens_that_all_answers_begin_with_are_put_behind_the_prompt() -> None:
    city = prompts(("France", "New York"), ("India", "New Delhi"))
    king = prompts(("Spain", "Juan"), ("France", "New York"), relation="king")
    found = make_answer_tokens((city[0], *king, city[1]), words())
    assert found.candidates == {"city": ids("York Delhi"), "king": ids("Juan New")}
    assert [one.ids for one in found.encodings] == [
        ids("city France : New"),
        ids("king Spain :"),
        ids("king France :"),
        ids("city India : New"),
    ]
    assert found.encodings[0].tokens[-1] == "New"
    assert found.encodings[0].spans == {"relation": (0,), "subject": (1,)}
    assert found.ambiguous == 0


def test_an_answer_that_others_go_on_from_is_told_by_its_end_where_there_is_one() -> None:
    some = prompts(("France", "New"), ("India", "New Delhi"))
    found = make_answer_tokens(some, words(eos_token="</s>"))
    assert found.candidates == {"city": (1, ID["Delhi"])}
    assert [one.ids[-1] for one in found.encodings] == [ID["New"]] * 2
    with pytest.raises(BadRowsError, match="no end of sequence") as one:
        make_answer_tokens(some, words())
    assert one.value.indices == (0,)


def test_rivals_weigh_by_how_probable_they_are_and_equal_ones_give_the_mean() -> None:
    found = make_answer_tokens(prompts(("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid")), words())
    W_U = torch.randn(5, len(ID), generator=torch.Generator().manual_seed(0))
    even = replace(found, weights=((0.5, 0.5),) * 3)
    torch.testing.assert_close(even.direction(W_U), found.direction(W_U))
    one = replace(found, weights=((1.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
    columns = [W_U[:, ID[name]] for name in ("Paris", "Rome", "Madrid")]
    rivals = [columns[1], columns[0], columns[1]]
    expected = torch.stack([mine - rival for mine, rival in zip(columns, rivals, strict=True)])
    torch.testing.assert_close(one.direction(W_U), expected)


def test_facts_with_nothing_to_be_set_against_are_named() -> None:
    city = prompts(("France", "Paris"), ("Italy", "Rome"))
    king = prompts(("Spain", "Juan"), ("Italy", "Juan"), relation="king")
    with pytest.raises(BadRowsError, match=r"2 of 4 facts have no other(.|\n)*'king' has the one answer 'Juan'") as one:
        make_answer_tokens((king[0], *city, king[1]), words())
    assert one.value.indices == (0, 3)
    facts = (("France", "Paris", "Rome"), ("Italy", "Rome"))
    with pytest.raises(BadRowsError, match=r"2 of 2 (.|\n)*every answer of relation 'city' is accepted for 'France'"):
        make_answer_tokens(prompts(*facts), words())


def test_directions_give_the_logit_difference_of_a_naive_loop_over_logits() -> None:
    facts = (("France", "Paris"), ("Italy", "Rome", "Paris"), ("Spain", "Madrid"), ("India", "New Delhi"))
    found = make_answer_tokens((*prompts(*facts), *prompts(*facts[1:], relation="king")), words())
    generator = torch.Generator().manual_seed(0)
    W_U, states = torch.randn(8, len(ID), generator=generator), torch.randn(7, 8, generator=generator)
    first = ("Paris", "Rome", "Madrid", "New")
    expected = []
    for i, state in enumerate(states):
        k, known = (i, first) if i < 4 else (i - 3, first[1:])
        logits = [float(sum(state[d] * W_U[d, v] for d in range(8))) for v in range(len(ID))]
        others = [logits[ID[word]] for word in known if word != first[k] and {first[k], word} != {"Rome", "Paris"}]
        expected.append(logits[ID[first[k]]] - sum(others) / len(others))
    # float32 sums of eight products of entries up to 3
    torch.testing.assert_close((found.direction(W_U) * states).sum(1), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    some = found.at([5, 0])
    torch.testing.assert_close(some.direction(W_U), found.direction(W_U)[[5, 0]])
    assert (len(some), some.tokens, some.candidates) == (2, ids("Madrid Paris"), found.candidates)


def test_answers_that_begin_with_a_bare_space_are_compared_with_each_other_behind_it() -> None:
    """This tokenizer merges the space with the first byte of some answers alone."""
    facts = [Fact(p.fact.subject, "r", p.fact.answers, question=p.fact.question) for p in tiny_prompts()]
    tokenizer = tiny_tokenizer()
    answer_tokens = make_answer_tokens(make_prompts(facts), tokenizer)
    spelled = [tokenizer(" " + fact.answer, add_special_tokens=False)["input_ids"] for fact in facts]
    space = tokenizer(" ", add_special_tokens=False)["input_ids"][0]
    behind = [answer[0] == space for answer in spelled]
    assert 1 < sum(behind) < 8
    assert answer_tokens.tokens == tuple(answer[int(bare)] for answer, bare in zip(spelled, behind, strict=True))
    candidates = answer_tokens.candidates["r"]
    for i, encoding in enumerate(answer_tokens.encodings):
        plain = tokenizer(answer_tokens.prompts[i].text, add_special_tokens=False)["input_ids"]
        assert list(encoding.ids) == plain + [space] * behind[i]
        rivals = {answer[int(bare)] for answer, bare in zip(spelled, behind, strict=True) if bare == behind[i]}
        rivals |= set() if behind[i] else {space}  # with which all others begin
        assert {candidates[k] for k in answer_tokens.others[i]} == rivals - {answer_tokens.tokens[i]}
    assert answer_tokens.ambiguous == sum(behind)


def test_an_answer_whose_only_rivals_begin_otherwise_is_compared_with_all(stories: Path) -> None:
    """7 and 3 begin with a bare space; Ann accepts both, so her rivals are the others."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    answers = {"Tim": ("the",), "Sam": ("she",), "Ann": ("7", "3"), "Bob": ("3",)}
    facts = [Fact(subject, "r", accepted) for subject, accepted in answers.items()]
    made = make_answer_tokens(make_prompts(facts), tokenizer)
    shown = [tokenizer.convert_ids_to_tokens([made.candidates["r"][k] for k in others]) for others in made.others]
    assert tokenizer.convert_ids_to_tokens(list(made.tokens))[2] == "▁"
    assert sorted(shown[2]) == sorted(shown[3]) == ["▁she", "▁the"]


def test_a_name_in_another_unicode_form_is_no_rival_of_itself() -> None:
    names = ("\u00c9mile", "E\u0301mile", "Rome")
    facts = [Fact(f"S{i}", "r", (name,), None, f"Who is S{i}?") for i, name in enumerate(names)]
    tokens = make_answer_tokens(make_prompts(facts), tiny_tokenizer())
    assert facts[0].folded_answers == facts[1].folded_answers
    rome = tokens.tokens[2]
    for i in (0, 1):
        assert {tokens.candidates["r"][k] for k in tokens.others[i]} <= {rome}
