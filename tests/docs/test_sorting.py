"""Tables of the site are sorted by a click and by the keyboard, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from doc_pages import DOCS
from playwright.sync_api import Browser, Page

HEADS = ("method", "kept", "seconds")
ROWS = (
    ("plain", "81% (84, 100, 59)", "1,200"),
    ("adapter", "9% [1, 20]", "-3.5e1"),
    ("replay", "", "900"),
    ("base", "100%", "none"),
)
BY_KEPT = ["adapter", "plain", "base", "replay"]
"""In order of the numbers that cells begin with; the empty cell comes last."""


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in ROWS)
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    style, script = ((DOCS / "_static" / name).read_text() for name in ("site.css", "sort.js"))
    page = browser.new_page()
    page.set_content(
        f"<html lang=en><title>Tables</title><style>{style}</style><script>{script}</script><main><h1>Tables</h1>"
        f"<table class=sortable>{table}<table id=plain>{table}</main></html>"
    )
    yield page
    page.close()


def names(page: Page) -> list[str]:
    return page.locator(".sortable tbody td:first-child").all_inner_texts()


def orders(page: Page) -> list[str | None]:
    return [head.get_attribute("aria-sort") for head in page.locator(".sortable th").all()]


def test_a_click_sorts_up_and_the_next_one_down(page: Page) -> None:
    assert orders(page) == [None, None, None]
    page.locator(".sortable button").nth(1).click()
    assert (names(page), orders(page)) == (BY_KEPT, [None, "ascending", None])
    page.locator(".sortable button").nth(1).click()
    assert (names(page), orders(page)) == (["base", "plain", "adapter", "replay"], [None, "descending", None])
    page.locator(".sortable button").nth(2).click()
    assert (names(page), orders(page)) == (["adapter", "replay", "plain", "base"], [None, None, "ascending"])


def test_the_keyboard_sorts_too_and_focus_stays(page: Page) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert (names(page), orders(page)) == (["adapter", "base", "plain", "replay"], ["ascending", None, None])
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert (names(page), orders(page)) == (BY_KEPT, [None, "ascending", None])
    assert page.evaluate("document.activeElement.textContent") == "kept"


def test_heads_that_are_buttons_are_accessible(page: Page) -> None:
    assert page.locator(".sortable th button").all_text_contents() == list(HEADS)
    page.locator(".sortable button").nth(1).click()
    violations = Axe().run(page).response["violations"]
    assert [violation["id"] for violation in violations] == []


def test_other_tables_are_left_alone(page: Page) -> None:
    assert page.locator("#plain button").count() == 0
