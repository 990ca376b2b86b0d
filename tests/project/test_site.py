"""The documentation's site: its links, the resources it loads, and its pages in a browser.

The tests that open pages need Chromium. SCREENSHOTS=FOLDER keeps screenshots of the main pages.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.project.test_docs import PAGES, ROOT, hook
from tests.support.chromium import Chromium, found

offline = hook("offline")
WIDTHS = (1280, 390)
"""Window widths of a laptop and a phone, in CSS pixels."""
SHOWN = ("index", "performance", "supported", "api")
NAMES = ["index" if page.stem == "README" else page.stem for page in PAGES]

LOOK = (Path(__file__).parent / "site_look.js").read_text("utf-8")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(config),
        "-d",
        str(site),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    if (path := found()) is None:
        pytest.skip("no Chromium: install Debian's package chromium, or set CHROMIUM to its path")
    with Chromium(path) as browser:
        yield browser


def test_the_site_is_whole_and_loads_nothing_from_elsewhere(site: Path) -> None:
    assert offline.in_site(site) == []
    for name in NAMES:
        text = (site / f"{name}.html").read_text("utf-8")
        assert text.count("<h1") == 1, f"{name} has not one title"
    assert 'id="fastgen.generate_stream"' in (site / "api.html").read_text("utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_page_is_cut_off(name: str, site: Path, browser: Chromium) -> None:
    for width in WIDTHS:
        browser.open((site / f"{name}.html").as_uri(), width)
        assert browser.evaluate(LOOK) == [], f"{width} pixels"


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ('<p style="width: 500px">wide</p>', "the page is 500 wide"),
        (
            '<p style="position: fixed; left: 300px; width: 200px">out</p>',
            "<p> out: beyond the window",
        ),
        ('<div style="overflow-x: hidden"><pre>%s</pre></div>', "<div> %s: cut off"),
        (
            '<div style="overflow-x: auto"><pre>%s</pre></div>',
            "<div> %s: scrolls, and nothing shows it",
        ),
        (
            (
                '<table style="width: 60px"><td>'
                '<code style="word-break: break-all">module.function</code></table>'
            ),
         "<code> module.function: divided within a word"),
    ],
)  # fmt: skip
def test_what_is_cut_off_is_found(body: str, complaint: str, browser: Chromium) -> None:
    long = "word " * 20
    page = f"<body style='margin: 0'><div class=md-content>{body.replace('%s', long)}</div>"
    browser.open(f"data:text/html,{quote(page)}", 390)
    complaints = browser.evaluate(LOOK)
    assert complaint.replace("%s", long[:40].strip()) in complaints


@pytest.mark.skipif("SCREENSHOTS" not in os.environ, reason="SCREENSHOTS names no folder")
def test_screenshots(site: Path, browser: Chromium) -> None:
    folder = Path(os.environ["SCREENSHOTS"])
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        for width in WIDTHS:
            for dark in (False, True):
                browser.open((site / f"{name}.html").as_uri(), width, dark)
                browser.evaluate(LOOK)  # waits until the page is laid out
                # Removes the theme's choice of a colour scheme.
                browser.evaluate("localStorage.clear()")
                (folder / f"{name}-{width}{'-dark' * dark}.png").write_bytes(
                    browser.screenshot(4000)
                )


@pytest.mark.slow
def test_a_site_that_is_not_whole_is_not_built(tmp_path: Path) -> None:
    for name in ("docs", "fastgen"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    config = Path(shutil.copy(ROOT / "mkdocs.yml", tmp_path))
    page = tmp_path / "docs" / "stream.md"
    text = page.read_text("utf-8")
    planted = {
        "![far](https://example.com/far.png)": "stream.html: <img> https://example.com/far.png",
        "[nowhere](nowhere.md)": "'nowhere.md'",
        "[nowhere](switches.md#nowhere)": "does not contain an anchor '#nowhere'",
    }
    page.write_text("\n\n".join([text, *planted]), encoding="utf-8")
    done = build(config, tmp_path / "site")
    assert done.returncode != 0
    assert "Aborted with 3 warnings" in done.stdout + done.stderr
    for complaint in planted.values():
        assert complaint in done.stderr


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<script src="https://a.example/x.js"></script>', "<script> https://a.example/x.js"),
        ('<link rel="stylesheet" href="//a.example/x.css">', "<link> //a.example/x.css"),
        ('<link rel="preconnect" href="https://a.example">', "<link> https://a.example"),
        (
            '<img src="x.png" srcset="x.png 1x, https://a.example/y.png 2x">',
            "srcset  https://a.example/y.png 2x",
        ),
        (
            "<p style=\"background: url('https://a.example/x.png')\">",
            "style https://a.example/x.png",
        ),
        ("<style>@import 'https://a.example/x.css';</style>", "style https://a.example/x.css"),
        ('<svg><image href="http://a.example/x.png"/></svg>', "<image> http://a.example/x.png"),
        ('<pre class="mermaid"><code></code></pre>', "class mermaid"),
        (
            '<a data-md-component="source" href="https://a.example">',
            "a repository whose figures the theme would ask for",
        ),
    ],
)
def test_what_a_page_loads_is_found(page: str, found: str) -> None:
    assert offline.in_page(f"<html><body>{page}</body></html>") == [found]


@pytest.mark.parametrize(
    "page",
    [
        '<a href="https://a.example">a link</a>',
        '<link rel="canonical" href="https://a.example">',
        (
            '<script src="assets/x.js"></script><img src="../x.png">'
            '<link rel="stylesheet" href="x.css">'
        ),
        "<style>p { background: url(x.png) }</style><p>url(https://a.example)</p>",
    ],
)
def test_what_a_reader_asks_for_is_not_found(page: str) -> None:
    assert offline.in_page(page) == []
