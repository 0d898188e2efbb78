"""Tells what came of a conversion: model card, page, figures, warnings."""
