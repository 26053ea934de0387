"""Every kind of page in a real browser: nothing is loaded or logged, nothing overflows, axe-core finds no violation."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from attnbalance.comparison.page import write_report
from attnbalance.explanation.page import write_page as write_explanation
from attnbalance.papers.figure import CellResult
from attnbalance.papers.page import write_figure, write_page
from attnbalance.papers.reproduce import figures
from attnbalance.trajectory.page import write_page as write_trajectory
from tests.explanation.made import a_change, an_explanation
from tests.fakes import a_comparison
from tests.trajectory.made import a_trajectory

LESS = {"top": [0.1, 0.2, 0.6], "bottom": [0.1, 0.2, 0.3]}
RIGHT = {"top": [i < 30 for i in range(40)], "bottom": [i < 10 for i in range(40)]}
FOUR = {f"a-checkpoint-with-a-long-name-{i}": [0.1 * i, 0.2, 0.3] for i in range(4)}
PAGES = ("pair", "alone", "four", "explain", "trajectory", "reproduce")
WIDTHS = (390, 768, 1280)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: folder / f"{name}.html" for name in PAGES if name != "reproduce"}
    write_report(a_comparison(LESS, RIGHT), paths["pair"], command="attnbalance curve " + "a/long/path/" * 12)
    write_report(a_comparison({"only": [0.1, 0.4]}, pair=None), paths["alone"])
    write_report(a_comparison(FOUR, dict.fromkeys(FOUR, RIGHT["top"]), pair=None), paths["four"])
    write_trajectory(a_trajectory(), paths["trajectory"])
    write_explanation(an_explanation(a_change(-2.0, -0.5)), paths["explain"])
    figure = figures()["xu-chen-capitals"]
    answers = {"right": {"exact-match": [1, 0, 1]}, "f1": [1.0, 0.0, 1.0], "validation loss": 1.0}
    base = dict.fromkeys(("zero-shot", "few-shot", "constant answer"), answers)
    cells = [
        CellResult({"split": split, "seed": seed, "model": "a/m", "scale": "small"}, values)
        for seed in (0, 1)
        for split, values in (
            ("untrained", base | {"parameters": 10**8, "chat": False}),
            ("top", answers),
            ("bottom", answers),
        )
    ]
    done = {figure.name: write_figure(figure, cells, folder, "small", 90.0)}
    about = {"scale": "small", "seeds": 2, "seconds": 90.0, "model": "a/m", "command": "attnbalance reproduce all"}
    write_page([*list(figures().values())[:6], figure], done, {"ghosal-fig2a": "no room on the disk"}, folder, about)
    return paths | {"reproduce": folder / "report.html"}


def opened(browser: Browser, path: Path, width: int, scheme: str) -> tuple[Page, list[str]]:
    """The page, and what it logged or asked of the network."""
    page, noise = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme), list[str]()
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda request: noise.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    return page, noise


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_quiet_fit_every_width_and_are_accessible(
    name: str, browser: Browser, pages: dict[str, Path]
) -> None:
    for width in WIDTHS:
        page, noise = opened(browser, pages[name], width, "light")
        assert not noise
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()
    for scheme in ("light", "dark"):
        page, _ = opened(browser, pages[name], WIDTHS[-1], scheme)
        violations = Axe().run(page).response["violations"]
        nodes = {each["id"]: [node["html"][:120] for node in each["nodes"]][:3] for each in violations}
        assert not nodes, scheme
        page.close()


def test_the_first_screen_holds_the_answer_three_numbers_and_the_whole_figure(
    browser: Browser, pages: dict[str, Path]
) -> None:
    page, _ = opened(browser, pages["pair"], 1280, "light")
    assert page.locator(".numbers p").count() == 3
    for shown in (page.locator(".headline"), page.locator(".numbers"), page.locator("figure svg").first):
        box = shown.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 800
    page.close()


def test_figures_have_a_description_and_dark_pages_are_dark(browser: Browser, pages: dict[str, Path]) -> None:
    page, _ = opened(browser, pages["pair"], 1280, "dark")
    assert all(page.locator("figure svg").nth(i).get_attribute("aria-label") for i in range(3))
    colours = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    dark, light = (sum(map(int, colour.strip("rgb()").split(","))) for colour in colours)
    assert dark < 150 < 600 < light
    page.close()
