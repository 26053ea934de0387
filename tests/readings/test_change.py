"""What a change between two checkpoints is put down to, where it is known which weights were changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations

import pytest
import torch
from tiny import FACTS, tiny_config, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnbalance import HookedModel, load_model
from attnbalance.errors import ModelError
from attnbalance.models.bridge import bridge_of
from attnbalance.models.parts import PARTS
from attnbalance.prompts import make_prompts
from attnbalance.readings.change import Change, read_change, shapley_weight, split_edges
from attnbalance.readings.contrast import Contrasts, make_contrasts
from attnbalance.readings.ledger import read_ledger

# Of the largest contrast: logits are sums of some 100 float32 products, and off by 1e-6 of their size between kernels.
TOLERANCE = 1e-5
SUMS = 1e-4  # the ledger's own: its entries are larger than the contrast that they add up to
FAMILIES = ("llama", "gpt2", "neox")
CHANGED = ("attention", "values", "mlp")


@pytest.fixture(scope="module")
def contrasts() -> Contrasts:
    facts = [replace(fact, relation=("odd", "even")[i % 2]) for i, fact in enumerate(FACTS)]
    return make_contrasts(make_prompts(facts), tiny_tokenizer())


def weights(model: PreTrainedModel, part: str) -> list[Tensor]:
    """The entries of a part in all layers, as views: W_Q and W_K, or W_V and W_O, or the MLP; sizes 4 x 8 and 32."""
    found: list[Tensor] = []
    kind, queries = type(model).__name__, part == "attention"
    inner = {"GPT2LMHeadModel": "transformer.h", "GPTNeoXForCausalLM": "gpt_neox.layers"}.get(kind, "model.layers")
    for layer in model.get_submodule(inner).children():
        if part == "mlp":
            found += [parameter.data for parameter in layer.mlp.parameters()]
        elif kind == "GPT2LMHeadModel":  # columns: 32 of queries, 32 of keys, 32 of values
            here = slice(0, 64) if queries else slice(64, 96)
            found += [layer.attn.c_attn.weight.data[:, here], layer.attn.c_attn.bias.data[here]]
            found += [] if queries else [parameter.data for parameter in layer.attn.c_proj.parameters()]
        elif kind == "GPTNeoXForCausalLM":  # rows: query, key and value of the first head, then of the second, ...
            here, fused = slice(0, 2) if queries else slice(2, 3), layer.attention.query_key_value
            found += [fused.weight.data.view(4, 3, 8, 32)[:, here], fused.bias.data.view(4, 3, 8)[:, here]]
            found += [] if queries else [parameter.data for parameter in layer.attention.dense.parameters()]
        else:
            found += [getattr(layer.self_attn, f"{name}_proj").weight.data for name in ("qk" if queries else "vo")]
    return found


def perturbed(model: PreTrainedModel, parts: Collection[str]) -> PreTrainedModel:
    twin, noise = copy.deepcopy(model), torch.Generator().manual_seed(3)
    for part in parts:
        for entries in weights(twin, part):
            entries += 0.2 * torch.randn(entries.shape, generator=noise)
    return twin


def hooked(model: PreTrainedModel) -> HookedModel:
    return load_model(copy.deepcopy(model), tokenizer=tiny_tokenizer())


@torch.no_grad()
def candidates(model: PreTrainedModel, contrasts: Contrasts) -> list[Tensor]:
    """The logits of each prompt's candidates, one prompt at a time."""
    tokens = [list(contrasts.candidates[one.prompt.fact.relation]) for one in contrasts.encodings]
    return [
        model(input_ids=torch.tensor([one.ids])).logits[0, -1, some]
        for one, some in zip(contrasts.encodings, tokens, strict=True)
    ]


def plain(model: PreTrainedModel, contrasts: Contrasts, ends: Sequence[PreTrainedModel]) -> Tensor:
    """The contrasts of a model's own logits, other answers weighed by their mean probability in the two ends."""
    found = []
    rivals = [candidates(end, contrasts) for end in ends]
    for i, logits in enumerate(candidates(model, contrasts)):
        others = list(contrasts.others[i])
        share = torch.stack([one[i][others].exp() / one[i][others].exp().sum() for one in rivals]).mean(0)
        found.append(logits[contrasts.answer[i]] - (share * logits[others]).sum())
    return torch.stack(found)


def log_odds(model: PreTrainedModel, contrasts: Contrasts) -> Tensor:
    """Log p(answer) / p(any other answer) among each prompt's candidates."""
    rows = candidates(model, contrasts)
    return torch.stack(
        [
            row[answer] - row[list(others)].logsumexp(0)
            for row, answer, others in zip(rows, contrasts.answer, contrasts.others, strict=True)
        ]
    )


def by_orderings(value: Callable[[frozenset], Tensor], players: Sequence[Hashable]) -> Mapping[Hashable, Tensor]:
    """Shapley values as they are defined: what a player adds on joining, averaged over all orders of joining."""
    total = {player: torch.zeros_like(value(frozenset())) for player in players}
    orders = list(permutations(players))
    for order in orders:
        for i, player in enumerate(order):
            total[player] += (value(frozenset(order[: i + 1])) - value(frozenset(order[:i]))) / len(orders)
    return total


def near(found: Tensor, expected: Tensor, scale: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance * float(scale.abs().max()), rtol=0)


def summed(change: Change, part: str) -> Tensor:
    return sum((values.sum((1, 2)) for values in change.places[part].values()), torch.zeros(len(change.before)))


@pytest.mark.parametrize("part", CHANGED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_of_one_kind_of_weights_is_put_down_to_these_alone(
    contrasts: Contrasts, family: str, part: str
) -> None:
    first = tiny_model(family)
    second = perturbed(first, [part])
    change = read_change(hooked(first), hooked(second), contrasts)
    before, after = (plain(model, contrasts, (first, second)) for model in (first, second))
    near(change.before, before, before)
    near(change.after, after, before)
    assert ((after - before).abs() > 0.01).all()  # what is left of it below is below 1 in 100 of this
    cause, other = (change.attention, change.storage) if part == "attention" else (change.storage, change.attention)
    near(cause, after - before, before)
    assert not other.any()
    for name in PARTS:
        assert bool(change.parts[name].any()) == (name == part)
        near(summed(change, name), change.parts[name], before, SUMS)


@pytest.mark.parametrize("family", ["gpt2", "neox"])
def test_parts_are_shapley_values_of_hybrids_made_by_hand(contrasts: Contrasts, family: str) -> None:
    first = tiny_model(family)
    second = perturbed(first, CHANGED)
    contrast: dict[frozenset, Tensor] = {}
    for some in (frozenset(some) for size in range(4) for some in combinations(CHANGED, size)):
        hybrid = copy.deepcopy(first)
        for part in some:
            for mine, theirs in zip(weights(hybrid, part), weights(second, part), strict=True):
                mine.copy_(theirs)
        contrast[some] = plain(hybrid, contrasts, (first, second))
    scale = contrast[frozenset()]
    change = read_change(hooked(first), hooked(second), contrasts)
    for part, expected in by_orderings(contrast.__getitem__, CHANGED).items():
        near(change.parts[str(part)], expected, scale)
    total = sum(change.parts.values(), torch.zeros(len(scale)))
    near(total, contrast[frozenset(CHANGED)] - contrast[frozenset()], scale, SUMS)
    for part in CHANGED:
        assert (change.parts[part].abs() > 0.01).any()
        near(summed(change, part), change.parts[part], scale, SUMS)
    assert not change.parts["rest"].any()


def test_every_part_and_place_turns_round_when_the_two_models_are_exchanged(contrasts: Contrasts) -> None:
    models = hooked(tiny_model("neox")), hooked(perturbed(tiny_model("neox"), ("attention", "mlp")))
    change, back = read_change(*models, contrasts), read_change(*reversed(models), contrasts, batch_size=4)
    assert (change.attention.abs() > 0.01).any()
    assert (change.storage.abs() > 0.01).any()
    for part in PARTS:
        near(back.parts[part], -change.parts[part], change.before)
        for name, values in change.places[part].items():
            near(back.places[part][name], -values, change.before)
    for one, other in ((back.looked, change.looked), (back.readout, change.readout)):
        near(one.values, -other.values, change.before)


def test_a_change_of_every_parameter_is_split_among_all_four_parts(contrasts: Contrasts) -> None:
    first, noise = tiny_model("llama"), torch.Generator().manual_seed(5)
    second = copy.deepcopy(first)
    for parameter in second.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
    change = read_change(hooked(first), hooked(second), contrasts)
    assert all((change.parts[part].abs() > 0.01).any() for part in PARTS)
    total = sum(change.parts.values(), torch.zeros(len(contrasts)))
    start, end = (plain(model, contrasts, (first, second)) for model in (first, second))
    near(total, end - start, change.before, SUMS)
    near(change.attention + change.storage + change.parts["rest"], change.after - change.before, change.before, SUMS)


def test_the_change_of_the_lead_is_that_of_the_log_odds_to_second_order(contrasts: Contrasts) -> None:
    first, off = tiny_model("llama"), []
    whole = perturbed(first, CHANGED)
    for step in (0.04, 0.02):
        second = copy.deepcopy(first)
        for mine, theirs in zip(second.parameters(), whole.parameters(), strict=True):
            mine.data += step * (theirs.data - mine.data)
        change = read_change(hooked(first), hooked(second), contrasts)
        moved = log_odds(second, contrasts) - log_odds(first, contrasts)
        off.append(float((change.after - change.before - moved).abs().max()))
        assert off[-1] < 0.05 * float(moved.abs().max())
    assert off[1] < off[0] / 3  # a third-order error falls by 8, a second-order one by 4; rounding takes some of it


def test_a_model_has_not_changed_against_itself(contrasts: Contrasts) -> None:
    model = tiny_model("neox")
    change = read_change(hooked(model), hooked(model), contrasts)
    assert torch.equal(change.before, change.after)
    for part in PARTS:
        assert not change.parts[part].any()
        assert set(change.places[part]) == {"subject", "elsewhere", "mlp", "rest"}
        assert not any(values.any() for values in change.places[part].values())
    assert not change.looked.values.any()
    assert not change.readout.values.any()


def test_weights_of_coalitions_give_the_average_over_all_orders_of_joining() -> None:
    players, draw = range(4), torch.Generator().manual_seed(0)
    coalitions = [frozenset(some) for size in range(5) for some in combinations(players, size)]
    value = {some: torch.randn((), generator=draw, dtype=torch.float64) for some in coalitions}
    for player, expected in by_orderings(value.__getitem__, players).items():
        found = sum(shapley_weight(player in some, len(some), 4) * float(value[some]) for some in coalitions)
        assert found == pytest.approx(float(expected), abs=1e-12)  # float64: 24 orders of numbers near 1


def test_split_edges_add_up_to_the_change_of_what_is_used_and_turn_round(contrasts: Contrasts) -> None:
    models = tiny_model("llama"), perturbed(tiny_model("llama"), CHANGED)
    one, two = (read_ledger(bridge_of(hooked(model)), contrasts) for model in models)
    one, two = (replace(each, rows=each.rows.double(), stored=each.stored.double()) for each in (one, two))
    looked, readout = split_edges(one, two)
    assert (looked.values.abs() > 0.01).any()
    assert (readout.values.abs() > 0.01).any()
    used = two.used().values - one.used().values
    # In float64, so that the two sides differ by nothing but the order of their sums
    torch.testing.assert_close(looked.values + readout.values, used, atol=1e-6, rtol=0)
    for there, back in zip((looked, readout), split_edges(two, one), strict=True):
        torch.testing.assert_close(back.values, -there.values, atol=1e-6, rtol=0)
    same_rows = replace(two, rows=one.rows)
    assert not split_edges(one, same_rows)[0].values.any()
    torch.testing.assert_close(split_edges(one, same_rows)[1].values, same_rows.used().values - one.used().values)
    assert not split_edges(one, replace(two, stored=one.stored))[1].values.any()


@pytest.mark.parametrize("other", ["wider", "gpt2"])
def test_models_of_different_shapes_are_refused(contrasts: Contrasts, other: str) -> None:
    config = tiny_config("llama", intermediate_size=64) if other == "wider" else tiny_config("gpt2")
    second = hooked(AutoModelForCausalLM.from_config(config).eval())
    for pair in ((hooked(tiny_model("llama")), second), (second, hooked(tiny_model("llama")))):
        with pytest.raises(ModelError, match="of different shapes"):
            read_change(*pair, contrasts)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_carry_all_that_queries_and_keys_of_the_last_layer_change_and_nothing_that_its_mlp_does(
    contrasts: Contrasts, family: str
) -> None:
    first, noise = tiny_model(family), torch.Generator().manual_seed(7)
    for part, carried in (("attention", True), ("mlp", False)):
        second = copy.deepcopy(first)
        entries = weights(second, part)
        for one in entries[len(entries) // 2 :]:  # of two layers the last: its rows are read by nothing but its values
            one += 0.2 * torch.randn(one.shape, generator=noise)
        change = read_change(hooked(first), hooked(second), contrasts)
        assert change.rows is not None
        assert ((change.after - change.before).abs() > 0.01).any()
        near(change.rows, (change.after - change.before) * carried, change.before)
        back = read_change(hooked(second), hooked(first), contrasts, batch_size=4)
        assert back.rows is not None
        near(back.rows, -change.rows, change.before)


def test_an_mlp_can_move_what_later_layers_look_at_which_rows_show_and_parts_do_not(contrasts: Contrasts) -> None:
    first, noise = tiny_model("llama"), torch.Generator().manual_seed(7)
    for one in weights(first, "attention"):
        one *= 2  # sharp rows, which follow what they read
    second = copy.deepcopy(first)
    entries = weights(second, "mlp")
    for one in entries[: len(entries) // 2]:  # the first of two layers
        one += 0.2 * torch.randn(one.shape, generator=noise)
    change = read_change(hooked(first), hooked(second), contrasts)
    assert change.rows is not None
    assert not change.attention.any()
    assert (change.rows.abs() > 0.05).any()


def test_checkpoints_of_different_dtypes_turn_round_too(contrasts: Contrasts) -> None:
    # GPT-2: casting a Llama by hand would round its rotary frequencies, which are no parameters, as well
    models = hooked(tiny_model("gpt2").bfloat16()), hooked(perturbed(tiny_model("gpt2"), ("attention", "mlp")))
    there, back = read_change(*models, contrasts), read_change(*reversed(models), contrasts)
    for part in ("attention", "mlp"):
        assert there.parts[part].any()
        near(back.parts[part], -there.parts[part], there.before, 1e-3)  # rivals' weights are read in bfloat16
