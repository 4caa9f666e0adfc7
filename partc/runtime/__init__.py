"""The library that every package contains; it imports torch and the standard library only."""
