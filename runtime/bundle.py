"""Reading a bundle: the one way into a deployable model, which trusts nothing it has not hashed."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

from carpus.runtime.errors import BundleError
from carpus.runtime.spec import MANIFEST_NAME, Artefact, FileEntry, Manifest, check_member_path

__all__ = ["MAX_BYTES", "MAX_ENTRIES", "MAX_MANIFEST_BYTES", "MAX_RATIO", "Bundle"]

MAX_ENTRIES = 4096
"""Most entries of a zipped bundle."""
MAX_BYTES = 16 << 30
"""Most bytes that a zipped bundle may unpack to."""
MAX_RATIO = 500
"""Most bytes that one compressed byte may unpack to, for entries over a megabyte."""
MAX_MANIFEST_BYTES = 16 << 20
"""Most bytes of a manifest."""

_CHUNK = 1 << 20
_RATIO_FLOOR = 1 << 20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeDecodeError)
"""What zipfile raises on damaged files of these methods."""
_NO_BUNDLE = f"has no {MANIFEST_NAME}, so it is no bundle; `carpus export CHECKPOINT --out NAME.carpus` makes one"


class Bundle:
    """A verified reader of a bundle, either a folder or a .zip of one.

    The manifest is read and checked on opening. Every other file is checked against its size and sha256 when it is
    read, and all of them by :meth:`verify`. Files that the manifest does not list are never opened.

    Use :meth:`open`; it is a context manager.

    Attributes:
        path: the folder or .zip.
        manifest: the checked manifest.
    """

    def __init__(self, path: Path, source: _Folder | _Zip) -> None:
        self.path = path
        self._source = source
        text = source.read_manifest()
        try:
            self.manifest = Manifest.loads(text)
            if not self.manifest.artefacts:
                raise BundleError(f"{MANIFEST_NAME}.artefacts: expected at least one, got none")
        except BundleError as error:
            raise BundleError(f"bundle {str(path)!r}: {error}") from None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Bundle:
        """Open a bundle.

        Args:
            path: the bundle's folder, or its .zip.

        Raises:
            BundleError: there is none, its manifest is missing, unknown or wrong, or the .zip is not safe to read.
        """
        path = Path(path)
        if path.is_dir():
            return cls(path, _Folder(path))
        if not path.exists():
            raise BundleError(f"bundle {str(path)!r}: no such file or folder; give a .carpus folder or its .zip")
        source = _Zip(path)
        try:
            return cls(path, source)
        except BundleError:
            source.close()
            raise

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the .zip, if it is one; reading is not possible afterwards."""
        self._source.close()

    def artefact(
        self, format: Literal["onnx", "openvino", "tensorrt"], precision: Literal["fp32", "fp16", "int8"] | None = None
    ) -> Artefact:
        """The artefact of this format, and of this precision when one is named; else the first listed.

        Raises:
            BundleError: the bundle has no such artefact; the message lists those it has.
        """
        for artefact in self.manifest.artefacts:
            if artefact.format == format and precision in (None, artefact.precision):
                return artefact
        has = ", ".join(f"{item.format} {item.precision}" for item in self.manifest.artefacts)
        wanted = f"{format} {precision}" if precision else format
        raise BundleError(f"bundle {str(self.path)!r}: has no {wanted} artefact, only {has}")

    def read(self, entry: FileEntry) -> bytes:
        """The bytes of a file, after its size and sha256 were found right.

        Raises:
            BundleError: the file is missing, altered, or reached through a link.
        """
        buffer = io.BytesIO()
        for chunk in self._checked_chunks(entry):
            buffer.write(chunk)
        return buffer.getvalue()

    def verify(self) -> tuple[str, ...]:
        """Check every file that the manifest lists, a chunk at a time.

        Returns:
            The paths that were checked.

        Raises:
            BundleError: a file is missing or altered; the message names it.
        """
        checked = {}
        for entry in self.manifest.files:
            if entry.path not in checked:
                for _ in self._checked_chunks(entry):
                    pass
                checked[entry.path] = entry
        return tuple(checked)

    def _checked_chunks(self, entry: FileEntry) -> Iterator[bytes]:
        where = f"bundle {str(self.path)!r}: {entry.path!r}"
        digest = hashlib.sha256()
        size = 0
        try:
            with self._source.open(check_member_path(entry.path)) as stream:
                while chunk := stream.read(_CHUNK):
                    size += len(chunk)
                    if size > entry.bytes:
                        break
                    digest.update(chunk)
                    yield chunk
        except FileNotFoundError:
            raise BundleError(f"{where} is listed in the manifest but missing; copy the bundle again") from None
        except _UNREADABLE as error:
            raise BundleError(f"{where} cannot be read ({error}); copy the bundle again") from None
        if size != entry.bytes:
            found = "more" if size > entry.bytes else str(size)
            raise BundleError(
                f"{where} was altered: the manifest states {entry.bytes} bytes, the file has {found}; "
                "copy the bundle again"
            )
        if digest.hexdigest() != entry.sha256:
            raise BundleError(
                f"{where} was altered: the manifest states sha256 {entry.sha256[:16]}..., the file has "
                f"{digest.hexdigest()[:16]}...; copy the bundle again"
            )


class _Folder:
    """Files of a bundle that is a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read_manifest(self) -> bytes:
        where = f"bundle {str(self._root)!r}"
        try:
            with self.open(MANIFEST_NAME) as stream:
                data = stream.read(MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError:
            raise BundleError(f"{where}: {_NO_BUNDLE}") from None
        except OSError as error:
            raise BundleError(f"{where}: {MANIFEST_NAME} cannot be read ({error})") from None
        if len(data) > MAX_MANIFEST_BYTES:
            raise BundleError(f"{where}: {MANIFEST_NAME} is larger than {MAX_MANIFEST_BYTES} bytes")
        return data

    def open(self, member: str) -> IO[bytes]:
        path = self._root
        for part in member.split("/"):
            path = path / part
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                raise BundleError(
                    f"bundle {str(self._root)!r}: {member!r} leaves the bundle: {part!r} is a symbolic link; "
                    "put the file itself there"
                )
        if not stat.S_ISREG(mode):
            raise BundleError(f"bundle {str(self._root)!r}: {member!r} is not a regular file")
        return open(path, "rb")

    def close(self) -> None:
        """A folder holds nothing open."""


class _Zip:
    """Files of a bundle that is a .zip, whose directory was found safe."""

    def __init__(self, path: Path) -> None:
        self._where = f"bundle {str(path)!r}"
        try:
            self._zip = zipfile.ZipFile(path)
        except _UNREADABLE as error:
            raise BundleError(f"{self._where}: not a folder and not a .zip that can be read ({error})") from None
        try:
            self._infos = self._check_directory()
        except BundleError:
            self._zip.close()
            raise

    def _check_directory(self) -> dict[str, zipfile.ZipInfo]:
        infos = self._zip.infolist()
        if len(infos) > MAX_ENTRIES:
            raise BundleError(
                f"{self._where}: has {len(infos)} entries, more than {MAX_ENTRIES}: refused as a zip bomb"
            )
        total = 0
        found: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            try:
                name = check_member_path(info.orig_filename.rstrip("/"))
            except BundleError as error:
                raise BundleError(f"{self._where}: {error}") from None
            if info.is_dir():
                continue
            if name in found:
                raise BundleError(f"{self._where}: {name!r} is in the .zip twice")
            if stat.S_ISLNK(info.external_attr >> 16):
                raise BundleError(f"{self._where}: {name!r} leaves the bundle: it is a symbolic link")
            if info.flag_bits & 0x1:
                raise BundleError(f"{self._where}: {name!r} is encrypted; a bundle is not")
            if info.compress_type not in _METHODS:
                raise BundleError(
                    f"{self._where}: {name!r} is packed by method {info.compress_type}; a bundle is stored or deflated"
                )
            total += info.file_size
            packed = max(info.compress_size, 1)
            if total > MAX_BYTES or (info.file_size > _RATIO_FLOOR and info.file_size > packed * MAX_RATIO):
                raise BundleError(
                    f"{self._where}: {name!r} unpacks from {info.compress_size} to {info.file_size} bytes "
                    f"({total} so far), beyond {MAX_RATIO} to 1 or {MAX_BYTES} in all: refused as a zip bomb"
                )
            found[name] = info
        return found

    def read_manifest(self) -> bytes:
        prefix = ""
        if MANIFEST_NAME not in self._infos:
            tops = {name.partition("/")[0] for name in self._infos}
            prefix = f"{next(iter(tops))}/" if len(tops) == 1 else ""
        info = self._infos.get(prefix + MANIFEST_NAME)
        if info is None:
            raise BundleError(f"{self._where}: {_NO_BUNDLE}")
        if info.file_size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{self._where}: {MANIFEST_NAME} is larger than {MAX_MANIFEST_BYTES} bytes")
        self._infos = {name[len(prefix) :]: item for name, item in self._infos.items()}
        try:
            return self._zip.read(info)
        except _UNREADABLE as error:
            raise BundleError(f"{self._where}: {MANIFEST_NAME} cannot be read ({error})") from None

    def open(self, member: str) -> IO[bytes]:
        if member not in self._infos:
            raise FileNotFoundError(member)
        return self._zip.open(self._infos[member])

    def close(self) -> None:
        self._zip.close()
