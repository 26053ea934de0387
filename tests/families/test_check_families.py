"""The check of families: what is right passes, and what is wrong does not."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
import transformers
from transformers import DynamicCache

from attnbalance.data.batches import PromptBatch
from attnbalance.errors import ModelError
from attnbalance.families import check_families as module
from attnbalance.families.check_families import check_families, check_family
from attnbalance.families.tiny_models import build
from attnbalance.models.hooked import HookedModel

SAMPLE = {
    ("llama", False): "exact",
    ("gemma3_text", True): "exact",  # a window in every other layer
    ("phi3", True): "exact",  # another rotary embedding for long prompts
    ("gpt_oss", True): "exact",  # sinks
    ("mixtral", False): "exact",
    ("bloom", False): "fallback",
    ("deepseek_v32", True): "exact",  # keys chosen by score
    ("axk2", True): "exact",
    ("hy_v4", True): "exact",
    ("bailing_hybrid", False): "exact",  # layers that report no number
    ("falcon", True): "refused",  # its eager attention adds ALiBi twice
    ("mamba", False): "refused",
}


@pytest.mark.parametrize(("family", "crossed"), SAMPLE)
def test_a_sample_of_families_is_read_right_or_refused(family: str, crossed: bool) -> None:
    outcome = check_family(family, crossed)
    assert outcome.kind == SAMPLE[family, crossed], outcome
    assert outcome.kind == "refused" or float(outcome.detail) < 1e-4


@pytest.mark.parametrize(("family", "crossed"), [("llama", False), ("gemma3_text", True), ("bloom", False)])
def test_a_sample_in_bfloat16_is_as_near_to_float64_as_eager_attention_is(family: str, crossed: bool) -> None:
    outcome = check_family(family, crossed, "bfloat16")
    assert outcome.kind == SAMPLE[family, crossed], outcome
    assert 1e-4 < float(outcome.detail) < 0.5  # it is not float32 that was read


def test_rows_of_another_prompt_are_wrong_in_bfloat16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = HookedModel.rows
    monkeypatch.setattr(HookedModel, "rows", lambda self, *given: rows(self, *given).flip(-1))
    assert check_family("llama", False, "bfloat16").kind == "WRONG"


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ModelError, match="dtype must be float32 or bfloat16, got 'float16'"):
        check_families(["llama"], "float16")


def test_the_reference_is_what_transformers_gives_by_itself() -> None:
    """A copy of the same weights in a model that was made with eager attention, in float64; sums as the reference's."""
    model = build("gemma3_text", near=True).double()
    eager = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").double().eval()
    eager.load_state_dict(model.state_dict())
    encodings = module.encode(module._prompts(), module._word_tokenizer())
    with torch.no_grad():
        expected = module._reference(model, encodings)
        for i, encoding in enumerate(encodings):
            output = eager(torch.tensor([encoding.ids]), output_attentions=True)
            rows = torch.stack([layer[0, :, -1] for layer in output.attentions])
            torch.testing.assert_close(expected[i][0].double(), rows.double(), atol=1e-6, rtol=0)
            torch.testing.assert_close(expected[i][1].double(), output.logits[0, -1].double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fault", [1.01, float("nan")])
def test_rows_that_are_a_hundredth_off_are_wrong(fault: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = HookedModel.rows

    def off(self: HookedModel, batch: PromptBatch, cache: DynamicCache | None = None) -> torch.Tensor:
        return rows(self, batch, cache) * (fault if len(batch.prompts) > 1 else 1.0)

    monkeypatch.setattr(HookedModel, "rows", off)
    outcome = check_family("llama", False)
    assert outcome.kind == "WRONG"
    assert "padded left" in outcome.detail
    assert "alone" not in outcome.detail


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_off_after_a_shared_prefix_alone_are_wrong(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = HookedModel.rows

    def off(self: HookedModel, batch: PromptBatch, cache: DynamicCache | None = None) -> torch.Tensor:
        return rows(self, batch, cache).flip(-1) if cache is not None else rows(self, batch)

    monkeypatch.setattr(HookedModel, "rows", off)
    outcome = check_family("llama", False, dtype)
    assert outcome.kind == "WRONG"
    assert outcome.detail.startswith("sdpa: after a shared prefix")


def test_a_family_whose_code_fails_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, near: bool) -> None:
        raise AttributeError("no such field")

    monkeypatch.setattr(module, "build", fails)
    assert check_family("llama", False) == module.FamilyOutcome(
        "llama", False, "not built", "AttributeError: no such field"
    )


def test_an_error_that_is_not_ours_is_wrong_and_the_others_are_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr(module, "load_model", fails)
        outcomes = list(check_families(["llama", "gpt2"]))
    assert [(outcome.kind, outcome.detail) for outcome in outcomes] == [("WRONG", "RuntimeError: out of luck")] * 2
    monkeypatch.setattr(module, "_best_reference", fails)
    assert check_family("llama", False).kind == "not built"


def test_the_callers_random_numbers_stay_as_they_are() -> None:
    before = torch.get_rng_state()
    build("llama", near=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_family_with_a_length_is_checked_within_and_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_family", lambda name, crossed, dtype: (name, crossed))
    assert list(check_families(["llama", "mistral"])) == [("llama", False), ("mistral", False), ("mistral", True)]
    everything = list(check_families())
    assert len(everything) > 150
    assert len(set(everything)) == len(everything)


def test_an_unknown_name_is_refused_with_those_like_it() -> None:
    with pytest.raises(ModelError, match=r"'llamma' is no model type .* did you mean .*llama"):
        check_families(["llamma"])


def test_warnings_and_notices_are_as_before_the_check() -> None:
    before = logging.root.manager.disable
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_family("bloom", False)
    assert not caught
    assert logging.root.manager.disable == before
