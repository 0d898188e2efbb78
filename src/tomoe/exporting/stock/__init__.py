"""The stock classes that hold experts: one row each of what it is called, what it has a place for, and where."""
