"""Chat templates are programs by a model's author: whatever one does, there is one message."""

from __future__ import annotations

import os
import resource

import pytest
from tiny import CHAT, tiny_prompts, tiny_tokenizer

from attnbalance.data import chat_templates
from attnbalance.data.chat_templates import render_turns
from attnbalance.data.tokens import as_chat
from attnbalance.errors import ModelError

FAILING = {
    "division by zero": ("{{ 1 / 0 }}", "division by zero"),
    "a big range": ("{{ range(10**9) | list }}", "Range too big"),
    "a type error": ("{{ 1 + 'a' }}", "unsupported operand"),
    "an unknown name": ("{{ weather.today.name }}", "'weather' is undefined"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "deep brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
    "a text of a terabyte": ("{{ 'a' * 10**12 }}", "MemoryError"),
    "a text that doubles": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "MemoryError",
    ),
    "a width of a terabyte": ("{{ 'a' | center(10**12) }}", "MemoryError"),
    "loops in loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "it takes more than 1 s or 256 MB",
    ),
    "a long frame": ("{{ messages[0].content }}{{ 'a' * 200000 }}", "200,000 characters around a turn"),
    "half a character": ("\ud800{{ messages[0].content }}", "surrogates not allowed"),
    "another file": ("{% include 'x' %}", "no loader"),
    "Python's own attributes": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "a syntax error": ("{% if %}", "Expected an expression"),
    "its own complaint": ("{{ raise_exception('A system turn is needed') }}", "A system turn is needed"),
    "a long complaint": ("{{ raise_exception('no ' * 90000) }}", "no no no"),
}


@pytest.mark.parametrize(("template", "message"), FAILING.values(), ids=FAILING)
def test_a_template_that_fails_or_does_not_end_gives_one_message(
    template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 1)
    monkeypatch.setattr(chat_templates, "SECONDS_A_TURN", 0)
    monkeypatch.setattr(chat_templates, "MEMORY", 2**28)  # filled in a tenth of a second, on a busy machine too
    tokenizer = tiny_tokenizer("chat")
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=r"refuses one user turn: .*leave out `chat=True`") as refusal:
        as_chat(tiny_prompts("plain"), tokenizer)
    assert message in str(refusal.value)
    assert len(str(refusal.value)) < 1500


@pytest.mark.parametrize(
    "template", [{"a": "x", "b": "y"}, 3, ["x"]], ids=["several, none by default", "number", "list"]
)
def test_what_is_not_one_template_gives_one_message(template: object) -> None:
    tokenizer = tiny_tokenizer("chat")
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match="refuses one user turn"):
        as_chat(tiny_prompts("plain"), tokenizer)


def test_the_limits_hold_for_the_rendering_and_not_for_this_process() -> None:
    before = [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]
    tokenizer = tiny_tokenizer("chat")
    tokenizer.chat_template = CHAT
    turns = [f"turn {i}" for i in range(300)]
    assert render_turns(tokenizer, turns)[0] == [f"<s><|user|>\n{turn}</s>\nAssistant:" for turn in turns]
    assert [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)] == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # nothing is left running
