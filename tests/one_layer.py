"""The one-layer model of Ghosal et al. (2024), section 4, with a tokenizer of whole words."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attnbalance import Fact, Prompt
from attnbalance.data.prompts import make_prompts
from attnbalance.theory.attention_only import AttentionOnly

STATED = {
    "capital": {"Chad": "Paris", "Peru": "Rome", "Laos": "Oslo", "Oman": "Bern", "Cuba": "Kiev", "Mali": "Lima"},
    "sport": {"Chad": "golf", "Peru": "judo", "Laos": "polo", "Oman": "golf"},
}
"""The answer of each relation's subjects; golf twice, as answers may be shared."""
WORDS = ("?", *dict.fromkeys(w for r, facts in STATED.items() for w in (r, *facts, *facts.values())))
VOCABULARY = len(WORDS) + len(WORDS) % 2  # heads have an even size in Llama


def one_layer(seed: int = 0) -> LlamaForCausalLM:
    """Random W_Q, W_K, W_V and MLP; embeddings, W_O and the output are the identity; no norms and no positions.

    logits = x + W_V X softmax(X^T W_KQ x) + MLP, x being the last token: the paper's model and its residual stream.
    """
    torch.manual_seed(seed)
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": VOCABULARY, "intermediate_size": 12, "num_hidden_layers": 1}
    more = {"num_attention_heads": 1, "max_position_embeddings": 16, "initializer_range": 0.5}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **more, **special)).eval()
    layer = model.model.layers[0]
    model.model.norm = layer.input_layernorm = layer.post_attention_layernorm = torch.nn.Identity()
    model.model.rotary_emb.inv_freq.zero_()  # every position is turned by the angle 0
    with torch.no_grad():
        for identity in (model.model.embed_tokens, model.lm_head, layer.self_attn.o_proj):
            identity.weight.copy_(torch.eye(VOCABULARY))
    return model


def lab_llama(lab: AttentionOnly) -> LlamaForCausalLM:
    """The theory lab's model (its first run) as an ordinary Llama: no norms, positions, MLP, nor a residual stream.

    Tokens are embedded in the first half of the residual stream, attention writes to the second, and only that is read.
    """
    tokens = lab.W_V.shape[-1]
    sizes = {"vocab_size": tokens, "hidden_size": 2 * tokens, "intermediate_size": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, max_position_embeddings=16)).eval()
    layer = model.model.layers[0]
    model.model.norm = layer.input_layernorm = layer.post_attention_layernorm = torch.nn.Identity()
    model.model.rotary_emb.inv_freq.zero_()
    with torch.no_grad():
        for part in (model.model.embed_tokens, model.lm_head, *layer.self_attn.children(), layer.mlp.down_proj):
            part.weight.zero_()
        model.model.embed_tokens.weight[:, :tokens] = torch.eye(tokens)
        model.lm_head.weight[:, tokens:] = torch.eye(tokens)
        layer.self_attn.v_proj.weight[:tokens, :tokens] = lab.W_V[0].float()
        layer.self_attn.o_proj.weight[tokens:, :tokens] = torch.eye(tokens)
        layer.self_attn.k_proj.weight[:tokens, :tokens] = torch.eye(tokens)
        layer.self_attn.q_proj.weight[:tokens, :tokens] = lab.W_KQ[0].float() * (2 * tokens) ** 0.5
    return model


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of `WORDS`, its id the word's place."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


def word_prompts() -> tuple[Prompt, ...]:
    """(s, p) -> a: a prompt of two tokens for each fact of `STATED`."""
    facts = [
        Fact(subject, relation, (answer,), question=f"{subject} {relation}")
        for relation, known in STATED.items()
        for subject, answer in known.items()
    ]
    return make_prompts(facts, "plain")
