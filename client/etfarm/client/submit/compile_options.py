"""The options of a compilation: one frozen object from the caller's keywords to the JobSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from etfarm.client.submit.recipes import chosen_recipes
from etfarm.v1 import job_pb2

if TYPE_CHECKING:
    from etfarm.client.submit.calibration import Calibration
    from etfarm.client.submit.preparation import ExampleInputs
    from etfarm.client.submit.recipes import Recipes
    from etfarm.client.transport import transfers
    from etfarm.wire.recipes import Recipe


@dataclass(frozen=True)
class CompileOptions:
    """The options of one compilation, beside its models."""

    recipes: Recipes | None = None
    """Names with arguments, several joined by +, or TOML files, as on the command line; or recipes that were parsed before."""
    _: KW_ONLY
    recipe: Recipes | None = None
    """The same as `recipes`."""
    example_inputs: ExampleInputs | None = None
    """Arguments of `forward` for an nn.Module; for a dict of modules, a dict by method."""
    calibration: Calibration | None = None
    """Samples for static quantization instead of the models' own."""
    batched: bool = False
    """Whether axis 0 of every array of `calibration` indexes the samples."""
    name: str = ""
    """The job's name."""
    labels: Mapping[str, str] | None = None
    """The job's labels."""
    no_cache: bool = False
    """Whether to compile again what the farm has compiled before."""
    stop_after: str = ""
    """The last stage to run, such as QUANTIZE; the job produces a program when empty."""
    on_upload: transfers.Moved | None = None
    """Callback with the number of bytes sent and their total."""
    on_status: Callable[[str], None] | None = None
    """Callback with one sentence about slow work before the job runs, such as an export."""

    def __post_init__(self) -> None:
        """Check the options that the server cannot check.

        Raises:
            BAD_OPTION: both spellings of an option are set, or there is no recipe.
        """
        chosen_recipes(self.recipe, self.recipes)

    @property
    def chosen_recipes(self) -> list[str | Recipe]:
        """The recipes of `recipe` or `recipes`."""
        return chosen_recipes(self.recipe, self.recipes)

    def job_spec(self) -> job_pb2.JobSpec:
        """Return the JobSpec, without its candidates."""
        return job_pb2.JobSpec(name=self.name, labels=self.labels, no_cache=self.no_cache, stop_after=self.stop_after)
