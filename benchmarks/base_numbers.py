"""The memory that the base's numbers of an objective take: held in memory, and in files that are mapped into it.

Claim: with files, memory grows by at most `IN_MEMORY` and 5 kB a fact (of Python's objects), however large the numbers
are, and reading them in a shuffled order takes at most twice the time, once the system has read the files. The base is
a small random Llama, asked for made-up facts; the objective is kl(question), which keeps 1,024 predictions of each
label. Memory is what the process has allocated itself (RssAnon, Linux): pages of mapped files can be given back.

    python benchmarks/base_numbers.py [--facts 20000] [--in-memory-mib 64]
"""

from __future__ import annotations

import argparse
import gc
import random
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attnbalance.data.bpe_tokenizer import train_tokenizer
from attnbalance.data.prompts import make_prompts
from attnbalance.data.synthetic import synthetic_facts
from attnbalance.files.outputs import provenance
from attnbalance.finetuning.examples import make_examples
from attnbalance.finetuning.objectives import mapped
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.objectives.targets import add_targets
from attnbalance.models.hooked import hook

VOCABULARY, RELATIONS = 1500, 4
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def allocated() -> float:
    """The memory that this process has allocated, in MiB."""
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--facts", type=int, default=20_000)
    parser.add_argument("--in-memory-mib", type=int, default=64)
    options = parser.parse_args()
    facts = synthetic_facts(0, subjects=max(20, options.facts // RELATIONS), relations=RELATIONS)
    texts = [text for prompt in make_prompts(facts) for text in (prompt.text, prompt.fact.answer)]
    tokenizer = train_tokenizer(texts[:20_000], VOCABULARY)
    shape = {**SHAPE, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    base = hook(AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape)).eval(), tokenizer, "random")
    examples = make_examples(facts.facts, tokenizer)
    objective = parse_objective("kl(question)")
    add_targets(examples[:100], objective, base)  # warms up
    print(provenance())
    print(f"{'':>10} {'facts':>7} {'numbers, MiB':>13} {'memory, MiB':>12} {'made in s':>10} {'read in s':>10}")
    for name, limit in (("in files", options.in_memory_mib * 2**20), ("in memory", 2**62)):
        mapped.IN_MEMORY = limit
        before, began = allocated(), time.perf_counter()
        kept = add_targets(examples, objective, base)
        made, memory = time.perf_counter() - began, allocated() - before
        size = sum(tensor.nbytes for example in kept for tensor in example.targets.values()) / 2**20
        order = random.Random(0).sample(kept, len(kept))
        began = time.perf_counter()
        for example in order:
            for tensor in example.targets.values():
                tensor.sum()
        read = time.perf_counter() - began
        print(f"{name:>10} {len(kept):>7} {size:>13.0f} {memory:>12.0f} {made:>10.1f} {read:>10.2f}")
        del kept, order


if __name__ == "__main__":
    main()
