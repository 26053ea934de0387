"""How long static salience takes, in time and memory: `python benchmarks/salience.py [--facts 10000] [--repeats 3]`.

A GPT-2-small shape (12 layers of 12 heads, d_model 768, 50,257 tokens; random weights: time does not depend on them)
and facts of one-token answers. Measured side by side in one run: all heads' value salience from the weights, the same
with the MLPs, and, on a tenth of the facts, a naive way that makes fact x vocab for each head, scaled up. Memory is the
peak of the process over what the model takes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from attnbalance.data.facts import Fact
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding
from attnbalance.files.outputs import provenance
from attnbalance.models.bridge import BridgedModel, bridge_of
from attnbalance.models.hooked import hook
from attnbalance.readings.answer_tokens import AnswerTokens
from attnbalance.readings.salience import read_mlp_salience, read_value_salience

RELATIONS, ANSWERS = 10, 100


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return seconds


def some_contrasts(facts: int, vocabulary: int) -> AnswerTokens:
    """Facts with subjects of one random token, in ten relations of a hundred answers each."""
    draw = torch.Generator().manual_seed(0)
    subjects = torch.randint(vocabulary, (facts,), generator=draw).tolist()
    answers = torch.randint(ANSWERS, (facts,), generator=draw).tolist()
    encodings = tuple(
        Encoding(
            Prompt(f"s{i}", {}, str(i), Fact(f"s{i}", f"r{i % RELATIONS}", (f"a{answers[i]}",))),
            (subject,),
            ("s",),
            {"subject": (0,)},
        )
        for i, subject in enumerate(subjects)
    )
    candidates = {f"r{r}": tuple(range(r * ANSWERS, (r + 1) * ANSWERS)) for r in range(RELATIONS)}
    others = [tuple(k for k in range(ANSWERS) if k != answer) for answer in range(ANSWERS)]
    compared = tuple(others[answer] for answer in answers)
    return AnswerTokens(encodings, candidates, tuple(answers), compared, 0, None, None)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def naive(model: BridgedModel, answer_tokens: AnswerTokens) -> torch.Tensor:
    """Head by head: every vocabulary logit of every fact, then the contrast."""
    weights, gain = model.weights, model.norm("ln_final").gain
    ids = torch.tensor([one.ids[0] for one in answer_tokens.encodings])
    x = weights.W_E[ids] + model.mlp_output(0, weights.W_E[ids])
    found = []
    for layer in model.layers:
        for head in range(weights.W_V.shape[1]):
            out = model.value_input(layer, x) @ weights.W_V[layer, head] @ weights.W_O[layer, head]
            logits = ((out - out.mean(-1, keepdim=True)) * gain) @ weights.W_U
            mine = [
                logits[i, list(answer_tokens.candidates[p.fact.relation])] for i, p in enumerate(answer_tokens.prompts)
            ]
            found.append(
                torch.stack(
                    [
                        m[a] - m[list(o)].mean()
                        for m, a, o in zip(mine, answer_tokens.answer, answer_tokens.others, strict=True)
                    ]
                )
            )
    return torch.stack(found, dim=1)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = GPT2Config()
    hooked = hook(GPT2LMHeadModel(config).eval(), None, "GPT-2-small shape")  # pyright: ignore[reportArgumentType]
    model, before = bridge_of(hooked), peak()
    answer_tokens = some_contrasts(chosen.facts, config.vocab_size)
    few = answer_tokens.at(range(max(1, chosen.facts // 10)))

    values = timed(lambda: read_value_salience(model, answer_tokens), chosen.repeats)
    after = peak()
    both = timed(
        lambda: (read_value_salience(model, answer_tokens), read_mlp_salience(model, answer_tokens)), chosen.repeats
    )
    slow = timed(lambda: naive(model, few), 1)
    off = float((naive(model, few.at(range(20))) - read_value_salience(model, few).values[:20].flatten(1)).abs().max())

    versions = provenance()
    print(f"{versions['python']}, {versions['versions']}, {torch.get_num_threads()} threads")
    print(f"{chosen.facts:,} facts x {len(model.layers)} layers x {config.n_head} heads, median of {chosen.repeats}:")
    print(f"value salience: {statistics.median(values):.1f} s, {after - before:.2f} GiB above the model's own")
    print(f"value and MLP salience: {statistics.median(both):.1f} s")
    scaled = slow[0] * len(answer_tokens) / len(few)
    print(f"naive, fact x vocab for each head: {slow[0]:.1f} s for {len(few):,} facts, so some {scaled:.0f} s for all")
    print(f"ratio: {scaled / statistics.median(values):.0f}; largest difference on 20 facts: {off:.1e}")


if __name__ == "__main__":
    main()
