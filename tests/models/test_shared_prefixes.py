"""Prompts that begin alike: the groups against all pairs, the answers against prompts that are read whole."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import (
    ALL_KEYS,
    FACTS,
    INTERFACE,
    OUTSIDE,
    SINKS,
    argmax_loop,
    count_passes,
    eager,
    tiny_lora,
    tiny_model,
    tiny_tokenizer,
)
from transformers import PreTrainedModel

from attnbalance import HookedModel, Prompt, load_model
from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import encode
from attnbalance.errors import BadRowsError, ModelError
from attnbalance.models.generate import Sampling, _Draw, generate
from attnbalance.models.shared_prefixes import FEWEST, SHORTEST, groups_by_prefix, rows_by_batch, worth_in_reading
from attnbalance.readings.attention import read_attention

HEADERS = ("Oslo is a city, Rome is a city and Paris is a city. ", "Chess is a game, golf is a game, so is polo. ")
WARNING = pytest.mark.filterwarnings("ignore:.*is outside")


def headed_prompts() -> list[Prompt]:
    """The facts' subjects, of several lengths, after one of two headers; and one prompt of its own."""
    texts = [f"{header}{{subject}} is a" for header in HEADERS]
    headed = [prompt for text in texts for prompt in make_prompts(FACTS, text)]
    return [*headed, *make_prompts(FACTS[:1], "{subject} is a")]


@WARNING
@pytest.mark.parametrize("family", [*INTERFACE, *SINKS, *OUTSIDE])
def test_answers_after_a_shared_header_are_those_of_whole_prompts(family: str) -> None:
    model, tokenizer, prompts = tiny_model(family), tiny_tokenizer(), headed_prompts()
    expected = [argmax_loop(eager(model), encoding.ids, 4) for encoding in encode(prompts, tokenizer)]
    answers = generate(load_model(model, tokenizer=tokenizer), prompts, max_new_tokens=4, batch_size=3)
    assert answers == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    assert len(set(answers)) > 2


def test_the_model_reads_a_header_once() -> None:
    model = tiny_model("llama")
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    assert hooked.shares_prefixes
    passes = count_passes(model)
    encodings = encode(headed_prompts(), tiny_tokenizer())
    generate(hooked, headed_prompts(), max_new_tokens=1, batch_size=100)
    whole = sum(len(encoding.ids) for encoding in encodings)
    assert sum(shape.numel() for shape in passes) < whole / 2


def eager_rows(model: PreTrainedModel, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
    """The rows [layer, head, position] of Hugging Face's eager attention, one whole prompt at a time."""
    rows = list[torch.Tensor]()
    for encoding in encode(prompts, tiny_tokenizer()):
        with torch.no_grad():
            maps = model(torch.tensor([encoding.ids]), output_attentions=True, use_cache=False).attentions
        rows.append(torch.stack([layer[0, :, -1] for layer in maps]))
    return rows


def check_rows(hooked: HookedModel, oracle: PreTrainedModel, prompts: Sequence[Prompt], batch_size: int) -> None:
    """Our rows are those of the oracle, and 0 after a prompt's last token."""
    values = read_attention(hooked, prompts, batch_size=batch_size).values
    for row, expected in zip(values, eager_rows(oracle, prompts), strict=True):
        # float32 kernels differ by 1e-6 from batch to batch
        torch.testing.assert_close(row[..., : expected.shape[-1]], expected, atol=1e-5, rtol=0)
        assert not row[..., expected.shape[-1] :].any()


@WARNING
@pytest.mark.parametrize("batch_size", [2, 5, 100])
@pytest.mark.parametrize("family", [*INTERFACE, *SINKS, *OUTSIDE])
def test_rows_after_a_shared_header_are_those_of_eager_attention_alone(family: str, batch_size: int) -> None:
    model, prompts = tiny_model(family), headed_prompts()
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    assert hooked.shares_prefixes == (family in ALL_KEYS)
    check_rows(hooked, eager(tiny_model(family)), random.Random(batch_size).sample(prompts, len(prompts)), batch_size)


def test_rows_of_an_adapter_after_a_shared_header_are_those_of_the_merged_model() -> None:
    adapted = tiny_lora(tiny_model("llama"), ["q_proj", "k_proj", "v_proj"])
    merged = eager(copy.deepcopy(adapted).merge_and_unload())  # pyright: ignore
    hooked = load_model(adapted, tokenizer=tiny_tokenizer())
    assert hooked.shares_prefixes
    check_rows(hooked, merged, headed_prompts(), 5)


@WARNING
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mistral"])
def test_rows_after_a_header_sum_to_1_and_follow_the_order_of_the_prompts(family: str) -> None:
    hooked, prompts = load_model(tiny_model(family), tokenizer=tiny_tokenizer()), headed_prompts()
    values = read_attention(hooked, prompts, batch_size=4).values
    torch.testing.assert_close(values.sum(-1), torch.ones_like(values[..., 0]), atol=1e-5, rtol=0)
    order = random.Random(0).sample(range(len(prompts)), len(prompts))
    permuted = read_attention(hooked, [prompts[i] for i in order], batch_size=7).values
    torch.testing.assert_close(permuted, values[order], atol=1e-5, rtol=0)


@pytest.mark.parametrize("layer", [0, 1])
def test_chosen_layers_after_a_header_are_those_of_all_layers(layer: int) -> None:
    hooked, prompts = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer()), headed_prompts()
    assert hooked.shares_prefixes
    whole = read_attention(hooked, prompts, batch_size=4)
    alone = read_attention(hooked, prompts, layers=[layer], batch_size=4)
    torch.testing.assert_close(alone.values, whole.values[:, [layer]], atol=1e-6, rtol=0)


def test_a_reading_reads_a_header_once() -> None:
    model, prompts = tiny_model("llama"), headed_prompts()
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    assert hooked.shares_prefixes
    passes, lengths = count_passes(model), [len(encoding.ids) for encoding in encode(prompts, tiny_tokenizer())]
    read_attention(hooked, prompts, batch_size=100)
    assert sum(shape.numel() for shape in passes) < sum(lengths) / 2
    assert [shape[0] for shape in passes].count(1) >= len(HEADERS)
    few = [*prompts[:2], *prompts[9:11]]  # two of each header: what they share is not worth passes of its own
    passes.clear()
    read_attention(hooked, few, batch_size=100)
    assert [shape[0] for shape in passes] == [len(few)]


@pytest.mark.parametrize("equal", [True, False])
def test_repeated_prompts_have_the_rows_of_one(equal: bool) -> None:
    hooked, prompts = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer()), headed_prompts()
    repeated = [prompts[0]] * 20 if equal else [*prompts[:3]] * 9
    check_rows(hooked, eager(tiny_model("llama")), repeated, 6)


def test_a_prefix_pays_in_a_reading_if_it_saves_more_than_two_passes() -> None:
    worth = partial(worth_in_reading, 10)  # two passes cost 20 tokens
    assert (worth(7, 4), worth(6, 4), worth(5, 5), worth(100, 1)) == (1, 0, 0, 0)  # 7 x 3 - 20, 6 x 3 < 20, ...
    sequences = [[1] * 6 + [end] for end in range(5, 9)]
    assert groups_by_prefix(sequences, worth) == [(0, [0, 1, 2, 3])]
    assert groups_by_prefix([[1, *ids] for ids in sequences], worth) == [(7, [0, 1, 2, 3])]


def test_a_hook_that_counts_on_whole_prompts_gets_them() -> None:
    def shift(layer: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., 12, :] += 3.0  # a position, which in a pass after a cache would be another token
        return output

    model, twin = tiny_model("llama"), eager(tiny_model("llama"))
    hooked, prompts = load_model(model, tokenizer=tiny_tokenizer()), headed_prompts()
    assert hooked.shares_prefixes
    for each in (model, twin):
        each.get_submodule("model.layers.0.mlp").register_forward_hook(shift)
    check_rows(hooked, twin, prompts[:-1], 1)  # alone, since padding moves positions


@pytest.mark.parametrize(("beyond", "shared"), [(0, False), (1, True)])
def test_prompts_as_long_as_a_threshold_are_read_whole(beyond: int, shared: bool) -> None:
    model, prompts = tiny_model("llama"), headed_prompts()
    lengths = [len(encoding.ids) for encoding in encode(prompts, tiny_tokenizer())]
    hooked = replace(load_model(model, tokenizer=tiny_tokenizer()), alike_from=max(lengths) + beyond)
    assert hooked.shares_prefixes
    passes = count_passes(model)
    read_attention(hooked, prompts)
    assert (sum(shape.numel() for shape in passes) < sum(lengths)) == shared


def test_dropout_of_a_model_in_training_does_not_reach_its_headers() -> None:
    model = tiny_model("gpt2").train()
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    check_rows(hooked, eager(tiny_model("gpt2")), headed_prompts(), 5)
    assert hooked.shares_prefixes
    assert model.training


def test_batches_of_rows_hold_each_prompt_once_with_its_own_tokens() -> None:
    hooked = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    encodings, seen = encode(headed_prompts(), tiny_tokenizer()), list[int]()
    for indices, batch, rows in rows_by_batch(hooked, encodings, 4):
        assert len(indices) == len(rows) <= 4
        for i, ids, mask in zip(indices, batch.input_ids, batch.attention_mask, strict=True):
            assert tuple(ids[mask != 0].tolist()) == encodings[i].ids
        seen += indices
    assert sorted(seen) == list(range(len(encodings)))


SEQUENCES = st.lists(
    st.tuples(
        st.sampled_from([0, 10, 16, 20, 40]), st.integers(1, 3), st.lists(st.integers(5, 7), min_size=1, max_size=3)
    ),
    max_size=20,
)


@given(SEQUENCES)
def test_groups_hold_each_sequence_once_and_what_they_share(parts: list[tuple[int, int, list[int]]]) -> None:
    sequences = [[first] * length + own for length, first, own in parts]
    groups = groups_by_prefix(sequences)
    assert sorted(i for _, group in groups for i in group) == list(range(len(sequences)))
    for shared, group in groups:
        assert len({tuple(sequences[i][:shared]) for i in group}) == 1
        assert all(len(sequences[i]) > shared for i in group)
        assert shared == 0 or (shared >= SHORTEST and len(group) >= FEWEST)
    assert sum(shared == 0 for shared, _ in groups) <= 1


def test_the_groups_save_the_most_tokens() -> None:
    main, variant = [1] * 80, [1] * 20 + [2] * 60
    sequences = [[*main, 9, end] for end in range(10)] + [[*variant, 9, end] for end in range(5)]
    assert [(shared, len(group)) for shared, group in groups_by_prefix(sequences)] == [(81, 10), (81, 5)]
    few = [[*main, 9, end] for end in range(10)] + [[*variant, 9]]
    assert [(shared, len(group)) for shared, group in groups_by_prefix(few)] == [(81, 10), (0, 1)]


def test_tokens_are_drawn_from_the_softmax_at_the_temperature() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    [prompt] = make_prompts(FACTS[:1], "{subject} is a")
    hooked, draws, temperature = load_model(model, tokenizer=tokenizer), 2000, 0.5
    answers = generate(
        hooked, [prompt] * draws, max_new_tokens=1, batch_size=500, sampling=Sampling(temperature, seed=3)
    )
    [encoding] = encode([prompt], tokenizer)
    with torch.no_grad():
        logits = eager(model)(torch.tensor([encoding.ids])).logits[0, -1]
    texts = [tokenizer.decode([i], skip_special_tokens=True) for i in range(len(logits))]
    expected = Counter[str]()
    for text, probability in zip(texts, (logits.double() / temperature).softmax(-1).tolist(), strict=True):
        expected[text] += probability
    for text, probability in expected.most_common(5):  # four standard deviations of a binomial share
        error = 4 * math.sqrt(probability * (1 - probability) / draws)
        assert answers.count(text) / draws == pytest.approx(probability, abs=error)


def draws_of(logits: list[float], temperature: float, count: int = 4000) -> list[int]:
    scores = torch.tensor([logits] * count)
    return _Draw(Sampling(temperature, 0), range(count))(torch.zeros(count, 1), scores).argmax(-1).tolist()


def test_draws_have_the_shares_of_the_softmax_whatever_the_size_of_the_logits() -> None:
    """Logits that would overflow at a small temperature, and a token of minus infinity, which is never drawn."""
    even = draws_of([1e38, -math.inf, 1e38, 0.0], 1e-3)
    assert set(even) == {0, 2}
    assert even.count(0) / len(even) == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / len(even)))
    odds = draws_of([math.log(3), -math.inf, 0.0], 1.0)
    assert set(odds) == {0, 2}
    assert odds.count(0) / len(odds) == pytest.approx(0.75, abs=4 * math.sqrt(0.1875 / len(odds)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [None, Sampling(1.0, 0)])
def test_logits_of_which_none_is_the_largest_are_refused(value: float, sampling: Sampling | None) -> None:
    hooked = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    hooked.model.lm_head.register_forward_hook(lambda _module, _inputs, logits: torch.full_like(logits, value))
    with pytest.raises(ModelError, match="gives NaN or infinite logits while answering"):
        generate(hooked, make_prompts(FACTS[:2]), max_new_tokens=2, batch_size=2, sampling=sampling)


def test_samples_depend_on_their_seed_alone() -> None:
    hooked, prompts = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer()), headed_prompts()
    state = torch.random.get_rng_state()

    def sample(seed: int) -> list[str]:
        return generate(hooked, prompts, max_new_tokens=4, batch_size=5, sampling=Sampling(1.0, seed))

    first = sample(0)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(7)
    assert sample(0) == first != sample(1)


def test_samples_do_not_depend_on_the_batch_and_differ_between_alike_prompts() -> None:
    hooked, prompts = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer()), headed_prompts()

    def sample(asked: Sequence[Prompt], size: int) -> list[str]:
        return generate(hooked, asked, max_new_tokens=6, batch_size=size, sampling=Sampling(1.0, 3))

    first = sample(prompts, 1)
    assert all(sample(prompts, size) == first for size in (2, 5, 100))
    assert sample(prompts[:4], 3) == first[:4]
    assert len(set(sample([prompts[0]] * 20, 20))) > 10


@WARNING
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "gpt_neo"])
def test_repeated_prompts_are_read_once_and_answered_alike(family: str) -> None:
    model, prompts = tiny_model(family), headed_prompts()
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    expected = generate(hooked, prompts, max_new_tokens=4, batch_size=3)
    passes = count_passes(model)
    repeated = [prompt for prompt in prompts for _ in range(8)]
    answers = generate(hooked, repeated, max_new_tokens=4, batch_size=24)
    assert answers == [answer for answer in expected for _ in range(8)]
    whole = sum(len(encoding.ids) for encoding in encode(repeated, tiny_tokenizer()))
    assert sum(shape.numel() for shape in passes) < whole / 4


def test_repeated_prompts_count_for_a_prefix() -> None:
    sequences = [[1] * 20 + [end] for end in (5, 6)] * 2
    assert groups_by_prefix(sequences) == [(20, [0, 2, 1, 3])]
    assert groups_by_prefix(sequences[:2]) == [(0, [0, 1])]


def test_without_a_cache_to_share_all_prompts_stay_together() -> None:
    model = tiny_model("mistral")
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    assert not hooked.shares_prefixes
    assert hooked.answers_from_cache
    passes = count_passes(model)
    generate(hooked, headed_prompts(), max_new_tokens=1, batch_size=100)
    assert [shape[0] for shape in passes] == [len(headed_prompts())]


def test_prompts_that_are_too_long_are_named_by_their_rows_among_all() -> None:
    hooked = load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    prompts = [*headed_prompts(), *make_prompts(FACTS[:1], HEADERS[0] * 4 + "{subject} is a")]
    with pytest.raises(BadRowsError) as caught:
        generate(hooked, prompts, max_new_tokens=2, batch_size=4)
    assert caught.value.indices == (len(prompts) - 1,)


def test_a_token_that_the_model_does_not_know_is_refused_before_anything_is_read() -> None:
    model = tiny_model("llama")
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    known = max(max(encoding.ids) for encoding in encode(headed_prompts(), tiny_tokenizer()))
    model.resize_token_embeddings(known)
    with pytest.raises(ModelError, match=f"token id {known} is outside"):
        generate(hooked, headed_prompts(), max_new_tokens=2, batch_size=4)
