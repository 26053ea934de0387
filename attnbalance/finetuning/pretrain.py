"""Pretraining: a small Llama or GPT-2 that learns a world from its statements, saved as an ordinary checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnbalance.arguments import expects
from attnbalance.data.bpe_tokenizer import check_vocabulary, train_tokenizer
from attnbalance.data.prompts import make_prompts
from attnbalance.data.statements import World
from attnbalance.errors import DataError
from attnbalance.files.outputs import MARKER, as_folder, provenance, write_saved
from attnbalance.files.processes import on_main_process_first
from attnbalance.files.seals import PRETRAINED, check_files, hash_files
from attnbalance.files.work import close_work, finishing, is_finished
from attnbalance.finetuning.checkpoints import copy_for_users, written
from attnbalance.finetuning.curriculum import check_examples
from attnbalance.seeds import check_seed

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURES = ("llama", "gpt2")
KIND = PRETRAINED
CONTEXT = 512
"""Positions of a model made here."""
MOST_LAYERS, LARGEST_WIDTH = 1_000, 65_536


@dataclass(frozen=True)
class Recipe:
    """Size of the model and length of its pretraining (AdamW, learning rate lowered linearly to 0)."""

    layers: int = 4
    """The number of layers."""
    d_model: int = 128
    """The width of the residual stream; a multiple of 2 x heads."""
    heads: int = 4
    """Attention heads in each layer."""
    vocabulary: int = 1024
    """The largest number of tokens."""
    steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 128
    """Statements of one step."""
    learning_rate: float = 1e-3
    """Learning rate at the first step."""

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have."""
        counts = {name: value for name, value in asdict(self).items() if name != "learning_rate"}
        low = [f"{name} {value}" for name, value in counts.items() if value < 1]
        if low:
            raise DataError(f"the sizes and steps of a recipe must be at least 1, got {', '.join(low)}")
        if self.layers > MOST_LAYERS or self.d_model > LARGEST_WIDTH:
            raise DataError(
                f"layers must be at most {MOST_LAYERS:,} and d_model at most {LARGEST_WIDTH:,}, "
                f"got {self.layers:,} and {self.d_model:,}"
            )
        if self.d_model % (2 * self.heads):
            raise DataError(f"d_model {self.d_model} must be a multiple of twice the {self.heads} heads")
        check_vocabulary(self.vocabulary)
        check_examples(self.steps, self.batch_size)


SYNTHETIC_RECIPE = Recipe()
"""For `synthetic_facts` at its default sizes: about two minutes on two cores."""

POPQA_RECIPE = Recipe(vocabulary=4000, steps=600, batch_size=128)
"""For PopQA's relations country, sport and occupation (1,902 facts), stated with power 0.5."""


@expects()
def pretrain(
    world: World,
    out: str | Path,
    *,
    architecture: str = "llama",
    recipe: Recipe = SYNTHETIC_RECIPE,
    seed: int = 0,
    progress: bool = False,
) -> Path:
    """Pretrain a model on `recipe.steps` x `recipe.batch_size` statements of a world; returns its folder `out`.

    The folder is an ordinary Hugging Face checkpoint with a tokenizer of the world's own words; its attnbalance.json
    says how it was made. Loss is on every token of a statement. The words of questions are in the vocabulary but never
    trained. A folder that is finished with the same settings is returned at once; a killed run is resumed. Raises
    `DataError` for an unknown architecture or impossible sizes, `OutputError` for a folder that holds something else,
    or a finished one of which a file was changed, `ModelError` for a non-finite loss.

    Args:
        world: The facts, and how often each is stated.
        out: The folder of the model.
        architecture: One of `ARCHITECTURES`.
        recipe: Size of the model and length of its pretraining.
        seed: Seed of the statements and of the weights.
        progress: Whether to draw a progress bar.
    """
    out, seed = as_folder(out), check_seed(seed)
    if architecture not in ARCHITECTURES:
        raise DataError(f"no architecture {architecture!r}; there are {', '.join(ARCHITECTURES)}")
    made_from = {"facts": world.facts.name, "facts_sha256": world.facts.sha256, "power": world.power}
    config = {"world": made_from, "architecture": architecture, "recipe": asdict(recipe), "seed": seed}
    if is_finished(out, KIND, config):
        check_files(out)
    else:
        _pretrain(world, out, architecture, recipe, seed, config, progress)
    close_work(out)
    return out


def _pretrain(
    world: World, out: Path, architecture: str, recipe: Recipe, seed: int, config: dict[str, object], progress: bool
) -> None:
    from transformers import set_seed

    from attnbalance.finetuning.loop import TrainingData, train, training_in
    from attnbalance.finetuning.schedule import Schedule

    every = max(1, -(-recipe.steps // 6))
    schedule = Schedule(recipe.steps, recipe.batch_size, recipe.learning_rate, every, seed, decay=True)
    statements = world.statements(recipe.steps * recipe.batch_size, seed)
    questions = [f"{prompt.text} {prompt.fact.answer}" for prompt in make_prompts(world.facts)]
    tokenizer = train_tokenizer([*statements[:20_000], *questions], recipe.vocabulary)
    set_seed(seed)
    model = _new_model(architecture, replace(recipe, vocabulary=len(tokenizer)), tokenizer)
    with training_in(out, KIND, config) as work:
        data = TrainingData(statements, collate=_collator(tokenizer))
        log = train(model, tokenizer, data, work, schedule, bar="pretraining" if progress else None)
        on_main_process_first(lambda: _finish(work, out, config, log))


def _finish(work: Path, out: Path, config: dict[str, object], log: Sequence[dict[str, float]]) -> None:
    if is_finished(out, KIND, config):  # by the main process
        return
    from attnbalance.finetuning.bases import FILE as BASE_FILE

    done = written(work)
    history = [[entry["step"], entry["loss"]] for entry in log if "loss" in entry]
    with finishing(out, KIND, config, work) as folder:
        copy_for_users(done[max(done)], folder, link=True)
        (folder / BASE_FILE).unlink(missing_ok=True)  # random weights are nobody's base
        record = {"kind": KIND, "config": config, "training_loss": history, **provenance()}
        write_saved(folder / MARKER, record | {"files_sha256": hash_files(folder, but=[MARKER])})


def _collator(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[str]], dict[str, Tensor]]:
    """Tokenizes the statements of a batch; every token but padding carries loss."""
    from attnbalance.finetuning.examples import Example, collate

    def tokenize(statements: Sequence[str]) -> dict[str, Tensor]:
        encoded = tokenizer([f"{statement}{tokenizer.eos_token}" for statement in statements])["input_ids"]
        return collate([Example(tuple(ids), tuple(ids)) for ids in encoded])

    return tokenize


def _new_model(architecture: str, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model with random weights, without dropout, with input and output embeddings tied."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": recipe.vocabulary, "tie_word_embeddings": True}
    shape |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    if architecture == "llama":
        shape |= {
            "hidden_size": recipe.d_model,
            "intermediate_size": 2 * recipe.d_model,
            "num_hidden_layers": recipe.layers,
        }
        shape |= {"num_attention_heads": recipe.heads, "max_position_embeddings": CONTEXT}
    else:
        shape |= {"n_embd": recipe.d_model, "n_layer": recipe.layers, "n_head": recipe.heads, "n_positions": CONTEXT}
        shape |= {"n_inner": 3 * recipe.d_model}  # as many weights as the Llama has
        shape |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **shape))
