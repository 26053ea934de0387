"""Greedy answers against a loop that takes the argmax of a whole forward pass, one token at a time."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny import INTERFACE, OUTSIDE, SINKS, VOCABULARY, argmax_loop, eager, tiny_model, tiny_prompts, tiny_tokenizer
from transformers import DynamicCache, GenerationConfig

from attnbalance import Fact, load_model
from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import encode
from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.models.generate import generate
from attnbalance.models.hooked import hook

WARNING = pytest.mark.filterwarnings("ignore:.*is outside")


@WARNING
@pytest.mark.parametrize("family", [*INTERFACE, *SINKS, *OUTSIDE])
def test_answers_are_those_of_the_argmax_loop(family: str) -> None:
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    expected = [argmax_loop(eager(model), one.ids, 6, 1) for one in encode(tiny_prompts(), tokenizer)]
    found = generate(load_model(model, tokenizer=tokenizer), tiny_prompts(), max_new_tokens=6, batch_size=4)
    assert found == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    assert len(set(found)) > 2  # models that say one thing to everything would test little


@pytest.mark.parametrize("batch_size", [1, 2, 9])
def test_batch_size_and_order_change_no_answer(batch_size: int) -> None:
    hooked = load_model(tiny_model("mistral"), tokenizer=tiny_tokenizer())
    expected = generate(hooked, tiny_prompts(), max_new_tokens=5, batch_size=3)
    found = generate(hooked, tiny_prompts()[::-1], max_new_tokens=5, batch_size=batch_size)
    assert found[::-1] == expected


def test_the_models_own_generation_settings_are_set_aside_and_given_back() -> None:
    hooked = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    expected = generate(hooked, tiny_prompts(), max_new_tokens=6, batch_size=9)
    own = GenerationConfig(
        do_sample=True, temperature=5.0, repetition_penalty=9.0, num_beams=2, no_repeat_ngram_size=1, max_length=3
    )
    hooked.model.generation_config = own  # pyright: ignore[reportAttributeAccessIssue]
    assert generate(hooked, tiny_prompts(), max_new_tokens=6, batch_size=9) == expected
    assert hooked.model.generation_config is own
    assert (own.max_length, own.do_sample) == (3, True)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", ["plain", "no_special"])
def test_an_answer_ends_before_the_models_end_of_sequence(kind: str, several: bool) -> None:
    # the stop is a token that the model says in the middle of one answer; without a pad token 0 fills what is behind it
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(kind)
    oracle = eager(model)
    encodings = encode(tiny_prompts(), tokenizer)
    stop = argmax_loop(oracle, encodings[0].ids, 4, None)[2]
    model.generation_config.eos_token_id = [stop, 1] if several else stop
    expected = [argmax_loop(oracle, one.ids, 6, stop) for one in encodings]
    assert len(expected[0]) < 3
    assert max(map(len, expected)) == 6
    found = generate(load_model(model, tokenizer=tokenizer), tiny_prompts(), max_new_tokens=6, batch_size=9)
    assert found == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]


def test_an_answer_ends_before_the_tokenizers_end_of_sequence_too() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    oracle = eager(model)
    encodings = encode(tiny_prompts(), tokenizer)
    said = argmax_loop(oracle, encodings[0].ids, 4, None)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(said[2])
    model.generation_config.eos_token_id = VOCABULARY - 1
    expected = [argmax_loop(oracle, one.ids, 6, said[2]) for one in encodings]
    assert len(expected[0]) < 3
    found = generate(load_model(model, tokenizer=tokenizer), tiny_prompts(), max_new_tokens=6, batch_size=9)
    assert found == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]


def test_a_pad_token_that_the_model_has_no_embedding_for_does_no_harm() -> None:
    tokenizer = tiny_tokenizer("no_pad")
    model = tiny_model("gpt2")
    expected = generate(load_model(model, tokenizer=tokenizer), tiny_prompts(), max_new_tokens=3, batch_size=9)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    model.resize_token_embeddings(tokenizer.pad_token_id)
    hooked = load_model(model, tokenizer=tokenizer)
    assert hooked.pad_id == tokenizer.eos_token_id
    assert generate(hooked, tiny_prompts(), max_new_tokens=3, batch_size=9) == expected


def test_dropout_of_a_model_in_training_does_not_reach_its_answers() -> None:
    calm = load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    training = tiny_model("gpt2").train()
    hooked = load_model(training, tokenizer=tiny_tokenizer())
    assert generate(hooked, tiny_prompts(), max_new_tokens=4, batch_size=9) == generate(
        calm, tiny_prompts(), max_new_tokens=4, batch_size=9
    )
    assert training.training


def test_a_prompt_that_leaves_no_room_for_the_answer_is_refused() -> None:
    hooked = load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    longest = max(len(one.ids) for one in encode(tiny_prompts(), hooked.tokenizer))
    room = (hooked.max_positions or 0) - longest
    assert len(generate(hooked, tiny_prompts(), max_new_tokens=room, batch_size=9)) == 9
    with pytest.raises(BadRowsError, match=rf"longer than the model's 96 positions(.|\n)*{room + 1} for the answer"):
        generate(hooked, tiny_prompts(), max_new_tokens=room + 1, batch_size=9)


def test_nan_logits_stop_the_answers() -> None:
    hooked = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    with torch.no_grad():
        hooked.model.lm_head.weight[3] = torch.nan  # pyright: ignore
    with pytest.raises(
        ModelError, match='LlamaForCausalLM gives NaN or infinite logits while answering; try `dtype="float32"`'
    ):
        generate(hooked, tiny_prompts(), max_new_tokens=2, batch_size=4)


@pytest.mark.parametrize(("count", "tokens", "size"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_nothing_to_ask_or_to_say_is_refused(count: int, tokens: int, size: int) -> None:
    hooked = load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    with pytest.raises(DataError, match="at least"):
        generate(hooked, tiny_prompts()[:count], max_new_tokens=tokens, batch_size=size)


def test_a_trained_model_answers_as_the_argmax_loop(stories) -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(stories, attn_implementation="eager").eval()
    hooked = load_model(stories)
    prompts = make_prompts([Fact(name, "r", ("a",)) for name in ("Lily", "Tom", "the big dog")], "One day, {subject}")
    found = generate(hooked, prompts, max_new_tokens=12, batch_size=3)
    for one, answer in zip(encode(prompts, hooked.tokenizer), found, strict=True):
        assert answer == hooked.tokenizer.decode(argmax_loop(oracle, one.ids, 12, 2), skip_special_tokens=True)


def test_an_answer_of_one_line_is_the_first_line_of_the_whole_answer() -> None:
    hooked = load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    [newline] = hooked.tokenizer("\n").input_ids

    def favour_newlines(module: torch.nn.Module, inputs: object, logits: torch.Tensor) -> torch.Tensor:
        return logits + 4 * (torch.arange(logits.shape[-1]) == newline)

    hooked.model.get_output_embeddings().register_forward_hook(favour_newlines)  # pyright: ignore[reportCallIssue]
    whole = generate(hooked, tiny_prompts(), max_new_tokens=20, batch_size=9)
    lines = generate(hooked, tiny_prompts(), max_new_tokens=20, batch_size=9, first_line=True)
    assert sum("\n" in answer.strip() for answer in whole) > 0
    assert lines == [answer.partition("\n")[0] for answer in whole]


def test_a_token_that_also_ends_the_line_keeps_its_letters() -> None:
    """Vocabularies such as Llama 3's hold a point and the line breaks after it as one token, which ends "D.C."."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([".\n\n"])
    merged = tokenizer.convert_tokens_to_ids(".\n\n")
    model = tiny_model("gpt2")
    model.resize_token_embeddings(len(tokenizer))
    hooked = load_model(model, tokenizer=tokenizer)
    assert merged in hooked.line_breaks

    def favour_the_merged(module: torch.nn.Module, inputs: object, logits: torch.Tensor) -> torch.Tensor:
        return logits + 9 * (torch.arange(logits.shape[-1]) == merged)

    model.get_output_embeddings().register_forward_hook(favour_the_merged)  # pyright: ignore[reportOptionalMemberAccess]
    whole = generate(hooked, tiny_prompts(), max_new_tokens=8, batch_size=9)
    lines = generate(hooked, tiny_prompts(), max_new_tokens=8, batch_size=9, first_line=True)
    assert any(".\n" in answer for answer in whole)
    assert lines == [answer.partition("\n")[0] for answer in whole]
    assert any(line.endswith(".") for line in lines)


def test_families_that_answer_padded_prompts_otherwise_are_asked_without_padding() -> None:
    config = transformers.ReformerConfig(
        vocab_size=VOCABULARY, hidden_size=32, attention_head_size=16, num_attention_heads=2, feed_forward_size=64,
        attn_layers=["local", "local"], is_decoder=True, axial_pos_embds=False, max_position_embeddings=128,
        local_attn_chunk_length=64, initializer_range=0.3, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    model = hook(transformers.ReformerModelWithLMHead(config).eval(), tiny_tokenizer(), "reformer")
    prompts = tiny_prompts()
    alone = [generate(model, [prompt], max_new_tokens=6, batch_size=1)[0] for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=6, batch_size=8) == alone
    assert len(set(alone)) > 1


def test_an_edit_and_prompts_that_were_read_before_exclude_each_other() -> None:
    model = load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())
    both = {"edit": lambda batch: lambda layer, row: row, "read": lambda indices, batch: DynamicCache()}
    with pytest.raises(DataError, match="expected `edit` or `read`, got both"):
        generate(model, tiny_prompts(), max_new_tokens=1, batch_size=2, **both)
