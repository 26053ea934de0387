"""What reading attention rows costs, beside forward passes and beside other ways to get attention: one run, in turn.

Claims: without a shared prefix a reading takes less time than the backbone alone; 64 questions after the same five
answered ones take less than a tenth of the model's own passes; memory grows with the prompt's length, where
whole maps grow with its square; and a prefix pays from the number of saved tokens that we take. Ways:

    backbone        model.model(**batch) with SDPA
    model           model(**batch), as users call it
    row and logits  a pass with our attention function, as training needs it
    plain           our reading with nothing shared between prompts
    ours            our reading
    ours, half      our reading of the first half of the layers
    model, 16 bits  model(**batch) in bfloat16, which some processors have instructions for
    ours, 16 bits   our reading in bfloat16
    eager           model(**batch, output_attentions=True) with Hugging Face's eager attention
    TL patterns     run_with_cache of TransformerLens, patterns only
    TL all          run_with_cache of TransformerLens, everything
    nnsight rows    a trace of nnsight that saves the last token's rows, where nnsight is installed

Workloads: questions (zero-shot), the same after answered ones (few-shot), in mixed order, and random tokens. The ways
of others get batches in that order, ours make their own of the same size. "break-even" has groups of prompts that save
few tokens, read after their prefix or whole, whatever pays. Seconds are CPU time of the process (on
one thread that of a clock on an idle machine), medians over rounds in which all ways take turns; ratios are medians of
the rounds' own. Kept is the attention (of "TL all": everything) that a way keeps for its caller; peak is the memory
that it takes in a process of its own, what it keeps of all batches included (Linux). Rows must be equal.

    OMP_NUM_THREADS=1 python benchmarks/reading.py [--facts popqa:popQA.tsv] [--model FOLDER] [--json FILE]

`--model gpt2` is a random model of the size of GPT-2 small.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peak_memory import peak_mib
from reading_ways import Way, Workload, traced_by_nnsight, ways_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from attnbalance import Fact, HookedModel, Prompt, load_facts, load_model, make_prompts
from attnbalance.data.bpe_tokenizer import train_tokenizer
from attnbalance.data.synthetic import synthetic_facts
from attnbalance.data.tokens import Encoding, encode
from attnbalance.files.outputs import provenance
from attnbalance.models import shared_prefixes
from attnbalance.models.build_bridge import build_bridge
from attnbalance.models.forward import base_of, vocabulary_size
from attnbalance.models.rows import IMPLEMENTATION
from attnbalance.models.shared_prefixes import PASS_ON_CPU, groups_by_prefix, rows_by_batch, worth_in_reading

SHAPE = {"vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048}
RANDOM_MODELS: dict[str, dict[str, int]] = {"llama": SHAPE, "gpt2": {}}
TOKENS = 8_000  # of the random model's tokenizer, trained on the questions
BATCH, RANDOM = 16, 4  # prompts in a batch, and of random tokens
SAVED = (60, 120, 180, 240)  # tokens in a group
TOLERANCE = 1e-4  # of a probability in float32: eager attention sums in another order
MIB = 2**20


def questions(facts: Sequence[Fact], relations: int, of_each: int, shots: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts of the first relations, in mixed order, and the same after answered ones of their relation."""
    by_relation = defaultdict[str, list[Prompt]](list)
    for prompt in make_prompts(facts):
        by_relation[prompt.fact.relation].append(prompt)
    plain, after = list[Prompt](), list[Prompt]()
    for own in list(by_relation.values())[:relations]:
        header = "".join(f"{shot.with_answer}\n\n" for shot in own[:shots])
        for prompt in own[shots : shots + of_each]:
            spans = {role: (start + len(header), end + len(header)) for role, (start, end) in prompt.spans.items()}
            plain.append(prompt)
            after.append(replace(prompt, text=header + prompt.text, spans=spans))
    order = random.Random(0).sample(range(len(plain)), len(plain))
    return [plain[i] for i in order], [after[i] for i in order]


def random_tokens(length: int, vocabulary: int) -> list[Encoding]:
    """Prompts of random tokens, all of one length."""
    ids = torch.randint(vocabulary, (RANDOM, length), generator=torch.Generator().manual_seed(0)).tolist()
    prompt = Prompt("random tokens", {}, "0", Fact("s", "r", ("a",)))
    return [Encoding(prompt, tuple(each), ("",) * length, {}) for each in ids]


def check_equal(model: HookedModel, workload: Workload, eager: Any) -> None:
    """Raise `AssertionError` unless our rows are those of eager attention of each prompt alone."""
    base_of(model.model).set_attn_implementation(IMPLEMENTATION)
    for indices, batch, rows in rows_by_batch(model, workload.encodings, workload.batch_size):
        for i, row in zip(indices, batch.unpadded(rows), strict=True):
            ids = torch.tensor([workload.encodings[i].ids])
            maps = eager(input_ids=ids, output_attentions=True).attentions
            expected = torch.stack([layer[0, :, -1] for layer in maps])
            torch.testing.assert_close(row[..., : ids.shape[1]], expected, atol=TOLERANCE, rtol=0)


def measure(ways: dict[str, Way], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds in each round, after one that warms up, MiB kept, and peak MiB."""
    peaks = {name: peak_mib(way) for name, way in ways.items()}
    seconds, kept = {name: list[float]() for name in ways}, dict[str, float]()
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            start = time.process_time()
            tensors = way()
            if round_:
                seconds[name].append(time.process_time() - start)
            kept[name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / MIB
            del tensors
    return {name: {"seconds": seconds[name], "kept_mib": kept[name], "peak_mib": peaks[name]} for name in ways}


def break_even(model: HookedModel, rounds: int) -> list[dict[str, Any]]:
    """The time of prompts that are read after their prefix, relative to whole prompts, by the tokens that it saves."""
    draw, vocabulary = random.Random(0), vocabulary_size(model.model)
    prompt, kept = Prompt("random tokens", {}, "0", Fact("s", "r", ("a",))), []
    print(f"\nbreak-even\n{'prompts':>8} {'prefix':>7} {'saved tokens':>13} {'after prefix / whole':>21}")
    base_of(model.model).set_attn_implementation(IMPLEMENTATION)
    for (prompts, groups), saved in itertools.product(((4, 8), (8, 4), (16, 2)), SAVED):
        shared = round(saved / (prompts - 1))
        encodings = []
        for _ in range(groups):
            prefix = draw.choices(range(vocabulary), k=shared)
            for _ in range(prompts):
                ids = (*prefix, *draw.choices(range(vocabulary), k=draw.randint(5, 12)))
                encodings.append(Encoding(prompt, ids, ("",) * len(ids), {}))
        ways = dict[str, Way]()
        for name, worth in (("after", lambda cost, shared, prompts: shared * (prompts - 1)), ("whole", lambda *_: 0)):

            def way(worth: Callable[..., int] = worth, encodings: list[Encoding] = encodings) -> list[Tensor]:
                with mock.patch.object(shared_prefixes, "worth_in_reading", worth):
                    return [rows for _, _, rows in rows_by_batch(model, encodings, BATCH)]

            ways[name] = way
        _, middle, _ = ratio(measure(ways, rounds), "after", "whole")
        print(f"{prompts:>8} {shared:>7} {shared * (prompts - 1):>13} {middle:>21.2f}", flush=True)
        kept.append({"prompts": prompts, "prefix": shared, "saved": shared * (prompts - 1), "ratio": middle})
    return kept


def ratio(times: dict[str, dict[str, Any]], name: str, to: str) -> list[float]:
    """Lower quartile, median and upper quartile of the rounds' ratios of seconds."""
    ratios = [a / b for a, b in zip(times[name]["seconds"], times[to]["seconds"], strict=True)]
    return statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3


def show(workload: Workload, times: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Print the table of a workload, and return what is in it."""
    lengths = [len(encoding.ids) for encoding in workload.encodings]
    worth = partial(worth_in_reading, PASS_ON_CPU)
    groups = [(shared, len(group)) for shared, group in groups_by_prefix([e.ids for e in workload.encodings], worth)]
    about = f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens (mean {statistics.fmean(lengths):.0f})"
    print(f"\n{workload.name}: {about}, batches of {workload.batch_size}; prefixes (tokens, prompts) {groups}")
    print(
        f"{'way':>14} {'median s':>9} {'to backbone [quartiles]':>24} {'to model [quartiles]':>24} {'kept MiB':>9} "
        f"{'peak MiB':>9}"
    )
    rows = dict[str, Any]()
    for name, measured in times.items():
        ratios = {to: ratio(times, name, to) for to in ("backbone", "model")}
        columns = [f"{middle:.2f} [{low:.2f}, {high:.2f}]" for low, middle, high in ratios.values()]
        median = statistics.median(measured["seconds"])
        print(
            f"{name:>14} {median:>9.3f} {columns[0]:>24} {columns[1]:>24} {measured['kept_mib']:>9.2f} "
            f"{measured['peak_mib']:>9.1f}",
            flush=True,
        )
        rows[name] = measured | {f"to_{to}": value for to, value in ratios.items()}
    return {"workload": workload.name, "lengths": lengths, "batch_size": workload.batch_size, "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--facts", help="popqa:PATH or another source of facts; by default invented ones")
    parser.add_argument("--model", default="llama", help="a local folder or GGUF file; or a random llama or gpt2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=64, help="questions")
    parser.add_argument("--relations", type=int, default=1, help="of the questions, equally many of each")
    parser.add_argument("--shots", type=int, default=5, help="answered questions before the one asked")
    parser.add_argument("--lengths", default="128,512,1024", help="of random tokens")
    parser.add_argument("--workloads", default="zero-shot,few-shot,random,break-even", help="which of these")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    facts = (load_facts(options.facts) if options.facts else synthetic_facts(0, subjects=200)).facts
    zero, few = questions(facts, options.relations, options.prompts // options.relations, options.shots)
    if options.model in RANDOM_MODELS:
        torch.manual_seed(0)
        config = AutoConfig.for_model(options.model, **RANDOM_MODELS[options.model])
        tokenizer = train_tokenizer([prompt.text for prompt in make_prompts(facts)], TOKENS)
        model = load_model(AutoModelForCausalLM.from_config(config).eval(), tokenizer=tokenizer)
    else:
        model = load_model(options.model, device="cpu", dtype="float32")
    eager = copy.deepcopy(base_of(model.model))
    eager.set_attn_implementation("eager")
    bridge = build_bridge(model, copy.deepcopy(eager))
    rounded = load_model(copy.deepcopy(eager), tokenizer=model.tokenizer, dtype="bfloat16")
    lengths = [int(length) for length in options.lengths.split(",")]
    workloads = [
        Workload("zero-shot", encode(zero, model.tokenizer), BATCH),
        Workload("few-shot", encode(few, model.tokenizer), BATCH),
        *(Workload(f"random {n}", random_tokens(n, eager.config.vocab_size), RANDOM) for n in lengths),
    ]
    traced = traced_by_nnsight(eager)
    about = {name: eager.config.to_dict().get(name) for name in ("model_type", *SHAPE)}
    made = provenance() | {"threads": torch.get_num_threads(), "model": options.model, "config": about}
    print(json.dumps(made))
    results = []
    with torch.no_grad():
        for workload in workloads:
            if workload.name.split()[0] in options.workloads.split(","):
                check_equal(model, workload, eager)
                ways = ways_of(model, rounded, bridge, traced, workload)
                results.append(show(workload, measure(ways, options.rounds)))
        even = break_even(model, options.rounds) if "break-even" in options.workloads.split(",") else []
    if options.json:
        options.json.write_text(
            json.dumps(made | {"rounds": options.rounds, "workloads": results, "break_even": even}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
