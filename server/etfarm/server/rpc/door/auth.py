"""Who calls and what they may: tokens, principals, and one row for every rpc of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from etfarm.server.access import ownership
from etfarm.server.access.projects import ProjectNotFound, require_active
from etfarm.server.access.scope import DEFAULT_PROJECT, EVERYTHING, Scope
from etfarm.server.access.tokens import Credential, key_of
from etfarm.v1 import common_pb2
from etfarm.v1.common_pb2 import Principal, Role
from etfarm.wire.errors import Kind, UserError

ADMIN: Final = Role.ROLE_ADMIN
USER: Final = Role.ROLE_USER
AGENT: Final = Role.ROLE_AGENT
VIEWER: Final = Role.ROLE_VIEWER

_READERS: Final = frozenset({ADMIN, USER, VIEWER})
_USERS: Final = frozenset({ADMIN, USER})
_AGENTS: Final = frozenset({ADMIN, AGENT})
_MOVERS: Final = frozenset({ADMIN, USER, AGENT})
_ADMINS: Final = frozenset({ADMIN})
_ALL: Final = frozenset({ADMIN, USER, AGENT, VIEWER})

ROLES: Final[dict[str, frozenset[Role.ValueType]]] = {
    "/etfarm.v1.ArtifactService/FindMissing": _MOVERS,
    "/etfarm.v1.ArtifactService/GetUploadStatus": _MOVERS,
    "/etfarm.v1.ArtifactService/Upload": _MOVERS,
    "/etfarm.v1.ArtifactService/Download": _ALL,
    "/etfarm.v1.ArtifactService/List": _READERS,
    "/etfarm.v1.ArtifactService/Delete": _ADMINS,
    "/etfarm.v1.ArtifactService/Collect": _ADMINS,
    "/etfarm.v1.ArtifactService/Verify": _ADMINS,
    "/etfarm.v1.CompileService/ListRecipes": _READERS,
    "/etfarm.v1.CompileService/GetCompilation": _READERS,
    "/etfarm.v1.JobService/Submit": _USERS,
    "/etfarm.v1.JobService/Get": _READERS,
    "/etfarm.v1.JobService/List": _READERS,
    "/etfarm.v1.JobService/Watch": _READERS,
    "/etfarm.v1.JobService/Cancel": _USERS,
    "/etfarm.v1.JobService/Retry": _USERS,
    "/etfarm.v1.JobService/TailLog": _READERS,
    "/etfarm.v1.DeviceService/List": _READERS,
    "/etfarm.v1.DeviceService/Get": _READERS,
    "/etfarm.v1.DeviceService/Watch": _READERS,
    "/etfarm.v1.DeviceService/Reserve": _USERS,
    "/etfarm.v1.DeviceService/Renew": _USERS,
    "/etfarm.v1.DeviceService/Release": _USERS,
    "/etfarm.v1.DeviceService/Label": _ADMINS,
    "/etfarm.v1.DeviceService/Drain": _ADMINS,
    "/etfarm.v1.DeviceService/Forget": _ADMINS,
    "/etfarm.v1.DeviceService/Restrict": _ADMINS,
    "/etfarm.v1.SessionService/Open": _USERS,
    "/etfarm.v1.SessionService/Call": _USERS,
    "/etfarm.v1.AgentService/Connect": _AGENTS,
    "/etfarm.v1.AgentService/ServeSession": _AGENTS,
    "/etfarm.v1.AgentService/Enroll": _AGENTS,
    "/etfarm.v1.AgentService/ListAgents": _ADMINS,
    "/etfarm.v1.AgentService/BindAgent": _ADMINS,
    "/etfarm.v1.ReportService/Get": _READERS,
    "/etfarm.v1.ReportService/ListOperators": _READERS,
    "/etfarm.v1.ReportService/Compare": _READERS,
    "/etfarm.v1.ReportService/Tag": _USERS,
    "/etfarm.v1.ReportService/ListHistory": _READERS,
    "/etfarm.v1.ReportService/Analyze": _USERS,
    "/etfarm.v1.FarmService/GetServerInfo": _ALL,
    "/etfarm.v1.FarmService/ListBundles": _ALL,
    "/etfarm.v1.FarmService/AddBundle": _ADMINS,
    "/etfarm.v1.TokenService/Create": _ADMINS,
    "/etfarm.v1.TokenService/List": _ADMINS,
    "/etfarm.v1.TokenService/Revoke": _ADMINS,
    "/etfarm.v1.TokenService/Rotate": _ALL,
    "/etfarm.v1.ProjectService/Create": _ADMINS,
    "/etfarm.v1.ProjectService/List": _READERS,
    "/etfarm.v1.ProjectService/Update": _ADMINS,
    "/etfarm.v1.ProjectService/AddMember": _ADMINS,
    "/etfarm.v1.ProjectService/RemoveMember": _ADMINS,
    "/etfarm.v1.AuditService/List": _ADMINS,
    # A balancer's or a person's tools; they tell nothing of jobs or devices.
    "/grpc.health.v1.Health/Check": _ALL,
    "/grpc.health.v1.Health/List": _ALL,
    "/grpc.health.v1.Health/Watch": _ALL,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ALL,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _ALL,
}
"""Which roles may call what. A method without a row can be called by nobody."""

ENROLL: Final = "/etfarm.v1.AgentService/Enroll"
"""The only rpc that an enrolment token may call."""

LOCAL: Final = Principal(name="local", role=ADMIN)
"""Everybody on a server without a token file, which only this machine reaches."""

_principal: ContextVar[Principal] = ContextVar("principal")


class Unauthenticated(UserError):
    """No token, or one that nobody has."""

    reason = "UNAUTHENTICATED"
    kind = Kind.UNAUTHENTICATED


class PermissionDenied(UserError):
    """The caller's role may not."""

    reason = "PERMISSION_DENIED"
    kind = Kind.PERMISSION_DENIED


class BadTokenFile(UserError):
    """The token file cannot be used."""

    reason = "BAD_TOKEN_FILE"


@dataclass(frozen=True)
class Tokens:
    """Who has which token. Tokens are kept as hashes; `None` for a server that asks for none."""

    by_hash: dict[bytes, Principal] | None = None

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """The tokens of a file: a line each `NAME ROLE TOKEN`; `#` begins a comment.

        Raises:
            BadTokenFile: it cannot be read, others may read it, or a line is of another form.
        """
        try:
            mode, text = path.stat().st_mode, path.read_text()
        except OSError as error:
            raise BadTokenFile(f"The token file {path} cannot be read: {error.strerror}.", "Check --tokens.") from None
        except UnicodeDecodeError:
            raise BadTokenFile(f"The token file {path} is no UTF-8 text.", "Check --tokens.") from None
        if mode & 0o077:
            raise BadTokenFile(f"Others than its owner may read the token file {path}.", f"Run `chmod 600 {path}`.")
        by_hash: dict[bytes, Principal] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) != 3 or words[1].upper() not in ("ADMIN", "USER", "AGENT", "VIEWER") or len(words[2]) < 16:
                raise BadTokenFile(
                    f"Line {number} of {path} is not NAME ROLE TOKEN.",
                    "ROLE is admin, user, agent or viewer; TOKEN has 16 characters or more (try `openssl rand -hex 24`).",
                )
            if _hash(words[2]) in by_hash:
                raise BadTokenFile(f"Line {number} of {path} has a token of a line before.", "Give each its own.")
            by_hash[_hash(words[2])] = Principal(name=words[0], role=common_pb2.Role.Value(f"ROLE_{words[1].upper()}"))
        if not by_hash:
            raise BadTokenFile(f"The token file {path} has no token.", "Add a line NAME ROLE TOKEN.")
        return cls(by_hash)

    def principal(self, header: str | None) -> Principal:
        """Who sends an `authorization` header.

        Raises:
            Unauthenticated: nobody does.
        """
        if self.by_hash is None:
            return LOCAL
        principal = self.by_hash.get(sent_key(header))
        if principal is None:
            raise unknown_token()
        return principal

    def authenticate(self, header: str | None) -> Credential:
        """Return the credential of an `authorization` header.

        Raises:
            Unauthenticated: it has none.
        """
        key = b"" if self.by_hash is None else sent_key(header)
        principal = self.principal(header)
        return Credential(key, f"file:{principal.name}" if key else "", principal)

    def is_valid(self, credential: Credential) -> bool:
        """Return whether the credential still stands for the same principal."""
        if self.by_hash is None:
            return credential.key == b""
        return self.by_hash.get(credential.key) == credential.principal


def sent_key(header: str | None) -> bytes:
    """Return the key of an `authorization` header's token. Tokens are looked up by hash, so timing reveals nothing about them.

    Raises:
        Unauthenticated: there is no bearer token.
    """
    if header is None or not header.startswith("Bearer "):
        raise Unauthenticated("This server asks for a token and none came.", "Set ETFARM_TOKEN.")
    return key_of(header.removeprefix("Bearer ").strip())


def unknown_token() -> Unauthenticated:
    """Return the error for an unknown token."""
    return Unauthenticated("The server does not know this token.", "Check ETFARM_TOKEN with the farm's admin.")


def _hash(token: str) -> bytes:
    return key_of(token)


Resolve = Callable[[Principal, str], Principal]
"""Takes a principal and the call's `etfarm-project` metadata (or ""); returns the principal with `projects` and `project`."""


def resolve_default(principal: Principal, requested: str) -> Principal:
    """Return the principal as a member of the project `default` only; see Principal.projects.

    Raises:
        ProjectNotFound: another project is requested, and the caller is not an admin.
    """
    if principal.role == AGENT:
        return principal
    if principal.role == ADMIN:
        return with_projects(principal, (), requested or DEFAULT_PROJECT)
    if requested not in ("", DEFAULT_PROJECT):
        raise ProjectNotFound(requested)
    return with_projects(principal, (DEFAULT_PROJECT,), DEFAULT_PROJECT)


def with_projects(principal: Principal, projects: Iterable[str], project: str) -> Principal:
    """Return a copy of `principal` that sees `projects` and whose new jobs, artifacts and tags belong to `project`."""
    member = Principal()
    member.CopyFrom(principal)
    member.projects[:] = sorted(projects)
    member.project = project
    return member


_credential: ContextVar[Credential] = ContextVar("credential")


def enter(credential: Credential, principal: Principal, method: str) -> None:
    """Authorize a caller for a method, and store it for `caller`, `scope` and `credential`.

    Raises:
        PermissionDenied: as `authorize`, or an enrolment token is used for another method than Enroll.
    """
    if credential.enrolment and method != ENROLL:
        raise PermissionDenied(
            f"The token of {principal.name} is for one enrolment of an agent and nothing else.",
            "Start `etfarm agent` with it, which exchanges it for a token of its own.",
            rpc=method.rpartition(".")[2].replace("/", "."), role="enrolment",
        )  # fmt: skip
    authorize(principal, method)
    _credential.set(credential)


def credential() -> Credential:
    """Return the credential with which the current rpc's caller authenticated."""
    return _credential.get()


def authorize(principal: Principal, method: str) -> None:
    """Lets a principal through to a method, and remembers it for `caller`.

    Raises:
        PermissionDenied: the role has no place in the method's row, or there is no row.
    """
    if principal.role not in ROLES.get(method, frozenset()):
        role = common_pb2.Role.Name(principal.role).removeprefix("ROLE_").lower()
        rpc = method.rpartition(".")[2].replace("/", ".")
        raise PermissionDenied(f"{principal.name} is {role} and may not call {rpc}.", "Ask the farm's admin.", rpc=rpc, role=role)
    _principal.set(principal)


def caller() -> Principal:
    """Who calls the rpc that is being answered."""
    return _principal.get()


def scope() -> Scope:
    """Return the projects whose jobs, artifacts, tags and reports the caller sees: all for an admin, none for an agent."""
    principal = caller()
    seen = EVERYTHING if principal.role == ADMIN else Scope(frozenset(principal.projects))
    return replace(seen, active=principal.project)


def active_project() -> str:
    """Return the project that owns what the call creates.

    Raises:
        ProjectAmbiguous: the caller has to choose one of several.
    """
    return require_active(caller())


def require_owner(owner: str, what: str, remedy: str = "Ask them or an admin.") -> None:
    """Require that the caller of the rpc is the owner or an admin.

    Raises:
        NotYours: the caller is neither.
    """
    principal = caller()
    ownership.require_owner(owner, what, principal.name, is_admin=principal.role == ADMIN, remedy=remedy)
