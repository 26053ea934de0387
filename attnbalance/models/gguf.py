"""GGUF files: converted once into a folder of safetensors beside the file, refused where a part would be lost."""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbalance.errors import ModelError, OutputError
from attnbalance.files.outputs import as_folder
from attnbalance.files.result_folder import ResultFolder
from attnbalance.files.work import LockedError
from attnbalance.models.fingerprint import files_fingerprint

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp divides the rotary frequencies (Llama 3.1 and later)."""

GPT2_SPLITS = frozenset({"gpt-2", "gpt2", "phi-2", "olmo", "mpt"})
"""Ways to split text before byte-level BPE (`tokenizer.ggml.pre`) that are GPT-2's."""

DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Those that split off each digit first, and the rest as GPT-2 does."""

CONVERSION = 3
"""Counts the ways in which files were converted: a folder made in another way is refused."""

LLAMA3_SPLITS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"}
)
"""Ways to split text with which llama.cpp also takes words of the vocabulary whole, instead of merging them, and begins
texts with BOS unless the file says otherwise."""

ENDS_OF_TURNS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>"}
    | {"<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>"}
)
"""Tokens at which llama.cpp stops, also where a file does not name them as such. Without "<|endoftext|>", which a chat
model writes only after its turn."""

SCALED_BY_WIDTH = {"gemma2": 46, "gemma3_text": 62}
"""The layers of the models of 27B: their attention scores are divided by the root of d_model / heads, which no GGUF
file holds, and not of the heads' size, as in all others of their families (llama.cpp's rule)."""


def as_safetensors(path: str) -> str:
    """The folder of safetensors for a GGUF file, made beside it on first use; any other path or Hub id as it is.

    `models/small.Q4_1.gguf` becomes the folder `models/small.Q4_1-safetensors`: the weights that the file holds,
    dequantised to float32, its configuration, its tokenizer and its chat template. What llama.cpp adds to a file by
    its kind, and transformers does not, is added: BOS and whole words of Llama 3's tokenizer, the ends of turns, the
    scale of Gemma's attention scores.

    Raises `ModelError` for a file that cannot be read whole, and `OutputError` if the folder cannot be written, or was
    made from another file or in another way. Another process that converts the file at the same time is waited for.
    """
    file = Path(path)
    if file.suffix.lower() != ".gguf" or not file.is_file():
        return path
    folder = as_folder(file.with_name(f"{file.stem}-safetensors"))
    results = ResultFolder(folder, "gguf", {"sha256": files_fingerprint(file), "conversion": CONVERSION})
    waits = False
    while not results.is_finished():
        try:
            _convert(file, results)
        except LockedError as error:
            if not waits:
                warnings.warn(f"waiting for another process, which converts {file} ({error})", stacklevel=3)
            waits = True
            time.sleep(0.5)
        except OutputError:
            if not results.is_finished():  # by the other process
                raise
        else:
            warnings.warn(f"converted {file} once, in float32, to {folder}, which is loaded from now on", stacklevel=3)
    results.close()
    return str(folder)


def _convert(file: Path, results: ResultFolder) -> None:
    with results.working() as work:
        model, tokenizer = _read(file)
        with results.writing(work, answer=f"{file.name}, dequantised to float32", dropped={}) as new:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)


def _read(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 and the tokenizer of a GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.import_utils import is_gguf_available
    from transformers.utils.quantization_config import GgufConfig

    from attnbalance.models.load_base import LOAD_ERRORS, brief

    if not is_gguf_available():
        raise ModelError(f"reading {file} needs the package gguf: pip install 'attnbalance[gguf]'")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        _check_file(reader, file)
        with _alone(file) as folder:
            model, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore
                folder,
                gguf_file=file.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),  # else kernels, which are code, come from the Hub
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
            _check_control_tokens(reader, tokenizer, file)
            _add_implied(reader, model, tokenizer)
    except ModelError:
        raise
    except LOAD_ERRORS as error:
        raise ModelError(f"cannot read the GGUF file {file}: {brief(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{file} lacks {len(missing)} weights of a {model.config.model_type}, first {missing[0]}")
    _check_used(reader, model, file)
    warn_of_unread(reader, model, file)
    return _plain(model, _rope_factors(reader)), tokenizer


@contextmanager
def _alone(file: Path) -> Iterator[str]:
    """A folder that holds a link to the file alone: transformers prefers a tokenizer.json beside the file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).symlink_to(file.resolve())
        yield folder


def _check_file(reader: GGUFReader, file: Path) -> None:
    """Refuse what transformers would read only in part; warn of a tokenizer that it may not know."""
    keys = _metadata(reader)
    if keys.get("split.count", 1) > 1:
        raise ModelError(f"{file} is one of {keys['split.count']} parts; merge them into one GGUF file")
    architecture = keys.get("general.architecture")
    factors = (keys.get(f"{architecture}.rope.{name}", 1.0) for name in ("scaling.factor", "scale_linear"))
    unnamed = "none" if set(factors) <= {0.0, 1.0} else "linear"  # as llama.cpp reads a factor without a type
    scaling = keys.get(f"{architecture}.rope.scaling.type", unnamed)
    if scaling != "none":
        raise ModelError(
            f"{file} scales its rotary positions by {scaling!r}, which transformers does not read from GGUF; load the "
            "checkpoint that the file was made from"
        )
    gemma = str(architecture).startswith("gemma")  # its tokenizer in transformers puts no space before a text
    sentencepiece = keys.get("tokenizer.ggml.model") == "llama" and not gemma
    spaced = keys.get("tokenizer.ggml.add_space_prefix") is not False
    if sentencepiece and spaced and "tokenizer.chat_template" in keys:
        warnings.warn(
            f"{file} has a chat template, and its tokenizer may put a space after special tokens, where transformers' "
            "does not: tokens of chats may differ; pass the original tokenizer as `tokenizer`",
            stacklevel=4,
        )
    if sentencepiece and not spaced:
        warnings.warn(
            f"{file} puts no space before a text (add_space_prefix), but transformers' tokenizer does: the first token "
            "differs; pass the original tokenizer as `tokenizer`",
            stacklevel=4,
        )
    split = keys.get("tokenizer.ggml.pre")
    if keys.get("tokenizer.ggml.model") == "gpt2" and split not in _known_splits():
        warnings.warn(
            f"{file} splits text by {split!r}, which transformers does not know: text may be tokenized otherwise than "
            "in training; pass the original tokenizer as `tokenizer`",
            stacklevel=4,
        )


def _check_control_tokens(reader: GGUFReader, tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Refuse a tokenizer that cuts control tokens into pieces."""
    from gguf import TokenType

    keys, vocabulary = _metadata(reader), tokenizer.get_vocab()
    tokens = zip(keys.get("tokenizer.ggml.tokens", []), keys.get("tokenizer.ggml.token_type", []), strict=False)
    lost = [text for i, (text, kind) in enumerate(tokens) if kind == TokenType.CONTROL and vocabulary.get(text) != i]
    if lost:
        raise ModelError(
            f"{file} has {len(lost)} control tokens that transformers does not read from GGUF, first {lost[0]!r}; load "
            "the checkpoint that the file was made from"
        )


def _add_implied(reader: GGUFReader, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Change model and tokenizer by what llama.cpp knows of a file's kind, and transformers does not read."""
    from tokenizers.pre_tokenizers import Digits, Sequence

    keys, config = _metadata(reader), model.config
    split = keys.get("tokenizer.ggml.pre") if keys.get("tokenizer.ggml.model") == "gpt2" else None
    if split in LLAMA3_SPLITS:
        tokenizer.backend_tokenizer.model.ignore_merges = True  # pyright: ignore
    if split in LLAMA3_SPLITS | {"chameleon"} and "tokenizer.ggml.add_bos_token" not in keys:
        tokenizer.add_bos_token = True
    if split in DIGIT_SPLITS:
        backend = tokenizer.backend_tokenizer  # pyright: ignore
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])  # pyright: ignore
    named = [keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = {text: i for i, text in enumerate(keys["tokenizer.ggml.tokens"]) if text in ENDS_OF_TURNS}
    if {"<|end|>", "<|return|>", "<|call|>"} <= ends.keys():
        del ends["<|end|>"]  # gpt-oss ends its messages with it, not its turns
    stops = list(dict.fromkeys(int(token) for token in [*named, *ends.values()] if token is not None))
    # without any, transformers takes the id that the family's configuration has by default
    model.generation_config.eos_token_id = stops[0] if len(stops) == 1 else stops or None  # pyright: ignore
    if config.model_type in ("gemma2", "gemma3_text"):
        by_width = config.num_hidden_layers == SCALED_BY_WIDTH[config.model_type]
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if by_width else config.head_dim


def _known_splits() -> frozenset[str]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return GPT2_SPLITS | DIGIT_SPLITS | frozenset(GGUF_PRE_TOKENIZER_SPLITS)


def _check_used(reader: GGUFReader, model: PreTrainedModel, file: Path) -> None:
    """Refuse a file with more numbers than the model took, or fewer: transformers drops what it has no name for."""
    held = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name != ROPE_FACTORS)
    taken = sum(parameter.numel() for parameter in model.parameters())
    if held != taken:
        raise ModelError(
            f"{file} holds {held:,} weights, of which transformers puts {taken:,} into a {model.config.model_type}; "
            "load the checkpoint that the file was made from"
        )


def warn_of_unread(reader: GGUFReader, model: PreTrainedModel, file: Path) -> None:
    """Warn of settings whose numbers stand nowhere in the configuration: transformers reads those that it knows.

    Not of 0 and 1, which mostly say what a family does anyway.
    """
    keys, config = _metadata(reader), model.config
    head = getattr(config, "head_dim", None) or config.hidden_size / getattr(config, "num_attention_heads", 1)
    partial = (config.to_dict().get("rope_parameters") or {}).get("partial_rotary_factor")
    taken = [0.0, 1.0, head, *_numbers(config.to_dict())]
    only = {} if partial is None else {f"{keys['general.architecture']}.rope.dimension_count": [head * partial]}
    unread = [
        f"{name} = {value:.6g}"
        for name, value in keys.items()
        if name.startswith(f"{keys['general.architecture']}.") and isinstance(value, int | float)
        if not any(math.isclose(value, number, rel_tol=1e-6) for number in only.get(name, taken))
    ]
    if unread:
        warnings.warn(
            f"{file} says {', '.join(unread)}, which transformers does not read from GGUF: the model may compute "
            "otherwise than the file's; load the checkpoint that the file was made from",
            stacklevel=4,
        )


def _metadata(reader: GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _numbers(value: object) -> list[float]:
    """All numbers in nested settings."""
    if isinstance(value, dict | list | tuple):
        return [number for part in (value.values() if isinstance(value, dict) else value) for number in _numbers(part)]
    return [value] if isinstance(value, int | float) else []


def _rope_factors(reader: GGUFReader) -> list[float] | None:
    """What the rotary frequencies are divided by, one number a pair of dimensions; None for no such tensor."""
    factors = (tensor.data for tensor in reader.tensors if tensor.name == ROPE_FACTORS)
    return next((values.astype("float32").tolist() for values in factors), None)


def _plain(model: PreTrainedModel, rope_factors: list[float] | None) -> PreTrainedModel:
    """The model as one that was never quantised, which transformers will save, with its rotary factors."""
    import torch

    config = model.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    if rope_factors is not None:  # LongRoPE (Ding et al. 2024) with one list of factors is the same division
        factors = {"short_factor": rope_factors, "long_factor": rope_factors, "attention_factor": 1.0, "factor": 1.0}
        longest = {"original_max_position_embeddings": config.max_position_embeddings}
        config.rope_parameters = config.rope_parameters | {"rope_type": "longrope"} | factors | longest
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
