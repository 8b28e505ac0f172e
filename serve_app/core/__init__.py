"""Decisions without effects: standard library only, time and randomness are arguments."""
