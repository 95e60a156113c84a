"""The form of a trained LW-DETR that is exported: one query group, norms folded away, positions resized once."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from carpus.models.lw_detr.model import LWDETR
from carpus.models.lw_detr.projector import ConvX
from carpus.models.lw_detr.resnet import BasicBlock, Bottleneck, ResNet
from carpus.models.lw_detr.vit import ViT

__all__ = ["deploy"]


def deploy(model: LWDETR, *, fuse: bool = True) -> LWDETR:
    """A copy for inference at the configured input size that computes the same outputs; it can no longer be trained.

    Args:
        model: trained network, left as it is.
        fuse: fold BatchNorms into their convolutions and fix the position embedding; without it only the query groups
            of training are dropped, for comparison with published parameter counts.

    Returns:
        The copy, in eval mode, without gradients.
    """
    slim = copy.deepcopy(model).eval().requires_grad_(False)
    queries = slim.config.decoder.num_queries
    for table in (slim.refpoint_embed, slim.query_feat):
        table.weight = nn.Parameter(table.weight[:queries].clone(), requires_grad=False)
        table.num_embeddings = queries
    transformer = slim.transformer
    for name in ("enc_output", "enc_output_norm", "enc_out_bbox_embed", "enc_out_class_embed"):
        setattr(transformer, name, getattr(transformer, name)[:1])
    slim.config = replace(slim.config, decoder=replace(slim.config.decoder, num_groups=1))
    if fuse:
        for module in slim.modules():
            if isinstance(module, (ConvX, ResNet, BasicBlock, Bottleneck)):
                module.fuse()
        encoder = slim.get_submodule("backbone.0.encoder")
        if isinstance(encoder, ViT):
            patch = encoder.config.patch_size
            encoder.fix_positions(slim.config.input_size[0] // patch, slim.config.input_size[1] // patch)
            encoder.pos_embed = nn.Parameter(torch.empty(0), requires_grad=False)
    return slim
