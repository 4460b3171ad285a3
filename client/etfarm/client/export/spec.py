"""The kind of model that a MODEL argument names, with checks of its file. Stdlib only.

The checks of .pt2 and .pte are early and cheap, but not sufficient: the server screens an archive and the device loads a
program. With them, a user learns of a wrong or truncated file before anything is sent.
"""

from __future__ import annotations

import difflib
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.client.export.errors import (
    FORMS,
    BadModelArgument,
    truncated_program,
    unknown_demo,
)
from etfarm.client.export.huggingface_folder import parse_options, read_folder
from etfarm.wire import pte
from etfarm.wire.errors import error_for

DEMOS: Final = ("resnet8", "ds_cnn", "mobilenet_v1_025")
"""The demos' names, as in `demo:NAME`."""

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")


@dataclass(frozen=True)
class Pt2File:
    """An archive of torch.export.save.

    `path` exists and looks like one.
    """

    path: Path

    @property
    def label(self) -> str:
        """Default name of the model: the file's stem."""
        return self.path.stem


@dataclass(frozen=True)
class PteFile:
    """An ExecuTorch program.

    `path` exists and its header is valid.
    """

    path: Path

    @property
    def label(self) -> str:
        """Default name of the model: the file's stem."""
        return self.path.stem


@dataclass(frozen=True)
class FileFactory:
    """The function `name` of the Python file `path`, which exists."""

    path: Path
    name: str
    keep_mutations: bool = False
    """See `ModelSource.keep_mutations`."""

    @property
    def label(self) -> str:
        """Default name of the model: `file:function`."""
        return f"{self.path.stem}:{self.name}"


@dataclass(frozen=True)
class ModuleFactory:
    """The function `name` of the importable module `module`, which has not been searched yet."""

    module: str
    name: str
    keep_mutations: bool = False
    """See `ModelSource.keep_mutations`."""

    @property
    def label(self) -> str:
        """Default name of the model: `module:function`."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class Demo:
    """One of `DEMOS`."""

    name: str

    @property
    def label(self) -> str:
        """Default name of the model: the demo's name."""
        return self.name


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A local folder of transformers with a config.json, and options for the model."""

    path: Path
    options: tuple[tuple[str, str | int], ...] = ()
    """Arguments of `ModelSource.huggingface`."""
    is_random: bool = False
    """Whether the folder has no checkpoint, so that the weights are random."""

    @property
    def label(self) -> str:
        """Default name of the model: the folder's name with the options, and `random` for random weights."""
        text = ",".join(f"{name}={value}" for name, value in self.options if name != "max_parameters")
        return ":".join(filter(None, (self.path.resolve().name, text, "random" if self.is_random else "")))


ModelSpec = Pt2File | PteFile | FileFactory | ModuleFactory | HuggingFaceFolder | Demo
EagerSpec = FileFactory | ModuleFactory | HuggingFaceFolder | Demo
"""The kinds that need torch on the client."""


def resolve(text: str) -> ModelSpec:
    """Return the kind of model that `text`, a MODEL argument, names.

    Relative paths are relative to the working folder.

    Raises:
        BadModelArgument: it has none of the six forms.
        MODEL_NOT_FOUND: its file does not exist.
        UNKNOWN_DEMO: no demo has the name.
        BadCheckpoint: the configuration or the weights of a folder cannot be used.
        NOT_A_PT2, NOT_A_PTE, TruncatedProgram: the file does not have the format of its suffix.
    """
    if text.startswith("demo:"):
        return Demo(_known_demo(text.removeprefix("demo:")))
    if text.startswith("hf:"):
        return _folder(text)
    suffix = Path(text).suffix.lower()
    if suffix == ".pt2":
        path = _existing(text)
        check_pt2(path)
        return Pt2File(path)
    if suffix == ".pte":
        path = _existing(text)
        check_pte(path)
        return PteFile(path)
    if suffix == ".py":
        raise BadModelArgument(text, f"Name the function that creates the model, as in {text}:make_model.")
    where, colon, name = text.rpartition(":")
    if colon and where and name.isidentifier():
        if where.lower().endswith(".py"):
            return FileFactory(_existing(where), name)
        if _MODULE.match(where):
            return ModuleFactory(where, name)
    raise BadModelArgument(text, f"Did you mean demo:{text}? Else give {FORMS}." if text in DEMOS else "")


def label_of(text: str) -> str:
    """Return the default name of the model that `text`, a MODEL argument, names, whether or not its file still exists.

    Any other text is returned as it is.

    Raises:
        EtfarmError: the folder of `hf:FOLDER` cannot be read.
    """
    if text.startswith("demo:"):
        return text.removeprefix("demo:")
    if text.startswith("hf:"):
        return resolve(text).label
    if Path(text).suffix.lower() in (".pt2", ".pte"):
        return Path(text).stem
    where, _, name = text.rpartition(":")
    return FileFactory(Path(where), name).label if where.lower().endswith(".py") else text


def check_pt2(path: Path) -> None:
    """Check that `path` can be an archive of torch.export.save: a zip whose directory lists an exported program.

    Raises:
        NOT_A_PT2: it is not; the message says what it seems to be.
    """
    again = "Save it with torch.export.save(torch.export.export(module, example_inputs), path)."
    shown = str(path)
    damaged = error_for("NOT_A_PT2", f"{shown} is a cut-off or damaged .pt2 archive.", "Copy or download it again.", path=shown)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        with path.open("rb") as file:
            if file.read(4) == b"PK\x03\x04":
                raise damaged from None
        raise error_for(
            "NOT_A_PT2", f"{shown} is not a .pt2 archive: {str(error)[:1].lower()}{str(error)[1:]}.", again, path=shown
        ) from None
    # The example inputs are a zip within the zip: zipfile lists that one if the archive is truncated after it.
    if entries and min(entry.header_offset for entry in entries) > 0:
        raise damaged
    whole = {entry.filename for entry in entries}
    names = {name.partition("/")[2] for name in whole}
    if any(re.fullmatch(r"models/[^/]+\.json", name) for name in names):
        return
    if "serialized_exported_program.json" in whole:
        what = "was saved by a torch older than 2.8, or is an edge-dialect program that ExecuTorch saved"
    elif "constants.pkl" in names:
        what = "is a TorchScript archive"
    elif "data.pkl" in names:
        what = "is a torch.save checkpoint"
    elif "archive_format" in names:
        what = "is an archive without an exported program (a package of AOTInductor?)"
    else:
        what = "is a zip file, but not an archive of torch.export.save"
    raise error_for("NOT_A_PT2", f"{shown} {what}.", again, path=shown)


def check_pte(path: Path) -> None:
    """Check that `path` has the header of an ExecuTorch program and the length in the header.

    A program without segments (no delegates, few weights) has no extended header and no length: its truncation is
    detected when the server or a device loads it.

    Raises:
        NOT_A_PTE: the flatbuffer's identifier is not ET12, or its root lies outside.
        TruncatedProgram: the file is shorter than its extended header's program and segments.
    """
    shown = str(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(pte.HEAD_BYTES)
    identifier = pte.identifier_of(head)
    again = "Give the file that ExecuTorch's write_to_file or `etfarm compile -o` wrote."
    if not re.match(pte.FAMILY + rb"\d\d", identifier):
        raise error_for("NOT_A_PTE", f"{shown} is not an ExecuTorch program.", again, path=shown)
    if identifier != pte.IDENTIFIER:
        version = identifier.decode()
        raise error_for(
            "NOT_A_PTE",
            f"{shown} is a program of the format {version}; devices load {pte.IDENTIFIER.decode()}.",
            "Export it again with ExecuTorch 1.x.",
            path=shown,
            format=version,
        )
    expected = struct.unpack_from("<I", head)[0] + 4
    try:
        header = pte.read_extended_header(head)
    except pte.HeaderCutOff:
        raise truncated_program(shown, size, max(expected, pte.HEAD_BYTES)) from None
    if header is not None:
        expected = max(expected, header.file_bytes)
    if size < expected:
        raise truncated_program(shown, size, expected)


def _folder(text: str) -> HuggingFaceFolder:
    path, options = text.removeprefix("hf:"), ""
    if "=" in path.rpartition(":")[2] and not Path(path).is_dir():
        path, _, options = path.rpartition(":")
    if not path:
        raise BadModelArgument(text, "Name the folder, as in hf:models/llama or hf:models/llama:max_context_tokens=512.")
    chosen = parse_options(text, options) if options else {}
    folder = read_folder(Path(path))
    return HuggingFaceFolder(folder.path, tuple(chosen.items()), not folder.has_checkpoint)


def _known_demo(name: str) -> str:
    if name in DEMOS:
        return name
    raise unknown_demo(name, difflib.get_close_matches(name.lower().replace("-", "_"), DEMOS, cutoff=0.4), DEMOS)


def _existing(text: str) -> Path:
    path = Path(text)
    if path.is_file():
        return path
    if path.is_dir():
        raise error_for("MODEL_NOT_FOUND", f"{text} is a folder, not a file.", path=text)
    folder = path.parent
    if not folder.is_dir():
        raise error_for(
            "MODEL_NOT_FOUND", f"There is no file {text}.", f"There is no folder {folder} in {Path.cwd()} either.", path=text
        )
    siblings = [entry.name for entry in folder.iterdir() if entry.suffix == path.suffix]
    near = difflib.get_close_matches(path.name, siblings, n=1)
    remedy = f"Did you mean {folder / near[0]}?" if near else f"Paths start at the working folder, {Path.cwd()}."
    raise error_for("MODEL_NOT_FOUND", f"There is no file {text}.", remedy, path=text)
