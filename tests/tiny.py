"""Tiny random models and tokenizers, built from configurations alone: nothing is downloaded."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import Module
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from attnbalance import Fact, Prompt
from attnbalance.data.prompts import make_prompts

if TYPE_CHECKING:
    import pytest
    from peft import PeftModel

VOCABULARY = 420
POSITIONS = 96
WINDOW = 4
"""The sliding window of Mistral, Gemma 2, gpt_oss and GPT-Neo here: shorter than every prompt, so that it matters."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,  # far from uniform attention, so that a wrong mask or scale shows
}
GROUPED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
"""Latent attention (DeepSeek's)."""

BERT = SIZES | {"intermediate_size": 48, "max_position_embeddings": 64}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}

CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("GPT2", GPT2 | {"initializer_range": 0.3}),
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", GROUPED | {"sliding_window": WINDOW, "head_dim": 8}),
    "neox": ("GPTNeoX", SIZES | {"intermediate_size": 48}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 8}),
    "gemma2": ("Gemma2", GROUPED | {"sliding_window": WINDOW, "head_dim": 8, "attn_logit_softcapping": 2.0}),
    "gpt_oss": (
        "GptOss",
        GROUPED | {"sliding_window": WINDOW, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "gpt_neo": (
        "GPTNeo",
        {name: SIZES[name] for name in ("vocab_size", "hidden_size", "max_position_embeddings", "initializer_range")}
        | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    "falcon": ("Falcon", SIZES | {"alibi": False}),
    "bloom": (
        "Bloom",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    ),
}
INTERFACE = ("gpt2", "llama", "mistral", "neox", "qwen2", "qwen3", "gemma2")
"""The families that the package promises, all read beside their own kernel."""

SINKS = ("gpt_oss",)
OUTSIDE = ("gpt_neo", "falcon", "bloom")
"""Families that do not take attention functions and are read through eager attention."""

FAMILIES = INTERFACE + SINKS + OUTSIDE

ALL_KEYS = ("gpt2", "llama", "neox", "qwen2", "qwen3", *OUTSIDE)
"""Families whose cache keeps the keys and values of all tokens; those of the others have sliding windows."""


def tiny_config(family: str, **changes: object) -> PretrainedConfig:
    """The configuration of a tiny model of one family; token ids that lie outside the vocabulary are left out."""
    kind, settings = CONFIGS[family]
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return getattr(transformers, f"{kind}Config")(**(special | settings | changes))


@cache
def _original(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(tiny_config(family)).eval()


def tiny_model(family: str) -> PreTrainedModel:
    """A new copy of the tiny random model of one family, in float32, in evaluation mode, with SDPA where it has it."""
    return copy.deepcopy(_original(family))


def eager(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with transformers' own eager attention: the oracle for rows, logits and gradients."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    twin.config._attn_implementation = "eager"  # the line above only warns in families outside the interface
    return twin.eval()


def count_passes(model: PreTrainedModel) -> list[torch.Size]:
    """The shape [prompt, token] of what each pass reads from now on; not by a hook, with which no prefix is shared."""
    embed, shapes = model.get_input_embeddings(), list[torch.Size]()
    forward = embed.forward

    def counting(ids: torch.Tensor) -> torch.Tensor:
        shapes.append(ids.shape)
        return forward(ids)

    embed.forward = counting
    return shapes


def argmax_loop(model: PreTrainedModel, ids: tuple[int, ...], steps: int, stop: int | None = 1) -> list[int]:
    """The greedy continuation of one prompt: no cache, no padding, no batch."""
    given = list(ids)
    for _ in range(steps):
        with torch.no_grad():
            token = int(model(torch.tensor([given]), use_cache=False).logits[0, -1].argmax())
        if token == stop:
            break
        given.append(token)
    return given[len(ids) :]


def tiny_lora(base: Module, targets: list[str], seed: int = 1) -> PeftModel:
    """A LoRA adapter with random weights, as after training; peft begins with zeros, which change nothing."""
    from peft import LoraConfig, PeftModel, get_peft_model

    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))  # pyright: ignore[reportArgumentType]
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    assert isinstance(adapted, PeftModel)
    return adapted


FACTS = (
    Fact("Zürich", "country", ("Switzerland",), 900.0, "In what country is Zürich?"),
    Fact("Ode to Joy", "composer", ("Ludwig van Beethoven",), 800.0, "Who was the composer of Ode to Joy?"),
    Fact("Ada Lovelace", "occupation", ("mathematician",), 700.0, "What is Ada Lovelace's occupation?"),
    Fact("北京", "capital of", ("China",), 600.0, "What is 北京 the capital of?"),
    Fact("👩‍👩‍👧 Band", "genre", ("pop",), 500.0, "What genre is 👩‍👩‍👧 Band?"),
    Fact("القاهرة", "country", ("Egypt",), 400.0, "In what country is القاهرة?"),
    Fact("Cafe\u0301 Tacvba", "sport", ("none",), 300.0, "What sport does Cafe\u0301 Tacvba play?"),
    Fact("Rust", "author", ("Jonathan Nolan",), 200.0, "Rust, who is its author, tell me at once and without a doubt?"),
    Fact("Liechtenstein", "capital", ("Vaduz",), 100.0, "Name the capital of Liechtenstein"),
)
"""Subjects of several scripts, at the start, in the middle and at the end of questions of several lengths."""


def tiny_prompts(template: str = "qa") -> tuple[Prompt, ...]:
    """One prompt for each of FACTS."""
    return make_prompts(FACTS, template)


def _corpus() -> list[str]:
    return [f"Question: {fact.question} Answer: {fact.answer}" for fact in FACTS[:3] + FACTS[7:]] * 4


@cache
def _byte_level(ignore_merges: bool = False) -> str:
    """A byte-level BPE tokenizer trained on the questions: English words become whole tokens, other scripts bytes."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - 4,
            special_tokens=["<s>", "</s>", "<pad>", "<|user|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer.to_str()


def _framed(single: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])


def _wrapped(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


CHAT = (
    "{{ bos_token }}{% for message in messages %}<|user|>\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


class ZeroWidth(PreTrainedTokenizerFast):
    """Reports the start only of every whole word, as Llama 3's tokenizer did (huggingface/tokenizers issue 1553)."""

    def __call__(self, *args: object, **kwargs: object) -> transformers.BatchEncoding:
        encoding = super().__call__(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        texts = args[0]
        assert isinstance(texts, Sequence)
        for text, offsets in zip(texts, encoding["offset_mapping"], strict=True):
            for i, (start, end) in enumerate(offsets):
                if end - start > 1 and (end == len(text) or not text[end].isalpha()):
                    offsets[i] = (start + text[start].isspace(),) * 2
        return encoding


def count_texts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each text is tokenized from now on."""
    counts, tokenize = Counter[str](), PreTrainedTokenizerBase.__call__

    def counting(self: PreTrainedTokenizerBase, text: str | Sequence[str], *args: object, **options: object) -> object:
        counts.update([text] if isinstance(text, str) else text)
        return tokenize(self, text, *args, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", counting)
    return counts


def tiny_tokenizer(kind: str = "plain") -> PreTrainedTokenizerBase:
    """A small tokenizer; `kind` is one of TOKENIZERS."""
    tokenizer = Tokenizer.from_str(_byte_level(ignore_merges=kind == "ignore_merges"))
    special = {"eos_token": "</s>", "pad_token": "<pad>"}
    if kind == "no_pad":
        return _wrapped(tokenizer, eos_token="</s>")
    if kind == "no_special":
        return _wrapped(tokenizer)
    if kind in ("bos", "chat"):
        tokenizer.post_processor = _framed("<s> $A")
        special["bos_token"] = "<s>"
    if kind == "eos":
        tokenizer.post_processor = _framed("<s> $A </s>")
    if kind == "trimmed":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    if kind == "lower":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    if kind == "metaspace":
        return _metaspace()
    if kind == "zero_width":
        return ZeroWidth(tokenizer_object=tokenizer, **special)
    wrapped = _wrapped(tokenizer, **special)
    if kind == "chat":
        wrapped.chat_template = CHAT
    return wrapped


def _metaspace() -> PreTrainedTokenizerFast:
    """As Llama 2's: a "▁" before the text and for every space, no pre-tokenizer, unknown characters as bytes."""
    letters = [f"<0x{i:02X}>" for i in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    marked = [line.replace(" ", "▁") for line in _corpus()]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=.)(?=▁)"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 4, special_tokens=["<unk>", "<s>", "</s>", *letters], show_progress=False
    )
    tokenizer.train_from_iterator(["▁" + line for line in marked], trainer)
    state = Tokenizer.from_str(tokenizer.to_str())
    state.pre_tokenizer = None  # pyright: ignore[reportAttributeAccessIssue]
    state.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    state.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    state.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(state, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


TOKENIZERS = (
    "plain",
    "no_pad",
    "no_special",
    "bos",
    "eos",
    "chat",
    "trimmed",
    "lower",
    "metaspace",
    "ignore_merges",
    "zero_width",
)


def without_bytes(unknown: bool) -> PreTrainedTokenizerFast:
    """A SentencePiece-like tokenizer without fallback to bytes, with an unknown token or without."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if unknown else None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    texts = ["Question: What is the capital of France? Answer: Paris. Bern and Oslo are cities, of Spain too"] * 5
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], show_progress=False)  # pyright: ignore
    tokenizer.train_from_iterator(texts, trainer)
    names = {"unk_token": "<unk>"} if unknown else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **names)
