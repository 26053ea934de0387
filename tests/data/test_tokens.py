"""Spans of tokens, against a count of bytes that knows nothing of offsets."""

from __future__ import annotations

import warnings

import pytest
from tiny import FACTS, TOKENIZERS, tiny_prompts, tiny_tokenizer, without_bytes
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from attnbalance import Fact, Prompt
from attnbalance.data.forms import in_form
from attnbalance.data.prompt_sets import PromptSet
from attnbalance.data.prompts import make_prompts
from attnbalance.data.tokens import Encoding, as_chat, encode, encode_answers, encode_continued
from attnbalance.errors import BadRowsError, ModelError
from attnbalance.finetuning.examples import make_examples

NORMALISING = ("lower",)


def byte_unit(piece: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of bytes of text that one token of a byte-level or byte-fallback vocabulary stands for."""
    if piece in ("<s>", "</s>"):
        return 0
    if piece.startswith("<0x"):
        return 1
    if "▁" in tokenizer.get_vocab():
        return len(piece.replace("▁", " ").encode())
    return len(piece)  # the byte-level alphabet has one character a byte


def tokens_by_bytes(
    prompt: Prompt, encoding: Encoding, tokenizer: PreTrainedTokenizerBase, lead: int
) -> tuple[int, ...]:
    """The tokens that share a byte with the subject; `lead` bytes stand before the text (a prepended mark)."""
    start = lead + len(prompt.text[: prompt.spans["subject"][0]].encode())
    end = start + len(prompt.part("subject").encode())
    indices, offset = [], 0
    for i, piece in enumerate(tokenizer.convert_ids_to_tokens(list(encoding.ids))):
        size = byte_unit(piece, tokenizer)
        if offset < end and offset + size > start:
            indices.append(i)
        offset += size
    assert offset == lead + len(prompt.text.encode())
    return tuple(indices)


@pytest.mark.parametrize("template", ["qa", "plain", "{subject}", "({subject})"])
@pytest.mark.parametrize("kind", [kind for kind in TOKENIZERS if kind not in NORMALISING])
def test_subject_tokens_are_those_that_share_a_byte_with_the_subject(kind: str, template: str) -> None:
    tokenizer, prompts = tiny_tokenizer(kind), tiny_prompts(template)
    for prompt, encoding in zip(prompts, encode(prompts, tokenizer), strict=True):
        expected = tokens_by_bytes(prompt, encoding, tokenizer, lead=1 if kind == "metaspace" else 0)
        if kind == "trimmed":  # a token that is only the space before the subject is reported without width
            expected = tuple(j for j in expected if tokenizer.decode([encoding.ids[j]]).strip() or j != expected[0])
        assert encoding.spans["subject"] == expected, prompt.text


def test_subject_tokens_of_a_normalising_tokenizer_decode_to_the_subject() -> None:
    tokenizer = tiny_tokenizer("lower")
    for fact, encoding in zip(FACTS, encode(tiny_prompts(), tokenizer), strict=True):
        decoded = tokenizer.decode([encoding.ids[j] for j in encoding.spans["subject"]])
        assert decoded.strip() == tokenizer.decode(tokenizer(fact.subject)["input_ids"]).strip()


def test_a_subject_before_an_apostrophe_ends_there() -> None:
    tokenizer = tiny_tokenizer()
    prompt = make_prompts([Fact("Ada Lovelace", "occupation", ("x",), question="What is Ada Lovelace's job?")], "plain")
    encoding = encode(prompt, tokenizer)[0]
    assert tokenizer.decode([encoding.ids[j] for j in encoding.spans["subject"]]) == " Ada Lovelace"
    assert tokenizer.decode(encoding.ids[encoding.spans["subject"][-1] + 1 :]).startswith("'s")


@pytest.mark.parametrize(
    "question", ["Rust", "Rust?", "Who wrote Rust", "é Rust", "Rust 👩‍👩‍👧", "\nRust\n", "مرحبا Rust مرحبا"]
)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_subject_at_the_start_or_the_end_is_found(kind: str, question: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    encoding = encode(make_prompts([Fact("Rust", "author", ("x",), question=question)], "plain"), tokenizer)[0]
    assert "rust" in tokenizer.decode([encoding.ids[j] for j in encoding.spans["subject"]]).lower()
    assert encoding.spans["subject"] == tuple(range(encoding.spans["subject"][0], encoding.spans["subject"][-1] + 1))


def test_special_tokens_stand_before_the_text_and_never_behind_it() -> None:
    plain = encode(tiny_prompts(), tiny_tokenizer())
    for kind in ("bos", "eos"):  # the "eos" tokenizer frames a text in <s> and </s>
        for bare, framed in zip(plain, encode(tiny_prompts(), tiny_tokenizer(kind)), strict=True):
            assert framed.ids == (0, *bare.ids)
            assert framed.spans["subject"] == tuple(j + 1 for j in bare.spans["subject"])


def test_whole_words_reported_without_width_get_the_same_tokens_as_with_it() -> None:
    tokenizer = tiny_tokenizer("zero_width")
    offsets = tokenizer([tiny_prompts()[1].text], return_offsets_mapping=True)["offset_mapping"][0]  # pyright: ignore[reportIndexIssue]
    assert sum(start == end for start, end in offsets) > 5  # or this would test nothing
    for with_width, without in zip(
        encode(tiny_prompts(), tiny_tokenizer()), encode(tiny_prompts(), tokenizer), strict=True
    ):
        assert without.ids == with_width.ids
        assert without.spans == with_width.spans


def test_a_chat_holds_the_same_subject_and_no_second_set_of_special_tokens() -> None:
    tokenizer = tiny_tokenizer("chat")
    chats = as_chat(tiny_prompts("plain"), tokenizer)
    for fact, chat, encoding in zip(FACTS, chats, encode(chats, tokenizer), strict=True):
        assert chat.part("subject") == fact.subject
        assert chat.text == f"<s><|user|>\n{fact.question}</s>\nAssistant:"
        assert encoding.ids.count(0) == encoding.ids.count(1) == 1
        assert tokenizer.decode([encoding.ids[j] for j in encoding.spans["subject"]]).strip() == fact.subject


def test_a_chat_needs_a_template_that_leaves_the_question_as_it_is() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        as_chat(tiny_prompts(), tiny_tokenizer())
    tokenizer = tiny_tokenizer("chat")
    tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ModelError, match="alters the text of a turn: 'Question: In what country"):
        as_chat(tiny_prompts(), tokenizer)


def test_a_tokenizer_without_offsets_is_refused_by_name() -> None:
    slow = ByT5Tokenizer()
    for refuse in (lambda: encode(tiny_prompts(), slow), lambda: encode_continued(["a"], ["b"], slow)):
        with pytest.raises(ModelError, match="tokenizer ByT5Tokenizer gives no character offsets"):
            refuse()


def test_a_span_whose_tokens_say_something_else_is_refused_with_the_first_rows() -> None:
    fact = Fact("Rust", "author", ("x",), question="Who wrote it?")
    wrong = Prompt("Who wrote it?", {"subject": (40, 44)}, "author/Rust", fact)
    message = r"1 of 10 prompts have a span(.|\n)*row 10: '' has no token(.|\n)*fix .*`skip_bad=True`"
    with pytest.raises(BadRowsError, match=message):
        encode((*tiny_prompts(), wrong), tiny_tokenizer())


def test_trained_tokenizer_without_bytes_maps_popqa_subjects(stories, popqa) -> None:
    from attnbalance import load_facts

    tokenizer = AutoTokenizer.from_pretrained(stories)
    prompts = make_prompts(load_facts(f"popqa:{popqa}", limit=300))
    for prompt, encoding in zip(prompts, encode(prompts, tokenizer), strict=True):
        decoded = tokenizer.decode([encoding.ids[j] for j in encoding.spans["subject"]])
        assert prompt.part("subject") in decoded
        assert len(decoded.strip()) <= len(prompt.part("subject")) + 2  # at most a token's edge more than the subject


@pytest.mark.parametrize("kind", ["plain", "bos", "trimmed", "metaspace", "ignore_merges", "zero_width", "lower"])
def test_tokens_are_shown_as_the_characters_that_they_stand_for(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    for encoding in encode([p for p in tiny_prompts() if p.text.isascii()], tokenizer):
        start = "<s>" if encoding.tokens[0] == "<s>" else ""
        assert "".join(encoding.tokens) == start + encoding.prompt.text


def test_an_answer_stands_behind_a_space_and_in_a_chat_right_behind_the_header():
    tokenizer, prompts = tiny_tokenizer("chat"), tiny_prompts("qa")
    for asked, space in ((prompts, " "), (as_chat(prompts, tokenizer), "")):
        encodings = encode(asked, tokenizer)
        for encoding, answer in zip(encodings, encode_answers(encodings, tokenizer), strict=True):
            assert tokenizer.decode(answer) == f"{space}{encoding.prompt.fact.answer}"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_text_and_what_follows_it_are_the_tokens_of_both_together(kind):
    tokenizer = tiny_tokenizer(kind)
    texts = ["A", "Name a city.\n\n", "One\n"]
    for text, encoded in zip(texts, encode_continued(texts, ["Rome is one."] * 3, tokenizer), strict=True):
        alone, joined = tokenizer([text, text + "Rome is one."], return_offsets_mapping=True)["input_ids"]
        if kind == "eos":  # this one ends each text itself
            alone, joined = alone[:-1], joined[:-1]
        assert encoded == (tuple(alone), tuple(joined[len(alone) :])), text


def test_a_continuation_without_tokens_of_its_own_has_none():
    tokenizer = tiny_tokenizer()
    assert encode_continued([], [], tokenizer) == []
    assert encode_continued(["Rome"], [""], tokenizer) == [None]
    assert encode_continued(["Pari"], ["s"], tokenizer) == [None]  # one token: the two are merged


VICUNA = (
    "{% for m in messages %}{{ ('USER: ' if m.role == 'user' else 'ASSISTANT: ') + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "space"),
    [
        (VICUNA, " "),
        (VICUNA.replace("ASSISTANT: ", "ASSISTANT:\n").replace("ASSISTANT:'", "ASSISTANT:\n'"), ""),
        (VICUNA.replace("ASSISTANT: ", "ASSISTANT:<think>no</think> "), ""),  # more than white space
        (VICUNA.replace("{{ (", "{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ ("), ""),
    ],
)
def test_an_answer_in_a_chat_begins_as_the_template_says(template: str, space: str) -> None:
    tokenizer = tiny_tokenizer("chat")
    tokenizer.chat_template = template
    chat = as_chat(tiny_prompts("qa"), tokenizer)
    assert {prompt.answer_space for prompt in chat} == {space}
    encodings = encode(chat, tokenizer)
    for encoding, answer in zip(encodings, encode_answers(encodings, tokenizer), strict=True):
        assert tokenizer.decode(answer) == f"{space}{encoding.prompt.fact.answer}"


def test_a_chat_template_that_puts_a_thought_before_the_answer_is_warned_of() -> None:
    tokenizer = tiny_tokenizer("chat")
    turns = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
    )
    tokenizer.chat_template = f"{turns}{{% endfor %}}{{% if add_generation_prompt %}}[assistant]{{% endif %}}"
    with pytest.warns(UserWarning, match="puts '<think></think>' before an answer, behind the prompt: probabilities"):
        chat = as_chat(tiny_prompts("qa"), tokenizer)
    assert all(prompt.text.endswith("[assistant]") for prompt in chat)
    assert {prompt.answer_space for prompt in chat} == {""}


def test_a_chat_template_whose_prompts_end_inside_a_thought_is_warned_of() -> None:
    tokenizer = tiny_tokenizer("chat")
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.chat_template = f"{turns}{{% if add_generation_prompt %}}[assistant]<think>\n{{% endif %}}"
    with pytest.warns(UserWarning, match=r"ends prompts with '<think>\\n': probabilities of answers"):
        as_chat(tiny_prompts("qa"), tokenizer)


@pytest.mark.parametrize("form", ["question", "few-shot"])
def test_an_answer_after_white_space_has_no_space_of_its_own(form: str) -> None:
    facts = [Fact(f"Town {i}", "country", ("Chad",)) for i in range(6)]
    tokenizer, prompts = tiny_tokenizer(), make_prompts(facts, "Q: {question}\nA:\n")
    encodings = encode(in_form(form, prompts), tokenizer)
    for encoding, answer in zip(encodings, encode_answers(encodings, tokenizer), strict=True):
        assert tokenizer.decode(answer) == encoding.prompt.fact.answer
        assert "\n " not in encoding.prompt.text


@pytest.mark.parametrize("subject", ["Paris", "1984", "Zürich", "北京"])
def test_a_subject_has_the_same_sentencepiece_tokens_at_the_start_of_a_text_and_within(stories, subject: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    fact = Fact(subject, "country", ("x",))
    spans = []
    for template in ("{subject} is in", "I see that {subject} is in"):
        (encoding,) = encode(make_prompts([fact], template), tokenizer)
        spans.append(tokenizer.convert_ids_to_tokens([encoding.ids[j] for j in encoding.spans["subject"]]))
        before = tokenizer.convert_ids_to_tokens(encoding.ids[encoding.spans["subject"][0] - 1])
        assert before == "▁"  # this vocabulary has it as a token of its own before these subjects
    assert spans[0] == spans[1]
    assert "".join(spans[0]).startswith(subject[0]) or spans[0][0].startswith("<0x")


@pytest.mark.parametrize("together", [1, 4])
def test_prompts_are_tokenized_in_order_however_many_at_once(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    prompts, tokenizer = make_prompts(FACTS), tiny_tokenizer("bytelevel")
    expected = [encode([prompt], tokenizer)[0] for prompt in prompts]
    monkeypatch.setattr("attnbalance.data.tokens.TOGETHER", together)
    encoded = encode(prompts, tokenizer)
    assert [(e.ids, e.tokens, e.spans) for e in encoded] == [(e.ids, e.tokens, e.spans) for e in expected]
    assert [e.prompt for e in encoded] == list(prompts)


def test_equal_tokens_of_prompts_are_held_once() -> None:
    encoded = encode(make_prompts(FACTS), tiny_tokenizer())
    ids, texts = ([value for e in encoded for value in getattr(e, name)] for name in ("ids", "tokens"))
    assert max(ids) > 256  # Python itself holds smaller numbers once
    for values in (ids, texts):
        assert len(set(map(id, values))) == len(set(values)) < len(values)


@pytest.mark.parametrize("unknown", [True, False])
def test_prompts_whose_answers_cannot_be_written_are_warned_of_once(unknown: bool) -> None:
    tokenizer, lodz = without_bytes(unknown), "\u0141\u00f3d\u017a"
    facts = [
        Fact("France", "capital", ("Paris",)),
        Fact("Spain", "capital", (lodz,)),
        Fact("Poland", "city", (lodz, "Paris")),
    ]
    prompts = PromptSet.of(make_prompts(facts), tokenizer)
    with pytest.warns(
        UserWarning, match="1 of 3 prompts have no answer that the tokenizer can write, so that all"
    ) as said:
        lengths = prompts.answers.lengths
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prompts.at([1, 0]).answers.lengths == (lengths[1], lengths[0])
        _ = PromptSet.of(make_prompts(facts[::2]), tokenizer).answers.lengths


@pytest.mark.parametrize("unknown", [True, False])
def test_an_answer_whose_letters_the_tokenizer_does_not_have_is_refused_by_name(unknown: bool) -> None:
    tokenizer = without_bytes(unknown)
    facts = [Fact("France", "capital", ("Paris",)), Fact("Spain", "capital", ("\u0141\u00f3d\u017a",))]
    encodings = encode(make_prompts(facts), tokenizer)
    (answer,) = encode_answers(encodings[:1], tokenizer)
    assert tokenizer.decode(answer).strip() == "Paris"
    with pytest.raises(BadRowsError, match="answers cannot be represented by the tokenizer") as raised:
        encode_answers(encodings, tokenizer)
    assert raised.value.indices == (1,)
    with pytest.raises(BadRowsError, match="cannot be represented by the tokenizer"):
        make_examples(facts, tokenizer)


@pytest.mark.parametrize("unknown", [True, False])
def test_subjects_that_the_tokenizer_does_not_know_are_warned_of(unknown: bool) -> None:
    tokenizer = tiny_tokenizer() if not unknown else without_bytes(unknown=True)
    facts = [Fact("Łódź", "country", ("Poland",)), Fact("Paris", "country", ("France",))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PromptSet.of(make_prompts(facts), tokenizer)
    said = [str(warning.message) for warning in caught]
    expected = (
        "1 of 2 prompts have a subject with characters that are unknown to the tokenizer (first: 'Łódź'); the model"
    )
    assert [text.startswith(expected) for text in said] == [True] * unknown


def test_spaces_that_the_tokenizer_puts_between_digits_are_no_tokens_of_the_subject() -> None:
    """Digits before Metaspace give "1984" as ▁ 1 ▁ 9 ▁ 8 ▁ 4; each bare ▁ claims the digit behind it."""
    vocabulary = [("<unk>", 0.0), ("▁", -2.0), *((piece, -3.0) for piece in "0123456789?Whois"), ("▁New", -1.0)]
    backend = Tokenizer(Unigram(vocabulary, unk_id=0, byte_fallback=False))
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Metaspace(prepend_scheme="always")]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    (encoding,) = encode([Prompt("Who is 1984?", {"subject": (7, 11)}, "0", Fact("1984", "author", ("x",)))], tokenizer)
    assert "".join(tokenizer.convert_ids_to_tokens(list(encoding.ids))).endswith("▁1▁9▁8▁4▁?")
    tokens = [tokenizer.convert_ids_to_tokens(encoding.ids[j]) for j in encoding.spans["subject"]]
    assert tokens == ["1", "9", "8", "4"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_space_within_a_subject_stays_a_part_of_it(kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    (encoding,) = encode(make_prompts([Fact("A b", "country", ("x",))], "I see {subject} there"), tokenizer)
    positions = encoding.spans["subject"]
    assert list(positions) == list(range(positions[0], positions[-1] + 1))
    assert tokenizer.decode([encoding.ids[j] for j in positions]).strip().casefold() == "a b"
