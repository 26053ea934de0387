"""The theorems of Ghosal et al. (2024) on the attention-only transformer, each named by its number.

Each function checks its theorem on one instance and returns an `Outcome`. The main text's Theorems 4.2, 4.5 and 4.6 are
A.5, A.11 and A.10 of the appendix.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbalance.errors import DataError, DivergenceError
from attnbalance.theory.attention_only import AttentionOnly
from attnbalance.theory.outcome import Outcome
from attnbalance.theory.triples import Examples, Triples

PAPER = "Ghosal et al. 2024, Theorem"
LARGEST = 300.0
"""The largest bound of entries whose exponentials are meaningful floats."""


def memorising_model(world: Triples) -> AttentionOnly:
    """The model of A.2: W_KQ = 0, and W_V is the sum of phi(a) phi(s)^T + phi(a) phi(r)^T over all facts.

    Departure: a pair (a, s) or (a, r) shared by several facts counts once. The printed sum counts it once per fact;
    then a relation's frequent answer outweighs a rare one by more than the subject adds.
    """
    facts = world.examples()
    values = torch.zeros(len(world.answer), world.tokens, world.tokens, dtype=world.weight.dtype)
    runs = torch.arange(len(values))[:, None]
    for token in (facts.subject, facts.query):
        values[runs, token, facts.answer] = 1.0
    return AttentionOnly(values.mT, torch.zeros_like(values))


def theorem_a1(world: Triples) -> Outcome:
    """A one-layer transformer can memorise every fact (A.1, by the construction of `memorising_model`).

    The proof presumes that the answers seen with s and those seen with r share only this fact's answer. The
    construction needs this, so it is an assumption here. The theorem itself holds without it, by constructions that use
    W_KQ.
    """
    facts, model = world.examples(), memorising_model(world)
    logits, answer = model.logits(facts), facts.answer[..., None]
    margin = logits.gather(-1, answer)[..., 0] - logits.scatter(-1, answer, -math.inf).amax(-1)
    return Outcome(
        f"{PAPER} A.1",
        "the constructed model gives every fact's answer by arg max",
        {"no other answer is seen with both the subject and the relation": _only_common_answer(world)},
        {"least margin in logits": float(margin.min()), "facts": float(margin.numel())},
        bool((margin > 0).all()),
    )


def theorem_a5(model: AttentionOnly, asked: Examples) -> Outcome:
    """Attention can hide stored facts (A.5): for this W_V, some W_KQ makes memorised facts wrong.

    Facts whose answer is not the token that W_V phi(q) favours (D_min) are evaluated at attention Att_s = d / (S + d).
    S is their salience; d is the logit of the favoured token minus that of the fact's answer under W_V phi(q). The
    proof's inequality Att_s S <= Att_q d is equivalent. Section 4.2 prints Att_s <= d / S, which is too weak: it omits
    Att_q = 1 - Att_s. `hiding_attention` is the exact threshold, which is at least d / (S + d).

    To build an instance, take `memorising_model(world)` and `world.examples()`, and for each query add a little to
    W_V's entry of one of its answers. A query's answers A^r are those of the given facts, so A.3 is met. A.5 concludes
    that W_V with W_KQ = 0 gets every fact right; this does not follow from A.2 to A.4, so it is assumed here.
    """
    d = _favoured(model, asked)
    hidden, needed = d > 0, _sufficient(model, asked, d)
    wrong, exact, stored = ~model.correct(asked, needed), hiding_attention(model, asked), _balanced(model, asked)
    lowest = (exact - needed)[hidden]
    return Outcome(
        f"{PAPER} A.5",
        "facts are right with W_KQ = 0; facts that the query's values do not favour are wrong at Att_s = d / (S + d)",
        {
            "A.2: no query's values are alike for all of its answers": _uneven(model, asked),
            "entries of W_V are at least 0": bool((model.W_V >= 0).all()),
            "with W_KQ = 0 all facts are right": bool(stored.all()),
        },
        {
            "facts": float(hidden.numel()),
            "hidden": float((wrong & hidden).sum()),
            "largest d / (S + d)": float(needed.where(hidden, torch.zeros_like(needed)).max()),
            "least room below the exact threshold": float(lowest.min()) if len(lowest) else math.nan,
        },
        bool(stored.all() and hidden.any() and (wrong | ~hidden).all() and (lowest >= -1e-12).all()),
    )


theorem_4_2 = theorem_a5


def hiding_attention(model: AttentionOnly, asked: Examples) -> Float[Tensor, "run example"]:
    """The attention on the subject below which arg max does not give the answer (exact form of section 4.2).

    For another token a' let g_q = phi(a')^T W_V phi(q) - phi(a)^T W_V phi(q) and g_s = S - phi(a')^T W_V phi(s). If
    g_q > 0, a' wins for Att_s < g_q / (g_q + g_s), or at any attention if g_s <= 0; the threshold is the maximum over
    a', in [0, 1]. It is 0 if the query favours no other token. A fact that is right at equal attention has a threshold
    below 1/2 and is right at all attention from the threshold to 1/2.
    """
    on_subject, on_query = model.values(asked.subject), model.values(asked.query)
    answer = asked.answer[..., None]
    g_q, g_s = on_query - on_query.gather(-1, answer), on_subject.gather(-1, answer) - on_subject
    return torch.where(g_q > 0, g_q / (g_q + g_s.clamp(min=0)), 0.0).amax(-1)


def theorem_a11(model: AttentionOnly, fact: Examples, *, rate: float = 1.0, prompt: int | None = None) -> Outcome:
    """A step on W_KQ with one fact changes attention on ALL subjects with its prompt token, by sign(s_rel - p_rel).

    `fact` is one example. Every other token is tried as a subject s' with the fact's own prompt token, or with
    `prompt`, which the step does not change. The step is rate Att_s Att_p (s_rel - p_rel) (phi(s) - phi(p)) phi(p)^T:
    A.5's condensed form omits Att_s Att_p, and its proof adds t outside the exponential, where it belongs inside. The
    verdict uses the change of the log-odds of s' against the prompt token, which is nonzero even if attention is too
    near 0 or 1 to change in floating point; `measured` also has the change of attention. Raises `DataError` for more
    than one fact and for tokens that the model does not have.
    """
    known = model.W_KQ.shape[-1]
    if max(int(fact.subject.max()), int(fact.query.max()), int(fact.answer.max()), prompt or 0) >= known:
        raise DataError(f"the model has tokens 0 to {known - 1}; the fact or the prompt token is not one of them")
    if fact.subject.shape != (1, 1):
        raise DataError(f"expected one fact of one run, got examples of shape {tuple(fact.subject.shape)}")
    relevance, asked = model.relevance(fact), int(fact.query) if prompt is None else prompt
    step, sign = rate * model.gradient(fact).W_KQ, float(relevance.subject - relevance.prompt)
    tokens = torch.arange(model.W_KQ.shape[-1])[None]
    others = tokens[tokens != asked][None]
    change = step[0, others[0], asked] - step[0, asked, asked]
    prompts = Examples(others, torch.full_like(others, asked), others, torch.ones_like(others, dtype=step.dtype))
    moved = AttentionOnly(model.W_V, model.W_KQ + step).attention(prompts) - model.attention(prompts)
    return Outcome(
        f"{PAPER} A.11",
        "attention on every subject changes with the sign of s_rel - p_rel",
        {
            "the others are asked with the fact's own prompt token": asked == int(fact.query),
            "s_rel and p_rel differ": sign != 0,
            "the learning rate is above 0": rate > 0,
            "neither token has all attention, to a float": 0 < float(model.attention(fact)) < 1,
        },
        {
            "s_rel - p_rel": sign,
            "least change": float(moved.min()),
            "largest change": float(moved.max()),
            "least change of log-odds": float(change.min()),
            "largest change of log-odds": float(change.max()),
        },
        sign != 0 and bool((change * sign > 0).all()),
    )


theorem_4_5 = theorem_a11


def theorem_a6(x: Float[Tensor, " entry"], bound: float) -> Outcome:
    """Entries of softmax(x) lie in [exp(-2C) / d, exp(2C) / (d - 1)] if no entry of x exceeds C in absolute value.

    The statement prints e^{2k} for the proof's e^{2C}.
    """
    p, d = x.softmax(-1), len(x)
    if d < 2:
        raise DataError(f"the bounds need at least 2 entries, got {d}")
    low, high = math.exp(-2 * bound) / d, math.exp(2 * bound) / (d - 1)
    return Outcome(
        f"{PAPER} A.6",
        "exp(-2C) / d <= softmax(x) <= exp(2C) / (d - 1)",
        {"no entry exceeds C in size": bool((x.abs() <= bound).all())},
        {"least": float(p.min()), "largest": float(p.max()), "low": low, "high": high},
        low <= float(p.min()) and float(p.max()) <= high,
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
    """One pass of SGD with batch size 1 gives each answer of t a least logit in W_V phi(t) (A.9).

    phi(a_i)^T W_V phi(t) >= (n_i exp(-C_KQ) / 2 - n exp(C_V) / (|T| - 1)) rate for each answer a_i that occurs n_i
    times among the n examples with t. C_KQ / 2 and C_V / 2 bound the entries of W_KQ and W_V during the pass (A.7,
    A.8); by default C_KQ and C_V are twice the largest entries that occur. `start` replaces the zero model. Raises
    `DataError` if the token does not occur or the rate is not finite and > 0, and `DivergenceError` if entries grow too
    large for the bound.
    """
    mine = (stream.subject == token) | (stream.query == token)
    if not bool(mine.any()):
        raise DataError(f"the stream has no example with token {token}")
    model, C_KQ, C_V, met = _one_pass(stream, tokens, rate, start, C_KQ, C_V)
    seen, times = stream.answer[mine].unique(return_counts=True)
    bound = rate * (times * math.exp(-C_KQ) / 2 - int(mine.sum()) * math.exp(C_V) / (tokens - 1))
    slack = model.W_V[0, seen, token] - bound
    return Outcome(
        f"{PAPER} A.9",
        "each answer's value at the token is at least (n_i exp(-C_KQ) / 2 - n exp(C_V) / (|T| - 1)) rate",
        met,
        {"C_KQ": C_KQ, "C_V": C_V, "examples with the token": float(mine.sum()), "least slack": float(slack.min())},
        bool((slack >= -1e-12).all()),
    )


def theorem_a10(
    stream: Examples,
    subject: int,
    query: int,
    tokens: int,
    rate: float,
    *,
    C_KQ: float | None = None,
    C_V: float | None = None,
    start: AttentionOnly | None = None,
) -> Outcome:
    """Salience grows at least in proportion to how often a fact is seen (A.10): S(s, r, a) >= n c_1 rate, c_1 > 0.

    n counts the examples (s, r), n_tot those with s; c_1 = exp(-C_KQ) / 2 - (n_tot / n) exp(C_V) / (|T| - 1), which is
    positive if s occurs less than n (|T| - 1) exp(-C_KQ) / (2 exp(C_V)) times. C_KQ, C_V and `start` are as in A.9. The
    statement prints C_KQ and C_V as bounds of the entries themselves, from which only twice these exponents follow. The
    theorem is a lower bound; it does not imply that a more frequent fact has higher salience. Raises as `theorem_a9`.
    """
    with_subject = stream.subject == subject
    mine = with_subject & (stream.query == query)
    n, n_tot = int(mine.sum()), int((with_subject | (stream.query == subject)).sum())
    if not n:
        raise DataError(f"the stream has no example of subject {subject} with query {query}")
    model, C_KQ, C_V, met = _one_pass(stream, tokens, rate, start, C_KQ, C_V)
    c_1 = math.exp(-C_KQ) / 2 - n_tot / n * math.exp(C_V) / (tokens - 1)
    answers = stream.answer[mine].unique()
    salience = float(model.W_V[0, answers, subject].min())
    return Outcome(
        f"{PAPER} A.10",
        "the fact's salience is at least n c_1 rate, with c_1 > 0",
        met | {"the subject is seen seldom enough that c_1 > 0": c_1 > 0, "the pair has one answer": len(answers) == 1},
        {"salience": salience, "bound": n * c_1 * rate, "c_1": c_1, "n": float(n), "n_tot": float(n_tot)},
        c_1 > 0 and salience >= n * c_1 * rate - 1e-12,
    )


theorem_4_6 = theorem_a10


def _balanced(model: AttentionOnly, asked: Examples) -> Bool[Tensor, "run example"]:
    """Whether each fact is right at equal attention, which W_KQ = 0 gives."""
    return model.correct(asked, torch.full_like(asked.weight, 0.5))


def _one_pass(
    stream: Examples, tokens: int, rate: float, start: AttentionOnly | None, C_KQ: float | None, C_V: float | None
) -> tuple[AttentionOnly, float, float, dict[str, bool]]:
    """The model after one pass over a stream of one run, C_KQ and C_V, and which assumptions of A.9 are met."""
    if not 0 < rate < math.inf:
        raise DataError(f"the learning rate must be finite and > 0, got {rate}")
    zeros = torch.zeros(1, tokens, tokens, dtype=torch.float64)
    model = AttentionOnly(zeros, zeros.clone()) if start is None else start.copy()
    largest_KQ, largest_V = float(model.W_KQ.abs().max()), float(model.W_V.abs().max())
    for i in range(stream.subject.shape[1]):
        model.step(stream.take(torch.tensor([[i]])), rate, rate)
        largest_KQ = max(largest_KQ, float(model.W_KQ.abs().max()))
        largest_V = max(largest_V, float(model.W_V.abs().max()))
    C_KQ, C_V = 2 * largest_KQ if C_KQ is None else C_KQ, 2 * largest_V if C_V is None else C_V
    if not (largest := max(C_KQ, C_V)) < LARGEST:
        raise DivergenceError(f"one pass with learning rate {rate:g} takes entries to {largest / 2:.3g}; lower it")
    met = {
        "training starts at 0": start is None or not (start.W_V.any() or start.W_KQ.any()),
        "A.7: no entry of W_KQ exceeds C_KQ / 2": largest_KQ <= C_KQ / 2,
        "A.8: no entry of W_V exceeds C_V / 2": largest_V <= C_V / 2,
    }
    return model, C_KQ, C_V, met


def _only_common_answer(world: Triples) -> bool:
    """Whether, for every fact, no other answer occurs both with its subject and with its relation."""
    seen, facts = memorising_model(world), world.examples()
    return bool(((seen.values(facts.subject) * seen.values(facts.query)).sum(-1) == 1).all())


def _uneven(model: AttentionOnly, asked: Examples) -> bool:
    """Whether the values of every query differ between some of its facts' answers, in every run."""
    values = model.values(asked.query)
    for run, (queries, answers) in enumerate(zip(asked.query, asked.answer, strict=True)):
        for query in queries.unique():
            mine = (queries == query).nonzero()[:, 0]
            logits = values[run, mine[0], answers[mine]]
            if not logits.max() > logits.min():
                return False
    return True


def _favoured(model: AttentionOnly, asked: Examples) -> Float[Tensor, "run example"]:
    """d: by how much W_V phi(q) favours its largest token over the fact's answer."""
    on_query = model.values(asked.query)
    return on_query.amax(-1) - on_query.gather(-1, asked.answer[..., None])[..., 0]


def _sufficient(model: AttentionOnly, asked: Examples, d: Float[Tensor, "run example"]) -> Float[Tensor, "run example"]:
    """The attention d / (S + d), reduced slightly to break ties."""
    return (d / (model.salience(asked) + d).clamp(min=1e-300)).clamp(max=1.0) * (1 - 1e-9)
