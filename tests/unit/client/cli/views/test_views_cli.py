"""`report show --by`: groups as people read them, of a job or of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etfarm.client.cli.commands.report import main as command
from etfarm.client.cli.views import groupings
from etfarm.wire import report
from tests.support.documents import completed
from tests.support.rendering import printed

XNNPACK = {"delegated": True, "backend": "XnnpackBackend", "parent": 0, "resolution_ns": 1000.0}


def _row(index: int, kind: str, name: str, share: float, mean_ns: float | None, **more: Any) -> dict[str, Any]:
    row = {"index": index, "kind": kind, "name": name, "share": share, "mean_ns": mean_ns, **more}
    return {key: value for key, value in row.items() if value is not None}


def _source(line: int, code: str) -> dict[str, Any]:
    return {"file": "a/folder/with/a/long/name/models/resnet.py", "line": line, "code": code}


def _document(**changes: Any) -> dict[str, Any]:
    conv = {"op_types": ["aten.convolution.default", "aten.relu.default"], "aligned": True, **XNNPACK}
    message = {
        "id": "r1", "cell": "c1", "recipe": "xnnpack_fp32", "method": "forward", "threads": 4, "state": "SUCCEEDED",
        "model": {"name": "resnet8"}, "device": {"id": "d1", "name": "pi5-a", "arch": "aarch64", "soc": "cortex-a76"},
        "latency": {"samples_ns": [1_840_000] * 543, "p50_ns": 1_840_000}, "profile": {"iterations": 10, "p50_ns": 1_880_000},
        "operators": [
            _row(0, "DELEGATE", "XnnpackBackend", 0.8, 1_504_000, backend="XnnpackBackend", delegated=True),
            _row(1, "KERNEL", "Convolution (NHWC, F32) IGEMM #1", 0.412, 760_000, module="layer1.conv",
                 source=_source(31, "y = self.conv1(y)"), **conv),
            _row(2, "KERNEL", "Convolution (NHWC, F32) IGEMM #2", 0.25, 480_000, module="layer2.conv",
                 source=_source(32, "y = self.conv2(y)"), **conv),
            _row(3, "KERNEL", "Clamp (NC) #1", 0.0, None, module="layer1", **(conv | {"op_types": ["aten.relu.default"]})),
            _row(4, "REST", "rest of XnnpackBackend", 0.138, 264_000, **XNNPACK),
            _row(5, "OPERATOR", "aten::mean.out", 0.1999, 375_988, op_types=["aten.mean.dim"],
                 source=_source(44, "y = y.mean((2, 3))")),
            _row(6, "REST", "rest of forward", 0.0001, 12),
        ],
        "compile": {"modules": [
            {"method": "forward", "module": "layer1.conv", "constant_bytes": 4096, "planned_bytes": 0},
            {"method": "forward", "module": "layer1.table", "constant_bytes": 1024, "planned_bytes": 512, "planned_tensors": 1},
            {"method": "forward", "constant_bytes": 0, "planned_bytes": 2048, "planned_tensors": 2},
            {"method": "other", "module": "layer2.conv", "constant_bytes": 9999},
        ]},
    }  # fmt: skip
    message.update(changes)
    return completed(message)


def _lines(by: str, sort: str = "total", width: int = 140, document: dict[str, Any] | None = None, **options: Any) -> list[str]:
    return printed(groupings.report(document or _document(), by, sort, width=width, **options), width=width).splitlines()


def _line(lines: list[str], name: str) -> list[str]:
    (result,) = [line.split() for line in lines if name in line.split()]
    return result


def test_kernels_of_one_name_are_one_line_with_its_share_bar_and_time() -> None:
    lines = _lines("op")
    assert lines[0].startswith("resnet8 · xnnpack_fp32 · pi5-a") and "p50 1.84 ms" in lines[0]
    assert lines[1].split() == ["share", "time", "count", "operator"]
    assert lines[2].split("  ")[1:3] == ["66.2 %", "█" * 12]
    assert " ".join(lines[2].split()[3:]) == "1240 µs 2 Convolution (NHWC, F32) IGEMM convolution, relu"


def test_times_that_are_too_short_are_reported_as_such_and_never_as_0() -> None:
    lines = _lines("op")
    (clamp,) = [line for line in lines if "Clamp" in line]
    assert clamp.split()[:3] == ["<1.00", "µs", "1"]
    (rest,) = [line for line in _lines("backend") if "not explained" in line]
    assert "<0.1 %" in rest and "12.0 ns" in rest


def test_modules_are_a_tree_with_their_weights_and_planned_memory() -> None:
    lines = _lines("module")
    assert lines[1].split() == ["total", "own", "time", "weights", "planned", "module"]
    layer, conv, table = _line(lines, "layer1"), [line for line in lines if "4.00 KiB" in line], _line(lines, "table")
    assert "5.00" in layer  # what is below counts
    assert conv[0].index("conv") == next(line for line in lines if "layer1" in line).index("layer1") + 2
    assert table == ["1.00", "KiB", "512", "B", "table"]
    assert not any("9.76" in line for line in lines)  # another method's
    assert "weights: including submodules" in lines[-1]


def test_a_compilation_alone_has_its_modules_and_no_times() -> None:
    lines = _lines("module", document=_document(operators=[], device=None, latency=None, profile=None))
    assert lines[1].split() == ["weights", "planned", "module"]
    assert _line(lines, "layer1")[:2] == ["5.00", "KiB"]


def test_a_line_has_its_place_and_its_code_however_narrow_it_is() -> None:
    wide, narrow = _lines("line", width=140), _lines("line", width=80)
    assert "a/folder/with/a/long/name/models/resnet.py:31  y = self.conv1(y)" in wide[2]
    assert "models/resnet.py:31  y = self.con" in narrow[3]


def test_backends_have_people_s_names() -> None:
    lines = _lines("backend")
    assert "XNNPACK" in lines[2] and "80.0 %" in lines[2]
    assert "not delegated" in lines[3] and "20.0 %" in lines[3]


def test_unexplained_time_is_explained() -> None:
    assert any("below the clock's 1 µs" in line for line in _lines("op"))


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
@pytest.mark.parametrize("by", ["op", "type", "module", "line", "backend"])
def test_no_line_is_wider_than_the_terminal(width: int, by: str) -> None:
    lines = _lines(by, width=width)
    assert max(map(len, lines)) <= width
    assert sum("…" in line and "time" in line for line in lines) == 0


def test_only_the_largest_are_shown_with_the_modules_that_hold_them() -> None:
    lines = _lines("module", top=2)
    assert _line(lines, "layer1") and "conv" in "".join(lines)
    assert "and 5 more, 58.8 % together: --top 0 shows all" in "".join(lines)


def test_a_run_that_was_not_traced_says_so() -> None:
    assert _lines("op", document=_document(operators=[]))[-1].strip() == "No operators: the run was not traced."


def test_a_file_is_shown_without_a_farm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETFARM_SERVER", "127.0.0.1:1")
    file = tmp_path / "report.json"
    file.write_text(report.dumps({"schema": report.SCHEMA, "job": None, "reports": [_document()], "error": None}))
    assert command.main(["show", str(file), "--by", "line", "--sort", "name", "--top", "0"]) == 0
    assert "y = self.conv1(y)" in capsys.readouterr().out
    assert command.main(["show", str(file)]) == 0
    assert "p50 1.84 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.json"], "There is no file nowhere.json"),
        (["{folder}/other.json"], "names no schema, not etfarm.report/1"),
        (["{folder}/report.json", "--by", "layer"], "cannot be grouped by 'layer'. Give one of op, type, module, line, backend."),
        (["{folder}/report.json", "--by", "op", "--sort", "size"], "cannot be sorted by 'size'"),
        (["{folder}/report.json", "--sort", "own"], "--sort requires --by."),
        (["{folder}"], "cannot be read: Is a directory"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence_and_wrong_usage(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "report.json").write_text(report.dumps({"schema": report.SCHEMA, "job": None, "reports": [], "error": None}))
    assert command.main(["show", *(one.format(folder=tmp_path) for one in arguments)]) == 2
    errors = capsys.readouterr().err
    assert expected in errors and len(errors.splitlines()) == 1
