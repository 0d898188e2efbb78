"""Every key of a conversion and of a fine-tuning, with its default."""
