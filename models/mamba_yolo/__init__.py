"""Mamba-YOLO: state-space backbone and neck before a decoupled head."""
