"""Objectives: the grammar, every term by hand, and gradients against plain eager attention, one prompt at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny import FACTS, eager, tiny_model, tiny_tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import PreTrainedModel

from attnbalance import HookedModel
from attnbalance.errors import DataError, ModelError
from attnbalance.finetune.examples import INPUTS, QUERY, SPAN, TARGET, Example, collate, make_examples
from attnbalance.finetune.objectives import (
    FORMS,
    RECOMMENDED,
    TERMS,
    ForwardPass,
    Objective,
    Term,
    parse_objective,
)
from attnbalance.finetune.targets import add_targets
from attnbalance.models.forward import rows_of_output, states_of_output
from attnbalance.models.hooked import hook

FAMILIES = ("llama", "gpt2", "neox", "qwen3", "gemma2", "gpt_oss")
ROW_OBJECTIVES = (
    "floor(0.3)",
    "barrier",
    "balance",
    "row-anchor(question)",
    "row-anchor(statement)",
    "state-anchor(statement)",
    "state-anchor(question)",
    "kl(statement)",
    "kl(question)",
)
TEMPLATE = "What {relation} has {subject}?"
"""The subject stands among the last tokens, within the windows of gemma2 and gpt_oss; prompts differ in length."""

CHOSEN = (*FACTS[:3], FACTS[7])


# The grammar ---------------------------------------------------------------------------------------------------------


def test_terms_are_read_with_their_weights_arguments_and_defaults() -> None:
    found = parse_objective(" ce+0.3 * row-anchor( question ) +1e-2*kl + floor(.25)+weighted-ce(salience) ").terms
    assert [(term.name, term.argument, term.weight) for term in found] == [
        ("ce", None, 1.0),
        ("row-anchor", "question", 0.3),
        ("kl", "statement", 0.01),
        ("floor", 0.25, 1.0),
        ("weighted-ce", "salience", 1.0),
    ]
    assert [term.key for term in found] == [
        "ce",
        "row-anchor(question)",
        "kl(statement)",
        "floor(0.25)",
        "weighted-ce(salience)",
    ]
    assert parse_objective("floor").terms[0].argument == 0.5
    assert parse_objective("weighted-ce()").terms[0].argument == "relevance"


def test_the_text_of_an_objective_reads_as_the_same_objective() -> None:
    for text in ("ce", "recommended", "ce+2*floor(0.1) + 1.5*kl(few-shot)", "ce + recommended + 3*project"):
        found = parse_objective(text)
        assert parse_objective(found.text) == found
        assert "recommended" not in found.text
    assert parse_objective("recommended").text == RECOMMENDED


def test_what_an_objective_needs_is_what_its_terms_need() -> None:
    assert parse_objective("ce").needs == frozenset()
    assert parse_objective("ce + barrier").needs == {"rows", "span subject"}
    assert parse_objective("balance + kl").needs == {"rows", "span subject", "span relation", "base"}
    assert parse_objective("state-anchor").needs == {"states", "base"}
    assert parse_objective("ce + weight-anchor").needs == {"gradients"}


def test_only_cross_entropy_of_weight_one_is_plain() -> None:
    plain = {text: parse_objective(text).plain for text in ("ce", "1*ce", "2*ce", "ce + floor", "kl")}
    assert plain == {"ce": True, "1*ce": True, "2*ce": False, "ce + floor": False, "kl": False}


def test_weights_of_one_name_add_up() -> None:
    objective = parse_objective("ce + 0.5*kl(statement) + 2*kl(question)")
    assert [objective.weight(name) for name in ("ce", "kl", "floor")] == [1.0, 2.5, 0.0]


@pytest.mark.parametrize("text", ["cross-entropy", "ce + fame", "ce +", "", "kl(statement", "ce ce", "x*ce", "CE"])
def test_what_cannot_be_read_is_refused_with_the_list_of_names(text: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_objective(text)
    for name in TERMS:
        assert name in str(caught.value)
    assert f"recommended = {RECOMMENDED}" in str(caught.value)
    assert "kl(statement|question|few-shot)" in str(caught.value)


@pytest.mark.parametrize("weight", ["0", "-1", "0.0", "1e999", "1.2.3", "-0.5"])
def test_weights_are_numbers_above_zero(weight: str) -> None:
    with pytest.raises(DataError, match=f"weight of floor must be a number above 0, got '{weight}'"):
        parse_objective(f"ce + {weight}*floor(0.2)")


@pytest.mark.parametrize("share", ["0", "1", "1.5", "-0.1", "half", "nan"])
def test_a_share_lies_between_0_and_1(share: str) -> None:
    with pytest.raises(DataError, match=rf"expected floor\(SHARE between 0 and 1.*got floor\({share}\)"):
        parse_objective(f"ce + floor({share})")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kl(fame)", r"expected kl\(statement\|question\|few-shot\), got kl\(fame\)"),
        ("row-anchor(0.5)", r"expected row-anchor\(statement\|question\|few-shot\), got"),
        ("ce(statement)", r"expected ce, got ce\(statement\)"),
        ("weighted-ce(loss)", r"expected weighted-ce\(relevance\|salience\), got"),
        ("ce + 2*ce", "names ce twice"),
        ("floor + floor(0.5)", r"names floor\(0.5\) twice"),
        ("recommended + kl", r"names kl\(statement\) twice"),
        ("project", "has no loss, only project"),
        ("project + 2*weight-anchor", "no loss, only project, which changes gradients; add e.g. ce"),
        ("ce + 2*recommended", "recommended takes no weight; write out"),
    ],
)
def test_terms_that_do_not_go_are_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_objective(text)


def test_one_name_may_stand_with_several_arguments() -> None:
    assert len(parse_objective("kl(statement) + kl(question) + kl(few-shot)").terms) == len(FORMS)


# Terms by hand -------------------------------------------------------------------------------------------------------


def made(rows: Tensor | None = None, logits: Tensor | None = None, **more: object) -> ForwardPass:
    """Two examples of three labelled tokens; subject at position 0 (in the second: 0 and 1), relation at 2."""
    spans = {
        "subject": torch.tensor([[True, False, False, False], [True, True, False, False]]),
        "relation": torch.tensor([[False, False, True, False], [False, False, True, False]]),
    }
    logits = torch.zeros(3, 4) if logits is None else logits
    return ForwardPass(
        logits, torch.tensor([1, 2, 3]), torch.tensor([0, 0, 1]), 2, rows, None, spans, more.pop("targets", {}), **more
    )


def hand_rows() -> Tensor:
    """Rows [example 2, layer 2, head 2, position 4]."""
    first = [[[0.1, 0.2, 0.6, 0.1], [0.3, 0.3, 0.2, 0.2]], [[0.8, 0.1, 0.1, 0.0], [0.6, 0.2, 0.0, 0.2]]]
    second = [[[0.1, 0.1, 0.4, 0.4], [0.2, 0.0, 0.4, 0.4]], [[0.3, 0.3, 0.3, 0.1], [0.2, 0.2, 0.5, 0.1]]]
    return torch.tensor([first, second])


def losses(text: str, found: ForwardPass) -> list[float]:
    (term,) = parse_objective(text).terms
    return term.losses(found).tolist()


def test_shares_by_hand() -> None:
    found = made(hand_rows())
    expected = {
        "subject": [[[0.1, 0.3], [0.8, 0.6]], [[0.2, 0.2], [0.6, 0.4]]],
        "relation": [[[0.6, 0.2], [0.1, 0.0]], [[0.4, 0.4], [0.3, 0.5]]],
    }
    for role, numbers in expected.items():
        torch.testing.assert_close(found.share(role), torch.tensor(numbers))


def test_floor_by_hand_is_the_mean_over_layers_of_what_the_heads_mean_lacks() -> None:
    # Layers' mean shares: 0.2 and 0.7; 0.2 and 0.5. A hinge by head would not be 0 for 0.15: one head has 0.1.
    assert losses("floor(0.5)", made(hand_rows())) == pytest.approx([(0.3 + 0) / 2, (0.3 + 0) / 2])
    assert losses("floor(0.6)", made(hand_rows())) == pytest.approx([0.4 / 2, (0.4 + 0.1) / 2])
    assert losses("floor(0.15)", made(hand_rows())) == [0.0, 0.0]
    assert losses("3*floor(0.5)", made(hand_rows())) == pytest.approx([0.45, 0.45])


def test_barrier_by_hand() -> None:
    expected = [-(math.log(0.2) + math.log(0.7)) / 2, -(math.log(0.2) + math.log(0.5)) / 2]
    assert losses("barrier", made(hand_rows())) == pytest.approx(expected)
    assert losses("barrier", made(torch.zeros(2, 2, 2, 4))) == pytest.approx([-math.log(1e-6)] * 2)  # and no infinity


def test_balance_by_hand() -> None:
    # relation minus subject: 0.4 - 0.2 and 0.05 - 0.7; 0.4 - 0.2 and 0.4 - 0.5
    assert losses("balance", made(hand_rows())) == pytest.approx([0.1, 0.1])


def test_row_anchors_by_hand() -> None:
    rows = hand_rows()
    base = rows.clone()
    base[0, 1, 0] = torch.tensor([0.5, 0.1, 0.4, 0.0])  # off by -0.3, 0, 0.3, 0: squared 0.18, over 4 heads 0.045
    whole = made(rows, targets={"row-anchor(question)/position": base})
    assert losses("row-anchor(question)", whole) == pytest.approx([0.045, 0.0], abs=1e-7)
    shares = torch.tensor([[[0.1, 0.3], [0.4, 0.6]], [[0.2, 0.2], [0.6, 0.2]]])  # off by 0.4 and by 0.2, once each
    for form in ("statement", "few-shot"):
        found = made(rows, targets={f"row-anchor({form})": shares})
        assert losses(f"row-anchor({form})", found) == pytest.approx([0.16 / 4, 0.04 / 4], abs=1e-7)


def test_state_anchor_by_hand() -> None:
    base = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [1.0, 1.0]]])
    states = torch.tensor([[[3.0, 9.0], [1.0, 1.0]], [[0.0, 2.0], [1.0, 3.0]]])
    found = replace(made(targets={"state-anchor(statement)": base}), states=states)
    assert losses("state-anchor", found) == pytest.approx([(25 / 25 + 1 / 1) / 2, (0 + 4 / 2) / 2])


def test_weighted_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.5], [1.0, -1.0, 0.0, 0.0], [0.3, 0.2, 0.1, 0.0]])
    plain = [math.log(sum(map(math.exp, row))) - row[k] for row, k in zip(logits.tolist(), (1, 2, 3), strict=True)]
    found = made(logits=logits, targets={"weighted-ce(relevance)": torch.tensor([0.1, 1.0])})
    assert losses("ce", found) == pytest.approx(plain)
    assert losses("0.5*ce", found) == pytest.approx([x / 2 for x in plain])
    assert losses("weighted-ce", found) == pytest.approx([0.1 * plain[0], 0.1 * plain[1], plain[2]])


def test_divergence_by_hand_with_all_other_tokens_as_one() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 3).log()
    ids = torch.tensor([[1, 2], [3, 0], [2, 2]], dtype=torch.int32)
    base = torch.tensor([[0.5, 0.3], [0.9, 0.1], [1.0, 0.0]]).log()
    found = made(logits=logits, targets={"kl(statement) ids/token": ids, "kl(statement)/token": base})
    expected = [
        0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.3) + 0.2 * math.log(0.2 / 0.3),  # the rest: 0.2 and 0.3
        0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.1),  # no rest
        -math.log(0.3),  # one token for certain, as at the end of an answer: cross-entropy
    ]
    assert losses("kl", found) == pytest.approx(expected, abs=1e-6)


def test_terms_that_act_on_gradients_add_nothing_to_the_loss() -> None:
    for name in ("project", "weight-anchor"):
        term = parse_objective(f"ce + 5*{name}").terms[1]
        assert term.losses(made(hand_rows())).tolist() == [0.0, 0.0]


def test_by_token_is_told_of_the_terms_that_give_a_number_a_token() -> None:
    assert {name for name in TERMS if Term(name, None, 1.0, frozenset()).by_token} == {"ce", "kl", "weighted-ce"}


def test_rows_and_states_that_were_not_asked_for_are_named() -> None:
    with pytest.raises(ModelError, match="looks at attention rows, and the forward pass gave none"):
        losses("floor", made())
    with pytest.raises(ModelError, match="looks at the residual stream, and the forward pass gave none"):
        losses("state-anchor", made(targets={"state-anchor(statement)": torch.zeros(2, 2, 2)}))


# In models -----------------------------------------------------------------------------------------------------------


@cache
def pair(family: str) -> tuple[HookedModel, HookedModel, PreTrainedModel, PreTrainedModel]:
    """A base and a model that was moved away from it, as we hook them, and both with plain eager attention."""
    base, model = tiny_model(family), tiny_model(family)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    oracles = eager(base), eager(model)
    tokenizer = tiny_tokenizer()
    return hook(base, tokenizer, "base"), hook(model, tokenizer, "model"), *oracles


def forward(model: HookedModel, examples: list[Example]) -> ForwardPass:
    """One right-padded batch through our attention function, as the trainer runs it."""
    batch = collate(examples, model.pad_id)
    inputs = {name: batch[name] for name in INPUTS}
    asked = {QUERY: batch[QUERY], "output_attentions": True, "output_hidden_states": True, "use_cache": False}
    output = model.model(**inputs, **asked)
    example, place = (batch["labels"][:, 1:] != -100).nonzero().unbind(-1)
    return ForwardPass(
        output.logits[example, place],
        batch["labels"][example, place + 1],
        example,
        len(examples),
        rows_of_output(output, model.kernel, batch[QUERY], batch["attention_mask"] != 0),
        states_of_output(output, batch[QUERY]),
        {name.removeprefix(SPAN): part for name, part in batch.items() if name.startswith(SPAN)},
        {name.removeprefix(TARGET): part for name, part in batch.items() if name.startswith(TARGET)},
    )


def examples_for(objective: Objective, family: str) -> list[Example]:
    base = pair(family)[0]
    return add_targets(make_examples(CHOSEN, base.tokenizer, TEMPLATE), objective, base, batch_size=3)


def loss_of(text: str, model: HookedModel, examples: list[Example]) -> Tensor:
    (term,) = parse_objective(text).terms
    return term.losses(forward(model, examples)).mean()


class Plain:
    """One prompt alone through plain transformers: its last row in each layer, its states and its predictions."""

    def __init__(self, model: PreTrainedModel, text: str, subject: str, relation: str | None, answer: str) -> None:
        tokenizer = tiny_tokenizer()
        found = tokenizer(text)
        self.prompt = len(found["input_ids"])
        ids = [*tokenizer(f"{text} {answer}")["input_ids"], tokenizer.eos_token_id]
        output = model(
            input_ids=torch.tensor([ids]), output_attentions=True, output_hidden_states=True, use_cache=False
        )
        last = self.prompt - 1
        self.rows = [layer[0, :, last, : self.prompt] for layer in output.attentions]
        self.states = [one[0, last] for one in output.hidden_states[1:]]
        self.answer = ids[self.prompt :]
        self.logits = output.logits[0, last:-1]

        def tokens(part: str) -> list[int]:
            start = text.index(part)
            return sorted({found.char_to_token(c) for c in range(start, start + len(part))})

        self.subject = tokens(subject)
        self.relation = tokens(relation) if relation else []


def share(row: Tensor, places: list[int]) -> Tensor:
    return torch.stack([row[place] for place in places]).sum()


def by_layer(rows: list[Tensor], places: list[int]) -> list[Tensor]:
    return [torch.stack([share(head, places) for head in layer]).mean() for layer in rows]


def written_out(text: str, model: PreTrainedModel, base: PreTrainedModel) -> Tensor:
    """An objective over `CHOSEN`, each prompt alone, layer by layer and head by head."""
    parts: list[Tensor] = []
    for fact in CHOSEN:
        own = Plain(model, f"What {fact.relation} has {fact.subject}?", fact.subject, fact.relation, fact.answer)
        question = f"What {fact.relation} has {fact.subject}?"
        asked = question if "question" in text else f"The {fact.relation} of {fact.subject} is"
        with torch.no_grad():
            held = Plain(base, asked, fact.subject, None, fact.answer)
        subject = by_layer(own.rows, own.subject)
        if text == "floor(0.3)":
            parts.append(torch.stack([torch.relu(0.3 - one) for one in subject]).mean())
        elif text == "barrier":
            parts.append(torch.stack([-torch.log(one.clamp(min=1e-6)) for one in subject]).mean())
        elif text == "balance":
            relation = by_layer(own.rows, own.relation)
            parts.append(torch.stack([torch.relu(r - s) for r, s in zip(relation, subject, strict=True)]).mean())
        elif text == "row-anchor(question)":
            heads = [
                ((one - other) ** 2).sum()
                for layer, wanted in zip(own.rows, held.rows, strict=True)
                for one, other in zip(layer, wanted, strict=True)
            ]
            parts.append(torch.stack(heads).mean())
        elif text == "row-anchor(statement)":
            heads = [
                (share(one, own.subject) - share(other, held.subject)) ** 2
                for layer, wanted in zip(own.rows, held.rows, strict=True)
                for one, other in zip(layer, wanted, strict=True)
            ]
            parts.append(torch.stack(heads).mean())
        elif text.startswith("state-anchor"):
            ratios = [
                ((one - other) ** 2).sum() / (other**2).sum()
                for one, other in zip(own.states, held.states, strict=True)
            ]
            parts.append(torch.stack(ratios).mean())
        else:
            inner = len(own.answer) - 1  # all tokens but the end, which is learned by cross-entropy
            own_log, base_log = own.logits.log_softmax(-1), held.logits.log_softmax(-1)
            parts += list(kl_div(own_log[:inner], base_log[:inner], reduction="none", log_target=True).sum(-1))
            parts.append(cross_entropy(own.logits[inner:], torch.tensor(own.answer[inner:])))
    return torch.stack(parts).mean()


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@pytest.mark.parametrize("text", ROW_OBJECTIVES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_the_objective_written_out_on_eager_attention(family: str, text: str) -> None:
    _, model, plain_base, plain = pair(family)
    expected = written_out(text, plain, plain_base)
    found = loss_of(text, model, examples_for(parse_objective(text), family))
    # Float32 keeps seven digits: 1e-6 where numbers are below 1, and of the largest entry where gradients are above 1.
    # kl adds up some twelve predictions of 420 tokens each: eager attention in a padded batch is off from itself, one
    # prompt at a time, by up to 1.7e-6 there (gpt_oss), so that kl is given twice as much.
    slack = 2e-6 if text.startswith("kl") else 1e-6
    assert found.item() == pytest.approx(expected.item(), abs=1e-6, rel=1e-6)
    assert expected.item() > 1e-4  # there is something to be wrong about
    mine, theirs = gradients(found, model.model), gradients(expected, plain)
    largest = max(float(one.abs().max()) for one in theirs)
    assert largest > 1e-3
    for (name, _), one, other in zip(plain.named_parameters(), mine, theirs, strict=True):
        torch.testing.assert_close(
            one, other, atol=slack * max(1.0, largest), rtol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("text", ["ce", *ROW_OBJECTIVES, "weighted-ce(relevance)"])
def test_padding_and_batch_order_change_no_loss(text: str) -> None:
    model = pair("llama")[1]
    (term,) = parse_objective(text).terms
    examples = examples_for(parse_objective(text), "llama")
    whole = term.losses(forward(model, examples)).tolist()
    alone = [term.losses(forward(model, [one])).tolist() for one in examples]
    back = [one for part in reversed(alone) for one in part]
    reverse = term.losses(forward(model, examples[::-1])).tolist()
    # Seven digits, in other batch shapes; losses lie between 1e-4 and 10, the smallest being differences of shares
    # near 1, so absolutely off by some 1e-7.
    assert whole == pytest.approx([one for part in alone for one in part], rel=1e-5, abs=1e-6)
    assert reverse == pytest.approx(back, rel=1e-5, abs=1e-6)
    assert len(set(whole)) > 1


def test_cross_entropy_is_the_loss_that_transformers_computes() -> None:
    _, model, _, plain = pair("llama")
    examples = make_examples(CHOSEN, model.tokenizer, TEMPLATE)
    batch = collate(examples)
    expected = plain(**{name: batch[name] for name in INPUTS}, labels=batch["labels"], use_cache=False).loss
    assert loss_of("ce", model, examples).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("text", ["row-anchor(question)", "state-anchor(question)"])
def test_the_base_is_at_its_own_anchors_and_feels_no_pull(family: str, text: str) -> None:
    base = pair(family)[0]
    loss = loss_of(text, base, examples_for(parse_objective(text), family))
    # Left-padded when read and right-padded here: rows and states differ in their seventh digit, squares by 1e-13;
    # the gradient is twice such a difference times a slope of at most some hundreds.
    assert loss.item() == pytest.approx(0, abs=1e-11)
    assert max(float(one.abs().max()) for one in gradients(loss, base.model)) < 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_base_does_not_diverge_from_itself(family: str) -> None:
    base = pair(family)[0]
    (term,) = parse_objective("kl(question)").terms
    found = forward(base, examples_for(parse_objective("kl(question)"), family))
    end = found.labels == base.tokenizer.eos_token_id  # learned by cross-entropy, and so not at rest
    divergence = term.losses(found)[~end]
    # 420 terms p (log p - log q), each off by 1e-6 p
    assert divergence.tolist() == pytest.approx([0.0] * int((~end).sum()), abs=3e-6)
    largest = [
        max(float(one.abs().max()) for one in gradients(loss, base.model))
        for loss in (divergence.mean(), loss_of("kl(statement)", base, examples_for(parse_objective("kl"), family)))
    ]
    assert largest[0] < 1e-5 * largest[1]  # rounding, beside the pull from another form


def test_a_floor_that_is_met_gives_no_gradient() -> None:
    model = pair("llama")[1]
    examples = make_examples(CHOSEN, model.tokenizer, TEMPLATE)
    lowest = float(forward(model, examples).share("subject").mean(-1).min())
    assert 0.01 < lowest < 0.99
    met = loss_of(f"floor({lowest - 0.005:.6f})", model, examples)
    assert met.item() == 0
    assert not any(one.any() for one in gradients(met, model.model))
    missed = loss_of(f"floor({lowest + 0.005:.6f})", model, examples)
    assert any(one.any() for one in gradients(missed, model.model))


@pytest.mark.parametrize("text", ["floor(0.99)", "barrier", "balance"])
def test_descending_a_row_objective_raises_attention_to_the_subject(text: str) -> None:
    base = tiny_model("llama")
    model = hook(base, tiny_tokenizer(), "model")
    examples = make_examples(CHOSEN, model.tokenizer, TEMPLATE)

    def excess() -> float:
        found = forward(model, examples)
        other = found.share("relation") if text == "balance" else torch.zeros(())
        return float((found.share("subject") - other).mean())

    before, slopes = excess(), gradients(loss_of(text, model, examples), base)
    size = math.sqrt(sum(float(one.square().sum()) for one in slopes))
    with torch.no_grad():
        for parameter, slope in zip(base.parameters(), slopes, strict=True):
            parameter -= 0.01 / size * slope
    assert excess() > before
