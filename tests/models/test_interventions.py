"""Edits of the last query's row against eager attention whose mask holds the edit, and against TransformerLens."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, get_peft_model
from tiny import INTERFACE, OUTSIDE, SINKS, eager, tiny_model, tiny_prompts, tiny_tokenizer
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from uneven import hooked, uneven

from attnbalance import HookedModel, load_model
from attnbalance.data.batches import PromptBatch, pad
from attnbalance.data.tokens import Encoding, encode
from attnbalance.errors import ArgumentError, DataError, ModelError
from attnbalance.models.bridge import bridge_of
from attnbalance.models.forward import forward_rows
from attnbalance.models.generate import generate
from attnbalance.models.interventions import (
    Edit,
    RowEdit,
    boost_attention,
    edited,
    patch_rows,
    random_tokens,
    tokens_of,
)

# Kernels sum float32 products in another order: 1e-6 in logits of about 1 to 10; a missing boost shows as 0.1 and more.
TOLERANCE = 1e-5
ALPHA = 7.0
EDITABLE = [*INTERFACE, *SINKS]
ENCODINGS = encode(tiny_prompts(), tiny_tokenizer())
BATCH = pad(ENCODINGS)
Heads = dict[int, list[int]] | None


def logits_of(model: HookedModel, edit: Edit, batch: PromptBatch = BATCH) -> Tensor:
    """The logits at each prompt's last token, edited."""
    with edited(model, edit(batch)):
        return forward_rows(model.model, batch, model.kernel)[1][:, -1]


@contextmanager
def boosted_mask(model: PreTrainedModel, one: Encoding, heads: Heads = None) -> Iterator[None]:
    """An eager model with log(ALPHA) on the last row of its mask at the subject's keys, in some heads of each layer."""

    def before(module: Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        mask = kwargs["attention_mask"].expand(-1, 4, -1, -1).clone()
        for head in range(4) if heads is None else heads.get(module.layer_idx, []):
            mask[:, head, -1, list(one.spans["subject"])] += math.log(ALPHA)
        return args, kwargs | {"attention_mask": mask}

    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and type(m).__name__.endswith("Attention")]
    assert len(layers) == 2
    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", EDITABLE)
def test_alpha_one_and_a_models_own_rows_change_nothing_to_the_last_bit(family: str) -> None:
    model = hooked(family)
    with torch.no_grad():
        plain = forward_rows(model.model, BATCH, model.kernel)[1][:, -1]
        for edit in (
            boost_attention(1.0),
            boost_attention(1.0, random_tokens()),
            patch_rows(model),
            patch_rows(hooked(family)),
        ):
            assert torch.equal(logits_of(model, edit), plain)
        assert (logits_of(model, boost_attention(ALPHA)) - plain).abs().max() > 0.1  # else nothing was edited at all


@pytest.mark.parametrize("heads", [None, {0: [1, 3], 1: [0]}, {1: [2]}])
@pytest.mark.parametrize("family", EDITABLE)
def test_boosting_equals_eager_attention_with_log_alpha_on_its_mask(family: str, heads: Heads) -> None:
    model, oracle = hooked(family), eager(uneven(family))
    rows: dict[int, Tensor] = {}

    def recorded(batch: PromptBatch) -> RowEdit:
        row_edit = boost_attention(ALPHA, heads=heads)(batch)
        return lambda layer, row: rows.setdefault(layer, row_edit(layer, row))

    with torch.no_grad():
        found = logits_of(model, recorded)
        for i, one in enumerate(ENCODINGS):
            with boosted_mask(oracle, one, heads):
                expected = oracle(torch.tensor([one.ids]), output_attentions=True, use_cache=False)
            torch.testing.assert_close(found[i], expected.logits[0, -1], atol=TOLERANCE, rtol=TOLERANCE)
            for layer, maps in enumerate(expected.attentions):
                row = rows[layer][i, :, -len(one.ids) :]
                torch.testing.assert_close(row, maps[0, :, -1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("alpha", [0.25, 7.0, 1000.0])
def test_boosting_is_a_softmax_of_scores_with_log_alpha_added(alpha: float) -> None:
    scores = 3 * torch.randn(9, 4, BATCH.input_ids.shape[1], generator=torch.Generator().manual_seed(0))
    inside, row = BATCH.spans["subject"][:, None], torch.softmax(scores, dim=-1)
    found = boost_attention(alpha)(BATCH)(0, row)
    # one division more than a softmax, of numbers that float32 keeps to 6e-8
    torch.testing.assert_close(found, torch.softmax(scores + math.log(alpha) * inside, dim=-1), atol=1e-6, rtol=0)
    named = boost_attention(alpha, heads={0: [1, 3]})(BATCH)
    assert torch.equal(named(0, row)[:, [0, 2]], row[:, [0, 2]])
    torch.testing.assert_close(named(0, row)[:, [1, 3]], found[:, [1, 3]])
    assert torch.equal(named(1, row), row)


@pytest.mark.parametrize("alpha", [1e-30, 1e-8, 1e-4, 1e30])
def test_a_token_that_holds_all_attention_keeps_it_however_its_subject_is_boosted(alpha: float) -> None:
    # softmax rounds what a head hardly attends to down to 0, so that nothing is left to take over
    row = BATCH.spans["subject"][:, None].expand(9, 4, -1).float()
    row = row * (row.cumsum(-1) == 1)
    torch.testing.assert_close(boost_attention(alpha)(BATCH)(0, row), row, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", EDITABLE)
def test_gradients_through_a_boosted_model_are_those_of_eager_attention(family: str) -> None:
    model, oracle, one = hooked(family), eager(uneven(family)), ENCODINGS[1]
    logits_of(model, boost_attention(ALPHA), pad([one])).square().mean().backward()
    with boosted_mask(oracle, one):
        oracle(torch.tensor([one.ids]), use_cache=False).logits[0, -1].square().mean().backward()
    compared = 0
    for (name, parameter), expected in zip(model.model.named_parameters(), oracle.parameters(), strict=True):
        if expected.grad is None or parameter.grad is None:
            assert not any(p.grad is not None and p.grad.any() for p in (parameter, expected)), name
            continue
        scale = max(1.0, float(expected.grad.abs().max()))  # 1e-5 of the largest entry: float32 through two layers
        torch.testing.assert_close(parameter.grad, expected.grad, atol=1e-5 * scale, rtol=1e-5)
        compared += bool(expected.grad.any())
    assert compared >= 10


def places(group: list[Encoding], seed: int) -> dict[str, list[int]]:
    """The random tokens of each prompt, counted from its own first token."""
    chosen, found = random_tokens(seed)(pad(group)), {}
    for row, one in zip(chosen, group, strict=True):
        found[one.prompt.prompt_id] = (row.nonzero().flatten() - (len(row) - len(one.ids))).tolist()
    return found


def test_random_tokens_are_as_many_as_the_subjects_and_neither_it_nor_the_ends() -> None:
    neighbours = 0
    for one, chosen in zip(ENCODINGS, places(ENCODINGS, 3).values(), strict=True):
        free = set(range(1, len(one.ids) - 1)) - set(one.spans["subject"])
        assert set(chosen) <= free
        assert len(chosen) == min(len(one.spans["subject"]), len(free))
        neighbours += max(chosen) - min(chosen) == len(chosen) - 1
    assert neighbours >= 6  # the longest subjects leave no gap of their length


def test_random_tokens_depend_on_the_seed_and_the_prompt_alone() -> None:
    expected = places(ENCODINGS, 0)
    assert expected == places(ENCODINGS[::-1], 0) == places(ENCODINGS[:4], 0) | places(ENCODINGS[4:], 0)
    assert expected != places(ENCODINGS, 1)


@pytest.mark.parametrize("heads", [None, [2], [0, 3]])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_transplanted_rows_equal_a_pattern_replaced_in_transformer_lens(family: str, heads: list[int] | None) -> None:
    model, source = hooked(family), hooked(family, seed=5)
    bridge, donor = bridge_of(model).bridge, eager(source.model)
    with torch.no_grad():
        found = logits_of(model, patch_rows(source, {0: heads}))
        for i, one in enumerate(ENCODINGS):
            ids = torch.tensor([one.ids])
            maps = donor(ids, output_attentions=True, use_cache=False).attentions[0]

            def replaced(pattern: Tensor, hook: object, maps: Tensor = maps) -> Tensor:
                pattern = pattern.clone()
                for head in heads or range(4):
                    pattern[0, head, -1] = maps[0, head, -1]
                return pattern

            expected = bridge.run_with_hooks(ids, fwd_hooks=[("blocks.0.attn.hook_pattern", replaced)])[0, -1]
            torch.testing.assert_close(found[i], expected, atol=TOLERANCE, rtol=TOLERANCE)


def by_hand(model: PreTrainedModel, one: Encoding, steps: int) -> list[int]:
    """Greedy ids with a cache, the mask boosted while the prompt passes and left alone afterwards."""
    with torch.no_grad(), boosted_mask(model, one):
        output = model(torch.tensor([one.ids]), use_cache=True)
    found = [int(output.logits[0, -1].argmax())]
    while len(found) < steps and found[-1] != 1:
        with torch.no_grad():
            output = model(torch.tensor([found[-1:]]), past_key_values=output.past_key_values, use_cache=True)
        found.append(int(output.logits[0, -1].argmax()))
    return [token for token in found if token != 1]


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma2", "gpt_oss"])
def test_generation_edits_the_prompt_alone_and_leaves_the_model_as_it_was(family: str) -> None:
    model, oracle, tokenizer = hooked(family), eager(uneven(family)), tiny_tokenizer()
    settings = {"max_new_tokens": 5, "batch_size": 4}
    plain = generate(model, tiny_prompts(), **settings)
    expected = [tokenizer.decode(by_hand(oracle, one, 5), skip_special_tokens=True) for one in ENCODINGS]
    assert expected != plain
    assert generate(model, tiny_prompts(), **settings, edit=boost_attention(ALPHA)) == expected
    assert generate(model, tiny_prompts(), **settings, edit=patch_rows(model)) == plain
    assert generate(model, tiny_prompts(), **settings) == plain


def test_an_exception_inside_leaves_the_model_unedited() -> None:
    model = hooked("llama")

    def broken(layer: int, row: Tensor) -> Tensor:
        raise RuntimeError("stop")

    with torch.no_grad():
        plain = forward_rows(model.model, BATCH, model.kernel)[1]
        with pytest.raises(RuntimeError, match="stop"):
            logits_of(model, lambda _: broken)
        with pytest.raises(RuntimeError, match="stop"):
            generate(model, tiny_prompts(), max_new_tokens=2, batch_size=9, edit=lambda _: broken)
        assert torch.equal(forward_rows(model.model, BATCH, model.kernel)[1], plain)


def test_a_model_with_an_adapter_is_edited_as_the_merged_one_is(llama_folder: Path, lora_folder: Path) -> None:
    model = load_model(llama_folder, tokenizer=tiny_tokenizer(), adapter=lora_folder, device="cpu")
    merged = load_model(copy.deepcopy(model.model).merge_and_unload(), tokenizer=tiny_tokenizer())
    with torch.no_grad():
        expected = logits_of(merged, boost_attention(ALPHA))
        assert (expected - logits_of(merged, boost_attention(1.0))).abs().max() > 0.1
        # merging rounds the sums of two float32 matrices, whose products then differ by some 1e-6 of 10
        torch.testing.assert_close(logits_of(model, boost_attention(ALPHA)), expected, atol=5e-5, rtol=1e-5)


def test_an_adapter_that_calls_its_model_past_hooks_is_edited_as_the_merged_one_is() -> None:
    """AdaLoRA calls the base's `forward` itself; the tolerance is that of LoRA above."""
    config = AdaLoraConfig(task_type="CAUSAL_LM", init_r=4, target_r=2, total_step=9, target_modules=["q_proj"])
    adapted = get_peft_model(tiny_model("llama"), config).eval()
    torch.manual_seed(0)
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data += 0.3 * torch.randn_like(parameter)
    model = load_model(adapted, tokenizer=tiny_tokenizer())
    merged = load_model(copy.deepcopy(adapted).merge_and_unload(), tokenizer=tiny_tokenizer())
    assert model.read_only is None
    with torch.no_grad():
        expected = logits_of(merged, boost_attention(ALPHA))
        assert (expected - logits_of(merged, boost_attention(1.0))).abs().max() > 0.1
        torch.testing.assert_close(logits_of(model, boost_attention(ALPHA)), expected, atol=5e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is outside")
@pytest.mark.parametrize("family", OUTSIDE)
def test_families_outside_the_attention_interface_are_refused(family: str) -> None:
    with pytest.raises(ModelError, match="outside transformers' attention interface: its rows can be read, not edited"):
        generate(hooked(family), tiny_prompts(), max_new_tokens=1, batch_size=9, edit=boost_attention(2.0))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_implementation_set_later_is_refused(llama_folder: Path, implementation: str) -> None:
    model = load_model(llama_folder)
    model.model.set_attn_implementation(implementation)
    for edit in (boost_attention(4.0), patch_rows(load_model(llama_folder))):
        with pytest.raises(ModelError, match=f"runs attention implementation '{implementation}', set after"):
            logits_of(model, edit)
    with pytest.raises(ModelError, match=f"runs attention implementation '{implementation}', set after"):
        model.rows(BATCH)
    model.model.set_attn_implementation("attnbalance_row")
    assert model.rows(BATCH).isfinite().all()


@pytest.mark.parametrize("family", OUTSIDE)
def test_another_implementation_in_the_configuration_of_a_family_read_through_eager_is_refused(family: str) -> None:
    model = hooked(family)
    model.model.config._attn_implementation = "sdpa"
    with pytest.raises(
        ModelError, match=r"runs attention implementation 'sdpa', .* set_attn_implementation\('eager'\)"
    ):
        model.rows(BATCH)


def test_edits_that_mean_nothing_are_named() -> None:
    for alpha in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(DataError, match=rf"alpha must be > 0 and at most 1e\+30, got {alpha}"):
            boost_attention(alpha)
    with pytest.raises(DataError, match="a span 'answer'; there are subject"):
        tokens_of("answer")(BATCH)
    sources = {"num_hidden_layers": 1}, {"num_attention_heads": 2}, {"vocab_size": 50}
    for changes, message in zip(sources, ("no layer 1 of 4", "no layer 0 of 4", "outside the 50 tokens"), strict=True):
        with pytest.raises(ModelError, match=message):
            logits_of(hooked("llama"), patch_rows(hooked("llama", **changes)))


def test_layers_and_heads_that_a_model_lacks_are_refused_by_every_edit() -> None:
    model, asked = hooked("llama"), {"max_new_tokens": 1, "batch_size": 9}
    for heads, message in (
        ({2: [0]}, "no attention layer 2; it has 0, 1"),
        ({-1: None}, "no attention layer -1; it has 0, 1"),
        ({0: [4]}, "layer 0 has heads 0 to 3, got 4"),
        ({0: [-1]}, "layer 0 has heads 0 to 3, got -1"),
    ):
        for make in (lambda heads: boost_attention(4.0, heads=heads), lambda heads: patch_rows(model, heads)):
            with pytest.raises(DataError, match=message):
                generate(model, tiny_prompts(), **asked, edit=make(heads))


@pytest.mark.parametrize("heads", [3, [1.0], "1"])
def test_heads_that_are_no_numbers_are_refused(heads: Any) -> None:
    edits = (lambda heads: boost_attention(4.0, heads=heads), lambda heads: patch_rows(hooked("llama"), heads))
    for make in edits:
        with pytest.raises(ArgumentError, match="heads must be a mapping from Integral to a collection of Integral or"):
            make({0: heads})


def test_rows_of_a_deeper_source_are_taken_only_by_layers_that_are_named() -> None:
    model, source, asked = hooked("llama"), hooked("llama", num_hidden_layers=4), {"max_new_tokens": 1, "batch_size": 9}
    with pytest.raises(
        ModelError, match="expected a model of 4 attention layers, as the rows' source has, got .* of 2"
    ):
        generate(model, tiny_prompts(), **asked, edit=patch_rows(source))
    assert generate(model, tiny_prompts(), **asked, edit=patch_rows(source, {1: None}))


def test_an_edit_within_an_edit_gets_what_the_outer_one_made() -> None:
    model = hooked("llama")
    with edited(model, boost_attention(50.0)(BATCH)):
        both = logits_of(model, boost_attention(2.0))
    once = logits_of(model, boost_attention(100.0))
    # a boost by 50 and then by 2 is one by 100 in each row: w r, over its sum with the rest
    torch.testing.assert_close(both, once, atol=TOLERANCE, rtol=1e-4)
    assert not torch.allclose(both, logits_of(model, boost_attention(2.0)), atol=0.1)


def test_rows_of_a_source_with_another_tokenizer_are_refused() -> None:
    model, asked = hooked("llama"), {"max_new_tokens": 1, "batch_size": 9}
    for kind, refused in (("bos", True), ("no_pad", False)):  # one begins texts otherwise, one only lacks a pad token
        source = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer(kind))
        if refused:
            with pytest.raises(DataError, match=r"must have one tokenizer to exchange rows, got other ids for 'Quest"):
                generate(model, tiny_prompts(), **asked, edit=patch_rows(source))
        else:
            assert generate(model, tiny_prompts(), **asked, edit=patch_rows(source))


def test_a_layer_without_named_heads_is_edited_whole() -> None:
    row = torch.softmax(torch.randn(9, 4, BATCH.input_ids.shape[1], generator=torch.Generator().manual_seed(0)), -1)
    whole, named = (boost_attention(ALPHA, heads={0: heads})(BATCH) for heads in (None, range(4)))
    assert torch.equal(whole(0, row), boost_attention(ALPHA)(BATCH)(0, row))
    assert torch.equal(whole(0, row), named(0, row))
