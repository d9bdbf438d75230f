"""Documentation site as built by ``make docs``: no warning, no broken link, all public names."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.links import Page, broken, is_external, pages_of
from tests.tools.support import ROOT, missing, started

slow = pytest.mark.slow
PAGES = {
    "index.html",
    "figures.html",
    "scaling.html",
    "changelog.html",
    "architecture.html",
    "api/comm.html",
    "slurm.html",
}


@pytest.fixture
def api_pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))
    return importlib.import_module("api_pages")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("mkdocs") is None:
        missing("mkdocs is not installed (pip install 'mpidist[docs]')")
    folder = tmp_path_factory.mktemp("site").resolve()
    done = started(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)], timeout_s=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@slow
def test_the_site_is_whole_and_loads_nothing_from_elsewhere(site):
    pages = pages_of(site)
    assert {str(path.relative_to(site)) for path in pages} >= PAGES
    assert broken(pages) == []
    assert [
        f"{path.name}: {one}"
        for path, page in pages.items()
        for one in page.loads
        if is_external(one)
    ] == []
    for style in site.rglob("*.css"):
        assert not re.search(
            r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")
        ), style


@slow
def test_search_knows_what_readers_look_for(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    text = " ".join(entry["title"] + " " + entry["text"] for entry in index["docs"])
    for word in (
        "OSS",
        "PowerSGD",
        "srun",
        "CommTimeout",
        "Slingshot",
        "UCX_TLS",
        "I_MPI_PMI_LIBRARY",
        "requeue",
    ):
        assert word in text, word
    # What MPI says is on the page that says what to do.
    for word in ("MPI_ERR_TRUNCATE", "CommTimeout", "DisagreementError"):
        found = {
            entry["location"].split("#")[0] for entry in index["docs"] if word in entry["text"]
        }
        assert "troubleshooting.html" in found, word


@slow
def test_every_public_name_is_in_the_reference(site, api_pages):
    anchors = set().union(
        *(Page(path.read_text(encoding="utf-8")).anchors for path in (site / "api").glob("*.html"))
    )
    for package in api_pages.PACKAGES:
        for name in api_pages.public_names(importlib.import_module(package)):
            assert f"{package}.{name}" in anchors or f"mpidist.ddp.{name}" in anchors, (
                f"{package}.{name}"
            )


@slow
def test_pages_come_up_in_a_browser(site):
    # Optional: without a browser, the checks of links and resources still apply.
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None:
        pytest.skip("no Chromium is installed; apt-get install chromium")
    for page in ("index.html", "figures.html"):
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=4000",
            "--dump-dom",
        ]
        done = subprocess.run(
            [*command, (site / page).as_uri()],
            capture_output=True,
            text=True,
            timeout=100,
            env=_alone(site),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        title = Page(done.stdout)
        assert "mpidist" in done.stdout and "md-search" in done.stdout and title.links


def _alone(folder: Path) -> dict[str, str]:
    """Return an environment in which a browser writes its files next to the site."""
    return {**os.environ, "HOME": str(folder.parent), "XDG_CONFIG_HOME": str(folder.parent)}


def test_broken_links_and_foreign_resources_are_seen(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="top"><a href="b.html#there">b</a><a href="#nowhere">x</a><img src="no.png">'
    )
    (tmp_path / "b.html").write_text(
        '<h2 id="there">b</h2><script src="https://example.org/x.js"></script><a '
        'href="a.html#top">a</a>'
    )
    pages = pages_of(tmp_path)
    assert broken(pages) == ["a.html: #nowhere", "a.html: no.png"]
    assert [one for page in pages.values() for one in page.loads if is_external(one)] == [
        "https://example.org/x.js"
    ]
