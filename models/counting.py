"""Parameters and arithmetic of a network, counted from its shapes.

The network runs once on torch's meta device, where tensors have shapes and no numbers. Convolutions, linear maps and
matrix products are counted as they are called, a multiply-accumulate as two operations. What costs little next to them
(norms, activations, sums) is passed through without being computed, so that the largest network takes about a second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from carpus.models.mamba_yolo.ss2d import SS2D
from carpus.models.yolo_master.moe import EfficientSparseMoE, ModularRouterExpertMoE
from carpus.models.yolo_master.routing import SpatialRouter

__all__ = ["SCAN_OPERATIONS", "Count", "count", "shapes_only"]

SCAN_OPERATIONS = 7
"""Operations of the selective scan per step, channel and state: dt A, its exponential, (dt u) B, decay times state plus
that (2), state times C summed up (2)."""


class Count(NamedTuple):
    """Operations of one image's forward pass, in 1e9, and what some authors' counters count besides.

    Attributes:
        layers: convolutions and linear maps.
        products: matrix products outside layers: between tokens, and with the weights of a scan's projections.
        scan: the recurrence of the selective scan, which is no matrix product; ``SCAN_OPERATIONS`` each.
        transposed: the part of ``layers`` in transposed convolutions.
        router: the part of ``layers`` in routers that pool their input first.
        softmax: numbers that pass a softmax.
        norms: numbers that pass a norm.
    """

    layers: float = 0.0
    products: float = 0.0
    scan: float = 0.0
    transposed: float = 0.0
    router: float = 0.0
    softmax: float = 0.0
    norms: float = 0.0

    @property
    def gflops(self) -> float:
        """Layers and products: what is usually meant by a network's GFLOPs."""
        return self.layers + self.products


@contextmanager
def shapes_only() -> Iterator[None]:
    """Networks built inside have shapes and no numbers, and take no time for filling them."""
    with torch.device("meta"), _Unfilled():
        yield


def count(model: nn.Module, input_size: tuple[int, int]) -> Count:
    """Operations of one image's forward pass.

    Of a mixture's experts, as many count as are chosen for an image, each at the experts' mean.

    Args:
        model: in eval mode, built under `shapes_only`.
        input_size: (height, width) [px].
    """
    seen: Counter[str] = Counter()
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, SS2D) and module.kind == "s6":
                stack.enter_context(_watched(module, seen, _count_scan))
            elif isinstance(module, SpatialRouter):
                stack.enter_context(_watched(module, seen, _count_router))
            elif isinstance(module, (EfficientSparseMoE, ModularRouterExpertMoE)) and module.config.top_k is not None:
                # all experts run without numbers to choose by; the share of those not chosen is taken off again
                off = 1.0 - module.config.top_k / len(module.experts)
                for expert in module.experts:
                    stack.enter_context(_watched(expert, seen, _left_out(off)))
        with torch.inference_mode(), _Counting(seen):
            model(torch.zeros(1, 3, *input_size, device="meta"))
    return Count(**{name: seen[name] / 1e9 for name in Count._fields})


_Watch = Callable[[nn.Module, Tensor, Counter[str], Counter[str]], None]
"""(module, its input, counts before it ran, counts so far, to be added to)."""


@contextmanager
def _watched(module: nn.Module, seen: Counter[str], watch: _Watch) -> Iterator[None]:
    """Call ``watch`` after every run of a module."""
    before: list[Counter[str]] = []
    hooks = (
        module.register_forward_pre_hook(lambda *_: before.append(seen.copy())),
        module.register_forward_hook(lambda run, inputs, _: watch(run, inputs[0], before.pop(), seen)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _count_scan(module: nn.Module, x: Tensor, before: Counter[str], seen: Counter[str]) -> None:
    states: Any = module.A_logs
    seen["scan"] += SCAN_OPERATIONS * x.shape[2] * x.shape[3] * states.numel()


def _count_router(module: nn.Module, x: Tensor, before: Counter[str], seen: Counter[str]) -> None:
    seen["router"] += seen["layers"] - before["layers"]


def _left_out(share: float) -> _Watch:
    def watch(module: nn.Module, x: Tensor, before: Counter[str], seen: Counter[str]) -> None:
        for name in ("layers", "norms"):
            seen[name] -= round(share * (seen[name] - before[name]))

    return watch


def _conv(seen: Counter[str], out: Tensor, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    seen["layers"] += 2 * out.numel() * weight[0].numel()


def _conv_transpose(seen: Counter[str], out: Tensor, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    operations = 2 * x.numel() * weight[0].numel()
    seen["layers"] += operations
    seen["transposed"] += operations


def _linear(seen: Counter[str], out: Tensor, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    seen["layers"] += 2 * x.numel() * weight.shape[0]


def _matmul(seen: Counter[str], out: Tensor, left: Tensor, right: Tensor) -> None:
    if right.dim() > 1:  # a weighted sum is none of the products that torch's counter counts
        seen["products"] += 2 * out.numel() * left.shape[-1]


def _attention(seen: Counter[str], out: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> None:
    scores = query[..., 0].numel() * key.shape[-2]
    seen["products"] += 2 * scores * (query.shape[-1] + out.shape[-1])
    seen["softmax"] += scores


_COUNTED: Mapping[Any, Callable[..., None]] = MappingProxyType(
    {
        F.conv2d: _conv,
        F.conv_transpose2d: _conv_transpose,
        F.linear: _linear,
        F.scaled_dot_product_attention: _attention,
        **dict.fromkeys(
            (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm), _matmul
        ),
    }
)


def _arange(*bounds: float, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    whole = all(isinstance(bound, int) for bound in bounds)
    return torch.empty(math.ceil((stop - start) / step), dtype=dtype or (torch.int64 if whole else None), device="meta")


_SHAPED: Mapping[Any, Callable[..., Tensor]] = MappingProxyType(
    {
        torch.arange: _arange,
        F.linear: lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[0]),
        F.grid_sample: lambda x, grid, *_, **__: x.new_empty(*x.shape[:2], *grid.shape[1:-1]),
        # the images that chose an expert: all, as far as shapes can tell
        torch.Tensor.nonzero: lambda x: x.new_empty(x.numel(), x.dim(), dtype=torch.int64),
    }
)
"""Shapes of what torch would take long to find them for."""
_NORMS = frozenset({F.batch_norm, F.layer_norm, F.group_norm})
_SOFTMAX = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax})
_SUM_NAMES = ("add", "sub", "mul", "div", "__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__")
_SUMS = frozenset(getattr(of, name) for of in (torch, Tensor) for name in _SUM_NAMES if hasattr(of, name))
_MAP_NAMES = (
    "relu",
    "sigmoid",
    "exp",
    "sqrt",
    "rsqrt",
    "square",
    "tanh",
    "sin",
    "cos",
    "neg",
    "abs",
    "clamp",
    "cumsum",
)
_UNCHANGED = frozenset(
    {F.silu, F.gelu, F.relu, F.softplus, *(getattr(of, name) for of in (torch, Tensor) for name in _MAP_NAMES)}
)


def _same(func: Any, args: Any) -> Tensor | None:
    """The argument that is the result as far as shapes can tell, if one is."""
    if func in _UNCHANGED:
        return args[0] if args[0].is_floating_point() else None
    return _whole(*args[:2]) if func in _SUMS else None


class _Unfilled(TorchFunctionMode):
    """Leaves out what only writes into a tensor, and passes through what only keeps the shape."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.endswith("_") and name != "requires_grad_" and not name.endswith("__") and (args or "tensor" in kwargs):
            return args[0] if args else kwargs["tensor"]
        if func is torch.arange and "device" not in kwargs:
            return _arange(*args, **kwargs)
        same = _same(func, args) if args and isinstance(args[0], Tensor) and args[0].is_meta else None
        return func(*args, **kwargs) if same is None else same


class _Counting(TorchFunctionMode):
    """Counts what is called, and passes through what only keeps the shape."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS or func in _SOFTMAX:
            self._seen["norms" if func in _NORMS else "softmax"] += args[0].numel()
            return args[0]
        if (same := _same(func, args)) is not None:
            return same
        shaped = _SHAPED.get(func)
        out = func(*args, **kwargs) if shaped is None else shaped(*args, **kwargs)
        if (counted := _COUNTED.get(func)) is not None:
            counted(self._seen, out, *args, **kwargs)
        return out


def _whole(a: Any, b: Any) -> Tensor | None:
    """The argument that has the shape and type of the two combined, if one has."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a if isinstance(a, Tensor) and a.is_floating_point() else None
    if a.dtype is not b.dtype:
        return None
    return next((x for x, y in ((a, b), (b, a)) if _spreads(y.shape, x.shape)), None)


def _spreads(shape: torch.Size, over: torch.Size) -> bool:
    """Whether a tensor of a shape, combined with one of the other, is broadcast to the other."""
    if len(shape) > len(over):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(over), strict=False))
