"""A checkpoint's configuration does not choose the code that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_prompts

from attnbalance import load_model, read_attention
from attnbalance.errors import ModelError
from attnbalance.models import config
from attnbalance.models.load import load_limits

STAND_IN = """
from pathlib import Path

def get_kernel(repo_id, *args, **kwargs):
    with Path(__file__).with_name("calls.txt").open("a") as calls:
        calls.write(f"{repo_id}\\n")
    raise FileNotFoundError(f"{repo_id} would have been fetched and run")

def __getattr__(name):
    return lambda *args, **kwargs: lambda layer: layer
"""
"""A package named `kernels` that writes down what transformers asks it to fetch."""

PROGRAM = """
import sys
from transformers import AutoModelForCausalLM
from attnbalance.models.load import load_limits, load_model

folder, adapter, who = sys.argv[1:]
if who == "transformers":
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except Exception:
        pass
else:
    load_limits(folder)
    print(load_model(folder).kernel, load_model(adapter).kernel)
"""


def edit(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_a_configuration_that_names_an_implementation_makes_nobody_fetch_a_kernel(
    field: str, llama_folder: Path, lora_folder: Path, tmp_path: Path
) -> None:
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    described = package.with_name("kernels-0.18.2.dist-info")
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    edit(llama_folder, **{field: "flash_attention_2"})
    path = lora_folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(llama_folder)}))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path])}

    def run(who: str) -> str:
        command = [sys.executable, "-c", PROGRAM, str(llama_folder), str(lora_folder), who]
        return subprocess.check_output(command, env=environment, text=True)

    assert run("attnbalance").split() == ["sdpa", "sdpa"]
    assert not (package / "calls.txt").exists()
    run("transformers")  # the stand-in is asked where the configuration is believed
    assert (package / "calls.txt").read_text().split() == ["kernels-community/flash-attn2"]


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "kernels-community/flash-attn2"},
        {"_attn_implementation": "someone/kernel@main:run"},
        {"_attn_implementation_internal": {"": "someone/kernel"}},
        {"text_config": {"attn_implementation": "someone/kernel"}},
        {"experts_implementation": "someone/experts"},
        {"use_kernels": True},
    ],
)
def test_a_configuration_that_asks_for_a_kernel_of_the_hub_is_refused_by_name(
    changes: dict[str, object], llama_folder: Path
) -> None:
    edit(llama_folder, **changes)
    for load in (load_model, lambda folder: load_limits(str(folder))):
        with pytest.raises(
            ModelError,
            match=rf"asks for a kernel from the Hub.*{next(iter(changes))}.*remove that line, or, where the "
            "model is only measured, pass `trust_remote_code=True`",
        ):
            load(llama_folder)


def test_a_configuration_that_names_eager_attention_gives_the_rows_of_any_other(llama_folder: Path) -> None:
    expected = read_attention(load_model(tiny_model("llama"), tokenizer=llama_folder), tiny_prompts()).values
    named = load_model(edit(llama_folder, _attn_implementation="eager", experts_implementation="eager"))
    assert named.kernel == "sdpa"
    assert (read_attention(named, tiny_prompts()).values - expected).abs().max() < 1e-6  # the same weights and kernel


@pytest.mark.parametrize("method", ["eetq", "gguf", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_quantised_weights_that_need_a_kernel_of_the_hub_are_refused_where_it_would_be_fetched(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, nested: bool
) -> None:
    """The quantisation may also be named for a part of the model, as for the text of one that sees."""
    named = {"quantization_config": {"quant_method": method, "weights": "int8"}}
    edit(llama_folder, **({"text_config": named} if nested else named))
    monkeypatch.setattr(config, "is_kernels_available", lambda: True)
    with pytest.raises(ModelError, match=rf"quantised weights \({method}\), for which transformers fetches kernels"):
        load_limits(str(llama_folder))
    if not nested:  # a Llama has no part to be quantised alone
        monkeypatch.setattr(config, "is_kernels_available", lambda: False)
        load_limits(str(llama_folder))
