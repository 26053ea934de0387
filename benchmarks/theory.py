"""How fast the attention-only model's sparse step is: `python benchmarks/theory.py [--tokens 1200] [--repeats 15]`.

Gradient descent on (s, r) -> a in float64, on one thread. Compares our closed-form step on several runs at once with
two forms of dense autograd on one run at a time: whole matrices on one-hot embeddings, as the paper writes the model,
and rows of W_V looked up, as a careful user would write it (its gradients are still whole matrices). Checks first that
all give the same weights after three steps. Times are medians per run; ratios are to ours.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from attnbalance.files.outputs import provenance
from attnbalance.theory.attention_only import AttentionOnly, attention_only
from attnbalance.theory.triples import Examples, make_triples

BATCHES = (1, 32, 128, 512)
RATE = 0.5


def whole_matrices(W_V: Tensor, W_KQ: Tensor, subject: Tensor, query: Tensor) -> Tensor:
    X = one_hot(torch.stack([subject, query], dim=1), len(W_V)).to(W_V)
    attention = torch.einsum("njt,tn->nj", X, W_KQ @ X[:, 1].T).softmax(-1)
    return torch.einsum("nj,njt->nt", attention, X) @ W_V.T


def rows_looked_up(W_V: Tensor, W_KQ: Tensor, subject: Tensor, query: Tensor) -> Tensor:
    attention = torch.stack([W_KQ[subject, query], W_KQ[query, query]]).softmax(0)[..., None]
    return attention[0] * W_V.T[subject] + attention[1] * W_V.T[query]


def dense_steps(model: AttentionOnly, run: int, forward: Callable[..., Tensor]) -> tuple[list[Tensor], Callable]:
    weights = [x[run].clone().requires_grad_() for x in (model.W_V, model.W_KQ)]
    optimizer = torch.optim.SGD(weights, lr=RATE)

    def step(asked: Examples) -> None:
        loss = cross_entropy(forward(*weights, asked.subject[run], asked.query[run]), asked.answer[run])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return weights, step


def milliseconds(step: Callable[[], object], repeats: int) -> float:
    step()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--runs", type=int, default=4)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(chosen.runs)
    sizes = {"subjects": chosen.tokens - 10 - chosen.tokens // 6, "relations": 5, "answers": chosen.tokens // 6}
    world = make_triples(seeds, **sizes)
    print("versions:", provenance()["versions"])
    print(f"{world.tokens} tokens, {chosen.runs} runs in a batch, float64, one thread")
    print("batch  ours, ms a run  whole matrices, ratio  rows looked up, ratio  largest difference after 3 steps")
    for batch in BATCHES:
        drawn = world.drawn(batch, [torch.Generator().manual_seed(seed) for seed in seeds])
        model = attention_only(world.tokens, seeds)
        dense = [dense_steps(model, 0, forward) for forward in (whole_matrices, rows_looked_up)]
        for _ in range(3):
            model.step(drawn, RATE, RATE)
            for _, step in dense:
                step(drawn)
        difference = max(
            float((ours[0] - theirs).abs().max().detach())
            for weights, _ in dense
            for ours, theirs in zip((model.W_V, model.W_KQ), weights, strict=True)
        )
        ours = milliseconds(lambda: model.step(drawn, RATE, RATE), chosen.repeats) / chosen.runs  # noqa: B023
        ratios = [milliseconds(lambda: step(drawn), chosen.repeats) / ours for _, step in dense]  # noqa: B023
        print(f"{batch:5d}  {ours:14.2f}  {ratios[0]:21.1f}  {ratios[1]:21.1f}  {difference:32.1e}")


if __name__ == "__main__":
    main()
