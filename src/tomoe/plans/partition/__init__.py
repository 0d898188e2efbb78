"""Divides the neurons of every layer: activations, layouts that meet a budget, routers, errors, and the plan of it all."""
