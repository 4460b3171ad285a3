"""What README.md and docs/ promise: limits of length and size, complete lists, examples that work, commands that exist."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.glob("*.md"))]

_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
_INLINE = re.compile(r"`((?:etfarm) [^`]+)`")


def _load(path: Path) -> ModuleType:
    """Load a script that no package holds."""
    spec = importlib.util.spec_from_file_location(f"documentation_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return _load(DOCS / "generate.py")


@pytest.fixture(scope="module")
def record() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)  # as for a script
        yield _load(DOCS / "record.py")


def test_the_readme_is_short_and_gives_both_commands() -> None:
    text = README.read_text()
    lines = text.splitlines()
    assert len(lines) <= 180
    assert [line for line in lines if len(line) > 120] == []
    assert "python3 -m venv .venv && .venv/bin/pip install -e '.[all]' && .venv/bin/etfarm bench demo:resnet8" in text
    assert "python3 -m venv .venv && .venv/bin/pip install -e '.[all,dev]' && .venv/bin/pytest" in text


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {target.rpartition("/")[2] for target in re.findall(r"\]\(([^)#]+)", README.read_text())}
    included = {"security.md": "SECURITY.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
    included["runner-protocol.md"] = "PROTOCOL.md"
    assert {included.get(page.name, page.name) for page in DOCS.glob("*.md")} - linked == set()


def test_the_files_of_the_ten_steps_exist() -> None:
    """`role: file, file; role: file` in the table's last column."""
    rows = re.findall(r"^\| \d+ \|.*\| ([^|]+) \|$", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    assert len(rows) == 10
    for part in "; ".join(rows).split("; "):
        role, _, files = part.partition(": ")
        for name in files.split(", "):
            root = ROOT / ("proto" if role == "wire" else role) / "etfarm" / role
            assert (root / name.strip("`")).is_file(), f"{role}: {name}"


def test_each_error_reason_is_explained_once(generate: ModuleType) -> None:
    groups = generate.read_explanations().values()
    explained = [reason for group in groups for reason in group if reason.isupper()]
    assert sorted(explained) == sorted(generate.find_reasons())
    for group in groups:
        for reason, texts in group.items():
            if reason.isupper():
                happened, remedy, *_ = texts
                assert happened.endswith("."), reason
                assert remedy.endswith("."), reason


FAMILIES = {
    "BAD_WORKER_ANSWER": "an answer, an analysis and an output file of a child, read in rooms that do not import each other",
    "DIGEST_MISMATCH": "an upload to a local session, and a program's manifest, which differ in whose fault it is",
    "DISK_FULL": "one disk for uploads, the database and children's files, in rooms that do not import each other",
    "INTERNAL": "the reason of an error that names none",
    "LIMIT_EXCEEDED": "limits of a message, and of uploads, whose remedies differ",
    "QUOTA_EXCEEDED": "quotas of jobs, and of stored bytes, in rooms that do not import each other",
    "TOO_MANY_CALLS": "calls of a session, and of a principal",
    "UNSUPPORTED_INPUT": "an input of a module, and an array of a file",
}
"""Reasons that several classes of one role declare, and why these cannot be one class."""


def test_a_reason_belongs_to_one_class_of_a_role(generate: ModuleType) -> None:
    """The same fault may be found by client, server and agent, which do not import each other."""
    carriers = generate.find_carriers()
    assert len(carriers) > 100
    for reason, classes in carriers.items():
        roles = [name.split(".")[1] for name in classes]
        assert len(roles) == len(set(roles)) or reason in FAMILIES, f"{reason}: {', '.join(classes)}"


def test_each_reason_of_a_verdict_is_explained() -> None:
    reports = ROOT / "server" / "etfarm" / "server" / "reports"
    sources = [reports / name for name in ("verdict.py", "disturbances.py")]
    codes = {code for source in sources for code in re.findall(r'(?:_reason\(|code=)"([A-Z_]+)"', source.read_text())}
    assert len(codes) > 10
    rows = set(re.findall(r"^\| `([A-Z_]+)` \|", (DOCS / "measurement.md").read_text(), re.MULTILINE))
    assert codes - rows == set()


def test_each_public_name_is_documented() -> None:
    import etfarm.client

    text = (DOCS / "python.md").read_text()
    documented = {*re.findall(r"^::: etfarm\.client\.(\w+)$", text, re.MULTILINE), *re.findall(r"`(Async\w+)`", text)}
    assert set(etfarm.client.__all__) - documented == set()


def test_the_glossary_defines_each_term_once_in_order() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)[1:]
    terms = [term for row in rows for term in row.lower().split(", ")]
    assert sorted(set(terms)) == sorted(terms)
    assert rows == sorted(rows, key=str.lower)


def test_pictures_are_small() -> None:
    sizes = {picture.name: picture.stat().st_size for picture in (DOCS / "pictures").iterdir()}
    assert {name for name, size in sizes.items() if size > 200_000} == set()
    assert sum(sizes.values()) <= 3_000_000


def test_recordings_and_pages_fit_each_other(record: ModuleType) -> None:
    texts = "".join(page.read_text() for page in PAGES)
    shown = set(re.findall(r"recorded/([\w-]+)\.txt", texts)) | set(re.findall(r"<!-- recorded: ([\w-]+)", texts))
    kept = {file.stem for file in (DOCS / "recorded").glob("*.txt")}
    assert shown == kept
    assert kept <= record.RECORDINGS.keys()
    pictures = {name for recording in record.RECORDINGS.values() for name in (*recording.pictures, *recording.web_pictures)}
    assert pictures == {file.stem for file in (DOCS / "pictures").glob("*.png")}
    assert {name for name in pictures if f"pictures/{name}.png" not in texts} == set()


def test_the_readme_shows_what_was_recorded(record: ModuleType) -> None:
    blocks = re.findall(r"<!-- recorded: ([\w-]+)(?: lines=([\d,-]+))? -->\n```text\n(.*?)```\n", README.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for name, choice, text in blocks:
        recorded = (DOCS / "recorded" / f"{name}.txt").read_text()
        assert text == record.select_lines(record.narrow(recorded), choice or None)


@pytest.mark.parametrize(
    ("choice", "selected"),
    [(None, "a\nb\nc\nd\n"), ("1-2", "a\nb\n  ...\n"), ("1,3-4", "a\n  ...\nc\nd\n"), ("3-9", "  ...\nc\nd\n")],
)
def test_lines_are_selected_with_marks_where_some_are_left_out(record: ModuleType, choice: str | None, selected: str) -> None:
    assert record.select_lines("a\nb\nc\nd\n", choice) == selected


def test_remote_references_of_a_site_are_detected(tmp_path: Path) -> None:
    build = _load(DOCS / "build.py")
    (tmp_path / "good.html").write_text(
        '<a href="https://example.org">x</a><script src="x.js"></script><link rel="stylesheet" href="x.css"><img src="x.png">'
    )
    (tmp_path / "good.css").write_text("a { background: url(data:image/png;base64,AA==) }")
    assert list(build.find_remote_references(tmp_path)) == []
    (tmp_path / "bad.html").write_text(
        '<script src="https://example.org/x.js"></script><link href="//example.org/x.css"><pre class="mermaid">x</pre>'
        '<p style="background: url(https://example.org/x.png)">'
    )
    (tmp_path / "bad.css").write_text('@import "https://example.org/font.css"; a { src: url("http://example.org/x.woff") }')
    assert len(list(build.find_remote_references(tmp_path))) == 6


def test_the_example_metric_works() -> None:
    margin = _load(DOCS / "examples" / "margin.py").margin
    scores = np.array([[0.1, 0.7, 0.2]])
    assert margin({}, {"linear": scores}, 0, {"label": np.int64(1)}) == {"margin": pytest.approx(0.5), "correct": 1.0}


def _commands(page: Path) -> Iterator[str]:
    """Yield the etfarm commands that a page shows."""
    text = page.read_text()
    for block in [*_BLOCK.findall(text), *(["\n".join(_INLINE.findall(text))])]:
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|", line.partition("  #")[0]):
                if match := re.search(r"(?:^|[\s/])(etfarm [a-z].*)", part):
                    yield match[1]
    if page.suffix == ".yml":
        yield from re.findall(r"^\s*(etfarm [a-z][^)\n]*(?:\n\s+--[^\n]*)*)", text, re.MULTILINE)


def test_commands_on_the_pages_have_the_options_that_they_use(generate: ModuleType) -> None:
    reference = (DOCS / "commands.md").read_text()
    sections = dict(re.findall(r"^#{2,3} (etfarm[^\n]*)\n\n```text\n(.*?)```", reference, re.MULTILINE | re.DOTALL))
    wrong: list[str] = []
    checked = 0
    for page in [*PAGES, DOCS / "examples" / "github-actions.yml"]:
        for command in _commands(page):
            words = command.replace("'", "").split()
            help_text = sections.get(" ".join(words[:3])) or sections.get(" ".join(words[:2]))
            if help_text is None:
                wrong.append(f"{page.name}: {command}: there is no such command")
                continue
            known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_text)) | {"--project", "--help"}
            for option in re.findall(r"(?<=\s)--?[a-z][\w-]*", command):
                checked += 1
                if option not in known:
                    wrong.append(f"{page.name}: {command}: {option}")
    assert wrong == []
    assert checked > 50
