"""Reading attention: what may not change a reading, and what is made of rows."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from tiny import FACTS, INTERFACE, OUTSIDE, POSITIONS, SINKS, tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import (
    AttentionRows,
    Fact,
    HookedModel,
    Prompt,
    Reading,
    load_model,
    read_attention,
    read_attention_by_part,
)
from attnbalance.data.batches import pad
from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import encode
from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.readings.attention import read_from_rows, read_subject_attention, rows_of

TOLERANCE = 1e-5  # the issue's; float32 kernels differ by 1e-6 from batch to batch

WORDS = ("Zürich", "where", "is", "the", "composer", "of", "北京", "👩‍👩‍👧", "occupation?", "Answer:", "x" * 9)


@pytest.fixture(scope="module", params=[*INTERFACE, *SINKS, *OUTSIDE])
def hooked(request: pytest.FixtureRequest) -> HookedModel:
    with pytest.warns(UserWarning, match="eager") if request.param in OUTSIDE else _quiet():
        return load_model(tiny_model(request.param), tokenizer=tiny_tokenizer())


class _quiet:  # noqa: N801 - stands where pytest.warns would
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def random_prompts(seed: int, count: int = 9) -> tuple[Prompt, ...]:
    """Prompts of 2 to 12 random words around a subject that stands anywhere."""
    draw = random.Random(seed)
    prompts = []
    for number in range(count):
        words = draw.choices(WORDS, k=draw.randint(1, 11))
        place = draw.randint(0, len(words))
        before = "".join(word + " " for word in words[:place])
        text = " ".join([before + "Ada Lovelace", *words[place:]])
        fact = Fact("Ada Lovelace", "r", ("a",), question=text, subject_start=len(before))
        prompts.append(Prompt(text, {"subject": (len(before), len(before) + 12)}, str(number), fact))
    return tuple(prompts)


def alone(model: HookedModel, prompts: tuple[Prompt, ...]) -> Reading:
    return read_attention(model, prompts, batch_size=1).to("subject")


def test_chosen_layers_are_those_of_all_layers_in_the_models_order(hooked: HookedModel) -> None:
    prompts = random_prompts(0)
    whole = read_attention(hooked, prompts)
    for layers in (hooked.layers[:1], hooked.layers[-1:], hooked.layers[::-1]):
        some = read_attention(hooked, prompts, layers=layers)
        assert some.layers == tuple(sorted(layers, key=hooked.layers.index))
        index = [whole.layers.index(layer) for layer in some.layers]
        torch.testing.assert_close(some.values, whole.values[:, index], atol=TOLERANCE, rtol=0)
        looks = read_subject_attention(hooked, prompts, layers=layers)
        assert looks.layers == some.layers
        torch.testing.assert_close(looks.values, some.to("subject").values, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_batch_size_and_order_change_no_reading(hooked: HookedModel, seed: int) -> None:
    prompts = random_prompts(seed)
    expected = alone(hooked, prompts)
    assert len({len(one.ids) for one in encode(prompts, hooked.tokenizer)}) > 3  # else nothing would be padded
    for batch_size in (2, 5, 9):
        shuffled = tuple(random.Random(batch_size).sample(prompts, len(prompts)))
        found = read_attention(hooked, shuffled, batch_size=batch_size).to("subject")
        assert found.prompt_ids == tuple(prompt.prompt_id for prompt in shuffled)
        torch.testing.assert_close(found.at(expected.prompt_ids).values, expected.values, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.uint8])
def test_padding_side_and_mask_dtype_change_no_reading(hooked: HookedModel, side: str, dtype: torch.dtype) -> None:
    prompts = random_prompts(7)
    expected = alone(hooked, prompts)
    batch = pad(encode(prompts, hooked.tokenizer), pad_id=5, padding_side=side)
    batch = dataclasses.replace(batch, attention_mask=batch.attention_mask.to(dtype))
    with torch.no_grad():
        found = rows_of(batch, hooked.rows(batch), hooked.layers).to("subject")
    torch.testing.assert_close(found.values, expected.values, atol=TOLERANCE, rtol=0)


def test_rows_hold_each_prompts_own_tokens_from_position_zero() -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    found = read_attention(model, tiny_prompts(), batch_size=3)
    for values, span, tokens, one in zip(
        found.values, found.spans["subject"], found.tokens, encode(tiny_prompts(), model.tokenizer), strict=True
    ):
        assert len(tokens) == len(one.ids)
        assert "".join(tokens) == one.prompt.text or not one.prompt.text.isascii()  # split characters are shown twice
        assert tuple(span.nonzero().flatten().tolist()) == one.spans["subject"]
        assert values[..., len(tokens) - 1].all()
    assert found.layers == (0, 1)


def test_max_and_sum_reduce_over_the_subjects_tokens_alone() -> None:
    found = read_attention(load_model(tiny_model("qwen2"), tokenizer=tiny_tokenizer()), tiny_prompts())
    largest, total = found.to("subject", "max"), found.to("subject", "sum")
    for i in range(len(found.prompts)):
        places = found.spans["subject"][i].nonzero().flatten()
        for layer in range(2):
            for head in range(4):
                row = [float(found.values[i, layer, head, j]) for j in places]
                assert float(largest.values[i, layer, head]) == max(row)
                assert float(total.values[i, layer, head]) == pytest.approx(sum(row), abs=1e-6)
    assert (largest.unit, largest.name, total.name) == (
        "probability",
        "subject attention (max)",
        "subject attention (sum)",
    )


def test_the_maximum_of_the_mean_over_heads_is_the_other_reading_of_the_papers_words() -> None:
    found = read_attention(load_model(tiny_model("llama"), tokenizer=tiny_tokenizer()), tiny_prompts())
    other, each = found.to("subject", "max-of-mean"), found.to("subject", "max")
    assert other.values.shape == (9, 2, 1)
    for i in range(9):
        subject = found.spans["subject"][i].nonzero().flatten().tolist()
        for layer in range(2):
            rows = found.values[i, layer].tolist()
            means = [sum(row[j] for row in rows) / len(rows) for j in subject]
            assert float(other.values[i, layer, 0]) == pytest.approx(max(means), abs=1e-6)  # float32 sums of 4 numbers
    assert (other.values[..., 0] <= each.values.mean(-1) + 1e-6).all()
    assert (other.values[..., 0] < each.values.mean(-1) - 1e-3).any()  # the two are not the same


def test_reading_batch_by_batch_equals_reading_all_rows() -> None:
    model = load_model(tiny_model("gemma2"), tokenizer=tiny_tokenizer())
    for reduce in ("max", "max-of-mean", "sum"):
        whole = read_attention(model, tiny_prompts(), batch_size=4).to("subject", reduce)
        parts = read_subject_attention(model, tiny_prompts(), reduce=reduce, batch_size=2)
        assert parts.prompt_ids == whole.prompt_ids
        torch.testing.assert_close(parts.values, whole.values, atol=TOLERANCE, rtol=0)


def test_prompts_of_several_templates_keep_the_roles_that_each_has() -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    mixed = (*make_prompts(FACTS[:4], "{relation}: {subject} is"), *make_prompts(FACTS[4:], "plain"))
    found = read_attention(model, mixed, batch_size=2)
    assert found.spans["relation"].any(dim=1).tolist() == [True] * 4 + [False] * 5
    assert found.spans["subject"].any(dim=1).all()
    with pytest.raises(DataError, match="not every prompt has a span 'relation'"):
        found.to("relation")


def test_a_prompt_may_fill_the_models_positions_and_not_one_more() -> None:
    model = load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    base = len(encode(make_prompts([Fact("Rust", "r", ("a",))], "{subject}"), model.tokenizer)[0].ids)

    def prompt(tokens: int) -> tuple[Prompt, ...]:
        return make_prompts([Fact("Rust", "r", ("a",), question="Rust" + "!" * (tokens - base))], "plain")

    assert len(encode(prompt(POSITIONS), model.tokenizer)[0].ids) == POSITIONS
    assert read_attention(model, prompt(POSITIONS)).values.shape[-1] == POSITIONS
    with pytest.raises(BadRowsError, match=rf"longer than the model's {POSITIONS} positions(.|\n)*{POSITIONS + 1} tok"):
        read_attention(model, (*tiny_prompts(), *prompt(POSITIONS + 1)))


def test_nan_in_one_tokens_embedding_names_the_prompt_that_has_it() -> None:
    model = tiny_model("llama")
    prompts = tiny_prompts()
    ids = [set(one.ids) for one in encode(prompts, tiny_tokenizer())]
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    only_in_one = next(iter(ids[1] - set.union(*(part for i, part in enumerate(ids) if i != 1))))
    with torch.no_grad():
        model.get_input_embeddings().weight[only_in_one] = torch.nan
    with pytest.raises(ModelError, match=r"NaN or infinite numbers.*Ode to Joy.*float32"):
        read_attention(hooked, prompts)


def test_a_tokenizer_of_another_model_is_named_and_not_an_index_error() -> None:
    hooked = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    with torch.no_grad():
        hooked.model.resize_token_embeddings(50)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ModelError, match=r"token id \d+ is outside the 50 tokens.*`tokenizer`"):
        read_attention(hooked, tiny_prompts())


def share_by_hand(rows: AttentionRows, i: int, layer: int, head: int) -> dict[str, float]:
    """The shares of one row, token by token."""
    shares = dict.fromkeys((*rows.spans, "first token", "rest"), 0.0)
    for j in range(len(rows.tokens[i])):
        roles = [role for role in ("subject", "context", "relation") if role in rows.spans and rows.spans[role][i, j]]
        part = roles[0] if roles else "first token" if j == 0 else "rest"
        shares[part] += float(rows.values[i, layer, head, j])
    return shares


def check_shares(model: HookedModel, prompts: Sequence[Prompt]) -> dict[str, Reading]:
    """The shares by part, equal to those counted by hand, adding up to the rows' sums."""
    rows = read_attention(model, prompts, batch_size=4)
    shares = read_attention_by_part(model, prompts, batch_size=2)
    for i, layer, head in itertools.product(range(len(prompts)), range(2), range(4)):
        expected = share_by_hand(rows, i, layer, head)
        assert set(shares) == set(expected)
        for part, value in expected.items():
            assert float(shares[part].values[i, layer, head]) == pytest.approx(value, abs=TOLERANCE)
    total = torch.stack([share.values for share in shares.values()]).sum(0)
    torch.testing.assert_close(total, rows.values.sum(-1), atol=TOLERANCE, rtol=0)
    subject = rows.to("subject", "sum").values
    torch.testing.assert_close(shares["subject"].values, subject, atol=TOLERANCE, rtol=0)
    assert {(share.name, share.unit) for share in shares.values()} == {(f"{p} share", "probability") for p in shares}
    return shares


@pytest.mark.parametrize("family", ["llama", "gpt2", *SINKS, "bloom"])
@pytest.mark.filterwarnings("ignore:.*eager attention")
def test_the_shares_of_all_parts_add_up_to_the_row(family: str) -> None:
    model = load_model(tiny_model(family), tokenizer=tiny_tokenizer())
    shares = check_shares(model, make_prompts(FACTS, "It is the {relation}: {subject} is"))
    assert tuple(shares) == ("subject", "relation", "first token", "rest")
    assert all(bool((share.values > 0).any()) for share in shares.values())
    total = torch.stack([share.values for share in shares.values()]).sum(0)
    if family in SINKS:
        assert (total < 1 - 1e-3).any()
    else:
        torch.testing.assert_close(total, torch.ones_like(total), atol=TOLERANCE, rtol=0)


def test_the_first_token_belongs_to_the_subject_where_the_prompt_begins_with_it() -> None:
    model = load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    shares = check_shares(model, make_prompts(FACTS, "{subject} is the {relation} of"))
    assert not shares["first token"].values.any()


def test_a_token_of_two_roles_counts_once_for_the_subject() -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    wider = []
    for prompt in make_prompts(FACTS, "As said: {subject} is"):
        start, end = prompt.spans["subject"]
        spans = {"context": (start - 5, end), "relation": (start - 5, end + 3), "subject": (start, end)}
        wider.append(dataclasses.replace(prompt, spans=spans))
    shares = check_shares(model, wider)
    assert all(bool((shares[role].values > 0).any()) for role in ("subject", "context", "relation"))


def test_a_role_of_some_prompts_alone_has_no_share() -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    mixed = (*make_prompts(FACTS[:4], "{relation}: {subject} is"), *make_prompts(FACTS[4:], "plain"))
    with pytest.raises(DataError, match="not every prompt has a span 'relation'"):
        read_attention_by_part(model, mixed)


def test_all_parts_are_read_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes, rows = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer()), [], HookedModel.rows
    counting = lambda self, batch, *rest: passes.append(len(batch.prompts)) or rows(self, batch, *rest)  # noqa: E731
    monkeypatch.setattr(HookedModel, "rows", counting)
    read_attention_by_part(model, tiny_prompts(), batch_size=4)
    assert sum(passes) == len(tiny_prompts())


@pytest.mark.parametrize("family", ["llama", *SINKS])
def test_entropy_is_that_of_the_row_over_its_tokens(family: str) -> None:
    rows = read_attention(load_model(tiny_model(family), tokenizer=tiny_tokenizer()), tiny_prompts(), batch_size=4)
    entropy = rows.entropy()
    assert (entropy.name, entropy.unit) == ("attention entropy", "nats")
    for i, layer, head in itertools.product(range(9), range(2), range(4)):
        row = [float(p) for p in rows.values[i, layer, head, : len(rows.tokens[i])]]
        expected = -sum(p / sum(row) * math.log(p / sum(row)) for p in row if p > 0)
        assert float(entropy.values[i, layer, head]) == pytest.approx(expected, abs=TOLERANCE)
        assert 0 <= expected <= math.log(len(row)) + TOLERANCE


def test_entropy_of_rows_made_by_hand() -> None:
    made = {"one token": [1.0, 0, 0, 0], "two alike": [0.5, 0, 0.5, 0], "with a sink": [0.1, 0.1, 0.1, 0.1]}
    prompts = tuple(tiny_prompts()[:3])
    values = torch.tensor(list(made.values()))[:, None, None]
    rows = AttentionRows(values, {}, (("a", "b", "c", "d"),) * 3, (0,), prompts)
    expected = torch.tensor([0.0, math.log(2), math.log(4)])  # closed forms
    torch.testing.assert_close(rows.entropy().values.flatten(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: read_attention(model, ()), "at least one prompt"),
        (lambda model: read_attention(model, tiny_prompts(), batch_size=0), "at least 1, got 0"),
        (
            lambda model: read_attention(model, tiny_prompts()).to("subject", "mean"),
            "max, max-of-mean, sum, got 'mean'",
        ),
        (lambda model: read_attention(model, tiny_prompts()).to("answer"), "'answer'; there are subject"),
        (lambda model: read_attention(model, tiny_prompts()).share("answer"), "'answer'; there are subject"),
        (lambda model: read_attention_by_part(model, ()), "at least one prompt"),
        (lambda model: read_attention(model, tiny_prompts(), layers=[]), "at least one layer, got none"),
        (lambda model: read_attention(model, tiny_prompts(), layers=[True]), r"such as \[0, 1\], got \[True\]"),
        (lambda model: read_attention(model, tiny_prompts(), layers=[7]), "no attention layer 7; it has 0, 1"),
        (lambda model: read_subject_attention(model, tiny_prompts(), layers=[-1]), "no attention layer -1; it has 0"),
        (
            lambda model: read_from_rows(model, tiny_prompts(), {}, rows=lambda batch: None, layers=[0]),
            "`layers` choose among the model's own rows; leave them out",
        ),
    ],
)
def test_bad_arguments_are_named(call, message: str) -> None:
    model = load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    with pytest.raises(DataError, match=message):
        call(model)
