"""The statements of Xu & Chen (2025, arXiv 2508.00901), checked on trained models.

The statements are asymptotic, with constants that the paper leaves open. Each docstring gives the finite criterion used
instead. A batch of runs is one instance: a claim about a run must hold in every run, and a claim about the mean is
judged by Student's 95% interval over runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from attnbalance.statistics.intervals import seed_interval
from attnbalance.theory.acquisition import Acquired, Setting, acquire, doubling, extract
from attnbalance.theory.attention_mlp import AttentionMLP, rank_one_part
from attnbalance.theory.outcome import Outcome
from attnbalance.theory.sentences import CONTEXT, FORMAT, Samples

PAPER = "Xu & Chen 2025"
FILTERED = 0.2
"""The context token counts as filtered out if its attention is at most this; among three tokens it starts at 0.33."""
COMPARABLE = 0.2
"""Least attention on subject and phrase that counts as comparable (Lemma 16's proof uses 0.3)."""
LONGER = 2.5
"""The least length of the context token's embedding, relative to the others', for its score to fall first."""
GAP = 0.1
"""A loss counts as near-optimal if it ends at most this far above the entropy, in nats."""
LOW = 0.5
"""Finetuning counts as having failed to extract stored facts if accuracy is below this."""
WORSE = 0.05
"""One way of finetuning extracts as well as another if its accuracy is at most this much lower."""


def lemma_1(model: AttentionMLP, samples: Samples, *, size: float = 1e-5) -> Outcome:
    """The gradients of the loss by W_1 and Z (equations 22 and 23), against central differences.

    They are compared in one random direction for each matrix and run, with a step of `size` to both sides. The
    tolerance is 1e-6 of the gradient's length, a thousand times the cubic terms and rounding. The lemma needs, but does
    not state, that no neuron's input is exactly 0, where ReLU has no derivative; here no input may change sign between
    the ends.
    """
    gradients, generator = model.gradient(samples), torch.Generator().manual_seed(0)
    errors, kept = {}, True
    for name in ("W_1", "Z"):
        toward = torch.randn(getattr(model, name).shape, generator=generator, dtype=torch.float64).to(model.norm.dtype)
        gradient = getattr(gradients, name)
        ends = [replace(model, **{name: getattr(model, name) + sign * size * toward}) for sign in (1, -1)]
        slope = (ends[0].loss(samples) - ends[1].loss(samples)) / (2 * size)
        expected = (gradient * toward).flatten(1).sum(1)
        errors[name] = float(((slope - expected).abs() / gradient.flatten(1).norm(dim=1).clamp(min=1e-12)).max())
        kept &= bool((ends[0].active(samples) == ends[1].active(samples)).all())
    return Outcome(
        f"{PAPER}, Lemma 1",
        "dL/dw_ir = lambda (p_i - y_i) 1[w_ir u > 0] u and dL/dZ = X (diag(s) - s s^T) X^T (dL/du) x_L^T",
        {"no neuron at its kink": kept},
        errors,
        max(errors.values()) <= 1e-6,
    )


def theorem_2_1(acquired: Acquired) -> Outcome:
    """Pretraining ends near the entropy of the next token (equation 13): at most `GAP` nats above it, in every run.

    The paper's gap shrinks with the number of steps. Assumes that attention is trained if there is a context token to
    filter out. For the paper's condition on the width, assumes that in the model before the last two stages every
    sample has an active neuron for each of its targets: a target whose neurons are all inactive gets no gradient.
    """
    gaps = acquired.model.loss(acquired.samples) - acquired.sentences.entropy
    return Outcome(
        f"{PAPER}, Theorem 2, statement 1",
        f"the loss of pretraining ends at most {GAP} nats above the entropy",
        _trained(acquired) | {"every target has an active neuron": _reachable(acquired)},
        {"largest gap": float(gaps.max()), "smallest gap": float(gaps.min()), "entropy": acquired.sentences.entropy},
        bool((gaps <= GAP).all() and (gaps >= -1e-6).all()),
    )


def theorem_2_2(setting: Setting, seeds: Sequence[int], *, low: Setting) -> Outcome:
    """Accuracy on frequent pairs that were not finetuned is higher under `setting` than under `low` (equation 14).

    The paper bounds the error by a term that falls with K, with beta N and with 1 / M. Criterion: for two settings that
    differ only in these three, the difference in accuracy, each at its best step of finetuning (appendix J), is
    positive over seeds. All seeds together are one instance. Assumes that `setting` has K and beta no smaller and M no
    larger than `low`, and that they are not all equal. Both settings are tested on the pairs that neither finetunes,
    which depend on the seed. Trained attention is not assumed: with uniform attention the accuracies are lower but
    follow the same trends.
    """
    spared = max(setting.share, low.share)
    acquired = acquire(setting, seeds)
    other = acquired if replace(low, share=setting.share) == setting else acquire(low, seeds)
    high = best_accuracy(acquired, replace(setting, spared=spared))
    less = best_accuracy(other, replace(low, spared=spared))
    difference = seed_interval((high - less).tolist())
    order = (setting.multiplicity, setting.share, -setting.universe), (low.multiplicity, low.share, -low.universe)
    easier = order[0] != order[1] and all(a >= b for a, b in zip(*order, strict=True))
    return Outcome(
        f"{PAPER}, Theorem 2, statement 2",
        "accuracy on pairs not finetuned rises with K and beta and falls with M",
        {"more phrases covered": easier},
        {"accuracy": float(high.mean()), "below": float(less.mean()), "difference's low end": difference.low},
        difference.low > 0,
    )


def theorem_2_3(setting: Setting, seeds: Sequence[int]) -> Outcome:
    """With low coverage, finetuning fails to extract: accuracy on pairs not finetuned is below `LOW` over seeds.

    Coverage is the share of the universal phrases that the finetuned pairs use; low means at most a quarter. Low
    coverage alone does not suffice, so K = 1 is assumed too: the K phrases of a subject share the probability that a
    single phrase has, while the answer is trained with each of them. With K = 3 the answer is stored more strongly than
    each phrase, and extraction works although few phrases are covered.
    """
    acquired = acquire(setting, seeds)
    sentences, taken = acquired.sentences, max(1, round(setting.share * acquired.sentences.frequent.shape[1]))
    phrases = sentences.frequent.gather(1, sentences.order[:, :taken, None].expand(-1, -1, sentences.multiplicity))
    covered = [len(run.unique()) / setting.universe for run in phrases]
    accuracy = seed_interval(best_accuracy(acquired, setting).tolist())
    return Outcome(
        f"{PAPER}, Theorem 2, statement 3",
        f"accuracy on pairs not finetuned stays below {LOW} if finetuning covers few phrases",
        {"low coverage": max(covered) <= 0.25, "K = 1": sentences.multiplicity == 1},
        {"coverage": sum(covered) / len(covered), "accuracy": accuracy.mean, "accuracy's high end": accuracy.high},
        accuracy.high < LOW,
    )


def proposition_1(acquired: Acquired) -> Outcome:
    """After stage 1 attention filters out the context token and is comparable on subject and phrase (15 and 16).

    Criterion: on every (c, s, phrase) of every run, attention on c is at most `FILTERED`, and attention on s and on the
    phrase at least `COMPARABLE`. Attention on c in (c, s) is measured but not judged: there c does no harm, since it
    signals that a phrase comes next, and if K is a large part of M attention may even move to it.
    Assumes that attention is trained, that sentences contain c, and that c's embedding is at least `LONGER` times as
    long as the others' (section 3), which makes its score fall first: at 1.05 to 2.2 times some runs still attend to c.
    """
    share = acquired.stages[0].attention(acquired.samples)
    begun, whole = share[:, : acquired.sentences.pairs], share[:, acquired.sentences.pairs :]
    on_context, least = float(whole[..., 0].max()), float(whole[..., 1:].min())
    in_two = float(begun[..., 1].max())
    longer = bool((acquired.model.norm[:, CONTEXT] >= LONGER).all())
    assumptions = {"attention is trained": not acquired.model.uniform, "context is longer": longer}
    return Outcome(
        f"{PAPER}, Proposition 1",
        "after stage 1 attention is near 0 on the context, and comparable on subject and phrase",
        assumptions | {"context is written": acquired.sentences.context},
        {"most on context": on_context, "least on subject or phrase": least, "most on context of two tokens": in_two},
        on_context <= FILTERED and least >= COMPARABLE,
    )


def proposition_2(acquired: Acquired) -> Outcome:
    """The MLP learns phrases in stage 1 and answers in stage 2, and reaches the entropy in stage 3 (17 to 19).

    Criterion: after stage 1 the largest logit on every (c, s) is a phrase of s; after stage 2 the largest logit on
    every (c, s, phrase) is the answer; the loss ends at most `GAP` nats above the entropy. The assumptions are those of
    `theorem_2_1`.
    """
    pairs, samples = acquired.sentences.pairs, acquired.samples
    begun, whole = (Samples(*(x[:, part] for x in _parts(samples))) for part in (slice(pairs), slice(pairs, None)))
    phrase = acquired.stages[0].accuracy(begun).min()
    answer = acquired.stages[1].accuracy(whole).min()
    gap = (acquired.model.loss(samples) - acquired.sentences.entropy).max()
    return Outcome(
        f"{PAPER}, Proposition 2",
        "the MLP predicts phrases after stage 1, answers after stage 2, both to the entropy after stage 3",
        _trained(acquired) | {"every target has an active neuron": _reachable(acquired)},
        {"phrases right": float(phrase), "answers right": float(answer), "largest gap": float(gap)},
        bool(phrase == 1 and answer == 1 and gap <= GAP),
    )


def proposition_3(acquired: Acquired, *, share: float = 1.0) -> Outcome:
    """The first finetuning gradient of W_1 is nearly of rank 1, along the format token and the context token.

    Criterion: at least 0.95 of the squared length of the top singular vector over tokens lies on p and c, and the
    residual of the best rank-1 approximation is at most sqrt(M / n) of the gradient's length, for n finetuned pairs and
    M phrases (a guess at the paper's order of magnitude, with constant 1). Assumes n >= 4 M, the finite form of n much
    larger than M, and that sentences contain c: with three tokens the residual is larger. The paper states it for p
    alone. But pretraining never queried p, so p's attention is still uniform, and c, the longer embedding, gets the
    larger part. With fewer pairs each subject keeps a part of the gradient.
    """
    train = acquired.sentences.split(share).train
    universe = acquired.sentences.phrases
    gradient = acquired.model.gradient(train).W_1.flatten(2)
    alignment, residual = _rank_one(gradient)
    bound = (universe / len(train)) ** 0.5
    return Outcome(
        f"{PAPER}, Proposition 3",
        "the first gradient of finetuning is close to rank 1, along the tokens of every question",
        {
            "many more finetuned pairs than phrases": len(train) >= 4 * universe,
            "context is written": acquired.sentences.context,
        },
        {"least alignment": float(alignment.min()), "largest residual": float(residual.max()), "bound": bound},
        bool((alignment >= 0.95).all() and (residual <= bound).all()),
    )


def rank_one_matches(setting: Setting, seeds: Sequence[int]) -> Outcome:
    """Rank-1 finetuning extracts as well as full finetuning (Theorem 2 for low rank; appendix H).

    Criterion: over seeds, accuracy on frequent pairs not finetuned, each at its best step, is at most `WORSE` lower
    with rank-1 gradients than with full ones. Assumes K >= 2, so that facts can be extracted even at low coverage.
    """
    acquired = acquire(setting, seeds)
    full, low = (best_accuracy(acquired, replace(setting, rank_one=rank_one)) for rank_one in (False, True))
    difference = seed_interval((low - full).tolist())
    return Outcome(
        f"{PAPER}, Theorem 2, low rank",
        f"rank-1 finetuning extracts at most {WORSE} less than full finetuning",
        {"K >= 2": setting.multiplicity >= 2},
        {"full": float(full.mean()), "rank 1": float(low.mean()), "difference's low end": difference.low},
        difference.low >= -WORSE,
    )


def best_accuracy(acquired: Acquired, setting: Setting) -> Float[Tensor, " run"]:
    """Accuracy on the frequent pairs that are not finetuned, at each run's best step of finetuning."""
    return extract(acquired, setting, doubling(setting.steps)).values["frequent"].amax(0)


def _parts(samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
    return samples.tokens, samples.target, samples.weight


def _trained(acquired: Acquired) -> dict[str, bool]:
    return {"attention is trained, or no context": not (acquired.model.uniform and acquired.sentences.context)}


def _reachable(acquired: Acquired) -> bool:
    active = acquired.stages[0].active(acquired.samples).any(-1)
    return bool((active | (acquired.samples.target == 0)).all())


def _rank_one(gradient: Float[Tensor, "run token feature"]) -> tuple[Float[Tensor, " run"], Float[Tensor, " run"]]:
    """The share of the top singular vector on c and p, and the relative length of the rank-1 residual."""
    top = rank_one_part(gradient)
    squared = top.square().sum(2)
    alignment = squared[:, [CONTEXT, FORMAT]].sum(1) / squared.sum(1)
    return alignment, (gradient - top).flatten(1).norm(dim=1) / gradient.flatten(1).norm(dim=1)
