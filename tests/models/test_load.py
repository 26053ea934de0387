"""Loading: what is accepted, and what each refusal says."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from tiny import FACTS, GPT2, SIZES, tiny_lora, tiny_model, tiny_prompts, tiny_tokenizer

from attnbalance import load_model, read_attention
from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.data.facts import FactSet
from attnbalance.data.tokens import encode
from attnbalance.errors import ModelError
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.ranking import rank_facts
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import Split
from attnbalance.models.forward import position_limit
from attnbalance.models.load import load_limits
from attnbalance.storage.compare_salience import compare_salience


def test_a_folder_and_the_object_in_it_give_the_same_rows(checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    by_path = load_model(checkpoint)
    by_object = load_model(model, tokenizer=checkpoint)
    assert (by_path.name, by_object.name, by_path.kernel) == (str(checkpoint), "LlamaForCausalLM", "sdpa")
    found, again = (read_attention(each, tiny_prompts()).values for each in (by_path, by_object))
    torch.testing.assert_close(found, again, atol=1e-6, rtol=0)


def test_a_given_model_keeps_its_own_mode_part_by_part() -> None:
    model = tiny_model("gpt2").train()
    model.transformer.h[0].attn.eval()
    before = {name: module.training for name, module in model.named_modules()}
    hooked = load_model(model, tokenizer=tiny_tokenizer())
    found = read_attention(hooked, tiny_prompts())
    assert {name: module.training for name, module in model.named_modules()} == before
    assert hooked.model is model
    calm = read_attention(load_model(tiny_model("gpt2"), tokenizer=tiny_tokenizer()), tiny_prompts())
    torch.testing.assert_close(found.values, calm.values)  # no dropout in what is read


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_given_model_may_have_been_loaded_with_any_attention(implementation: str) -> None:
    model = tiny_model("mistral")
    model.set_attn_implementation(implementation)
    found = read_attention(load_model(model, tokenizer=tiny_tokenizer()), tiny_prompts()).values
    expected = read_attention(load_model(tiny_model("mistral"), tokenizer=tiny_tokenizer()), tiny_prompts()).values
    assert torch.equal(found, expected)


def test_names_that_lead_nowhere_are_refused(
    tmp_path: Path, adapter: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("x")
    with pytest.raises(ModelError, match=r"is a file; name the folder"):
        load_model(file)
    (tmp_path / "runs" / "full").mkdir(parents=True)
    with (
        monkeypatch.context() as here,
        pytest.raises(ModelError, match=r"no model folder at runs/ful; runs holds full$"),
    ):
        here.chdir(tmp_path)  # where runs/ful could also be a Hub id
        load_model("runs/ful")
    (tmp_path / "base").mkdir()
    with pytest.raises(ModelError, match=r"to put an adapter on .*/base, pass adapter='runs/lora'$"):
        load_model(f"{tmp_path}/base+runs/lora")
    with pytest.raises(ModelError, match=f"no model folder at {tmp_path}/absent"):
        load_model(tmp_path / "absent")
    with pytest.raises(ModelError, match="no adapter folder at"):
        load_model(checkpoint, adapter=tmp_path / "absent")
    with pytest.raises(ModelError, match=r"is an adapter; name its base model before the '\+'"):
        load_model(adapter, adapter=adapter)
    with pytest.raises(ModelError, match=r"cannot load model nobody/nothing"):
        load_model("nobody/nothing")


@pytest.mark.parametrize("limit", [96, 1])
def test_limits_are_those_of_the_loaded_model(limit: int, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text()) | {"max_position_embeddings": limit}
    (copied / "config.json").write_text(json.dumps(config))
    config = transformers.AutoConfig.from_pretrained(copied)
    assert load_limits(str(copied))[1] == position_limit(config) == limit


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "xpu"])
def test_a_device_that_is_not_there_is_named(device: str, checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=f"cannot put the model on device '{device}'"):
        load_model(checkpoint, device=device)


def test_an_object_needs_a_tokenizer() -> None:
    with pytest.raises(ModelError, match=r"LlamaForCausalLM object comes without a tokenizer: pass tokenizer="):
        load_model(tiny_model("llama"))


def test_models_that_are_not_causal_language_models_are_refused_by_kind() -> None:
    torch.manual_seed(0)
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, intermediate_size=48))  # pyright: ignore[reportArgumentType]
    headless = transformers.GPT2Model(transformers.GPT2Config(**GPT2))  # pyright: ignore[reportArgumentType]
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    )
    for model, message in [
        (bert, "BertLMHeadModel is not causal: a later token changes an earlier logit"),
        (headless, r"GPT2Model without a language-model head; load its ...ForCausalLM class"),
        (t5, "T5ForConditionalGeneration; only decoder-only causal"),
        (torch.nn.Linear(2, 2), r"expected a transformers model \(load one with AutoModelForCausalLM\), got Linear"),
    ]:
        with pytest.raises(ModelError, match=message):
            load_model(model, tokenizer=tiny_tokenizer())  # pyright: ignore[reportArgumentType]


def without_model(tokenizer: dict[str, Any]) -> None:
    tokenizer.pop("model")


def empty(tokenizer: dict[str, Any]) -> None:
    tokenizer.clear()


@pytest.mark.parametrize("spoil", [without_model, empty])
def test_a_tokenizer_without_a_model_is_refused(spoil: Callable[[dict[str, Any]], None], llama_folder: Path) -> None:
    path = llama_folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    spoil(tokenizer)
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="cannot load a tokenizer from"):
        load_limits(str(llama_folder))


@pytest.fixture
def beyond(llama_folder: Path) -> Path:
    """A model with a tokenizer, in good order itself, that gives ids which its embedding does not have."""
    path = llama_folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: i + 1000 * (i > 10) for token, i in vocabulary.items()}
    path.write_text(json.dumps(tokenizer))
    assert max(encode(tiny_prompts(), load_limits(str(llama_folder))[0])[0].ids) > 1000
    return llama_folder


CITIES = FactSet(FACTS[:1] * 2 + FACTS[5:6] * 2)
"""Two answers of one relation, twice."""


def test_ids_beyond_the_embedding_are_refused_by_salience_finetuning_and_rankings(beyond: Path, tmp_path: Path) -> None:
    out, message = (
        tmp_path / "out",
        r"is outside the 420 tokens of .*save this model's own in its folder, or pass it as `tokenizer`",
    )
    with pytest.raises(ModelError, match=message):
        compare_salience([ModelSpec("a", str(beyond))], CITIES, MeasureSettings(), out)
    with pytest.raises(ModelError, match=message):
        finetune(beyond, Split("whole", CITIES, CITIES, CITIES, 0), out, FinetuneSettings(steps=1, batch_size=2))
    model = load_model(beyond)
    for by in ("salience", "loss", "relevance"):
        with pytest.raises(ModelError, match=message):
            rank_facts(CITIES, by, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == [beyond.name]


@pytest.mark.parametrize("device", ["", "xpuu"])
def test_a_device_must_be_named_as_torch_names_it(device: str, llama_folder: Path) -> None:
    with pytest.raises(ModelError, match="cannot put the model on device"):
        load_model(llama_folder, device=device)


def test_an_empty_tokenizer_is_not_taken_for_the_models_own(llama_folder: Path) -> None:
    with pytest.raises(ModelError, match="cannot load a tokenizer"):
        load_limits(str(llama_folder), tokenizer="")


def _with_tokenizer(adapter: Path, tmp_path: Path, part: str) -> Path:
    """A copy of an adapter beside a tokenizer that differs from its base's in one part."""
    folder, tokenizer = Path(shutil.copytree(adapter, tmp_path / "lora")), tiny_tokenizer("bos")
    if part == "chat template":
        tokenizer.chat_template = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
    elif part == "tokens":
        tokenizer.add_tokens(["<|more|>"])
    elif part == "padding":
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("part", ["chat template", "tokens"])
def test_an_adapters_other_tokenizer_is_named_and_not_used(
    part: str, adapter: Path, checkpoint: Path, tmp_path: Path
) -> None:
    folder = _with_tokenizer(adapter, tmp_path, part)
    with pytest.warns(UserWarning, match=f"tokenizer in .*lora gives other {part}; that of its base .* is used"):
        model = load_model(checkpoint, adapter=folder)
    assert (model.tokenizer.chat_template, len(model.tokenizer)) == (None, len(tiny_tokenizer("bos")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = load_model(checkpoint, adapter=folder, tokenizer=folder)
    assert (named.tokenizer.chat_template is not None) == (part == "chat template")


@pytest.mark.parametrize("part", ["nothing", "padding"])
def test_an_adapters_copy_of_the_bases_tokenizer_gives_no_warning(
    part: str, adapter: Path, checkpoint: Path, tmp_path: Path
) -> None:
    folder = _with_tokenizer(adapter, tmp_path, part)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(checkpoint, adapter=folder)


def test_an_adapters_damaged_tokenizer_is_named_and_not_used(adapter: Path, checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(adapter, tmp_path / "lora")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.warns(UserWarning, match="cannot be loaded; that of its base"):
        load_model(checkpoint, adapter=folder)


def test_an_adapter_is_not_put_into_an_object_that_is_read_already(adapter: Path) -> None:
    model = tiny_model("llama")
    first = load_model(copy.deepcopy(model), tokenizer=tiny_tokenizer(), adapter=adapter)
    plain = load_model(model, tokenizer=tiny_tokenizer())
    rows = read_attention(plain, tiny_prompts()).values
    for used, what in ((plain.model, "is already read"), (first.model, "has adapters")):
        with pytest.raises(ModelError, match=f"object {what}, and an adapter would be put into it in place"):
            load_model(used, tokenizer=tiny_tokenizer(), adapter=adapter)
    assert torch.equal(read_attention(plain, tiny_prompts()).values, rows)
    assert load_model(copy.deepcopy(plain.model), tokenizer=tiny_tokenizer(), adapter=adapter)
    with pytest.raises(ModelError, match="adapters were put into this LlamaForCausalLM object: pass the PeftModel"):
        load_model(first.model.get_base_model(), tokenizer=tiny_tokenizer())


def test_an_adapter_is_not_put_into_an_object_that_is_offloaded(adapter: Path) -> None:
    model = tiny_model("llama")
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(ModelError, match=r"is not wholly in memory \(offloaded\), and an adapter .*; load it on one"):
        load_model(model, tokenizer=tiny_tokenizer(), adapter=adapter)


@pytest.mark.filterwarnings("ignore:.*is outside")
def test_an_object_read_through_eager_attention_is_not_changed_either(tmp_path: Path) -> None:
    tiny_lora(tiny_model("bloom"), ["query_key_value"]).save_pretrained(tmp_path)
    model = load_model(tiny_model("bloom"), tokenizer=tiny_tokenizer()).model
    with pytest.raises(ModelError, match="is already read, and an adapter"):
        load_model(model, tokenizer=tiny_tokenizer(), adapter=tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_routers_bias_stays_in_float32_where_from_pretrained_leaves_it(dtype: str, tmp_path: Path) -> None:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "v_head_dim": 8}
    latent = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes = SIZES | latent | {"moe_intermediate_size": 16, "first_k_dense_replace": 0, "num_key_value_heads": 4}
    config = transformers.DeepseekV3Config(**sizes | experts)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    folder = load_model(tmp_path, dtype=dtype).model
    given = load_model(model, tokenizer=tiny_tokenizer(), dtype=dtype).model
    dtypes = [{name: value.dtype for name, value in each.state_dict().items()} for each in (given, folder)]
    assert dtypes[0] == dtypes[1]
    assert torch.float32 in dtypes[0].values()


@pytest.mark.filterwarnings("ignore:.*is outside")
def test_buffers_that_are_no_frequencies_take_the_dtype() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=420, n_embd=32, n_layer=2, n_head=4, n_positions=96)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    load_model(model, tokenizer=tiny_tokenizer(), dtype="bfloat16")
    assert {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} == {torch.bfloat16}


def test_an_object_in_another_dtype_is_the_folder_in_that_dtype(checkpoint: Path) -> None:
    """Frequencies of rotary positions stay in float32, as from_pretrained leaves them."""
    folder = load_model(checkpoint, dtype="bfloat16")
    model = load_model(
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint), tokenizer=tiny_tokenizer(), dtype="bfloat16"
    )
    buffers, expected = dict(model.model.named_buffers()), dict(folder.model.named_buffers())
    assert {name: buffer.dtype for name, buffer in buffers.items()} == {n: b.dtype for n, b in expected.items()}
    assert any(buffer.dtype == torch.float32 for buffer in buffers.values())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected.items())
    assert {weight.dtype for weight in model.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("change", ["merged", "trained", "another dtype"])
def test_a_model_object_whose_weights_changed_under_an_earlier_handle_is_warned_of(change: str) -> None:
    base = tiny_model("llama")
    before = load_model(base, tokenizer=tiny_tokenizer())
    expected = read_attention(before, tiny_prompts()).values
    changed: Any = base
    if change == "merged":
        changed = tiny_lora(base, ["q_proj"]).merge_and_unload()
    elif change == "trained":
        with torch.no_grad():
            next(base.parameters()).data.mul_(1.5)
    with pytest.warns(
        UserWarning, match="LlamaForCausalLM object has changed since it was loaded as .* load the first one"
    ):
        load_model(changed, tokenizer=tiny_tokenizer(), dtype="bfloat16" if change == "another dtype" else None)
    assert not torch.equal(read_attention(before, tiny_prompts()).values, expected)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "trained": lambda model: (
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.data.mul_(2)
    ),
    "switched": lambda model: model.set_adapter("other"),
    "switched off": lambda model: model.disable_adapter_layers(),
    "removed": lambda model: model.unload(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_adapters_under_an_earlier_handle_are_warned_of_also_after_another_handle(change: str) -> None:
    adapted = tiny_lora(tiny_model("llama"), ["q_proj"])
    adapted.add_adapter("other", adapted.peft_config["default"])
    first = load_model(adapted, tokenizer=tiny_tokenizer())
    load_model(adapted, tokenizer=tiny_tokenizer())  # nothing keeps this one
    changed = CHANGES[change](adapted)
    with pytest.warns(UserWarning, match="has changed since it was loaded as PeftModel"):
        load_model(changed if change == "removed" else adapted, tokenizer=tiny_tokenizer())
    assert first.model is adapted


def test_nothing_is_said_of_a_model_object_that_is_as_it_was_or_that_nothing_else_reads() -> None:
    base = tiny_model("llama")
    before = load_model(base, tokenizer=tiny_tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(base, tokenizer=tiny_tokenizer())
        del before
        next(base.parameters()).data.mul_(1.5)
        load_model(base, tokenizer=tiny_tokenizer())


def test_adapters_put_into_a_base_are_refused_when_the_base_is_read_and_need_no_warning() -> None:
    base = tiny_model("llama")
    before = load_model(base, tokenizer=tiny_tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_model(tiny_lora(base, ["q_proj"]), tokenizer=tiny_tokenizer())
    with pytest.raises(ModelError, match="adapters were put into"):
        read_attention(before, tiny_prompts())


def test_a_trainers_folder_that_holds_checkpoints_alone_names_them(tmp_path: Path) -> None:
    for step in (20, 5):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
    named = r"run holds no config.json: .*; name one of the checkpoints in it, such as .*run/checkpoint-20$"
    for load in (load_limits, load_model):
        with pytest.raises(ModelError, match=named):
            load(str(tmp_path / "run"))


def test_a_loaded_model_is_not_spread_over_devices(checkpoint: Path) -> None:
    model = load_model(checkpoint).model
    with pytest.raises(ModelError, match="spreads a model while it is loaded, got a loaded LlamaForCausalLM"):
        load_model(model, tokenizer=checkpoint, device="auto")
