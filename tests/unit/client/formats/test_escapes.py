"""Names and code of others in spreadsheets and in Markdown: cells stay cells, text stays text, numbers stay numbers."""

from __future__ import annotations

import csv as spreadsheet
import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from etfarm.client.formats import compared_markdown, csv, escapes, html, markdown
from etfarm.server.compile.lower import stage_files
from etfarm.v1.compile_pb2 import Delegation, OperatorDelegation
from etfarm.wire import escapes as wire
from tests.support.documents import document, report, row

FORMULAS = [
    "=1+1", "+1+1", "-1+1", "@SUM(1)", "\t=1+1", "\r=1+1", "\n=1", " =1+1", "'=1+1", "''=1", "=cmd|'/C calc'!A0", "\uff1d1+1",
    '=HYPERLINK("http://x","y")', "-", "=", "@", "-0.5",
]  # fmt: skip
MARKS = "|`\\[](){}<>#*_~@!&$=+-'\":./ \t\r\n\0\x1b\x9b\u202e\u2028aw1漢"
NAMES = st.text(st.sampled_from(MARKS), max_size=24) | st.text(max_size=12)


@pytest.mark.parametrize("text", FORMULAS)
def test_a_text_that_a_spreadsheet_would_evaluate_is_behind_an_apostrophe(text: str) -> None:
    assert wire.spreadsheet_cell(text) == f"'{text}"
    assert wire.spreadsheet_text(wire.spreadsheet_cell(text)) == text


@given(NAMES)
def test_every_text_comes_back_from_its_cell(text: str) -> None:
    cell = wire.spreadsheet_cell(text)
    assert wire.spreadsheet_text(cell) == text
    assert cell.lstrip()[:1] not in tuple("=+-@\uff1d\uff0b\uff0d\uff20") and cell[:1] not in ("\t", "\r", "\n")


@given(NAMES)
@settings(max_examples=60)
def test_no_cell_of_a_reports_csv_is_evaluated_and_its_numbers_are_numbers(name: str) -> None:
    source = {"file": name or "f", "line": 1, "code": name}
    rows = [row(0, "OPERATOR", name, 0.5, -0.5, op_types=[name], module=name, backend=name, source=source)]
    created = document(report(operators=rows, model={"name": f"={name}", "digest": "0" * 64}, recipe=name, method=name))
    created["job"]["id"] = f"@{name}"
    (cells,) = list(spreadsheet.DictReader(io.StringIO(csv.write(created).decode(), newline="")))
    assert cells["p50_ns"] == "-0.5" and cells["share"] == "0.5"
    for key, cell in cells.items():
        if key not in ("p50_ns", "share"):
            assert not re.match(r"\s*[=+\-@]|[\t\r\n]", cell), (key, cell)
    (again,) = csv.read(csv.write(created))
    assert again["model"] == f"={name}" and again["job"] == f"@{name}" and again["code"] == (name or None)


def test_no_cell_of_a_stages_table_is_evaluated(tmp_path: Path) -> None:
    delegation = Delegation(operators=[OperatorDelegation(op="@SUM(1)", non_delegated=1)])
    stage_files._write_table({"=1+1": delegation}, tmp_path / "delegation.csv")
    assert (tmp_path / "delegation.csv").read_text().splitlines()[1] == "'=1+1,'@SUM(1),0,1"


@given(NAMES)
@settings(max_examples=300)
def test_markdown_shows_a_text_and_reads_nothing_into_it(text: str) -> None:
    shown = " ".join(text.split())
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(escapes.text(text))
    assert [token.type for token in tokens] in (["paragraph_open", "inline", "paragraph_close"], [])
    children = tokens[1].children if tokens else []
    assert {child.type for child in children or []} <= {"text", "text_special"}
    assert "".join(child.content for child in children or []) == wire.printable(shown)


@given(NAMES)
@settings(max_examples=300)
def test_a_cell_of_a_table_ends_where_it_should(text: str) -> None:
    table = f"| a | b | c |\n| --- | --- | --- |\n| {escapes.text(text)} | {escapes.code(text)} | end |\n\nafter\n"
    tokens = MarkdownIt("gfm-like", {"linkify": False, "html": True}).parse(table)
    cells = [tokens[at + 1] for at, token in enumerate(tokens) if token.type == "td_open"]
    assert len(cells) == 3 and cells[2].content == "end"
    assert [token.content for token in tokens if token.type == "inline"][-1] == "after"
    allowed = {"text", "text_special", "code_inline", "html_inline"}
    for cell in cells:
        assert {child.type for child in cell.children or []} <= allowed
        for child in cell.children or []:
            assert child.type != "html_inline" or child.content in ("<code>", "</code>")


@given(NAMES)
def test_no_control_character_and_no_bare_address_is_left(text: str) -> None:
    for created in (escapes.text(text), escapes.code(text), escapes.html(text)):
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]", created)
    assert not re.search(r"(?<!\\)://|www\.", escapes.text(f"http://x.y/{text} www.x.y"))


HOSTILE_LINES = "x\x1b[31m\n| a | b |\n# head\n[click](javascript:alert(1))![i](https://x.y/z.png)<img src=x>`|"


def _hostile() -> dict[str, object]:
    source = {"file": HOSTILE_LINES, "line": 1, "code": HOSTILE_LINES}
    rows = [row(0, "OPERATOR", HOSTILE_LINES, 1.0, 10.0, op_types=[HOSTILE_LINES], module=HOSTILE_LINES, source=source)]
    bad = report(
        model={"name": HOSTILE_LINES, "digest": "0" * 64}, recipe=HOSTILE_LINES, method=HOSTILE_LINES, operators=rows,
        device={"id": "d", "name": HOSTILE_LINES, "soc": HOSTILE_LINES, "os": HOSTILE_LINES, "arch": HOSTILE_LINES},
        runner={"kind": HOSTILE_LINES, "executorch": HOSTILE_LINES},
        compile={"toolchain": {"torch": HOSTILE_LINES}, "delegation": {"forward": {"subgraphs": 1}}},
        verdict={"status": "VERDICT_STATUS_INVALID", "reasons": [{"code": "X", "message": HOSTILE_LINES}]},
    )  # fmt: skip
    error = {"fault": "FAULT_USER", "reason": HOSTILE_LINES, "message": HOSTILE_LINES, "remedy": HOSTILE_LINES}
    return document(bad, report(id="r2", state="FAILED", error=error), error=bad["error"])


def _structure(text: str) -> list[str]:
    kinds = []
    for token in MarkdownIt("gfm-like", {"linkify": False, "html": True}).parse(text):
        kinds += [child.type for child in token.children or []] if token.type == "inline" else [token.type]
        assert token.type not in ("link_open", "image") and "javascript:" not in str(token.attrs)
    return [kind for kind in kinds if kind not in ("text", "text_special", "softbreak", "code_inline", "html_inline")]


def test_a_reports_markdown_has_the_structure_that_plain_names_give_it() -> None:
    created = _hostile()
    text = markdown.write(created).decode()  # type: ignore[arg-type]
    kinds = _structure(text)
    assert not {"link_open", "image", "heading_open"} & set(kinds), text
    assert "\x1b" not in text and "<img" not in text


def test_a_comparisons_markdown_has_neither_links_nor_control_characters() -> None:
    from etfarm.wire import comparison
    from etfarm.wire.comparison import Side

    created = _hostile()
    side = Side(created["reports"], created["job"], None, None)  # type: ignore[arg-type]
    text = compared_markdown.write(comparison.document(comparison.compare(side, side)))
    assert not {"link_open", "image", "heading_open"} & set(_structure(text)), text
    assert "\x1b" not in text and "<img" not in text
    assert b"\x1b" not in html.write(created)  # type: ignore[arg-type]
