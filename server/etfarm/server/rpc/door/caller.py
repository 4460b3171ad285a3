"""The caller of the current rpc: its role, the projects that it sees, and the project of what it creates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import replace

from etfarm.server.access import ownership
from etfarm.server.access.projects import project_not_found, require_active
from etfarm.server.access.scope import DEFAULT_PROJECT, EVERYTHING, Scope
from etfarm.server.access.tokens import Credential
from etfarm.server.rpc.door.roles import ADMIN, AGENT, ENROLL, ROLES
from etfarm.v1 import common_pb2
from etfarm.v1.common_pb2 import Principal
from etfarm.wire.errors import error_for

_principal: ContextVar[Principal] = ContextVar("principal")
_names_project: ContextVar[bool] = ContextVar("names_project", default=False)


Resolve = Callable[[Principal, str], Principal]
"""Function that takes a principal and the call's `etfarm-project` metadata (or ""), and returns the principal with `projects` and
`project`."""


def resolve_default(principal: Principal, requested: str) -> Principal:
    """Return the principal as a member of the project `default` only; see Principal.projects.

    Raises:
        PROJECT_NOT_FOUND: another project is requested, and the caller is not an admin.
    """
    if principal.role == AGENT:
        return principal
    if principal.role == ADMIN:
        return with_projects(principal, (), requested or DEFAULT_PROJECT)
    if requested not in ("", DEFAULT_PROJECT):
        raise project_not_found(requested)
    return with_projects(principal, (DEFAULT_PROJECT,), DEFAULT_PROJECT)


def with_projects(principal: Principal, projects: Iterable[str], project: str) -> Principal:
    """Return a copy of `principal` that sees `projects`, and whose new jobs, artifacts and tags belong to `project`."""
    member = Principal()
    member.CopyFrom(principal)
    member.projects[:] = sorted(projects)
    member.project = project
    return member


_credential: ContextVar[Credential] = ContextVar("credential")


def enter(credential: Credential, principal: Principal, method: str, *, names_project: bool = False) -> None:
    """Authorize a caller for a method, and store it for `caller`, `scope` and `credential`.

    Args:
        names_project: whether the call names the project.

    Raises:
        PERMISSION_DENIED: as `authorize`; or an enrolment token is used for a method other than Enroll.
    """
    if credential.enrolment and method != ENROLL:
        raise error_for(
            "PERMISSION_DENIED",
            f"The token of {principal.name} is for one enrolment of an agent and nothing else.",
            "Start `etfarm agent` with it, which exchanges it for a token of its own.",
            rpc=method.rpartition(".")[2].replace("/", "."), role="enrolment",
        )  # fmt: skip
    authorize(principal, method)
    _credential.set(credential)
    _names_project.set(names_project)


def names_project() -> bool:
    """Return whether the current rpc names a project; otherwise the caller's only one, or `default`, is that of the call."""
    return _names_project.get()


def credential() -> Credential:
    """Return the credential with which the current rpc's caller authenticated."""
    return _credential.get()


def authorize(principal: Principal, method: str) -> None:
    """Authorize a principal for a method, and store it for `caller`.

    Raises:
        PERMISSION_DENIED: the role is not in the method's row of the access table, or there is no row.
    """
    allowed = ROLES.get(method, frozenset())
    if principal.role not in allowed:
        role, needed = _role_name(principal.role), " or ".join(map(_role_name, sorted(allowed)))
        raise error_for(
            "PERMISSION_DENIED",
            f"{principal.name} is {role}, and {f'this needs the role {needed}' if needed else 'no role may do this'}.",
            "Ask an admin of the farm for a token with another role.",
            rpc=method.rpartition(".")[2].replace("/", "."), role=role,
        )  # fmt: skip
    _principal.set(principal)


def _role_name(role: common_pb2.Role.ValueType) -> str:
    return common_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def caller() -> Principal:
    """Return the caller of the current rpc."""
    return _principal.get()


def scope() -> Scope:
    """Return the projects whose jobs, artifacts, tags and reports the caller sees: all for an admin, none for an agent."""
    principal = caller()
    seen = EVERYTHING if principal.role == ADMIN else Scope(frozenset(principal.projects))
    return replace(seen, active=principal.project)


def active_project() -> str:
    """Return the project that owns what the call creates.

    Raises:
        PROJECT_AMBIGUOUS: the caller has to choose one of several projects.
    """
    return require_active(caller())


def require_owner(owner: str, what: str, remedy: str = "Ask the owner or an admin.") -> None:
    """Require that the caller is the owner or an admin.

    Args:
        what: names the resource in the error.

    Raises:
        NotYours: the caller is neither the owner nor an admin.
    """
    principal = caller()
    ownership.require_owner(owner, what, principal.name, is_admin=principal.role == ADMIN, remedy=remedy)
