"""The small library that every package carries: it imports torch and the standard library only."""
