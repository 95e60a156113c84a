"""A detector as an ONNX graph: lean, dynamic in the batch, readable by every runtime of the last years.

Opset 18 and IR version 8. PyTorch's exporter writes opset 18 natively (a newer opset is reached by a converter on top
of it), it has LayerNormalization and GridSample, and whatever runs ONNX since 2023 reads it: ONNX Runtime from 1.14,
OpenVINO from 2023.0, TensorRT from 8.6. Nothing in these graphs needs a newer operator; IR 8 is the version that
belongs to opset 18, and the newer ones only add function overloads and 4-bit types.

Deformable attention is exported as GridSample. Measured for this network's sizes, it is the fastest form of standard
operators on both runtimes: at Atto's (100 queries, 20x20 and 10x10 maps) a Gather of the four corners takes 1.7 to 2.2
times as long and a product with dense hat functions 2.4 to 3.6 times. A fused operator would replace
``carpus.models.deimv2.deformable.weighted_samples``, which holds all of it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor, nn

from carpus.runtime.errors import BackendError

__all__ = ["INPUT", "IR_VERSION", "OPSET", "OUTPUTS", "export_onnx", "with_metadata"]

OPSET = 18
"""Opset of the default domain; no other domain is used."""
IR_VERSION = 8
"""Version of the ONNX file format."""
INPUT = "images"
"""Name of the graph's input, (N, 3, H, W) float32."""
OUTPUTS = ("pred_logits", "pred_boxes")
"""Names of the graph's outputs, (N, Q, C) and (N, Q, 4)."""

_MAX_BATCH = 65536
_FOLD_LIMIT = 1 << 28  # elements; weights are meant to be folded, whatever their size


class _Graph(nn.Module):
    """The detector with positional tensors in and out, which is what a graph has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        outputs = self.module(images)
        return tuple(outputs[name] for name in OUTPUTS)


def export_onnx(module: nn.Module, input_size: tuple[int, int]) -> onnx.ModelProto:
    """Export a detector in the form it is to run in.

    Args:
        module: maps (N, 3, H, W) to {"pred_logits", "pred_boxes"}; put into its deployed form before.
        input_size: (height, width) of the input [px]; they are fixed in the graph, the batch is not.

    Returns:
        The model, checked, without metadata.

    Raises:
        BackendError: the module cannot be exported, or the graph it gives is not what runtimes were promised.
    """
    images = torch.zeros(2, 3, *input_size)
    graph = _Graph(module).eval()
    with _quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                graph,
                (images,),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("N", min=1, max=_MAX_BATCH)},),
                input_names=[INPUT],
                output_names=list(OUTPUTS),
                opset_version=OPSET,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise BackendError(f"torch {torch.__version__} cannot export this network to ONNX: {error}") from error
    if program is None:
        raise BackendError(
            f"torch.onnx.export of torch {torch.__version__} returned no program; use torch 2.9 or newer"
        )
    model = program.model
    _simplify(model)
    proto = ir.serde.serialize_model(model)
    _check(proto)
    return proto


def with_metadata(model: onnx.ModelProto, metadata: Mapping[str, str]) -> bytes:
    """The file's bytes, with key and value strings in ``metadata_props`` (replacing what is there)."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    onnx.helper.set_model_props(copy, dict(metadata))
    return copy.SerializeToString(deterministic=True)


def _simplify(model: ir.Model) -> None:
    """Fold what is constant, drop what is unused and every trace of the exporting machine's source files."""
    onnxscript.optimizer.fold_constants(
        model, input_size_limit=_FOLD_LIMIT, output_size_limit=_FOLD_LIMIT, onnx_shape_inference=False
    )
    onnxscript.optimizer.remove_unused_nodes(model)
    _spell_rms_norms(model.graph)
    graph = model.graph
    for node in graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None
    graph.metadata_props.clear()
    graph.doc_string = None
    graph.name = "detector"
    model.metadata_props.clear()
    model.doc_string = None
    model.ir_version = IR_VERSION
    model.producer_name = "carpus"
    model.producer_version = f"torch {torch.__version__.split('+')[0]}"


def _spell_rms_norms(graph: ir.Graph) -> None:
    """Spell root-mean-square norms as runtimes look for them: x / sqrt(mean(x^2) + eps), with Pow and Div.

    PyTorch writes x * x and a product with the reciprocal. OpenVINO recognises that as one norm, ONNX Runtime does not
    and would run seven kernels in place of one SimplifiedLayerNormalization.
    """
    two = ir.Value(name="rms_norm_exponent", const_value=ir.tensor(np.array(2.0, np.float32), name="rms_norm_exponent"))
    two.shape, two.dtype = ir.Shape([]), ir.DataType.FLOAT
    for node in list(graph):
        if node.op_type != "Reciprocal" or node.inputs[0] is None:
            continue
        root = node.inputs[0].producer()
        uses = list(node.outputs[0].uses())
        if root is None or root.op_type != "Sqrt" or len(uses) != 1 or uses[0].node.op_type != "Mul":
            continue
        product, index = uses[0].node, uses[0].idx
        dividend = product.inputs[1 - index]
        square = _square_of(dividend, root)
        if square is None:
            continue
        if two.name not in graph.initializers:
            graph.register_initializer(two)
        square.op_type = "Pow"
        square.replace_input_with(1, two)
        product.op_type = "Div"
        product.replace_input_with(0, dividend)
        product.replace_input_with(1, node.inputs[0])
        graph.remove(node, safe=True)


def _square_of(value: ir.Value | None, root: ir.Node) -> ir.Node | None:
    """The node that squares ``value`` when ``root`` is sqrt(mean(value * value) + eps)."""
    shifted = root.inputs[0].producer() if root.inputs[0] is not None else None
    if shifted is None or shifted.op_type != "Add":
        return None
    for item in shifted.inputs:
        mean = item.producer() if item is not None else None
        if mean is not None and mean.op_type == "ReduceMean" and mean.inputs[0] is not None:
            square = mean.inputs[0].producer()
            if square is not None and square.op_type == "Mul" and all(found is value for found in square.inputs):
                return square
    return None


def _check(model: onnx.ModelProto) -> None:
    """Hold the graph to what the module's docstring promises."""
    graph = model.graph
    domains = {entry.domain: entry.version for entry in model.opset_import}
    if domains.get("") != OPSET or {node.domain for node in graph.node} - {""} or model.functions:
        raise BackendError(
            f"the exporter wrote operator sets {domains} and {len(model.functions)} functions; expected opset {OPSET} "
            "and nothing else"
        )
    names = [value.name for value in graph.input], [value.name for value in graph.output]
    if names != ([INPUT], list(OUTPUTS)):
        raise BackendError(f"the exporter named inputs and outputs {names}; expected {([INPUT], list(OUTPUTS))}")
    # Branches are there when a network asks for them, to leave out experts.
    leftover = [node.op_type for node in graph.node if node.op_type in ("Shape", "Size", "NonZero", "Loop")]
    if leftover:
        raise BackendError(
            f"the graph still computes shapes at run time ({', '.join(sorted(set(leftover)))}); the network's forward "
            "must use fixed sizes only"
        )
    onnx.checker.check_model(model, full_check=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's notes on every pass and every deprecation inside torch off the terminal.

    They come by the thousand where the application logs at INFO, and making them up takes longer than the export.
    """
    loggers = [logging.getLogger(name) for name in ("torch", "torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
