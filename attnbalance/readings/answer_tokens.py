"""Answer tokens: where a fact's answer first differs from its relation's other answers, and how far it is ahead there.

Two numbers compare the answer's token with those of the other answers, in logits (nats):

- The **logit difference** is the answer's logit minus the mean logit of the relation's other answers.
- The **margin** is the answer's logit minus the probability-weighted mean of the relation's other answers' logits. Each
  other answer is weighted by its probability among the others, averaged over two models (`weigh_by_probability`). To
  second order, the margin changes between them as much as the answer's log-odds against the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnbalance.arguments import expects
from attnbalance.data.facts import Fact
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.data.tokens import Encoding
from attnbalance.errors import BadRowsError
from attnbalance.readings.distinguishing_tokens import appended, blank_tokens, comparisons, shared_length, visible


@dataclass(frozen=True)
class AnswerTokens:
    """For each prompt, the first token at which its answer differs from others, and the tokens of those others.

    Attributes:
        encodings: The prompts' tokens, followed by those that all compared answers begin with (mostly none).
        candidates: Each relation's tokens: those of the prompts' answers and of the answers that these are compared
            with.
        answer: For each prompt, the index of its answer's token in its relation's candidates.
        others: For each prompt, the indices of the wrong answers' tokens in its relation's candidates. An answer is
            wrong if its fact shares no accepted answer with this one, ignoring case.
        ambiguous: Number of prompts for which some wrong answer is missing from `others`. Either its token is also that
            of the answer, or of another right one (the first answer of facts that all share an accepted one with this);
            or this answer begins with a token that shows no character, and the wrong one does not.
        tokenizer: The tokenizer of all these tokens.
        compared: All prompts whose answers were compared; those of parts (see `at`) are among them.
        weights: For each prompt, the weights of the wrong answers in their mean. None: equal weights, which give the
            logit difference; probabilities give the margin.
    """

    encodings: tuple[Encoding, ...]
    candidates: dict[str, tuple[int, ...]]
    answer: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    ambiguous: int
    tokenizer: PreTrainedTokenizerBase
    compared: PromptSet
    weights: tuple[tuple[float, ...], ...] | None = None

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.encodings)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts in order."""
        return tuple(encoding.prompt for encoding in self.encodings)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The answer's token for each prompt."""
        return tuple(self.candidates[p.fact.relation][i] for p, i in zip(self.prompts, self.answer, strict=True))

    def at(self, indices: Sequence[int]) -> AnswerTokens:
        """The answer tokens of some of the prompts, still compared with the same answers."""
        return replace(
            self,
            encodings=tuple(self.encodings[i] for i in indices),
            answer=tuple(self.answer[i] for i in indices),
            others=tuple(self.others[i] for i in indices),
            weights=None if self.weights is None else tuple(self.weights[i] for i in indices),
        )

    def difference(self, logits: Float[Tensor, "prompt vocab"]) -> Float[Tensor, " prompt"]:
        """Each prompt's logit difference, or its margin where `weights` are probabilities, on the CPU.

        A field called `logit_difference` that was made from such weights holds the margin.
        """
        differences = []
        for i, prompt in enumerate(self.prompts):
            candidates = logits[i, list(self.candidates[prompt.fact.relation])]
            mean = candidates[list(self.others[i])] @ self._weights_of(i).to(candidates)
            differences.append(candidates[self.answer[i]] - mean)
        return torch.stack(differences).cpu()

    def direction(self, W_U: Float[Tensor, "d_model vocab"]) -> Float[Tensor, "prompt d_model"]:
        """For each prompt, the direction d for which d · (input of the unembedding) is `difference`, without biases."""
        result = W_U.new_empty(len(self), len(W_U))
        for relation, candidates in self.candidates.items():
            indices = [i for i, prompt in enumerate(self.prompts) if prompt.fact.relation == relation]
            weights = torch.zeros(len(indices), len(candidates), dtype=W_U.dtype, device=W_U.device)
            for row, i in enumerate(indices):
                weights[row, list(self.others[i])] = -self._weights_of(i).to(weights)
                weights[row, self.answer[i]] += 1
            if indices:
                result[indices] = weights @ W_U[:, list(candidates)].T
        return result

    def _weights_of(self, i: int) -> Float[Tensor, " other"]:
        """The weights of a prompt's other answers; they sum to 1."""
        n = len(self.others[i])
        return torch.tensor((1 / n,) * n if self.weights is None else self.weights[i], dtype=torch.float32)


@expects(prompts=[Prompt], tokenizer=PreTrainedTokenizerBase, among=[Prompt])
def make_answer_tokens(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, *, among: Sequence[Prompt] = ()
) -> AnswerTokens:
    """Each prompt's first answer, compared with the first answers of the other facts of its relation.

    If all answers of a relation begin with the same tokens, these are appended to the prompt, and answers are compared
    at the first token at which any two of them differ. One token is compared for each fact, not the whole answer. Some
    tokenizers begin some answers with a bare space ("▁" before digits or capitals), which does not tell these answers
    apart: they are compared only with each other, at the next token. The relation's other answers have the bare space
    as one wrong answer. Raises `BadRowsError` for relations with one answer and for prompts whose end the tokenizer
    merges with the answer.

    prompts: the prompts.
    tokenizer: the model's tokenizer.
    among: the prompts whose answers each answer is compared with; by default, and for a relation that none of them has,
        `prompts`.
    """
    compared, count = PromptSet.of([*prompts, *among] if among else prompts, tokenizer), len(prompts)
    encodings, answers, bad = list(compared.encodings[:count]), compared.answers.ids, list[tuple[int, str]]()
    positions, answer, ambiguous = dict[str, dict[int, int]](), [0] * count, 0
    others: list[tuple[int, ...]] = [()] * count
    blank = blank_tokens(compared)
    for own, indices in comparisons(compared, count):
        shared = shared_length([answers[i] for i in indices])
        inseparable = _inseparable(compared, answers, indices, shared, tokenizer.eos_token_id)
        if shared is None or inseparable:
            bad += [(i, why) for i, why in inseparable if i < count] or [(i, inseparable[0][1]) for i in own]
            continue
        position = positions.setdefault(compared[own[0]].fact.relation, {})
        told = sorted(_compared(compared, own, indices, shared, blank))
        for _, _, token, _, _ in told:
            position.setdefault(token, len(position))
        for i, start, token, wrong, untold in told:
            answer[i] = position[token]
            others[i] = tuple(sorted(position.setdefault(other, len(position)) for other in wrong))
            ambiguous += untold
            encodings[i] = appended(encodings[i], answers[i][:start], tokenizer)
            if not wrong:
                how = "begins like one that is accepted" if untold else "is accepted"
                fact, every = compared[i].fact, "every compared answer" if among else "every answer"
                bad.append((i, f"{every} of relation {fact.relation!r} {how} for {fact.subject!r}"))
    if bad:
        with_others = "compare them with" if among else "add"
        raise BadRowsError(
            "facts have no other answer in their relation",
            sorted(bad),
            count,
            f"{with_others} facts of the relation with other answers, or drop and count these (`skip_bad=True`)",
        )
    candidates = {relation: tuple(position) for relation, position in positions.items()}
    return AnswerTokens(tuple(encodings), candidates, tuple(answer), tuple(others), ambiguous, tokenizer, compared)


def weigh_by_probability(
    answer_tokens: AnswerTokens, before: Float[Tensor, "prompt vocab"], after: Float[Tensor, "prompt vocab"]
) -> AnswerTokens:
    """The answer tokens with the weights of the margin between two models, from their logits `before` and `after`.

    The answer's log-odds are its logit minus the log-sum-exp of the others' logits. They change by the change of its
    logit minus a weighted mean of the others' changes. The weights are probabilities between those before and after; to
    second order they are the average of the two (trapezoidal rule). With equal weights, rivals that matter would be
    outnumbered by answers that neither model considers.
    """
    weights = []
    for i, (prompt, others) in enumerate(zip(answer_tokens.prompts, answer_tokens.others, strict=True)):
        tokens = [answer_tokens.candidates[prompt.fact.relation][k] for k in others]
        probabilities = (logits[i, tokens].cpu().softmax(-1) for logits in (before, after))
        weights.append(tuple((sum(probabilities, torch.zeros(len(tokens), dtype=torch.float32)) / 2).tolist()))
    return replace(answer_tokens, weights=tuple(weights))


def _compared(
    prompts: PromptSet, own: Sequence[int], indices: Sequence[int], shared: int, blank: Collection[int]
) -> Iterator[tuple[int, int, int, tuple[int, ...], bool]]:
    """How some answers of a relation are compared: prompt, index of its token, the token, rivals' tokens, ambiguity.

    Each answer of `own` is compared with those of `indices` whose first visible token stands at the same index, or with
    all at the index `shared` where none of those is a rival. The last is whether a wrong answer is left out.
    """
    end, answers = prompts.tokenizer.eos_token_id, prompts.answers.ids
    starts = _starts({i: answers[i] for i in indices}, shared, blank)
    asked = dict.fromkeys(own)
    for start in sorted({shared, *(starts[i] for i in own)}, reverse=True):
        alike = indices if start == shared else [i for i in indices if starts[i] == start]
        tokens: list[int] = [(*answers[i], end)[start] for i in alike]  # pyright: ignore[reportAssignmentType]
        here = [k for k, i in enumerate(alike) if i in asked and starts[i] == start]
        rivals = _others([prompts[i].fact for i in alike], tokens, here)
        for k, (wrong, untold) in zip(here, rivals, strict=True):
            i = alike[k]
            if not wrong and start != shared:
                starts[i] = shared
            else:
                yield i, start, tokens[k], wrong, bool(untold) or len(alike) < len(indices)


def _starts(answers: Mapping[int, tuple[int, ...]], shared: int, blank: Collection[int]) -> dict[int, int]:
    """At which of its tokens each answer of a relation is compared, by prompt: the first that shows a character.

    Where all answers with such a token at one index have the same one, or some have none, it is the token at `shared`.
    """
    starts = {i: visible(answer, shared, blank) for i, answer in answers.items()}
    tokens: dict[int, set[int]] = {}
    for i, start in starts.items():
        tokens.setdefault(start, set()).add(answers[i][start] if start < len(answers[i]) else -1)
    return {i: start if len(tokens[start]) > 1 else shared for i, start in starts.items()}


def _inseparable(
    prompts: Sequence[Prompt], answers: Sequence[tuple[int, ...]], indices: list[int], shared: int | None, end: object
) -> list[tuple[int, str]]:
    """The prompts of a relation whose answer has no token to tell it from the others, each with the reason."""
    if shared is None:
        fact = prompts[indices[0]].fact
        return [(i, f"relation {fact.relation!r} has the one answer {prompts[i].fact.answer!r}") for i in indices]
    if isinstance(end, int):
        return []
    reason = "is how other answers begin, and the tokenizer has no end of sequence to tell them apart"
    return [(i, f"{prompts[i].fact.answer!r} {reason}") for i in indices if len(answers[i]) == shared]


def _others(
    facts: Sequence[Fact], own: Sequence[int], asked: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], set[int]]]:
    """For some facts of a relation, the indices of wrong answers' tokens, and of those that right answers have too.

    `own` holds the index of each fact's token, `asked` which facts are meant; for which answers are right, see
    `AnswerTokens.ambiguous`.
    """
    accepted = [fact.folded_answers for fact in facts]
    tokens_of: dict[tuple[str, ...], set[int]] = {}  # several, if one answer is spelled in several ways
    for answers, index in zip(accepted, own, strict=True):
        tokens_of.setdefault(answers, set()).add(index)
    tokens = Counter(index for indices in tokens_of.values() for index in indices)
    firsts = Counter(answers[0] for answers in tokens_of)
    told = {}
    for answers, alike in _same_answers(tokens_of, dict.fromkeys(accepted[k] for k in asked)).items():
        own_tokens = Counter(index for each in alike for index in tokens_of[each])
        own_firsts = Counter(each[0] for each in alike)
        wrong = {index for index, count in tokens.items() if count > own_tokens[index]}
        right = set[int]().union(*(tokens_of[each] for each in alike if firsts[each[0]] == own_firsts[each[0]]))
        told[answers] = tuple(sorted(wrong - right)), wrong & right
    return (told[accepted[k]] for k in asked)


def _same_answers(
    accepted: Collection[tuple[str, ...]], asked: Collection[tuple[str, ...]]
) -> Mapping[tuple[str, ...], set[tuple[str, ...]]]:
    """For the answers that an asked fact accepts, all sets of accepted answers that share one of them."""
    holding: dict[str, set[tuple[str, ...]]] = {}
    for answers in accepted:
        for text in answers:
            holding.setdefault(text, set()).add(answers)
    return {answers: set.union(*(holding[text] for text in answers)) for answers in asked}
