"""The sources of a server's options: which one wins, and that a mistake is named with its place."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from etfarm.server.arguments import config_of, parser
from etfarm.server.operation.settings import DEFAULT, HIDDEN, Setting, parse
from tests.support.refusals import refuses


def write(folder: Path, text: str) -> str:
    path = folder / "farm.toml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_the_command_line_wins_then_the_environment_then_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "workers = 2\nthreads = 3\nmemory-gib = 4\n\n# a comment\ncpu-limit = 90\n")
    variables = {"ETFARM_SERVE_WORKERS": "5", "ETFARM_SERVE_THREADS": "6", "PATH": "/bin"}
    arguments, settings = parse(parser(), ["--config", file, "--workers", "7"], variables)
    config = config_of(arguments)
    assert (config.workers, config.threads, config.memory_bytes, config.cpu_s) == (7, 6, 4 << 30, 90)
    sources = {each.name: each.source for each in settings}
    assert [sources[name] for name in ("workers", "threads", "memory-gib", "cpu-limit", "patience")] == [
        "--workers", "ETFARM_SERVE_THREADS", "farm.toml, line 3", "farm.toml, line 6", DEFAULT,
    ]  # fmt: skip


def test_an_option_that_is_given_its_default_is_from_the_command_line(tmp_path: Path) -> None:
    file = write(tmp_path, "workers = 2\n")
    arguments, settings = parse(parser(), ["--config", file, "--workers", "1"], {})
    assert arguments.workers == 1
    assert next(each.source for each in settings if each.name == "workers") == "--workers"


def test_without_any_source_the_configuration_is_that_of_the_parser() -> None:
    plain = parser().parse_args([])
    arguments, settings = parse(parser(), [], {})
    assert vars(arguments) == vars(plain)
    assert {each.source for each in settings} == {DEFAULT}


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    arguments, _ = parse(parser(), [], {"ETFARM_SERVE_CONFIG": write(tmp_path, "workers = 2\n")})
    assert arguments.workers == 2


def test_relative_paths_of_a_file_start_at_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path, 'data = "data"\ntls-cert = "/etc/cert.pem"\njail-readable = ["models", "/srv"]\n')
    arguments, _ = parse(parser(), ["--config", file], {"ETFARM_SERVE_TOKENS": "tokens"})
    assert (arguments.data, arguments.tls_cert) == (tmp_path / "data", Path("/etc/cert.pem"))
    assert arguments.jail_readable == [tmp_path / "models", Path("/srv")]
    assert arguments.tokens == Path("tokens")


def test_quotas_may_be_a_table_and_a_higher_source_replaces_a_list(tmp_path: Path) -> None:
    file = write(tmp_path, "no-bundle = true\nrequire-jail = false\n[quota]\nlive_jobs_per_user = 7\nsessions_per_user = 8\n")
    arguments, _ = parse(parser(), ["--config", file], {})
    config = config_of(arguments)
    assert (config.quotas.live_jobs_per_user, config.quotas.sessions_per_user) == (7, 8)
    assert (config.build_bundle, config.require_jail) == (False, False)
    arguments, _ = parse(parser(), ["--config", file, "--quota", "live_jobs_per_user=9"], {"ETFARM_SERVE_NO_BUNDLE": "off"})
    config = config_of(arguments)
    assert (config.quotas.live_jobs_per_user, config.quotas.sessions_per_user) == (9, 1_000)
    assert config.build_bundle
    arguments, _ = parse(parser(), [], {"ETFARM_SERVE_QUOTA": "live_jobs_per_user=3,sessions_per_user=4"})
    assert arguments.quota == ["live_jobs_per_user=3", "sessions_per_user=4"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('data = "x"\n\nlistn = "a:1"', "farm.toml, line 3: there is no setting 'listn'. Did you mean 'listen'?"),
        ("tls_cert = 'x'", "farm.toml, line 1: there is no setting 'tls_cert'. Did you mean 'tls-cert'?"),
        ("check = true", "there is no setting 'check'."),
        ("workers = 0", "farm.toml, line 1: 'workers' must be 1 or more, got 0."),
        ("workers = true", "'workers' must be a text or a number, got True."),
        ("compile-timeout = nan", "'compile-timeout' must be above 0 s and at most a week, got nan."),
        ("drain-timeout = -1", "'drain-timeout' must be 0 s to a day, got -1."),
        ("insecure = 'perhaps'", "'insecure' must be true or false, got 'perhaps'."),
        ("log-format = 'xml'", "'log-format' must be one of text, json, got 'xml'."),
        ("compile-pool = 'here:1'", "'compile-pool' must be local or ray://HOST:PORT, got 'here:1'."),
        ("metrics = 'here'", "'metrics' is not valid, got 'here'."),
        ("jail-readable = '/srv'", "'jail-readable' must be a list, got '/srv'."),
        ("workers = ", "is not valid TOML"),
        ('"workers" = [1]', "farm.toml, line 1: 'workers' must be a text or a number, got [1]."),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    with refuses("BAD_SETTING") as refused:
        parse(parser(), ["--config", write(tmp_path, text)], {})
    assert expected in str(refused.value)


def test_unusable_files_and_variables_are_refused(tmp_path: Path) -> None:
    with refuses("BAD_SETTING", match="cannot be read: No such file"):
        parse(parser(), ["--config", str(tmp_path / "none.toml")], {})
    (tmp_path / "latin.toml").write_bytes(b'data = "\xe4"\n')
    with refuses("BAD_SETTING", match="is not UTF-8"):
        parse(parser(), ["--config", str(tmp_path / "latin.toml")], {})
    (tmp_path / "huge.toml").write_bytes(b"#" * ((1 << 20) + 1))
    with refuses("BAD_SETTING", match="more than 1 MiB"):
        parse(parser(), ["--config", str(tmp_path / "huge.toml")], {})
    with refuses("BAD_SETTING", match="Did you mean 'ETFARM_SERVE_WORKERS'"):
        parse(parser(), [], {"ETFARM_SERVE_WORKER": "2"})
    with refuses("BAD_SETTING", match="ETFARM_SERVE_WORKERS: 'workers' is not valid, got 'two'"):
        parse(parser(), [], {"ETFARM_SERVE_WORKERS": "two"})


def test_every_option_can_be_set_in_a_file(tmp_path: Path) -> None:
    """An option of a new kind would otherwise be refused only by its first user."""
    address = "127.0.0.1:0"
    addresses = dict.fromkeys(("listen", "advertise", "metrics", "web"), address)
    values = {**addresses, "otlp": "http://127.0.0.1:1", "log-format": "json"}
    values |= {
        "database": "postgresql://ann@db/etfarm",
        "compile-pool": "ray://127.0.0.1:1",
        "compile-python": "/opt/etfarm/bin/python",
    }
    lines = []
    for action in parser()._actions:
        name = next(o for o in action.option_strings if o.startswith("--")).removeprefix("--")
        if name in ("help", "config", "check", "json", "print-unit", "exit-with-stdin", "begin-empty"):
            continue
        if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
            lines.append(f"{name} = true")
        elif isinstance(action.default, list):
            lines.append(f'{name} = ["x"]')
        elif name in values or action.type is Path:
            lines.append(f'{name} = "{values.get(name, "x")}"')
        else:
            lines.append(f"{name} = 3")
    _, settings = parse(parser(), ["--config", write(tmp_path, "\n".join(lines))], {})
    assert all(each.source.startswith("farm.toml, line ") for each in settings), settings


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("webhook", ["https://hooks.example/services/T0/B0/secret", "http://ci:hunter2@ci.example:8080"],
         f"https://hooks.example/{HIDDEN}, http://ci.example:8080"),
        ("otlp", "https://collector.example:4318/v1?token=hunter2", f"https://collector.example:4318/{HIDDEN}"),
        ("database", "postgresql://farm:hunter2@db.example/farm", f"postgresql://db.example/{HIDDEN}"),
        ("database", "host=db.example password=hunter2 user=farm", f"host=db.example password={HIDDEN} user=farm"),
        ("s3-secret-key", "hunter2", HIDDEN),
        ("tokens", Path("/etc/etfarm/tokens"), "/etc/etfarm/tokens"),
        ("tls-key", Path("/etc/etfarm/key.pem"), "/etc/etfarm/key.pem"),
        ("insecure", False, "no"), ("workers", 2, "2"), ("metrics", None, "-"), ("keep", ["jobs=90d"], "jobs=90d"),
    ],
)  # fmt: skip
def test_what_may_be_a_secret_is_not_public(name: str, value: object, shown: str) -> None:
    assert Setting(name, value, DEFAULT).public_text == shown


@pytest.mark.parametrize("value", ['"https://hooks.example/SECRET"', '[["https://hooks.example/SECRET"]]'])
def test_a_webhook_in_a_wrong_form_is_not_shown(tmp_path: Path, value: str) -> None:
    with refuses("BAD_SETTING", match="webhook") as refused:
        parse(parser(), ["--config", write(tmp_path, f"webhook = {value}\n")], {})
    assert "SECRET" not in str(refused.value)
