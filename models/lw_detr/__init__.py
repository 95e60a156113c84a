"""LW-DETR: a plain ViT with window-major attention, a projector and a short deformable decoder."""
