"""Fields of forms: what they mean as options of a command, and what is read from them."""

from __future__ import annotations

import pytest

from etfarm.client.submit.bench_options import BenchOptions
from etfarm.client.web.form_fields import Field, command_line, integer_of, number_of, pairs_of
from etfarm.client.web.forms import Fields
from etfarm.client.web.pages.submit import read_options
from etfarm.wire.errors import EtfarmError
from etfarm.wire.recipes import Recipe
from tests.support.refusals import refuses


def test_a_command_has_what_differs_from_its_defaults() -> None:
    fields = [
        Field("selector", "Selector", value="", is_required=True),
        Field("count", "Devices", value="1", default="1", flag="--count"),
        Field("minutes", "Minutes", value="45", default="30", flag="--for", unit="m"),
        Field("reason", "Reason", value="it's hot", flag="--reason"),
        Field("labels", "Labels", value="a=b\n\n c=d ", flag="--label", kind="lines"),
        Field("recipe", "Recipe", value="portable", flag="--recipe", kind="checkbox", is_checked=True),
        Field("numerics", "Numerics", flag="--numerics", kind="checkbox", is_checked=True),
        Field("interleave", "Interleave", flag="--interleave", kind="checkbox"),
    ]
    assert command_line(("etfarm", "x"), fields) == (
        "etfarm x '' --for 45m --reason 'it'\"'\"'s hot' --label a=b --label c=d --recipe portable --numerics"
    )


@pytest.mark.parametrize("text", ["x", "1e400", "nan", "-inf", "1e10"])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with refuses("BAD_OPTION"):
        number_of(Fields([("n", text)]), "n", "N")


def test_numbers_and_pairs_are_read() -> None:
    assert integer_of(Fields([("n", " 3 ")]), "n", "N") == 3
    assert integer_of(Fields(), "n", "N") is None
    assert pairs_of("a=b=c\n\nd = e", "Labels") == {"a": "b=c", "d": "e"}
    with refuses("BAD_OPTION"):
        integer_of(Fields([("n", "1.5")]), "n", "N")
    with refuses("BAD_OPTION"):
        pairs_of("a", "Labels")


def test_a_submission_is_read_and_never_names_a_file() -> None:
    options = read_options(
        Fields([("recipe", "portable"), ("more_recipes", "xnnpack_fp32"), ("threads", "1, 2"), ("deadline", "90")])
    )
    recipes = [recipe for recipe in options.chosen_recipes if isinstance(recipe, Recipe)]
    assert [recipe.text for recipe in recipes] == ["portable", "xnnpack_fp32"]
    assert options.threads == [1, 2] and options.reservation == ""
    # On the command line, the first would be a file.
    for recipe in ("/etc/secret.toml", "nothing"):
        with pytest.raises(EtfarmError):
            read_options(Fields([("recipe", recipe)]))
    with refuses("BAD_OPTION"):
        read_options(Fields())


def test_an_empty_form_measures_as_a_command_without_options() -> None:
    chosen = [("recipe", "portable"), ("repeat", "2"), ("priority", "-3"), ("numerics", "yes")]
    assert read_options(Fields(chosen[:1])).job_spec() == BenchOptions(["portable"], reservation="").job_spec()
    assert (
        read_options(Fields(chosen)).job_spec()
        == BenchOptions(["portable"], reservation="", repeat=2, priority=-3, numerics=True).job_spec()
    )
