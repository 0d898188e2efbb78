"""Refits projections in closed form to the masks of a plan."""
