"""Intermediate values of a model by the names that the reference data uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["Recorder", "by_path"]


def by_path(paths: Iterable[str]) -> dict[str, str]:
    """Modules kept under their own paths."""
    return {path: path for path in paths}


class Recorder:
    """Collects outputs of modules by hooks, and whatever the model itself records when it is called as a function.

    Args:
        model: the model that will run.
        paths: path of the wanted module by the name it is kept under.
        pick: (name, module, output) -> what is kept of an output.

    Attributes:
        outputs: what was kept, by name.
        missing: names whose module the model does not have.
    """

    def __init__(
        self, model: nn.Module, paths: Mapping[str, str], pick: Callable[[str, nn.Module, Any], Any] | None = None
    ) -> None:
        self.outputs: dict[str, Any] = {}
        modules = dict(model.named_modules())
        self.missing = [name for name, path in paths.items() if path not in modules]
        self._pick = pick
        self._handles = [
            modules[path].register_forward_hook(self._hook(name)) for name, path in paths.items() if path in modules
        ]

    def _hook(self, name: str) -> Callable[[nn.Module, object, Any], None]:
        def hook(module: nn.Module, args: object, output: Any) -> None:
            self(name, output if self._pick is None else self._pick(name, module, output))

        return hook

    def __call__(self, name: str, value: Any) -> None:
        """Keep a value; of a tensor a copy, as later operations may work in place."""
        self.outputs[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
