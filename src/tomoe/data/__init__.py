"""Text as token sequences: its sources, sampling from the model, the corpus of a run, evaluation text."""
