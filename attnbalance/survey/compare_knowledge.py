"""`attnbalance knowledge`: which facts models know, in every form of asking, and how surely."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from attnbalance.arguments import expects
from attnbalance.comparison.caveats import caveats, unlike_tokens
from attnbalance.comparison.specs import MeasureSettings, ModelSpec, load_spec, refuse_changed, results_config
from attnbalance.comparison.usable_prompts import usable_prompts
from attnbalance.data.facts import FactSet
from attnbalance.data.forms import FORMS, in_form, too_few_subjects
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import Prompt
from attnbalance.data.usable_facts import without_bad
from attnbalance.errors import BadRowsError, DataError, ModelError
from attnbalance.files.outputs import as_folder, replacing, write_json, write_json_lines, write_text
from attnbalance.files.result_folder import ResultFolder
from attnbalance.models.load import load_limits
from attnbalance.readings.knowledge import Knowledge, knowledge
from attnbalance.readings.passes import DRAWS, chats, check_passes
from attnbalance.report.figures import save
from attnbalance.report.wording import left_out, listed
from attnbalance.survey import changes
from attnbalance.survey.figures import draw_knowledge
from attnbalance.survey.tables import answer, as_json, table

KIND = "knowledge"


@expects()
def compare_knowledge(
    specs: Sequence[ModelSpec],
    facts: FactSet,
    settings: MeasureSettings,
    out: str | Path,
    *,
    skip_bad: bool = False,
    command: str = "",
    progress: bool = False,
) -> str:
    """Ask each model about the facts in every form (see `knowledge`), write the folder `out`; returns the answer.

    Writes table.md and knowledge.json (by relation: right answers in each form, categories, the best form or null),
    knowledge.png, and facts.jsonl (each model's category and answers, fact by fact). With several models, table.md and
    knowledge.json also say what each further one kept and gained against the first. A killed run resumes.
    A folder that is finished with the same settings, facts and weights is left as it is. Raises `AttnBalanceError` for
    facts, models and folders that cannot be used.

    specs: the models.
    facts: what to ask about: at least five subjects of each relation.
    settings: how models are asked; `chat` must be False, since the chat is one of the forms.
    out: the folder to write.
    skip_bad: drop facts that cannot be asked, and relations with too few subjects, instead of raising.
    command: the command line that the results name.
    progress: show progress bars.
    """
    out = as_folder(out)
    if not specs or settings.chat:
        raise DataError(
            f"expected at least one LABEL=MODEL to ask, and no chat (it is one of the forms); got {len(specs)} models "
            f"and chat={settings.chat}"
        )
    results = ResultFolder(out, KIND, results_config(specs, facts, settings, skip_bad), command)
    if not results.is_finished():
        prompts, dropped = _usable(facts, specs, settings, skip_bad)
        with results.working() as work:
            measured, dtypes = dict[str, Knowledge](), dict[str, str]()
            for i, spec in enumerate(specs):
                measured[spec.label], dtypes[spec.label] = _ask(spec, prompts, settings, work / f"model {i}", progress)
            said = [*(answer(*pair) for pair in measured.items()), *changes.sentences(measured)]
            caveat = caveats(specs, prompts, dtypes, *_unlike_forms(specs, prompts, settings))
            dropped = {**facts.dropped, **dropped}
            words = " ".join(filter(None, [*said, caveat and f"{caveat}.", left_out(dropped)]))
            refuse_changed(results.config, specs, settings)
            with results.writing(work, answer=words, dropped=dropped) as folder:
                _write(measured, folder)
    return results.close()


def _usable(
    facts: FactSet, specs: Sequence[ModelSpec], settings: MeasureSettings, skip_bad: bool
) -> tuple[Sequence[Prompt], dict[str, int]]:
    """The prompts that every model can be asked in every form, and the number of facts dropped, by reason."""
    limits = [load_limits(spec.model, settings.tokenizer, settings.trust_remote_code, spec.adapter) for spec in specs]

    def make(kept: FactSet) -> Sequence[Prompt]:
        prompts, _ = usable_prompts(kept, specs, settings, skip_bad=False)
        relations = too_few_subjects(kept)
        bad = [(i, f"relation {fact.relation!r}") for i, fact in enumerate(kept) if fact.relation in relations]
        if bad:
            raise BadRowsError(
                "facts are of a relation with fewer than five subjects, too few for few-shot",
                bad,
                len(kept),
                "add facts, or drop and count them (`skip_bad=True`)",
            )
        for tokenizer, positions in limits:
            check_passes(prompts, tokenizer, positions, settings.seed)
        return prompts

    return without_bad(facts, make, skip_bad)


def _unlike_forms(specs: Sequence[ModelSpec], prompts: Sequence[Prompt], settings: MeasureSettings) -> list[str]:
    """Which models are asked something else than the first one, in words: by their tokenizers, and in chats."""
    if len(specs) < 2:
        return []
    limits = [load_limits(spec.model, settings.tokenizer, settings.trust_remote_code, spec.adapter) for spec in specs]
    asked = [prompt for form in FORMS for prompt in in_form(form, prompts, DRAWS * settings.seed)]
    first, *others = [_chat_texts(prompts, tokenizer) for tokenizer, _ in limits]
    unlike = [spec.label for spec, texts in zip(specs[1:], others, strict=True) if texts != first]
    verb = "have" if len(unlike) > 1 else "has"
    template = (
        f"{listed(unlike)} {verb} another chat template than {specs[0].label}, or one of them has none, which changes "
        "what is asked in chats"
    )
    return [unlike_tokens(specs, asked, settings), template if unlike else ""]


def _chat_texts(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of chats about some prompts; none without a template that takes them."""
    try:
        return [prompt.text for prompt in chats(prompts, tokenizer)]
    except ModelError:
        return []


def _ask(
    spec: ModelSpec, prompts: Sequence[Prompt], settings: MeasureSettings, work: Path, progress: bool
) -> tuple[Knowledge, str]:
    """What one model knows, and its dtype; the answers of each pass are kept in the folder `work`."""
    model = load_spec(spec, settings)
    dtype = model.dtype
    work.mkdir(exist_ok=True)
    known = knowledge(
        model,
        PromptSet.of(prompts, model.tokenizer),
        scoring=settings.scoring,
        batch_size=settings.batch_size,
        seed=settings.seed,
        work=work,
        progress=progress,
    )
    del model
    gc.collect()
    return known, dtype


def _write(measured: dict[str, Knowledge], folder: Path) -> None:
    (first, before), *others = measured.items()
    saved = {label: as_json(known) for label, known in measured.items()}
    for label, after in others:
        saved[label]["against"] = changes.as_json(first, before, after)
    write_json(folder / "knowledge.json", saved)
    write_text(folder / "table.md", table(measured) + (f"\n{changes.table(measured)}" if others else ""))
    write_json_lines(
        folder / "facts.jsonl", (line for label, known in measured.items() for line in _lines(label, known))
    )
    with replacing(folder / "knowledge.png") as temporary:
        save(draw_knowledge(measured), temporary, format="png", dpi=150)


def _lines(label: str, known: Knowledge) -> list[dict[str, object]]:
    """What is known of each fact, as lines of facts.jsonl."""
    return [
        {"model": label, "prompt_id": prompt.prompt_id}
        | prompt.fact.as_dict()
        | {"category": category, "greedy": greedy, "sampled": sampled, "chance": known.chance[i]}
        | {"right": {form: column[i] for form, column in known.right.items()}}
        | {"outputs": {form: texts[i] for form, texts in known.outputs.items()}}
        for i, (prompt, category, greedy, sampled) in enumerate(
            zip(known.prompts, known.categories, known.greedy, known.sampled, strict=True)
        )
    ]
