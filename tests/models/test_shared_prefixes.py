"""Prompts that begin alike: the groups against all pairs, the answers against prompts that are read whole."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import FACTS, INTERFACE, OUTSIDE, SINKS, argmax_loop, eager, tiny_model, tiny_tokenizer

from attnbalance import Prompt, load_model
from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import encode
from attnbalance.errors import BadRowsError, ModelError
from attnbalance.models.generate import Sampling, generate
from attnbalance.models.shared_prefixes import FEWEST, SHORTEST, groups_by_prefix, read_prefix

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
    hooked = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    tokens = list[int]()
    embed = hooked.model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    embed.register_forward_hook(lambda module, inputs, output: tokens.append(inputs[0].numel()))
    encodings = encode(headed_prompts(), tiny_tokenizer())
    generate(hooked, headed_prompts(), max_new_tokens=1, batch_size=100)
    whole = sum(len(encoding.ids) for encoding in encodings)
    assert sum(tokens) < whole / 2


def test_a_cache_of_less_than_all_keys_is_not_shared() -> None:
    for family, shared in (("llama", True), ("gpt2", True), ("mistral", False), ("gemma2", False)):
        hooked = load_model(tiny_model(family), tokenizer=tiny_tokenizer())
        assert (read_prefix(hooked, [5] * SHORTEST) is not None) == shared


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


def test_samples_depend_on_their_seed_alone() -> None:
    hooked, prompts = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer()), headed_prompts()
    state = torch.random.get_rng_state()

    def sample(seed: int) -> list[str]:
        return generate(hooked, prompts, max_new_tokens=4, batch_size=5, sampling=Sampling(1.0, seed))

    first = sample(0)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(7)
    assert sample(0) == first != sample(1)


@WARNING
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "gpt_neo"])
def test_repeated_prompts_are_read_once_and_answered_alike(family: str) -> None:
    hooked, prompts = load_model(tiny_model(family), tokenizer=tiny_tokenizer()), headed_prompts()
    expected = generate(hooked, prompts, max_new_tokens=4, batch_size=3)
    read = list[int]()
    embed = hooked.model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    embed.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].numel()))
    repeated = [prompt for prompt in prompts for _ in range(8)]
    answers = generate(hooked, repeated, max_new_tokens=4, batch_size=24)
    assert answers == [answer for answer in expected for _ in range(8)]
    whole = sum(len(encoding.ids) for encoding in encode(repeated, tiny_tokenizer()))
    assert sum(read) < whole / 4


def test_repeated_prompts_count_for_a_prefix() -> None:
    sequences = [[1] * 20 + [end] for end in (5, 6)] * 2
    assert groups_by_prefix(sequences) == [(20, [0, 2, 1, 3])]
    assert groups_by_prefix(sequences[:2]) == [(0, [0, 1])]


def test_without_a_cache_to_share_all_prompts_stay_together() -> None:
    hooked, passes = load_model(tiny_model("mistral"), tokenizer=tiny_tokenizer()), list[int]()
    embed = hooked.model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    embed.register_forward_hook(lambda module, inputs, output: passes.append(len(inputs[0])))
    generate(hooked, headed_prompts(), max_new_tokens=1, batch_size=100)
    assert passes == [1, len(headed_prompts())]  # one token to see the cache, then all prompts


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
