"""`AsyncSession`: a leased device with a loaded program, for many calls.

with Farm() as farm, farm.session(device="arch=aarch64", program="x.pte") as s:
    y = s.run(x)
    print(s.loop(1000).p50_ns)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from etfarm.client.models import Device
from etfarm.client.sessions.calls import Loop, Outputs, flattened, loop_of, types_of_program
from etfarm.client.sessions.open_calls import Connect, SessionCalls, TextCallback
from etfarm.client.sessions.text import AsyncTokenStream, TextContext, request_of
from etfarm.client.submit.input_types import require_count, require_fitting
from etfarm.client.transport.decode import decoded
from etfarm.v1 import session_pb2
from etfarm.wire import sessions, tensors
from etfarm.wire.errors import EtfarmError, error_for


class AsyncSession:
    """A program on a device that is reserved for it.

    Use it with `async with`.

    Buffers keep their state from call to call until the session ends; methods share those that are one buffer of the model.
    Calls are served in the order of the calls. A call that fails because of its inputs changes nothing.
    """

    _USE: ClassVar[str] = "with farm.session(...) as s:"

    def __init__(self, connect: Connect, *, on_wait: TextCallback | None = None, on_log: TextCallback | None = None) -> None:
        """Prepare a session; AsyncFarm.session and LocalSession create instances.

        Args:
            on_wait: called with what the session waits for, whenever that changes.
            on_log: called with each line that the runner prints.
        """
        self._calls = SessionCalls(connect, self._USE, on_wait, on_log)
        self._context = TextContext()

    async def __aenter__(self) -> Self:
        """Wait for a device and load the program on it.

        Raises:
            EtfarmError: as SessionService.Open.
        """
        self._context.tokens = 0
        await self._calls.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release the device."""
        await self._calls.close()

    @property
    def device(self) -> Device:
        """The device that runs the program."""
        self._calls.require_open()
        return decoded(Device, self._calls.ready.device)

    @property
    def threads(self) -> int:
        """The size of the program's thread pool."""
        self._calls.require_open()
        return self._calls.ready.threads

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the program's methods."""
        self._calls.require_open()
        return tuple(method.name for method in self._calls.ready.methods)

    def input_names(self, method: str) -> tuple[str, ...]:
        """Return the names of a method's inputs in flattened order.

        They come from the model that it was compiled from, else from the program; without either, they are positions as
        text.

        Raises:
            METHOD_MISSING: the program has no such method.
        """
        described = self._method(method)
        if described is None:
            there = f"It has: {', '.join(self.methods)}."
            raise error_for("METHOD_MISSING", f"The program has no method {method!r}.", there, method=method)
        own = [value.name for value in described.inputs]
        known = self._calls.require_open().names.inputs.get(method, ())
        return tuple(known or (own if all(own) else map(str, range(len(own)))))

    async def ended(self, within_s: float) -> EtfarmError | None:
        """Return why the session has ended, or None if it does not end within `within_s` seconds.

        The end of a session arrives after the call that caused it.
        """
        return await self._calls.ended(within_s)

    async def run(self, /, *inputs: Any, timeout_s: float | None = None, **named: Any) -> Outputs:
        """Run one execution of a method and return its outputs.

        `s.run(x)` calls the program's only method; `s.run("encode", x)` calls a method by its name.

        Args:
            inputs: arrays, torch tensors, or Python numbers for scalar inputs, in flattened order; a method's name may
                precede them.
            named: the remaining inputs by name, those of `input_names`.
            timeout_s: limit on the device in seconds, 600 when None; a program that takes longer is killed, and the
                session ends.

        Returns:
            The outputs, each by its position, `y[0]`, and by its name, `y["logits"]`: NumPy arrays, or Python numbers
            for scalar outputs. `y.array("logits")` is typed as an array, `y.as_dict()` has all by name, and `y.run_ns`
            is the duration on the device.

        Raises:
            UserError: an input does not fit; the session stays usable. Errors such as PROGRAM_CRASHED end the session.
            METHOD_MISSING: the program has several methods, and the call names none.
            EtfarmError: the session has ended; this is the reason.
        """
        if inputs and isinstance(inputs[0], str):
            method, inputs = inputs[0], inputs[1:]
        else:
            method = self._only_method()
        described = self._method(method)
        names = self._calls.require_open().names.inputs.get(method, ())
        values = flattened(method, described, names, inputs, named)
        self._require_fitting(method, values)
        task = session_pb2.SessionTask(method=method, timeout_s=timeout_s)
        answer = await self._calls.call(task, values)
        return await self._outputs(method, answer)

    async def loop(
        self,
        iterations: int,
        method: str = "",
        inputs: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        warmup: int | None = None,
        min_time_s: float | None = None,
        max_time_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Loop:
        """Measure at least `iterations` executions on the device, without a call between them.

        Args:
            method: the method; the program's only method, or forward, when empty.
            inputs: in flattened order or by name; those of the method's last call when None, else inputs that the runner
                generates.
            warmup: number of iterations before, which are not counted; 10 when None.
            min_time_s, max_time_s: limits of the duration in seconds; 0 and 60 when None.

        Raises:
            EtfarmError: as `run`.
        """
        line = self._calls.require_open()
        method = method or (self.methods[0] if len(self.methods) == 1 else "forward")
        described = self._method(method)
        values = None
        if inputs is not None:
            in_order, named = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
            values = flattened(method, described, line.names.inputs.get(method, ()), in_order, named)
            self._require_fitting(method, values)
        task = session_pb2.SessionTask(method=method, timeout_s=timeout_s)
        task.loop.CopyFrom(
            session_pb2.SessionLoop(iterations=iterations, warmup=warmup, min_time_s=min_time_s, max_time_s=max_time_s)
        )
        answer = await self._calls.call(task, values)
        samples = await sessions.unpack(answer.measured.samples, self._calls.fetch)
        return loop_of(method, answer.measured, samples, await self._outputs(method, answer))

    def generate(
        self,
        prompt_tokens: Any,
        tokens: int,
        *,
        position: int | None = None,
        stop_tokens: Iterable[int] | Literal["eos"] = (),
        max_time_s: float | None = None,
        timeout_s: float | None = None,
        prefill_method: str = "",
        decode_method: str = "",
    ) -> AsyncTokenStream:
        """Generate text with a language model; the loop over the tokens runs on the device.

        `async for token in s.generate(prompt, 128)` yields tokens as they come, `await s.generate(prompt, 128).result()` returns
        all of them with their times. Each token is the most likely one. The prompt and the tokens stay in the session's context,
        which the next generation continues, until `reset` or `position=0`. Calls of `run` with the same methods overwrite it.

        Args:
            prompt_tokens: token ids: a sequence, or an array or tensor of shape (n,) or (1, n). May be empty to go on.
            tokens: maximum number of tokens to generate, at most 65,536.
            position: number of tokens of the context to continue after, which forgets the others; 0 starts a new context. All of
                them when None.
            stop_tokens: token ids that end the text, or "eos" for those that the program's metadata names. The text ends for no
                token by default.
            max_time_s: time in seconds after which the text ends, 600 when None.
            timeout_s: limit on the device in seconds, 600 plus twice `max_time_s` when None; a program that takes longer is
                killed, and the session ends.
            prefill_method, decode_method: the methods that process the prompt and generate tokens; recognized when empty.

        Raises:
            BAD_CALL: a value is out of range. The iteration raises the other errors; see TokenStream.result.
            EtfarmError: the session is not open.
        """
        self._calls.require_open()
        request = request_of(
            prompt_tokens,
            tokens,
            stop_tokens,
            position=position,
            max_time_s=max_time_s,
            prefill_method=prefill_method,
            decode_method=decode_method,
        )
        return AsyncTokenStream(lambda message: self._calls.generate(message, timeout_s), request, self._context)

    async def reset(self) -> None:
        """Give all methods their initial state, and start a new context for `generate`.

        Raises:
            EtfarmError: as `run`.
        """
        await self._calls.call(session_pb2.SessionTask(reset=True), None)
        self._context.tokens = 0

    def _require_fitting(self, method: str, values: Sequence[tensors.Value]) -> None:
        """Check the inputs with the program's dtypes, and with the sizes and relations that only its model has.

        The device checks the rest.
        """
        known, described = self._calls.require_open().names, self._method(method)
        types = known.types.get(method, ())
        if described is not None:
            names = self.input_names(method)
            require_count(method, names if len(names) == len(described.inputs) else (), len(described.inputs), values)
            types = types_of_program(described, types, values)
        require_fitting(method, values, types, known.relations.get(method, ()))

    async def _outputs(self, method: str, answer: session_pb2.SessionAnswer) -> Outputs:
        run_ns = answer.run_ns if answer.HasField("run_ns") else None
        values = tensors.decode(await sessions.unpack(answer.outputs, self._calls.fetch))
        return Outputs(self._calls.require_open().names.name_outputs(method, values), run_ns)

    def _not_open(self) -> EtfarmError:
        return self._calls.not_open()

    def _only_method(self) -> str:
        if len(self.methods) != 1:
            raise error_for(
                "METHOD_MISSING",
                f"The program has {len(self.methods)} methods, and the call names none.",
                f"Name it first, as in run({self.methods[0]!r}, x). Methods: {', '.join(self.methods)}.",
            )
        return self.methods[0]

    def _method(self, name: str) -> session_pb2.SessionMethod | None:
        """Return the program's description of a method; None without one.

        The device reports unknown names.
        """
        return next((method for method in self._calls.ready.methods if method.name == name), None)
