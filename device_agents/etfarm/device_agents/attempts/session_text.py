"""Generation of text in a session: the context that a program's methods have executed, and how it is continued."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from etfarm.device_agents.errors import generation_unsupported
from etfarm.device_agents.runners import streaming
from etfarm.device_agents.runners.protocol import MethodInfo, Runner, TensorInfo
from etfarm.device_agents.runners.streaming import StreamRequest, Tokens
from etfarm.v1 import common_pb2, compile_pb2, generation_pb2, session_pb2
from etfarm.wire import language_models, sessions
from etfarm.wire.errors import error_for
from etfarm.wire.tensors import Scalar
from etfarm.wire.words import value_of

_GRACE_S: Final = 60.0
"""Seconds for which the runner may go on after the session's own limit, which states what is wrong."""

OnTokens = Callable[[session_pb2.SessionTokens], None]


class Methods(Protocol):
    """The methods of a loaded program."""

    @property
    def names(self) -> Sequence[str]:
        """All methods, in the program's order."""

    async def use(self, method: str) -> int | None:
        """Load a method unless it is loaded, and make it the current one."""


class SessionText:
    """The text of a session: prompts and generated tokens, as far as the program's methods have them in their memory.

    Args:
        runner: the runner, which has a program.
        methods: the program's methods.
    """

    def __init__(self, runner: Runner, methods: Methods) -> None:
        self._runner = runner
        self._methods = methods
        self._models: dict[tuple[str, str], generation_pb2.LanguageModel] = {}
        """By the methods that were requested."""
        self._end_tokens: tuple[int, ...] | None = None
        self._writers = ("", "")
        """The methods that wrote the context."""
        self._context = array("i")
        self._executed = 0
        """Number of tokens of the context that were executed: all of them, or all but the last one."""

    def forget(self) -> None:
        """Start a new context: the methods lose their state."""
        self._context, self._executed = array("i"), 0

    async def generate(
        self, wanted: session_pb2.SessionGeneration, limit_s: float, on_tokens: OnTokens, stop: asyncio.Event
    ) -> session_pb2.SessionGenerated:
        """Continue the context by a prompt and generated tokens.

        Args:
            wanted: a valid request, as far as no program is needed.
            limit_s: limit of the session for the whole call, in seconds.
            on_tokens: takes the tokens as they come.
            stop: ends the text after the current token.

        Raises:
            BAD_CALL, CONTEXT_TOO_SHORT, NotALanguageModel, GENERATION_UNSUPPORTED: the context is unchanged.
            EtfarmError: as Runner.stream.
        """
        if streaming.COMMAND not in (await self._runner.hello()).commands:
            raise generation_unsupported(self._runner.kind, "generate text in a session")
        model = await self._describe(wanted.prefill_method, wanted.decode_method)
        stop_tokens = {*wanted.stop_tokens, *(await self._ends() if wanted.stop_at_eos else ())}
        for name in dict.fromkeys((model.prefill_method, model.decode_method)):
            await self._methods.use(name)
        writers = (model.prefill_method, model.decode_method)
        kept = len(self._context) if writers == self._writers else 0
        position = wanted.position if wanted.HasField("position") else kept
        _validate(wanted, model, position, kept)
        context = self._context[:position] + array("i", wanted.prompt_tokens)
        # Without a prompt the last token is executed again, or for the first time, for its logits.
        executed = min(self._executed, position, len(context) - 1)
        # The prompt is written over what follows. If the text ends before its first token, the context stays, but all that
        # follows is executed again.
        self._executed = executed

        def take(tokens: Tokens) -> None:
            nonlocal context
            context += array("i", tokens.tokens)
            # An error or the caller may end the text at any time: what was sent is the context.
            self._writers, self._context, self._executed = writers, context, len(context) - 1
            on_tokens(session_pb2.SessionTokens(tokens=tokens.tokens, token_ns=tokens.token_ns, prefill_ns=tokens.prefill_ns))

        request = StreamRequest(
            model.prefill_method,
            model.decode_method,
            array("i", context),
            executed,
            wanted.tokens,
            sorted(stop_tokens),
            max(1, round(max_time_s(wanted) * 1e9)),
            model.token_input,
            model.position_input,
            model.max_prompt_tokens,
        )
        streamed = await self._runner.stream(request, limit_s + _GRACE_S, take, stop)
        return session_pb2.SessionGenerated(
            finish_reason=value_of(session_pb2.FinishReason, streamed.finish_reason),
            tokens=streamed.tokens,
            context_tokens=len(self._context),
        )

    async def _describe(self, prefill: str, decode: str) -> generation_pb2.LanguageModel:
        """Return how the program generates text, from what the runner knows of it.

        Raises:
            NotALanguageModel: it does not.
        """
        key = (prefill, decode)
        if key not in self._models:
            facts = compile_pb2.ProgramFacts()
            for name in self._methods.names:
                info = await self._runner.method(name)
                facts.methods[name].CopyFrom(_facts(info))
                if name in language_models.METADATA and not info.inputs:
                    values = await self._values(name)
                    if len(values) == 1 and len(info.outputs) == 1:
                        facts.methods[name].outputs[0].value.integer = values[0]
            recognized = language_models.describe(facts, "The program", prefill=prefill, decode=decode)
            if recognized.HasField("flow"):
                raise language_models.NotALanguageModel(
                    f"The method {recognized.decode_method!r} of the program takes embeddings, but sessions generate text from "
                    "tokens.",
                    "Call the methods one by one, or measure it with `etfarm bench --generate`.",
                )
            for name in (recognized.prefill_method, recognized.decode_method):
                # Which lengths are dynamic is known once a method is loaded.
                await self._methods.use(name)
                facts.methods[name].CopyFrom(_facts(await self._runner.method(name)))
            self._models[key] = language_models.describe(
                facts, "The program", prefill=recognized.prefill_method, decode=recognized.decode_method
            )
        return self._models[key]

    async def _ends(self) -> tuple[int, ...]:
        """Return the tokens that end a text, by the program's metadata.

        Raises:
            BAD_CALL: it does not say.
        """
        if self._end_tokens is None:
            names = [name for name in language_models.END_TOKENS if name in self._methods.names]
            values = [value for name in names for value in await self._values(name)]
            self._end_tokens = tuple(value for value in values if 0 <= value < 1 << 31)[: sessions.MAX_STOP_TOKENS]
        if not self._end_tokens:
            raise error_for(
                "BAD_CALL",
                f"The program does not say which tokens end a text: it has no method {language_models.END_TOKENS[0]}.",
                "Give the tokens: stop_tokens=[2].",
            )
        return self._end_tokens

    async def _values(self, name: str) -> list[int]:
        """Return the integers and booleans that a method without inputs returns."""
        await self._methods.use(name)
        await self._runner.run()
        outputs = await self._runner.outputs()
        return [int(value.value) for value in outputs if isinstance(value, Scalar) and isinstance(value.value, int)]


def max_time_s(wanted: session_pb2.SessionGeneration) -> float:
    """Return the time after which a generation ends, in seconds."""
    return wanted.max_time_s if wanted.HasField("max_time_s") else sessions.GENERATION_TIME_S


def _validate(wanted: session_pb2.SessionGeneration, model: generation_pb2.LanguageModel, position: int, kept: int) -> None:
    """Check a request against the program and its context.

    Args:
        position: number of tokens to continue after.
        kept: number of tokens in the context.
    """
    prompt = len(wanted.prompt_tokens)
    if position > kept:
        raise error_for(
            "BAD_CALL",
            f"`position` is {position:,}, and the context has {kept:,} tokens.",
            "Continue after one of them, or start anew with position=0.", context_tokens=kept,
        )  # fmt: skip
    if not prompt and not position:
        raise error_for("BAD_CALL", "The prompt has no tokens, and the context is empty.", "Give at least one token.")
    if position + prompt + wanted.tokens > model.max_context_tokens:
        before = f"Text so far ({position:,}) + prompt" if position else "Prompt"
        raise error_for(
            "CONTEXT_TOO_SHORT",
            f"{before} ({prompt:,}) + tokens ({wanted.tokens:,}) exceed the context of {model.max_context_tokens:,}.",
            f"Generate fewer tokens, {'or start anew with position=0' if position else 'or give a shorter prompt'}.",
            context=model.max_context_tokens,
        )  # fmt: skip
    if prompt and max(wanted.prompt_tokens) >= model.vocab_size:
        raise error_for(
            "BAD_CALL",
            f"The prompt has the token {max(wanted.prompt_tokens):,}, and the vocabulary has {model.vocab_size:,}.",
            "Use the program's own tokenizer.", vocab_size=model.vocab_size,
        )  # fmt: skip


def _facts(info: MethodInfo) -> compile_pb2.MethodFacts:
    return compile_pb2.MethodFacts(
        inputs=[_spec(value) for value in info.inputs], outputs=[_spec(value) for value in info.outputs]
    )


def _spec(info: TensorInfo) -> compile_pb2.ValueSpec:
    """Return an input or output as the facts of a file have it."""
    spec = compile_pb2.ValueSpec(
        name=info.name,
        kind=value_of(common_pb2.ValueKind, info.kind) or common_pb2.VALUE_KIND_UNSPECIFIED,
        dtype=info.dtype,
    )
    for size in info.shape:
        # Until a method is loaded, any of its lengths may be dynamic.
        spec.dims.add(min=size if info.dynamic is False or size == 1 else 0, max=size)
    return spec
