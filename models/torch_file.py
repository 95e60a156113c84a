"""Reading files of ``torch.save`` without executing code from them."""

from __future__ import annotations

import argparse
import hashlib
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from carpus.runtime.errors import DataError

__all__ = ["check_torch_file", "file_sha256", "load_plain"]


def check_torch_file(path: Path) -> None:
    """Refuse what is no file of ``torch.save``, before an unpickler answers with whatever error its bytes cause.

    Raises:
        DataError: missing, of another kind, cut off, or a program.
    """
    if not path.is_file():
        raise DataError(f"Checkpoint {path} {'is a directory' if path.is_dir() else 'does not exist'}.")
    with path.open("rb") as file:
        start = file.read(2)
    if start[:1] != b"\x80" and start != b"PK":
        raise DataError(
            f"Checkpoint {path} cannot be read: it is no file of torch.save and no .safetensors, but starts "
            f"with {start!r}. Give a training's best.pt or published weights."
        )
    if start != b"PK":
        return
    if not zipfile.is_zipfile(path):
        raise DataError(f"Checkpoint {path} is cut off; copy it again.")
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise DataError(
                f"Checkpoint {path} is a TorchScript archive, which is a program and not weights; give a file of "
                "weights (a state_dict)."
            )


def load_plain(path: Path) -> Any:
    """Tensors and plain values from a file, onto the CPU; of classes only ``argparse.Namespace``.

    Raises:
        DataError: missing, not written by ``torch.save``, cut off, or holding objects whose reading would run code.
    """
    path = Path(path)
    check_torch_file(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own message advises to let the file run its code; nobody should do that for a detector.
        raise DataError(
            f"Checkpoint {path} cannot be read: it is no file that torch.save wrote, or holds other things than "
            "weights and plain values. Give a file of weights (a state_dict)."
        ) from error
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
        raise DataError(
            f"Checkpoint {path} cannot be read: it is no file that torch.save wrote, or is cut off ({reason})."
        ) from error


def file_sha256(path: Path) -> str:
    """sha256 of a file, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
