"""Writing a bundle: complete or not at all."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal

from carpus.runtime.bundle import Bundle
from carpus.runtime.errors import BundleError
from carpus.runtime.spec import MANIFEST_NAME, Artefact, FileEntry, Manifest, check_member_path

__all__ = ["BundleWriter"]

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20


class BundleWriter:
    """Collects files in a hidden folder beside the target and puts the bundle in place when it is complete.

    ::

        with BundleWriter("cups.carpus") as writer:
            onnx = writer.add_artefact("onnx", "fp32", {"model.onnx": onnx_bytes}, opset=17)
            writer.finish(dataclasses.replace(draft, artefacts=(onnx,)))

    Leaving the block after :meth:`finish` moves the bundle into place; an older one stays whole until then. Leaving it
    by an exception, Ctrl-C included, or without :meth:`finish`, leaves the target as it was.

    Args:
        path: target; a name that ends in ".zip" makes a .zip, any other a folder.

    Raises:
        BundleError: the target exists and is not a bundle, so that it must not be replaced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.zipped = self.path.suffix == ".zip"
        self._staging: Path | None = None
        self._entries: dict[str, FileEntry] = {}
        self._manifest: Manifest | None = None
        if self.path.is_dir() and (self.zipped or not self._replaceable()):
            raise BundleError(
                f"bundle {str(self.path)!r}: a folder that is not a bundle is there; name another target or remove it"
            )
        if self.path.is_file() and not self.zipped:
            raise BundleError(f"bundle {str(self.path)!r}: a file is there; name another target or remove it")

    def probe(self) -> None:
        """Find out before long work whether the target can be written.

        Raises:
            BundleError: it cannot.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent)).rmdir()
        except OSError as error:
            raise BundleError(
                f"bundle {str(self.path)!r}: cannot be written there ({error.strerror}); name another target"
            ) from None

    def _replaceable(self) -> bool:
        return (self.path / MANIFEST_NAME).is_file() or not any(self.path.iterdir())

    def __enter__(self) -> BundleWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._staging = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            if self._staging is not None:
                shutil.rmtree(self._staging, ignore_errors=True)
                self._staging = None

    @property
    def staging(self) -> Path:
        """The hidden folder, for tools that write files themselves; follow with :meth:`add_staged`."""
        if self._staging is None:
            raise BundleError("BundleWriter: not open; use it in a with block")
        return self._staging

    def add(self, path: str, content: bytes | os.PathLike[str]) -> FileEntry:
        """Put one file in.

        Args:
            path: relative POSIX path inside the bundle.
            content: its bytes, or a file to copy.

        Raises:
            BundleError: the path leaves the bundle, is the manifest's, or was added before.
        """
        target = self._target(path)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            shutil.copyfile(content, target)
        return self.add_staged(path)

    def add_staged(self, path: str) -> FileEntry:
        """Take in a file that some tool wrote to ``staging / path``."""
        target = self._target(path)
        if target.is_symlink() or not target.is_file():
            raise BundleError(f"BundleWriter: {path!r} is not a regular file in the staging folder")
        digest = hashlib.sha256()
        with target.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        entry = FileEntry(path=path, sha256=digest.hexdigest(), bytes=target.stat().st_size)
        self._entries[path] = entry
        return entry

    def add_artefact(
        self,
        format: Literal["onnx", "openvino", "tensorrt"],
        precision: Literal["fp32", "fp16", "int8"],
        files: Mapping[str, bytes | os.PathLike[str] | None],
        *,
        opset: int | None = None,
        target: str | None = None,
        built_with: str | None = None,
    ) -> Artefact:
        """Put the files of one artefact in, the one to open first at the front; None takes a staged file in."""
        entries = tuple(
            self.add_staged(path) if content is None else self.add(path, content) for path, content in files.items()
        )
        return Artefact(format, precision, entries, opset=opset, target=target, built_with=built_with)

    def finish(self, manifest: Manifest) -> None:
        """State the manifest; the bundle is put in place when the block is left.

        Raises:
            BundleError: the manifest does not list exactly the files that were added.
        """
        if not manifest.artefacts:
            raise BundleError("BundleWriter: the manifest lists no artefact")
        listed = {entry.path: entry for entry in manifest.files}
        for path, entry in self._entries.items():
            if listed.get(path) != entry:
                raise BundleError(f"BundleWriter: {path!r} was added but the manifest does not list it as it is")
        missing = sorted(set(listed) - set(self._entries))
        if missing:
            raise BundleError(f"BundleWriter: the manifest lists {missing[0]!r}, which was not added")
        self._manifest = manifest

    def _target(self, path: str) -> Path:
        check_member_path(path)
        if path == MANIFEST_NAME or path in self._entries:
            raise BundleError(f"BundleWriter: {path!r} is in the bundle already")
        target = self.staging / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _commit(self) -> None:
        if self._manifest is None:
            raise BundleError(f"bundle {str(self.path)!r}: finish(manifest) was not called, so nothing was written")
        (self.staging / MANIFEST_NAME).write_text(self._manifest.dumps(), encoding="utf-8")
        for file in self.staging.rglob("*"):
            if file.is_file() and file.relative_to(self.staging).as_posix() not in {MANIFEST_NAME, *self._entries}:
                file.unlink()
        with Bundle.open(self.staging) as bundle:
            bundle.verify()
        if self.zipped:
            self._commit_zip()
        else:
            self._commit_folder()
        _sync(self.path.parent)

    def _commit_zip(self) -> None:
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent)
        os.close(handle)
        try:
            with zipfile.ZipFile(name, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
                for path in (MANIFEST_NAME, *sorted(self._entries)):
                    info = zipfile.ZipInfo(path, _ZIP_TIME)
                    info.compress_type = zipfile.ZIP_DEFLATED
                    info.create_system = 3
                    info.external_attr = 0o100644 << 16
                    source = self.staging / path
                    info.file_size = source.stat().st_size
                    with source.open("rb") as reader, archive.open(info, "w") as member:
                        shutil.copyfileobj(reader, member, _CHUNK)
            os.chmod(name, 0o644)
            _sync(Path(name))
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _commit_folder(self) -> None:
        self.staging.chmod(0o755)
        for file in self.staging.rglob("*"):
            _sync(file)
        if not self.path.exists():
            os.rename(self.staging, self.path)
        elif not _exchange(self.staging, self.path):
            aside = self.staging.with_suffix(".old")
            os.rename(self.path, aside)
            try:
                os.rename(self.staging, self.path)
            except BaseException:
                os.rename(aside, self.path)
                raise
            shutil.rmtree(aside, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step where the system can (Linux's renameat2); False where it cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network and container file systems cannot sync folders; the rename is still atomic
        if path.is_file():
            raise
    finally:
        os.close(handle)
