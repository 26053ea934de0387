"""One finetuning, from loading the base to the finished folder; needs torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from attnbalance.data.facts import FactSet
from attnbalance.data.prompts import as_template
from attnbalance.errors import DataError
from attnbalance.files.outputs import MARKER, provenance, write_json, write_json_lines, write_saved, write_text
from attnbalance.files.processes import on_main_process_first
from attnbalance.files.seals import CHECKPOINT, hash_files
from attnbalance.files.work import finishing, is_finished
from attnbalance.finetuning.adapters import add_adapters, add_lora, peft_config, under_adapters
from attnbalance.finetuning.checkpoints import checkpoints, copy_for_users, written
from attnbalance.finetuning.curriculum import mixed_order, order
from attnbalance.finetuning.evaluation import SHORTCUT
from attnbalance.finetuning.examples import REPLAYED, Example, first_difference, make_examples
from attnbalance.finetuning.loop import TrainingData, precision_of, train, training_in
from attnbalance.finetuning.model_card import CARD, model_card
from attnbalance.finetuning.objectives.parse import parse_objective
from attnbalance.finetuning.parameters import FrozenWeights, parse_parts, select_weights, train_only
from attnbalance.finetuning.ranking import rank_facts
from attnbalance.finetuning.replay import check_replay
from attnbalance.finetuning.runs import CHECKPOINTS, FACTS, KIND, TRAJECTORY, checkpoint_name
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.finetuning.splits import Split
from attnbalance.finetuning.training_log import base_completes, base_objective, trajectory
from attnbalance.models.config_changes import settings_of
from attnbalance.models.fingerprint import check_unchanged, fingerprint
from attnbalance.models.forward import base_of, check_vocabulary
from attnbalance.models.load import load_limits
from attnbalance.models.load_base import load_base


@dataclass(frozen=True)
class _Trainable:
    """A model ready to be trained."""

    model: nn.Module
    """The base, or the base with adapters."""
    frozen: FrozenWeights
    """Entries of partly trained weights that stay as they are."""
    base_fingerprint: dict[str, str]
    """The fingerprint of the base's weights."""
    trained: str
    """Which weights are trained, in words."""


def finetune_model(
    base: str,
    split: Split,
    out: Path,
    settings: FinetuneSettings,
    config: Mapping[str, Any],
    *,
    progress: bool,
) -> None:
    """Finetune, into the folder `out`; see `finetune`, which has checked that `out` is not finished.

    Args:
        base: A local model folder or Hub id.
        split: The facts.
        out: The folder of the run.
        settings: How to train.
        config: What identifies the run in its attnbalance.json.
        progress: Whether to draw a progress bar.
    """
    check_settings(settings)
    tokenizer, limit = load_limits(base)
    template = as_template(settings.template)
    examples, validation, *replayed = (
        make_examples(facts.facts, tokenizer, template, max_positions=limit)
        for part, facts in split.parts.items()
        if part != "heldout"
    )
    if len(split.replay):
        check_replay(settings, held=split.replay_share is not None)
    validation = _with_shortcuts(validation, examples, split)
    if replayed:
        validation, examples = (_marked(part, replayed=False) for part in (validation, examples))
    examples += [example for part in replayed for example in _marked(part, replayed=True)]
    data = TrainingData(_in_order(examples, split, settings), validation)
    _warn_of_unread(examples[: len(split.train)] if split.replay_share else examples, data.train, settings)
    train_run(base, tokenizer, data, out, settings, config, _about(split), split.parts, progress=progress)


def _marked(examples: Sequence[Example], *, replayed: bool) -> list[Example]:
    """The examples of a run with replay, with the target that says whether they are replayed."""
    return [replace(each, targets={**each.targets, REPLAYED: torch.tensor(replayed)}) for each in examples]


def check_settings(settings: FinetuneSettings) -> None:
    """Raise `DataError` for names in the settings that are unknown, before a model is loaded."""
    parse_objective(settings.objective)
    parse_parts(settings.train)
    if settings.peft is not None:
        peft_config(settings.peft)


def train_run(
    base: str,
    tokenizer: PreTrainedTokenizerBase,
    data: TrainingData,
    out: Path,
    settings: FinetuneSettings,
    config: Mapping[str, Any],
    about_data: Mapping[str, Any],
    facts: Mapping[str, FactSet],
    *,
    progress: bool,
) -> None:
    """Train on examples, into the folder `out` of a run.

    Args:
        base: A local model folder or Hub id.
        tokenizer: Its tokenizer.
        data: The examples to train on, and to validate on.
        out: The folder of the run, which is not finished.
        settings: How to train.
        config: What identifies the run in its attnbalance.json.
        about_data: What attnbalance.json says about the data (see `Run`).
        facts: The facts that the folder will hold, by part.
        progress: Whether to draw a progress bar.
    """
    objective, precision = parse_objective(settings.objective), precision_of(settings.schedule)
    trainable = _trainable(base, settings, [*data.train, *(data.validation or ())])
    check_unchanged(base, config["model_files"])
    about = {
        "config": config,
        "base": base,
        "base_fingerprint": trainable.base_fingerprint,
        "base_settings": settings_of(base_of(trainable.model).config),
        "trained": trainable.trained + ("" if precision == "no" else f", in mixed precision ({precision})"),
        "mixed_precision": precision,
        "objective": objective.text,
        "learns_answers": objective.learns_answers,
        **about_data,
        **provenance(),
    }
    with training_in(out, KIND, config) as work:
        with _naming_newest_checkpoint(work):
            log = train(
                trainable.model,
                tokenizer,
                data,
                work,
                settings.schedule,
                objective=objective,
                frozen=trainable.frozen,
                bar=f"finetuning on {config['split']}" if progress else None,
            )
        about |= {"base_completes": base_completes(log), "base_loss": base_objective(log)}
        on_main_process_first(lambda: _finish(work, out, facts, about, trajectory(log)))


def _warn_of_unread(examples: Sequence[Example], read: Sequence[Example], settings: FinetuneSettings) -> None:
    """Warn if the steps end before all training facts were read: what is said of training facts is of those alone."""
    count = len({id(example) for example in examples} & {id(example) for example in read})
    if count < len(examples):
        warnings.warn(
            f"{settings.steps} steps of {settings.batch_size} facts read {count} of {len(examples)} training facts; "
            "the others are neither learned nor asked before",
            stacklevel=7,
        )


def _in_order(examples: Sequence[Example], split: Split, settings: FinetuneSettings) -> list[Example]:
    """The training examples of all steps, in the curriculum's order. In `examples`, replayed ones come last."""
    schedule, shuffled, new = settings.schedule, settings.curriculum == "shuffled", len(split.train)
    if split.replay_share is not None:
        pools, sizes = (range(new, len(examples)), range(new)), (schedule.steps, schedule.batch_size)
        return [examples[i] for i in mixed_order(*pools, split.replay_share, *sizes, schedule.seed)]
    ranks = [0.0] * len(examples) if shuffled else rank_facts(split.train, "popularity")
    indices = order(ranks, schedule.steps, schedule.batch_size, schedule.seed, settings.curriculum)
    return [examples[i] for i in indices]


def _with_shortcuts(validation: Sequence[Example], train: Sequence[Example], split: Split) -> list[Example]:
    """The validation examples with what tells their answer from their relation's most frequent training answer."""
    answers = {relation: accepted[0] for relation, accepted in split.train.most_frequent_answers().items()}
    shortcuts = {
        fact.relation: example
        for fact, example in zip(split.train, train, strict=True)
        if fact.answer == answers[fact.relation]
    }
    result = []
    for fact, example in zip(split.validation, validation, strict=True):
        known = fact.relation in shortcuts
        label = first_difference(example, shortcuts[fact.relation]) if known else (-1, -1)
        result.append(replace(example, targets={SHORTCUT: torch.tensor(label)}))
    return result


def _trainable(base: str, settings: FinetuneSettings, examples: Sequence[Example]) -> _Trainable:
    """Load the base and let the chosen weights train, themselves or through adapters."""
    model = load_base(base, settings.weights_dtype)
    check_vocabulary(model, torch.tensor([max(example.ids) for example in examples]), base)
    base_fingerprint = fingerprint(model)
    _keep_token_ids_only(model)
    if settings.mixed_precision == "bf16" and model.dtype == torch.float64:
        raise DataError(
            f"`mixed_precision` bf16 needs weights of 32 or 16 bits, those of {base} are float64; give `dtype`"
        )
    set_seed(settings.seed)
    chosen = select_weights(model, settings.train)
    if not settings.has_adapters:
        return _Trainable(model, train_only(model, chosen), base_fingerprint, f"Trained: {chosen.describe()}")
    if settings.peft is None:
        kind = "LoRA"
        adapted, frozen = add_lora(model, chosen, settings.lora_rank, settings.alpha)
    else:
        kind = settings.peft["peft_type"]
        adapted, frozen = add_adapters(model, chosen, settings.peft), FrozenWeights({})
    changed = under_adapters(adapted, chosen).describe()
    trained = f"Trained: {frozen.trained(adapted):,} weights of {kind} adapters, which change {changed}"
    return _Trainable(adapted, frozen, base_fingerprint, trained)


def _keep_token_ids_only(model: PreTrainedModel) -> None:
    """Drop a model's sampling settings: transformers refuses to save some of them (Vicuna's)."""
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(model.generation_config, name, None) for name in ids})


@contextmanager
def _naming_newest_checkpoint(work: Path) -> Iterator[None]:
    """Let an interrupt name the newest checkpoint."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        done = checkpoints(work)
        newest = (
            f"the newest checkpoint, {done[max(done)]}, is a usable model" if done else "there is no checkpoint yet"
        )
        raise KeyboardInterrupt(newest) from interrupt


def _finish(
    work: Path,
    out: Path,
    facts: Mapping[str, FactSet],
    about: Mapping[str, Any],
    validations: Sequence[Mapping[str, Any]],
) -> None:
    """Turn the work folder into the run's folder, in one move.

    Args:
        work: The work folder, with its checkpoints.
        out: The folder of the run.
        facts: The facts that the folder will hold, by part.
        about: What attnbalance.json says.
        validations: What was watched, by step.
    """
    if is_finished(out, KIND, about["config"]):  # by the main process
        return
    losses = {entry["step"]: entry["objective"] for entry in validations}
    best, done = min(losses, key=lambda step: losses[step]), written(work, losses)
    with finishing(out, KIND, about["config"], work) as folder:
        copy_for_users(done[best], folder)
        adapter = (folder / "adapter_config.json").exists()
        write_text(folder / CARD, model_card(about, losses, adapter=adapter))
        for step, path in done.items():
            target = folder / CHECKPOINTS / checkpoint_name(step)
            copy_for_users(path, target, link=True)
            record = {"kind": CHECKPOINT, "step": step, **about}
            write_saved(target / MARKER, record | {"files_sha256": hash_files(target, but=[MARKER])})
        for part, name in FACTS.items():
            if chosen := facts.get(part):
                write_json_lines(folder / name, (fact.as_dict() for fact in chosen))
        write_json(folder / TRAJECTORY, {"trajectory": list(validations)})
        history = [[step, loss] for step, loss in losses.items()]
        record = {"kind": KIND, "best_step": best, "validation_loss": history, **about}
        write_saved(folder / MARKER, record | {"files_sha256": hash_files(folder, but=[MARKER, CARD])})


def _about(split: Split) -> dict[str, object]:
    """What attnbalance.json says about a split; no size of a validation part that is the training facts."""
    apart = {part: facts for part, facts in split.parts.items() if part == "train" or facts is not split.train}
    sizes = {part: len(facts) for part, facts in apart.items()}
    return {
        "split": {"name": split.name, **sizes, "left_out": split.left_out},
        "dropped": dict(split.train.dropped),
        "shortcuts": split.train.most_frequent_answers(),
        "tied_relations": split.train.tied_relations(),
    }
