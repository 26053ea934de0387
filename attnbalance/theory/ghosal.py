"""The theorems of Ghosal et al. (2024) on the attention-only transformer, each named by its number.

Each returns an `Outcome` for the instance it is given. Theorem 4.2 is the main text's A.5, 4.5 its A.11, 4.6 its A.10.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbalance.errors import DataError
from attnbalance.theory.attention_only import AttentionOnly
from attnbalance.theory.outcome import Outcome
from attnbalance.theory.triples import Examples, Triples

PAPER = "Ghosal et al. 2024, Theorem"


def memorising_model(world: Triples) -> AttentionOnly:
    """The model of A.2: W_KQ = 0, and W_V adds up phi(a) phi(s)^T + phi(a) phi(r)^T over all facts.

    Departure: a pair (a, s) or (a, r) that several facts have counts once. Counted as often as it occurs, which is how
    the sum is printed, a relation's frequent answer outweighs a rare one by more than the subject can add.
    """
    facts, values = (
        world.examples(),
        torch.zeros(len(world.answer), world.tokens, world.tokens, dtype=world.weight.dtype),
    )
    runs = torch.arange(len(values))[:, None]
    for token in (facts.subject, facts.query):
        values[runs, token, facts.answer] = 1.0
    return AttentionOnly(values.mT, torch.zeros_like(values))


def theorem_a1(world: Triples) -> Outcome:
    """A one-layer transformer can memorise every fact (A.1, by the construction of `memorising_model`).

    The proof takes it that the answers seen with s and those seen with r have only this fact's in common. That holds
    where each relation has answers of its own; it is an assumption here, since the statement leaves it out.
    """
    facts, model = world.examples(), memorising_model(world)
    logits = model.logits(facts)
    answer = facts.answer[..., None]
    others = logits.scatter(-1, answer, -math.inf).amax(-1)
    margin = logits.gather(-1, answer)[..., 0] - others
    return Outcome(
        f"{PAPER} A.1",
        "the constructed model gives every fact's answer by arg max",
        {"no other answer is seen with both the subject and the relation": _only_common_answer(world)},
        {"least margin in logits": float(margin.min()), "facts": float(margin.numel())},
        bool((margin > 0).all()),
    )


def theorem_a5(model: AttentionOnly, asked: Examples) -> Outcome:
    """Attention can hide what is stored (A.5): with W_V as it is, some W_KQ makes memorised facts come out wrong.

    The facts whose answer is not the one that W_V phi(q) favours (D_min) are asked at attention Att_s = d / (S + d),
    S being their salience and d how much more W_V phi(q) gives its favourite than the fact's answer; the proof's
    inequality Att_s S <= Att_q d comes to this. Section 4.2 prints Att_s <= d / S, which is too weak: it leaves out
    Att_q = 1 - Att_s. `hiding_attention` is the exact threshold, never below d / (S + d).

    That W_V with W_KQ = 0 gets every fact right is an assumption here: it does not follow from A.4, as A.5 has it.
    """
    favourite, hidden = _favourite(model, asked)
    needed = _sufficient(model, asked)
    wrong = ~model.correct(asked, needed)
    exact = hiding_attention(model, asked)
    return Outcome(
        f"{PAPER} A.5",
        "every fact whose answer the query's own values do not favour is wrong at Att_s = d / (S + d)",
        {
            "A.2: the values of each query are not all alike": bool((favourite > 0).any(-1).all()),
            "A.3: some fact's answer is not its query's favourite": bool(hidden.any(-1).all()),
            "entries of W_V are at least 0": bool((model.W_V >= 0).all()),
            "with W_KQ = 0 all facts are right": bool(_balanced(model, asked).all()),
        },
        {
            "facts": float(hidden.numel()),
            "hidden": float((wrong & hidden).sum()),
            "largest d / (S + d)": float(needed.where(hidden, torch.zeros_like(needed)).max()),
            "least room below the exact threshold": float((exact - needed)[hidden].min()) if hidden.any() else math.nan,
        },
        bool(hidden.any()) and bool((wrong | ~hidden).all()) and bool((exact >= needed - 1e-12)[hidden].all()),
    )


theorem_4_2 = theorem_a5


def hiding_attention(model: AttentionOnly, asked: Examples) -> Float[Tensor, "run example"]:
    """The attention on the subject below which arg max no longer gives the answer (exact form of section 4.2).

    For another token a' let g_q = phi(a')^T W_V phi(q) - phi(a)^T W_V phi(q) and g_s = S - phi(a')^T W_V phi(s). Where
    g_q > 0, a' wins for Att_s < g_q / (g_q + g_s), or at any attention if g_s <= 0; the threshold is the largest of
    these, in [0, 1]. 0 where the query favours no other token, so that no attention is low enough. A fact that is right
    at equal attention has its threshold below 1/2 and is right from there to 1/2.
    """
    on_subject, on_query = model.values(asked.subject), model.values(asked.query)
    answer = asked.answer[..., None]
    g_q, g_s = on_query - on_query.gather(-1, answer), on_subject.gather(-1, answer) - on_subject
    return torch.where(g_q > 0, g_q / (g_q + g_s.clamp(min=0)), 0.0).amax(-1)


def theorem_a11(model: AttentionOnly, fact: Examples, *, rate: float = 1.0, prompt: int | None = None) -> Outcome:
    """A step of W_KQ on one fact moves attention on ALL subjects before its prompt token, by the sign of s_rel - p_rel.

    `fact` is one example; the attention on every other subject is taken before and after, prompting with (s', p) where
    p is the fact's own prompt token unless `prompt` is another, which the step does not touch. The step is
    rate Att_s Att_p (s_rel - p_rel)(phi(s) - phi(p)) phi(p)^T: A.5's condensed form leaves out Att_s Att_p, and its
    proof adds t outside of the exponential, where it belongs inside. `measured` has the smallest and largest change.
    """
    if fact.subject.shape != (1, 1):
        raise DataError(f"a step on one fact of one run is asked for, got examples {tuple(fact.subject.shape)}")
    relevance, own = model.relevance(fact), int(fact.query)
    sign = float(relevance.subject - relevance.prompt)
    after = AttentionOnly(model.W_V, model.W_KQ + rate * model.gradient(fact).W_KQ)
    others = torch.tensor([[t for t in range(model.W_KQ.shape[-1]) if t not in (own, prompt, int(fact.subject))]])
    asked = Examples(
        others, torch.full_like(others, own if prompt is None else prompt), others, torch.ones(others.shape)
    )
    change = after.attention(asked) - model.attention(asked)
    return Outcome(
        f"{PAPER} A.11",
        "attention on every other subject changes by the sign of s_rel - p_rel",
        {
            "the others are asked with the fact's own prompt token": prompt in (None, own),
            "s_rel and p_rel differ": sign != 0,
            "the learning rate is above 0": rate > 0,
        },
        {"s_rel - p_rel": sign, "least change": float(change.min()), "largest change": float(change.max())},
        sign != 0 and bool((change * sign > 0).all()),
    )


theorem_4_5 = theorem_a11


def theorem_a6(x: Float[Tensor, " entry"], bound: float) -> Outcome:
    """Entries of softmax(x) lie between exp(-2C) / d and exp(2C) / (d - 1), where no entry of x exceeds C in size.

    The statement prints e^{2k} for the proof's e^{2C}.
    """
    found, d = x.softmax(-1), len(x)
    if d < 2:
        raise DataError(f"the bounds speak of at least 2 entries, got {d}")
    low, high = math.exp(-2 * bound) / d, math.exp(2 * bound) / (d - 1)
    return Outcome(
        f"{PAPER} A.6",
        "exp(-2C) / d <= softmax(x) <= exp(2C) / (d - 1)",
        {"no entry exceeds C in size": bool((x.abs() <= bound).all())},
        {"least": float(found.min()), "largest": float(found.max()), "low": low, "high": high},
        low <= float(found.min()) and float(found.max()) <= high,
    )


def theorem_a9(
    stream: Examples,
    token: int,
    tokens: int,
    rate: float,
    *,
    C_KQ: float | None = None,
    C_V: float | None = None,
    start: AttentionOnly | None = None,
) -> Outcome:
    """After one pass of SGD with batch size 1, W_V phi(t) holds at least so much of each of t's answers (A.9).

    phi(a_i)^T W_V phi(t) >= (n_i exp(-C_KQ) / 2 - n exp(C_V) / (|T| - 1)) rate for each answer a_i that is seen n_i
    times among the n examples with t. C_KQ / 2 and C_V / 2 bound the entries of W_KQ and W_V along the pass (A.7, A.8);
    where they are not given, twice the largest entries that occur are taken. `start` replaces the model of zeros.
    """
    model, largest_KQ, largest_V = _one_pass(stream, tokens, rate, start)
    C_KQ, C_V = 2 * largest_KQ if C_KQ is None else C_KQ, 2 * largest_V if C_V is None else C_V
    mine = (stream.subject == token) | (stream.query == token)
    seen, times = stream.answer[mine].unique(return_counts=True)
    bound = rate * (times * math.exp(-C_KQ) / 2 - int(mine.sum()) * math.exp(C_V) / (tokens - 1))
    slack = model.W_V[0, seen, token] - bound
    return Outcome(
        f"{PAPER} A.9",
        "each answer's value at the token is at least (n_i exp(-C_KQ) / 2 - n exp(C_V) / (|T| - 1)) rate",
        _pass_assumptions(start, largest_KQ, largest_V, C_KQ, C_V) | {"the token occurs": bool(mine.any())},
        {"C_KQ": C_KQ, "C_V": C_V, "examples with the token": float(mine.sum()), "least slack": float(slack.min())},
        bool((slack >= -1e-12).all()),
    )


def theorem_a10(
    stream: Examples, subject: int, query: int, tokens: int, rate: float, *, start: AttentionOnly | None = None
) -> Outcome:
    """Salience grows at least in proportion to how often a fact is seen (A.10): S(s, r, a) >= n c_1 rate, c_1 > 0.

    n counts the examples (s, r), n_tot those with s; c_1 = exp(-C_KQ) / 2 - (n_tot / n) exp(C_V) / (|T| - 1), above 0
    where s is seen less than n (|T| - 1) exp(-C_KQ) / (2 exp(C_V)) times. C_KQ / 2 and C_V / 2 are the largest entries
    that occur, as in A.9: the statement prints C_KQ and C_V as the bounds of the entries themselves, from which only
    twice these exponents follow. It is a lower bound; that a more frequent fact has the higher salience does not
    follow.
    """
    model, largest_KQ, largest_V = _one_pass(stream, tokens, rate, start)
    with_subject = stream.subject == subject
    mine = with_subject & (stream.query == query)
    n, n_tot = int(mine.sum()), int((with_subject | (stream.query == subject)).sum())
    if not n:
        raise DataError(f"the stream has no example of subject {subject} with query {query}")
    c_1 = math.exp(-2 * largest_KQ) / 2 - n_tot / n * math.exp(2 * largest_V) / (tokens - 1)
    answers = stream.answer[mine].unique()
    salience = float(model.W_V[0, answers[0], subject])
    return Outcome(
        f"{PAPER} A.10",
        "the fact's salience is at least n c_1 rate, with c_1 > 0",
        _pass_assumptions(start, largest_KQ, largest_V, 2 * largest_KQ, 2 * largest_V)
        | {"the subject is seen seldom enough that c_1 > 0": c_1 > 0, "the pair has one answer": len(answers) == 1},
        {"salience": salience, "bound": n * c_1 * rate, "c_1": c_1, "n": float(n), "n_tot": float(n_tot)},
        c_1 > 0 and salience >= n * c_1 * rate - 1e-12,
    )


theorem_4_6 = theorem_a10


def _balanced(model: AttentionOnly, asked: Examples) -> Bool[Tensor, "run example"]:
    """Whether each fact is right at equal attention, as with W_KQ = 0."""
    return model.correct(asked, torch.full_like(asked.weight, 0.5))


def _one_pass(
    stream: Examples, tokens: int, rate: float, start: AttentionOnly | None
) -> tuple[AttentionOnly, float, float]:
    """The model after one pass over a stream of one run, and the largest entries of W_KQ and W_V on the way."""
    if rate <= 0:
        raise DataError(f"the learning rate must be above 0, got {rate}")
    zeros = torch.zeros(1, tokens, tokens, dtype=torch.float64)
    model = AttentionOnly(*((zeros.clone().mT, zeros.clone()) if start is None else _copies(start)))
    largest_KQ, largest_V = float(model.W_KQ.abs().max()), float(model.W_V.abs().max())
    for one in _singly(stream):
        model.step(one, rate, rate)
        largest_KQ = max(largest_KQ, float(model.W_KQ.abs().max()))
        largest_V = max(largest_V, float(model.W_V.abs().max()))
    return model, largest_KQ, largest_V


def _copies(model: AttentionOnly) -> tuple[Tensor, Tensor]:
    return model.W_V.mT.clone().mT, model.W_KQ.clone()


def _singly(stream: Examples) -> Iterator[Examples]:
    for i in range(stream.subject.shape[1]):
        yield stream.take(torch.tensor([[i]]))


def _pass_assumptions(
    start: AttentionOnly | None, largest_KQ: float, largest_V: float, C_KQ: float, C_V: float
) -> dict[str, bool]:
    zero = start is None or not (start.W_V.any() or start.W_KQ.any())
    return {
        "training starts at 0": zero,
        "A.7: no entry of W_KQ exceeds C_KQ / 2": largest_KQ <= C_KQ / 2,
        "A.8: no entry of W_V exceeds C_V / 2": largest_V <= C_V / 2,
    }


def _only_common_answer(world: Triples) -> bool:
    """Whether for every fact no other answer is seen both with its subject and with its relation."""
    seen = memorising_model(world)
    facts = world.examples()
    both = (seen.values(facts.subject) * seen.values(facts.query)).sum(-1)
    return bool((both == 1).all())


def _favourite(model: AttentionOnly, asked: Examples) -> tuple[Tensor, Tensor]:
    """By how much W_V phi(q) favours another token over the answer (d), and whether it does."""
    on_query = model.values(asked.query)
    d = on_query.amax(-1) - on_query.gather(-1, asked.answer[..., None])[..., 0]
    return d, d > 0


def _sufficient(model: AttentionOnly, asked: Examples) -> Float[Tensor, "run example"]:
    """D / (S + d), less a little so that ties break."""
    d, _ = _favourite(model, asked)
    return d / (model.salience(asked) + d).clamp(min=1e-300) * (1 - 1e-9)
