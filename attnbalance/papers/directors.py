"""Xu & Chen (2025), Figure 4: a GPT-2 pretrained on PopQA's directors with K phrasings, asked about unseen films."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from attnbalance.data.bpe_tokenizer import train_tokenizer
from attnbalance.data.facts import Fact
from attnbalance.errors import DataError
from attnbalance.papers.figure import Cell, CellResult, Claim, Panel, PaperFigure, Series, by_seed, over_seeds
from attnbalance.papers.small_gpt2 import IGNORED, Training, train_gpt2
from attnbalance.papers.sources import Sources, facts_of
from attnbalance.papers.xu_chen_setting import gpt2_condition

PHRASES = (
    "{film} was directed by {name}",
    "{film} was helmed by {name}",
    "{film} was crafted by {name}",
    "{film} was shaped by {name}",
    "{film} hails from {name}",
    "{film} is a picture of {name}",
    "{film} is the work of {name}",
    "{film} was made by {name}",
    "{film} came from {name}",
    "{film} was brought to the screen by {name}",
)
QUESTION = "Question: Who was the director of {film}? Answer: {name}"
SHARES = (0.05, 0.1, 0.25, 0.5)
"""Shares of the films used for finetuning; the second half is always the test set and never used for finetuning."""

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "films": 40,
        "vocabulary": 300,
        "layers": 1,
        "d_model": 16,
        "heads": 2,
        "batch": 16,
        "steps": 2,
        "rate": 1e-3,
        "finetuning_steps": 2,
        "finetuning_rate": 1e-3,
    },
    "small": {
        "films": 250,
        "vocabulary": 2000,
        "layers": 2,
        "d_model": 64,
        "heads": 4,
        "batch": 64,
        "steps": 400,
        "rate": 1e-3,
        "finetuning_steps": 60,
        "finetuning_rate": 3e-4,
    },
    "paper": {
        "films": 1700,
        "vocabulary": 8000,
        "layers": 12,
        "d_model": 768,
        "heads": 12,
        "batch": 128,
        "steps": 10_000,
        "rate": 1e-4,
        "finetuning_steps": 300,
        "finetuning_rate": 1e-5,
    },
}
LEAST = 0.01
"""The smallest difference in exact match that counts: one percentage point."""
MULTIPLICITIES = {"tiny": (1, 3), "small": (1, 3, 5), "paper": (1, 2, 4, 6, 8, 10)}


def _cells(scale: str, seeds: Sequence[int], sources: Sources) -> list[Cell]:
    known = sources.of_facts()
    return [
        Cell(
            f"directors-{scale}-{multiplicity}-phrasings-seed-{seed}",
            {"seed": seed, "multiplicity": multiplicity} | known | SIZES[scale],
        )
        for multiplicity in MULTIPLICITIES[scale]
        for seed in seeds
    ]


def _run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Pretrain on statements about all films; then, for each share, finetune on questions about that share of them."""
    seed, films = settings["seed"], _films(settings)
    rng = random.Random(seed)  # noqa: S311
    stated = [
        (phrase.format(film=film.subject, name=film.answer), film.answer)
        for film in films
        for phrase in rng.sample(PHRASES, settings["multiplicity"])
    ]
    asked = [(QUESTION.format(film=film.subject, name=film.answer), film.answer) for film in films]
    tokenizer = train_tokenizer([text for text, _ in stated + asked], settings["vocabulary"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids, labels = (x.to(device) for x in _encoded(stated, tokenizer, whole=True))
    questions, answers = (x.to(device) for x in _encoded(asked, tokenizer))
    model = _gpt2(tokenizer, max(ids.shape[1], questions.shape[1]), settings).to(device)  # pyright: ignore
    pretraining = Training(settings["steps"], settings["rate"], 0.1, settings["batch"], seed)
    model = train_gpt2(model, ids, labels, torch.ones(len(ids), device=device), pretraining)
    names = _encoded(stated, tokenizer)[1].to(device)
    values: dict[str, Any] = {
        "stated": float(_exact(model, ids, names).double().mean()),
        "share": [],
        "exact match": [],
    }
    order = torch.randperm(len(films), generator=torch.Generator().manual_seed(seed)).to(device)
    test = order[len(films) // 2 :]
    tuning = Training(settings["finetuning_steps"], settings["finetuning_rate"], 0.01, settings["batch"], seed)
    for share in SHARES:
        train = order[: round(share * len(films))]
        ones = torch.ones(len(train), device=device)
        tuned = train_gpt2(model, questions[train], answers[train], ones, tuning)
        values["share"].append(share)
        values["exact match"].append(float(_exact(tuned, questions[test], answers[test]).double().mean()))
    return values


def _films(settings: Mapping[str, Any]) -> list[Fact]:
    """A random sample of films with distinct titles; raises `DataError` if there are too few, or the file changed."""
    films = {fact.subject: fact for fact in facts_of(settings, ["director"])}
    if len(films) < settings["films"]:
        raise DataError(
            f"expected at least {settings['films']} films with a director, {settings['facts']} has {len(films)}"
        )
    return random.Random(settings["seed"]).sample(list(films.values()), settings["films"])  # noqa: S311


def _encoded(
    texts: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, *, whole: bool = False
) -> tuple[Int[Tensor, "text position"], Int[Tensor, "text position"]]:
    """Ids of texts that end with their answers, and labels of answer and end token, or of the `whole` text."""
    end = int(tokenizer.convert_tokens_to_ids("</s>"))  # pyright: ignore[reportArgumentType]
    rows = [[*tokenizer(text)["input_ids"], end] for text, _ in texts]
    width = max(map(len, rows))
    ids, labels = torch.full((len(rows), width), end), torch.full((len(rows), width), IGNORED)
    for i, (row, (text, answer)) in enumerate(zip(rows, texts, strict=True)):
        begins = 1 if whole else len(tokenizer(text.removesuffix(f" {answer}"))["input_ids"])  # pyright: ignore
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, begins : len(row)] = torch.tensor(row[begins:])
    return ids, labels


@torch.no_grad()
def _exact(
    model: GPT2LMHeadModel, ids: Int[Tensor, "text position"], labels: Int[Tensor, "text position"]
) -> Bool[Tensor, " text"]:
    """Whether greedy decoding gives exactly the answer and the end token."""
    best = torch.cat([model(batch[:, :-1]).logits.argmax(-1) for batch in ids.split(256)])
    return ((best == labels[:, 1:]) | (labels[:, 1:] == IGNORED)).all(1)


def _gpt2(tokenizer: PreTrainedTokenizerFast, positions: int, settings: Mapping[str, Any]) -> GPT2LMHeadModel:
    torch.manual_seed(settings["seed"])
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=positions,
        n_layer=settings["layers"],
        n_embd=settings["d_model"],
        n_head=settings["heads"],
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,  # as `train_tokenizer` numbers them
    )
    return GPT2LMHeadModel(config)


def _matches(results: Sequence[CellResult], multiplicity: int) -> list[list[float]]:
    """Exact match on unseen films [seed, share]."""
    chosen = [result for result in results if result.settings["multiplicity"] == multiplicity]
    return [result.values["exact match"] for result in sorted(chosen, key=lambda result: result.settings["seed"])]


def _multiplicities(results: Sequence[CellResult]) -> list[int]:
    return sorted({result.settings["multiplicity"] for result in results})


def _panels(results: Sequence[CellResult]) -> list[Panel]:
    many = _multiplicities(results)
    by_share = [Series(f"K = {k}", SHARES, over_seeds(_matches(results, k))) for k in many]
    by_k = [
        Series(f"{share:.0%}", tuple(map(float, many)), tuple(over_seeds(_matches(results, k))[i] for k in many))
        for i, share in enumerate(SHARES)
    ]
    stated = [by_seed(results, lambda result: result.values["stated"], multiplicity=k) for k in many]
    stored = Series("statements", tuple(map(float, many)), over_seeds(list(zip(*stated, strict=True))))
    label = "exact match on unseen films"
    return [
        Panel("By finetuning size", "share of the films in finetuning", label, tuple(by_share)),
        Panel("By multiplicity", "phrasings of each fact, K", label, tuple(by_k)),
        Panel("Stored", "phrasings of each fact, K", "exact match on statements", (stored,)),
    ]


def _claims(results: Sequence[CellResult]) -> list[Claim]:
    many = _multiplicities(results)
    few, most = (_matches(results, k) for k in (many[0], many[-1]))
    measured, says = "difference in exact match", "unseen films are answered more often with"
    setting = (gpt2_condition(results[0].settings),)
    half, least = f"{SHARES[-1]:.0%}", f"{SHARES[0]:.0%}"
    return [
        Claim(
            f"{says} {many[-1]} phrasings than with {many[0]} ({half} of the films finetuned)",
            measured,
            tuple(b[-1] - a[-1] for a, b in zip(few, most, strict=True)),
            place="Figure 4",
            least=LEAST,
            setting=setting,
        ),
        Claim(
            f"{says} {half} of the films finetuned than with {least} ({many[-1]} phrasings)",
            measured,
            tuple(rates[-1] - rates[0] for rates in most),
            place="Figure 4",
            least=LEAST,
            setting=setting,
        ),
    ]


POPQA = PaperFigure(
    "xu-chen-popqa",
    "Xu & Chen 2025",
    "Figure 4",
    "Real facts: films and directors of PopQA. A model of GPT-2's architecture is pretrained from scratch on "
    "statements in K of ten phrasings, drawn for each film, and finetuned on questions about some films; accuracy is "
    "measured on the others. Small scale: 250 films, 2 layers, d_model 64; paper scale: 1,700 films and GPT-2's 12 "
    "layers. Departures from the paper: constant learning rates, and our own phrasings.",
    _cells,
    _run,
    _panels,
    _claims,
)
FIGURES = (POPQA,)
