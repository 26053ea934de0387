"""What a change between two checkpoints is put down to, where it is known which weights were changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations

import pytest
import torch
from tiny import FACTS, GROUPED, tiny_config, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel

from attnbalance import HookedModel, load_model
from attnbalance.data.batches import PromptBatch
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.models.bridge import bridge_of
from attnbalance.models.weights import PARTS
from attnbalance.readings import change as change_module
from attnbalance.readings.answer_tokens import AnswerTokens, make_answer_tokens
from attnbalance.readings.change import Change, read_change, shapley_weight, split_edges
from attnbalance.readings.direct_attribution import DirectAttribution, read_direct_attribution

# Of the largest margin: logits are sums of some 100 float32 products, and off by 1e-6 of their size between kernels.
TOLERANCE = 1e-5
SUMS = 1e-4  # of direct logit attribution: its entries are larger than the margin that they add up to
FAMILIES = ("llama", "gpt2", "neox")
CHANGED = ("qk", "ov", "mlp")


@pytest.fixture(scope="module")
def answer_tokens() -> AnswerTokens:
    facts = [replace(fact, relation=("odd", "even")[i % 2]) for i, fact in enumerate(FACTS)]
    return make_answer_tokens(make_prompts(facts), tiny_tokenizer())


def weights(model: PreTrainedModel, part: str) -> list[Tensor]:
    """The entries of a part in all layers, as views: W_Q and W_K, or W_V and W_O, or the MLP; sizes 4 x 8 and 32."""
    found: list[Tensor] = []
    kind, queries = type(model).__name__, part == "qk"
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
def candidates(model: PreTrainedModel, answer_tokens: AnswerTokens) -> list[Tensor]:
    """The logits of each prompt's candidates, one prompt at a time."""
    tokens = [list(answer_tokens.candidates[one.prompt.fact.relation]) for one in answer_tokens.encodings]
    return [
        model(input_ids=torch.tensor([one.ids])).logits[0, -1, some]
        for one, some in zip(answer_tokens.encodings, tokens, strict=True)
    ]


def plain(model: PreTrainedModel, answer_tokens: AnswerTokens, ends: Sequence[PreTrainedModel]) -> Tensor:
    """The margins of a model's own logits: other answers are weighted by their mean probability in the two ends."""
    found = []
    rivals = [candidates(end, answer_tokens) for end in ends]
    for i, logits in enumerate(candidates(model, answer_tokens)):
        others = list(answer_tokens.others[i])
        share = torch.stack([one[i][others].exp() / one[i][others].exp().sum() for one in rivals]).mean(0)
        found.append(logits[answer_tokens.answer[i]] - (share * logits[others]).sum())
    return torch.stack(found)


def log_odds(model: PreTrainedModel, answer_tokens: AnswerTokens) -> Tensor:
    """Log p(answer) / p(any other answer) among each prompt's candidates."""
    rows = candidates(model, answer_tokens)
    return torch.stack(
        [
            row[answer] - row[list(others)].logsumexp(0)
            for row, answer, others in zip(rows, answer_tokens.answer, answer_tokens.others, strict=True)
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
    return sum((values.sum((1, 2)) for values in change.components[part].values()), torch.zeros(len(change.before)))


@pytest.mark.parametrize("part", CHANGED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_of_one_kind_of_weights_is_put_down_to_these_alone(
    answer_tokens: AnswerTokens, family: str, part: str
) -> None:
    first = tiny_model(family)
    second = perturbed(first, [part])
    change = read_change(hooked(first), hooked(second), answer_tokens)
    before, after = (plain(model, answer_tokens, (first, second)) for model in (first, second))
    near(change.before, before, before)
    near(change.after, after, before)
    assert ((after - before).abs() > 0.01).all()  # what is left of it below is below 1 in 100 of this
    cause, other = (change.qk, change.ov_mlp) if part == "qk" else (change.ov_mlp, change.qk)
    near(cause, after - before, before)
    assert not other.any()
    for name in PARTS:
        assert bool(change.parts[name].any()) == (name == part)
        near(summed(change, name), change.parts[name], before, SUMS)


@pytest.mark.parametrize("family", ["gpt2", "neox"])
def test_parts_are_shapley_values_of_hybrids_made_by_hand(answer_tokens: AnswerTokens, family: str) -> None:
    first = tiny_model(family)
    second = perturbed(first, CHANGED)
    margin: dict[frozenset, Tensor] = {}
    for some in (frozenset(some) for size in range(4) for some in combinations(CHANGED, size)):
        hybrid = copy.deepcopy(first)
        for part in some:
            for mine, theirs in zip(weights(hybrid, part), weights(second, part), strict=True):
                mine.copy_(theirs)
        margin[some] = plain(hybrid, answer_tokens, (first, second))
    scale = margin[frozenset()]
    change = read_change(hooked(first), hooked(second), answer_tokens)
    for part, expected in by_orderings(margin.__getitem__, CHANGED).items():
        near(change.parts[str(part)], expected, scale)
    total = sum(change.parts.values(), torch.zeros(len(scale)))
    near(total, margin[frozenset(CHANGED)] - margin[frozenset()], scale, SUMS)
    for part in CHANGED:
        assert (change.parts[part].abs() > 0.01).any()
        near(summed(change, part), change.parts[part], scale, SUMS)
    assert not change.parts["rest"].any()


def test_every_part_and_place_turns_round_when_the_two_models_are_exchanged(answer_tokens: AnswerTokens) -> None:
    models = hooked(tiny_model("neox")), hooked(perturbed(tiny_model("neox"), ("qk", "mlp")))
    change, back = read_change(*models, answer_tokens), read_change(*reversed(models), answer_tokens, batch_size=4)
    assert (change.qk.abs() > 0.01).any()
    assert (change.ov_mlp.abs() > 0.01).any()
    for part in PARTS:
        near(back.parts[part], -change.parts[part], change.before)
        for name, values in change.components[part].items():
            near(back.components[part][name], -values, change.before)
    for one, other in ((back.by_attention, change.by_attention), (back.by_readout, change.by_readout)):
        near(one.values, -other.values, change.before)


def test_a_change_of_every_parameter_is_split_among_all_four_parts(answer_tokens: AnswerTokens) -> None:
    first, noise = tiny_model("llama"), torch.Generator().manual_seed(5)
    second = copy.deepcopy(first)
    for parameter in second.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
    change = read_change(hooked(first), hooked(second), answer_tokens)
    assert all((change.parts[part].abs() > 0.01).any() for part in PARTS)
    total = sum(change.parts.values(), torch.zeros(len(answer_tokens)))
    start, end = (plain(model, answer_tokens, (first, second)) for model in (first, second))
    near(total, end - start, change.before, SUMS)
    near(change.qk + change.ov_mlp + change.parts["rest"], change.after - change.before, change.before, SUMS)


def with_settings(model: PreTrainedModel, **changes: object) -> PreTrainedModel:
    """A model with the same weights and other settings."""
    config = copy.deepcopy(model.config)
    config.update(changes)
    twin = AutoModelForCausalLM.from_config(config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", {"rms_norm_eps": 0.5}),
        ("llama", {"hidden_act": "relu"}),
        ("mistral", {"sliding_window": None}),
        ("gpt2", {"layer_norm_epsilon": 0.3}),
        ("neox", {"use_parallel_residual": False}),
    ],
)
def test_another_configuration_is_carried_exactly_and_named(
    answer_tokens: AnswerTokens, family: str, changes: dict[str, object]
) -> None:
    first = tiny_model(family)
    second = with_settings(perturbed(first, ["qk"]), **changes)
    change = read_change(hooked(first), hooked(second), answer_tokens)
    before, after = (plain(model, answer_tokens, (first, second)) for model in (first, second))
    near(change.before, before, before)
    near(change.after, after, before)
    # by hand: the other configuration alone, the other attention alone
    rest, attention = with_settings(first, **changes), perturbed(first, ["qk"])
    alone = {frozenset(): before, frozenset(["rest", "qk"]): after}
    alone |= {frozenset([n]): plain(m, answer_tokens, (first, second)) for n, m in (("rest", rest), ("qk", attention))}
    for part, expected in by_orderings(alone.__getitem__, ("rest", "qk")).items():
        assert (expected.abs() > 0.01).any()
        near(change.parts[str(part)], expected, before)
        near(summed(change, str(part)), expected, before, SUMS)
    names = {name.rpartition(".")[2] for name in change.settings}
    assert names & {*changes, "rope_theta", "factor"}


def test_a_router_s_bias_which_is_no_parameter_is_carried_exactly(answer_tokens: AnswerTokens) -> None:
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        **GROUPED,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=0,
        pad_token_id=None,
    )
    first = AutoModelForCausalLM.from_config(config).eval()
    second = copy.deepcopy(first)
    for name, values in second.named_buffers():
        if name.endswith("e_score_correction_bias"):
            values.copy_(torch.tensor([0.0, 9.0, 0.0, 9.0]))
    change = read_change(hooked(first), hooked(second), answer_tokens)
    before, after = (plain(model, answer_tokens, (first, second)) for model in (first, second))
    assert (after - before).abs().max() > 0.1
    near(change.after, after, before)
    near(change.parts["rest"], after - before, before)
    assert change.settings == {}


def test_a_bridge_that_computes_something_else_than_the_model_is_refused_by_name(
    answer_tokens: AnswerTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    import attnbalance.readings.change as module

    real = module.read_direct_attribution

    def shifted(
        *arguments: object, **options: object
    ) -> DirectAttribution:  # as if a window were not honoured in long prompts
        attribution = real(*arguments, **options)  # pyright: ignore[reportArgumentType]
        return replace(
            attribution,
            logit_difference=attribution.logit_difference
            + 0.1 * (torch.arange(len(attribution.logit_difference)) == 4),
        )

    monkeypatch.setattr(module, "read_direct_attribution", shifted)
    models = hooked(tiny_model("llama")), hooked(perturbed(tiny_model("llama"), ["mlp"]))
    with pytest.raises(ModelError, match=r"gives a margin of .* but the model's own logits give"):
        read_change(*models, answer_tokens)


def test_a_final_softcap_is_left_out_of_rows_as_of_everything_else(answer_tokens: AnswerTokens) -> None:
    # One layer whose MLP writes nothing: the last token's rows carry all that attention changes in the margin
    torch.manual_seed(0)
    config = tiny_config("gemma2", num_hidden_layers=1, final_logit_softcapping=1.0)
    first = AutoModelForCausalLM.from_config(config).eval()
    first.model.layers[0].mlp.down_proj.weight.data.zero_()
    second = copy.deepcopy(first)
    for name in "qk":
        getattr(second.model.layers[0].self_attn, f"{name}_proj").weight.data.mul_(-2)
    change = read_change(hooked(first), hooked(second), answer_tokens)
    open_ended = [copy.deepcopy(model) for model in (first, second)]
    for model in open_ended:
        model.config.final_logit_softcapping = None
    before, after = (plain(model, answer_tokens, open_ended) for model in open_ended)
    near(change.before, before, before)
    near(change.after, after, before)
    assert change.rows is not None
    assert ((after - before).abs() > 0.01).any()
    near(change.rows, after - before, before)
    capped = plain(second, answer_tokens, (first, second)) - plain(first, answer_tokens, (first, second))
    assert not torch.allclose(capped, after - before, atol=0.01)


def test_the_change_of_the_margin_is_that_of_the_log_odds_to_second_order(answer_tokens: AnswerTokens) -> None:
    first, off = tiny_model("llama"), []
    whole = perturbed(first, CHANGED)
    for step in (0.04, 0.02):
        second = copy.deepcopy(first)
        for mine, theirs in zip(second.parameters(), whole.parameters(), strict=True):
            mine.data += step * (theirs.data - mine.data)
        change = read_change(hooked(first), hooked(second), answer_tokens)
        moved = log_odds(second, answer_tokens) - log_odds(first, answer_tokens)
        off.append(float((change.after - change.before - moved).abs().max()))
        assert off[-1] < 0.05 * float(moved.abs().max())
    assert off[1] < off[0] / 3  # a third-order error falls by 8, a second-order one by 4; rounding takes some of it


def test_a_model_has_not_changed_against_itself(answer_tokens: AnswerTokens) -> None:
    model = tiny_model("neox")
    change = read_change(hooked(model), hooked(model), answer_tokens)
    assert torch.equal(change.before, change.after)
    for part in PARTS:
        assert not change.parts[part].any()
        assert set(change.components[part]) == {"subject", "elsewhere", "mlp", "rest"}
        assert not any(values.any() for values in change.components[part].values())
    assert not change.by_attention.values.any()
    assert not change.by_readout.values.any()


def test_weights_of_coalitions_give_the_average_over_all_orders_of_joining() -> None:
    players, draw = range(4), torch.Generator().manual_seed(0)
    coalitions = [frozenset(some) for size in range(5) for some in combinations(players, size)]
    value = {some: torch.randn((), generator=draw, dtype=torch.float64) for some in coalitions}
    for player, expected in by_orderings(value.__getitem__, players).items():
        found = sum(shapley_weight(player in some, len(some), 4) * float(value[some]) for some in coalitions)
        assert found == pytest.approx(float(expected), abs=1e-12)  # float64: 24 orders of numbers near 1


def test_split_edges_add_up_to_the_change_of_what_is_used_and_turn_round(answer_tokens: AnswerTokens) -> None:
    models = tiny_model("llama"), perturbed(tiny_model("llama"), CHANGED)
    one, two = (read_direct_attribution(bridge_of(hooked(model)), answer_tokens) for model in models)
    one, two = (replace(each, rows=each.rows.double(), readout=each.readout.double()) for each in (one, two))
    by_attention, by_readout = split_edges(one, two)
    assert (by_attention.values.abs() > 0.01).any()
    assert (by_readout.values.abs() > 0.01).any()
    used = two.used().values - one.used().values
    # In float64, so that the two sides differ by nothing but the order of their sums
    torch.testing.assert_close(by_attention.values + by_readout.values, used, atol=1e-6, rtol=0)
    for there, back in zip((by_attention, by_readout), split_edges(two, one), strict=True):
        torch.testing.assert_close(back.values, -there.values, atol=1e-6, rtol=0)
    same_rows = replace(two, rows=one.rows)
    assert not split_edges(one, same_rows)[0].values.any()
    torch.testing.assert_close(split_edges(one, same_rows)[1].values, same_rows.used().values - one.used().values)
    assert not split_edges(one, replace(two, readout=one.readout))[1].values.any()


@pytest.mark.parametrize("other", ["wider", "gpt2"])
def test_models_of_different_shapes_are_refused(answer_tokens: AnswerTokens, other: str) -> None:
    config = tiny_config("llama", intermediate_size=64) if other == "wider" else tiny_config("gpt2")
    second = hooked(AutoModelForCausalLM.from_config(config).eval())
    for pair in ((hooked(tiny_model("llama")), second), (second, hooked(tiny_model("llama")))):
        with pytest.raises(ModelError, match="of different shapes"):
            read_change(*pair, answer_tokens)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_carry_all_that_queries_and_keys_of_the_last_layer_change_and_nothing_that_its_mlp_does(
    answer_tokens: AnswerTokens, family: str
) -> None:
    first, noise = tiny_model(family), torch.Generator().manual_seed(7)
    for part, carried in (("qk", True), ("mlp", False)):
        second = copy.deepcopy(first)
        entries = weights(second, part)
        for one in entries[len(entries) // 2 :]:  # of two layers the last: its rows are read by nothing but its values
            one += 0.2 * torch.randn(one.shape, generator=noise)
        change = read_change(hooked(first), hooked(second), answer_tokens)
        assert change.rows is not None
        assert ((change.after - change.before).abs() > 0.01).any()
        near(change.rows, (change.after - change.before) * carried, change.before)
        back = read_change(hooked(second), hooked(first), answer_tokens, batch_size=4)
        assert back.rows is not None
        near(back.rows, -change.rows, change.before)


def test_a_model_whose_rows_cannot_be_edited_has_a_change_without_what_rows_carry(answer_tokens: AnswerTokens) -> None:
    first, second = hooked(tiny_model("llama")), hooked(perturbed(tiny_model("llama"), ["qk"]))
    whole = read_change(first, second, answer_tokens)
    assert whole.rows is not None
    for before, after in ((replace(first, editable=False), second), (first, replace(second, editable=False))):
        change = read_change(before, after, answer_tokens)
        assert change.rows is None
        torch.testing.assert_close(change.qk, whole.qk, rtol=0, atol=0)


@pytest.mark.parametrize("bounded", [0, 1])
def test_the_pair_is_batched_as_the_model_asks_that_stands_less_company(
    answer_tokens: AnswerTokens, bounded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [len(one.ids) for one in answer_tokens.encodings]
    models = [hooked(tiny_model("llama")), hooked(perturbed(tiny_model("llama"), ["qk"]))]
    models[bounded] = replace(models[bounded], alike_from=min(lengths))
    models[1 - bounded] = replace(models[1 - bounded], alike_from=(None, max(lengths))[bounded])
    seen = list[bool]()
    forward = change_module._forward

    def watched(model: HookedModel, batch: PromptBatch) -> tuple[Tensor, Tensor]:
        seen.append(bool((batch.attention_mask != 0).all()))
        return forward(model, batch)

    monkeypatch.setattr(change_module, "_forward", watched)
    read_change(*models, answer_tokens)
    assert len(set(lengths)) > 1  # so that padding would show
    assert all(seen)


def test_an_mlp_can_move_what_later_layers_attend_to_which_rows_show_and_parts_do_not(
    answer_tokens: AnswerTokens,
) -> None:
    first, noise = tiny_model("llama"), torch.Generator().manual_seed(7)
    for one in weights(first, "qk"):
        one *= 2  # sharp rows, which follow what they read
    second = copy.deepcopy(first)
    entries = weights(second, "mlp")
    for one in entries[: len(entries) // 2]:  # the first of two layers
        one += 0.2 * torch.randn(one.shape, generator=noise)
    change = read_change(hooked(first), hooked(second), answer_tokens)
    assert change.rows is not None
    assert not change.qk.any()
    assert (change.rows.abs() > 0.05).any()


def test_checkpoints_of_different_dtypes_turn_round_too(answer_tokens: AnswerTokens) -> None:
    # GPT-2: casting a Llama by hand would round its rotary frequencies, which are no parameters, as well
    models = hooked(tiny_model("gpt2").bfloat16()), hooked(perturbed(tiny_model("gpt2"), ("qk", "mlp")))
    there, back = read_change(*models, answer_tokens), read_change(*reversed(models), answer_tokens)
    for part in ("qk", "mlp"):
        assert there.parts[part].any()
        near(back.parts[part], -there.parts[part], there.before, 1e-3)  # rivals' weights are read in bfloat16


def test_models_whose_tokenizers_give_other_ids_are_refused(answer_tokens: AnswerTokens) -> None:
    model = tiny_model("llama")
    first, second = hooked(model), hooked(perturbed(model, ["mlp"]))
    other = replace(second, tokenizer=tiny_tokenizer("bos"))
    assert first.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    with pytest.raises(DataError, match="different tokenizers"):
        read_change(first, other, answer_tokens)


def test_prompts_longer_than_the_positions_of_either_model_are_refused(answer_tokens: AnswerTokens) -> None:
    before, after = hooked(tiny_model("llama")), hooked(perturbed(tiny_model("llama"), ("qk",)))
    longest = max(len(encoding.ids) for encoding in answer_tokens.encodings)
    for limits in ((longest, longest - 1), (longest - 1, None)):
        models = [replace(model, max_positions=n) for model, n in zip((before, after), limits, strict=True)]
        with pytest.raises(BadRowsError, match=f"longer than the model's {longest - 1} positions"):
            read_change(*models, answer_tokens)
