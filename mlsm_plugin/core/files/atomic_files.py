"""Files that are whole or absent: written under a temporary name, flushed, then renamed.

Temporary names begin with a dot and end with ``.tmp``. They are random, since processes on machines that share a disk
can have the same process number. A process holds a lock on what it writes. The system releases it however the process
ends, so the leftovers of killed processes can be recognized and removed.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import types
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from mlsm_plugin.core.files.output_lock import PathLike as PathLike

logger = logging.getLogger(__name__)

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
_tidied: set[Path] = set()


def temporary_path(path: Path) -> Path:
    """A random temporary name in the folder of ``path``; no other process uses it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


@contextmanager
def atomic_open(path: PathLike, mode: str = "wb", *, keep_existing: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file next to ``path`` and rename it to ``path`` when the block succeeds.

    If the block fails (a full disk, a kill), ``path`` stays as it was; the OSError of a full disk names it. A symbolic
    link stays, and its target is replaced. Leftovers of killed processes are removed when this process first writes to
    the folder. ValueError if the path is a device, a pipe or the like. The ``mode`` is ``"wb"`` or ``"w"`` (UTF-8).

    With ``keep_existing``, if several processes (perhaps on several machines) write the file at the same time, the
    first one wins instead of the last. On a file system without hard links, a file that appears at the same moment is
    replaced.
    """
    _check_not_special(path)
    path = _target_of(path)
    _tidy_once(path.parent)
    while True:
        temporary = temporary_path(path)
        file = open(temporary, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8")  # noqa: SIM115
        try:
            with file:
                if not _locked(file.fileno()) or not os.fstat(file.fileno()).st_nlink:
                    continue  # another process removed the file before it was locked
                yield file
                file.flush()
                os.fsync(file.fileno())
                if not (keep_existing and _linked(temporary, path)):
                    os.replace(temporary, path)  # before the file is closed, which releases its lock
                return
        except OSError as error:
            if error.errno in DISK_IS_FULL and error.filename is None:
                error.filename = str(path)
            raise
        finally:
            temporary.unlink(missing_ok=True)


def _linked(source: Path, target: Path) -> bool:
    """Hard-link ``target`` to ``source`` unless it exists; False if the file system has no hard links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError as error:
        return isinstance(error, FileExistsError)
    return True


def write_npy(path: PathLike, array: np.ndarray) -> None:
    """Write ``array`` as an npy file, atomically.

    numpy writes to a real file without Python's buffer, and does not notice if the last kilobytes no longer fit on
    the disk. With only a ``write`` method, it leaves the writing to Python, which reports the error.
    """
    with atomic_open(path) as file:
        np.save(types.SimpleNamespace(write=file.write), array, allow_pickle=False)


def write_json(path: PathLike, value: object, *, keep_existing: bool = False) -> None:
    """Write ``value`` as indented JSON, atomically; the order of keys is kept.

    A file that already has this content is not written again. Arguments and errors are those of :func:`atomic_open`.
    """
    content = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    if os.path.isfile(path) and Path(path).read_bytes() == content:
        return
    with atomic_open(path, keep_existing=keep_existing) as file:
        file.write(content)


def copy_file(source: PathLike, target: PathLike) -> None:
    """Copy the content of a file, atomically."""
    with open(source, "rb") as reader, atomic_open(target) as file:
        shutil.copyfileobj(reader, file)


def check_output_file(path: PathLike) -> None:
    """Raise ValueError if no file can be written to ``path``; to be called before hours of work."""
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder; name a file in it")
    _check_not_special(path)
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"{Path(path).absolute().parent} does not exist; make it, or choose another place")


def _check_not_special(path: PathLike) -> None:
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{path} is not a regular file; name a file")


def link_file(source: PathLike, target: PathLike) -> None:
    """Hard-link ``target`` to the file ``source``, atomically; copies it if the file system has no hard links.

    Only for files that are replaced and never changed in place.
    """
    target = _target_of(target)
    _tidy_once(target.parent)
    temporary = temporary_path(target)
    try:
        os.link(source, temporary)
    except OSError:
        copy_file(source, target)
        return
    try:
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)  # still there if both already were the same file


def remove_leftovers(directory: Path) -> None:
    """Delete the temporary files and folders in a folder, except those that a running process is writing.

    Deletes nothing if the file system has no locks.
    """
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        for name in [entry.name for entry in entries if LEFTOVER.fullmatch(entry.name)]:
            _remove_unless_locked(directory / name)


def _tidy_once(directory: Path) -> None:
    """Call :func:`remove_leftovers` when this process first writes to a folder."""
    directory = directory.absolute()  # the working directory may change
    if directory not in _tidied:
        _tidied.add(directory)
        remove_leftovers(directory)


def _target_of(path: PathLike) -> Path:
    """The target of a symbolic link, or ``path`` itself."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)


def _locked(descriptor: int) -> bool:
    """Try to lock a file; True if this process now holds the lock, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _remove_unless_locked(leftover: Path) -> None:
    with suppress(OSError):  # it belongs to another user, or is gone
        descriptor = os.open(leftover, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()
        finally:
            os.close(descriptor)


def parse_json(text: str | bytes, repeated: set[str] | None = None) -> Any:
    """Parse JSON. If an object repeats a key, its last value counts, and the key is added to ``repeated``.

    ValueError if the text is not JSON, or is nested too deeply.
    """

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if repeated is not None and len(values) < len(pairs):
            repeated.update(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return values

    try:
        return json.loads(text, object_pairs_hook=checked)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: PathLike) -> Any:
    """Read a JSON file; ValueError names a file that is not JSON. Warns if an object repeats a key."""
    repeated: set[str] = set()
    try:
        value = parse_json(Path(path).read_bytes(), repeated)
    except ValueError as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}); if a step of mlsm wrote it, delete it and run that step again"
        ) from None
    if repeated:
        logger.warning(f"{path}: an object has the key {min(repeated)!r} several times; its last value counts")
    return value


@contextmanager
def atomic_directory(path: PathLike) -> Iterator[Path]:
    """Fill a temporary folder next to ``path`` and move its content into ``path`` when the block succeeds.

    A missing or empty ``path`` appears as a whole. Otherwise files with other names stay, and files with the same names
    are deleted first, so that a kill leaves no mixture of old and new.
    """
    path = _target_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    temporary = temporary_path(path)
    temporary.mkdir()
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        _locked(descriptor)
        yield temporary
        _move(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(descriptor)


def _move(folder: Path, path: Path) -> None:
    """Rename ``folder`` to ``path``, or move its content there."""
    try:
        os.rename(folder, path)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for _ in range(30):  # two processes that finish at once must not mix what they move
            if _locked(descriptor):
                break
            time.sleep(0.1)
        items = sorted(folder.iterdir())
        for item in items:
            existing = path / item.name
            if existing.is_dir() and not existing.is_symlink():
                shutil.rmtree(existing)
            else:
                existing.unlink(missing_ok=True)
        for item in items:
            os.replace(item, path / item.name)
    finally:
        os.close(descriptor)


SAMPLED_CHUNKS = 16  # of a large file
CHUNK_BYTES = 1 << 16
STABLE_NS = 2_000_000_000  # a file that changed this recently may change again without a new time stamp
FileStates = tuple[tuple[str, int, int, int], ...]
_digests: dict[tuple[str, FileStates], str] = {}  # of files that this process has read


def sampled_sha256(path: PathLike) -> str:
    """SHA-256 (hex) of the size and the content of a file; above 1 MiB, only of 16 parts of 64 KiB.

    It tells files apart, but does not notice every change to a large file.
    """
    size = os.path.getsize(path)
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - CHUNK_BYTES)
    with open(path, "rb") as file:
        if size <= SAMPLED_CHUNKS * CHUNK_BYTES:
            digest.update(file.read())
            return digest.hexdigest()
        for number in range(SAMPLED_CHUNKS):
            file.seek(last * number // (SAMPLED_CHUNKS - 1))
            digest.update(file.read(CHUNK_BYTES))
    return digest.hexdigest()


def sha256_of_files(*paths: PathLike) -> str:
    """SHA-256 (hex) of the concatenated contents of ``paths``, remembered by :func:`remembered_digest`."""
    return remembered_digest("contents", paths, lambda: _sha256_of(paths))


def remembered_digest(kind: str, paths: Sequence[PathLike], compute: Callable[[], str]) -> str:
    """A digest of files. ``compute`` is called once in a process unless a size or time of change differs."""
    states = tuple(_state_of(path) for path in paths)
    digest = _digests.get((kind, states))
    if digest is None:
        digest = compute()
        newest = max((changed for *_, changed in states), default=0)
        if time.time_ns() - newest > STABLE_NS:
            _digests[kind, states] = digest
    return digest


def _state_of(path: PathLike) -> tuple[str, int, int, int]:
    """Path, inode, size and time of change, which tell whether a file has changed."""
    status = os.stat(path)
    return os.path.abspath(path), status.st_ino, status.st_size, max(status.st_mtime_ns, status.st_ctime_ns)


def _sha256_of(paths: Sequence[PathLike]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
