"""What `--mixed-precision bf16` saves of a training step on a CPU, and how far it moves the gradient.

A step is one forward and backward pass on random tokens, of all weights or of LoRA adapters, in float32 and under
autocast in bfloat16; the optimizer, which is the same for both, is left out. Times are CPU
times, medians over interleaved rounds of one process; ratios are bf16 / float32. The cosine is the gradients'.

    OMP_NUM_THREADS=1 python benchmarks/mixed_precision.py MODEL [--rounds 7] [--lengths 32 128 512]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from attnbalance.files.outputs import provenance
from attnbalance.finetuning.adapters import add_lora
from attnbalance.finetuning.parameters import select_weights

EXAMPLES, RANK = 4, 16


def gradient(model: nn.Module, ids: torch.Tensor, mixed: bool) -> torch.Tensor:
    """The gradient of all that is trained, after one forward and backward pass, as one vector."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=(32, 128, 512), help="tokens of each of the examples")
    options = parser.parse_args()
    cpuinfo = Path("/proc/cpuinfo")  # of Linux; on Arm the flags have other names
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    known = {"bf16": [name for name in flags if "bf16" in name]}
    print(json.dumps(provenance() | {"threads": torch.get_num_threads()} | known))
    print(f"{'trained':>8} {'tokens':>6} {'float32 s':>9} {'bf16 s':>7} {'ratio [quartiles]':>20} {'cosine':>7}")
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    model: nn.Module = base
    generator = torch.Generator().manual_seed(0)
    for trained in ("all", "LoRA"):
        if trained == "LoRA":
            model, _ = add_lora(base, select_weights(base, "all"), rank=RANK, alpha=2 * RANK)
        for length in options.lengths:
            ids = torch.randint(base.config.vocab_size, (EXAMPLES, length), generator=generator)
            seconds = dict[bool, list[float]]({False: [], True: []})
            gradients = {mixed: gradient(model, ids, mixed) for mixed in seconds}  # warms up
            for _ in range(options.rounds):
                for mixed, times in seconds.items():
                    start = time.process_time()
                    gradient(model, ids, mixed)
                    times.append(time.process_time() - start)
            low, middle, high = statistics.quantiles([b / a for a, b in zip(*seconds.values(), strict=True)], n=4)
            cosine = float(torch.cosine_similarity(*(each.double() for each in gradients.values()), dim=0))
            exact, mixed_ = (statistics.median(times) for times in seconds.values())
            ratio = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
            print(f"{trained:>8} {length:>6} {exact:>9.2f} {mixed_:>7.2f} {ratio:>20} {cosine:>7.4f}")


if __name__ == "__main__":
    main()
