"""Help for tests, ours and those of plug-in authors. Nothing that ships imports it."""
