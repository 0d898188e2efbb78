"""The stock classes with experts: one row each with its name, what it supports, and its tensor names."""
