"""docs/explore in a headless Chromium, opened from the file system, and used like a reader would."""

import json
from pathlib import Path

import browser
import pytest

if browser.PROGRAM is None:
    pytest.skip("no chromium here (Debian: chromium): the page is not tried", allow_module_level=True)

FOLDER = Path(__file__).resolve().parents[2] / "docs/explore"
PAGE = (FOLDER / "index.html").as_uri()
TRACES = json.loads((FOLDER / "data.js").read_text(encoding="utf-8").split("=", 1)[1].strip().rstrip(";"))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    running = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture
def page(chromium):
    chromium.faults.clear()
    chromium.requests.clear()
    yield chromium
    assert chromium.faults == []
    assert all(address.startswith(("file:", "data:", "about:")) for address in chromium.requests), chromium.requests


def number(text):
    return float(text.replace("−", "-"))


def bytes_of(text):
    value, unit = text.split()
    return float(value) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


def test_a_row_converges_step_by_step(page):
    page.open(PAGE + "#512/64/128/64/causal")
    steps = TRACES["512/64/128/64/causal"]["steps"]
    assert len(steps) == 6
    for m, l, lse, norm, *_ in steps:
        shown = [number(page.text(f"#row-{name}")) for name in ("m", "l", "lse", "norm")]
        assert shown == pytest.approx([m, l, lse, norm], abs=6e-5)
        page.press("ArrowRight")
    assert "Finished" in page.text("#row-note")  # the step after is another tile's
    page.press("ArrowLeft")
    assert "The last block" in page.text("#row-note")
    assert page.run("document.querySelectorAll('#entries .settled').length") == 4
    page.press("Home")
    assert page.text("#row-m") == "−∞" and page.text("#step-text") == "1 of 20"
    page.press("r")
    assert page.text("#step-text") == "7 of 20"


def test_keys_move(page):
    page.open(PAGE + "#256/64/64/64/full")
    where = lambda: int(page.text("#step-text").split()[0])  # noqa: E731
    page.press("Home")
    assert where() == 1
    page.press("ArrowLeft")
    assert where() == 1
    page.press("ArrowDown")
    assert where() == 5
    page.press("ArrowRight", 2)
    assert where() == 7
    page.press("ArrowUp")
    assert where() == 1
    page.press("End")
    assert page.text("#step-text") == "16 of 16"
    page.run(
        "document.querySelector('[data-name=blockN][data-value=\"32\"]').click()"
    )  # the keys still step afterwards
    page.press("Home")
    page.press("ArrowRight")
    assert page.text("#step-text") == "2 of 32"


@pytest.mark.parametrize("key", ("1024/128/64/128/window", "256/64/32/32/full", "512/128/256/64/causal"))
def test_map_and_bytes_are_the_traces(page, key):
    page.open(f"{PAGE}#{key}")
    page.press("End")
    trace = TRACES[key]
    kinds = [trace["moves"][ord(letter) - 65][0] if letter != "." else "skipped" for letter in trace["tiles"]]
    shown = page.run("[...document.querySelectorAll('#map .tile')].map(tile => tile.getAttribute('class'))")
    assert [text.split()[1] for text in shown] == kinds
    assert all(text.split()[2:] == ["done"] for text in shown if "skipped" not in text)
    for side in ("tiled", "standard"):
        texts = page.run(f"[...document.querySelectorAll('.{side}-bytes')].map(e => e.textContent)")
        for level, text in enumerate(texts):
            assert bytes_of(text) == pytest.approx(sum(trace[side][2 * level : 2 * level + 2]), rel=6e-3)
    for level, text in enumerate(page.run("[...document.querySelectorAll('.less')].map(e => e.textContent)")):
        so_far = bytes_of(text.split(" so far")[0])  # all of it, after the last step
        assert so_far == pytest.approx(sum(trace["tiled"][2 * level : 2 * level + 2]), rel=6e-3)


def test_points_lie_on_the_curve_and_above(page):
    """Every point of the picture over its floor, and those with the fewest keys a block within twice of it."""
    for key, trace in TRACES.items():
        length, head_dim, _, block_n, mask = key.split("/")
        length, head_dim = int(length), int(head_dim)
        once = length * (2 * head_dim * 2 + 4)
        floor = once + 2 * 2 * (2 + 4) * trace["flops"] / (4 * head_dim) * head_dim**2 / sum(trace["memory"])
        assert sum(trace["tiled"][4:6]) > floor, key
        if mask == "full" and block_n == "32":
            assert sum(trace["tiled"][4:6]) < 2 * floor, key
    page.open(PAGE + "#1024/64/64/64/full")
    assert page.run("document.querySelectorAll('.point').length") == 12
    page.run("document.querySelectorAll('.point')[9].dispatchEvent(new MouseEvent('click'))")
    assert page.run("document.querySelector('[data-name=blockM][aria-pressed=true]').dataset.value") == "256"


def test_every_choice_draws(page):
    page.open(PAGE)
    found = page.run("""(() => {
      const bad = [];
      const press = (name, value) => document.querySelector(`[data-name=${name}][data-value="${value}"]`).click();
      press("length", 256);
      for (const d of [64, 128]) for (const m of [32, 64, 128, 256]) for (const n of [32, 64, 128])
        for (const mask of ["full", "causal", "window"]) {
          press("headDim", d), press("blockM", m), press("blockN", n), press("mask", mask);
          const wrong = document.querySelector("svg [d*=NaN], svg [x*=NaN], svg [cx*=NaN]");
          if (wrong || /NaN|undefined|Infinity/.test(document.body.innerText)) bad.push([d, m, n, mask]);
        }
      return bad;
    })()""")
    assert found == []


def test_plays(page):
    page.open(PAGE + "#256/64/128/128/full/0")
    page.press(" ")
    page.run("new Promise(done => setTimeout(done, 1600))")
    assert page.text("#step-text") == "4 of 4" and page.text("#play") == "▶"  # it stops by itself


@pytest.mark.parametrize("width", (400, 820), ids=("phone", "tablet"))
def test_buttons_are_beside_the_row_that_they_move(page, width):
    page.open(PAGE + "#512/64/128/64/causal", width, 800)
    page.run("document.querySelector('#row-title').scrollIntoView()")
    box = "document.querySelector('{}').getBoundingClientRect()"
    top, bottom = (page.run(box.format("#next") + f".{side}") for side in ("top", "bottom"))
    assert 0 <= top < bottom <= 800
    assert page.run(box.format("#row-m") + ".bottom") <= 800
    before = page.text("#row-m"), page.text("#row-l")
    x, y = page.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({box.format('#next')})")
    page.run(f"document.elementFromPoint({x}, {y}).click()")  # what a finger meets there
    assert (page.text("#row-m"), page.text("#row-l")) != before
    page.run("window.scrollTo(0, document.body.scrollHeight)")
    assert page.run(box.format(".sources") + ".bottom") <= (
        page.run(box.format(".transport") + ".top") if width == 400 else 800
    )


def test_leads_back(page):
    page.open(PAGE)
    targets = page.run("[...document.querySelectorAll('header a')].map(a => a.href)")
    assert [
        (FOLDER / "../../README.md").resolve().as_uri(),
        (FOLDER / "../guide/how-it-works.md").resolve().as_uri(),
    ] == targets


@pytest.mark.parametrize("dark", (False, True), ids=("light", "dark"))
@pytest.mark.parametrize("width, height", ((1280, 800), (820, 1180), (400, 800)), ids=lambda x: str(x))
def test_fits(page, width, height, dark, tmp_path):
    page.open(PAGE + "#1024/64/32/32/causal", width, height, dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    wide = page.run(
        """[...document.querySelectorAll("main *, nav *, header *")].filter(e => e.namespaceURI.endsWith("xhtml"))
      .filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline" && e.clientWidth > 0)
      .map(e => e.tagName + "." + e.className + "#" + e.id)"""
    )
    assert wide == []
    outside = page.run(
        f"""[...document.querySelectorAll("svg text")].filter(e => {{
      const box = e.getBoundingClientRect();
      return box.left < -1 || box.right > {width} + 1; }}).map(e => e.textContent)"""
    )
    assert outside == []
    shades = page.run("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    light = [sum(int(part) for part in shade.strip("rgb()").split(",")) > 382 for shade in shades]
    assert light == [not dark, dark]
    if width == 1280:  # the three panels of a step are in the first view
        assert page.run("document.querySelector('#caption').getBoundingClientRect().bottom") < height
        assert page.run("document.querySelector('#pyramid').getBoundingClientRect().bottom") < height
    page.run("document.querySelector('#theme').click()")
    assert page.run("getComputedStyle(document.body).backgroundColor") != shades[0]
