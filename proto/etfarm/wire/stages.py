"""ExecuTorch's export stages, their valid predecessors, and the validation of pipelines.

Source: `valid_predecessor_stages` and `can_start_pipeline` of the classes in executorch.export.stages 1.5.1; a test compares.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from etfarm.wire.errors import EtfarmError, error_for

STAGES: Final = (
    "SOURCE_TRANSFORM",
    "QUANTIZE",
    "TORCH_EXPORT",
    "TO_EDGE_TRANSFORM_AND_LOWER",
    "TO_EDGE",
    "EDGE_PROGRAM_MANAGER_TRANSFORM",
    "TO_BACKEND",
    "TO_EXECUTORCH",
)
"""ExecuTorch's export stages; ExportSession uses these names in lower case."""

PREDECESSORS: Final[Mapping[str, tuple[str, ...]]] = {
    "SOURCE_TRANSFORM": (),
    "QUANTIZE": ("SOURCE_TRANSFORM",),
    "TORCH_EXPORT": ("SOURCE_TRANSFORM", "QUANTIZE"),
    "TO_EDGE_TRANSFORM_AND_LOWER": ("TORCH_EXPORT",),
    "TO_EDGE": ("TORCH_EXPORT",),
    "EDGE_PROGRAM_MANAGER_TRANSFORM": ("TO_EDGE", "TO_EDGE_TRANSFORM_AND_LOWER"),
    "TO_BACKEND": ("TO_EDGE", "EDGE_PROGRAM_MANAGER_TRANSFORM"),
    "TO_EXECUTORCH": ("TO_EDGE_TRANSFORM_AND_LOWER", "TO_BACKEND", "EDGE_PROGRAM_MANAGER_TRANSFORM"),
}
"""The stages that may directly precede each stage."""

STARTS: Final = ("SOURCE_TRANSFORM", "QUANTIZE", "TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER", "TO_EDGE")
"""The stages with which a pipeline may start."""

REPLACEABLE: Final = STAGES[3:]
"""The stages that an installed plug-in may replace: those that only the server runs, on exported programs."""


class Staged(Protocol):
    """The properties of a recipe that are needed here."""

    @property
    def text(self) -> str:
        """The recipe as shown to users."""

    @property
    def stages(self) -> tuple[str, ...]:
        """The whole pipeline."""


def check_name(stage: str) -> None:
    """Raise an error unless `stage` is the name of a stage.

    Raises:
        BAD_STAGES: it is not; the error lists all stages and the closest match.
    """
    if stage in STAGES:
        return
    near = difflib.get_close_matches(stage.upper().replace("-", "_"), STAGES, n=1, cutoff=0.5)
    meant = f" Did you mean {near[0]}?" if near else ""
    raise error_for(
        "BAD_STAGES",
        f"{stage!r} is not a stage.",
        f"The stages are {', '.join(STAGES)}.{meant}",
        stage_name=stage,
        nearest=",".join(near),
    )


def check_order(stages: Sequence[str]) -> None:
    """Raise an error unless ExecuTorch can run the stages in this order.

    Raises:
        BAD_STAGES: there are no stages, a stage is unknown or repeated, or it cannot follow its predecessor.
    """
    if not stages:
        raise error_for("BAD_STAGES", "There are no stages.", f"An order begins with {_either(STARTS)}.", stages="")
    for stage in stages:
        check_name(stage)
    order = ",".join(stages)
    for index, stage in enumerate(stages):
        if stage in stages[:index]:
            raise error_for("BAD_STAGES", f"{stage} occurs twice.", "Every stage runs once.", stages=order, stage_name=stage)
    if stages[0] not in STARTS:
        raise error_for(
            "BAD_STAGES",
            f"{stages[0]} cannot be the first stage.", f"It follows {_either(PREDECESSORS[stages[0]])}.",
            stages=order, stage_name=stages[0], predecessors=",".join(PREDECESSORS[stages[0]]),
        )  # fmt: skip
    for before, stage in itertools.pairwise(stages):
        if before not in PREDECESSORS[stage]:
            raise _misplaced(before, stage, order)


def check_stop_after(recipe: Staged, stage: str) -> None:
    """Raise an error unless the recipe has the stage after which a compilation is to stop.

    Raises:
        BAD_STAGES: it does not; the error lists its stages and explains how to add this one.
    """
    check_name(stage)
    if stage not in recipe.stages:
        raise error_for(
            "BAD_STAGES",
            f"Recipe {recipe.text} has no stage {stage}, so nothing can stop after it.",
            f"Its stages are {', '.join(recipe.stages)}. {_remedy(recipe.stages, stage)}",
            recipe=recipe.text, stage_name=stage, stages=",".join(recipe.stages),
        )  # fmt: skip


def order_with(stages: Sequence[str], stage: str) -> tuple[str, ...]:
    """Return a pipeline that is equivalent to `stages`, includes `stage`, and writes a program."""
    front = [name for name in STAGES[:3] if name in stages or name in (stage, "TORCH_EXPORT")]
    in_steps = stage in ("TO_EDGE", "TO_BACKEND") or ("TO_EDGE" in stages and stage != "TO_EDGE_TRANSFORM_AND_LOWER")
    transform = "EDGE_PROGRAM_MANAGER_TRANSFORM"
    between = [transform] if transform in (*stages, stage) else []
    lowering = ["TO_EDGE", *between, "TO_BACKEND"] if in_steps else ["TO_EDGE_TRANSFORM_AND_LOWER", *between]
    return (*front, *lowering, "TO_EXECUTORCH")


def _remedy(stages: Sequence[str], stage: str) -> str:
    """Return a sentence on how to add a missing stage to a recipe."""
    if stage == "QUANTIZE":
        example = "xnnpack_pt2e_int8_static_per_channel"
        return f"Take one that quantizes, such as {example}, or write a recipe file with `quantizers = [...]`."
    order = ", ".join(f'"{name}"' for name in order_with(stages, stage))
    return f"To include it, write a recipe file with `stages = [{order}]`."


def _misplaced(before: str, stage: str, order: str) -> EtfarmError:
    valid = PREDECESSORS[stage]
    follows = f"it follows {_either(valid)}" if valid else "nothing comes before it"
    remedy = ""
    if (before, stage) == ("TO_EDGE", "TO_EXECUTORCH"):
        remedy = "Put TO_BACKEND between them; without partitioners it delegates nothing."
    elif (before, stage) == ("TO_EDGE_TRANSFORM_AND_LOWER", "TO_BACKEND"):
        remedy = "TO_EDGE_TRANSFORM_AND_LOWER delegates already: leave TO_BACKEND out, or write TO_EDGE before it."
    elif between := [s for s in valid if before in PREDECESSORS[s]]:
        remedy = f"Put {_either(between)} between them."
    return error_for(
        "BAD_STAGES",
        f"{stage} cannot follow {before}: {follows}.", remedy,
        stages=order, stage_name=stage, after=before, predecessors=",".join(valid),
    )  # fmt: skip


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
