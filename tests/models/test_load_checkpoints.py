"""Checkpoints that share one loaded model are read, bit for bit, as each is by itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import argmax_loop, tiny_config, tiny_model, tiny_prompts, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from attnbalance import HookedModel, load_model, read_attention, recall
from attnbalance.data.tokens import encode
from attnbalance.errors import ModelError
from attnbalance.models.fingerprint import fingerprint
from attnbalance.models.forward import base_of
from attnbalance.models.load_checkpoints import load_checkpoints
from attnbalance.models.self_check import self_check


def read(model: HookedModel) -> tuple[Tensor, tuple[str, ...]]:
    """All rows, and the answers, of a model."""
    return read_attention(model, tiny_prompts()).values, recall(model, tiny_prompts(), {}).outputs


def saved(folder: Path, base: Path, seed: int, **settings: object) -> Path:
    """An adapter with random weights on a base."""
    model = load_model(base).model
    kinds = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | settings
    adapted = get_peft_model(model, LoraConfig(**kinds))  # pyright: ignore[reportArgumentType]
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in (each for each in adapted.parameters() if each.requires_grad):
            parameter.add_(0.3 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return folder


KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "other rank and targets": {"r": 2, "target_modules": ["k_proj", "o_proj", "up_proj"]},
    "DoRA": {"use_dora": True},
    "trained copy of the head": {"modules_to_save": ["lm_head"]},
    "on the embedding, which is then saved too": {"target_modules": ["embed_tokens", "q_proj"]},
    "some tokens' embeddings": {"trainable_token_indices": [5, 9]},
    "MiCA": {"init_lora_weights": "mica"},
    "weights as parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
}


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One adapter of each kind on the same base."""
    folder = tmp_path_factory.mktemp("adapters")
    return {kind: saved(folder / str(i), checkpoint, i, **KINDS[kind]) for i, kind in enumerate(KINDS)}


@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_adapter_is_read_as_by_itself_also_after_others(
    checkpoint: Path, adapters: dict[str, Path]
) -> None:
    """Equal bits: on the CPU the same operations run on the same numbers in the same order."""
    paths = [*adapters.values(), *reversed(adapters.values())]
    bare, answers = read(load_model(checkpoint))
    for path, model in zip(
        paths, load_checkpoints([(str(checkpoint), str(path)) for path in paths], device="cpu"), strict=True
    ):
        alone = load_model(checkpoint, adapter=path, device="cpu")
        rows, outputs = read(model)
        expected, expected_outputs = read(alone)
        assert torch.equal(rows, expected), path
        assert outputs == expected_outputs
        assert not (torch.equal(rows, bare) and outputs == answers)  # or the adapter was not there
        assert (model.name, model.kernel, model.layers) == (alone.name, alone.kernel, alone.layers)


@pytest.mark.filterwarnings("ignore")
def test_the_base_has_its_weights_and_parts_after_all_adapters(
    checkpoint: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    embedding = Path(shutil.copytree(adapters["on the embedding, which is then saved too"], tmp_path / "other"))
    change_saved_embedding(embedding)
    bases = list[torch.nn.Module]()
    for model in load_checkpoints([(str(checkpoint), str(path)) for path in (*adapters.values(), embedding)]):
        bases.append(base_of(model.model))
    untouched = load_model(checkpoint)
    assert {id(base) for base in bases} == {id(bases[0])}
    assert fingerprint(bases[0]) == fingerprint(untouched.model)
    assert [(name, type(part)) for name, part in bases[0].named_modules()] == [
        (name, type(part)) for name, part in untouched.model.named_modules()
    ]
    assert not hasattr(bases[0], "peft_config")


def change_saved_embedding(adapter: Path) -> None:
    """Another base embedding in the file of an adapter, as after a run that trained it."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    (name,) = (name for name in tensors if name.endswith("embed_tokens.base_layer.weight"))
    save_file(tensors | {name: tensors[name] + 0.1}, adapter / "adapter_model.safetensors", metadata={"format": "pt"})


@pytest.mark.filterwarnings("ignore")
def test_an_embedding_in_an_adapters_file_is_used_and_then_taken_back(
    checkpoint: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(adapters["on the embedding, which is then saved too"], tmp_path / "other"))
    change_saved_embedding(changed)
    paths = [changed, adapters["plain"]]
    for path, model in zip(paths, load_checkpoints([(str(checkpoint), str(path)) for path in paths]), strict=True):
        assert torch.equal(read(model)[0], read(load_model(checkpoint, adapter=path))[0])


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models whose self-check runs from now on."""
    names = list[str]()
    monkeypatch.setattr(
        "attnbalance.models.hooked.self_check", lambda model, name: (names.append(name), self_check(model, name))[1]
    )
    return names


def test_the_self_check_runs_once_for_adapters_of_one_configuration(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [saved(tmp_path / str(i), checkpoint, i) for i in range(3)]
    paths.append(saved(tmp_path / "other", checkpoint, 3, r=2))
    checked = count_checks(monkeypatch)
    for _ in load_checkpoints([(str(checkpoint), str(path)) for path in paths]):
        pass
    assert checked == [str(checkpoint), f"{checkpoint}+{paths[0]}", f"{checkpoint}+{paths[3]}"]


@pytest.fixture(scope="module")
def full(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three full checkpoints of one run."""
    folder = tmp_path_factory.mktemp("full")
    return [moved(checkpoint, folder / str(i), i) for i in range(3)]


def moved(checkpoint: Path, folder: Path, seed: int, shards: str = "50GB") -> Path:
    """A checkpoint whose weights were all moved a little."""
    model = tiny_model("llama")
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=shards)
    tiny_tokenizer("bos").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_full_checkpoints_are_read_as_by_themselves(full: list[Path], tmp_path: Path, dtype: str | None) -> None:
    paths = [*full, moved(full[0], tmp_path / "sharded", 7, shards="20KB"), full[0]]
    assert (paths[3] / "model.safetensors.index.json").is_file()
    seen = list[Tensor]()
    for path, model in zip(paths, load_checkpoints([(str(path), None) for path in paths], dtype=dtype), strict=True):
        alone = load_model(path, dtype=dtype)
        assert torch.equal(read(model)[0], read(alone)[0])
        assert read(model)[1] == read(alone)[1]
        assert fingerprint(model.model) == fingerprint(alone.model)
        assert model.name == str(path)
        seen.append(read(model)[0])
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[4])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_checkpoints_of_two_dtypes_are_read_in_one_that_is_named(
    full: list[Path], tmp_path: Path, dtype: str
) -> None:
    base = moved(full[0], tmp_path / "base", 7)
    AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16).save_pretrained(base)
    pairs = [(str(path), None) for path in (base, *full)]
    with pytest.raises(
        ModelError, match=r"names dtype torch.float32, not torch.bfloat16; read all in one dtype: --dtype"
    ):
        load_checkpoints(pairs)
    for (path, _), model in zip(pairs, load_checkpoints(pairs, dtype=dtype), strict=True):
        alone = load_model(path, dtype=dtype)
        assert model.dtype == alone.dtype
        assert torch.equal(read(model)[0], read(alone)[0])
        assert fingerprint(model.model) == fingerprint(alone.model)


def test_each_checkpoint_ends_its_answers_at_its_own_tokens(full: list[Path], tmp_path: Path) -> None:
    """Three checkpoints with the same weights; the first stops at two tokens, the second at one, the third at none."""
    paths = [Path(shutil.copytree(full[0], tmp_path / str(i))) for i in range(3)]
    encodings = encode(tiny_prompts(), tiny_tokenizer("bos"))[:2]
    model = AutoModelForCausalLM.from_pretrained(full[0])
    common = [argmax_loop(model, encoding.ids, 4, None)[2] for encoding in encodings]  # each is in one answer
    (paths[0] / "generation_config.json").write_text(json.dumps({"eos_token_id": common}))
    (paths[1] / "generation_config.json").write_text(json.dumps({"eos_token_id": common[0]}))
    (paths[2] / "generation_config.json").unlink()
    outputs = list[tuple[str, ...]]()
    for path, model in zip(paths, load_checkpoints([(str(path), None) for path in paths]), strict=True):
        answers = [recall(each, tiny_prompts(), max_new_tokens=8, batch_size=9) for each in (model, load_model(path))]
        assert answers[0] == answers[1]
        outputs.append(answers[0].outputs)
    assert len(set(outputs)) == 3


def test_the_self_check_runs_once_for_full_checkpoints(full: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    checked = count_checks(monkeypatch)
    for _ in load_checkpoints([(str(path), None) for path in full]):
        pass
    assert checked == [str(full[0])]


def test_no_checkpoints_give_no_models() -> None:
    assert list(load_checkpoints([])) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "is of type IA3; only LoRA adapters share a loaded base: measure it by itself"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora', which changes the weights of its base"),
        ({"kasa_config": {}}, "a kasa_config, with which peft cuts small singular values off its base's weights"),
    ],
)
def test_an_adapter_that_cannot_share_its_base_is_refused_before_anything_is_loaded(
    checkpoint: Path, adapters: dict[str, Path], tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    other = Path(shutil.copytree(adapters["plain"], tmp_path / "other"))
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | settings))
    with pytest.raises(ModelError, match=message):
        load_checkpoints([(str(checkpoint), str(adapters["plain"])), (str(checkpoint), str(other))])


def test_a_head_in_an_adapters_file_that_is_tied_to_the_embedding_is_no_change_of_the_base(tmp_path: Path) -> None:
    """The file holds the head's values alone; the model knows the tied weight by the embedding's name."""
    from safetensors.torch import load_file, save_file

    model = AutoModelForCausalLM.from_config(tiny_config("llama", tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    plain = saved(tmp_path / "plain", tmp_path / "base", 0)
    head = saved(tmp_path / "head", tmp_path / "base", 1, target_modules=["lm_head", "q_proj"])
    tensors = load_file(head / "adapter_model.safetensors")
    (name,) = (name for name in tensors if name.endswith("lm_head.base_layer.weight"))
    save_file(tensors | {name: tensors[name] + 0.1}, head / "adapter_model.safetensors", metadata={"format": "pt"})
    paths = [plain, head, plain]
    for path, loaded in zip(
        paths, load_checkpoints([(str(tmp_path / "base"), str(path)) for path in paths]), strict=True
    ):
        rows, outputs = read(loaded)
        expected, expected_outputs = read(load_model(tmp_path / "base", adapter=path))
        assert torch.equal(rows, expected)
        assert outputs == expected_outputs


def test_an_adapter_that_changes_its_base_unforeseen_is_refused(
    checkpoint: Path, adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OLoRA stands for a start of a later peft that is not known to change the base."""
    monkeypatch.setattr("attnbalance.models.load_checkpoints.SAFE_STARTS", (True, "olora"))
    other = saved(tmp_path / "other", checkpoint, 1, init_lora_weights="olora")
    models = load_checkpoints([(str(checkpoint), str(adapters["plain"])), (str(checkpoint), str(other))])
    next(models)
    with pytest.raises(ModelError, match=r"other changed model.layers.0.self_attn.\w+.weight of its base \(\d+ of \d+"):
        next(models)


def truncated(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_weights(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"), [(truncated, "cannot load adapter .*other"), (without_weights, "holds no adapter_model")]
)
def test_a_half_written_adapter_is_refused_by_name_before_anything_is_loaded(
    checkpoint: Path, adapters: dict[str, Path], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    other = Path(shutil.copytree(adapters["plain"], tmp_path / "other"))
    damage(other)
    with pytest.raises(ModelError, match=message):
        load_checkpoints([(str(checkpoint), str(adapters["plain"])), (str(checkpoint), str(other))])


def test_adapters_of_two_bases_and_adapters_beside_full_checkpoints_are_refused(
    checkpoint: Path, adapters: dict[str, Path], full: list[Path]
) -> None:
    plain = str(adapters["plain"])
    with pytest.raises(ModelError, match="expected adapters of one base"):
        load_checkpoints([(str(checkpoint), plain), (str(full[0]), plain)])
    with pytest.raises(ModelError, match="either full checkpoints or adapters, got both"):
        load_checkpoints([(str(checkpoint), plain), (str(full[0]), None)])


def test_what_cannot_be_swapped_is_refused_before_any_checkpoint_is_handed_out(
    full: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: HookedModel, weights: object) -> None:
        raise ModelError("another name once it is loaded")

    monkeypatch.setattr("attnbalance.models.load_checkpoints.check_swappable", refuse)
    models = load_checkpoints([(str(path), None) for path in full])
    with pytest.raises(ModelError, match="another name once it is loaded"):
        next(models)


def test_full_checkpoints_of_the_hub_are_refused_as_such(full: list[Path]) -> None:
    with pytest.raises(
        ModelError, match=r"full checkpoints must be local folders, got meta-llama/Llama-3\.2-1B; download"
    ):
        load_checkpoints([("meta-llama/Llama-3.2-1B", None), (str(full[0]), None)])


def test_the_tokenizer_of_every_adapter_is_compared_with_the_bases(checkpoint: Path, tmp_path: Path) -> None:
    paths = [saved(tmp_path / str(i), checkpoint, i) for i in range(2)]
    tokenizer = tiny_tokenizer("bos")
    tokenizer.save_pretrained(paths[0])
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(paths[1])
    with pytest.warns(UserWarning, match=r"tokenizer in .*1 gives other chat template"):
        load_checkpoints([(str(checkpoint), str(path)) for path in paths])
