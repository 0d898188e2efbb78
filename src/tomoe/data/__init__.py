"""Text as token sequences: its sources, sampling from the model, the corpus of a run, the text that models are measured on."""
