"""Answer tokens are read only in models whose tokenizer made them, or gives the same ids."""

from __future__ import annotations

import pytest
from tiny import tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import Fact, bridge_of
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import DataError
from attnbalance.models.hooked import hook
from attnbalance.readings.answer_checks import check_answers_alike
from attnbalance.readings.answer_tokens import make_answer_tokens
from attnbalance.readings.change import read_change
from attnbalance.readings.direct_attribution import read_direct_attribution
from attnbalance.readings.salience import read_mlp_salience, read_readout_ranks, read_value_salience, top_neurons

READERS = (
    read_direct_attribution,
    read_value_salience,
    read_mlp_salience,
    lambda model, tokens: read_mlp_salience(model, tokens, at="context"),
    read_readout_ranks,
    top_neurons,
)


def test_tokenizers_that_give_these_prompts_and_answers_the_same_ids_are_alike() -> None:
    plain, more, ending = tiny_tokenizer("bos"), tiny_tokenizer("bos"), tiny_tokenizer("eos")
    more.add_tokens(["a token of no prompt"])
    facts = [Fact(p.fact.subject, "r", p.fact.answers, question=p.fact.question) for p in tiny_prompts()]
    made = make_answer_tokens(make_prompts(facts), plain)
    for other in (more, ending):
        check_answers_alike(made, other)


def test_two_tokenizers_are_told_apart_by_a_prompt_or_by_an_answer() -> None:
    in_prompt, in_answer = tiny_tokenizer(), tiny_tokenizer()
    in_prompt.add_tokens(["Ada Lovelace"])
    in_answer.add_tokens([" mathematician"])
    facts = [Fact("Ada Lovelace", "r", ("mathematician",)), Fact("Rust", "r", ("language",))]
    made = make_answer_tokens(make_prompts(facts), tiny_tokenizer())
    for other in (in_prompt, in_answer, tiny_tokenizer("bos")):
        with pytest.raises(DataError, match="different tokenizers.*Ada Lovelace"):
            check_answers_alike(made, other)


def test_answers_that_end_where_others_go_on_need_one_end_of_sequence() -> None:
    kinds = {end: tiny_tokenizer() for end in ("</s>", "<pad>")}
    for end, tokenizer in kinds.items():
        tokenizer.eos_token = end
    own, other = kinds.values()
    assert own.eos_token_id != other.eos_token_id
    for answers, alike in ((("pop", "pop star"), False), (("pop", "star"), True)):
        made = make_answer_tokens(
            make_prompts([Fact(name, "city", (answer,)) for name, answer in zip("ab", answers, strict=True)]), own
        )
        check_answers_alike(made, own)
        if alike:
            check_answers_alike(made, other)
        else:
            with pytest.raises(DataError, match="must be the same token, got '</s>' and '<pad>'"):
                check_answers_alike(made, other)


def test_rivals_whose_prompts_were_left_out_are_still_compared() -> None:
    other = tiny_tokenizer()
    other.add_tokens([" mathematician"])
    facts = [Fact("Ada", "r", ("mathematician",)), Fact("Rust", "r", ("language",)), Fact("Go", "r", ("town",))]
    made = make_answer_tokens(make_prompts(facts), tiny_tokenizer())
    for indices in ([0, 1, 2], [1, 2], [1]):
        part = made.at(indices)
        check_answers_alike(part, tiny_tokenizer())
        with pytest.raises(DataError, match="different tokenizers.*mathematician"):
            check_answers_alike(part, other)


@pytest.mark.parametrize("read", READERS)
def test_a_model_is_not_read_at_tokens_of_another_tokenizer(read) -> None:
    model = bridge_of(hook(tiny_model("llama"), tiny_tokenizer("bos"), "tiny"))
    facts = [Fact(prompt.fact.subject, "r", prompt.fact.answers) for prompt in tiny_prompts()]
    made, other = (make_answer_tokens(make_prompts(facts), tiny_tokenizer(kind)) for kind in ("bos", "plain"))
    read(model, made)
    with pytest.raises(DataError, match="different tokenizers"):
        read(model, other)


def test_a_change_is_not_read_at_tokens_of_another_tokenizer_than_both_models() -> None:
    before, after = (hook(tiny_model("llama"), tiny_tokenizer("bos"), name) for name in ("before", "after"))
    facts = [Fact(prompt.fact.subject, "r", prompt.fact.answers) for prompt in tiny_prompts()]
    other = make_answer_tokens(make_prompts(facts), tiny_tokenizer())
    with pytest.raises(DataError, match="different tokenizers"):
        read_change(before, after, other)
