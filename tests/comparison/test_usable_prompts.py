"""Facts that some model cannot be asked about are refused, or dropped and counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from tiny import FACTS, POSITIONS, tiny_config, tiny_tokenizer

from attnbalance import Fact, FactSet
from attnbalance.comparison.specs import MeasureSettings, ModelSpec
from attnbalance.comparison.usable_prompts import usable_prompts
from attnbalance.data.prompts import make_prompts
from attnbalance.errors import BadRowsError, DataError, ModelError

LONG = Fact("Otto", "country", ("Chad",), 1.0, "In what country is " + "very " * POSITIONS + "old Otto?")
TWICE = Fact("Anna", "mother", ("Eve",), 1.0, "Is Anna the mother of Anna?")
SETTINGS = MeasureSettings(recall=True, batch_size=4)


def test_bad_facts_are_refused_with_the_count_and_the_first_rows(llama_folder: Path) -> None:
    facts = FactSet((*FACTS, TWICE, TWICE))
    with pytest.raises(BadRowsError, match=r"2 of 11 questions(.|\n)*row 10: subject 'Anna' occurs 2 times"):
        usable_prompts(facts, [ModelSpec("a", str(llama_folder))], SETTINGS, skip_bad=False)


def test_bad_facts_are_dropped_and_counted_by_reason_when_asked(llama_folder: Path) -> None:
    facts = FactSet((TWICE, *FACTS, LONG))
    prompts, dropped = usable_prompts(facts, [ModelSpec("a", str(llama_folder))], SETTINGS, skip_bad=True)
    assert [prompt.fact for prompt in prompts] == list(FACTS)
    assert sorted(dropped.values()) == [1, 1]
    assert any("positions" in reason for reason in dropped)


def test_a_set_of_which_nothing_is_left_is_refused(llama_folder: Path) -> None:
    with pytest.raises(DataError, match="no usable facts are left"):
        usable_prompts(FactSet((TWICE,)), [ModelSpec("a", str(llama_folder))], SETTINGS, skip_bad=True)


def test_prompts_beyond_the_length_of_mpts_alibi_are_dropped_and_counted(tmp_path: Path) -> None:
    transformers.MptConfig(max_seq_len=POSITIONS).save_pretrained(tmp_path)  # no weights are read
    tiny_tokenizer("plain").save_pretrained(tmp_path)
    spec = ModelSpec("a", str(tmp_path))
    with pytest.raises(BadRowsError, match=f"prompts are longer than the model's {POSITIONS} positions"):
        usable_prompts(FactSet((*FACTS, LONG)), [spec], SETTINGS, skip_bad=False)
    prompts, dropped = usable_prompts(FactSet((*FACTS, LONG)), [spec], SETTINGS, skip_bad=True)
    assert [prompt.fact for prompt in prompts] == list(FACTS)
    assert list(dropped.values()) == [1]


def saved(folder: Path, kind: str, chat_template: str | None = None, positions: int = POSITIONS) -> ModelSpec:
    """A model of which only the configuration and the tokenizer exist: no weights are read."""
    tiny_config("llama", max_position_embeddings=positions).save_pretrained(folder)
    tokenizer = tiny_tokenizer(kind)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return ModelSpec(folder.name, str(folder))


def test_models_with_different_chat_templates_are_refused(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", "plain", "User: {{ messages[0]['content'] }} Model:")
    second = saved(tmp_path / "b", "plain", "Q: {{ messages[0]['content'] }} A:")
    chat = replace(SETTINGS, chat=True)
    with pytest.raises(ModelError, match="different chat templates cannot share prompts; measure each alone"):
        usable_prompts(FactSet(FACTS), [first, second], chat, skip_bad=True)
    prompts, dropped = usable_prompts(FactSet(FACTS), [first, first], chat, skip_bad=False)
    assert dropped == {}
    assert prompts[0].text == f"User: {make_prompts(FACTS, SETTINGS.template)[0].text} Model:"


def test_chat_templates_that_differ_only_in_the_space_before_the_answer_are_refused(tmp_path: Path) -> None:
    """The prompts have one text; answers would be read behind the first model's space in both models."""
    turn = (
        "{% for m in messages %}{{ m['role'] }}:{SPACE}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}"
    )
    end = "assistant:{% endif %}"
    first = saved(
        tmp_path / "a", "plain", turn.replace("{SPACE}", "{{ ' ' if m['role'] == 'assistant' else '' }}") + end
    )
    second = saved(tmp_path / "b", "plain", turn.replace("{SPACE}", "") + end)
    chat = replace(SETTINGS, chat=True)
    alone = [usable_prompts(FactSet(FACTS), [spec], chat, skip_bad=False)[0][0] for spec in (first, second)]
    assert alone[0].text == alone[1].text
    assert [prompt.answer_space for prompt in alone] == [" ", ""]
    with pytest.raises(ModelError, match="different chat templates cannot share prompts"):
        usable_prompts(FactSet(FACTS), [first, second], chat, skip_bad=False)


def test_models_with_different_tokenizers_share_the_prompts(tmp_path: Path) -> None:
    specs = [saved(tmp_path / kind, kind) for kind in ("plain", "metaspace")]
    prompts, dropped = usable_prompts(FactSet(FACTS), specs, SETTINGS, skip_bad=False)
    alone, _ = usable_prompts(FactSet(FACTS), specs[:1], SETTINGS, skip_bad=False)
    assert dropped == {}
    assert list(prompts) == list(alone)
    assert [encoding.prompt for encoding in prompts.encodings] == list(prompts)


def test_what_one_of_two_models_has_too_few_positions_for_is_dropped_for_both(tmp_path: Path) -> None:
    specs = [saved(tmp_path / "long", "plain", positions=8 * POSITIONS), saved(tmp_path / "short", "plain")]
    facts = FactSet((*FACTS, LONG))
    assert usable_prompts(facts, specs[:1], SETTINGS, skip_bad=False)[1] == {}
    prompts, dropped = usable_prompts(facts, specs, SETTINGS, skip_bad=True)
    assert [prompt.fact for prompt in prompts] == list(FACTS)
    (reason,) = dropped
    assert dropped[reason] == 1
    assert str(POSITIONS) in reason


def test_facts_without_another_answer_of_their_relation_are_dropped_where_answers_are_compared(tmp_path: Path) -> None:
    cities = tuple(Fact(f"Town {i}", "country", (answer,)) for i, answer in enumerate(("Chad", "Peru", "Chad")))
    alone = Fact("Anna", "mother", ("Eve",))
    facts, specs = FactSet((*cities, alone)), [saved(tmp_path / "a", "plain")]
    assert len(usable_prompts(facts, specs, SETTINGS, skip_bad=False)[0]) == 4
    with pytest.raises(BadRowsError):
        usable_prompts(facts, specs, SETTINGS, skip_bad=False, need_answer_tokens=True)
    prompts, dropped = usable_prompts(facts, specs, SETTINGS, skip_bad=True, need_answer_tokens=True)
    assert [prompt.fact for prompt in prompts] == list(cities)
    assert list(dropped.values()) == [1]
