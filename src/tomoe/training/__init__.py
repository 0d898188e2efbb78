"""One resumable loop for any training, and the folder of a run."""
