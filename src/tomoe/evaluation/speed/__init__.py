"""Times a dense model and its MoE side by side."""
