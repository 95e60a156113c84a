"""Reading files of ``torch.save`` without executing code from them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from carpus.runtime.errors import DataError

__all__ = ["load_plain"]


def load_plain(path: Path) -> Any:
    """Tensors and plain values from a file, onto the CPU.

    Raises:
        DataError: missing, not written by ``torch.save``, cut off, or holding objects whose reading would run code.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"Checkpoint {path} {'is a directory' if path.is_dir() else 'does not exist'}.")
    try:
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
