"""References of a built page: links, images, scripts, styles, and anchors."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

# Tags that a browser loads automatically, with the attribute of the address.
_LOADED = {
    "img": "src",
    "script": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}


class Page(HTMLParser):
    """One page: ``links`` for readers, ``loads`` for the browser, and ``anchors``."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = {name: value for name, value in attributes if value is not None}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        # Browsers do not load canonical or alternate addresses.
        if (
            tag in _LOADED
            and _LOADED[tag] in values
            and values.get("rel") not in ("canonical", "next", "prev", "alternate")
        ):
            self.loads.append(values[_LOADED[tag]])
        if tag == "link" and values.get("rel") in ("next", "prev"):
            self.links.append(values["href"])


def is_external(address: str) -> bool:
    return bool(urlparse(address).netloc) or urlparse(address).scheme not in ("", "data")


def pages_of(site: Path) -> dict[Path, Page]:
    """Return the pages of a built site by file.

    The page for wrong addresses is excluded, because any address may show it.
    """
    return {
        path: Page(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
        if path.name != "404.html"
    }


def broken(pages: dict[Path, Page]) -> list[str]:
    """Return broken links and resources as ``page: address``."""
    wrong = []
    for path, page in pages.items():
        for address in page.links + page.loads:
            if is_external(address) or address.startswith("data:"):
                continue
            target, anchor = urldefrag(address)
            place = (path.parent / unquote(target)).resolve() if target else path.resolve()
            if place.is_dir():
                place /= "index.html"
            if not place.is_file() or (
                anchor and place in pages and unquote(anchor) not in pages[place].anchors
            ):
                wrong.append(f"{path.name}: {address}")
    return wrong
