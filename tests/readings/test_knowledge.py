"""Knowledge: categories of a scripted model worked by hand, and a real model's answers against a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from base_oracle import SPORTS, TOWNS
from tiny import argmax_loop, eager, tiny_lora, tiny_model, tiny_tokenizer

from attnbalance import Fact, Prompt, load_model
from attnbalance.data.forms import FORMS, in_form
from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import encode
from attnbalance.errors import DataError, OutputError
from attnbalance.models.generate import Sampling
from attnbalance.models.hooked import HookedModel
from attnbalance.readings import knowledge as module
from attnbalance.readings.knowledge import CATEGORIES, DRAWS, SAMPLES, Knowledge, knowledge
from attnbalance.readings.recall import answer_budgets

KNOWN, SOME, SELDOM, NEVER = range(4)


class Script:
    """A model of which we know what it says.

    TOWNS[0] always right, [1] in draws 1, 3, 5, 7 and 9, [2] in the samples of draw 3, the others never; statements and
    chats are never right.
    """

    def __init__(self) -> None:
        self.calls = list[tuple[int, Sampling | None, bool]]()
        self.titles = list[object]()

    def __call__(
        self,
        model: HookedModel,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling | None,
        first_line: bool,
        **rest: object,
    ) -> list[str]:
        self.calls.append((len(prompts), sampling, first_line))
        self.titles.append(rest["title"])
        draw = sum(sampling is None and first_line for _, sampling, first_line in self.calls) - 2  # after the two forms
        return [self.says(prompt, draw, sampling) for prompt in prompts]

    def says(self, prompt: Prompt, draw: int, sampling: Sampling | None) -> str:
        index = [fact.subject for fact in TOWNS].index(prompt.fact.subject)
        asked = prompt.text.rpartition("\n\n")[2].startswith("Question")
        right = asked and (
            index == KNOWN
            or (index == SOME and sampling is None and draw in (1, 3, 5, 7, 9))
            or (index == SELDOM and sampling is not None and sampling.seed == 3)
        )
        return f" {prompt.fact.answer}" if right else " something else"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    scripted = Script()
    monkeypatch.setattr(module, "generate", scripted)
    return scripted


@pytest.fixture
def hooked() -> HookedModel:
    return load_model(tiny_model("llama"), tokenizer=tiny_tokenizer())


def test_a_progress_bar_names_its_pass(script: Script, hooked: HookedModel) -> None:
    known = knowledge(hooked, make_prompts(TOWNS))
    names = [*FORMS, *(f"draw {draw}" for draw in range(1, DRAWS)), *(f"samples {draw}" for draw in range(DRAWS))]
    assert set(known.right) == set(FORMS)  # the tokenizer has no chat template
    assert script.titles == [f"{name}, pass {i} of at most {len(names)}" for i, name in enumerate(names, 1)]


def test_categories_follow_the_definition(script: Script, hooked: HookedModel) -> None:
    known = knowledge(hooked, make_prompts(TOWNS))
    assert known.categories[:4] == CATEGORIES
    assert set(known.categories[4:]) == {"Unknown"}
    assert known.greedy[:4] == (1.0, 0.5, 0.0, 0.0)
    assert known.sampled == tuple(i == SELDOM for i in range(len(TOWNS)))
    assert known.scores[:4] == (1.0, 0.5, 0.05, 0.0)
    assert known.known().mean == 2 / len(TOWNS)
    assert known.accuracy("question").mean == 1 / len(TOWNS)
    assert known.accuracy("statement").mean == 0
    assert known.best_form() == "question"
    assert repr(known) == f"Knowledge(2 of {len(TOWNS)} facts HighlyKnown or MaybeKnown)"


def test_a_model_that_guesses_gets_as_much_by_chance_as_it_knows(
    hooked: HookedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = [Fact(f"Town {i}", "city", (("Oslo", "Rome", "Bern")[min(i % 5, 2)],)) for i in range(100)]
    guesses = {fact.subject: facts[(7 * i + 3) % 100].answer for i, fact in enumerate(facts)}  # no relation to the fact

    def guess(model: HookedModel, prompts: Sequence[Prompt], **how: object) -> list[str]:
        return [guesses[prompt.fact.subject] for prompt in prompts]

    monkeypatch.setattr(module, "generate", guess)
    known = knowledge(hooked, make_prompts(facts), batch_size=32)
    assert known.by_chance().low < known.known().mean < known.by_chance().high
    monkeypatch.setattr(module, "generate", lambda model, prompts, **how: [p.fact.answer for p in prompts])
    known = knowledge(hooked, make_prompts(facts), batch_size=32)
    assert known.known().mean == 1
    expected = sum((sum(fact.answer == name for fact in facts) / 100) ** 2 for name in ("Oslo", "Rome", "Bern"))
    assert known.by_chance().low < expected < known.by_chance().high


def test_only_facts_that_nothing_has_decided_are_sampled(script: Script, hooked: HookedModel) -> None:
    knowledge(hooked, make_prompts(TOWNS), seed=0)
    n = len(TOWNS)
    assert len([1 for _, sampling, _ in script.calls if sampling is None]) == len(FORMS) + DRAWS - 1
    sampled = [(size, sampling) for size, sampling, _ in script.calls if sampling is not None]
    assert [size for size, _ in sampled] == [SAMPLES * (n - 2)] * 4 + [SAMPLES * (n - 3)] * 6
    assert {(sampling.temperature, sampling.seed) for _, sampling in sampled} == {(0.5, k) for k in range(DRAWS)}


def test_a_killed_run_goes_on_after_the_passes_that_it_finished(
    script: Script, hooked: HookedModel, tmp_path: Path
) -> None:
    prompts = make_prompts(TOWNS)
    known = knowledge(hooked, prompts, work=tmp_path)
    calls = len(script.calls)
    (tmp_path / "samples 9.json").unlink()
    again = knowledge(hooked, prompts, work=tmp_path)
    assert len(script.calls) == calls + 1
    assert again == known


def test_answers_are_those_of_a_plain_loop_in_every_form() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("chat")
    model.config.max_position_embeddings = 512  # rotary positions have no table to run out of
    prompts = make_prompts(SPORTS, "plain")
    hooked = load_model(model, tokenizer=tokenizer)
    known = knowledge(hooked, prompts, batch_size=3)
    assert list(known.outputs) == [*FORMS, "chat"]
    for form in FORMS:
        asked = in_form(form, prompts)
        encodings = encode(asked, tokenizer)
        for i, budget in enumerate(answer_budgets(module.PromptSet.of(asked, tokenizer))):
            text = tokenizer.decode(argmax_loop(eager(model), encodings[i].ids, budget), skip_special_tokens=True)
            few_shot = form.startswith("few-shot")
            assert known.outputs[form][i] == (text.partition("\n")[0] if few_shot else text)


def made(greedy: Sequence[float], facts: Sequence[Fact]) -> Knowledge:
    right = {"question": tuple(g == 1 for g in greedy), "few-shot": tuple(g > 0 for g in greedy)}
    texts = {form: tuple("" for _ in greedy) for form in right}
    return Knowledge(
        make_prompts(facts), texts, right, tuple(greedy), tuple(False for _ in greedy), (0.0,) * len(greedy)
    )


def test_relations_are_counted_apart() -> None:
    facts = [*TOWNS[:3], *SPORTS[:2]]
    known = made((1.0, 0.0, 0.5, 1.0, 0.0), facts)
    city, sport = (known.of_relation(fact.relation) for fact in (TOWNS[0], SPORTS[0]))
    assert (city.greedy, sport.greedy) == ((1.0, 0.0, 0.5), (1.0, 0.0))
    assert city.best_form() == "few-shot"
    assert replace(city, right={"question": (False,) * len(city.prompts)}).best_form() is None
    assert sport.best_form() == "question"  # of equally good ones, the first
    answers = [[fact.answer for fact in part] for part in (TOWNS[:3], SPORTS[:2])]
    assert known.constant() == sum(max(map(part.count, part)) for part in answers) / 5
    with pytest.raises(DataError, match="no facts of relation 'hobby'; there are"):
        known.of_relation("hobby")
    with pytest.raises(DataError, match="the model was asked as question, few-shot, not as 'chat'"):
        known.accuracy("chat")


def test_fifths_go_from_popular_to_obscure() -> None:
    facts = [Fact(f"Subject {i}", "city", ("Oslo",), popularity=float(i)) for i in range(10)]
    known = made([i / 10 for i in range(10)], facts)
    assert [part.greedy for part in known.by_popularity()] == [
        (0.9, 0.8), (0.7, 0.6), (0.5, 0.4), (0.3, 0.2), (0.1, 0.0)
    ]  # fmt: skip


def test_what_cannot_be_asked_is_refused_before_anything_is_asked(script: Script, hooked: HookedModel) -> None:
    with pytest.raises(DataError, match="few-shot needs more than 4 subjects of each relation; 'sport' has 4"):
        knowledge(hooked, make_prompts([*TOWNS, *SPORTS[:4]]))
    with pytest.raises(DataError, match="scoring must be one of"):
        knowledge(hooked, make_prompts(TOWNS), scoring="exact")
    with pytest.raises(DataError, match="no form 'poem'; there are statement, question"):
        knowledge(hooked, make_prompts(TOWNS), forms=["poem"])
    assert script.calls == []


def test_other_prompts_in_the_same_folder_are_asked_anew(script: Script, hooked: HookedModel, tmp_path: Path) -> None:
    knowledge(hooked, make_prompts(TOWNS), work=tmp_path)
    turned = knowledge(hooked, make_prompts(TOWNS[::-1]), work=tmp_path)
    assert turned.outputs["question"][-1] == f" {TOWNS[0].answer}"
    (tmp_path / "question.json").write_text((tmp_path / "question.json").read_text().replace("something", "nothing"))
    with pytest.raises(OutputError, match=r"question\.json was changed"):
        knowledge(hooked, make_prompts(TOWNS[::-1]), work=tmp_path)


def test_other_weights_and_longer_answers_are_asked_anew(script: Script, hooked: HookedModel, tmp_path: Path) -> None:
    knowledge(hooked, make_prompts(TOWNS), forms=(), work=tmp_path)
    calls = len(script.calls)
    knowledge(hooked, make_prompts(TOWNS), forms=(), work=tmp_path)
    assert len(script.calls) == calls
    longer = [
        replace(fact, answers=(*fact.answers, "an answer of many more words than the other one has")) for fact in TOWNS
    ]
    knowledge(hooked, make_prompts(longer), forms=(), work=tmp_path)
    assert len(script.calls) == 2 * calls
    with torch.no_grad():
        hooked.model.get_input_embeddings().weight.mul_(2)  # pyright: ignore[reportCallIssue]
    knowledge(hooked, make_prompts(longer), forms=(), work=tmp_path)
    assert len(script.calls) == 3 * calls


def test_the_constant_answer_is_right_where_it_is_accepted() -> None:
    facts = [Fact(f"Club {i}", "sport", (name,)) for i, name in enumerate(["football"] * 3)]
    facts += [Fact("Club 3", "sport", ("soccer", "football")), Fact("Club 4", "sport", ("golf",))]
    assert made((0.0,) * 5, facts).constant() == 4 / 5


def test_the_constant_answer_is_scored_as_answers_are(hooked: HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [("United States of America",)] * 3 + [("Italy", "it")] * 2 + [("Canada", "ca")] * 2 + [("Peru",)]
    facts = [Fact(f"Novel {i}", "country", accepted) for i, accepted in enumerate(answers)]
    monkeypatch.setattr(module, "generate", lambda model, prompts, **how: [answers[0][0]] * len(prompts))
    words, contained = (
        knowledge(hooked, make_prompts(facts), scoring=scoring).of_relation("country")
        for scoring in ("whole-words", "containment")
    )
    assert words.constant() == words.accuracy("question").mean == 3 / 8
    assert contained.constant() == contained.accuracy("question").mean == 7 / 8  # un-it-ed, ameri-ca


def test_without_forms_only_the_few_shot_question_is_asked(script: Script, hooked: HookedModel) -> None:
    known = knowledge(hooked, make_prompts(TOWNS), forms=())
    assert list(known.right) == ["few-shot"]
    assert known.categories[0] == "HighlyKnown"


def test_a_chat_template_that_refuses_is_left_out_with_its_reason(script: Script, hooked: HookedModel) -> None:
    tokenizer = tiny_tokenizer("chat")
    tokenizer.chat_template = "{{ raise_exception('only a system may speak') }}"
    with pytest.warns(UserWarning, match="the model is not asked in a chat: .*only a system may speak"):
        known = knowledge(load_model(tiny_model("llama"), tokenizer=tokenizer), make_prompts(TOWNS))
    assert list(known.right) == list(FORMS)


def test_another_state_of_adapters_is_asked_anew(script: Script, hooked: HookedModel, tmp_path: Path) -> None:
    adapted = load_model(tiny_lora(tiny_model("llama"), ["q_proj"]), tokenizer=hooked.tokenizer)
    asked = list[int]()

    def ask() -> None:
        before = len(script.calls)
        knowledge(adapted, make_prompts(TOWNS), forms=(), work=tmp_path)
        asked.append(len(script.calls) - before)

    ask()
    ask()
    with torch.no_grad():
        next(weight for name, weight in adapted.model.named_parameters() if "lora_B" in name).add_(1)
    ask()
    with adapted.model.disable_adapter():  # pyright: ignore[reportCallIssue]
        ask()
    ask()
    assert [bool(count) for count in asked] == [True, False, True, True, True]


def test_another_tokenizer_or_configuration_is_asked_anew(script: Script, hooked: HookedModel, tmp_path: Path) -> None:
    other, counts = tiny_model("llama"), list[int]()
    other.config.rms_norm_eps *= 2
    models = [
        hooked,
        load_model(tiny_model("llama"), tokenizer=tiny_tokenizer("bos")),
        load_model(other, tokenizer=hooked.tokenizer),
    ]
    for model in [models[0], models[0], models[1], models[2]]:
        before = len(script.calls)
        knowledge(model, make_prompts(TOWNS), forms=(), work=tmp_path)
        counts.append(len(script.calls) - before)
    assert [bool(count) for count in counts] == [True, False, True, True]


def test_another_end_of_sequence_is_asked_anew(script: Script, hooked: HookedModel, tmp_path: Path) -> None:
    knowledge(hooked, make_prompts(TOWNS), forms=(), work=tmp_path)
    calls = len(script.calls)
    hooked.model.generation_config.eos_token_id = [2, 7]
    knowledge(hooked, make_prompts(TOWNS), forms=(), work=tmp_path)
    assert len(script.calls) == 2 * calls
