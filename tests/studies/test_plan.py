"""Study files: what is read, and what each refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbalance.errors import DataError
from attnbalance.finetuning.objectives.expression import RECOMMENDED
from attnbalance.finetuning.settings import FinetuneSettings
from attnbalance.studies.plan import Variant, parse_study, recipe_of, variants

W, M = "worlds: {a: {facts: synthetic}}\n", "methods: {b: {}}\n"
NINE = [
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
]
BOMB = "\n".join(["a: &a [x, x, x, x, x, x, x, x, x]", *NINE])
"""A few hundred bytes that stand for 9^9 texts."""

NUMBERS = ", ".join(map(str, range(1, 100)))
GRIDS = ("steps", "batch_size", "patience", "checkpoint_every", "gradient_rank")
GRID = "methods: {b: {" + ", ".join(f"{name}: [{NUMBERS}]" for name in GRIDS) + "}}\nsplits: [whole]"
"""99^5 fits."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worlds: {a: {facts: synthetic}}", "needs methods"),
        ("worlds: {a: {}}\nmethods: {b: {}}", "world a needs facts"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {stepz: 3}}", "no setting 'stepz'; there are"),
        (
            "worlds: {a: {facts: synthetic, recipe: {depth: 3}}}\nmethods: {b: {}}",
            "the recipe of world a has no setting 'depth'",
        ),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {objective: cee}}", "There are ce"),
        (W + "methods: {b: {labels: mine}}", "labels must be 'facts', 'base' or 'shuffled', got 'mine'"),
        (W + "methods: {b: {replay: mine}}", "replay must be 'none', 'known' or 'generated', got 'mine'"),
        (W + "methods: {b: {replay: [known, generated]}}", "one replay"),
        (W + "methods: {b: {replay_share: 0.5}}", "replay_share is the share of replayed facts; give replay as well"),
        (W + "methods: {b: {replay: known, replay_share: [0.2, 0.6]}}", "method b must name one replay_share"),
        (W + "methods: {b: {replay: known, replay_share: 1.0}}", "replay_share must be less than 1, got 1.0"),
        (
            W + "methods: {b: {replay: known, curriculum: popular-first}}",
            "method b: curriculum popular-first ranks facts",
        ),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {train: kq}}", "no part 'kq'"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {curriculum: easy}}", "no curriculum 'easy'"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {../b: {}}", "becomes a folder's name"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {}}\nseeds: 3", "seeds must be a valid list, got 3"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {objective: [ce, barrier]}}", "one objective"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {labels: [base, shuffled]}}", "one labels"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {learning_rate: 1e-3}}", "1.0e-3"),
        (
            "worlds: {a: {facts: synthetic}}\nmethods: {b: {lora_rank: -1}}",
            "method b: `lora_rank` must be a whole number >= 0, got -1",
        ),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {train: []}}", "empty list"),
        (
            "worlds: {a: {facts: synthetic}}\nmethods: {b: {}}\nsplits: [top, botom]",
            "splits.1 must be 'top', .*got 'botom'",
        ),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {}}\nseeds: [0, 0]", "seeds must be a list of distinct values"),
        ("worlds: {a: {facts: synthetic}}\nmethods: {b: {}}\nseeds: []", "seeds .*at least 1 item"),
        ("worlds: [", "cannot parse .* as YAML"),
        ("- a", "must be a mapping"),
        (W + "methods: {b: {steps: 1.5}}", "method b: steps must be a valid integer, got 1.5"),
        (W + "methods: {b: {steps: 2.0}}", "method b: steps must be a valid integer, got 2.0"),
        (W + "methods: {b: {batch_size: 8.0}}", "batch_size must be a valid integer, got 8.0"),
        (W + "methods: {b: {lora_rank: 2.5}}", "lora_rank must be a valid integer, got 2.5"),
        (W + "methods: {b: {lora_rank: 9999999}}", "`lora_rank` must be at most 65536, got 9999999"),
        (W + "methods: {b: {steps: 1:30}}", "1:30 would be read as a number to base 60"),
        (W + "methods: {b: {steps: true}}", "steps must be a valid integer, got True"),
        (W + "methods: {b: {steps: '3'}}", "steps must be a valid integer, got '3'"),
        (W + "methods: {b: {steps: null}}", "steps must be a valid integer, got None"),
        (W + "methods: {b: {steps: [1, 2.5]}}", "steps must be a valid integer, got 2.5"),
        (W + "methods: {b: {steps: .inf}}", "steps must be a valid integer, got inf"),
        (
            W + "methods: {b: {steps: 0x" + "f" * 5000 + "}}",
            "`steps` must be at most 1,000,000,000, got a larger number",
        ),
        (W + "methods: {b: {learning_rate: 0}}", "`learning_rate` must be a finite number > 0, got 0"),
        (W + "methods: {b: {learning_rate: .inf}}", "learning_rate must be a finite number, got inf"),
        (W + "methods: {b: {learning_rate: .nan}}", "learning_rate must be a finite number, got nan"),
        (W + "methods: {b: {learning_rate: null}}", "learning_rate must be a valid number, got None"),
        (W + "methods: {b: {weight_decay: -1}}", "`weight_decay` must be a finite number >= 0, got -1"),
        (W + "methods: {b: {lora_alpha: .inf}}", "lora_alpha must be a finite number, got inf"),
        (W + "methods: {b: {dtype: int8}}", "`dtype` must be float32, .*got 'int8'"),
        (W + "methods: {b: {template: Hello}}", "method b: template 'Hello' must name the subject once"),
        (W + 'methods: {b: {template: "\\ud800 {subject}"}}', "surrogates not allowed"),
        (W + "methods: {b: {train: ''}}", "method b: no part ''"),
        (W + "methods: {b: {train: q@" + "9" * 5000 + "}}", r"expected a layer \(4\)"),
        (
            W + "methods: {b: {batch_size: 7, accumulate: 2}}",
            "`batch_size` must be a multiple of `accumulate`, got 7 and 2",
        ),
        (W + "methods: {b: [1]}", "methods.b must be a valid dictionary"),
        (W + "methods: {b: {}}\ndefaults: {steps: 1.5}", "steps must be a valid integer, got 1.5"),
        (W + "methods: {b: {}}\nseeds: [4294967296]", "seeds.0 must be less than or equal to 4294967295"),
        (W + "methods: {b: {}}\nseeds: [-1]", "seeds.0 must be greater than or equal to 0"),
        (W + "methods: {b: {}}\nseeds: [true]", "seeds.0 must be a valid integer, got True"),
        (W + "methods: {b: {}}\nseed: 3", "the study has no setting 'seed'; there are worlds, seeds"),
        (W + "methods: {b: {}, b: {steps: 3}}", r"'b' occurs twice in one mapping \(line 2\)"),
        (W + "methods: {" + "m" * 101 + ": {}}", "becomes a folder's name; .* at most 100 bytes"),
        ("worlds: {'..': {facts: synthetic}}\n" + M, "becomes a folder's name"),
        ("worlds: {1: {facts: synthetic}}\n" + M, "must be a valid string, got 1"),
        (W + "methods: {a: {mixed_precision: no}}", "got False \\(in YAML, no, off, yes and on are booleans: write"),
        (W + "methods: {a: {mixed_precision: ['no', fp16]}}", "must be no or bf16, got 'fp16'"),
        ("worlds: {a: 3}\n" + M, "world a must be a mapping of settings, got 3"),
        ("worlds: {a: {facts: f.jsonl, relations: 3}}\n" + M, "relations must be a valid list, got 3"),
        ("worlds: {a: {facts: f.jsonl, limit: 1.5}}\n" + M, "limit must be a valid integer, got 1.5"),
        ("worlds: {a: {facts: synthetic, limit: 3}}\n" + M, "limit does nothing together with facts 'synthetic'"),
        ("worlds: {a: {facts: f.jsonl, subjects: 3}}\n" + M, "subjects does nothing together with facts 'f.jsonl'"),
        (
            "worlds: {a: {facts: synthetic, model: m, recipe: {layers: 1}}}\n" + M,
            "recipe does nothing together with model",
        ),
        ("worlds: {a: {facts: synthetic, power: .nan}}\n" + M, "power must be a finite number, got nan"),
        ("worlds: {a: {facts: synthetic, recipe: null}}\n" + M, "recipe must be a valid dictionary, got None"),
        ("worlds: {a: {facts: synthetic, recipe: {layers: 1.0}}}\n" + M, "layers must be a valid integer, got 1.0"),
        ("worlds: {a: {facts: synthetic, recipe: {heads: 3}}}\n" + M, "d_model 128 must be a multiple of twice the 3"),
        ("a: &x [1]\nb: *x", "aliases .* are not read"),
        ("&a [*a]", "aliases .* are not read"),
        (BOMB, "aliases .* are not read"),
        ("[" * 100_000, "nested too deeply"),
        ("#" * 1_000_001, "more than 1,000,000 bytes"),
        ("a: !!bool maybe", "cannot parse .* as YAML"),
        ("a: !!python/object/apply:os.getcwd []", "cannot parse .* as YAML"),
        (W + GRID, "asks for 9,509,900,499 finetunings .*10,000 are allowed"),
        (W + M + f"seeds: [{', '.join(map(str, range(6000)))}]", "asks for 12,000 finetunings"),
    ],
)
def test_a_study_that_cannot_be_run_is_refused_in_few_words(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as refusal:
        parse_study(path)
    assert len(str(refusal.value)) <= 2000


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "absent", "loop", "long name", "latin-1"])
def test_a_study_is_a_regular_file_of_text(kind: str, tmp_path: Path) -> None:
    import os

    path = tmp_path / "study.yaml"
    if kind == "fifo":
        os.mkfifo(path)  # opening it would wait for ever
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "long name":
        path = tmp_path / ("x" * 300)
    elif kind == "latin-1":
        path.write_bytes("worlds: \u00e9".encode("latin-1"))
    with pytest.raises(DataError, match="cannot read the study"):
        parse_study(path)


def test_settings_come_out_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(
        "worlds: {a: {facts: synthetic, power: 1, recipe: {layers: 2}}}\nseeds: [4, 2]\n"
        "methods:\n  plain:\n  ranks: {lora_rank: [0, 4], patience: null}\ndefaults: {steps: 3, learning_rate: 1}"
    )
    plan = parse_study(path)
    assert plan.worlds == {"a": {"facts": "synthetic", "power": 1, "recipe": {"layers": 2}}}
    assert (plan.seeds, plan.splits) == ((4, 2), ("top", "bottom"))
    assert plan.methods["plain"] == {"steps": 3, "learning_rate": 1}
    assert plan.methods["ranks"] == {"steps": 3, "learning_rate": 1, "lora_rank": [0, 4], "patience": None}
    assert recipe_of(plan.worlds["a"]).layers == 2
    assert len(plan.fits) == 1 * 2 * 2 * 2


def test_a_method_names_what_recommended_stands_for(tmp_path: Path) -> None:
    """So that a fit of a version in which the name stood for other terms is not taken for this one's."""
    path = tmp_path / "study.yaml"
    path.write_text("worlds: {a: {facts: synthetic}}\nmethods: {b: {objective: recommended}, c: {}}")
    assert parse_study(path).methods == {"b": {"objective": RECOMMENDED}, "c": {}}


@pytest.mark.parametrize(
    ("methods", "dtype"),
    [
        ("{a: {}, b: {lora_rank: 2}}", "float32"),
        ("{a: {}, b: {train: qk}}", "float32"),
        ("{a: {lora_rank: 2}, b: {lora_rank: 4, dtype: bfloat16}}", None),
        ("{a: {dtype: bfloat16}, b: {dtype: bfloat16, train: qk}}", "bfloat16"),
        ("{a: {dtype: bfloat16}, b: {lora_rank: [0, 2]}}", "float32"),
    ],
)
def test_all_that_a_study_compares_is_asked_in_one_dtype(tmp_path: Path, methods: str, dtype: str | None) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(f"worlds: {{a: {{facts: synthetic}}}}\nmethods: {methods}")
    assert parse_study(path).dtype == dtype


def test_variants_are_all_combinations_in_an_order_of_their_names() -> None:
    for method in (
        {"steps": [1, 2], "train": "qk", "lora_rank": [0, 4], "labels": "base"},
        {"labels": "base", "lora_rank": [0, 4], "train": "qk", "steps": [1, 2]},
    ):
        assert variants(method) == [
            Variant(FinetuneSettings(steps=steps, train="qk", lora_rank=rank), "base")
            for rank in (0, 4)
            for steps in (1, 2)
        ]
    assert variants({}) == [Variant(FinetuneSettings(), "facts")]
