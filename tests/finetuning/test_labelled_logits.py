"""Logits of labelled tokens alone."""

import math

import pytest
import torch
from tiny import FACTS as OTHERS
from tiny import FAMILIES, GROUPED, POSITIONS, count_passes, eager, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, MixtralConfig, Phi3Config

from attnbalance.data.prompts import make_prompts
from attnbalance.errors import BadRowsError, ModelError
from attnbalance.families.tiny_models import VOCABULARY, build
from attnbalance.finetuning.examples import IGNORED, Example, collate, examples_of, make_examples
from attnbalance.finetuning.labelled_logits import answer_logits, labelled_logits, only_labelled
from attnbalance.models.hooked import hook


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_answer_logits_are_those_of_plain_transformers_alone(family):
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    plain, hooked = eager(model), hook(model, tokenizer, family)
    model.train()
    examples = make_examples(OTHERS, tokenizer)
    for size in (1, 4, 20):
        batches = list(answer_logits(hooked, examples, size))
        assert [len(batch) for batch in batches] == [size] * (9 // size) + [9 % size] * (9 % size > 0)
        assert sorted(i for batch in batches for i, _ in batch) == list(range(9))
        for i, logits in [pair for batch in batches for pair in batch]:
            example = examples[i]
            with torch.no_grad():
                expected = plain(input_ids=torch.tensor([example.ids]), use_cache=False).logits[0, example.query : -1]
            # logits of some 1 to 10 in float32, in another order
            torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
            assert not logits.requires_grad
    assert model.training


@pytest.mark.filterwarnings("ignore:.*is outside")
@pytest.mark.parametrize("family", FAMILIES)
def test_answer_logits_after_a_shared_header_are_those_of_plain_transformers_alone(family):
    """Prompts of several lengths after one of two headers, and one without; a padded batch goes on from the cache."""
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    headers = ("Oslo is a city, Rome is a city and Paris is a city. ", "Chess is a game, golf is a game, so is polo. ")
    prompts = [prompt for header in headers for prompt in make_prompts(OTHERS, f"{header}{{subject}} is a")]
    examples = examples_of([*prompts, *make_prompts(OTHERS[:1], "{subject} is a")], tokenizer)
    assert len({len(example.ids) for example in examples}) > 4
    plain, hooked = eager(model), hook(model, tokenizer, family)
    shared = hooked.shares_prefixes
    passes = count_passes(model)
    for size in (4, 100):
        given = dict(pair for batch in answer_logits(hooked, examples, size) for pair in batch)
        assert sorted(given) == list(range(len(examples)))
        for i, example in enumerate(examples):
            with torch.no_grad():
                expected = plain(input_ids=torch.tensor([example.ids]), use_cache=False).logits[0, example.query : -1]
            # logits of some 1 to 10 in float32, in another order
            torch.testing.assert_close(given[i], expected, atol=5e-5, rtol=1e-5)
    assert shared or family not in ("llama", "gpt2")
    if shared:
        assert sum(shape.numel() for shape in passes) < 2 * 0.7 * sum(
            len(example.ids) for example in examples
        )  # over both sizes, with padding


def test_a_model_that_returns_router_logits_is_asked_after_a_shared_header_too():
    """Its balancing loss would need router logits as long as the mask, which covers the header as well."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_config(MixtralConfig(**GROUPED, **experts)).eval(), tiny_tokenizer()
    header = "Oslo is a city, Rome is a city and Paris is a city. "
    examples = examples_of(make_prompts(OTHERS, f"{header}{{subject}} is a"), tokenizer)
    given = dict(pair for batch in answer_logits(hook(model, tokenizer, "mixtral"), examples, 4) for pair in batch)
    plain = eager(model)
    for i, example in enumerate(examples):
        with torch.no_grad():
            expected = plain(input_ids=torch.tensor([example.ids]), use_cache=False).logits[0, example.query : -1]
        torch.testing.assert_close(given[i], expected, atol=5e-5, rtol=1e-5)  # as above


def test_answer_logits_do_not_depend_on_company_in_a_family_that_attends_otherwise_from_a_length_on():
    rotation = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rotation |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = Phi3Config(**GROUPED, **special, rope_parameters=rotation, original_max_position_embeddings=16)
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_config(config).eval(), tiny_tokenizer()
    plain, hooked, examples = eager(model), hook(model, tokenizer, "phi3"), make_examples(OTHERS, tokenizer)
    lengths = [len(example.ids) for example in examples]
    assert min(lengths) < 16 < max(lengths)  # both sides of the threshold, in what would be one batch
    batches = list(answer_logits(hooked, examples, len(examples)))
    assert sorted(i for batch in batches for i, _ in batch) == list(range(len(examples)))
    for i, logits in [pair for batch in batches for pair in batch]:
        with torch.no_grad():
            expected = plain(input_ids=torch.tensor([examples[i].ids]), use_cache=False).logits
        # float32 sums in another order: 1e-5 of logits of 1 to 10; another rotation shows as 1e-2 to 1
        torch.testing.assert_close(logits, expected[0, examples[i].query : -1], atol=1e-4, rtol=1e-4)


def test_logits_that_are_no_numbers_are_refused():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    hooked, examples = hook(model, tokenizer, "tiny"), make_examples(OTHERS, tokenizer, "{subject} is a")
    head = model.get_output_embeddings()
    assert head is not None
    with torch.no_grad():
        head.weight[0] = math.nan  # after the check that hooking makes
    with pytest.raises(ModelError, match=r'tiny gives NaN logits for answers; try `dtype="float32"`'):
        list(answer_logits(hooked, examples, 4))


def test_examples_longer_than_the_models_positions_are_shown():
    hooked = hook(tiny_model("gpt2"), tiny_tokenizer(), "gpt2")
    fit, long = (Example((5,) * n, (IGNORED,) * (n - 1) + (5,)) for n in (POSITIONS, POSITIONS + 1))
    assert len(next(answer_logits(hooked, [fit], 1))[0][1]) == 1
    with pytest.raises(BadRowsError, match="1 of 2 examples are longer than the model's 96 positions:\n  row 2: 97"):
        next(answer_logits(hooked, [fit, long], 1))


def test_answers_that_reach_a_length_threshold_behind_shorter_prompts_are_read_whole():
    """Keys of a shared prefix would be turned by the short factor, and those after the threshold by the long one."""
    rotation = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 56}
    rotation |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = Phi3Config(**GROUPED, **special, rope_parameters=rotation, original_max_position_embeddings=56)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    plain, hooked = eager(model), hook(model, tiny_tokenizer(), "phi3")
    header = tuple(range(10, 50))
    examples = [Example((*header, *range(60 + i, 90 + i)), (*[IGNORED] * 45, *range(65 + i, 90 + i))) for i in range(6)]
    assert hooked.alike_from is not None
    assert 45 < hooked.alike_from < 70  # between the prompts and the whole examples
    for i, logits in [pair for batch in answer_logits(hooked, examples, 4) for pair in batch]:
        with torch.no_grad():
            expected = plain(input_ids=torch.tensor([examples[i].ids]), use_cache=False).logits[0, 44:-1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)  # as above


def test_only_positions_before_a_label_of_some_example_are_kept() -> None:
    labels = torch.tensor([[7, IGNORED, 5, 6, IGNORED], [IGNORED, IGNORED, IGNORED, 6, 7]])
    kept = only_labelled(tiny_model("llama"), labels)
    assert {name: positions.tolist() for name, positions in kept.items()} == {"logits_to_keep": [1, 2, 3]}
    assert only_labelled(tiny_model("llama"), torch.full((2, 3), IGNORED))["logits_to_keep"].tolist() == []


def test_a_family_that_takes_no_positions_gives_all_logits() -> None:
    model, labels = tiny_model("llama"), torch.tensor([[IGNORED, 5]])

    def old_forward(input_ids: torch.Tensor, logits_to_keep: int = 0) -> None:
        """A pass as that of families which take the number of last positions alone."""

    model.forward = old_forward
    assert only_labelled(model, labels) == {}


def test_a_model_that_is_spread_over_devices_gives_all_logits() -> None:
    model, labels = tiny_model("llama"), torch.tensor([[IGNORED, 5]])
    for devices, spread in (
        ({"": 0}, False),
        ({"model": 0, "lm_head": 1}, True),
        ({"model": "cpu", "lm_head": 0}, True),
    ):
        model.hf_device_map = devices
        assert (only_labelled(model, labels) == {}) == spread


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_labels_are_those_of_a_whole_pass(family: str) -> None:
    model, tokenizer = tiny_model(family).eval(), tiny_tokenizer()
    batch = collate(make_examples(OTHERS, tokenizer))
    inputs, labels = {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["labels"]
    with torch.no_grad():
        whole = model(**inputs, use_cache=False).logits
        few = model(**inputs, use_cache=False, **only_labelled(model, labels)).logits
    assert few.shape[1] < whole.shape[1]
    expected = [(whole[i, p], labels[i, p + 1], i) for i, p in (labels[:, 1:] != IGNORED).nonzero().tolist()]
    for logits in (whole, few):
        chosen, tokens, example = labelled_logits(logits, labels)
        assert example.tolist() == [i for _, _, i in expected]
        assert tokens.tolist() == [int(label) for _, label, _ in expected]
        # the same products of float32, of 1 to 10, by a smaller matrix
        torch.testing.assert_close(chosen, torch.stack([own for own, _, _ in expected]), atol=1e-5, rtol=1e-5)


def test_logits_of_any_other_number_of_positions_are_refused() -> None:
    labels = torch.tensor([[IGNORED, IGNORED, 5, 6]])
    with pytest.raises(ModelError, match="logits at all 4 positions, or at the 2 that predict labels, got 3"):
        labelled_logits(torch.zeros(1, 3, 9), labels)


@pytest.mark.parametrize("family", ["cohere2", "deepseek_v3", "falcon_h1", "gemma3_text", "granite", "minicpm3", "mpt"])
def test_losses_and_gradients_are_those_of_all_logits_in_families_that_scale_cap_or_tie_them(family: str) -> None:
    model, generator = build(family, near=False).eval(), torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCABULARY, (3, 24), generator=generator)
    mask, labels = torch.ones_like(ids), torch.full_like(ids, IGNORED)
    mask[1, 18:] = mask[2, 20:] = 0
    for row, labelled in ((0, slice(20, 24)), (1, slice(5, 6)), (1, slice(15, 18)), (2, slice(19, 20))):
        labels[row, labelled] = ids[row, labelled]
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    parameters = list(model.parameters())

    def loss_and_gradients(logits: torch.Tensor) -> list[torch.Tensor]:
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return [loss, *torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)]

    expected = loss_and_gradients(model(**inputs).logits)
    kept = only_labelled(model, labels)
    assert kept["logits_to_keep"].tolist() == [4, 14, 15, 16, 18, 19, 20, 21, 22]
    chosen, tokens, _ = labelled_logits(model(**inputs, **kept).logits, labels)
    loss = torch.nn.functional.cross_entropy(chosen, tokens)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    for ours, whole in zip([loss, *gradients], expected, strict=True):
        torch.testing.assert_close(ours, whole, atol=1e-5, rtol=1e-4)  # float32 sums in another order
