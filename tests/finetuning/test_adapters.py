"""Adapters of peft: what they change, what a run of them is, and what is refused by name."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from peft import PeftModel
from short_runs import SPLIT, Killed, short
from transformers import AutoModelForCausalLM
from uneven import uneven

from attnbalance.errors import DataError, ModelError
from attnbalance.finetuning.adapters import add_adapters, add_lora, peft_config, under_adapters
from attnbalance.finetuning.finetune import finetune
from attnbalance.finetuning.parameters import Chosen, select_weights
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.models.load import load_model

OTHERS = [
    {"peft_type": "OFT", "oft_block_size": 8},
    {"peft_type": "OSF"},
    {"peft_type": "LOKR", "r": 2},
    {"peft_type": "VERA", "r": 8},
    {"peft_type": "IA3", "feedforward_modules": []},
    {"peft_type": "lora", "r": 2, "use_dora": True, "use_rslora": True},
]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # two layers of 3072 in attention and 3 x 32 x 48 in the MLP; no embeddings and no norms
        ("all", "15,360 of 42,400 weights (36.2%) in 14 tensors (all)"),
        ("q@0.1", "256 of 42,400 weights (0.604%) in 1 tensor (q@0.1)"),
    ],
)
def test_what_is_trained_through_adapters_is_the_weights_that_they_change(text: str, line: str) -> None:
    model = uneven("llama")
    chosen = select_weights(model, text)
    adapted, _ = add_lora(copy.deepcopy(model), chosen, 2, 2)
    assert under_adapters(adapted, chosen).describe() == line


@pytest.mark.parametrize("train", ["all", "qk"])
def test_adapted_layers_are_saved_in_order(train, tmp_path):
    model = uneven("llama")
    chosen = select_weights(model, train)
    lora, _ = add_lora(copy.deepcopy(model), chosen, 2, 2)
    for name, adapted in (("lora", lora), ("vera", add_adapters(model, chosen, {"peft_type": "VERA", "r": 8}))):
        adapted.save_pretrained(tmp_path / name)
        saved = json.loads((tmp_path / name / "adapter_config.json").read_text())["target_modules"]
        assert len(saved) > 1
        assert saved == sorted(saved)


@pytest.mark.parametrize("fields", OTHERS, ids=lambda fields: fields["peft_type"])
def test_a_run_of_other_adapters_changes_the_chosen_layers_alone_and_is_what_peft_loads(llama, tmp_path, fields):
    run = finetune(llama, SPLIT, tmp_path / "run", short(train="qk", learning_rate=0.01, peft=fields))
    assert f"weights of {fields['peft_type']} adapters, which change " in run.trained
    base = AutoModelForCausalLM.from_pretrained(llama)
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), run.path).eval()
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        expected = adapted(ids).logits
        ours = load_model(run.path).model(ids).logits
        assert torch.equal(ours, expected)
        assert not torch.equal(expected, base(ids).logits)
        merged = adapted.merge_and_unload()
        before, after = dict(base.named_parameters()), dict(merged.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".q_proj." in name or ".k_proj." in name}


def test_the_bases_loss_is_measured_without_adapters_that_do_not_begin_as_the_identity(llama, tmp_path):
    plain = finetune(llama, SPLIT, tmp_path / "plain", short(steps=2))
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 64, "init_lora_weights": False}
    run = finetune(llama, SPLIT, tmp_path / "run", short(steps=2, peft=fields))
    assert run.base_loss == pytest.approx(plain.base_loss, rel=1e-6)


def test_a_killed_run_of_other_adapters_resumes_bit_for_bit(llama, tmp_path, kill_at):
    settings = short(train="attention", peft={"peft_type": "OSF"})
    whole = finetune(llama, SPLIT, tmp_path / "whole", settings)
    kill_at("on_step_end", 4)
    with pytest.raises(Killed):
        finetune(llama, SPLIT, tmp_path / "killed", settings)
    resumed = finetune(llama, SPLIT, tmp_path / "killed", settings)
    name = "adapter_model.safetensors"
    assert (resumed.path / name).read_bytes() == (whole.path / name).read_bytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LORRA"}, r"peft has no type 'LORRA'; there are ADALORA, "),
        ({"peft_type": "OFT", "target_modules": ["q_proj"]}, r"leave 'target_modules' out of `peft`: `train` says"),
        ({"peft_type": "LORA", "bias": "all"}, r"leave 'bias' out"),
        ({"peft_type": "LORA", "alora_invocation_tokens": [1]}, r"leave 'alora_invocation_tokens' out"),
        ({"peft_type": "ADALORA", "total_step": 9}, r"type ADALORA cannot be trained: they need"),
        ({"peft_type": "ADAPTION_PROMPT"}, r"type ADAPTION_PROMPT"),
        ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}, r"type PREFIX_TUNING"),
        ({"peft_type": "LORA", "init_lora_weights": "corda"}, r"init_lora_weights='corda' is computed from data"),
        ({"peft_type": "LORA", "init_lora_weights": "pissa_niter_4"}, r"or changes the base's weights"),
        ({"peft_type": "LORA", "kasa_config": {"beta": 1.0}}, r"cannot do what 'kasa_config' asks for"),
        ({"peft_type": "LORA", "kasa_config": {}}, r"cannot do what 'kasa_config' asks for"),  # with peft's defaults
        ({"peft_type": "LORA", "monteclora_config": {}}, r"cannot do what 'monteclora_config' asks for"),
        ({"peft_type": "LORA", "layer_replication": [[0, 1]]}, r"leave 'layer_replication' out"),
        ({"peft_type": "OFT", "block": 8}, r"peft refuses .*block"),
    ],
)
def test_configurations_that_cannot_be_honoured_are_refused_without_a_model(fields, message):
    with pytest.raises(DataError, match=message):
        peft_config(fields)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"use_dora": "no"}, "peft's 'use_dora' must be true or false, got 'no'"),
        ({"use_dora": ["no"]}, r"peft's 'use_dora' must be true or false, got \['no'\]"),
        ({"use_rslora": 1}, "peft's 'use_rslora' must be true or false, got 1"),
        ({"r": "4"}, "peft's 'r' must be a number, got '4'"),
        ({"r": True}, "peft's 'r' must be a number, got True"),
        ({"lora_alpha": 0}, "peft's 'lora_alpha' must be a number > 0, got 0"),
        ({"lora_dropout": 1.0}, "peft's 'lora_dropout' must be a number from 0 to below 1, got 1.0"),
        ({"lora_dropout": -1}, "peft's 'lora_dropout' must be a number from 0 to below 1, got -1"),
    ],
)
def test_values_that_peft_would_take_for_others_are_refused(field, message) -> None:
    with pytest.raises(DataError, match=message):
        peft_config({"peft_type": "LORA", **field})


def test_values_of_the_right_types_are_taken() -> None:
    fields = {"r": 4, "lora_alpha": 0.5, "lora_dropout": 0, "use_dora": True, "init_lora_weights": "gaussian"}
    config = peft_config({"peft_type": "lora", **fields, "rank_pattern": {"q_proj": 2}, "loftq_config": {}})
    assert {name: getattr(config, name) for name in fields} == fields


def test_scales_of_other_types_may_be_fractions_and_must_not_be_0() -> None:
    assert peft_config({"peft_type": "LOHA", "alpha": 0.5}).alpha == 0.5  # pyright: ignore[reportAttributeAccessIssue]
    assert peft_config({"peft_type": "LORA", "r": 3, "runtime_config": None}).r == 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DataError, match="peft's 'alpha' must be a number > 0, got 0"):
        peft_config({"peft_type": "LOHA", "alpha": 0})


def test_a_pattern_that_is_none_is_refused_by_name() -> None:
    model = uneven("llama")
    with pytest.raises(DataError, match=r"peft refuses .*alpha_pattern.* on LlamaForCausalLM: "):
        add_adapters(model, select_weights(model, "qk"), {"peft_type": "LORA", "r": 2, "alpha_pattern": {"(": 8}})


def test_parts_of_layers_and_layers_that_peft_refuses_are_refused_by_name():
    model = uneven("llama")
    with pytest.raises(DataError, match=r"'q@0\.1' chooses a part of model\.layers\.0\.self_attn\.q_proj\.weight"):
        add_adapters(model, select_weights(model, "q@0.1"), {"peft_type": "OFT", "oft_block_size": 8})
    with pytest.raises(DataError, match=r"peft refuses .* on LlamaForCausalLM: "):
        add_adapters(model, select_weights(model, "qk"), {"peft_type": "MISS", "r": 4096})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peft": {"r": 8}}, r"must be a mapping with peft_type, .* got \{'r': 8\}"),
        ({"peft": "OFT"}, r"must be a mapping with peft_type"),
        ({"peft": {"peft_type": "OFT"}, "lora_rank": 8}, r"leave `lora_rank` and `lora_alpha` out"),
        ({"peft": {"peft_type": "OFT", "r": {1, 2}}}, r"must hold texts, finite numbers"),
    ],
)
def test_settings_of_adapters_are_checked(given, message):
    with pytest.raises(DataError, match=message):
        FinetuneSettings(**given)


def test_lora_is_refused_where_it_cannot_do_what_is_asked() -> None:
    model = uneven("gpt_oss")  # experts in one tensor, and no linear layer in the MLP
    with pytest.raises(DataError, match=r"'mlp' chooses none in GptOssForCausalLM"):
        add_lora(model, select_weights(model, "mlp"), 2, 4)
    experts = r"others too \(model\.layers\.0\.mlp\.experts\.gate_up_proj\) in GptOss.*train without adapters"
    for text in ("attention+mlp", "all@0"):
        with pytest.raises(DataError, match=experts):
            add_lora(model, select_weights(model, text), 2, 4)
    model, name = uneven("llama"), "model.layers.0.self_attn.q_proj.weight"
    diagonal = Chosen("some", {name: torch.eye(32, dtype=torch.bool)}, 32, 1000)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj: the chosen entries are not"):
        add_lora(model, diagonal, 2, 4)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_lora_takes_each_familys_orientation_of_weights_without_a_warning(family: str) -> None:
    model = uneven(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        adapted, _ = add_lora(model, select_weights(model, "attention"), 2, 4)
    config = adapted.peft_config["default"]
    assert config.fan_in_fan_out == (family == "gpt2")  # pyright: ignore[reportAttributeAccessIssue]
