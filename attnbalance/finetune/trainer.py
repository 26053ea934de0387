"""Finetuning a causal language model on a split's questions: all weights or LoRA, resumable, with early stopping."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbalance.errors import AttnBalanceError, DataError, ModelError
from attnbalance.finetune.checkpoints import checkpoints, copy_for_users, drop_incomplete
from attnbalance.finetune.curriculum import changes_on_the_way, check_curriculum, order
from attnbalance.finetune.runs import CHECKPOINT_KIND, HELDOUT, KIND, TRAIN, TRAJECTORY, Run, checkpoint_name, load_run
from attnbalance.finetune.splits import Split
from attnbalance.models.fingerprint import files_fingerprint
from attnbalance.outputs import (
    MARKER,
    as_folder,
    close_work,
    is_finished,
    open_work,
    provenance,
    replacing,
    write_json,
    write_text,
)
from attnbalance.prompts import Template, as_template

if TYPE_CHECKING:
    from attnbalance.finetune.examples import Example


def finetune(
    model: str | Path,
    split: Split,
    out: str | Path,
    *,
    template: str | Template = "qa",
    steps: int = 200,
    learning_rate: float = 3e-4,
    batch_size: int = 128,
    accumulate: int = 1,
    weight_decay: float = 0.0,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    train: str | None = None,
    objective: str = "ce",
    curriculum: str = "shuffled",
    gradient_rank: int | None = None,
    dtype: str | None = None,
    checkpoint_every: int = 20,
    patience: int | None = 3,
    seed: int = 0,
    progress: bool = False,
) -> Run:
    """Finetune a local model folder or Hub id on the answers to `split.train`; returns the run in the folder `out`.

    AdamW at a constant learning rate, gradients clipped at norm 1; loss on the tokens of the answer only, as
    `objective` says (see `parse_objective`); `train` says which weights learn (see `parse_parts`; by default all, and
    attention's for a recommended objective), `curriculum` in what order facts come, by their popularity (see
    `curriculum.order`; those that change on the way are not stopped early), `gradient_rank` limits the rank of every
    gradient (see `low_rank`). Every `checkpoint_every` steps a checkpoint is kept and the objective measured on
    `split.validation`; training stops when `patience` measurements in a row bring nothing better (None: never), and
    `out` itself is the best checkpoint. `batch_size` counts facts over all devices, `accumulate` in how many parts each
    device takes its share.

    `lora_rank` 0 trains the weights themselves; else LoRA adapters of that rank (Hu et al. 2022) on them (where `train`
    is "all", on every linear layer of attention and MLP), scaled by `lora_alpha` / rank (default: alpha = 2 x rank).
    `dtype` is that of the weights; by default float32 where they are trained themselves, since steps are lost in 16
    bits, and the checkpoint's own under LoRA. GPUs compute in bfloat16 where they can.

    A folder that is finished with the same settings is returned at once; a killed run goes on where it was, and after
    an interrupt its checkpoints so far are usable models (the error names the newest). Raises
    `ModelError` for a model that cannot be loaded and a loss that is no finite number, `DataError` for facts, sizes or
    a template that cannot be used, `OutputError` for a folder that holds something else.
    """
    out, template = as_folder(out), as_template(template)
    base = _absolute(model)
    check_curriculum(curriculum)
    config = {
        "model": base,
        "model_files": files_fingerprint(base),
        "split": split.name,
        "facts_sha256": {part: getattr(split, part).sha256 for part in ("train", "validation", "heldout")},
        "template": template.text,
        "steps": steps,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "weight_decay": weight_decay,
        "lora_rank": lora_rank,
        "lora_alpha": (2 * lora_rank if lora_alpha is None else lora_alpha) if lora_rank else None,
        "train": train or ("attention" if "recommended" in objective else "all"),
        "objective": objective,
        "curriculum": curriculum,
        "gradient_rank": gradient_rank,
        "dtype": dtype,
        "checkpoint_every": checkpoint_every,
        "patience": patience,
        "seed": seed,
    }
    if not is_finished(out, KIND, config):
        _finetune(base, split, out, config, progress)
    close_work(out)
    return load_run(out)


def _finetune(base: str, split: Split, out: Path, config: Mapping[str, Any], progress: bool) -> None:
    from transformers import GenerationConfig, set_seed

    from attnbalance.finetune.examples import make_examples
    from attnbalance.finetune.loop import Schedule, on_main_process_first, train, trajectory
    from attnbalance.finetune.objectives import parse_objective
    from attnbalance.finetune.parameters import add_lora, choose, parse_parts, train_only
    from attnbalance.finetune.ranking import rank_facts
    from attnbalance.models.fingerprint import fingerprint
    from attnbalance.models.load import load_base, load_limits

    shared = ("steps", "batch_size", "learning_rate", "weight_decay", "accumulate", "patience", "seed", "gradient_rank")
    settings = {name: config[name] for name in shared}
    if changes_on_the_way(config["curriculum"]):
        settings["patience"] = None  # stopped early, it would not have been the curriculum
    schedule = Schedule(every=config["checkpoint_every"], **settings)
    objective = parse_objective(config["objective"])
    parse_parts(config["train"])
    template = Template("finetune", config["template"])
    tokenizer, limit = load_limits(base)
    examples = make_examples(split.train.facts, tokenizer, template)
    validation = _with_shortcuts(make_examples(split.validation.facts, tokenizer, template), examples, split)
    ranks = rank_facts(split.train, "popularity") if config["curriculum"] != "shuffled" else [0.0] * len(examples)
    places = order(ranks, schedule.steps, schedule.batch_size, schedule.seed, config["curriculum"])
    longest = max(len(example.ids) for example in (*examples, *validation))
    if limit is not None and longest > limit:
        raise DataError(
            f"a question with its answer takes {longest} tokens, but {base} has {limit} positions; shorten it"
        )
    model = load_base(base, config["dtype"] or (None if config["lora_rank"] else "float32"))
    made_for = fingerprint(model)
    own = model.generation_config  # its sampling settings may be none that transformers would save (Vicuna's are not)
    ends = {name: getattr(own, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ends)
    set_seed(schedule.seed)
    chosen = choose(model, config["train"])
    if config["lora_rank"]:
        trained, guard = add_lora(model, chosen, config["lora_rank"], config["lora_alpha"])
    else:
        trained, guard = model, train_only(model, chosen)
    work = on_main_process_first(lambda: drop_incomplete(open_work(out, KIND, config)))
    told = chosen.describe()
    if config["lora_rank"]:
        told += f", through {guard.trained(trained):,} of LoRA adapters"
    data, label = [examples[i] for i in places], f"finetuning {split.name}"
    try:
        log = train(
            trained,
            tokenizer,
            data,
            None,
            work,
            schedule,
            validation,
            objective=objective,
            guard=guard,
            label=label,
            progress=progress,
        )
    except AttnBalanceError:
        if not checkpoints(work):
            close_work(out)  # nothing to go on with
        raise
    except KeyboardInterrupt as interrupt:
        done = checkpoints(work)
        newest = (
            f"the newest checkpoint, {done[max(done)]}, is a usable model" if done else "there is no checkpoint yet"
        )
        raise KeyboardInterrupt(newest) from interrupt
    seen = trajectory(log)
    about = {"config": config, "base": base, "base_fingerprint": made_for, "trained": told}
    about |= {"objective": objective.text}
    about |= {**_about(split), **provenance()}
    on_main_process_first(lambda: _finish(work, out, split, about, seen))


def _with_shortcuts(validation: Sequence[Example], train: Sequence[Example], split: Split) -> list[Example]:
    """The validation examples with the first token of their relation's most frequent training answer, where known."""
    import torch

    from attnbalance.finetune.examples import first_label
    from attnbalance.finetune.objective_trainer import SHORTCUT

    answers = {relation: accepted[0] for relation, accepted in split.train.most_frequent_answers().items()}
    firsts = {
        fact.relation: first_label(example)
        for fact, example in zip(split.train, train, strict=True)
        if fact.answer == answers[fact.relation]
    }
    return [
        replace(example, targets={SHORTCUT: torch.tensor(firsts.get(fact.relation, -1))})
        for fact, example in zip(split.validation, validation, strict=True)
    ]


def _finish(work: Path, out: Path, split: Split, about: Mapping[str, Any], seen: Sequence[Mapping[str, Any]]) -> None:
    """Turn the work folder into the run's folder, in one move."""
    if is_finished(out, KIND, about["config"]):  # by the main process
        return
    losses = {entry["step"]: entry["objective"] for entry in seen}
    best, done = min(losses, key=lambda step: losses[step]), checkpoints(work)
    with replacing(out) as folder:
        copy_for_users(done[best], folder)
        for step, path in done.items():
            target = folder / "checkpoints" / checkpoint_name(step)
            copy_for_users(path, target, link=True)
            write_json(target / MARKER, {"kind": CHECKPOINT_KIND, "step": step, **about})
        for name, facts in ((TRAIN, split.train), (HELDOUT, split.heldout)):
            lines = [json.dumps(fact.as_dict(), ensure_ascii=False) + "\n" for fact in facts]
            write_text(folder / name, "".join(lines))
        write_json(folder / TRAJECTORY, {"trajectory": list(seen)})
        history = [[step, loss] for step, loss in losses.items()]
        write_json(folder / MARKER, {"kind": KIND, "best_step": best, "validation_loss": history, **about})


def _about(split: Split) -> dict[str, object]:
    sizes = {part: len(getattr(split, part)) for part in ("train", "validation", "heldout")}
    return {
        "split": {"name": split.name, **sizes, "left_out": split.left_out},
        "shortcuts": split.train.most_frequent_answers(),
    }


def _absolute(model: str | Path) -> str:
    """A local folder as an absolute path, so that an adapter finds its base from anywhere; a Hub id as it is."""
    path = Path(model).expanduser()
    if not path.is_dir():
        return str(model)
    if (path / "adapter_config.json").is_file():
        raise ModelError(f"{model} is an adapter; merge it into its base (peft's merge_and_unload) and finetune that")
    return str(path.resolve())
