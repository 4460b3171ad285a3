"""The options of a benchmark: one frozen object from the caller's keywords to the JobSpec."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from etfarm.client.submit.options import BadOption, one_spelling, require_some, to_list
from etfarm.client.submit.recipes import DEFAULT_RECIPE
from etfarm.v1 import job_pb2

if TYPE_CHECKING:
    from etfarm.client.submit.calibration import Calibration
    from etfarm.client.submit.inputs import Inputs
    from etfarm.client.submit.preparation import ExampleInputs
    from etfarm.client.transport import transfers
    from etfarm.wire.recipes import Recipe

    Recipes = str | Recipe | Sequence[str | Recipe]


@dataclass(frozen=True)
class BenchOptions:
    """The options of one benchmark, beside its models."""

    recipes: Recipes | None = None
    """Names with arguments, several joined by +, or TOML files, as on the command line; or recipes that were parsed before."""
    devices: str | Sequence[str] | None = None
    """Selectors; each is one cell on one matching device, or one per match with `all_devices`."""
    _: KW_ONLY
    recipe: Recipes | None = None
    """The same as `recipes`."""
    device: str | Sequence[str] | None = None
    """The same as `devices`."""
    method: str | Sequence[str] | None = None
    """The same as `methods`."""
    all_devices: bool = False
    example_inputs: ExampleInputs | None = None
    """Arguments of `forward` for an nn.Module; for a dict of modules, a dict by method."""
    calibration: Calibration | None = None
    """Samples for static quantization instead of the models' own."""
    batched: bool = False
    """Whether axis 0 of every array of `calibration` indexes the samples."""
    data: Sequence[str | Path] = ()
    """Named data files (.ptd) of a ready program."""
    inputs: Inputs | None = None
    """Inputs of the programs; the models' own example inputs when None."""
    methods: str | Sequence[str] | None = None
    """Names of the methods to measure; the program's only method, or forward, when empty."""
    threads: int | Sequence[int] = ()
    """Numbers of threads, each a cell of its own; the number of cores of the fastest cluster when empty."""
    cores: str = ""
    """big, little, or CPUs such as 0-3."""
    iterations: int | None = None
    """Minimum number of timed iterations."""
    warmup: int | None = None
    """Number of iterations that are not counted; until the latency is steady when None."""
    min_time_s: float | None = None
    """Minimum duration of the timed iterations, in seconds."""
    repeat: int | None = None
    """Number of fresh processes that measure the program one after another, which shows how much its median varies between
    runs; 1 when None."""
    profile: bool = True
    """Whether a traced pass measures the operators."""
    trace_iterations: int | None = None
    """Minimum number of traced iterations, 1 to 1,000; 30 when None. The traced pass ends after about 20 s."""
    numerics: bool = False
    """Whether the outputs of each operator are compared too."""
    interleave: bool = False
    """Whether the candidates are measured in turns, on one device."""
    name: str = ""
    """The job's name."""
    labels: Mapping[str, str] | None = None
    """The job's labels."""
    timeout_s: float | None = None
    """Limit of one run, in seconds; the server's default when None."""
    priority: int = 0
    """Jobs with a higher priority run first."""
    no_cache: bool = False
    """Whether to compile again what the farm has compiled before."""
    on_upload: transfers.Moved | None = None
    """Callback with the number of bytes sent and their total."""
    on_status: Callable[[str], None] | None = None
    """Callback with one sentence about slow work before the job runs, such as an export."""

    def __post_init__(self) -> None:
        """Check the options that the server cannot check.

        Raises:
            BadOption: both spellings of an option are set, or there is no recipe.
        """
        chosen_recipes(self.recipe, self.recipes)
        self.job_spec()

    @property
    def chosen_recipes(self) -> list[str | Recipe]:
        """The recipes of `recipe` or `recipes`."""
        return chosen_recipes(self.recipe, self.recipes)

    def job_spec(self) -> job_pb2.JobSpec:
        """Return the JobSpec, without its candidates and inputs."""
        measurement = job_pb2.Measurement(
            warmup=self.warmup,
            iterations=self.iterations,
            min_time_s=self.min_time_s,
            repeat=self.repeat,
            no_profile=not self.profile,
            trace_iterations=self.trace_iterations,
            numerics=self.numerics,
            cores=self.cores,
            interleave=self.interleave,
        )
        return job_pb2.JobSpec(
            name=self.name,
            labels=self.labels,
            devices=device_choices(
                one_spelling("device", self.device, "devices", self.devices, ""), all_devices=self.all_devices
            ),
            methods=to_list(one_spelling("method", self.method, "methods", self.methods, ())),
            threads=to_list(self.threads),
            measurement=measurement,
            priority=self.priority,
            timeout_s=self.timeout_s,
            no_cache=self.no_cache,
        )


def chosen_recipes(recipe: Recipes | None, recipes: Recipes | None) -> list[str | Recipe]:
    """Return the recipes of the keywords `recipe` and `recipes` as a list; the default recipe if neither is set.

    Raises:
        BadOption: both are set, or there is no recipe.
    """
    chosen = one_spelling("recipe", recipe, "recipes", recipes, DEFAULT_RECIPE)
    listed = list(chosen) if isinstance(chosen, list | tuple) else [chosen]
    require_some("recipes", listed, repr(DEFAULT_RECIPE))
    return listed  # type: ignore[return-value]  # mypy: a Sequence that is neither list nor tuple is no list of recipes


def only_recipe(recipe: Recipes | None, recipes: Recipes | None) -> str | Recipe:
    """Return the recipe of the keywords `recipe` and `recipes` of a call that takes a single one.

    Raises:
        BadOption: as `chosen_recipes`, or there are several.
    """
    listed = chosen_recipes(recipe, recipes)
    if len(listed) > 1:
        raise BadOption(f"`recipe` must be one recipe, got {len(listed)}.", "Make one call for each.", option="recipe")
    return listed[0]


def device_choices(devices: str | Iterable[str], *, all_devices: bool) -> list[job_pb2.DeviceChoice]:
    """Return the device choices of one or several selectors; without a selector, the choice of any device."""
    return [job_pb2.DeviceChoice(selector=selector, all=all_devices) for selector in to_list(devices) or [""]]


FarmT = TypeVar("FarmT")
ModelT = TypeVar("ModelT")
OptionsT = TypeVar("OptionsT")
ResultT = TypeVar("ResultT")
P = ParamSpec("P")


def takes_keywords_of(
    options_type: Callable[P, OptionsT],
) -> Callable[[Callable[[FarmT, ModelT, OptionsT], ResultT]], Callable[Concatenate[FarmT, ModelT, P], ResultT]]:
    """Return a decorator that replaces a method's options object by the keywords of `options_type`.

    Type checkers and `help` show the keywords, so that they are written down once, as the fields of a frozen dataclass.
    """

    def decorate(method: Callable[[FarmT, ModelT, OptionsT], ResultT]) -> Callable[Concatenate[FarmT, ModelT, P], ResultT]:
        @functools.wraps(method)
        def call(self: FarmT, model: ModelT, *args: P.args, **kwargs: P.kwargs) -> ResultT:
            try:
                signature.bind(self, model, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{method.__name__}() {error}") from None
            return method(self, model, options_type(*args, **kwargs))

        signature = _signature(method, options_type)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]  # mypy: a Concatenate has no parameter names

    return decorate


def _signature(method: Callable[..., Any], options_type: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `method` with the parameters of `options_type` in place of its last one."""
    signature = inspect.signature(method)
    own = list(signature.parameters.values())[:-1]
    return signature.replace(parameters=[*own, *inspect.signature(options_type).parameters.values()])
