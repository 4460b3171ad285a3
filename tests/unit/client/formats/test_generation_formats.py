"""Generated text in every format: text, Markdown, tables and the page."""

from __future__ import annotations

import io
import json
import re
from typing import Any

from rich.console import Console

from etfarm.client.cli.views import render
from etfarm.client.formats import csv, generation, html, markdown, tables, units
from etfarm.client.formats.html import generated as page
from etfarm.client.reports import JobResult
from etfarm.wire import report as reports
from tests.support.generated import flow_point, generated_report, point


def document(*points: dict[str, Any], **changes: Any) -> dict[str, Any]:
    known = points or (point(100.0, 100.0, 101.0, 99.0), point(90.0, depth=16))
    job = {"id": "j", "state": "SUCCEEDED", "submitted_at": "2026-01-02T03:04:05Z"}
    written = {"schema": reports.SCHEMA, "job": job, "reports": [generated_report("c1", *known, **changes)], "error": None}
    return reports.loads(json.dumps(written))


def terminal(written: dict[str, Any], width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render.reports(written["reports"], width=width))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_rate_has_as_many_digits_as_its_interval() -> None:
    assert units.rate(112.44, (111.9, 112.9)) == ("112.4 tokens/s", "[111.9, 112.9]")
    assert units.rate(12_345.6, (12_000.0, 12_700.0)) == ("12,346 tokens/s", "[12,000, 12,700]")
    assert units.rate(0.5) == ("0.500 tokens/s", "") and units.rate(None) == ("-", "")


def test_the_terminal_shows_rates_for_each_length_and_depth() -> None:
    shown = terminal(document())
    head, *rest = shown.splitlines()
    assert "decode 100 tokens/s [99, 101]  VALID  prompt 8" in head
    rows = [line.split() for line in rest if "tokens/s" in line]
    assert [row[:2] for row in rows] == [["8", "0"], ["8", "16"]] and all("VALID" in row for row in rows)
    assert "32.0 KiB, part of the planned memory" in shown and "equal in all repetitions" in shown
    assert "16 tokens, greedy, 15 repetitions in 3 processes" in shown
    assert "ran once" not in shown and "inputs" not in shown


def test_tokens_that_differ_are_a_fact_even_at_every_point() -> None:
    shown = terminal(document({**point(100.0), "tokens_equal": False}))
    assert "different between repetitions" in shown
    unknown = document({**point(100.0), "tokens_equal": None})["reports"][0]["generation"]
    assert "tokens" not in dict(generation.facts(unknown))


def test_the_operators_of_an_encoder_are_shown() -> None:
    row = {"index": 0, "kind": "OPERATOR", "name": "aten::convolution.out", "share": 1.0, "mean_ns": 5e6, "p50_ns": 5e6}
    encoder = {"method": "vision_encoder", "profile": {"iterations": 30, "p50_ns": 5e6, "mean_ns": 5e6}, "operators": [row]}
    generated = document(flow_point(100.0))["reports"][0]["generation"]
    written = document(generation={**generated, "encoders": [encoder]})
    shown = terminal(written)
    assert "vision_encoder, traced 5.00 ms" in shown and "convolution" in shown
    page_text = html.write(written).decode()
    assert "What is slow in vision_encoder?" in page_text and "What is slow in prefill?" not in page_text
    measured = JobResult.from_dict(written).reports[0].generation
    assert measured is not None and measured.encoders[0].operators is not None
    assert measured.encoders[0].operators[0].name == "aten::convolution.out"


def test_a_failed_point_shows_its_error() -> None:
    failed = {
        **point(90.0, depth=16),
        "error": {"message": "It failed.", "reason": "PROGRAM_FAILED"},
        "decode_tokens_per_s": None,
    }
    assert "PROGRAM_FAILED" in terminal(document(point(100.0), failed))
    assert generation.headline(document(failed)["reports"][0]["generation"]) is None


def test_an_invalid_measurement_names_the_option_that_helps() -> None:
    verdict = {"status": "INVALID", "reasons": [{"code": "TOO_FEW_SAMPLES", "message": "Few."}]}
    assert "Few. Give more --repetitions." in terminal(document(verdict=verdict))


def test_markdown_has_a_row_for_each_length_and_depth() -> None:
    text = markdown.write(document()).decode()
    assert "decode 100 tokens/s" in text and len(re.findall(r"^\| 8 \| (?:0|16) \|", text, re.MULTILINE)) == 2


def test_tables_have_points_and_tokens() -> None:
    rows = csv.read(csv.write(document(), "generation"), "generation")
    assert [(row["prompt_tokens"], row["depth"], row["decode_tokens_per_s"]) for row in rows] == [(8, 0, 100.0), (8, 16, 90.0)]
    assert (rows[0]["decode_low"], rows[0]["decode_high"], rows[0]["verdict"]) == (99.0, 101.0, "VALID")
    tokens = csv.read(csv.write(document(), "tokens"), "tokens")
    assert len(tokens) == 32 and (tokens[1]["token"], tokens[1]["time_ns"]) == (1, 1e7)
    assert tables.present(document()) == ("operators", "samples", "generation", "tokens")


def test_tables_have_the_part_of_each_method_and_the_logits() -> None:
    difference = {"index": 5, "token": 1, "reference_token": 2, "gap": 0.25}
    reference = {"reference": "quantized program", "tokens": 64, "sqnr_db": 31.5, "top1_agreement": 0.95}
    exact = {"tokens": 64, "is_text": True, "perplexity": 11.5, "references": [{**reference, "first_difference": difference}]}
    generated = document(flow_point(100.0))["reports"][0]["generation"]
    written = document(generation={**generated, "accuracy": exact})
    assert tables.present(written) == tables.WHAT
    parts = csv.read(csv.write(written, "parts"), "parts")
    assert [(row["part"], row["prefill_ns"], row["decode_share"]) for row in parts] == [
        ("vision_encoder", 5e6, None), ("text_decoder", 2e6, 0.9),
    ]  # fmt: skip
    assert (parts[0]["prefill_low_ns"], parts[0]["prefill_high_ns"], parts[0]["decode_low_ns"]) == (4.9e6, 5.1e6, None)
    (row,) = csv.read(csv.write(written, "logits"), "logits")
    assert (row["reference"], row["sqnr_db"], row["top1_agreement"]) == ("quantized program", 31.5, 0.95)
    assert (row["first_difference"], row["first_gap"], row["device_perplexity"], row["is_text"]) == (5, 0.25, 11.5, True)
    alone = document(generation={**generated, "accuracy": {**exact, "references": []}})
    (row,) = csv.read(csv.write(alone, "logits"), "logits")
    assert (row["reference"], row["first_difference"], row["device_perplexity"]) == (None, None, 11.5)


def test_the_page_has_a_line_for_each_depth_over_the_context() -> None:
    text = html.write(document()).decode()
    assert text.count("<polyline") == 2 and "How fast does it generate?" in text
    drawn = page.plot(document()["reports"][0]["generation"]["points"])
    assert drawn is not None
    first, second = drawn["lines"]
    assert first["name"] == "prompt 8" and second["name"] == "prompt 8 at depth 16"
    assert len(first["points"].split()) == 15
    xs = [float(each.split(",")[0]) for line in (first, second) for each in line["points"].split()]
    assert page.LEFT < min(xs) < max(xs) <= page.WIDTH
    assert page.plot([{**point(1.0), "token_ns": None}]) is None
    after_image = page.plot([{**point(1.0), "depth": 0, "prompt_tokens": 6, "token_ns": [1e6] * 8}], 16)
    assert after_image is not None
    assert [text for _, text in after_image["x_ticks"]] == ["0", "10", "20"], "six tokens after sixteen positions of an image"


def test_the_library_has_the_numbers_typed() -> None:
    result = JobResult.from_dict(document())
    measured = result.reports[0].generation
    assert measured is not None and measured.points[1].depth == 16
    assert measured.points[0].decode_tokens_per_s_ci95 == (99.0, 101.0) and len(measured.points[0].runs) == 3
    assert measured.model is not None and measured.model.kv_cache_bytes == 32768
    assert result.to_dict()["reports"] == document()["reports"]


def test_every_format_has_the_part_of_each_method() -> None:
    written = document(flow_point(100.0))
    shown = terminal(written)
    assert "vision_encoder (16 positions), token_embedding > forward" in shown
    row = next(line for line in shown.splitlines() if "vision_encoder" in line and "5.00 ms" in line)
    assert "1 + 0" in row and "50" in row and row.rstrip().endswith("-")
    assert "vision_encoder" in markdown.write(written).decode().replace("\\", "")
    page_text = html.write(written).decode()
    assert "Which method takes how long?" in page_text and "text_decoder" in page_text
    assert "Which method" not in html.write(document()).decode()
    measured = JobResult.from_dict(written).reports[0].generation
    assert measured is not None and measured.model is not None and measured.model.flow is not None
    assert measured.model.flow.encoders[0].positions == 16
    part = measured.points[0].parts[0]
    assert part.prefill_ci95_ns == (4.9e6, 5.1e6) and part.decode_ns is None
