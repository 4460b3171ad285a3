"""What children see of the host is planned from the paths of the code, with the secrets that lie among them left out."""

from __future__ import annotations

import sys
from pathlib import Path

from etfarm.server.workers.jail.file_view import Action, code_paths, plan


def planned(shared: list[Path], hidden: list[Path], below: Path) -> dict[str, str]:
    """Return what is done for the paths below a folder, by relative path."""
    return {
        str(step.path.relative_to(below)): step.action.value for step in plan(shared, hidden) if step.path.is_relative_to(below)
    }


def folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_the_code_of_this_python_is_shown() -> None:
    result = code_paths()
    for wanted in (sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[5] / "server")):
        assert any(Path(wanted).resolve().is_relative_to(path) for path in result), wanted
    assert Path("/") not in result


def test_a_secret_within_the_code_is_hidden_and_code_within_that_is_shown(tmp_path: Path) -> None:
    code = folder(tmp_path / "code")
    data, venv = folder(code / "data"), folder(code / "data" / "venv")
    (code / "tokens").write_text("s3cret")
    assert planned([code, venv], [data, code / "tokens"], tmp_path) == {
        "code": "show", "code/data": "hide", "code/tokens": "hide", "code/data/venv": "show",
    }  # fmt: skip


def test_a_closed_folder_around_a_secret_is_hidden_with_it(tmp_path: Path) -> None:
    code, other = folder(tmp_path / "code"), folder(tmp_path / "own")
    data = folder(code / "closed" / "inner" / "data")
    (code / "closed").chmod(0o700)
    other.chmod(0o700)  # shown, thus not hidden with what is in it
    assert planned([code, other], [data, folder(other / "data")], tmp_path) == {
        "code": "show", "code/closed": "hide", "own": "show", "own/data": "hide",
    }  # fmt: skip
    (code / "closed").chmod(0o711)
    assert planned([code], [data], tmp_path) == {"code": "show", "code/closed/inner/data": "hide"}


def test_a_secret_within_code_below_a_closed_folder_is_hidden(tmp_path: Path) -> None:
    home, venv = folder(tmp_path / "home"), folder(tmp_path / "home" / "closed" / "venv")
    (home / "closed").chmod(0o700)
    (venv / "tokens").write_text("s3cret")
    assert planned([home, venv], [venv / "tokens"], tmp_path) == {
        "home": "show", "home/closed": "hide", "home/closed/venv": "show", "home/closed/venv/tokens": "hide",
    }  # fmt: skip


def test_what_is_shown_nowhere_needs_no_hiding_and_inner_paths_no_mount_of_their_own(tmp_path: Path) -> None:
    outer, inner, data = folder(tmp_path / "lib"), folder(tmp_path / "lib" / "python"), folder(tmp_path / "data")
    assert planned([inner, outer], [data], tmp_path) == {"lib": "show"}


def test_a_link_is_shown_with_what_it_leads_to(tmp_path: Path) -> None:
    real = folder(tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    assert planned([tmp_path / "link"], [], tmp_path) == {"link": "show", "real": "show"}


def test_roots_links_to_its_system_folders_stay_links() -> None:
    links = {step.path: step.target for step in plan([], []) if step.action is Action.LINK}
    assert all(path.is_symlink() and Path("/", target) == path.resolve() for path, target in links.items())
