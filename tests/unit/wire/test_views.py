"""Operators grouped: everything counts once, however rows lie, and modules are a tree."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etfarm.wire import views
from tests.support.refusals import refuses

MODULES = ["layer1.conv", "layer1.norm", "layer1", "layer2.0.conv", "layer2.1.conv", "head", None]
TYPES = [["aten.convolution.default"], ["aten.convolution.default", "aten.relu.default"], ["aten.add.Tensor"], []]


def row(index: int, kind: str = "OPERATOR", **more: Any) -> dict[str, Any]:
    """Return a row of the JSON with what views look at."""
    base = {
        "index": index, "kind": kind, "parent": None, "name": "aten.add.out", "op_types": [], "backend": None, "delegated": False,
        "mean_ns": 10.0, "p50_ns": 10.0, "resolution_ns": None, "share": 0.1, "module": None, "source": None, "aligned": None,
        "mean_ci95_ns": None, "sources": [],
    }  # fmt: skip
    return base | more


def line(number: int) -> dict[str, Any]:
    return {"file": "models/net.py", "line": number, "code": f"y = self.f{number}(x)"}


@st.composite
def reports(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Operators, delegates with and without kernels, rests; shares sum to 1 over leaves."""
    rows: list[dict[str, Any]] = []
    leaves: list[dict[str, Any]] = []

    def add(kind: str, **more: Any) -> dict[str, Any]:
        created = row(len(rows), kind, **more)
        created["mean_ns"] = draw(st.none() | st.floats(0.01, 1e9))
        if created["mean_ns"] is not None and draw(st.booleans()):
            created["mean_ci95_ns"] = [created["mean_ns"] * 0.9, created["mean_ns"] * 1.1]
        rows.append(created)
        return created

    def known() -> dict[str, Any]:
        source = draw(st.none() | st.integers(1, 4).map(line))
        return {"module": draw(st.sampled_from(MODULES)), "op_types": draw(st.sampled_from(TYPES)), "source": source}

    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            leaves.append(add("OPERATOR", **known()))
            continue
        inside = {"delegated": True, "backend": "XnnpackBackend"}
        delegate = add("DELEGATE", name="XnnpackBackend", **inside, **known())
        kernels = draw(st.integers(0, 4))
        for number in range(kernels):
            aligned = draw(st.booleans())
            result = known() if aligned else {}
            name = f"Convolution (NHWC, F32) IGEMM #{number + 1}"
            leaves.append(add("KERNEL", parent=delegate["index"], name=name, aligned=aligned, **inside, **result))
        if kernels:
            leaves.append(add("REST", name="rest of XnnpackBackend", parent=delegate["index"], **inside))
        else:
            leaves.append(delegate)
    leaves.append(add("REST", name="rest of forward"))
    weights = [draw(st.floats(0.0, 1.0)) for _ in leaves]
    for leaf, weight in zip(leaves, weights, strict=True):
        leaf["share"] = weight / sum(weights) if sum(weights) else 1 / len(leaves)
    return rows


@given(reports(), st.sampled_from(views.BY))
@settings(max_examples=100, deadline=None)
def test_a_group_has_the_interval_of_its_rows_together_or_none(rows: list[dict[str, Any]], by: str) -> None:
    by_index = {each["index"]: each for each in rows}
    for group in views.group(rows, by):
        own = [by_index[index] for index in group.indexes]
        if not group.own_ns or any(each["mean_ns"] is not None and each["mean_ci95_ns"] is None for each in own):
            assert group.own_ci95_ns is None
        else:
            assert group.own_ci95_ns == pytest.approx((0.9 * group.own_ns, 1.1 * group.own_ns))


def test_a_module_s_interval_is_with_the_modules_below() -> None:
    rows = [
        row(0, module="layer1", mean_ns=100.0, mean_ci95_ns=[90.0, 110.0]),
        row(1, module="layer1.conv", mean_ns=50.0, mean_ci95_ns=[45.0, 55.0]),
    ]
    parent, child = views.group(rows, "module")
    assert (parent.own_ci95_ns, parent.total_ci95_ns, child.total_ci95_ns) == ((90, 110), (135, 165), (45, 55))


@given(reports(), st.sampled_from(views.BY), st.sampled_from(views.SORTS))
@settings(max_examples=200, deadline=None)
def test_every_leaf_is_in_one_group_and_own_parts_add_up(rows: list[dict[str, Any]], by: str, sort: str) -> None:
    groups = views.group(rows, by, sort)
    leaves = views.leaves(rows)
    assert sorted(index for group in groups for index in group.indexes) == [leaf["index"] for leaf in leaves]
    assert len({group.key for group in groups}) == len(groups)
    assert math.isclose(sum(group.own_share or 0.0 for group in groups), 1.0, abs_tol=1e-9)
    known = [leaf["mean_ns"] for leaf in leaves if leaf["mean_ns"] is not None]
    assert math.isclose(sum(group.own_ns or 0.0 for group in groups), sum(known), rel_tol=1e-9)
    assert math.isclose(sum(group.total_share or 0.0 for group in groups if not group.depth), 1.0, abs_tol=1e-9)


@given(reports(), st.sampled_from(views.BY), st.sampled_from(views.SORTS), st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_order_in_which_rows_come_does_not_matter(rows: list[dict[str, Any]], by: str, sort: str, random: Any) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert views.group(shuffled, by, sort) == views.group(rows, by, sort)


@given(reports(), st.sampled_from(views.SORTS))
@settings(max_examples=200, deadline=None)
def test_a_module_s_total_is_its_own_and_that_of_the_modules_below(rows: list[dict[str, Any]], sort: str) -> None:
    groups = views.group(rows, "module", sort)
    places = {group.key: place for place, group in enumerate(groups)}
    for place, group in enumerate(groups):
        below = []
        for later in groups[place + 1 :]:
            if later.depth <= group.depth:
                break
            below.append(later)
        # Depth first: what lies below is exactly what has the path in front.
        assert {one.key for one in below} == {key for key in places if key.startswith(f"{group.key}.")}
        assert group.key not in MODULES or group.depth == group.key.count(".")
        share = (group.own_share or 0.0) + sum(one.own_share or 0.0 for one in below)
        assert math.isclose(group.total_share or 0.0, share, abs_tol=1e-9)
        assert group.rows or below
        if not group.rows:
            assert group.own_ns is group.own_share is None


@given(reports(), st.sampled_from(("own", "total")))
@settings(max_examples=100, deadline=None)
def test_siblings_are_sorted(rows: list[dict[str, Any]], sort: str) -> None:
    for by in views.BY:
        groups = views.group(rows, by, sort)
        siblings: dict[str, list[views.Group]] = {}
        for group in groups:
            siblings.setdefault(group.key.rpartition(".")[0] if group.depth else "", []).append(group)
        for some in siblings.values():
            parts = [getattr(group, f"{sort}_share") or 0.0 for group in some]
            assert parts == sorted(parts, reverse=True)


def small() -> list[dict[str, Any]]:
    inside = {"parent": 0, "delegated": True, "backend": "XnnpackBackend", "aligned": True}
    conv = {"op_types": ["aten.convolution.default", "aten.relu.default"], "module": "layer1.conv", "source": line(7)}
    return [
        row(0, "DELEGATE", name="XnnpackBackend", delegated=True, backend="XnnpackBackend", share=0.8, module="layer1"),
        row(1, "KERNEL", name="Convolution (NHWC, F32) IGEMM #1", share=0.3, **inside, **conv),
        row(2, "KERNEL", name="Convolution (NHWC, F32) IGEMM #2", share=0.2, mean_ns=None, p50_ns=None, **inside, **conv),
        row(3, "KERNEL", name="Transpose (ND, X32) #1", share=0.1, **inside),
        row(4, "KERNEL", name="Clamp (NC) #1", share=0.1, **(inside | {"aligned": False})),
        row(5, "REST", name="rest of XnnpackBackend", share=0.1, **(inside | {"aligned": None})),
        row(6, name="aten::mean.out", share=0.15, op_types=["aten.mean.dim"], source=line(9)),
        row(7, "REST", name="rest of forward", share=0.05),
    ]


def keys(by: str, sort: str = "order") -> list[str]:
    return [group.key for group in views.group(small(), by, sort)]


def test_by_operator_kernels_of_one_name_are_one() -> None:
    names = ["Convolution (NHWC, F32) IGEMM", "Transpose (ND, X32)", "Clamp (NC)", views.NOT_EXPLAINED, "aten::mean.out"]
    assert keys("op") == names
    first = views.group(small(), "op", "order")[0]
    assert (first.rows, first.indexes, first.own_ns, first.own_share) == (2, (1, 2), 10.0, 0.5)
    assert first.detail == "aten.convolution.default, aten.relu.default"


def test_by_type_what_stands_for_no_operator_has_its_kernel_s_name() -> None:
    conv = "aten.convolution.default + aten.relu.default"
    assert keys("type") == [conv, "Transpose (ND, X32)", "Clamp (NC)", views.NOT_EXPLAINED, "aten.mean.dim"]


def test_by_line_the_code_is_the_detail_and_what_has_no_line_says_why() -> None:
    assert keys("line") == ["models/net.py:7", views.INSERTED, views.UNKNOWN, views.NOT_EXPLAINED, "models/net.py:9"]
    assert views.group(small(), "line", "order")[0].detail == "y = self.f7(x)"


def test_by_module_an_unmatched_kernel_lies_where_its_delegate_does() -> None:
    result = {group.key: group for group in views.group(small(), "module", "order")}
    assert list(result) == ["layer1", "layer1.conv", views.NOT_EXPLAINED, views.MODEL]
    assert result["layer1"].indexes == (3, 4)
    assert result["layer1"].total_share == pytest.approx(0.7)
    assert result["layer1.conv"].depth == 1


def test_by_module_a_matched_kernel_of_the_model_itself_is_not_its_delegate_s() -> None:
    rows = [
        row(0, "DELEGATE", module="tiny", delegated=True, share=1.0),
        row(1, "KERNEL", parent=0, delegated=True, aligned=True, op_types=["aten.linear.default"], source=line(7), share=0.9),
        row(2, "KERNEL", parent=0, delegated=True, aligned=True, op_types=["aten.linear.default"], module="tiny", share=0.1),
    ]
    assert {group.key: group.own_share for group in views.group(rows, "module")} == {views.MODEL: 0.9, "tiny": 0.1}


def test_by_module_a_delegate_of_several_modules_without_times_is_not_the_model_itself() -> None:
    rows = [
        row(0, "DELEGATE", delegated=True, op_types=["aten.linear.default"], sources=[line(7), line(8)], share=1.0),
        row(1, "KERNEL", parent=0, delegated=True, mean_ns=None, p50_ns=None, share=0.0, module="a"),
        row(2, "KERNEL", parent=0, delegated=True, mean_ns=None, p50_ns=None, share=0.0, module="b"),
        row(3, "REST", parent=0, delegated=True, share=1.0),
    ]
    assert {group.key: group.own_share for group in views.group(rows, "module") if group.own_share} == {views.NOT_EXPLAINED: 1.0}


def test_by_backend_a_delegate_s_rest_is_its_delegate_s() -> None:
    result = {group.key: group.own_share for group in views.group(small(), "backend")}
    assert result == pytest.approx({"XnnpackBackend": 0.8, views.NOT_DELEGATED: 0.15, views.NOT_EXPLAINED: 0.05})


def too_short(*lines: int, source: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return a delegate with a kernel for each line, all below the clock's resolution."""
    inside = {"delegated": True, "backend": "XnnpackBackend"}
    unmeasured = {"parent": 0, "mean_ns": None, "p50_ns": None, "share": 0.0, "resolution_ns": 1000.0, "aligned": True, **inside}
    kernels = [
        row(number, "KERNEL", name=f"Clamp #{number}", op_types=["aten.relu.default"], source=line(at), **unmeasured)
        for number, at in enumerate(lines, 1)
    ]
    return [
        row(
            0, "DELEGATE", name="XnnpackBackend", op_types=["aten.relu.default"], share=0.8, mean_ns=80.0, source=source, **inside
        ),
        *kernels,
        row(len(lines) + 1, "REST", name="rest of XnnpackBackend", parent=0, share=0.8, mean_ns=80.0, **inside),
        row(len(lines) + 2, "REST", name="rest of forward", share=0.2, mean_ns=20.0),
    ]


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ([7], "models/net.py:7"), ([7, 8, 7], "models/net.py:7 + models/net.py:8"),
        ([1, 2, 3, 4, 5], "models/net.py:1 + models/net.py:2 + models/net.py:3 + 2 more"),
    ],
)  # fmt: skip
def test_the_time_of_a_delegate_whose_kernels_are_all_too_short_has_their_lines(lines: list[int], key: str) -> None:
    rows = too_short(*lines, source=line(7) if lines == [7] else None)
    groups = {group.key: group for group in views.group(rows, "line")}
    assert groups[key].own_share == 0.8 and groups[key].own_ns == 80.0 and 0 in groups[key].indexes
    assert groups[views.NOT_EXPLAINED].own_share == 0.2, "time outside of the delegate stays unexplained"
    assert groups.keys() >= {f"models/net.py:{at}" for at in lines}, "lines stay listed"
    assert views.group(rows, "module")[0].key == views.MODEL and views.group(rows, "op")[0].key == "XnnpackBackend"


def test_time_around_kernels_of_which_one_was_measured_is_not_explained() -> None:
    rows = too_short(7, 8)
    rows[1] |= {"share": 0.1, "mean_ns": 10.0}
    rows[3] |= {"share": 0.7, "mean_ns": 70.0}
    shares = {group.key: group.own_share for group in views.group(rows, "line")}
    assert shares == {"models/net.py:7": 0.1, "models/net.py:8": 0.0, views.NOT_EXPLAINED: pytest.approx(0.9)}


def test_sorting_by_name_and_by_own() -> None:
    assert keys("line", "name") == sorted(keys("line"))
    assert keys("op", "own")[0] == "Convolution (NHWC, F32) IGEMM"


def test_modules_that_own_something_and_ran_nothing_are_in_the_tree() -> None:
    groups = views.group(small(), "module", "total", modules=["layer1.norm", "embedding.table"])
    result = {group.key: group for group in groups}
    assert list(result)[-2:] == ["embedding", "embedding.table"]
    assert result["layer1.norm"].own_ns is None and result["layer1.norm"].rows == 0


def test_no_operators_are_no_groups() -> None:
    assert all(views.group([], by) == () for by in views.BY)


@pytest.mark.remedy("BAD_VIEW")
@pytest.mark.parametrize(("by", "sort", "expected"), [("layer", "own", "op, type, module"), ("op", "size", "own, total, name")])
def test_a_view_that_there_is_not_is_refused_with_those_that_there_are(by: str, sort: str, expected: str) -> None:
    with refuses("BAD_VIEW", match=expected) as caught:
        views.group(small(), by, sort)
    assert caught.value.reason == "BAD_VIEW"
    assert views.group(small(), "op", "own")
