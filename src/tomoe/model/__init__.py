"""The dense model: where it comes from, how it is loaded and held in memory, where its parts are."""
