"""Rendering a model's chat template, a program by the model's author, with limits on memory and time."""

from __future__ import annotations

import multiprocessing
import re
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from attnbalance.errors import ModelError

MEMORY = 2**30
"""Bytes that rendering may take beyond what the process already holds."""

SECONDS, SECONDS_A_TURN = 10, 0.05
"""Processor time for rendering, and for each turn; a usual template takes less than a millisecond a turn."""

LONGEST = 100_000
"""Characters that a template may put around a turn; the longest in use put about 10,000."""

ANSWER = "Answer"
"""What the assistant says in the chat that is rendered with an answer."""

NAME = r"(\w+:)?(think|thinking|thought|reasoning)"
"""The name of a tag around thoughts."""

OPENING = rf"<{NAME}>|\[THINK\]|<\|START_THINKING\|>"
"""What models put before their thoughts."""

OPEN = re.compile(rf"({OPENING})\s*$")
"""The end of a prompt whose chat template has begun the thoughts."""


def render_turns(tokenizer: PreTrainedTokenizerBase, contents: Sequence[str]) -> tuple[list[str], str]:
    """Each content as the one user turn of a chat, rendered up to where the assistant begins.

    And the first of them with the assistant's turn `ANSWER`; "" if the template refuses that.

    Jinja's sandbox keeps a template from files and attributes, but not from `'a' * 10**12` or nested loops. So a
    separate process renders, with limits on memory and processor time that the kernel enforces. It is forked, which
    takes milliseconds (outside Linux it is spawned, with a limit on processor time only). Raises `ModelError` for any
    failure in it.
    """
    seconds = SECONDS + round(SECONDS_A_TURN * len(contents))
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(tokenizer, list(contents), seconds, sender), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses none of the locks of other threads
        process.start()
    sender.close()
    try:
        in_time = receiver.poll(60 + 10 * seconds)  # on a busy machine processor time passes slowly
        rendered, answered, failure = receiver.recv() if in_time else ([], "", "no end")
    except EOFError:
        rendered, answered, failure = [], "", f"it takes more than {seconds} s or {MEMORY // 2**20} MB"
    finally:
        process.kill()
        process.join()
    if failure:
        raise ModelError(
            f"the chat template of {tokenizer.name_or_path!r} refuses one user turn: {failure}; leave out `chat=True`"
        )
    return rendered, answered


def _render(tokenizer: PreTrainedTokenizerBase, contents: list[str], seconds: int, sender: Connection) -> None:
    """Send the rendered turns and the failure, if any; a process that the kernel ends sends nothing."""
    rendered = list[str]()
    try:
        _limit(seconds)
        for content in contents:
            turn = [{"role": "user", "content": content}]
            text = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
            if len(text) > len(content) + LONGEST:
                raise ModelError(f"it puts {len(text) - len(content):,} characters around a turn, over {LONGEST:,}")
            text.encode()  # half a character could not be tokenized
            rendered.append(text)
        sender.send((rendered, _answered(tokenizer, contents[0]), ""))
    except BaseException as error:  # a template can raise anything; the parent reports it
        rendered.clear()
        sender.send(([], "", f"{' '.join(str(error)[:1000].split()) or 'no message'} ({type(error).__name__})"))


def _answered(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    """A user's turn and the assistant's."""
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # a template may refuse what it was not written for
        return ""
    return text if len(text) <= len(content) + LONGEST else ""


def _limit(seconds: int) -> None:
    """Limit this process's memory and processor time."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = Path("/proc/self/statm")
    if pages.exists():
        held = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
