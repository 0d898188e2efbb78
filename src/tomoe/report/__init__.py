"""Shows the outcome of a conversion: model card, page, figures, warnings."""
