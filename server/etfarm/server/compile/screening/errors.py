"""Errors of uploaded bytes, each with a reason, a message and a remedy. Standard library only."""

from __future__ import annotations

from typing import Final

from etfarm.server.compile.alternatives import use_instead
from etfarm.wire.errors import EtfarmError, Kind, UserError, error_for


class NotAPt2(UserError):
    """The bytes are not an exported program."""

    reason = "NOT_A_PT2"

    def __init__(self, why: str, remedy: str = 'Write one with torch.export.save(program, "model.pt2").') -> None:
        super().__init__(f"The model is not a valid .pt2: {why}.", remedy, why=why)


def pt2_of_another_torch(written: str, ours: str, why: str) -> EtfarmError:
    """Return the error that the exported program is from a version of torch whose programs the server's torch cannot read.

    Args:
        written: the version that the file states; empty if it states no valid version.
        ours: the server's version.
    """
    writer = f"torch {written}" if written else "another torch"
    return error_for(
        "PT2_OF_ANOTHER_TORCH",
        f"The .pt2 was written by {writer}, and this farm's torch {ours} cannot read it: {why}.",
        f"Export it with torch {ours}.",
        written=written, ours=ours, why=why,
    )  # fmt: skip


def not_a_pte(why: str) -> EtfarmError:
    """Return the error that the bytes are not an ExecuTorch program that this version can read."""
    return error_for("NOT_A_PTE", f"The program is not a valid .pte: {why}.", "Export it again with ExecuTorch 1.x.", why=why)


class TruncatedProgram(UserError):
    """A .pte is truncated."""

    reason = "TRUNCATED_PROGRAM"

    def __init__(self, needed_bytes: int, size_bytes: int) -> None:
        super().__init__(
            f"The program has {size_bytes} bytes, but its header says {needed_bytes}.",
            "Copy or export it again.",
            needed_bytes=needed_bytes,
            size_bytes=size_bytes,
        )


class UnsafeModel(UserError):
    """Loading the model could execute code that it contains.

    Args:
        vector: the kind of attack as an UPPER_SNAKE word.
        where: the archive's member.
        what: the rest of the message that begins with `where`.
    """

    reason = "UNSAFE_MODEL"
    kind = Kind.PERMISSION_DENIED

    def __init__(self, vector: str, where: str, what: str, remedy: str = "") -> None:
        super().__init__(
            f"The model was refused before it was loaded: {where} {what}.",
            remedy or "Export plain tensors and operators with torch.export.save of the server's torch.",
            vector=vector, where=where, what=what,
        )  # fmt: skip


_INSTEAD: Final = (
    ("sparse", "ExecuTorch has no sparse tensors: compute with dense ones."),
    (
        "embedding_renorm",
        "Leave out max_norm, and limit the norms of the rows once, before the export: "
        "weight.data = torch.renorm(weight.data, norm_type, 0, max_norm).",
    ),
    ("_foreach_", "Write a loop over the tensors, such as x + y for each pair, instead of torch._foreach operators."),
)
"""Remedies by a part of the name of an operator that a model has without a call of its own, or that takes other tensors."""


def _describe_result(name: str, overload: str) -> str:
    """Return the remedy for an operator that writes its result to a tensor that is given as `out`; empty for others."""
    if overload != "out" and not overload.endswith("_out"):
        return ""
    call = f"torch.{name.replace('linalg_', 'linalg.')}"
    return f"Write t = {call}(...) for {call}(..., out=t), or t.copy_({call}(...)) if t is a buffer or a part of a tensor."


class OperatorNotAllowed(UnsafeModel):
    """The model uses an operator of torch or ExecuTorch that is not on the server's list, and may do more than compute.

    Args:
        where: the line of the user's code, or the archive's member if that is unknown.
        namespace: the operator's namespace.
        name: the operator's name within the namespace.
        overload: the operator's overload; empty for a higher-order operator.
    """

    def __init__(self, where: str, namespace: str, name: str, overload: str) -> None:
        listed = ".".join(filter(None, (namespace, name, overload)))
        result = _describe_result(name, overload)
        shown = f"{namespace}::{name}.{overload}" if result else f"{namespace}::{name}"
        super().__init__(
            "OPERATOR_NOT_ALLOWED", where, f"uses the operator {shown}, which is not on the server's list",
            next((remedy for part, remedy in _INSTEAD if part in name), "")
            or result
            or f"{use_instead(f'{namespace}::{name}')}. If it only computes, the server's owner can add the line {listed} to a "
            "file for `etfarm serve --allow-operators FILE`.",
        )  # fmt: skip
        self.metadata["operator"] = listed


def unknown_operator(operator: str) -> EtfarmError:
    """Return the error that the model uses an operator of a library that the server does not load."""
    return error_for(
        "UNKNOWN_OPERATOR",
        f"The model uses the operator {operator}, which this server does not know.",
        "Use operators of PyTorch, or give it a kernel that consists of them: lib.impl(name, function, "
        '"CompositeImplicitAutograd"). Then etfarm writes it with them when it exports a module, as '
        "program.run_decompositions() does with a program. The server's owner can install the operator's library as a "
        "plug-in with an entry point in etfarm.operators.",
        operator=operator,
    )
