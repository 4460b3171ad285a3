"""The sources of a server's options: the command line, then the environment, then a TOML file, then the defaults."""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from etfarm.server.state.database_url import BadDatabaseUrl, DatabaseUrl
from etfarm.wire.channel import Address
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.names import SETTING_PREFIX
from etfarm.wire.options import declaration_of
from etfarm.wire.private import require_secret

CONFIG: Final = "config"
"""The option that names the file."""

_MAX_FILE_BYTES: Final = 1 << 20
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
DEFAULT: Final = "default"
"""The source of a value that nothing sets."""
HIDDEN: Final = "…"
"""What is shown in place of a secret."""
_SECRET_NAME: Final = re.compile("secret|password|token|key")
_URL: Final = re.compile(r"\b([a-z][a-z0-9+.-]*)://([^/?#\s,]*)([^\s,]*)", re.IGNORECASE)
_PASSWORD: Final = re.compile(r"\b(\w*(?:secret|password|token|key)\w*)=\S+", re.IGNORECASE)


@dataclass(frozen=True)
class Setting:
    """The effective value of one option."""

    name: str
    """The option without its dashes, which is also its name in the file."""
    value: Any
    source: str
    """Where the value comes from: the option, the variable, the file with the line, or `default`."""

    @property
    def text(self) -> str:
        """The value for people."""
        return _text(self.value)

    @property
    def public_text(self) -> str:
        """The value for people, with `HIDDEN` for what may be a secret."""
        if _SECRET_NAME.search(self.name) and isinstance(self.value, str) and self.value:
            return HIDDEN
        return _PASSWORD.sub(rf"\1={HIDDEN}", _URL.sub(_without_secrets, self.text))

    @property
    def has_secret(self) -> bool:
        """Whether the value is or has a secret: a password, a token in a URL, or a webhook's URL."""
        return any(has_secret(self.name, value) for value in (self.value if isinstance(self.value, list) else [self.value]))


class _Unset(list[Any]):
    """The value of an option that the command line does not have; a list, since repeatable options append to it."""


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    environment: Mapping[str, str],
    server: argparse.ArgumentParser | None = None,
) -> tuple[argparse.Namespace, list[Setting]]:
    """Return the parsed options, and each one's value with its source.

    Args:
        server: the server's own parser, for a command that has only some of its options: the file and the environment may set
            all of them, and no option of the command alone.

    Raises:
        BAD_SETTING: the file cannot be read; or it or the environment has an unknown option, or a value that is not valid.
    """
    actions = _by_name(parser)
    known = _by_name(server or parser)
    namespace = argparse.Namespace(**{action.dest: _Unset() for action in actions.values()})
    parser.parse_args(argv, namespace)
    config = getattr(namespace, CONFIG)
    if isinstance(config, _Unset):
        text = environment.get(variable_of(CONFIG))
        config = Path(text) if text else None
        setattr(namespace, CONFIG, config)
    in_file = dict(_read_file(config, known)) if config is not None else {}
    in_environment = dict(_read_environment(environment, known))
    settings = []
    for name, action in actions.items():
        value, source = getattr(namespace, action.dest), f"--{name}"
        if isinstance(value, _Unset):
            if value:
                value = list(value)
            elif name in in_environment:
                value, source = in_environment[name]
            elif name in in_file:
                value, source = in_file[name]
            else:
                value, source = action.default, DEFAULT
        setattr(namespace, action.dest, value)
        if name != CONFIG and not is_only_on_line(action):
            settings.append(Setting(name, value, source))
    return namespace, settings


def has_secret(name: str, value: object) -> bool:
    """Return whether a value of an option is or has a secret.

    Args:
        name: the option without its dashes.
        value: as parsed, or as text.
    """
    if name == "database" and isinstance(value, str):
        try:
            value = DatabaseUrl.parse(value)
        except BadDatabaseUrl:
            return True  # it cannot be told
    if isinstance(value, DatabaseUrl):
        return value.has_password
    if not isinstance(value, str):
        return False
    return name == "webhook" or any(map(_url_has_secret, re.split(r"[\s,]+", value)))


def _url_has_secret(text: str) -> bool:
    try:
        url = urlsplit(text)
    except ValueError:
        return True
    return "@" in url.netloc or any(_SECRET_NAME.search(key.lower()) for key, _ in parse_qsl(url.query))


def variable_of(name: str) -> str:
    """Return the environment's variable of an option, which is named without its dashes."""
    return SETTING_PREFIX + name.upper().replace("-", "_")


def option_of(variable: str) -> str:
    """Return the option that a variable of the environment sets, without its dashes; others are returned in lower case."""
    return variable.removeprefix(SETTING_PREFIX).lower().replace("_", "-")


def _by_name(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options by name, without those that end the command; arguments without dashes are none."""
    actions = {_name(action): action for action in parser._actions if action.option_strings}
    del actions["help"]
    return actions


def _name(action: argparse.Action) -> str:
    return next(option for option in action.option_strings if option.startswith("--")).removeprefix("--")


def _read_file(path: Path, actions: Mapping[str, argparse.Action]) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield (name, (value, source)) of each option in the file. Relative paths start at the file's folder."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
            text = data.decode()
            if len(data) > _MAX_FILE_BYTES:
                raise error_for(
                    "BAD_SETTING", f"The configuration file {path} has more than {_MAX_FILE_BYTES >> 20} MiB.", "Check --config."
                )
            table = tomllib.loads(text)
            if any(has_secret(name, each) for name, value in table.items() for each in _values_of(value)):
                require_secret(file.fileno(), path, partial(error_for, "BAD_SETTING", path=path), of_any_owner=True)
    except OSError as error:
        what = f"The configuration file {path} cannot be read: {error.strerror}."
        raise error_for("BAD_SETTING", what, "Check --config.", path=path) from None
    except UnicodeDecodeError:
        raise error_for(
            "BAD_SETTING", f"The configuration file {path} is not UTF-8 text.", "Check --config.", path=path
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise error_for(
            "BAD_SETTING", f"The configuration file {path} is not valid TOML: {error}.", "Correct it.", path=path
        ) from None
    for name, value in table.items():
        line = _line_of(text, name)
        source = f"{path.name}, line {line}" if line else path.name
        where = f"{path}, line {line}" if line else str(path)
        if name not in actions or is_only_on_line(actions[name]):
            raise _unknown(where, name, _settable(actions))
        yield name, (_convert(actions[name], value, where, path.parent.absolute()), source)


def _values_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


def _line_of(text: str, name: str) -> int:
    """Return the number of the line that sets a key, or opens its table; 0 if it is written in another way."""
    pattern = re.compile(rf"""\s*\[?\s*["']?{re.escape(name)}["']?\s*[\].=]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 0)


def _read_environment(
    environment: Mapping[str, str], actions: Mapping[str, argparse.Action]
) -> Iterator[tuple[str, tuple[Any, str]]]:
    variables = {variable_of(name): name for name in (*_settable(actions), CONFIG)}
    for variable, text in environment.items():
        if not variable.startswith(SETTING_PREFIX):
            continue
        if variable not in variables:
            raise _unknown("The environment", variable, list(variables))
        if (name := variables[variable]) != CONFIG:
            is_list = _is_repeatable(actions[name])
            value = [item for item in text.split(",") if item] if is_list else text
            yield name, (_convert(actions[name], value, variable, None), variable)


def settable(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options that a file or the environment may set, by name."""
    return {name: action for name, action in _by_name(parser).items() if not is_only_on_line(action)}


def is_only_on_line(action: argparse.Action) -> bool:
    """Return whether neither a file nor the environment may set an option (`Option.only_on_line`)."""
    declared = declaration_of(action)
    return declared is not None and declared.only_on_line


def _settable(actions: Mapping[str, argparse.Action]) -> list[str]:
    return sorted(name for name, action in actions.items() if not is_only_on_line(action))


def _unknown(where: str, name: str, known: Sequence[str]) -> EtfarmError:
    near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.5)
    remedy = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
    return error_for("BAD_SETTING", f"{where}: there is no setting {name[:100]!r}.", remedy, setting=name[:100])


def _is_repeatable(action: argparse.Action) -> bool:
    return isinstance(action.default, list)


def _convert(action: argparse.Action, value: Any, where: str, folder: Path | None) -> Any:
    """Return a value as the command line would have it.

    Args:
        folder: base of relative paths; None for the working folder.

    Raises:
        BAD_SETTING: the value is not valid for the option.
    """
    name, shown = _name(action), _show(action, value)
    if _is_repeatable(action):
        # NAME=N options may be a table.
        items = [f"{key}={item}" for key, item in value.items()] if isinstance(value, dict) else value
        if not isinstance(items, list):
            raise error_for("BAD_SETTING", f"{where}: {name!r} must be a list{shown}", "Write it in brackets.", setting=name)
        return [_convert_one(action, name, item, where, folder) for item in items]
    if action.nargs == 0:
        word = str(value).lower() if isinstance(value, (bool, str)) else ""
        if word not in _TRUE | _FALSE:
            raise error_for("BAD_SETTING", f"{where}: {name!r} must be true or false{shown}", "Correct the value.", setting=name)
        return word in _TRUE
    return _convert_one(action, name, value, where, folder)


def _show(action: argparse.Action, value: Any) -> str:
    """Return the end of a sentence about an option's value, with the value if it cannot be a secret."""
    declared = declaration_of(action)
    return "." if declared is not None and declared.is_secret else f", got {value!r}."


def _convert_one(action: argparse.Action, name: str, value: Any, where: str, folder: Path | None) -> Any:
    shown = _show(action, value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        what = f"{where}: {name!r} must be a text or a number" + shown
        raise error_for("BAD_SETTING", what, "Correct the value.", setting=name)
    try:
        convert = action.type if callable(action.type) else str
        converted = convert(str(value))
    except (argparse.ArgumentTypeError, TypeError, ValueError, EtfarmError) as error:
        why = str(error) if isinstance(error, argparse.ArgumentTypeError) else "is not valid"
        what = f"{where}: {name!r} {why}" + shown
        raise error_for("BAD_SETTING", what, "Correct the value; `etfarm serve --help` explains it.", setting=name) from None
    if action.choices is not None and converted not in action.choices:
        names = ", ".join(map(str, action.choices))
        raise error_for("BAD_SETTING", f"{where}: {name!r} must be one of {names}{shown}", "Correct the value.", setting=name)
    return folder / converted if folder is not None and isinstance(converted, Path) else converted


def plain(value: Any) -> Any:
    """Return an option's value for JSON."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Address):
        return value.text
    return str(value) if isinstance(value, (Path, DatabaseUrl)) else value


def _text(value: Any) -> str:
    value = plain(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _without_secrets(url: re.Match[str]) -> str:
    """Return a URL's scheme, host and port. Its user and path may be secrets, as a webhook's are."""
    scheme, authority, rest = url.groups()
    return f"{scheme}://{authority.rpartition('@')[2]}{f'/{HIDDEN}' if rest.strip('/') else ''}"
