"""Every figure and table of the three papers: which of them `reproduce` runs, and why the others are not run."""

from __future__ import annotations

from dataclasses import dataclass

GHOSAL, XU_CHEN, GOYAL = "Ghosal et al. 2024", "Xu & Chen 2025", "Goyal et al. 2024"
DRAWING = "a drawing of the idea, without numbers"
BY_EYE = "single examples, which no number judges; `attnbalance curve`'s report draws such rows for your models"
BY_HAND = "`attnbalance instruct` writes the checkpoints, `attnbalance context` measures them; there is no recipe"


@dataclass(frozen=True)
class Printed:
    """A figure, table or numbered statement that a paper prints.

    paper: the paper, as figures name it.
    number: as printed, such as "Figure 3(b)".
    shows: what it shows.
    figures: the names of the figures of `reproduce` that run it; none if it is not run.
    instead: why it is not run, or only in part, and what to use.
    """

    paper: str
    number: str
    shows: str
    figures: tuple[str, ...] = ()
    instead: str = ""


PRINTED = (
    Printed(GHOSAL, "Figure 1", "the mechanism", instead=DRAWING),
    Printed(GHOSAL, "Figure 2(a)", "which facts to finetune on", ("ghosal-fig2a",)),
    Printed(GHOSAL, "Figure 2(b)", "longer tails of popularity", ("ghosal-fig2b",)),
    Printed(GHOSAL, "Figure 2(c)", "longer pretraining", ("ghosal-fig2c",)),
    Printed(GHOSAL, "Tables 1 and 2", "PopQA-Controlled", ("ghosal-table2",)),
    Printed(GHOSAL, "Figure 3(a)", "subject attention by layer", ("ghosal-fig3",)),
    Printed(GHOSAL, "Figure 3(b)", "attention on one question", instead=BY_EYE),
    Printed(GHOSAL, "Figure 4", "accuracy by popularity of the tested facts", ("ghosal-fig4",)),
    Printed(GHOSAL, "Table 3", "MMLU history", ("ghosal-table3",)),
    Printed(GHOSAL, "Table 4", "hyperparameters", ("ghosal-table2",), "the grid of the paper scale"),
    Printed(
        GHOSAL,
        "Figure 5",
        "PopQA and EntityQuestions, by the share trained on",
        ("ghosal-fig5",),
        "EntityQuestions with popularity, or the base's loss, in a file of your own",
    ),
    Printed(GHOSAL, "Figure 6", "one layer", ("ghosal-fig6",)),
    Printed(GHOSAL, "Figure 7", "more attention maps", instead=BY_EYE),
    Printed(
        GHOSAL,
        "Theorems 4.2, 4.5, 4.6, A.1, A.5, A.6, A.9 to A.11",
        "statements about one layer",
        instead="functions of `attnbalance.theory.ghosal`, tested; tutorial 06 uses them",
    ),
    Printed(XU_CHEN, "Figure 1", "the architecture", instead=DRAWING),
    Printed(XU_CHEN, "Table 1", "which earlier work has what", instead="a comparison in words, nothing to measure"),
    Printed(XU_CHEN, "Figures 2 and 3", "accuracy by K, beta and M", ("xu-chen-fig2",)),
    Printed(XU_CHEN, "Figure 4", "GPT-2 on directors of PopQA", ("xu-chen-popqa",)),
    Printed(XU_CHEN, "Section 7.1, table", "Llama-3.2-1B on capitals of PopQA", ("xu-chen-capitals",)),
    Printed(XU_CHEN, "Table 3", "architectures", ("xu-chen-table3",)),
    Printed(
        XU_CHEN,
        "Figure 5",
        "attention after training",
        instead="one model's rows; tutorial 07 tests what they show (`xu_chen.proposition_1`)",
    ),
    Printed(XU_CHEN, "Figure 6", "overtraining", ("xu-chen-steps",)),
    Printed(
        XU_CHEN,
        "Theorem 2, Propositions 1 to 3",
        "statements about one layer",
        instead="functions of `attnbalance.theory.xu_chen`, tested; of the lemmas only Lemma 1",
    ),
    Printed(XU_CHEN, "Appendices K and L, tables", "examples of the data", instead="texts, nothing to measure"),
    Printed(
        GOYAL,
        "Figure 1",
        "the inversion (Llama2-7B: from 30% to 60%, then around 35%), and its cause",
        ("goyal-fig2",),
        "as Figure 2",
    ),
    Printed(GOYAL, "Figure 2", "context reliance along instruction tuning", ("goyal-fig2",)),
    Printed(GOYAL, "Figures 6 to 11", "the same, other models and data", ("goyal-fig2",), "with your model and files"),
    Printed(
        GOYAL,
        "Figure 3(a)",
        "no overfitting",
        ("goyal-fig2",),
        "drawn, not judged: a fifth of an epoch, one kind of conflict, no benchmarks",
    ),
    Printed(GOYAL, "Figure 3(b)", "attention to the context", ("goyal-fig3",)),
    Printed(GOYAL, "Figure 4(a), (b)", "data without the tested names; context-critical data", ("goyal-fig4",)),
    Printed(GOYAL, "Figure 4(c)", "SQuAD", ("goyal-fig4c",)),
    Printed(
        GOYAL,
        "Figure 5(a), (b)",
        "counterfactual data",
        ("goyal-fig5",),
        "a tenth of Alpaca added, on the conflicts that are given; not 1% of TULU, SQuAD or a second kind of conflict",
    ),
    Printed(GOYAL, "Figure 5(c)", "only queries and keys", ("goyal-fig5",), "without the benchmarks"),
    Printed(GOYAL, "Proposition 1, Theorem 1", "one layer", ("goyal-prop1", "goyal-thm1")),
    Printed(
        GOYAL,
        "Propositions 2 and 3, Lemmas 1 to 7",
        "statements about one layer",
        instead="functions of `attnbalance.theory.goyal`, tested; tutorial 07 uses them",
    ),
    Printed(
        GOYAL,
        "Figure 12",
        "prompts that ask for the context",
        instead=f"{BY_HAND}, here with `--template alpaca-context-only`",
    ),
    Printed(GOYAL, "Figure 13", "all weights trained", instead=f"{BY_HAND} (without `--lora-rank`)"),
    Printed(GOYAL, "Figures 14, 15", "answers of ChatGPT", instead="closed models"),
)
"""In the order of the papers."""
