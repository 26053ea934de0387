"""What loading costs when the LoRA checkpoints of a run share one loaded base, beside loading each anew.

Claim: along a run, loading takes less than 5% of the time of the passes over 2,000 prompts. Adapters of random weights
are put on the model: `shared` is `load_checkpoints`, `anew` is `load_model` for each. The first shared checkpoint pays
for the base and two self-checks. `passes` reads subject attention on the prompts; its time for 2,000 is in proportion
to their number, since they are asked in batches. One process on one thread; both ways in turn; readings must be equal.

    python benchmarks/trajectory.py MODEL FACTS [--facts 50] [--checkpoints 10]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from attnbalance import HookedModel, load_facts, load_model, make_prompts
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.files.outputs import provenance
from attnbalance.models.load_checkpoints import load_checkpoints
from attnbalance.readings.attention import read_subject_attention

PROMPTS = 2000
BAR = 0.05


def make_adapters(model: str, folder: Path, number: int) -> list[Path]:
    """LoRA adapters of rank 8 on the projections of attention, with small random weights."""
    adapted = get_peft_model(
        load_model(model, device="cpu").model,  # pyright: ignore[reportArgumentType]
        LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"),
    )
    for step in range(1, number + 1):
        torch.manual_seed(step)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.02 * torch.randn_like(parameter))
        adapted.save_pretrained(str(folder / f"checkpoint-{step}"))
    return [folder / f"checkpoint-{step}" for step in range(1, number + 1)]


def timed(models: Iterator[HookedModel], prompts: PromptSet) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """Seconds of loading and of passes for each model, and what was read."""
    loading, passes, read = list[float](), list[float](), list[torch.Tensor]()
    while True:
        start = time.perf_counter()
        model = next(models, None)
        if model is None:
            return loading, passes, read
        loaded = time.perf_counter()
        read.append(read_subject_attention(model, PromptSet.of(prompts, model.tokenizer)).values)
        del model
        loading.append(loaded - start)
        passes.append(time.perf_counter() - loaded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("source")
    parser.add_argument("--facts", type=int, default=50)
    parser.add_argument("--checkpoints", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    facts = load_facts(arguments.source, limit=arguments.facts)
    prompts = PromptSet.of(make_prompts(facts), load_model(arguments.model, device="cpu").tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(arguments.model, Path(folder), arguments.checkpoints)
        pairs = [(arguments.model, str(adapter)) for adapter in adapters]
        shared = timed(load_checkpoints(pairs, device="cpu"), prompts)
        anew = timed((load_model(model, adapter=path, device="cpu") for model, path in pairs), prompts)
    assert all(map(torch.equal, shared[2], anew[2])), "the two ways gave other readings"
    print(
        f"{len(pairs)} checkpoints, {len(prompts)} prompts; seconds in all (loading of the first, mean of the others)"
    )
    for name, (loading, passes, _) in (("shared", shared), ("anew", anew)):
        others = sum(loading[1:]) / max(1, len(loading) - 1)
        share = sum(loading) / (sum(passes) * PROMPTS / len(prompts))
        print(
            f"{name}: loading {sum(loading):.2f} ({loading[0]:.2f}, {others:.2f}), passes {sum(passes):.2f}; "
            f"loading / passes {sum(loading) / sum(passes):.1%}, at {PROMPTS:,} prompts {share:.1%} "
            f"({'under' if share < BAR else 'over'} {BAR:.0%})"
        )
    print(f"loading anew / shared {sum(anew[0]) / sum(shared[0]):.1f}")
    made = provenance()
    print(json.dumps({"threads": torch.get_num_threads(), "python": made["python"], "versions": made["versions"]}))


if __name__ == "__main__":
    main()
