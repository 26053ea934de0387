"""Output files and folders: written whole or not at all, with what made them, and gone on with after a kill."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from attnbalance.errors import OutputError

MARKER = "attnbalance.json"
"""The file that says what a folder holds and how it was made: kind, config, versions."""

PACKAGES = ("attnbalance", "torch", "transformers", "peft", "tokenizers", "datasets", "numpy", "scipy")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole: readers see the old content or the new, never a part."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write JSON whole; numbers that are not finite are refused, since they are no JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict:
    """A JSON object from a file; an empty one where the file is absent or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place, file or folder, when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    remove(temporary)  # what a killed run may have left
    remove(old)
    try:
        yield temporary
        if path.is_dir() and any(path.iterdir()):
            path.rename(old)
            temporary.rename(path)
            remove(old)
        else:
            temporary.replace(path)
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that it holds; what is not there is as good."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def as_folder(out: str | Path) -> Path:
    """The absolute path of an output folder, with "~" and links followed."""
    return Path(out).expanduser().resolve()


def is_finished(out: Path, kind: str, config: Mapping[str, object]) -> bool:
    """True where `out` holds finished work of this kind and config; False where there is nothing yet.

    Raises `OutputError` where it holds something else, naming the settings that differ.
    """
    if out.exists() and not out.is_dir():
        raise OutputError(f"output {out} is a file; name a folder")
    held = [path.name for path in out.iterdir() if not _is_leftover(path)] if out.is_dir() else []
    if not held:
        return False
    marker = read_json(out / MARKER)
    if marker.get("kind") != kind:
        held = f"the result of `{marker['kind']}`" if "kind" in marker else f"other things ({_some(held)})"
        raise OutputError(f"output {out} holds {held}; name a new or empty folder")
    shown = _differing(marker.get("config", {}), _as_json(config))
    if shown:
        raise OutputError(
            f"output {out} holds the result of `{kind}` with other settings: {shown}. Name a new folder, or remove it"
        )
    return True


def open_work(out: Path, kind: str, config: Mapping[str, object]) -> Path:
    """The hidden folder beside `out` in which unfinished work stands, so that a killed run can go on.

    Raises `OutputError` where something was done with another config already, where nothing can be written, and for a
    folder that cannot be put in place in one move at the end: the current one, or a mount point.
    """
    work = _work(out)
    if out == Path.cwd() or out.is_mount():
        what = "a mount point" if out.is_mount() else "the current folder"
        raise OutputError(f"output {out} is {what}; name a folder in it")
    begun = {"kind": f"unfinished {kind}", "config": _as_json(config)}
    found = read_json(work / MARKER)
    if found and found != begun and any(path.name != MARKER for path in work.iterdir()):
        other = _differing(found.get("config", {}), begun["config"]) or f"it is an {found.get('kind')}"
        raise OutputError(
            f"{work} holds unfinished work with other settings: {other}. Go on with those, remove that folder, or "
            "name another --out"
        )
    try:
        if found != begun:
            remove(work)
            work.mkdir(parents=True)
            write_json(work / MARKER, begun)
    except OSError as error:
        raise OutputError(f"cannot write to {work}: {error}") from error
    return work


def close_work(out: Path) -> None:
    """Remove the work folder of a finished `out`, also one that was killed before it could."""
    shutil.rmtree(_work(out), ignore_errors=True)


def provenance() -> dict[str, object]:
    """Versions of what computes: Python, the machine's kind, this package and those it stands on."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {"python": sys.version.split()[0], "machine": platform.platform(), "versions": versions}


def _work(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def _as_json(config: Mapping[str, object]) -> dict[str, object]:
    return json.loads(json.dumps(dict(config)))


def _is_leftover(path: Path) -> bool:
    """Whether a file or folder is what a killed `replacing` leaves."""
    return path.name.startswith(".") and path.suffix in (".tmp", ".old")


def _differing(found: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    """The first settings that differ, in words; empty where none does."""
    differing = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    return "; ".join(
        f"{name} is {_brief(found.get(name))} there, {_brief(wanted.get(name))} here" for name in differing[:5]
    )


def _brief(value: object) -> str:
    """A setting, cut where it is long: enough to tell which it is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _some(names: list[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
