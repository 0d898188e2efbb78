"""What models write: many continuations at once, programs that are run, word problems, loops."""
