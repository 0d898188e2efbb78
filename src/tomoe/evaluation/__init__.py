"""Measures any model: perplexity, tasks, use of experts, parameters, speed."""
