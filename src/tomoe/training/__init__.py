"""One resumable loop for anything that is trained, and the folder of a run."""
