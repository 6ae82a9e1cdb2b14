"""The report in a real browser: nothing overflows, traces expand, no text runs as a program.

Needs `playwright` (the dev extra) and a Chromium on the path, which `.ci/run` installs.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import report as script
from tests.scripts.report_runs import made_run
from tests.scripts.test_report import EVIL

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE, DESKTOP = {"width": 360, "height": 740}, {"width": 1280, "height": 900}

# Contrast of every visible text with what is behind it: the elements below 4.5 to 1.
FAINT = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const over = (colour, base) => {
    canvas.fillStyle = `rgb(${base})`; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const ground = (element) => {
    const above = element.parentElement ? ground(element.parentElement) : [255, 255, 255];
    return over(getComputedStyle(element).backgroundColor, above);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map(
      (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = new Set();
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest(".unseen, script, title")) continue;
    const style = getComputedStyle(element), svg = element instanceof SVGElement;
    const base = ground(svg ? element.ownerSVGElement.parentElement : element);
    const [a, b] = [light(over(svg ? style.fill : style.color, base)), light(base)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.add(`${element.tagName}.${element.getAttribute("class")} ${ratio}`);
  }
  return [...found];
}"""

UNFOLD = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: the dev extra")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium on the path: apt-get install chromium")
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of one run, of several, and of one with hostile tokens."""
    base = tmp_path_factory.mktemp("reports")
    one = made_run(base / "eagle3")
    several = [made_run(base / f"head {n}", seed=n, requests=4, traced=1) for n in range(3)]
    evil = made_run(base / "<script>alert(1)</script>".replace("/", "_"), words=EVIL, requests=4)
    reports = {"one": [one], "several": several, "evil": [evil]}
    for name, runs in reports.items():
        script.main([*map(str, runs), "--out", str(base / name), "--no-plots"])
    return {name: base / name / "report.html" for name in reports}


class Opened:
    """A page with everything it complained about and asked for."""

    def __init__(self, browser: Any, path: Path, size: dict[str, int], scheme: str) -> None:
        self.page = browser.new_page(viewport=size, color_scheme=scheme)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())


@pytest.fixture
def load(browser: Any, files: dict[str, Path]) -> Iterator[Any]:
    opened: list[Opened] = []

    def load(name: str, size: dict[str, int] = DESKTOP, scheme: str = "light") -> Any:
        opened.append(Opened(browser, files[name], size, scheme))
        return opened[-1].page

    yield load
    for each in opened:
        assert each.problems == []
        assert len(each.requests) == 1, each.requests  # the file itself
        each.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("name", ["one", "several"])
def test_it_fits_and_can_be_read(
    load: Any, name: str, size: dict[str, int], scheme: str, tmp_path: Path
) -> None:
    page = load(name, size, scheme)
    page.evaluate(UNFOLD)
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    assert page.evaluate(FAINT) == []
    assert page.screenshot(path=tmp_path / "page.png", full_page=True).startswith(b"\x89PNG")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 300) == (scheme == "dark")


def test_a_trace_expands_under_the_mouse(load: Any) -> None:
    page = load("one")
    rows = page.locator("button.round:visible")
    first, second = rows.nth(0), rows.nth(1)
    assert page.locator(".tree:visible").count() == 0
    first.hover()
    tree = page.locator(".tree:visible")
    assert tree.count() == 1 and first.get_attribute("aria-expanded") == "true"
    cells = tree.locator("tbody tr").nth(1).locator("td.prob .value").all_inner_texts()
    assert len(cells) == 2 and all(0 <= float(value) <= 1 for value in cells)
    assert "Round 1" in tree.inner_text() and "target" in tree.inner_text()
    accepted = int(first.locator(".share").inner_text().split("/")[0])
    assert tree.locator("tr.taken").count() == accepted
    box = tree.bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= DESKTOP["height"] + 1
    assert box["x"] + box["width"] <= DESKTOP["width"]
    second.hover()
    assert page.locator(".tree:visible").count() == 1
    assert first.get_attribute("aria-expanded") == "false"
    page.locator("h1").hover()
    assert page.locator(".tree:visible").count() == 0


def test_a_trace_expands_by_keyboard(load: Any) -> None:
    page = load("one")
    page.locator("details.trace[open] > summary").focus()
    page.keyboard.press("Tab")
    focused = page.locator("button.round:focus")
    assert focused.get_attribute("aria-expanded") == "true"
    assert "Round 1" in page.locator(".tree:visible").inner_text()
    page.keyboard.press("ArrowDown")
    assert "Round 2" in page.locator(".tree:visible").inner_text()
    page.keyboard.press("Enter")  # keeps it open
    page.locator("a").first.focus()
    assert "Round 2" in page.locator(".tree:visible").inner_text()
    page.locator("button.round:visible").nth(1).focus()
    page.keyboard.press("Escape")
    assert page.locator(".tree:visible").count() == 0


def test_a_trace_expands_under_a_finger_and_stays_on_the_page(load: Any) -> None:
    page = load("one", PHONE)
    row = page.locator("button.round:visible").nth(2)
    row.click()
    assert page.locator(".tree:visible").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    row.click()
    page.locator("h1").hover()
    page.evaluate("document.activeElement.blur()")
    assert page.locator(".tree:visible").count() == 0


def test_settings_are_chosen_by_keyboard(load: Any) -> None:
    page = load("several")
    panels = page.locator("#positions .panel")
    assert panels.nth(0).is_visible() and not panels.nth(1).is_visible()
    page.locator("#positions input").first.focus()
    page.keyboard.press("ArrowRight")
    assert panels.nth(1).is_visible() and not panels.nth(0).is_visible()


def test_hostile_tokens_are_text(load: Any) -> None:
    page = load("evil")
    page.evaluate(UNFOLD)
    for row in page.locator("button.round:visible").all()[:12]:
        row.hover()
    assert page.evaluate("window.pwned") is None
    assert page.locator("img").count() == 0
    shown = page.locator(".tokens").all_inner_texts()
    assert any("</script><script>window.pwned = 1</script>" in text for text in shown)
