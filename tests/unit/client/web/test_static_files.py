"""Static files: what every page needs is one file of each kind, and addresses change with the content."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from etfarm.client.web.app import BUNDLES, StaticFiles
from etfarm.client.web.templating import STATIC_FOLDERS


def test_what_every_page_needs_is_two_requests() -> None:
    client = TestClient(Starlette(routes=[Mount("/static/{version}", StaticFiles(STATIC_FOLDERS))]))
    for name, parts in BUNDLES.items():
        answer = client.get(f"/static/any/{name}")
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        for part in parts:
            (path,) = (folder / part for folder in STATIC_FOLDERS if (folder / part).exists())
            assert path.read_text() in answer.text
            assert client.get(f"/static/any/{part}").status_code == 404, "nothing is served twice"


def test_a_scripts_names_are_its_own(tmp_path: Path) -> None:
    files = write(tmp_path, "const same = 1;")
    script = TestClient(Starlette(routes=[Mount("/static/{version}", files)])).get("/static/any/page.js").text
    assert script == "{\nconst same = 1;\n}\n" * len(BUNDLES["page.js"])


def test_addresses_change_with_the_content(tmp_path: Path) -> None:
    before = write(tmp_path, "a").version
    assert write(tmp_path, "a").version == before
    assert write(tmp_path, "b").version != before


def write(folder: Path, content: str) -> StaticFiles:
    for part in (part for parts in BUNDLES.values() for part in parts):
        (folder / part).parent.mkdir(exist_ok=True)
        (folder / part).write_text(content)
    return StaticFiles([folder])
