"""Cross-entropy against transformers, and the weights of weighted-ce against theorems and formulas by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from base_oracle import (
    TOWNS,
    added,
    base,
    only,
)
from objective_oracle import (
    CHOSEN as FOUR,
)
from objective_oracle import (
    TEMPLATE,
    loss_of,
    losses,
    made,
    pair,
)
from one_layer import VOCABULARY as WORDS
from one_layer import one_layer, word_prompts, word_tokenizer
from peft import LoraConfig, get_peft_model
from tiny import FACTS, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from attnbalance import HookedModel, Prompt, load_model
from attnbalance.data.prompts import make_prompts
from attnbalance.finetuning.examples import (
    INPUTS,
    Example,
    collate,
    examples_of,
    make_examples,
)
from attnbalance.finetuning.objectives import cross_entropy
from attnbalance.finetuning.objectives.cross_entropy import DOWNWEIGHT
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.targets import add_targets
from attnbalance.models.hooked import hook
from attnbalance.readings.relevance import read_relevance


def test_weighted_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.5], [1.0, -1.0, 0.0, 0.0], [0.3, 0.2, 0.1, 0.0]])
    plain = [math.log(sum(map(math.exp, row))) - row[k] for row, k in zip(logits.tolist(), (1, 2, 3), strict=True)]
    forward_pass = made(logits=logits, targets={"weighted-ce(relevance)": torch.tensor([0.1, 1.0])})
    assert losses("ce", forward_pass) == pytest.approx(plain)
    assert losses("0.5*ce", forward_pass) == pytest.approx([x / 2 for x in plain])
    assert losses("weighted-ce", forward_pass) == pytest.approx([0.1 * plain[0], 0.1 * plain[1], plain[2]])


def test_cross_entropy_is_the_loss_that_transformers_computes() -> None:
    _, model, _, plain = pair("llama")
    examples = make_examples(FOUR, model.tokenizer, TEMPLATE)
    batch = collate(examples)
    expected = plain(**{name: batch[name] for name in INPUTS}, labels=batch["labels"], use_cache=False).loss
    assert loss_of("ce", model, examples).item() == pytest.approx(expected.item(), rel=1e-6)


def test_relevance_weighs_facts_by_the_sign_of_their_push_prompt_by_prompt() -> None:
    model = base()[0]
    facts = [replace(fact, answers=(answer,)) for answer in ("Paris", "golf") for fact in FACTS]
    prompts = make_prompts(facts)
    pushes = [float(read_relevance(model, [prompt]).push.values.double().sum()) for prompt in prompts]
    expected = [DOWNWEIGHT if push < 0 else 1.0 for push in pushes]
    assert set(expected) == {1.0, DOWNWEIGHT}
    examples = added("weighted-ce(relevance)", facts, batch_size=5)
    assert [float(only(example, "weighted-ce(relevance)")) for example in examples] == pytest.approx(expected)


def stated_by_hand() -> tuple[list[Prompt], list[Example], HookedModel, PreTrainedModel]:
    model, prompts = one_layer(), list(word_prompts())
    hooked = load_model(model, tokenizer=word_tokenizer())
    return prompts, examples_of(prompts, hooked.tokenizer), hooked, model


def test_in_one_layer_relevance_weights_follow_theorem_4_5() -> None:
    prompts, examples, hooked, model = stated_by_hand()
    layer = model.model.layers[0]
    layer.mlp.down_proj.weight.data.zero_()  # the paper's model has no MLP
    W_Q, W_K, W_V = (getattr(layer.self_attn, f"{name}_proj").weight.detach() for name in "qkv")
    phi, expected = torch.eye(WORDS), []
    for prompt in prompts:
        s, p, a = word_tokenizer()(f"{prompt.text} {prompt.fact.answer}")["input_ids"]
        row = torch.stack([W_K @ phi[s] @ (W_Q @ phi[p]), W_K @ phi[p] @ (W_Q @ phi[p])]) / math.sqrt(WORDS)
        row = row.softmax(0)
        surprise = phi[a] - (W_V @ (row[0] * phi[s] + row[1] * phi[p]) + phi[p]).softmax(0)
        s_rel, p_rel = float(surprise @ W_V @ phi[s]), float(surprise @ W_V @ phi[p])
        assert abs(s_rel - p_rel) > 1e-3  # far from where rounding decides
        expected.append(1.0 if s_rel > p_rel else 0.1)
    assert len(set(expected)) == 2
    weighted = add_targets(examples, parse_objective("weighted-ce"), hooked)
    assert [float(only(example, "weighted-ce(relevance)")) for example in weighted] == pytest.approx(expected)


def test_in_one_layer_salience_weights_are_ranks_of_what_the_values_store() -> None:
    prompts, examples, hooked, model = stated_by_hand()
    W_V, phi = model.model.layers[0].self_attn.v_proj.weight.detach(), torch.eye(WORDS)
    stored = []
    for prompt in prompts:
        relation = [other.fact.answer for other in prompts if other.fact.relation == prompt.fact.relation]
        others = [answer for answer in dict.fromkeys(relation) if answer != prompt.fact.answer]
        subject, answer, *rivals = (
            word_tokenizer()(word)["input_ids"][0] for word in (prompt.fact.subject, prompt.fact.answer, *others)
        )
        direction = phi[answer] - torch.stack([phi[rival] for rival in rivals]).mean(0)
        stored.append(float(direction @ W_V @ phi[subject]))
    ordered = sorted(stored)
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 1e-4  # no ties, which rounding would break
    expected = [(ordered.index(value) + 0.5) / len(stored) for value in stored]
    weighted = add_targets(examples, parse_objective("weighted-ce(salience)"), hooked)
    assert [float(only(example, "weighted-ce(salience)")) for example in weighted] == pytest.approx(expected)


def saliences(prompts: Sequence[Prompt], every: Sequence[Prompt], W_V: Tensor) -> list[float]:
    """By hand: what the values of the one layer say of each answer against the relation's others among `every`."""
    phi, tokenizer, numbers = torch.eye(WORDS), word_tokenizer(), []
    for prompt in prompts:
        relation = dict.fromkeys(other.fact.answer for other in every if other.fact.relation == prompt.fact.relation)
        words = (prompt.fact.subject, prompt.fact.answer, *(word for word in relation if word != prompt.fact.answer))
        subject, answer, *rivals = (tokenizer(word)["input_ids"][0] for word in words)
        direction = phi[answer] - torch.stack([phi[rival] for rival in rivals]).mean(0)
        numbers.append(float(direction @ W_V @ phi[subject]))
    return numbers


def test_salience_weights_of_other_facts_are_ranks_among_the_training_facts() -> None:
    prompts, examples, hooked, model = stated_by_hand()
    W_V, objective = model.model.layers[0].self_attn.v_proj.weight.detach(), parse_objective("weighted-ce(salience)")
    train, others = list(range(0, len(prompts), 2)), list(range(1, len(prompts), 2))
    trained = add_targets([examples[i] for i in train], objective, hooked)
    known = [prompts[i] for i in train]
    ordered = sorted(saliences(known, known, W_V))
    together = add_targets([examples[i] for i in others], objective, hooked, among=trained)
    for i, weighted in zip(others, together, strict=True):  # in a set that other answers come with
        alone = add_targets([examples[i]], objective, hooked, among=trained)[0]  # a rank in its own set would be .5
        assert only(alone, "weighted-ce(salience)") == only(weighted, "weighted-ce(salience)")
        stored = saliences([prompts[i]], [prompts[i], *known], W_V)[0]
        assert min(abs(stored - value) for value in ordered) > 1e-4  # far from ties, which rounding would break
        expected = sum(value < stored for value in ordered) / len(ordered)
        assert float(only(weighted, "weighted-ce(salience)")) == pytest.approx(expected)


def test_a_score_that_rounding_moves_keeps_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    _, examples, hooked, _ = stated_by_hand()
    examples, objective = examples[:4], parse_objective("weighted-ce(salience)")

    def ranks(scores: Sequence[float], among: Sequence[Example] = ()) -> list[Example]:
        monkeypatch.setattr(cross_entropy, "score_prompts", lambda *_: list(scores))
        return add_targets(examples[: len(scores)], objective, hooked, among=among)

    trained = ranks([3.0, -1.0, 2.0, 2.0])
    weights = [float(only(example, "weighted-ce(salience)")) for example in trained]
    assert weights == pytest.approx([7 / 8, 1 / 8, 1 / 2, 1 / 2])  # two equal scores share the ranks 3/8 and 5/8
    for error in (-1e-6, 1e-6):  # float32 in another batch
        moved = ranks([score + error for score in (3.0, -1.0, 2.0, 2.0)], trained)
        assert [float(only(example, "weighted-ce(salience)")) for example in moved] == pytest.approx(weights)


@pytest.mark.parametrize("native", [False, True])
def test_salience_weights_are_the_bases_beside_a_trained_adapter(native: bool) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = tiny_model("llama")
    if native:
        model.add_adapter(config)
    adapted = hook(model if native else get_peft_model(model, config), tiny_tokenizer(), "adapted")
    objective, examples = parse_objective("weighted-ce(salience)"), make_examples(TOWNS, tiny_tokenizer())
    beside, plain = (add_targets(examples, objective, model) for model in (adapted, base()[0]))
    for example, other in zip(beside, plain, strict=True):
        for name, expected in other.targets.items():
            # sums of some nats, float32
            torch.testing.assert_close(example.targets[name], expected, atol=1e-4, rtol=1e-5)
