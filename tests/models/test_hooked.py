"""The hooked model itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload
from tiny import POSITIONS, tiny_lora, tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import HookedModel, load_model, read_attention, recall
from attnbalance.data.batches import pad
from attnbalance.data.tokens import encode
from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.models.hooked import hook


@pytest.mark.filterwarnings("ignore:.*is outside")
@pytest.mark.parametrize(("family", "limit"), [("gpt2", POSITIONS), ("llama", POSITIONS), ("bloom", None)])
def test_it_knows_its_layers_limit_and_device(family: str, limit: int | None) -> None:
    model = load_model(tiny_model(family), tokenizer=tiny_tokenizer())
    assert isinstance(model, HookedModel)
    assert (model.layers, model.max_positions, str(model.device)) == ((0, 1), limit, "cpu")


@pytest.mark.parametrize(("kind", "expected"), [("plain", 2), ("no_pad", 1), ("no_special", 0)])
def test_padding_takes_the_pad_token_the_end_or_zero(kind: str, expected: int) -> None:
    assert load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer(kind)).pad_id == expected


def test_hooking_twice_changes_nothing() -> None:
    model, batch = tiny_model("qwen3"), pad(encode(tiny_prompts(), tiny_tokenizer()))
    once = hook(model, tiny_tokenizer(), "a").rows(batch)
    assert torch.equal(hook(model, tiny_tokenizer(), "b").rows(batch), once)


def test_rows_carry_gradients_outside_no_grad_and_none_inside() -> None:
    hooked = hook(tiny_model("llama"), tiny_tokenizer(), "it")
    batch = pad(encode(tiny_prompts(), tiny_tokenizer()))
    assert hooked.rows(batch).requires_grad
    with torch.no_grad():
        assert not hooked.rows(batch).requires_grad


def test_logits_that_are_not_numbers_are_refused_where_they_are_computed() -> None:
    hooked = hook(tiny_model("llama"), tiny_tokenizer(), "it")
    batch = pad(encode(tiny_prompts(), tiny_tokenizer()))
    with torch.no_grad():
        hooked.model.lm_head.weight[3] = torch.inf  # pyright: ignore
        assert hooked.rows(batch).isfinite().all()
    with pytest.raises(ModelError, match=r"it gives NaN or infinite numbers \(first at prompt 'Question: In what"):
        hooked.rows(batch)


def calls_of(module: torch.nn.Module) -> list[str]:
    """The names of the parts that are called from now on."""
    names = list[str]()
    for name, part in module.named_modules():
        part.register_forward_pre_hook(lambda _, args, name=name: names.append(name))
    return names


def test_a_pass_without_gradients_ends_at_the_last_layers_row() -> None:
    hooked = hook(tiny_model("llama"), tiny_tokenizer(), "it")
    batch = pad(encode(tiny_prompts(), tiny_tokenizer()))
    whole, calls = hooked.rows(batch), calls_of(hooked.model)
    with torch.no_grad():
        assert torch.equal(hooked.rows(batch), whole)
    assert {"model.layers.0.mlp", "model.layers.1.self_attn.k_proj"} < set(calls)
    assert not {"model.layers.1.self_attn.o_proj", "model.layers.1.mlp", "model.norm", "lm_head"} & set(calls)


def test_a_pass_for_the_first_layers_ends_at_the_last_of_them() -> None:
    hooked = hook(tiny_model("llama"), tiny_tokenizer(), "it")
    batch = pad(encode(tiny_prompts(), tiny_tokenizer()))
    whole, calls = hooked.rows(batch), calls_of(hooked.model)
    with torch.no_grad():
        assert torch.equal(hooked.rows(batch, layers=[0]), whole[:, :1])
    assert "model.layers.0.self_attn.k_proj" in calls
    assert not {"model.layers.0.mlp", "model.layers.1"} & set(calls)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_oss", "mistral", "qwen3"])
def test_rows_of_the_short_pass_are_those_of_the_whole_one(family: str, side: str) -> None:
    base = tiny_model(family)
    model = base if family in ("gpt_oss", "mixtral") else tiny_lora(base, "all-linear")
    hooked, batch = (
        hook(model, tiny_tokenizer(), "it"),
        pad(encode(tiny_prompts(), tiny_tokenizer()), padding_side=side),
    )
    with torch.no_grad():
        short = hooked.rows(batch)
    assert torch.equal(short, hooked.rows(batch))


def test_a_compiled_model_gives_the_same_rows_in_a_short_pass() -> None:
    hooked = hook(tiny_model("llama"), tiny_tokenizer(), "it")
    batch = pad(encode(tiny_prompts(), tiny_tokenizer()))
    whole = hooked.rows(batch)
    hooked.model.compile(backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(hooked.rows(batch), whole, atol=1e-6, rtol=0)  # float32 sums in another order


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("alike_from", [None, 1, 20])
@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_batches_hold_each_prompts_own_tokens(batch_size: int, alike_from: int | None, side: str) -> None:
    hooked = replace(hook(tiny_model("llama"), tiny_tokenizer(), "it"), alike_from=alike_from)
    encodings = encode(tiny_prompts(), tiny_tokenizer())
    lengths, seen = [len(encoding.ids) for encoding in encodings], list[int]()
    for indices, batch in hooked.batches(encodings, batch_size, padding_side=side):
        assert len(indices) <= batch_size
        width = max(lengths[i] for i in indices)
        if alike_from is not None and width >= alike_from:
            assert {lengths[i] for i in indices} == {width}
        for row, i in enumerate(indices):
            padding = [hooked.pad_id] * (width - lengths[i])
            own = list(encodings[i].ids)
            assert batch.input_ids[row].tolist() == (padding + own if side == "left" else own + padding)
            assert int(batch.attention_mask[row].sum()) == lengths[i]
            assert batch.prompts[row] is encodings[i].prompt
        seen += indices
    assert sorted(seen) == list(range(len(encodings)))
    assert [lengths[i] for i in seen] == sorted(lengths, reverse=True)


def test_tokens_to_generate_count_as_part_of_a_prompts_length() -> None:
    encodings = encode(tiny_prompts(), tiny_tokenizer())
    lengths = [len(encoding.ids) for encoding in encodings]
    hooked = hook(tiny_model("llama"), tiny_tokenizer(), "it")
    alike = replace(hooked, alike_from=max(lengths) + 5)
    assert max(len(indices) for indices, _ in alike.batches(encodings, 9, budgets=[5] * 9)) < 9
    assert [len(indices) for indices, _ in alike.batches(encodings, 9, budgets=[4] * 9)] == [9]
    shortest = lengths.index(min(lengths))
    budgets = [1] * 9
    budgets[shortest] = POSITIONS - min(lengths)  # fits alone, and not after the padding beside longer prompts
    assert [len(indices) for indices, _ in hooked.batches(encodings, 9, budgets=budgets)] == [1] * 9
    budgets[shortest] += 1
    with pytest.raises(BadRowsError, match=f"{POSITIONS} positions"):
        next(hooked.batches(encodings, 9, budgets=budgets))


def test_batches_of_no_prompts_are_refused() -> None:
    with pytest.raises(DataError, match="at least one prompt, got none"):
        next(hook(tiny_model("llama"), tiny_tokenizer(), "it").batches([], 4))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_whose_weights_are_offloaded_reads_and_answers_as_in_memory(when: str) -> None:
    whole, prompts = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer()), tiny_prompts()
    model = tiny_model("llama")
    if when == "before":
        cpu_offload(model, torch.device("cpu"))
    offloaded = load_model(model, tokenizer=tiny_tokenizer())
    if when == "after":
        cpu_offload(model, torch.device("cpu"))
    assert model.device.type == "meta"
    assert torch.equal(read_attention(offloaded, prompts).values, read_attention(whole, prompts).values)
    assert recall(offloaded, prompts) == recall(whole, prompts)


def test_a_model_that_lost_layers_after_it_was_loaded_is_refused() -> None:
    hooked = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    hooked.model.model.layers = hooked.model.model.layers[:1]  # pyright: ignore
    with pytest.raises(ModelError, match="layer 1 of LlamaForCausalLM gave no attention row: the model was changed"):
        read_attention(hooked, tiny_prompts())
