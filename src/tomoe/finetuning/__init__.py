"""Improves a converted folder: its weights are trained, or its projections repaired."""
