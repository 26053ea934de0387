"""What reading one attention row costs, beside SDPA alone and beside eager attention with whole maps.

Claim: a row costs little time next to the model's own kernel, and memory that grows with the prompt's length, where
whole maps grow with its square. "read" ends at the last layer's row, as readings do; "row" also gives the logits, as
training needs them. Times are medians over interleaved rounds of one process; ratios are to SDPA alone.
Memory is what a forward pass keeps for the caller: counted from shapes, and for eager attention checked on the tensors.

    python benchmarks/rows.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attnbalance.data.batches import pad
from attnbalance.data.facts import Fact
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding
from attnbalance.files.outputs import provenance
from attnbalance.models.forward import inputs_of, rows_alone
from attnbalance.models.rows import IMPLEMENTATION, register

PROMPTS, LENGTHS = 8, (32, 128, 512)
SHAPE = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}


def passes(model: PreTrainedModel, length: int) -> dict[str, Callable[[], torch.Tensor | None]]:
    """The kinds of forward pass on one left-padded batch, each giving what it keeps of attention."""
    lengths = [length - length // 4] * (PROMPTS // 2) + [length] * (PROMPTS // 2)
    batch = pad([encoding(tuple(torch.randint(SHAPE["vocab_size"], (n,)).tolist())) for n in lengths])
    inputs, layers = inputs_of(model, batch, 1), range(SHAPE["num_hidden_layers"])

    def run(implementation: str, **extra: object) -> torch.Tensor | None:
        model.set_attn_implementation(implementation)
        found = model(**inputs, **extra).attentions
        return torch.stack(found, 1) if found else None

    def read() -> torch.Tensor:
        model.set_attn_implementation(IMPLEMENTATION)
        return rows_alone(model, batch, layers)

    return {
        "sdpa": lambda: run("sdpa"),
        "read": read,
        "row": lambda: run(IMPLEMENTATION, output_attentions=True, query_index=batch.query_index),
        "eager": lambda: run("eager", output_attentions=True),
    }


def encoding(ids: tuple[int, ...]) -> Encoding:
    """A prompt of these tokens."""
    return Encoding(Prompt("random tokens", {}, "0", Fact("s", "r", ("a",))), ids, ("",) * len(ids), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE)).eval()
    print(json.dumps(provenance() | {"threads": torch.get_num_threads()}))
    print(f"{'tokens':>6} {'pass':>6} {'median s':>9} {'ratio to sdpa [quartiles]':>26} {'kept MiB':>9}")
    for length in LENGTHS:
        kinds = passes(model, length)
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        kept = {}
        with torch.no_grad():
            for round_ in range(rounds + 2):
                for kind, forward in kinds.items():
                    start = time.perf_counter()
                    found = forward()
                    taken = time.perf_counter() - start
                    kept[kind] = 0 if found is None else found.numel() * found.element_size() / 2**20
                    if round_ >= 2:  # the first two warm up
                        seconds[kind].append(taken)
        for kind, values in seconds.items():
            ratios = [a / b for a, b in zip(values, seconds["sdpa"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            median = statistics.median(values)
            print(
                f"{length:>6} {kind:>6} {median:>9.4f} {f'{middle:.2f} [{low:.2f}, {high:.2f}]':>26} {kept[kind]:>9.2f}"
            )


if __name__ == "__main__":
    main()
