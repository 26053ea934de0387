"""What `read_change` costs beside plain forward passes: `python benchmarks/change.py [--prompts 64] [--repeats 3]`.

Two models of a Llama shape that differ in all parts of their weights (12 layers, d_model 512, 58 million parameters;
random weights: time does not depend on them), so that 16 hybrids are read. Measured alternately in one run: the whole
of `read_change`, and plain forward passes of the same prompts in the same batches through the model's own SDPA, with
the logits of the last token alone. `read_change` makes 20 passes: one for each hybrid, and two of each model for the
weights of rivals and for exchanged rows. Seconds are of the processor, so that other programs do not count.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnbalance.data.bpe_tokenizer import train_tokenizer
from attnbalance.data.facts import Fact
from attnbalance.data.prompts import make_prompts
from attnbalance.files.outputs import provenance
from attnbalance.models.hooked import HookedModel, hook
from attnbalance.readings.answer_tokens import AnswerTokens, make_answer_tokens
from attnbalance.readings.change import read_change

HYBRIDS, PASSES = 16, 20


def seconds(run: Callable[[], object]) -> float:
    """Seconds of the processor."""
    began = time.process_time()
    run()
    return time.process_time() - began


def two_models(texts: list[str]) -> tuple[HookedModel, HookedModel]:
    """A random model, and one that differs from it in every parameter."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(texts, 500)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
    )
    first = LlamaForCausalLM(config).eval()
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return hook(first, tokenizer, "before"), hook(second, tokenizer, "after")


@torch.no_grad()
def forward_passes(model: HookedModel, answer_tokens: AnswerTokens, batch_size: int) -> None:
    """As many plain forward passes as `read_change` makes."""
    for _ in range(PASSES):
        for _, batch in model.batches(answer_tokens.encodings, batch_size):
            mask = batch.attention_mask.long()
            model.model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False, logits_to_keep=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    answers = ("Paris", "Oslo", "Rome", "Lima")
    facts = [Fact(f"Country number {i}", "capital", (answers[i % 4],)) for i in range(chosen.prompts)]
    prompts = make_prompts(facts)
    before, after = two_models([f"{prompt.text} {prompt.fact.answer}" for prompt in prompts])
    answer_tokens = make_answer_tokens(prompts, before.tokenizer)
    forward_passes(before, answer_tokens, chosen.batch_size)  # to warm up
    measured = [
        (
            seconds(lambda: read_change(before, after, answer_tokens, batch_size=chosen.batch_size)),
            seconds(lambda: forward_passes(before, answer_tokens, chosen.batch_size)),
        )
        for _ in range(chosen.repeats)
    ]
    whole, passes = (statistics.median(column) for column in zip(*measured, strict=True))
    ratio = statistics.median(a / b for a, b in measured)
    versions, weights = provenance(), sum(p.numel() for p in before.model.parameters())
    print(f"{versions['python']}, {versions['versions']}, {torch.get_num_threads()} threads")
    length = len(answer_tokens.encodings[0].ids)
    print(f"{weights / 1e6:.0f} million parameters, {len(prompts)} prompts of some {length} tokens")
    print(f"read_change: {whole:.1f} s; {PASSES} forward passes: {passes:.1f} s (medians of {chosen.repeats})")
    print(f"ratio: {ratio:.2f}; to {HYBRIDS} passes, one a hybrid: {ratio * PASSES / HYBRIDS:.2f}")


if __name__ == "__main__":
    main()
