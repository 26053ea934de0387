"""GGUF files, written here as llama.cpp writes them: the model that was written is the oracle of what is read."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import torch
import transformers
from tiny import GROUPED, tiny_prompts, tiny_tokenizer
from transformers import LlamaForCausalLM

from attnbalance import load_model
from attnbalance.comparison.specs import MeasureSettings, ModelSpec, fingerprints, load_spec
from attnbalance.errors import ModelError, OutputError
from attnbalance.files.work import locked, work_of
from attnbalance.models.fingerprint import files_fingerprint
from attnbalance.models.generate import stop_ids
from attnbalance.models.gguf import as_safetensors, warn_of_unread
from attnbalance.models.load import load_limits

TEXT = "The capital of France is Paris, since 1944."
Change = Callable[[gguf.GGUFWriter], None]

THETA = 500.0
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def llama(**rope: object) -> LlamaForCausalLM:
    """A random Llama whose rows are whole blocks of 32, as Q8_0 needs."""
    torch.manual_seed(0)
    sizes = GROUPED | {"intermediate_size": 64, "vocab_size": len(tiny_tokenizer())}
    return LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters={"rope_theta": THETA, **rope})).eval()


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of W_Q and W_K: each head's two halves interleaved."""
    size = weight.shape[0] // heads
    rows = [
        head * size + half * size // 2 + pair for head in range(heads) for pair in range(size // 2) for half in (0, 1)
    ]
    return weight[rows]


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def add_sizes(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    words = tiny_tokenizer()
    assert isinstance(words, transformers.PreTrainedTokenizerFast)
    merges = json.loads(words.backend_tokenizer.to_str())["model"]["merges"]
    tokens = sorted(words.get_vocab(), key=words.get_vocab().__getitem__)
    special = set(words.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(words.eos_token_id)
    writer.add_pad_token_id(words.pad_token_id)


def write(model: LlamaForCausalLM, path: Path, quantised: bool = False, change: Change | None = None) -> Path:
    """A GGUF file of a Llama, optionally with its matrices in Q8_0."""
    writer, config = gguf.GGUFWriter(path, "llama"), model.config
    add_sizes(writer, config)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(config.head_dim)
    add_tokenizer(writer)
    for name, weight in model.state_dict().items():
        values, kind = weight.numpy(), gguf.GGMLQuantizationType.F32
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            values = permuted(values, heads) if part in name else values
        if quantised and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            values = gguf.quants.quantize(values, kind)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values), raw_dtype=kind)
    if change is not None:
        change(writer)
    return saved(writer, path)


def saved(writer: gguf.GGUFWriter, path: Path) -> Path:
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path


def gguf_name(name: str) -> str:
    if name in OUTER:
        return f"{OUTER[name]}.weight"
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(90).reshape(3, 30)  # positions long enough for every rotary frequency to count
    with torch.no_grad():
        return model(ids).logits


def converted(path: Path) -> Path:
    with pytest.warns(UserWarning, match=r"converted .* once, in float32, to .*, which is loaded from now on"):
        return Path(as_safetensors(str(path)))


def test_a_file_gives_the_model_and_the_tokenizer_that_were_written(tmp_path: Path) -> None:
    model, path = llama(), write(llama(), tmp_path / "small.gguf")
    folder = converted(path)
    assert folder == tmp_path / "small-safetensors"
    hooked = load_model(path)
    assert torch.equal(logits(hooked.model), logits(model))  # float32 is not rounded
    words, read = tiny_tokenizer(), hooked.tokenizer
    texts = [prompt.text for prompt in tiny_prompts()] + ["In 1944, it's  Paris.\n\n"]
    assert [read(text).input_ids for text in texts] == [words(text).input_ids for text in texts]
    assert (read.eos_token, read.pad_token) == (words.eos_token, words.pad_token)
    assert load_limits(str(path))[1] == model.config.max_position_embeddings


def test_quantised_weights_are_those_that_the_gguf_package_dequantises(tmp_path: Path) -> None:
    model = llama()
    folder = converted(write(model, tmp_path / "small.Q8_0.gguf", quantised=True))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            blocks = gguf.quants.quantize(parameter.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    torch.testing.assert_close(logits(load_model(folder).model), logits(model), atol=1e-6, rtol=0)
    assert not torch.equal(logits(model), logits(llama()))  # Q8_0 rounds


def test_rotary_frequencies_are_divided_as_in_the_file(tmp_path: Path) -> None:
    scaled, plain = llama(**LLAMA3), llama()
    usual, divided = (each.model.rotary_emb.inv_freq for each in (plain, scaled))
    factors = (usual / divided).numpy()

    def add_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    folder = converted(write(plain, tmp_path / "small.gguf", change=add_factors))
    # float32's rounding of the factors (6e-8) times a position of at most 29, through weights of 0.3
    torch.testing.assert_close(logits(load_model(folder).model), logits(scaled), atol=1e-4, rtol=0)
    assert (logits(plain) - logits(scaled)).abs().max() > 0.1


def test_a_file_is_converted_once_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    path = write(llama(), tmp_path / "small.gguf")
    folder = converted(path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert as_safetensors(str(path)) == str(folder)  # and no warning, which would be an error
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert files_fingerprint(path) == fingerprints(ModelSpec("small", str(path)), MeasureSettings())[0]
    write(llama(), path, quantised=True)
    with pytest.raises(OutputError, match="sha256"):
        as_safetensors(str(path))
    with pytest.raises(OutputError, match="sha256"):
        load_spec(ModelSpec("small", str(path)), MeasureSettings())


def test_a_process_that_converts_the_file_at_the_same_time_is_waited_for(tmp_path: Path) -> None:
    path, folder = write(llama(), tmp_path / "small.gguf"), tmp_path / "small-safetensors"
    with ThreadPoolExecutor() as threads:
        with locked(work_of(folder)):
            waiting = threads.submit(as_safetensors, str(path))
            with pytest.raises(TimeoutError):
                waiting.result(timeout=3)
            assert not folder.exists()
        with pytest.warns(UserWarning, match="converted"):
            assert waiting.result(timeout=60) == str(folder)
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"GGUF")
        with locked(work_of(tmp_path / "broken-safetensors")):
            waiting = threads.submit(as_safetensors, str(broken))
            time.sleep(1)
        with pytest.raises(ModelError, match=r"broken\.gguf"):  # its own error, not that of the folder
            waiting.result(timeout=60)
        with locked(work_of(folder)):
            assert as_safetensors(str(path)) == str(folder)  # finished: nothing to wait for


def test_a_folder_of_the_users_is_left_alone(tmp_path: Path) -> None:
    path = write(llama(), tmp_path / "small.gguf")
    (tmp_path / "small-safetensors").mkdir()
    (tmp_path / "small-safetensors" / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="small-safetensors"):
        as_safetensors(str(path))
    assert (tmp_path / "small-safetensors" / "thesis.txt").read_text() == "mine"


def split(writer: gguf.GGUFWriter) -> None:
    writer.add_uint16("split.count", 3)


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)


def factor_alone(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_factor(4.0)


def older_factor(writer: gguf.GGUFWriter) -> None:
    writer.add_float32("llama.rope.scale_linear", 4.0)


def unknown_tensor(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_gate.weight", np.ones((32, 32), dtype=np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (split, "is one of 3 parts; merge them into one GGUF file"),
        (yarn, "scales its rotary positions by 'yarn', which transformers does not read from GGUF"),
        (factor_alone, "scales its rotary positions by 'linear', which transformers does not read from GGUF"),
        (older_factor, "scales its rotary positions by 'linear', which transformers does not read from GGUF"),
        (unknown_tensor, r"holds [\d,]+ weights, of which transformers puts [\d,]+ into a llama"),
    ],
)
def test_what_would_be_read_in_part_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    path = write(llama(), tmp_path / "small.gguf", change=change)
    with pytest.raises(ModelError, match=message):
        load_model(path)
    assert not (tmp_path / "small-safetensors").exists()


def test_a_file_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    smaller = llama()
    del smaller.model.layers[1].mlp.up_proj
    with pytest.raises(ModelError, match="lacks 1 weights of a llama, first model.layers.1.mlp.up_proj.weight"):
        load_model(write(smaller, tmp_path / "small.gguf"))


def test_damaged_files_and_unknown_architectures_are_refused(tmp_path: Path) -> None:
    path = write(llama(), tmp_path / "small.gguf")
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:2000])
    (tmp_path / "text.gguf").write_text("hello")
    gguf_of_nothing = gguf.GGUFWriter(tmp_path / "other.gguf", "whisper")
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(gguf_of_nothing, step)()
    for name in ("cut", "text", "other"):
        with pytest.raises(ModelError, match=f"cannot read the GGUF file .*{name}.gguf"):
            load_model(tmp_path / f"{name}.gguf")
        assert not (tmp_path / f"{name}-safetensors").exists()


def test_an_unknown_way_to_split_text_is_said(tmp_path: Path) -> None:
    def unknown_split(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "brand-new"

    path = write(llama(), tmp_path / "small.gguf", change=unknown_split)
    with pytest.warns(UserWarning, match="splits text by 'brand-new', which transformers does not know"):
        as_safetensors(str(path))


def test_a_text_that_begins_without_a_space_is_said(tmp_path: Path) -> None:
    """The tiny vocabulary is no SentencePiece one: what else is wrong with the file is refused or not."""

    def no_space(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.model"].value = "llama"
        writer.add_add_space_prefix(False)

    path = write(llama(), tmp_path / "small.gguf", change=no_space)
    with pytest.warns(UserWarning, match="puts no space before a text"), contextlib.suppress(ModelError):
        as_safetensors(str(path))


def test_chats_of_sentencepiece_are_said_to_differ(tmp_path: Path) -> None:
    def chats(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.model"].value = "llama"
        writer.add_chat_template("{{ messages[0].content }}")

    path = write(llama(), tmp_path / "small.gguf", change=chats)
    with pytest.warns(UserWarning, match="tokens of chats may differ"), contextlib.suppress(ModelError):
        as_safetensors(str(path))


def test_settings_that_transformers_does_not_read_are_said(tmp_path: Path) -> None:
    def capped(writer: gguf.GGUFWriter) -> None:
        writer.add_attn_logit_softcapping(5.5)
        writer.add_key_length(8)  # the size of a head, as it is

    with pytest.warns(UserWarning, match=r"small.gguf says llama.attn_logit_softcapping = 5.5, which transformers"):
        as_safetensors(str(write(llama(), tmp_path / "small.gguf", change=capped)))


def with_split(name: str) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = name
        writer.add_bos_token_id(tiny_tokenizer().all_special_ids[0])

    return change


@pytest.mark.parametrize(("name", "begins"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False)])
def test_texts_begin_with_bos_where_llama_cpp_says_so(name: str, begins: bool, tmp_path: Path) -> None:
    folder = converted(write(llama(), tmp_path / "small.gguf", change=with_split(name)))
    bos, ids = tiny_tokenizer().all_special_ids[0], load_model(folder).tokenizer("The capital").input_ids
    assert (ids[0] == bos) is begins

    def unless(writer: gguf.GGUFWriter) -> None:
        with_split(name)(writer)
        writer.add_add_bos_token(False)

    folder = converted(write(llama(), tmp_path / "without.gguf", change=unless))
    assert load_model(folder).tokenizer("The capital").input_ids[0] != bos


def test_words_of_a_llama_3_vocabulary_are_taken_whole(tmp_path: Path) -> None:
    """One of them has no merge that makes it; its own tokenizer (ignore_merges) finds it all the same."""

    def last_merge_lost(writer: gguf.GGUFWriter) -> None:
        with_split("llama-bpe")(writer)
        del writer.kv_data[0]["tokenizer.ggml.merges"].value[-1]

    words = tiny_tokenizer()
    assert isinstance(words, transformers.PreTrainedTokenizerFast)
    last = json.loads(words.backend_tokenizer.to_str())["model"]["merges"][-1]
    text = str(words.convert_tokens_to_string(["".join(last)]))
    folder = converted(write(llama(), tmp_path / "small.gguf", change=last_merge_lost))
    assert load_model(folder).tokenizer(text, add_special_tokens=False).input_ids == [
        words.convert_tokens_to_ids("".join(last))
    ]


@pytest.mark.parametrize("name", ["smollm", "starcoder", "gpt-2"])
def test_digits_are_split_off_first_where_llama_cpp_does(name: str, tmp_path: Path) -> None:
    """The pieces are those of llama.cpp's expressions: a digit, then GPT-2's."""
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    text = "In   1944, x2y\t\t7 or ²½ 10 000"
    parts = [text] if name == "gpt-2" else regex.findall(r"\p{N}|\P{N}+", text)
    expected = [piece for part in parts for piece in regex.findall(words, part)]
    folder = converted(write(llama(), tmp_path / "small.gguf", change=with_split(name)))
    splitter: Any = load_model(folder).tokenizer.backend_tokenizer.pre_tokenizer  # pyright: ignore
    assert [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)] == expected


def test_answers_stop_at_the_end_of_a_turn(tmp_path: Path) -> None:
    def with_turns(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[9] = "<|im_end|>"
        writer.kv_data[0]["tokenizer.ggml.token_type"].value[9] = gguf.TokenType.CONTROL

    [end] = stop_ids(load_model(converted(write(llama(), tmp_path / "plain.gguf"))))
    folder = converted(write(llama(), tmp_path / "turns.gguf", change=with_turns))
    assert stop_ids(load_model(folder)) == sorted([end, 7, 9])

    def unnamed(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.eos_token_id"]

    folder = converted(write(llama(), tmp_path / "unnamed.gguf", change=unnamed))
    assert json.loads((folder / "generation_config.json").read_text()).get("eos_token_id") is None


def test_gpt_oss_ends_messages_with_end_and_turns_with_return(tmp_path: Path) -> None:
    chosen = list[int]()

    def harmony(writer: gguf.GGUFWriter) -> None:
        tokens, merges = (writer.kv_data[0][f"tokenizer.ggml.{name}"].value for name in ("tokens", "merges"))
        chosen.extend(i for i in range(3, 200) if not any(tokens[i] in pair.split(" ") for pair in merges))
        for i, text in zip(chosen, ("<|end|>", "<|return|>", "<|call|>"), strict=False):
            tokens[i] = text

    [end] = stop_ids(load_model(converted(write(llama(), tmp_path / "plain.gguf"))))
    folder = converted(write(llama(), tmp_path / "harmony.gguf", change=harmony))
    assert stop_ids(load_model(folder)) == sorted([end, *chosen[1:3]])


def test_a_control_token_that_transformers_loses_is_refused(tmp_path: Path) -> None:
    def foreign(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[9] = "<｜User｜>"  # noqa: RUF001
        writer.kv_data[0]["tokenizer.ggml.token_type"].value[9] = gguf.TokenType.CONTROL

    with pytest.raises(ModelError, match="has 1 control tokens that transformers does not read from GGUF, first"):
        load_model(write(llama(), tmp_path / "small.gguf", change=foreign))


@pytest.mark.parametrize(("layers", "scalar"), [(4, 16), (46, 12)])
def test_the_scale_of_gemmas_scores_is_llama_cpps(layers: int, scalar: int, tmp_path: Path) -> None:
    """By the heads' size 16, but in models of 27B, which are known by their layers, by d_model / heads = 48 / 4."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Gemma2Config(
        vocab_size=len(tiny_tokenizer()), num_hidden_layers=layers, head_dim=16, sliding_window=64,
        initializer_range=0.2, max_position_embeddings=128, query_pre_attn_scalar=scalar, **sizes,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    path = write_gemma2(model, tmp_path / "small.gguf")
    read = load_model(converted(path)).model
    torch.testing.assert_close(logits(read), logits(model), atol=1e-5, rtol=0)


def test_a_whole_rotary_size_is_said_where_transformers_keeps_a_part(tmp_path: Path) -> None:
    model = llama(partial_rotary_factor=0.5)
    reader = gguf.GGUFReader(write(llama(), tmp_path / "small.gguf"))
    with pytest.warns(UserWarning, match=r"says llama.rope.dimension_count = 8, which transformers does not read"):
        warn_of_unread(reader, model, tmp_path / "small.gguf")


def write_gemma2(model: transformers.Gemma2ForCausalLM, path: Path) -> Path:
    writer, config = gguf.GGUFWriter(path, "gemma2"), model.config
    add_sizes(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA2, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            own = names.get_name(name.removesuffix(".weight"))
            writer.add_tensor(f"{own}.weight", weight.numpy() + (1 if name.endswith("norm.weight") else 0))
    return saved(writer, path)


def test_without_the_gguf_package_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(llama(), tmp_path / "small.gguf")
    monkeypatch.setattr(transformers.utils.import_utils, "is_gguf_available", lambda: False)
    with pytest.raises(ModelError, match=r"needs the package gguf: pip install 'attnbalance\[gguf\]'"):
        load_model(path)


def test_other_paths_are_left_as_they_are(tmp_path: Path) -> None:
    assert as_safetensors("owner/name.gguf") == "owner/name.gguf"
    assert as_safetensors(str(tmp_path)) == str(tmp_path)


def test_files_of_other_models_beside_it_are_not_read(tmp_path: Path) -> None:
    path = write(llama(), tmp_path / "small.gguf")
    tiny_tokenizer("metaspace").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "nobody/nothing"}')
    folder = converted(path)
    text = "In 1944, it's Paris."
    assert load_model(folder).tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids
    saved = "".join(file.read_text() for file in folder.glob("*.json"))
    assert tempfile.gettempdir() not in saved.replace(str(tmp_path), "")


def test_no_kernel_of_the_hub_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this setting, transformers looks for kernels for quantised weights, where their package is installed."""
    asked, load = list[object](), transformers.AutoModelForCausalLM.from_pretrained

    def recorded(*args: object, **kwargs: object) -> object:
        asked.append(kwargs["quantization_config"])
        return load(*args, **kwargs)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", recorded)
    converted(write(llama(), tmp_path / "tiny.gguf", quantised=True))
    assert [config.dequantize for config in asked] == [True]  # pyright: ignore[reportAttributeAccessIssue]
