"""The dense model: where its parts are, how it is loaded and held in memory, and where it comes from."""
