"""What an objective on attention rows costs a training step, relative to plain cross-entropy and eager attention.

Claims, for a backbone of 8 layers at 128 and 512 tokens: a step with a row objective takes at most 1.10 times the plain
step's time and 1.05 times its memory; at 512 tokens the same objective on eager attention takes at least 1.5 times the
time of ours; cross-entropy that needs the logits of labelled tokens alone takes less than plain. A step is one forward
and backward pass, as the trainer makes it, on right-padded questions with their answers. The unembedding has 21% of the
weights, as in SmolLM2-135M and Llama-3.2-1B. Times are medians over interleaved rounds of one process; ratios are to
the plain step. Memory is the largest resident size (Linux) of a process of its own that takes a few steps, less that of
one that only loads the model.

    python benchmarks/finetuning.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from attnbalance.files.outputs import provenance
from attnbalance.finetuning.examples import IGNORED, QUERY, SPAN, TARGET
from attnbalance.finetuning.labelled_logits import only_labelled
from attnbalance.finetuning.objectives.divergence import TOP
from attnbalance.finetuning.objectives.forward_pass import forward_pass
from attnbalance.finetuning.objectives.objective import Objective
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.models.rows import IMPLEMENTATION, register

EXAMPLES, ANSWER, LENGTHS, STEPS = 8, 4, (128, 512), 3
SHAPE = {"vocab_size": 6400, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
KINDS = ("plain", "labelled", "row", "recommended", "eager")
"""plain: cross-entropy by the model's own loss. labelled: cross-entropy on the logits of labelled tokens alone, as all
below. row: ce + barrier through our attention function. recommended: that objective, with precomputed targets. eager:
ce + barrier from eager attention's whole maps."""


def make_model() -> PreTrainedModel:
    """A random Llama of 8 layers."""
    register()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE)).train()


def make_batch(length: int) -> dict[str, torch.Tensor]:
    """Questions of two lengths with labelled answers, marked subjects and random targets."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(SHAPE["vocab_size"], (EXAMPLES, length), generator=generator)
    real = torch.full((EXAMPLES,), length)
    real[: EXAMPLES // 2] = 3 * length // 4
    position = torch.arange(length).expand(EXAMPLES, length)
    mask = position < real[:, None]
    labels = torch.where(mask & (position >= real[:, None] - ANSWER), ids, IGNORED)
    span = (position >= 4) & (position < 7)
    batch = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": position, "labels": labels}
    batch |= {QUERY: real - ANSWER - 1, f"{SPAN}subject": span}
    tokens, top = EXAMPLES * ANSWER, TOP
    base = torch.randn(tokens, SHAPE["vocab_size"], generator=generator).log_softmax(-1)[:, :top]
    [kl] = [term for term in parse_objective("recommended").terms if term.name == "kl"]
    batch[f"{TARGET}{kl.key}/token"] = base
    batch[f"{TARGET}{kl.key} ids/token"] = torch.arange(top).expand(tokens, top)
    return batch


def make_step(model: PreTrainedModel, kind: str, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """One training step of a kind, without the optimizer, which is the same for all."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    objective = parse_objective({"recommended": "recommended", "labelled": "ce"}.get(kind, "ce + 0.1*barrier"))

    def loss_of(output: CausalLMOutputWithPast, kernel: str, aim: Objective) -> torch.Tensor:
        forward = forward_pass(output, batch, kernel)
        sizes = {True: len(forward.labels), False: forward.examples}
        return torch.stack([aim.losses(term, forward).sum() / sizes[term.kind.by_token] for term in aim.terms]).sum()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        if kind == "plain":
            model.set_attn_implementation("sdpa")
            model(**inputs, labels=batch["labels"], use_cache=False).loss.backward()
            return
        model.set_attn_implementation("eager" if kind == "eager" else IMPLEMENTATION)
        options = {"output_attentions": True} if kind in ("row", "eager") else {}
        options |= {QUERY: batch[QUERY]} if kind == "row" else {}
        options |= only_labelled(model, batch["labels"])
        loss_of(
            model(**inputs, **options, use_cache=False), "eager" if kind == "eager" else "sdpa", objective
        ).backward()

    return step


def peak(kind: str, length: int) -> float:
    """The largest resident size in MiB of a process that loads the model and, unless `kind` is "none", takes steps."""
    code = [sys.executable, __file__, "--alone", kind, "--length", str(length)]
    return float(subprocess.check_output(code))


def alone(kind: str, length: int) -> None:
    """Print the largest resident size after a few steps of one kind."""
    model, batch = make_model(), make_batch(length)
    if kind != "none":
        step = make_step(model, kind, batch)
        for _ in range(STEPS):
            step()
    with open("/proc/self/status") as status:  # getrusage would count what the parent held when it started this process
        print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--alone", choices=["none", *KINDS])
    parser.add_argument("--length", type=int, default=LENGTHS[0])
    options = parser.parse_args()
    if options.alone:
        alone(options.alone, options.length)
        return
    model = make_model()
    print(json.dumps(provenance() | {"threads": torch.get_num_threads()}))
    print(f"{'tokens':>6} {'step':>12} {'median s':>9} {'time, ratio to plain':>22} {'MiB':>7} {'memory, ratio':>14}")
    for length in LENGTHS:
        steps = {kind: make_step(model, kind, make_batch(length)) for kind in KINDS}
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for round_ in range(options.rounds + 2):
            for kind, step in steps.items():
                start = time.perf_counter()
                step()
                if round_ >= 2:  # the first two warm up
                    seconds[kind].append(time.perf_counter() - start)
        memory = {kind: peak(kind, length) for kind in ("none", *KINDS)}
        used = {kind: memory[kind] - memory["none"] for kind in KINDS}
        for kind, values in seconds.items():
            ratios = [a / b for a, b in zip(values, seconds["plain"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            time_ratio = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
            memory_ratio = f"{used[kind] / used['plain']:.2f}"
            label = f"{length:>6} {kind:>12} {statistics.median(values):>9.4f}"
            print(f"{label} {time_ratio:>22} {used[kind]:>7.0f} {memory_ratio:>14}")


if __name__ == "__main__":
    main()
